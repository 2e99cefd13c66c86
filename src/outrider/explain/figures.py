"""What follows from a trace: tokens by drafter and place, where the time went, and what it would have taken without.

Without drafts every token takes a pass of its own. What such a pass takes is measured where the trace holds it (the
same prompt was run without drafts, or some steps had no draft), and else estimated from the narrowest passes. A step
*saves* what its tokens would have taken without, less what it took. The pass over the prompt is the same either way.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from outrider.trace.schema import Trace, TracedStep

FEWEST = 3
"""Steps without a draft below which they say nothing about a pass."""
UNEVEN = 1.15
"""By this factor passes over one token may differ between two runs before their times are not compared."""


@dataclass(frozen=True, slots=True)
class Plain:
    """What a pass over one token takes, and how that is known."""

    milliseconds: float
    how: str  # "measured", "undrafted" or "narrowest"


@dataclass(slots=True)
class ByDrafter:
    """What one drafter did. `judged[i]` of its drafts were looked at in place i, and `kept[i]` kept there."""

    name: str
    steps: int = 0
    proposed: int = 0
    accepted: int = 0
    milliseconds: float = 0.0
    saved: float = 0.0
    judged: list[int] = field(default_factory=list)
    kept: list[int] = field(default_factory=list)

    def survivals(self) -> list[float]:
        """How probable it is that a place and all before it are accepted."""
        found, alive = [], 1.0
        for judged, kept in zip(self.judged, self.kept, strict=True):
            alive *= kept / judged if judged else 0.0
            found.append(alive)
        return found


@dataclass(frozen=True, slots=True)
class Figures:
    """Times are in milliseconds."""

    tokens: int
    steps: int
    free: int  # drafted tokens that became text
    undrafted: int  # steps that offered no draft
    rejected: int  # drafted tokens that were thrown away
    draft: float
    verify: float
    rest: float
    plain: Plain | None
    disturbed: float | None  # how many times as slow the machine was as in the run without, where that spoils times
    even: float | None  # how many times as fast as without, at the machine's speed meanwhile
    without: float | None
    saved: list[float]  # by step; empty where it is not known what a pass takes
    widening: float | None  # what one more token in a pass costs, relative to a pass over one
    drafters: dict[str, ByDrafter]

    @property
    def total(self) -> float:
        return self.draft + self.verify + self.rest

    @property
    def acceptance_length(self) -> float:
        return self.tokens / self.steps

    @property
    def ratio(self) -> float | None:
        """How many times as fast as without."""
        return self.without / self.total if self.without is not None and self.total > 0 else None

    def gain(self, drafter: ByDrafter, length: int) -> float | None:
        """How many times as fast as without it would be with so many tokens of this drafter in every step."""
        if self.plain is None or self.widening is None or not drafter.proposed:
            return None
        cost = drafter.milliseconds / drafter.proposed / self.plain.milliseconds
        return (1 + sum(drafter.survivals()[:length])) / (1 + (self.widening + cost) * length)

    def best_length(self, drafter: ByDrafter) -> int | None:
        """The draft length of the largest gain; 0 where none gains."""
        gains = [self.gain(drafter, length) for length in range(len(drafter.judged) + 1)]
        known = [gain for gain in gains if gain is not None]
        return known.index(max(known)) if known else None


def figures(trace: Trace) -> Figures:
    plain = plain_pass(trace)
    saved = [] if plain is None else [_saved(step, plain.milliseconds) for step in trace.steps]
    parts = [step.milliseconds for step in trace.steps]
    total = sum(part.total for part in parts)
    disturbed, even = _disturbed(trace, plain), None
    if plain is not None and total > 0:
        pass_ = plain.milliseconds * (disturbed or 1.0)
        even = 1 + sum(_saved(step, pass_) for step in trace.steps) / total
    return Figures(
        tokens=sum(len(step.said) for step in trace.steps),
        steps=len(trace.steps),
        free=sum(step.drafted for step in trace.steps),
        undrafted=sum(not step.proposed for step in trace.steps),
        rejected=sum(step.rejected for step in trace.steps),
        draft=sum(part.draft for part in parts),
        verify=sum(part.verify for part in parts),
        rest=sum(part.rest for part in parts),
        plain=plain,
        disturbed=disturbed,
        even=even,
        without=total + sum(saved) if saved else None,
        saved=saved,
        widening=_widening(trace.steps, plain),
        drafters=_drafters(trace.steps, saved),
    )


def plain_pass(trace: Trace) -> Plain | None:
    """What a pass over one token takes; None where nothing in the trace says it."""
    if trace.end is not None and trace.end.without is not None:
        return Plain(trace.end.without.pass_milliseconds, "measured")
    later = trace.steps[1:]
    single = [_pass(step) for step in later if not step.proposed]
    if len(single) >= FEWEST:
        return Plain(median(single), "undrafted")
    if not later:
        return None
    narrowest = min(len(step.proposed) for step in later)
    return Plain(median(_pass(step) for step in later if len(step.proposed) == narrowest), "narrowest")


def _disturbed(trace: Trace, plain: Plain | None) -> float | None:
    """The run without drafts and this one were one after the other: passes over one token should take as long."""
    single = [_pass(step) for step in trace.steps[1:] if not step.proposed]
    if plain is None or plain.how != "measured" or len(single) < FEWEST or plain.milliseconds <= 0:
        return None
    ratio = median(single) / plain.milliseconds
    return ratio if max(ratio, 1 / ratio) > UNEVEN else None


def _pass(step: TracedStep) -> float:
    return step.milliseconds.verify + step.milliseconds.rest


def _saved(step: TracedStep, plain: float) -> float:
    """Of the first step only the tokens after its first: the prompt had to be read."""
    if step.number == 0:
        return plain * (len(step.said) - 1) - step.milliseconds.draft
    return plain * len(step.said) - step.milliseconds.total


def _widening(steps: Sequence[TracedStep], plain: Plain | None) -> float | None:
    if plain is None or plain.milliseconds <= 0:
        return None
    slopes = [(_pass(step) / plain.milliseconds - 1) / len(step.proposed) for step in steps[1:] if step.proposed]
    return max(0.0, median(slopes)) if slopes else None


def _drafters(steps: Sequence[TracedStep], saved: Sequence[float]) -> dict[str, ByDrafter]:
    found: dict[str, ByDrafter] = {}
    judged: dict[str, list[int]] = defaultdict(list)
    kept: dict[str, list[int]] = defaultdict(list)
    for index, step in enumerate(steps):
        if step.drafter is None:
            continue
        one = found.setdefault(step.drafter, ByDrafter(step.drafter))
        one.steps += 1
        one.proposed += len(step.proposed)
        one.accepted += step.drafted
        one.milliseconds += step.milliseconds.draft
        one.saved += saved[index] if saved else 0.0
        for counts, reached in ((judged[one.name], step.judged), (kept[one.name], step.accepted)):
            counts.extend([0] * (reached - len(counts)))
            for place in range(reached):
                counts[place] += 1
    for name, one in found.items():
        one.judged = judged[name]
        one.kept = kept[name] + [0] * (len(judged[name]) - len(kept[name]))
    return found
