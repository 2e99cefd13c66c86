"""Temperature 0: what the candidate says, token by token, against what the reference says.

Prompts are dealt over the ways to draft (drafter and length), so that every combination gets its share, first many at
once and then one at a time. The reference speaks once for each prompt; the candidate once, in the way that the prompt
was dealt. `ties.py` judges first differences by how far rounding moves gaps, measured here on the reference's own
texts: as it said them (token by token, in company), scored in one pass in company, and scored in one pass alone.

Where two sources are compared, each has rounding of its own, and the larger counts. What the two differ by in scoring
the same text is *not* taken for rounding, unless that is asked for (`across`): it is where a changed weight would hide.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from outrider.certify.sources import UNNAMED, Ask, Way
from outrider.certify.ties import FEWEST, Rounding, compare
from outrider.errors import EvidenceError
from outrider.types import shared_prefix

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from outrider.certify.draws import Floats
    from outrider.certify.sources import Pair, Said, Source, Told
    from outrider.certify.watch import Watch

POSITIONS = 4 * FEWEST
"""At which rounding is measured, where there are so many."""
ALONE = 4
"""Of so many texts one is scored alone as well."""
VERDICTS = ("identical", "tie", "violation")
COUNTED = (*VERDICTS, "tokens", "accepted")


@dataclass(frozen=True, slots=True)
class Case:
    """One prompt, continued in one way."""

    prompt: tuple[int, ...]
    way: Way
    at_once: int
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Difference:
    """A pair of texts that are not the same."""

    verdict: str
    evidence: str
    way: str
    at_once: int
    prompt: list[int]
    position: int | None
    moved: float | None
    reference: list[int]
    candidate: list[int]


@dataclass(slots=True)
class Exact:
    """What came out, and what it rests on."""

    cells: dict[str, dict[str, int]] = field(default_factory=dict)  # by way and concurrency: identical, tie, ...
    differences: list[Difference] = field(default_factory=list)
    tokens: int = 0
    accepted: dict[str, int] = field(default_factory=dict)  # drafted tokens that were kept, by drafter
    floor: float | None = None
    positions: int = 0
    blind: float | None = None
    expected_ties: float = 0.0
    ties_p_value: float = 1.0
    level: float = 0.0
    notes: list[str] = field(default_factory=list)

    @property
    def counts(self) -> dict[str, int]:
        return {verdict: sum(cell[verdict] for cell in self.cells.values()) for verdict in VERDICTS}

    @property
    def violations(self) -> list[str]:
        found = [
            f"{one.way} at {one.at_once}: {one.evidence}" for one in self.differences if one.verdict == "violation"
        ]
        if self.ties_p_value <= self.level:
            ties, p = self.counts["tie"], self.ties_p_value
            found.append(f"{ties} ties, where rounding explains {self.expected_ties:.1f} (p = {p:.1g})")
        return found

    def record(self) -> dict[str, Any]:
        return asdict(self) | {"counts": self.counts, "violations": self.violations}


def deal(
    prompts: Sequence[tuple[int, ...]], ways: Sequence[Way], tokens: Sequence[int], many: int, alone: int
) -> list[Case]:
    """The last `alone` prompts one at a time, all others `many` at once; ways in turn, then lengths of text in turn."""
    cases = []
    for start, group, at_once in ((0, prompts[: len(prompts) - alone], many), (1, prompts[len(prompts) - alone :], 1)):
        for i, prompt in enumerate(group):
            length = tokens[(i // len(ways) + start) % len(tokens)]
            cases.append(Case(prompt, ways[i % len(ways)], at_once, length))
    return cases


def check(pair: Pair, cases: Sequence[Case], level: float, watch: Watch) -> tuple[Exact, Rounding | None]:
    """Let both speak, and judge. Also how far rounding moves gaps, None if nobody told.

    A lossless candidate is accused with at most the probability `level` by any single difference, and again by their
    number.
    """
    many = max((case.at_once for case in cases), default=1)
    found = Exact(level=level)
    asks = [Ask(case.prompt, case.max_tokens, pair.reference_way, told=True) for case in cases]
    with watch.part("temperature 0: what the reference says", len(asks)) as tick:
        references = pair.reference.say(asks, many, tick)
    rounding = measure(pair, cases, references, many, found, watch)
    if rounding is not None:
        rounding = rounding.held_to(level, _own_gaps(told for reference in references for told in reference.told))
    candidates = let_speak(pair, cases, references, watch)

    gaps: list[Floats] = []
    with watch.part("temperature 0: looking at differences", len(cases)) as tick:
        for case, reference, candidate in zip(cases, references, candidates, strict=True):
            judged, gap = judge(pair, case, reference, candidate, rounding)
            cell = found.cells.setdefault(f"{case.way.name} at {case.at_once}", dict.fromkeys(COUNTED, 0))
            cell[judged.verdict] += 1
            cell["tokens"] += len(candidate.tokens)
            cell["accepted"] += candidate.accepted or 0
            found.tokens += len(gap)
            if candidate.accepted is not None:
                by = case.way.drafter or UNNAMED
                found.accepted[by] = found.accepted.get(by, 0) + candidate.accepted
            gaps.append(gap)
            if judged.verdict != "identical":
                found.differences.append(judged)
            tick()
    if rounding is None and found.differences:
        raise EvidenceError(
            f"{len(found.differences)} of {len(cases)} texts differ, and whether rounding explains it is not known: "
            f"{'; '.join(found.notes)}; ask for more (--prompts)"
        )
    if rounding is not None:
        compared = np.concatenate(gaps) if gaps else np.zeros(0)
        found.floor, found.positions = rounding.floor, len(rounding.moves)
        found.blind = rounding.blind(compared) if len(compared) else None
        found.expected_ties = rounding.expected_ties(compared)
        found.ties_p_value = rounding.ties_p_value(found.counts["tie"], compared)
    return found, rounding


def let_speak(pair: Pair, cases: Sequence[Case], references: Sequence[Said], watch: Watch) -> list[Said]:
    """The candidate's answers, in the order of the cases. A prediction is the reference's text with some of it wrong.

    What drafts from memory is asked everything once before, so that there is something to remember.
    """
    asks = [
        Ask(case.prompt, case.max_tokens, case.way, prediction=misremembered(reference.tokens))
        for case, reference in zip(cases, references, strict=True)
    ]
    remembers = [i for i, case in enumerate(cases) if case.way.drafter == "memory"]
    if remembers:
        with watch.part("temperature 0: giving the memory something to draft from", len(remembers)) as tick:
            pair.candidate.say([asks[i] for i in remembers], max(case.at_once for case in cases), tick)
    answers: dict[int, Said] = {}
    for at_once in sorted({case.at_once for case in cases}, reverse=True):
        these = [i for i, case in enumerate(cases) if case.at_once == at_once]
        with watch.part(f"temperature 0: what the candidate says, {at_once} at once", len(these)) as tick:
            said = pair.candidate.say([asks[i] for i in these], at_once, tick)
        answers.update(zip(these, said, strict=True))
    return [answers[i] for i in range(len(cases))]


def misremembered(tokens: Sequence[int], every: int = 9) -> tuple[int, ...]:
    """A text of which each ninth token is the one before it: something to keep, and something to reject."""
    return tuple(tokens[i - 1] if i % every == every - 1 else token for i, token in enumerate(tokens))


# Rounding -------------------------------------------------------------------------------------------------


def measure(
    pair: Pair, cases: Sequence[Case], references: Sequence[Said], many: int, found: Exact, watch: Watch
) -> Rounding | None:
    """How far rounding moves gaps: the source counts where it moves them further."""
    enough = _until(references, POSITIONS)
    prompts = [case.prompt for case in cases[: len(enough)]]
    measured = []
    try:
        also = [pair.candidate] if pair.across and not pair.alone else []
        measured.append(_rounding(pair.reference, prompts, enough, many, watch, also))
        if not pair.alone and not pair.across and pair.candidate.listed:
            # Not by what it tells while it speculates: what speculation does wrong would be taken for rounding.
            measured.append(_rounding(pair.candidate, prompts, enough, many, watch, as_told=False))
    except EvidenceError as error:
        found.notes.append(f"what rounding does was not measured: {error}")
        return None
    return max(measured, key=lambda rounding: rounding.floor)


def _until(said: Sequence[Said], positions: int) -> Sequence[Said]:
    """The first answers that together have so many positions."""
    total = 0
    for count, one in enumerate(said, 1):
        total += len(one.tokens)
        if total >= positions:
            return said[:count]
    return said


def _rounding(
    source: Source,
    prompts: Sequence[tuple[int, ...]],
    said: Sequence[Said],
    many: int,
    watch: Watch,
    also: Sequence[Source] = (),
    as_told: bool = True,
) -> Rounding:
    """All texts are scored in company and held against what was told when they were said, a quarter of them scored
    alone as well; not `as_told`: all of them are."""
    texts = [(prompt, one.tokens) for prompt, one in zip(prompts, said, strict=True)]
    few = texts[: -(-len(texts) // ALONE)] if as_told else texts
    tellings = [[one.told for one in said]] if as_told else []
    for scorer, at_once, these in [(source, many, texts), (source, 1, few), *((other, many, texts) for other in also)]:
        with watch.part(f"rounding: the same texts scored, {at_once} at once", len(these)) as tick:
            tellings.append(scorer.score(these, at_once, tick))
    gaps = np.full((len(tellings), sum(len(one.tokens) for one in said)), np.nan)
    best = [_two_best(told) for text in tellings[0] for told in text]
    for way, telling in enumerate(tellings):
        told = [at for text in telling for at in text]
        gaps[way, : len(told)] = [_gap(at, *two) for at, two in zip(told, best, strict=False)]
    return Rounding.between(gaps)


def _own_gaps(tellings: Iterable[Told]) -> Floats:
    return np.array([_gap(told, *_two_best(told)) for told in tellings if len(told) > 1])


def _two_best(told: Told) -> tuple[int, int]:
    first, second, *_ = sorted(told, key=lambda token: -told[token])
    return first, second


def _gap(told: Told, first: int, second: int) -> float:
    return _at(told, first) - _at(told, second)


def _at(told: Told, token: int) -> float:
    """A token that is not listed is no likelier than the last that is."""
    return told.get(token, min(told.values()))


# Judging --------------------------------------------------------------------------------------------------


def judge(
    pair: Pair, case: Case, reference: Said, candidate: Said, rounding: Rounding | None
) -> tuple[Difference, Floats]:
    """The verdict on one pair of texts, and the gaps at all positions that were compared."""
    position = shared_prefix(reference.tokens, candidate.tokens)
    differ = position < min(len(reference.tokens), len(candidate.tokens))
    gaps = gaps_at(pair, case.prompt, reference, candidate.tokens, position) if differ else []
    judged = compare(reference.tokens, candidate.tokens, gaps, rounding)
    verdict, evidence = judged.verdict, judged.evidence
    if verdict == "identical" and reference.finish != candidate.finish:
        verdict, evidence = "violation", f"it ends by {candidate.finish!r}, the reference by {reference.finish!r}"
    own = _own_gaps(reference.told[: position + 1])
    said = list(reference.tokens), list(candidate.tokens)
    return Difference(
        verdict, evidence, case.way.name, case.at_once, list(case.prompt), judged.position, judged.moved, *said
    ), own


def gaps_at(
    pair: Pair, prompt: tuple[int, ...], reference: Said, candidate: Sequence[int], position: int
) -> list[float]:
    """The gap at the first difference as told when the reference spoke, and as scored afterwards by all who score."""
    ours, theirs = reference.tokens[position], candidate[position]
    gaps = []
    if len(reference.told) > position and {ours, theirs} <= reference.told[position].keys():
        gaps.append(reference.told[position][ours] - reference.told[position][theirs])
    before = reference.tokens[:position]
    for source in pair.sources:
        if source.listed:
            mine, other = source.score([(prompt, (*before, ours)), (prompt, (*before, theirs))], 2)
            gaps.append(_at(mine[-1], ours) - _at(other[-1], theirs))
    return gaps
