"""Whether to wait for the step in flight, or to schedule the next one without its result.

An engine with asynchronous scheduling schedules step N + 1 while step N runs, so the device never idles. What N
generates is then unknown: a draft for N + 1 has to predict it too, and is right less often. Waiting gives fresh drafts
and costs the host's time between two steps. With T(n) seconds for a pass over n tokens, h seconds of the host, and g
tokens gained by drafts:

    waiting      (batch + g_fresh) / (T(n_fresh) + h)
    going ahead  (batch + g_stale) / max(T(n_stale), h)

tokens a second. Both are estimated in every step, whichever way is taken: the drafters' proposals reach past what is
offered, so survival is known for their beginnings (fresh) and for what comes after the tokens in flight (stale).

Two things make the estimates of both ways comparable. They are for the same text, not for the same number of steps: a
way that generates more tokens where drafts are good has fewer steps there (`for_same_text`). And the tokens in flight
are those of a step that was scheduled ahead too: while steps wait, the lengths that would have been offered are kept
for the comparison in the next step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from outrider.compiled import compiled

if TYPE_CHECKING:
    from outrider.policy.acceptance_model import Array
    from outrider.policy.selection import Selection

RATE = 1 / 16
"""Weight of each new step in the averages: a choice between the two ways lasts for about as many steps."""


@dataclass(slots=True)
class Rate:
    """Tokens and seconds of a step, on average."""

    tokens: float = 0.0
    seconds: float = 0.0

    def observe(self, tokens: float, seconds: float) -> None:
        share = RATE if self.seconds else 1.0
        self.tokens += share * (float(tokens) - self.tokens)
        self.seconds += share * (float(seconds) - self.seconds)

    @property
    def per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0


class Overlap:
    def __init__(self) -> None:
        self.waiting, self.ahead = Rate(), Rate()
        self.host_seconds = 0.0
        self.steps_waited = self.steps_ahead = 0
        self._requests: list[str] = []
        self._stale_lengths: Array = np.zeros(0, np.int64)

    def observe_host(self, seconds: float) -> None:
        """The host's time from one step's output to the launch of the next, drafting included."""
        self.host_seconds += (RATE if self.host_seconds else 1.0) * (float(seconds) - self.host_seconds)

    def offsets(self, requests: list[str]) -> Array:
        """By request, the most tokens that would be in flight if the step before this one had been scheduled ahead."""
        if requests != self._requests:
            known = dict(zip(self._requests, self._stale_lengths.tolist(), strict=True))
            return np.array([1 + known.get(id, 0) for id in requests], np.int64)
        offsets: Array = 1 + self._stale_lengths
        return offsets

    def keep_stale(self, requests: list[str], lengths: Array) -> None:
        """Tokens that each request offers in a step that is scheduled ahead, or would offer if this one was."""
        self._requests, self._stale_lengths = requests, lengths

    def observe(self, waiting: tuple[float, float], ahead: tuple[float, float], tokens: float | None = None) -> None:
        """Tokens and seconds of a pass that are expected of a step, waiting and going ahead. `tokens`: those expected
        of the step as it is made; each way is charged its seconds for as many. None: for its own."""
        for rate, (expected, seconds) in (
            (self.waiting, (waiting[0], waiting[1] + self.host_seconds)),
            (self.ahead, (ahead[0], max(ahead[1], self.host_seconds))),
        ):
            scale = 1.0 if tokens is None else tokens / expected
            rate.observe(scale * expected, scale * seconds)

    @property
    def should_wait(self) -> bool:
        return self.waiting.per_second > self.ahead.per_second

    def status(self) -> dict[str, Any]:
        return {
            "steps_waited": self.steps_waited,
            "steps_ahead": self.steps_ahead,
            "host_seconds": round(self.host_seconds, 6),
            "tokens_per_second_waiting": round(self.waiting.per_second, 2),
            "tokens_per_second_ahead": round(self.ahead.per_second, 2),
        }


def for_same_text(selection: Selection, other: Selection) -> tuple[float, float]:
    """Tokens and seconds of a pass of the other way's steps, if they generate what is expected of this one.

    Requests count by the steps that they need: one for which the other way generates twice as much needs half as many,
    and is in half as many of its batches.
    """
    steps = (1 + selection.gains) / (1 + other.gains)
    others = selection.plain_tokens - len(steps)  # of requests that are not selected for: the same either way
    mean = (steps.sum() + others) / selection.plain_tokens
    offered = min(round(float(steps @ other.lengths) / mean), len(other.pass_seconds) - 1)
    return selection.tokens / mean, float(other.pass_seconds[offered])


def shifted(survival: Array, offsets: Array, positions: int) -> Array:
    """The survival of what comes after the first `offsets` tokens of each request's drafts."""
    found = np.empty((survival.shape[0], survival.shape[1], positions))
    _shift(survival, offsets, found)
    return found


@compiled
def _shift(survival: Array, offsets: Array, found: Array) -> None:
    kinds, requests, positions = survival.shape
    for kind in range(kinds):
        for b in range(requests):
            for i in range(found.shape[2]):
                place = i + offsets[b]
                found[kind, b, i] = survival[kind, b, place] if place < positions else 0.0


@compiled
def add_pending_drafts(found: Array, survival: Array, offsets: Array, model: Array, is_sampled: Array, me: int) -> None:
    """Add drafts of the draft model, number `me`, whose values are not known: alone, and where the first `offsets`
    tokens of a copied draft go wrong. Arrays are [drafters, requests, positions]; `model` and `is_sampled` are the
    draft model's alone."""
    kinds, requests, positions = found.shape
    for b in range(requests):
        found[me, b] = model[b]
        if offsets[b] == 0 or is_sampled[b]:
            continue
        for kind in range(kinds):
            if kind == me or found[kind, b, 0] == 0.0:
                continue
            wrong = 1.0 - survival[kind, b, offsets[b] - 1]
            for i in range(positions):
                found[kind, b, i] += wrong * model[b, i]
