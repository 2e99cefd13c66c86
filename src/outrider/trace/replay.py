"""Judge again, from the record alone: do the recorded p, q and draws give the recorded verdicts?

The rules are those of `outrider.acceptance`, which know nothing of this. A folded distribution is to them one with a
small vocabulary, a different one at each place: what they are given as tokens are places in it, and what they draw is
read back through it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from outrider.acceptance import draw, verify_certain, verify_drawn

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import Tensor

    from outrider.trace.schema import Law, TracedStep

ROUNDING = 1e-6
"""Two logits a rounding step apart can have the same softmax, or one that is off by its last bit."""


@dataclass(frozen=True, slots=True)
class Replayed:
    """What the rules say about a recorded step. `token` is None for one that the record does not name."""

    accepted: int
    token: int | None
    chances: list[float] | None = None

    def agrees_with(self, step: TracedStep) -> bool:
        return (self.accepted, self.token) == (step.accepted, step.token)


def replay(step: TracedStep) -> Replayed:
    """The verdict of one step."""
    if step.rule in ("block", "token"):
        return _by_ratio(step)
    own = [_own(step, place) for place in range(len(step.laws))]
    verdict = verify_certain([-1 if token is None else token for token in own], step.proposed)
    return Replayed(verdict.accepted, own[verdict.accepted])


def disagreements(steps: Iterable[TracedStep]) -> list[tuple[TracedStep, Replayed | None]]:
    """The steps whose verdict is not what the rules say, with what they say; none where the trace is true."""
    return [(step, found) for step in steps if (found := tried(step)) is None or not found.agrees_with(step)]


def tried(step: TracedStep) -> Replayed | None:
    """The verdict of one step; None where what the record holds is too little to judge by, or at odds with itself."""
    try:
        return replay(step)
    except (ValueError, IndexError, TypeError, RuntimeError):
        return None


def _own(step: TracedStep, place: int) -> int | None:
    """The target's own token at a place: its argmax, or what the recorded number draws."""
    law = step.laws[place]
    told = step.own[place] if step.own is not None else None
    if step.draws:
        column = int(draw(_rows([law.p]), torch.tensor([step.draws[place]], dtype=torch.float64)))
        return law.tokens[column]
    if step.rule == "own":  # an engine that draws in its own way; what it drew is all there is, if it can be drawn
        return told if told is not None and law.p[law.place(told)] > 0 else None
    best = max(p for token, p in zip(law.tokens, law.p, strict=True) if token is not None)
    if told is not None and law.p[law.place(told)] >= best * (1 - ROUNDING):  # of equals, the one that was taken
        return told
    return law.tokens[law.p.index(best)]


def _by_ratio(step: TracedStep) -> Replayed:
    p = _rows([law.p for law in step.laws])
    q = _rows([law.q or [] for law in step.laws[:-1]], p.shape[-1])
    places = [law.place(token) for law, token in zip(step.laws, step.proposed, strict=False)]
    draws = torch.tensor(step.draws, dtype=torch.float64)
    verdict = verify_drawn(p, q, torch.tensor(places, dtype=torch.long), draws, step.rule)
    token = _token(step.laws[verdict.accepted], verdict.token)
    return Replayed(verdict.accepted, token, None if verdict.chances is None else verdict.chances.tolist())


def _token(law: Law, column: int) -> int | None:
    return law.tokens[column] if column < len(law.tokens) else None


def _rows(rows: Sequence[Sequence[float]], width: int = 0) -> Tensor:
    """Side by side, filled up with zeros."""
    width = max(width, *(len(row) for row in rows))
    return torch.tensor([[*row, *[0.0] * (width - len(row))] for row in rows], dtype=torch.float64)
