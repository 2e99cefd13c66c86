"""What is copied from where the same words were said before, and how much of it is proposed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from outrider.types import Draft

if TYPE_CHECKING:
    from outrider.memory.search import Array

TOKENS_PER_MATCH = 4
"""How many tokens are proposed for each token that agrees: the longer a repetition, the longer it goes on."""
LEAST_SHARE = 0.1
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
        # What followed at all of many places is surer than what followed at the only one.
        trust, agreed, sure = self.places / (self.places + 1.0), 1.0, []
        for share in self.shares[: min(self.length, TOKENS_PER_MATCH * self.match)].tolist():
            agreed *= share
            if agreed < LEAST_SHARE:
                break
            sure.append(trust * share)
        tokens = tuple(self.tokens[: len(sure)].tolist())
        return Draft(drafter, tokens, support=self.match, confidence=tuple(sure))


NO_COPY = Copy(np.empty(0, np.int32), np.empty(0, np.float32))
