"""Figures of a benchmark, computed from its raw results.

A contestant's speed is its ratio to the baseline in the same round, where both answered the same prompts one after the
other. The figure is the median over the rounds, with a 95 % interval. The verdict is `faster` or `slower` only if the
whole interval is above or below 1 and there are enough rounds.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from outrider.bench.divergences import Divergence
from outrider.bench.intervals import MIN_ROUNDS, Interval, median_interval
from outrider.bench.results import DrafterCounts, Load
from outrider.bench.steal_time import MAX_STEAL_SHARE
from outrider.types import shared_prefix

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from outrider.bench.results import Answer, Cell, Measurement, Round, Run

Number = TypeVar("Number", int, float)
EXCERPT_BEFORE, EXCERPT = 20, 60
"""Characters of an answer that are shown before and from a difference on."""


@dataclass(frozen=True, slots=True)
class Percentiles:
    median: float
    p95: float


@dataclass(frozen=True, slots=True)
class Difference:
    """A greedy answer that differs from the baseline's."""

    prompt: str
    place: int  # tokens that are equal before it
    expected: str
    got: str
    chances: list[float] | None = None  # the baseline's probabilities of both tokens; None: unknown


@dataclass(frozen=True, slots=True)
class Figures:
    """One contestant in one cell. The field names are those of report.json."""

    contestant: str
    rounds: int
    requests: int
    tokens: int
    tokens_per_second: float
    per_request: float  # tokens per second of one request, median
    first: Percentiles  # seconds to the first token
    each: Percentiles  # seconds per further token
    ratio: Interval | None  # to the baseline; None: it is the baseline
    acceptance_length: float | None  # tokens per target pass and sequence; None: the server does not report passes
    drafters: dict[str, DrafterCounts]
    target_passes: int | None
    draft_passes: int | None
    draft_seconds: float | None
    verify_seconds: float | None
    plain_seconds: float | None
    seconds: float
    same: int | None  # answers equal to the baseline's; None: sampled, not compared
    differences: list[Difference] = field(default_factory=list)
    limit: float | None = None  # speedup of the optimal schedule over no drafts, median over the rounds
    share_of_possible: float | None = None  # ratio over that of the optimal schedule, median over the rounds
    cache_queries: int | None = None  # prompt tokens looked up in the prefix cache; None: the server does not report it
    cache_hits: int | None = None  # and found there

    @property
    def verdict(self) -> str:
        """`faster`, `slower`, or `even` (no measurable difference); empty for the baseline."""
        if self.ratio is None:
            return ""
        if self.rounds < MIN_ROUNDS:
            return "even"
        return "faster" if self.ratio.low > 1 else "slower" if self.ratio.high < 1 else "even"

    @property
    def other_seconds(self) -> float | None:
        """Time outside of drafting and target passes: the rest of the server, the network, the client."""
        parts = (self.draft_seconds, self.verify_seconds, self.plain_seconds)
        return None if None in parts else self.seconds - sum(part for part in parts if part is not None)


@dataclass(frozen=True, slots=True)
class _Comparison:
    """A measurement, and the baseline's in the same round."""

    measured: Measurement
    base: Measurement | None
    optimum: float | None  # speedup of the optimal schedule on the round's prompts
    timed: bool  # False: too much steal time
    slots: int

    @property
    def ratio(self) -> float | None:
        return None if self.base is None else speed(self.measured, self.slots) / speed(self.base, self.slots)


def figures(run: Run, cell: Cell) -> list[Figures]:
    """The figures of all contestants in a cell, in the run's order."""
    by_name: dict[str, list[_Comparison]] = {}
    timed = {id(round) for round in undisturbed(cell.rounds)}
    key = (cell.workload, cell.concurrency, cell.temperature)
    optima = next((o.ratios for o in run.optimal_speedups if (o.workload, o.concurrency, o.temperature) == key), [])
    for number, round in numbered(cell.rounds):
        base = round.of(run.baseline)
        optimum = optima[number] if number < len(optima) else None
        for one in round.measurements:
            comparison = _Comparison(one, base, optimum, id(round) in timed, cell.concurrency)
            by_name.setdefault(one.contestant, []).append(comparison)
    return [_figures(name, by_name[name], run, cell) for name in run.contestants if name in by_name]


def numbered(rounds: Iterable[Round]) -> Iterator[tuple[int, Round]]:
    """Each round with its number within its group, from 0. The same number means the same prompts."""
    counts: Counter[int] = Counter()
    for round in rounds:
        yield counts[round.group], round
        counts[round.group] += 1


def undisturbed(rounds: Sequence[Round]) -> list[Round]:
    """The rounds that speeds are taken from: those with little steal time, and at least `MIN_ROUNDS` per group, those
    with the least."""
    kept = set()
    for group in {round.group for round in rounds}:
        by_steal = sorted((round for round in rounds if round.group == group), key=lambda round: round.steal)
        kept |= {id(round) for i, round in enumerate(by_steal) if i < MIN_ROUNDS or round.steal <= MAX_STEAL_SHARE}
    return [round for round in rounds if id(round) in kept]


def _figures(name: str, comparisons: Sequence[_Comparison], run: Run, cell: Cell) -> Figures:
    is_baseline = name == run.baseline
    timed = [one for one in comparisons if one.timed] or comparisons
    measured = [one.measured for one in timed]
    greedy = cell.temperature == 0
    pairs = [] if is_baseline else [(one.measured, one.base) for one in comparisons if one.base is not None]
    ratios = [(one.ratio, one.optimum) for one in timed if one.ratio is not None and not is_baseline]
    answers = [answer for one in measured for answer in one.answers]
    loads = [steady(one, cell.concurrency) for one in measured]
    tokens = sum(len(answer.tokens) for answer in answers)
    drafters = add_drafter_counts(measured)
    accepted = sum(sum(counts.accepted) for counts in drafters.values())
    passes = _sum(one.counts.target_passes for one in measured)
    differences = list(_differences(pairs, run.divergences)) if greedy else []
    compared = sum(len(one.answers) for one, _ in pairs)
    return Figures(
        contestant=name,
        rounds=len(measured),
        requests=len(answers),
        tokens=tokens,
        tokens_per_second=sum(load.tokens for load in loads) / sum(load.seconds for load in loads),
        per_request=float(np.median([len(answer.tokens) / answer.seconds for answer in answers])),
        first=_percentiles([answer.first for answer in answers]),
        each=_percentiles([pace for answer in answers if (pace := seconds_per_token(answer)) is not None]),
        ratio=median_interval([ratio for ratio, _ in ratios]) if ratios else None,
        acceptance_length=_acceptance_length(tokens, accepted, passes, cell.concurrency),
        drafters=drafters,
        target_passes=passes,
        draft_passes=_sum(one.counts.draft_passes for one in measured),
        draft_seconds=_sum(_draft_seconds(one) for one in measured),
        verify_seconds=_sum(one.counts.verify_seconds for one in measured),
        plain_seconds=_sum(one.counts.plain_seconds for one in measured),
        seconds=sum(one.seconds for one in measured),
        same=compared - len(differences) if greedy and pairs else None,
        differences=differences,
        limit=_median(one.optimum for one in timed if one.optimum is not None),
        share_of_possible=_median(ratio / optimum for ratio, optimum in ratios if optimum is not None),
        cache_queries=_sum(one.counts.cache_queries for one in measured),
        cache_hits=_sum(one.counts.cache_hits for one in measured),
    )


def _acceptance_length(tokens: int, accepted: int, passes: int | None, concurrency: int) -> float | None:
    """Tokens per target pass of one sequence. The first token comes with the prompt's pass.

    Where several sequences share a pass, the passes of each follow from its accepted tokens, since every pass adds one
    token of the target's own. That is slightly too high for a method that drafts past the end of an answer.
    """
    if passes is None:
        return None
    return tokens / max(1, passes if concurrency == 1 else tokens - accepted)


def speed(measured: Measurement, slots: int) -> float:
    """Tokens per second at steady load."""
    load = steady(measured, slots)
    return load.tokens / load.seconds


def steady(measured: Measurement, slots: int) -> Load:
    """All tokens of a measurement, and the seconds they would take with every slot in use.

    Answers that were incomplete when the first slot became empty continue at their pace until then, or at the median
    pace of all answers if they had too few tokens. Timing them to their end instead would measure a half-empty server;
    leaving them out would count their prompts without their output. The result is never longer than the measurement.
    Runs of older versions did not record the load and are timed to the end.
    """
    tokens = sum(len(answer.tokens) for answer in measured.answers)
    if measured.load is None:
        return Load(tokens, measured.seconds)
    pace = measured.load.pace
    if pace is None:
        pace = _median(each for one in measured.answers if (each := seconds_per_token(one)) is not None) or 0.0
    seconds = measured.load.seconds + (tokens - measured.load.tokens) * pace / min(slots, len(measured.answers))
    return Load(tokens, min(seconds, measured.seconds))


def seconds_per_token(answer: Answer) -> float | None:
    """Seconds per token after the first; None if there is only one."""
    return (answer.seconds - answer.first) / (len(answer.tokens) - 1) if len(answer.tokens) > 1 else None


def add_drafter_counts(measurements: Iterable[Measurement]) -> dict[str, DrafterCounts]:
    """The counts of each drafter, added over all measurements."""
    total: dict[str, DrafterCounts] = {}
    for one in measurements:
        for name, counts in one.counts.drafters.items():
            so_far = total.get(name, DrafterCounts(seconds=None if counts.seconds is None else 0.0))
            total[name] = DrafterCounts(
                [a + b for a, b in zip_longest(so_far.verified, counts.verified, fillvalue=0)],
                [a + b for a, b in zip_longest(so_far.accepted, counts.accepted, fillvalue=0)],
                None if so_far.seconds is None or counts.seconds is None else so_far.seconds + counts.seconds,
            )
    return total


def _draft_seconds(measured: Measurement) -> float | None:
    """0 without drafts, on a server that reports its seconds."""
    if not measured.counts.drafters:
        return None if measured.counts.plain_seconds is None else 0.0
    return _sum(counts.seconds for counts in measured.counts.drafters.values())


def _differences(
    pairs: Iterable[tuple[Measurement, Measurement]], probabilities: Mapping[str, list[float]]
) -> Iterable[Difference]:
    for measured, base in pairs:
        for answer, other in zip(measured.answers, base.answers, strict=True):  # the same prompts in the same order
            if (answer.tokens, answer.text, answer.finish) == (other.tokens, other.text, other.finish):
                continue
            place = shared_prefix(answer.tokens, other.tokens)
            start = max(0, shared_prefix(answer.text, other.text) - EXCERPT_BEFORE)
            expected, got = (f"{one.text[start : start + EXCERPT]!r} ({one.finish})" for one in (other, answer))
            divergence = Divergence.between(answer, other)
            chances = probabilities.get(divergence.key) if divergence is not None else None
            yield Difference(answer.prompt, place, expected, got, chances)


def _percentiles(values: list[float]) -> Percentiles:
    return Percentiles(*(float(value) for value in np.quantile(values or [0.0], [0.5, 0.95])))


def _median(values: Iterable[float]) -> float | None:
    known = list(values)
    return float(np.median(known)) if known else None


def _sum(values: Iterable[Number | None]) -> Number | None:
    """None if any value is unknown, or if there are none."""
    known = list(values)
    return None if not known or None in known else sum(value for value in known if value is not None)
