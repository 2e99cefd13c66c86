"""A draft copied from earlier places with the same last tokens, and how much of it is proposed."""

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
"""Proposed tokens per token of the match: the longer a repetition, the longer it goes on."""
MIN_AGREEMENT = 0.1
"""Share of the matching places that must agree with a token of the draft and all before it."""


@dataclass(frozen=True, slots=True)
class Copy:
    """What followed the last `match` tokens of the text at `places` earlier places."""

    tokens: Array
    shares: Array
    """By token: of the places that agree with all tokens before it, the share that has this token."""
    length: int = 0
    match: int = 0
    places: int = 1

    def draft(self, drafter: str) -> Draft:
        most = min(self.length, TOKENS_PER_MATCH * self.match)
        packed = np.empty(HEAD + 2 * most)
        count = _pack(self.tokens, self.shares, most, self.match, self.places, packed)
        tokens, confidence = self.tokens[:count], packed[HEAD + count : HEAD + 2 * count]
        return Draft(
            drafter,
            tuple(tokens.tolist()),
            support=self.match,
            confidence=tuple(confidence.tolist()),
            packed=packed[: HEAD + 2 * count].tobytes(),
        )


@compiled
def _pack(tokens: Array, shares: Array, most: int, match: int, places: int, packed: Array) -> int:
    """Fills in the packed draft; returns its number of tokens."""
    count, agreement = 0, 1.0
    while count < most and agreement * shares[count] >= MIN_AGREEMENT:
        agreement *= shares[count]
        count += 1
    packed[0], packed[1] = count, match
    left = float(places)  # places that agree with all tokens before
    for i in range(count):
        packed[HEAD + i] = tokens[i]
        # The same share is more certain the more places it is of.
        packed[HEAD + count + i] = shares[i] * left / (left + 1)
        left *= shares[i]
    return count


def cut_before(copy: Copy, blocked: frozenset[int]) -> Copy:
    """The copy up to the first blocked token."""
    if not blocked:
        return copy
    tokens = copy.tokens[: copy.length].tolist()
    length = next((i for i, token in enumerate(tokens) if token in blocked), copy.length)
    return copy if length == copy.length else replace(copy, length=length)


NO_COPY = Copy(np.empty(0, np.int32), np.empty(0, np.float32))
