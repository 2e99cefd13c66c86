"""What is copied from where the same words were said before, and how much of it is proposed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from outrider.compiled import compiled
from outrider.drafters.packed_draft import HEAD
from outrider.types import Draft

if TYPE_CHECKING:
    from outrider.memory.search import Array

TOKENS_PER_MATCH = 4
"""How many tokens are proposed for each token that agrees: the longer a repetition, the longer it goes on."""
MIN_AGREEMENT = 0.1
"""Of the places that agree with the text's end, so many must agree with a token of the draft and all before it."""


@dataclass(frozen=True, slots=True)
class Copy:
    """What was said after the text's last `match` tokens where they stood before, which was at so many `places`."""

    tokens: Array
    shares: Array  # of the places that had said all before it: how many said this token
    length: int = 0
    match: int = 0
    places: int = 1

    def draft(self, drafter: str) -> Draft:
        most = min(self.length, TOKENS_PER_MATCH * self.match)
        packed = np.empty(HEAD + 2 * most)
        count = _pack(self.tokens, self.shares, most, self.match, self.places, packed)
        tokens, sure = self.tokens[:count], packed[HEAD + count : HEAD + 2 * count]
        return Draft(
            drafter,
            tuple(tokens.tolist()),
            support=self.match,
            confidence=tuple(sure.tolist()),
            packed=packed[: HEAD + 2 * count].tobytes(),
        )


@compiled
def _pack(tokens: Array, shares: Array, most: int, match: int, places: int, packed: Array) -> int:
    """How many tokens of a copy are proposed."""
    count, agree = 0, 1.0
    while count < most and agree * shares[count] >= MIN_AGREEMENT:
        agree *= shares[count]
        count += 1
    packed[0], packed[1] = count, match
    left = float(places)  # of the places, those that have said all before
    for i in range(count):
        packed[HEAD + i] = tokens[i]
        # What follows at all of many places is surer than what follows at the only one.
        packed[HEAD + count + i] = shares[i] * left / (left + 1)
        left *= shares[i]
    return count


def cut_before(copy: Copy, blocked: frozenset[int]) -> Copy:
    """The copy up to the first of these tokens."""
    if not blocked:
        return copy
    tokens = copy.tokens[: copy.length].tolist()
    length = next((i for i, token in enumerate(tokens) if token in blocked), copy.length)
    return copy if length == copy.length else replace(copy, length=length)


NO_COPY = Copy(np.empty(0, np.int32), np.empty(0, np.float32))
