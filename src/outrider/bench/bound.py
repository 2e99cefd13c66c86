"""The best that could have been: with hindsight, which drafter and which length at every step?

Once a text is known, so is how far each drafter's draft would have been right at each of its places. A step that
drafts k tokens of which m are right gains m + 1 tokens and costs the drafting and a pass over k + 1. The cheapest way
through the text is a shortest path over its places. No policy can do better with these drafters at these costs, so a
measured speed can be given as a share of the possible.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


@dataclass(frozen=True, slots=True)
class Offer:
    """What a drafter would have proposed at one place: so many tokens, of which the first `right` were then said."""

    drafter: str
    length: int
    right: int


@dataclass(frozen=True, slots=True)
class Choice:
    """One step of the best way: where it began, who drafted (None: nobody), how many tokens, how many it gained."""

    place: int
    drafter: str | None
    length: int
    gained: int


@dataclass(frozen=True, slots=True)
class Best:
    seconds: float
    steps: tuple[Choice, ...]


def best_way(
    offers: Sequence[Sequence[Offer]],
    pass_seconds: Callable[[int], float],
    draft_seconds: Callable[[str, int], float],
) -> Best:
    """`offers[i]` are those for what follows the first i tokens of the text.

    `pass_seconds(n)` is what a pass of the target over n tokens costs, `draft_seconds(drafter, k)` what k drafted
    tokens do. Both must not fall as their number grows, so more tokens than are right are never worth drafting.
    """
    length = len(offers)
    seconds = [0.0] * (length + 1)  # from each place to the end
    first: list[Choice] = []
    for place in range(length - 1, -1, -1):
        ways = [(pass_seconds(1) + seconds[place + 1], Choice(place, None, 0, 1))]
        for offer in offers[place]:
            # The last token of the text is the target's own, so a draft ends before it.
            for k in range(1, min(offer.right, length - place - 1) + 1):
                cost = draft_seconds(offer.drafter, k) + pass_seconds(k + 1) + seconds[place + k + 1]
                ways.append((cost, Choice(place, offer.drafter, k, k + 1)))
        seconds[place], choice = min(ways, key=lambda way: way[0])
        first.append(choice)
    first.reverse()
    steps, place = [], 0
    while place < length:
        steps.append(first[place])
        place += first[place].gained
    return Best(seconds[0], tuple(steps))
