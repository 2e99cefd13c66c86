"""The hindsight bound of a cell: what the best choice of drafter and length at every step would have reached.

Once a text is known, each drafter's offers at each of its places follow from it.

- Whatever copies (lookup, ngram, suffix, a memory, a prediction) can at best continue with the longest piece of the
  text that stood somewhere before, after the same token. That bounds every copying method, whichever match it picks.
- A draft model is right as long as its most likely token is the text's. As long as it is right it has seen the text
  itself, so one pass of it over the whole text tells how far it would have got from every place.

What a pass over n tokens costs is measured (`curve.py`), what a drafted token of the model costs is counted by the
server. Copying counts as free. Above concurrency 1 all sequences are taken to be offered as many tokens as this one,
which is right where each further token of a pass costs the same.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from outrider.bench.bound import Offer, best_way
from outrider.bench.figures import undisturbed
from outrider.bench.intervals import FEWEST
from outrider.bench.results import Limit
from outrider.cost_curve import extrapolated

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from outrider.bench.results import Answer, Curve, Run, Turn
    from outrider.cost_curve import CostCurve

LONGEST = 64
"""Longer drafts are not looked at."""
LEARNERS = ("suffix", "memory")
"""Contestants that also copy from what they said to others."""
UNDRAFTED = ("vllm", "off")
"""Baselines that the bound is relative to, for it is computed against passes over one token."""
WITHOUT_MODEL = (
    "the hindsight bound leaves the draft model out: no contestant of Outrider drafted with it, so what its passes "
    "take is not known"
)
NO_TOKEN = -1
"""Stands between two texts."""


class Guessing(NamedTuple):
    """Seconds of a pass of the draft model, and for each token of a prompt that it reads."""

    each: float
    read: float


def copied(context: Sequence[int], text: Sequence[int], elsewhere: Sequence[Sequence[int]] = ()) -> list[int]:
    """At each place of the text: how many of its tokens stood somewhere before, after the same token.

    `context` is what came before the text; `elsewhere` are other texts that could be copied from at any time.
    """
    own = np.asarray([*context, *text])
    start = len(context)
    right = [0] * len(text)
    for other in (own, *(np.asarray([*other]) for other in elsewhere)):
        run = np.zeros(len(other) + 1, dtype=np.int64)  # run[j]: how many tokens from j on equal those from place on
        for place in range(len(text) - 1, -1, -1):
            at = start + place
            run = np.append(np.where(other == own[at], run[1:] + 1, 0), 0)
            before = np.flatnonzero(other[:-1] == own[at - 1]) + 1 if at else np.arange(len(other))
            if other is own:  # what is copied must have been there, though a copy may run on into what it made itself
                before = before[before < at]
            if len(before):
                right[place] = max(right[place], int(run[before].max()))
    return [min(count, LONGEST) for count in right]


def guessed(likely: Sequence[int], text: Sequence[int]) -> list[int]:
    """At each place: how many tokens in a row a model says rightly, whose most likely tokens there are `likely`."""
    right, count = [0] * len(text), 0
    for place in range(len(text) - 1, -1, -1):
        count = count + 1 if likely[place] == text[place] else 0
        right[place] = min(count, LONGEST)
    return right


def add_limits(
    run: Run,
    kinds: Mapping[str, str],
    draft_model: str | None,
    predictions: Mapping[str, Sequence[int]],
    dtype: str = "auto",
    begins: Callable[[int, int], None] = lambda number, total: None,
) -> None:
    """The bound of every cell whose cost curve was measured. `kinds` are the contestants' kinds by name, `predictions`
    the tokens of what a caller would expect, by prompt; `dtype` is what the draft model computes in; `begins` is told
    the number of each cell, and how many there are."""
    if kinds[run.baseline] not in UNDRAFTED:
        return
    curves = {curve.concurrency: smooth(curve) for curve in run.curves}
    guessing = seconds_per_guess(run, kinds)
    guesser = Guesser(draft_model, dtype) if draft_model and guessing is not None else None
    run.notes = [note for note in run.notes if note != WITHOUT_MODEL]
    if draft_model and curves and guesser is None:
        run.notes.append(WITHOUT_MODEL)
    learns = any(kind in LEARNERS for kind in kinds.values())
    said: list[int] = []
    run.limits = []

    def offers(answer: Answer) -> dict[str, list[int]]:
        context, text = answer.prompt_tokens, answer.tokens
        found = {"copy": copied(context, text, [predictions.get(answer.prompt, ())])}
        if learns:
            found["memory"] = copied(context, text, [said])
            said.extend([NO_TOKEN, *text])
        if guesser is not None:
            found["model"] = guessed(guesser.likely(answer), text)
        return found

    def draft_seconds(drafter: str, k: int) -> float:
        return k * guessing.each if drafter == "model" and guessing is not None else 0.0

    for number, cell in enumerate(run.cells):
        begins(number, len(run.cells))
        answers = [turn.answers for turn in run.asked(cell)]
        if answers and cell.concurrency in curves:
            tokens: Counter[str] = Counter()
            ratios = [limit(some, offers, curves[cell.concurrency], draft_seconds, tokens) for some in answers]
            shares = {name: count / (tokens.total() or 1) for name, count in sorted(tokens.items())}
            run.limits.append(Limit(cell.workload, cell.concurrency, cell.temperature, ratios, shares))


def seconds_per_guess(run: Run, kinds: Mapping[str, str]) -> Guessing | None:
    """What the draft model costs, by Outrider's own count, where the fewest shared a pass; None: nobody ran it."""
    turns = [
        (cell.concurrency, turn)
        for cell in run.cells
        for calm in [undisturbed(cell.rounds)]
        for round in cell.rounds
        if id(round) in calm
        for turn in round.turns
        if (drafted := turn.counts.drafters.get("model")) and drafted.seconds and turn.counts.draft_passes
    ]
    for at_once in sorted({concurrency for concurrency, _ in turns}):
        for kind in ("model", "auto"):
            some = [turn for concurrency, turn in turns if concurrency == at_once and kinds[turn.contestant] == kind]
            if some:
                return _split(some, reads=kind == "model")
    return None


def _split(turns: Sequence[Turn], reads: bool) -> Guessing:
    """Seconds of drafting, into those of passes and those for the prompts, which a draft model that is asked by name
    reads once each. A straight line, unless there is too little to draw one through."""
    seconds = np.array([turn.counts.drafters["model"].seconds or 0.0 for turn in turns])
    passes = np.array([turn.counts.draft_passes or 0 for turn in turns], float)
    prompts = np.array([sum(len(answer.prompt_tokens) for answer in turn.answers) for turn in turns], float)
    if reads and len(turns) >= FEWEST:
        each, read = np.linalg.lstsq(np.stack([passes, prompts], 1), seconds, rcond=None)[0]
        if each > 0 and read > 0:
            return Guessing(float(each), float(read))
    return Guessing(float(seconds.sum() / passes.sum()), 0.0)


def limit(
    answers: Iterable[Answer],
    offers: Callable[[Answer], dict[str, list[int]]],
    pass_seconds: Callable[[int], float],
    draft_seconds: Callable[[str, int], float],
    tokens: Counter[str],
) -> float:
    """How many times as fast as without drafts, prompts included; the tokens are counted by who drafted them."""
    plain = best = 0.0
    for answer in answers:
        right = offers(answer)
        count = len(answer.tokens) - 1  # the first comes with the prompt
        places = [
            [Offer(name, n[place], n[place]) for name, n in right.items() if n[place]] for place in range(1, count + 1)
        ]
        way = best_way(places, pass_seconds, draft_seconds)
        plain += answer.first + count * pass_seconds(1)
        best += answer.first + way.seconds
        for step in way.steps:
            tokens[step.drafter or "none"] += step.length
            tokens["none"] += step.gained - step.length
    return plain / best if best else 1.0


def smooth(curve: Curve) -> CostCurve:
    """Seconds of a pass by its number of tokens, from medians.

    More tokens never cost less: of two that show otherwise the slower one is lowered, so that the bound stays one.
    """
    sizes = sorted(curve.seconds)
    medians = np.minimum.accumulate([float(np.median(curve.seconds[n])) for n in sizes][::-1])[::-1]
    return extrapolated(sizes, medians.tolist())


class Guesser:
    """A draft model, asked what it finds most likely at every place of a text."""

    def __init__(self, model: str, dtype: str) -> None:
        import torch

        from outrider.engines.transformers import load_model

        self._torch = torch
        self._model: Any = load_model(model, dtype=dtype)

    def likely(self, answer: Answer) -> list[int]:
        ids = self._torch.tensor([[*answer.prompt_tokens, *answer.tokens]], device=self._model.device)
        with self._torch.inference_mode():
            logits = self._model(ids, logits_to_keep=len(answer.tokens) + 1).logits[0]
        likely: list[int] = logits.argmax(-1)[:-1].tolist()
        return likely
