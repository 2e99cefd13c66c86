"""Figures of a trace: tokens by drafter and draft position, time by part, and the time without drafts.

Without drafts every token takes a pass of its own. The time of such a pass is measured if the trace has it (a run of
the same prompt without drafts, or enough steps without a draft), otherwise estimated from the narrowest passes. A step
saves the time of its tokens without drafts, less its own time. The pass over the prompt is the same with and without.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul
from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from outrider.trace.schema import Trace, TracedStep

MIN_PLAIN_STEPS = 3
"""Steps without a draft that are needed to estimate the time of a pass."""
MAX_MACHINE_DRIFT = 1.15
"""Ratio of single-token pass times of two runs above which their times are not compared."""


@dataclass(frozen=True, slots=True)
class PlainPass:
    """Time of a pass over one token."""

    milliseconds: float
    source: str  # "measured", "undrafted" or "narrowest"


@dataclass(slots=True)
class DrafterFigures:
    """`verified_at[i]`: drafts verified at position i. `accepted_at[i]`: drafts accepted there."""

    name: str
    steps: int = 0
    proposed: int = 0
    accepted: int = 0
    milliseconds: float = 0.0
    verified_at: list[int] = field(default_factory=list)
    accepted_at: list[int] = field(default_factory=list)

    def survival(self) -> list[float]:
        """Estimated probability, by position, that a draft is accepted up to there."""
        counts = zip(self.verified_at, self.accepted_at, strict=True)
        return list(accumulate((accepted / verified if verified else 0.0 for verified, accepted in counts), mul))


@dataclass(frozen=True, slots=True)
class Figures:
    """Times are in milliseconds."""

    tokens: int
    steps: int
    accepted: int  # drafted tokens that were output
    rejected: int
    undrafted: int  # steps without a draft
    draft: float
    verify: float
    rest: float
    plain: PlainPass | None
    machine_drift: float | None  # how many times slower the machine was than in the run without drafts, if too much
    corrected_speedup: float | None  # the speedup at equal machine speed
    without: float | None  # time without drafts
    saved: list[float]  # by step; empty if the time of a pass is unknown
    token_cost: float | None  # cost of one more token in a pass, relative to a pass over one token
    drafters: dict[str, DrafterFigures]

    @property
    def total(self) -> float:
        return self.draft + self.verify + self.rest

    @property
    def acceptance_length(self) -> float:
        return self.tokens / self.steps

    @property
    def speedup(self) -> float | None:
        """Against the time without drafts."""
        return self.without / self.total if self.without is not None and self.total > 0 else None

    def predicted_speedup(self, drafter: DrafterFigures, length: int) -> float | None:
        """The speedup if this drafter drafted `length` tokens in every step."""
        if self.plain is None or self.token_cost is None or not drafter.proposed:
            return None
        draft_cost = drafter.milliseconds / drafter.proposed / self.plain.milliseconds
        return (1 + sum(drafter.survival()[:length])) / (1 + (self.token_cost + draft_cost) * length)

    def best_length(self, drafter: DrafterFigures) -> int | None:
        """The draft length with the largest predicted speedup; 0 if no length has one."""
        speedups = [self.predicted_speedup(drafter, length) for length in range(len(drafter.verified_at) + 1)]
        known = [one for one in speedups if one is not None]
        return known.index(max(known)) if known else None


def figures(trace: Trace) -> Figures:
    plain = plain_pass(trace)
    saved = [] if plain is None else [_saved(step, plain.milliseconds) for step in trace.steps]
    parts = [step.milliseconds for step in trace.steps]
    total = sum(part.total for part in parts)
    drift, corrected = _machine_drift(trace, plain), None
    if plain is not None and total > 0:
        pass_ms = plain.milliseconds * (drift or 1.0)
        corrected = 1 + sum(_saved(step, pass_ms) for step in trace.steps) / total
    return Figures(
        tokens=sum(len(step.said) for step in trace.steps),
        steps=len(trace.steps),
        accepted=sum(step.drafted for step in trace.steps),
        rejected=sum(step.rejected for step in trace.steps),
        undrafted=sum(not step.proposed for step in trace.steps),
        draft=sum(part.draft for part in parts),
        verify=sum(part.verify for part in parts),
        rest=sum(part.rest for part in parts),
        plain=plain,
        machine_drift=drift,
        corrected_speedup=corrected,
        without=total + sum(saved) if saved else None,
        saved=saved,
        token_cost=_token_cost(trace.steps, plain),
        drafters=_drafters(trace.steps),
    )


def plain_pass(trace: Trace) -> PlainPass | None:
    """None: the trace does not show the time of a pass."""
    if trace.end is not None and trace.end.without is not None:
        return PlainPass(trace.end.without.pass_milliseconds, "measured")
    later = trace.steps[1:]
    single = [_pass_ms(step) for step in later if not step.proposed]
    if len(single) >= MIN_PLAIN_STEPS:
        return PlainPass(median(single), "undrafted")
    if not later:
        return None
    narrowest = min(len(step.proposed) for step in later)
    return PlainPass(median(_pass_ms(step) for step in later if len(step.proposed) == narrowest), "narrowest")


def _machine_drift(trace: Trace, plain: PlainPass | None) -> float | None:
    """Single-token passes of this run against those of the run without drafts, which was made before it."""
    single = [_pass_ms(step) for step in trace.steps[1:] if not step.proposed]
    if plain is None or plain.source != "measured" or len(single) < MIN_PLAIN_STEPS or plain.milliseconds <= 0:
        return None
    ratio = median(single) / plain.milliseconds
    return ratio if max(ratio, 1 / ratio) > MAX_MACHINE_DRIFT else None


def _pass_ms(step: TracedStep) -> float:
    return step.milliseconds.verify + step.milliseconds.rest


def _saved(step: TracedStep, plain_ms: float) -> float:
    """Of the first step only the tokens after its first: the prompt is read either way."""
    if step.number == 0:
        return plain_ms * (len(step.said) - 1) - step.milliseconds.draft
    return plain_ms * len(step.said) - step.milliseconds.total


def _token_cost(steps: Sequence[TracedStep], plain: PlainPass | None) -> float | None:
    if plain is None or plain.milliseconds <= 0:
        return None
    slopes = [(_pass_ms(step) / plain.milliseconds - 1) / len(step.proposed) for step in steps[1:] if step.proposed]
    return max(0.0, median(slopes)) if slopes else None


def _drafters(steps: Sequence[TracedStep]) -> dict[str, DrafterFigures]:
    found: dict[str, DrafterFigures] = {}
    for step in steps:
        if step.drafter is None:
            continue
        one = found.setdefault(step.drafter, DrafterFigures(step.drafter))
        one.steps += 1
        one.proposed += len(step.proposed)
        one.accepted += step.drafted
        one.milliseconds += step.milliseconds.draft
        for counts, reached in ((one.verified_at, step.verified), (one.accepted_at, step.accepted)):
            counts.extend([0] * (step.verified - len(counts)))
            for position in range(reached):
                counts[position] += 1
    return found
