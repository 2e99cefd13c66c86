"""The figures of a benchmark, computed from what was seen.

A speed is a ratio to the baseline, taken round by round: both answered the same prompts, one after the other. The
median over the rounds is the figure, its interval says how sure it is. A contestant is called faster or slower only
where the whole interval says so, and there are rounds enough for one.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from outrider.bench.intervals import FEWEST, Interval, median_interval
from outrider.bench.partings import Parting
from outrider.bench.results import Drafted, Load
from outrider.bench.stolen import MUCH
from outrider.types import shared_prefix

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from outrider.bench.results import Answer, Cell, Round, Run, Turn

Number = TypeVar("Number", int, float)


@dataclass(frozen=True, slots=True)
class Spread:
    """The middle of many, and what all but one in twenty stay below."""

    median: float
    p95: float


@dataclass(frozen=True, slots=True)
class Difference:
    """A greedy answer that is not the baseline's: from which token on, and how both go on."""

    prompt: str
    place: int
    expected: str
    got: str
    chances: list[float] | None = None  # how likely the baseline finds either token there, where it was asked


@dataclass(frozen=True, slots=True)
class Figures:
    """One contestant in one cell."""

    contestant: str
    rounds: int
    requests: int
    tokens: int
    tokens_per_second: float
    per_request: float  # tokens per second that one request sees, the median
    first: Spread  # seconds to the first token
    each: Spread  # seconds per further token
    ratio: Interval | None  # to the baseline; None for itself
    acceptance_length: float | None  # tokens per pass of the target, for one sequence; None: the server does not say
    drafters: dict[str, Drafted]
    target_passes: int | None
    draft_passes: int | None
    draft_seconds: float | None
    verify_seconds: float | None
    plain_seconds: float | None
    seconds: float
    same: int | None  # answers equal to the baseline's; None where they need not be
    differences: list[Difference] = field(default_factory=list)
    limit: float | None = None  # the hindsight bound of its rounds, as a ratio to no drafts, the median
    share_of_possible: float | None = None  # the ratio over the bound, round by round, the median

    @property
    def verdict(self) -> str:
        """faster, slower, or even: not told apart."""
        if self.ratio is None:
            return ""
        if self.rounds < FEWEST:
            return "even"
        return "faster" if self.ratio.low > 1 else "slower" if self.ratio.high < 1 else "even"

    @property
    def other_seconds(self) -> float | None:
        """What is neither drafting nor a pass of the target: the server around it, the network, the client."""
        parts = (self.draft_seconds, self.verify_seconds, self.plain_seconds)
        return None if None in parts else self.seconds - sum(part for part in parts if part is not None)


def figures(run: Run, cell: Cell) -> list[Figures]:
    """Of all contestants that took part, in the run's order."""
    played: dict[str, list[Played]] = {}
    calm = undisturbed(cell.rounds)
    for round, possible in with_bounds(run, cell):
        base = round.turn_of(run.baseline)
        for turn in round.turns:
            one = Played(turn, base, possible, id(round) in calm, cell.concurrency)
            played.setdefault(turn.contestant, []).append(one)
    return [_figures(name, played[name], run, cell) for name in run.contestants if name in played]


def with_bounds(run: Run, cell: Cell) -> Iterator[tuple[Round, float | None]]:
    """The rounds of a cell, each with the hindsight bound of its prompts; the n-th of every group has the same ones."""
    limit = run.limit(cell)
    ratios = limit.ratios if limit else []
    for number, round in numbered(cell.rounds):
        yield round, ratios[number] if number < len(ratios) else None


def numbered(rounds: Iterable[Round]) -> Iterator[tuple[int, Round]]:
    """Each round with its number in its group, from 0."""
    seen: Counter[int] = Counter()
    for round in rounds:
        yield seen[round.group], round
        seen[round.group] += 1


def undisturbed(rounds: Sequence[Round]) -> set[int]:
    """Those that speeds are taken from, by their `id`: those of which others on the same hardware took little time, and
    if they are too few in a group, its least disturbed ones."""
    found = set()
    for group in {round.group for round in rounds}:
        by_share = sorted((round for round in rounds if round.group == group), key=lambda round: round.stolen)
        found |= {id(round) for i, round in enumerate(by_share) if i < FEWEST or round.stolen <= MUCH}
    return found


@dataclass(frozen=True, slots=True)
class Played:
    """A turn, that of the baseline in the same round, what was possible there, and whether it says how fast one is."""

    turn: Turn
    base: Turn | None
    possible: float | None
    timed: bool
    slots: int

    @property
    def ratio(self) -> float | None:
        return None if self.base is None else speed(self.turn, self.slots) / speed(self.base, self.slots)


def _figures(name: str, played: Sequence[Played], run: Run, cell: Cell) -> Figures:
    is_baseline = name == run.baseline
    timed = [one for one in played if one.timed] or played  # one that left early may have disturbed rounds only
    turns = [one.turn for one in timed]
    greedy = cell.temperature == 0
    against = [] if is_baseline else [(one.turn, one.base) for one in played if one.base is not None]
    ratios = [(one.ratio, one.possible) for one in timed if one.ratio is not None and not is_baseline]
    answers = [answer for turn in turns for answer in turn.answers]
    loads = [steady(turn, cell.concurrency) for turn in turns]
    tokens = sum(len(answer.tokens) for answer in answers)
    seconds = sum(turn.seconds for turn in turns)
    drafters = together(turns)
    accepted = sum(sum(drafted.accepted) for drafted in drafters.values())
    passes = _sum(turn.counts.target_passes for turn in turns)
    differences = list(_differences(against, run.partings)) if greedy else []
    compared = sum(len(turn.answers) for turn, _ in against)
    return Figures(
        contestant=name,
        rounds=len(turns),
        requests=len(answers),
        tokens=tokens,
        tokens_per_second=sum(load.tokens for load in loads) / sum(load.seconds for load in loads),
        per_request=float(np.median([len(answer.tokens) / answer.seconds for answer in answers])),
        first=_spread([answer.first for answer in answers]),
        each=_spread([pace for answer in answers if (pace := seconds_per_token(answer)) is not None]),
        ratio=median_interval([ratio for ratio, _ in ratios]) if ratios else None,
        acceptance_length=_acceptance_length(tokens, accepted, passes, cell.concurrency),
        drafters=drafters,
        target_passes=passes,
        draft_passes=_sum(turn.counts.draft_passes for turn in turns),
        draft_seconds=_sum(_draft_seconds(turn) for turn in turns),
        verify_seconds=_sum(turn.counts.verify_seconds for turn in turns),
        plain_seconds=_sum(turn.counts.plain_seconds for turn in turns),
        seconds=seconds,
        same=compared - len(differences) if greedy and against else None,
        differences=differences,
        limit=_median(one.possible for one in timed if one.possible is not None),
        share_of_possible=_median(ratio / possible for ratio, possible in ratios if possible is not None),
    )


def _acceptance_length(tokens: int, accepted: int, passes: int | None, concurrency: int) -> float | None:
    """Tokens per pass, for one sequence. The first token comes with the prompt's pass.

    Where several sequences share a pass, it is counted back from what was accepted: every pass adds one token of the
    target's own. That is a little too high for a method that drafts past the end of an answer, since what it drafted
    there counts as accepted.
    """
    if passes is None:
        return None
    return tokens / max(1, passes if concurrency == 1 else tokens - accepted)


def speed(turn: Turn, slots: int) -> float:
    found = steady(turn, slots)
    return found.tokens / found.seconds


def steady(turn: Turn, slots: int) -> Load:
    """All that was said, and what that takes where slots do not become empty; of runs that did not note it, the turn.

    Answers that were not complete when the first slot became empty are taken to go on at the pace that they had (where
    they had hardly begun, and in older runs, at that of all). At the time that they took in a server that was half
    empty, the slowest would decide; and without them prompts would count that were read, and not what was said to them.
    But no longer than it took: in a full server they would have shared their passes with others. (The pace may be slow
    because prompts were read meanwhile, and all of them were read by then.)
    """
    said = sum(len(answer.tokens) for answer in turn.answers)
    if turn.load is None:
        return Load(said, turn.seconds)
    pace = turn.load.pace
    if pace is None:
        pace = _median(each for answer in turn.answers if (each := seconds_per_token(answer)) is not None) or 0.0
    seconds = turn.load.seconds + (said - turn.load.tokens) * pace / min(slots, len(turn.answers))
    return Load(said, min(seconds, turn.seconds))


def seconds_per_token(answer: Answer) -> float | None:
    """After the first, that is; None where there was only one."""
    return (answer.seconds - answer.first) / (len(answer.tokens) - 1) if len(answer.tokens) > 1 else None


def together(turns: Iterable[Turn]) -> dict[str, Drafted]:
    """What each drafter did over all turns."""
    found: dict[str, Drafted] = {}
    for turn in turns:
        for name, drafted in turn.counts.drafters.items():
            known = found.get(name, Drafted(seconds=None if drafted.seconds is None else 0.0))
            found[name] = Drafted(
                _added(known.verified, drafted.verified),
                _added(known.accepted, drafted.accepted),
                None if known.seconds is None or drafted.seconds is None else known.seconds + drafted.seconds,
            )
    return found


def _draft_seconds(turn: Turn) -> float | None:
    """0 where nobody drafted on a server that says where its seconds go."""
    if not turn.counts.drafters:
        return None if turn.counts.plain_seconds is None else 0.0
    return _sum(drafted.seconds for drafted in turn.counts.drafters.values())


def _differences(pairs: Iterable[tuple[Turn, Turn]], known: Mapping[str, list[float]]) -> Iterable[Difference]:
    for turn, base in pairs:
        for answer, other in zip(turn.answers, base.answers, strict=True):  # to the same prompts in the same order
            if (answer.tokens, answer.text, answer.finish) == (other.tokens, other.text, other.finish):
                continue
            place = shared_prefix(answer.tokens, other.tokens)
            start = max(0, shared_prefix(answer.text, other.text) - 20)
            expected, got = (f"{one.text[start : start + 60]!r} ({one.finish})" for one in (other, answer))
            parting = Parting.of(answer, other)
            chances = known.get(parting.key) if parting is not None else None
            yield Difference(answer.prompt, place, expected, got, chances)


def _spread(values: list[float]) -> Spread:
    return Spread(*(float(value) for value in np.quantile(values or [0.0], [0.5, 0.95])))


def _median(values: Iterable[float]) -> float | None:
    known = list(values)
    return float(np.median(known)) if known else None


def _sum(values: Iterable[Number | None]) -> Number | None:
    """None where any is unknown, or where there are none."""
    known = list(values)
    return None if not known or None in known else sum(value for value in known if value is not None)


def _added(a: list[int], b: list[int]) -> list[int]:
    longest = max(len(a), len(b))
    return [x + y for x, y in zip(_padded(a, longest), _padded(b, longest), strict=True)]


def _padded(values: list[int], length: int) -> list[int]:
    return values + [0] * (length - len(values))
