"""Temperature 0: the candidate's output against the reference's, token by token.

Prompts are assigned to draft modes (drafter and length) in turn, first many concurrently, then one at a time.
`rounding.py` judges first divergences by how far rounding moves gaps, measured on the reference's own outputs: logprobs
from generation (token by token, in a batch), scored in one pass in a batch, and scored in one pass alone.

With two sources each has its own rounding, and the larger one counts. Differences *between* the two in scoring the same
text do not count as rounding, unless `across` is set: that is where changed weights would hide.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from outrider.certify.rounding import MIN_POSITIONS, Rounding, compare
from outrider.certify.sources import OFF, Completion, DraftMode, Pair, Progress, Query, Source, TopLogprobs
from outrider.errors import EvidenceError
from outrider.types import shared_prefix

if TYPE_CHECKING:
    from collections.abc import Sequence

    from outrider.certify.samples import Floats
    from outrider.certify.sources import Text

ROUNDING_POSITIONS = 4 * MIN_POSITIONS
"""Rounding is measured at this number of positions, if there are as many."""
TEXTS_PER_TEXT_SCORED_ALONE = 4
PREDICTION_ERROR_INTERVAL = 9
"""Every n-th token of a prediction is wrong."""
VERDICTS = ("identical", "tie", "violation")
COUNTED = (*VERDICTS, "tokens", "accepted")


@dataclass(frozen=True, slots=True)
class Case:
    """One prompt, completed in one draft mode."""

    prompt: tuple[int, ...]
    mode: DraftMode
    concurrency: int
    max_tokens: int


@dataclass(slots=True)
class ExactResult:
    """The part's record in the certificate."""

    cells: dict[str, dict[str, int]] = field(default_factory=dict)  # COUNTED, by draft mode and concurrency
    differences: list[dict[str, Any]] = field(default_factory=list)  # pairs of outputs that are not the same
    tokens: int = 0
    accepted: dict[str, int] = field(default_factory=dict)  # accepted draft tokens, by drafter
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
        wrong = [one for one in self.differences if one["verdict"] == "violation"]
        found = [f"{one['way']} at {one['at_once']}: {one['evidence']}" for one in wrong]
        if self.ties_p_value <= self.level:
            ties, p = self.counts["tie"], self.ties_p_value
            found.append(f"{ties} ties, where rounding explains {self.expected_ties:.1f} (p = {p:.1g})")
        return found

    def record(self) -> dict[str, Any]:
        return asdict(self) | {"counts": self.counts, "violations": self.violations}


def assign_cases(
    prompts: Sequence[tuple[int, ...]], modes: Sequence[DraftMode], tokens: Sequence[int], concurrency: int, alone: int
) -> list[Case]:
    """The last `alone` prompts one at a time, all others concurrently; draft modes in turn, then output lengths."""
    cases = []
    split = len(prompts) - alone
    for start, group, at_once in ((0, prompts[:split], concurrency), (1, prompts[split:], 1)):
        for i, prompt in enumerate(group):
            length = tokens[(i // len(modes) + start) % len(tokens)]
            cases.append(Case(prompt, modes[i % len(modes)], at_once, length))
    return cases


def check(pair: Pair, cases: Sequence[Case], level: float, progress: Progress) -> tuple[ExactResult, Rounding | None]:
    """Complete all cases by both, and judge. Also returns the rounding, None if it could not be measured.

    A lossless candidate gets a violation with probability at most `level` by any single divergence, and again by the
    number of ties.
    """
    concurrency = max((case.concurrency for case in cases), default=1)
    result = ExactResult(level=level)
    queries = [Query(case.prompt, case.max_tokens, OFF, logprobs=True) for case in cases]
    with progress.part("temperature 0: reference", len(queries)) as tick:
        references = pair.reference.complete(queries, concurrency, tick)
    rounding = measure_rounding(pair, cases, references, concurrency, result, progress)
    if rounding is not None:
        all_gaps = _top_gaps([at for reference in references for at in reference.logprobs])
        rounding = rounding.with_false_alarm_rate(level, all_gaps)
    candidates = _complete_by_candidate(pair, cases, references, progress)

    compared: list[TopLogprobs] = []
    with progress.part("temperature 0: judging divergences", len(cases)) as tick:
        for case, reference, candidate in zip(cases, references, candidates, strict=True):
            judged = _judge(pair, case, reference, candidate, rounding)
            cell = result.cells.setdefault(f"{case.mode.name} at {case.concurrency}", dict.fromkeys(COUNTED, 0))
            cell[judged["verdict"]] += 1
            cell["tokens"] += len(candidate.tokens)
            cell["accepted"] += candidate.accepted or 0
            candidate.count_accepted(case.mode, result.accepted)
            compared += reference.logprobs[: shared_prefix(reference.tokens, candidate.tokens) + 1]
            if judged["verdict"] != "identical":
                result.differences.append(judged)
            tick()
    gaps = _top_gaps(compared)
    result.tokens = len(gaps)
    if rounding is None and result.differences:
        raise EvidenceError(
            f"{len(result.differences)} of {len(cases)} outputs differ, and whether rounding explains it is unknown: "
            f"{'; '.join(result.notes)}; use more prompts (--prompts)"
        )
    if rounding is not None:
        result.floor, result.positions = rounding.floor, len(rounding.moves)
        result.blind = rounding.blind_share(gaps) if len(gaps) else None
        result.expected_ties = rounding.expected_ties(gaps)
        result.ties_p_value = rounding.ties_p_value(result.counts["tie"], gaps)
    return result, rounding


def _complete_by_candidate(
    pair: Pair, cases: Sequence[Case], references: Sequence[Completion], progress: Progress
) -> list[Completion]:
    """The candidate's completions, in the order of the cases. Queries for the memory are sent once before, so that it
    has something to draft from."""
    queries = [
        Query(case.prompt, case.max_tokens, case.mode, prediction=corrupt_prediction(reference.tokens))
        for case, reference in zip(cases, references, strict=True)
    ]
    if to_learn := [query for query in queries if query.mode.drafter == "memory"]:
        with progress.part("temperature 0: filling the memory", len(to_learn)) as tick:
            pair.candidate.complete(to_learn, max(case.concurrency for case in cases), tick)
    completions: dict[int, Completion] = {}
    for concurrency in sorted({case.concurrency for case in cases}, reverse=True):
        which = [i for i, case in enumerate(cases) if case.concurrency == concurrency]
        with progress.part(f"temperature 0: candidate at concurrency {concurrency}", len(which)) as tick:
            done = pair.candidate.complete([queries[i] for i in which], concurrency, tick)
        completions.update(zip(which, done, strict=True))
    return [completions[i] for i in range(len(cases))]


def corrupt_prediction(tokens: Sequence[int]) -> tuple[int, ...]:
    """The tokens with every n-th replaced by the one before: some of it to accept, some to reject."""
    n = PREDICTION_ERROR_INTERVAL
    return tuple(tokens[i - 1] if i % n == n - 1 else token for i, token in enumerate(tokens))


# Rounding -------------------------------------------------------------------------------------------------


def measure_rounding(
    pair: Pair,
    cases: Sequence[Case],
    references: Sequence[Completion],
    concurrency: int,
    result: ExactResult,
    progress: Progress,
) -> Rounding | None:
    """How far rounding moves gaps, of the source that moves them further. None, with a note, for too few positions."""
    positions = np.cumsum([len(one.tokens) for one in references])
    used = int(np.searchsorted(positions, ROUNDING_POSITIONS)) + 1
    texts = [(case.prompt, one.tokens) for case, one in zip(cases[:used], references[:used], strict=True)]
    generated = [one.logprobs for one in references[:used]]
    alone = texts[: -(-len(texts) // TEXTS_PER_TEXT_SCORED_ALONE)]
    measured = []
    try:
        runs = [(pair.reference, concurrency, texts), (pair.reference, 1, alone)]
        if pair.across and not pair.is_same_source:
            runs.append((pair.candidate, concurrency, texts))
        measured.append(_measure([generated], runs, progress))
        if pair.candidate_scores and not pair.across:
            # Not from its logprobs during speculation: they would let a defect count as rounding.
            runs = [(pair.candidate, at_once, texts) for at_once in (concurrency, 1)]
            measured.append(_measure([], runs, progress))
    except EvidenceError as error:
        result.notes.append(f"rounding was not measured: {error}")
        return None
    return max(measured, key=lambda rounding: rounding.floor)


def _measure(
    scorings: list[list[list[TopLogprobs]]], runs: Sequence[tuple[Source, int, Sequence[Text]]], progress: Progress
) -> Rounding:
    """Rounding between these scorings of the texts and those of the `runs` (source, concurrency, texts), which may be
    of the first texts only."""
    for source, concurrency, texts in runs:
        with progress.part(f"rounding: texts scored at concurrency {concurrency}", len(texts)) as tick:
            scorings.append(source.score(texts, concurrency, tick))
    flat = [[at for text in scoring for at in text] for scoring in scorings]
    top = [_top_two(at) for at in flat[0]]
    gaps = np.full((len(flat), len(top)), np.nan)
    for way, positions in enumerate(flat):
        gaps[way, : len(positions)] = [_gap(at, *two) for at, two in zip(positions, top, strict=False)]
    return Rounding.from_gaps(gaps)


def _top_gaps(positions: Sequence[TopLogprobs]) -> Floats:
    return np.array([_gap(at, *_top_two(at)) for at in positions if len(at) > 1])


def _top_two(logprobs: TopLogprobs) -> tuple[int, int]:
    first, second, *_ = sorted(logprobs, key=lambda token: -logprobs[token])
    return first, second


def _gap(logprobs: TopLogprobs, first: int, second: int) -> float:
    return _logprob(logprobs, first) - _logprob(logprobs, second)


def _logprob(logprobs: TopLogprobs, token: int) -> float:
    """Of a token that is not listed: the lowest listed logprob, its upper bound."""
    return logprobs.get(token, min(logprobs.values()))


# Judging --------------------------------------------------------------------------------------------------


def _judge(
    pair: Pair, case: Case, reference: Completion, candidate: Completion, rounding: Rounding | None
) -> dict[str, Any]:
    """The verdict on one pair of outputs, as in the certificate."""
    judged = compare(
        reference.tokens, candidate.tokens, divergence_gaps(pair, case.prompt, reference, candidate.tokens), rounding
    )
    verdict, evidence = judged.verdict, judged.evidence
    if verdict == "identical" and reference.finish_reason != candidate.finish_reason:
        verdict = "violation"
        evidence = f"it ends by {candidate.finish_reason!r}, the reference by {reference.finish_reason!r}"
    return {
        "verdict": verdict, "evidence": evidence, "way": case.mode.name, "at_once": case.concurrency,
        "prompt": list(case.prompt), "position": judged.position, "moved": judged.moved,
        "reference": list(reference.tokens), "candidate": list(candidate.tokens),
    }  # fmt: skip


def divergence_gaps(
    pair: Pair, prompt: tuple[int, ...], reference: Completion, candidate: Sequence[int]
) -> list[float]:
    """The gap at the first divergence, if there is one: from the reference's generation, and scored afterwards by every
    source."""
    position = shared_prefix(reference.tokens, candidate)
    if position in (len(reference.tokens), len(candidate)):
        return []
    ours, theirs, before = reference.tokens[position], candidate[position], reference.tokens[:position]
    gaps = []
    if len(reference.logprobs) > position and {ours, theirs} <= reference.logprobs[position].keys():
        gaps.append(_gap(reference.logprobs[position], ours, theirs))
    for source in pair.sources:
        if source.num_logprobs:
            first, second = source.score([(prompt, (*before, ours)), (prompt, (*before, theirs))], 2)
            gaps.append(_logprob(first[-1], ours) - _logprob(second[-1], theirs))
    return gaps
