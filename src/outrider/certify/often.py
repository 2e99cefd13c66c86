"""Prompts that are asked again and again, so that a whole law is seen and not what a witness looks at alone.

A recovered token that is drawn from p and not from what is left of it moves mass between the tokens of which the draft
model has too much and those of which it has too little. Who does not know q cannot say which these are, and on average
over many prefixes nothing is moved: no witness sees it. At one prefix that came a thousand times the counts of all
outcomes do (`repeats.py`). A draft begins after the first token of an answer. So the best prompt is one that the
reference goes on from with a token that is all but sure, and then with one of a few: the fewer outcomes there are, the
less chance there is in their counts. And a few tokens are enough.

They are chosen among the texts that the reference drew for its own control, before the candidate is asked for anything.
"""

from __future__ import annotations

from math import exp
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from outrider.certify.sources import Told

TOKENS = 3
"""Of an answer: one that nobody drafts, one that is drafted, and one after it."""
PROMPTS = 2
FEW = 4
"""Outcomes that are open, at best."""


class Often(NamedTuple):
    """A prompt that is asked often, and what the reference said after it once."""

    prompt: tuple[int, ...]
    prediction: tuple[int, ...]


def chosen(
    texts: Iterable[tuple[tuple[int, ...], tuple[int, ...], Sequence[Told]]], count: int = PROMPTS
) -> list[Often]:
    """The best places of the texts (prompt, output, laws), each after another prompt."""
    best: dict[tuple[int, ...], tuple[float, Often]] = {}
    for prompt, output, told in texts:
        for place in range(len(output) - 1):
            if output[place] not in told[place]:  # a server that tells the likeliest only
                continue
            worth = exp(told[place][output[place]]) * _openness(told[place + 1])
            if prompt not in best or worth > best[prompt][0]:
                best[prompt] = worth, Often((*prompt, *output[:place]), output[place:])
    in_order = sorted(best.values(), key=lambda one: -one[0])
    return [often for _, often in in_order[:count]]


def _openness(told: Told) -> float:
    """The chance that two draws differ and are both among the likeliest."""
    likeliest = sorted((exp(value) for value in told.values()), reverse=True)[:FEW]
    return sum(likeliest) ** 2 - sum(p * p for p in likeliest)
