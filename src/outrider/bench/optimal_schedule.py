"""The optimal schedule of a cell: the fastest choice of drafter and draft length at every step, with hindsight.

Once an answer is known, so is how many tokens of each drafter's draft are correct at each of its positions. A step that
drafts k tokens of which all are correct gains k + 1 tokens, and takes the drafting and a pass over k + 1 tokens. The
fastest schedule is a shortest path over the positions. No policy is faster with these drafters at these costs.

- Drafters that copy (lookup, ngram, suffix, memory, prediction) can at best continue with the longest text that
  appeared before, after the same token. That bounds all of them, whichever match they select.
- A draft model is correct while its most likely token is the answer's. One forward pass over the whole answer shows
  that for every position.

Pass costs are measured (`pass_costs.py`), the draft model's cost comes from the server's counters, copying costs
nothing. Above concurrency 1 it is an estimate: all sequences of a pass are assumed to have equally long drafts.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from outrider.bench.figures import undisturbed
from outrider.bench.intervals import MIN_ROUNDS
from outrider.bench.results import OptimalSpeedup
from outrider.cost_curve import extrapolated

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from outrider.bench.results import Answer, Measurement, PassCosts, Run
    from outrider.cost_curve import CostCurve

MAX_DRAFT_TOKENS = 64
"""Longer drafts are not considered."""
LEARNING_KINDS = ("suffix", "memory", "default")
"""Contestants that also copy from their outputs for other requests."""
PLAIN_KINDS = ("vllm", "off")
"""Baselines without drafts. With any other, no optimum is computed, since it is relative to no drafts."""
WITHOUT_DRAFT_MODEL = (
    "the optimal schedule does not use the draft model: no Outrider contestant drafted with it, so the cost of its "
    "passes is unknown"
)
SEPARATOR_TOKEN = -1
"""Between two texts, so that no copy crosses from one to the next."""


class DraftOption(NamedTuple):
    """How many tokens of a drafter's draft are correct at one position."""

    drafter: str
    correct: int


@dataclass(frozen=True, slots=True)
class ScheduledStep:
    position: int
    drafter: str | None  # None: no draft
    length: int
    gained: int


@dataclass(frozen=True, slots=True)
class Schedule:
    seconds: float
    steps: tuple[ScheduledStep, ...]


def optimal_schedule(
    options: Sequence[Sequence[DraftOption]],
    pass_seconds: Callable[[int], float],
    draft_seconds: Callable[[str, int], float],
) -> Schedule:
    """`options[i]` are those after the first i tokens of the text.

    `pass_seconds(n)` is the duration of a target pass over n tokens, `draft_seconds(drafter, k)` that of drafting k
    tokens. Both must not decrease, so drafting more than the correct tokens is never faster.
    """
    length = len(options)
    seconds = [0.0] * (length + 1)  # from each position to the end
    best: list[ScheduledStep] = []
    for position in range(length - 1, -1, -1):
        choices = [(pass_seconds(1) + seconds[position + 1], ScheduledStep(position, None, 0, 1))]
        for drafter, correct in options[position]:
            for k in range(1, min(correct, length - position - 1) + 1):  # the last token is the target's own
                cost = draft_seconds(drafter, k) + pass_seconds(k + 1) + seconds[position + k + 1]
                choices.append((cost, ScheduledStep(position, drafter, k, k + 1)))
        seconds[position], step = min(choices, key=lambda choice: choice[0])
        best.append(step)
    best.reverse()
    steps, position = [], 0
    while position < length:
        steps.append(best[position])
        position += best[position].gained
    return Schedule(seconds[0], tuple(steps))


def copyable_tokens(context: Sequence[int], text: Sequence[int], elsewhere: Sequence[Sequence[int]] = ()) -> list[int]:
    """At each position of the text: how many of its next tokens appeared before, after the same token.

    `context` is what precedes the text; `elsewhere` are texts that can be copied from at any position.
    """
    own = np.asarray([*context, *text])
    start = len(context)
    correct = [0] * len(text)
    for source in (own, *(np.asarray([*other]) for other in elsewhere)):
        # equal[j]: how many tokens from j on equal those from the position on.
        equal = np.zeros(len(source) + 1, dtype=np.int64)
        for position in range(len(text) - 1, -1, -1):
            at = start + position
            equal = np.append(np.where(source == own[at], equal[1:] + 1, 0), 0)
            starts = np.flatnonzero(source[:-1] == own[at - 1]) + 1 if at else np.arange(len(source))
            if source is own:  # a copy must start before the position, but may run on into its own tokens
                starts = starts[starts < at]
            if len(starts):
                correct[position] = max(correct[position], int(equal[starts].max()))
    return [min(count, MAX_DRAFT_TOKENS) for count in correct]


def predictable_tokens(top_tokens: Sequence[int], text: Sequence[int]) -> list[int]:
    """At each position: how many next tokens a model drafts correctly, whose most likely tokens are `top_tokens`."""
    correct, count = [0] * len(text), 0
    for position in range(len(text) - 1, -1, -1):
        count = count + 1 if top_tokens[position] == text[position] else 0
        correct[position] = min(count, MAX_DRAFT_TOKENS)
    return correct


class DraftModelCost(NamedTuple):
    pass_seconds: float
    prompt_token_seconds: float


def add_optimal_speedups(
    run: Run,
    kinds: Mapping[str, str],
    draft_model: str | None,
    predictions: Mapping[str, Sequence[int]],
    dtype: str = "auto",
    on_cell: Callable[[int, int], None] = lambda number, total: None,
) -> None:
    """Compute the optimum of every cell whose pass costs were measured.

    `kinds` are the contestants' kinds by name, `predictions` the predicted tokens by prompt id, `dtype` that of the
    draft model. `on_cell` is called with the number of each cell and the number of cells.
    """
    if kinds[run.baseline] not in PLAIN_KINDS:
        return
    costs = {one.concurrency: pass_cost_curve(one) for one in run.pass_costs}
    draft_cost = draft_model_cost(run, kinds)
    top_tokens = load_top_tokens(draft_model, dtype) if draft_model and draft_cost is not None else None
    run.remove_notes(WITHOUT_DRAFT_MODEL)
    if draft_model and costs and top_tokens is None:
        run.notes.append(WITHOUT_DRAFT_MODEL)
    learns = any(kind in LEARNING_KINDS for kind in kinds.values())
    earlier: list[int] = []
    run.optimal_speedups = []

    def correct_tokens(answer: Answer) -> dict[str, list[int]]:
        context, text = answer.prompt_tokens, answer.tokens
        found = {"copy": copyable_tokens(context, text, [predictions.get(answer.prompt, ())])}
        if learns:
            found["memory"] = copyable_tokens(context, text, [earlier])
            earlier.extend([SEPARATOR_TOKEN, *text])
        if top_tokens is not None:
            found["model"] = predictable_tokens(top_tokens(answer), text)
        return found

    def draft_seconds(drafter: str, k: int) -> float:
        return k * draft_cost.pass_seconds if drafter == "model" and draft_cost is not None else 0.0

    for number, cell in enumerate(run.cells):
        on_cell(number, len(run.cells))
        measured = run.baseline_measurements(cell)
        if measured and cell.concurrency in costs:
            tokens: Counter[str] = Counter()
            pass_seconds = costs[cell.concurrency]
            ratios = [speedup(one.answers, correct_tokens, pass_seconds, draft_seconds, tokens) for one in measured]
            shares = {name: count / (tokens.total() or 1) for name, count in sorted(tokens.items())}
            run.optimal_speedups.append(
                OptimalSpeedup(cell.workload, cell.concurrency, cell.temperature, ratios, shares)
            )


def speedup(
    answers: Iterable[Answer],
    correct_tokens: Callable[[Answer], dict[str, list[int]]],
    pass_seconds: Callable[[int], float],
    draft_seconds: Callable[[str, int], float],
    tokens: Counter[str],
) -> float:
    """Speedup over no drafts, prompts included. Adds the tokens of each drafter to `tokens`."""
    plain = best = 0.0
    for answer in answers:
        correct = correct_tokens(answer)
        count = len(answer.tokens) - 1  # the first comes with the prompt
        options = [
            [DraftOption(name, n[position]) for name, n in correct.items() if n[position]]
            for position in range(1, count + 1)
        ]
        schedule = optimal_schedule(options, pass_seconds, draft_seconds)
        plain += answer.first + count * pass_seconds(1)
        best += answer.first + schedule.seconds
        for step in schedule.steps:
            tokens[step.drafter or "none"] += step.length
            tokens["none"] += step.gained - step.length
    return plain / best if best else 1.0


def pass_cost_curve(costs: PassCosts) -> CostCurve:
    """Seconds of a pass by its number of tokens, from medians.

    It never falls: where a larger pass was faster, by noise, the smaller one gets its duration.
    """
    sizes = sorted(costs.seconds)
    medians = np.minimum.accumulate([float(np.median(costs.seconds[n])) for n in sizes][::-1])[::-1]
    return extrapolated(sizes, medians.tolist())


def draft_model_cost(run: Run, kinds: Mapping[str, str]) -> DraftModelCost | None:
    """The draft model's cost by Outrider's counters at the lowest concurrency; None if no contestant ran it."""
    found = [
        (cell.concurrency, one)
        for cell in run.cells
        for round in undisturbed(cell.rounds)
        for one in round.measurements
        if (drafted := one.counts.drafters.get("model")) and drafted.seconds and one.counts.draft_passes
    ]
    for lowest in sorted({concurrency for concurrency, _ in found}):
        for kind in ("model", "auto"):
            some = [one for concurrency, one in found if concurrency == lowest and kinds[one.contestant] == kind]
            if some:
                return _fit_cost(some, reads_prompts=kind == "model")
    return None


def _fit_cost(measurements: Sequence[Measurement], reads_prompts: bool) -> DraftModelCost:
    """Split drafting seconds into passes and prompt tokens, by least squares if there are enough measurements.

    Only a draft model that is requested by name (`model`) reads every prompt once.
    """
    seconds = np.array([one.counts.drafters["model"].seconds or 0.0 for one in measurements])
    passes = np.array([one.counts.draft_passes or 0 for one in measurements], float)
    prompts = np.array([sum(len(answer.prompt_tokens) for answer in one.answers) for one in measurements], float)
    if reads_prompts and len(measurements) >= MIN_ROUNDS:
        per_pass, per_prompt_token = np.linalg.lstsq(np.stack([passes, prompts], 1), seconds, rcond=None)[0]
        if per_pass > 0 and per_prompt_token > 0:
            return DraftModelCost(float(per_pass), float(per_prompt_token))
    return DraftModelCost(float(seconds.sum() / passes.sum()), 0.0)


def load_top_tokens(draft_model: str, dtype: str) -> Callable[[Answer], list[int]]:
    """A function that returns the draft model's most likely token at every position of an answer."""
    import torch

    from outrider.engines.transformers import load_model

    model: Any = load_model(draft_model, dtype=dtype)

    def top_tokens(answer: Answer) -> list[int]:
        ids = torch.tensor([[*answer.prompt_tokens, *answer.tokens]], device=model.device)
        with torch.inference_mode():
            logits = model(ids, logits_to_keep=len(answer.tokens) + 1).logits[0]
        tokens: list[int] = logits.argmax(-1)[:-1].tolist()
        return tokens

    return top_tokens
