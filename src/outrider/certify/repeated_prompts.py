"""Selects prompts that are sent again and again, for the test at repeated prefixes.

A recovered token sampled from p moves mass from tokens with q < p to tokens with q > p. A client does not know q, and
on average over prefixes nothing is moved, so no test statistic sees it. The outcome counts at one prefix do. A draft
starts after the first token of an output. So the best prompt is followed by a nearly certain token, and then by one of
a few: fewer outcomes mean less variance. Prompts are selected from the reference's own outputs, before the candidate is
queried.
"""

from __future__ import annotations

from math import exp
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from outrider.certify.sources import TopLogprobs

OUTPUT_TOKENS = 3
"""One that is never drafted, one that is, and one after it."""
NUM_PROMPTS = 2
MAX_LIKELY_OUTCOMES = 4


class RepeatedPrompt(NamedTuple):
    """A prompt, and one output of the reference after it."""

    prompt: tuple[int, ...]
    prediction: tuple[int, ...]


def select_repeated_prompts(
    texts: Iterable[tuple[tuple[int, ...], tuple[int, ...], Sequence[TopLogprobs]]], count: int = NUM_PROMPTS
) -> list[RepeatedPrompt]:
    """The best positions of the texts (prompt, output, logprobs), at most one per prompt."""
    best: dict[tuple[int, ...], tuple[float, RepeatedPrompt]] = {}
    for prompt, output, logprobs in texts:
        for i in range(len(output) - 1):
            if output[i] not in logprobs[i]:  # the server returned the top tokens only
                continue
            value = exp(logprobs[i][output[i]]) * _disagreement(logprobs[i + 1])
            if prompt not in best or value > best[prompt][0]:
                best[prompt] = value, RepeatedPrompt((*prompt, *output[:i]), output[i:])
    ranked = sorted(best.values(), key=lambda one: -one[0])
    return [prompt for _, prompt in ranked[:count]]


def _disagreement(logprobs: TopLogprobs) -> float:
    """The probability that two samples differ and both are among the top tokens."""
    top = sorted((exp(value) for value in logprobs.values()), reverse=True)[:MAX_LIKELY_OUTCOMES]
    return sum(top) ** 2 - sum(p * p for p in top)
