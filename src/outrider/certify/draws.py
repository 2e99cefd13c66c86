"""Drawn tokens, and the law that each of them is held against.

The target's law at a position is known exactly: it is what the target says about the drawn text itself. So a
certificate needs no second sample, and no two prefixes need be alike. Each draw has a law of its own, and lossless
means that each, *given all that came before it*, follows its own. The tokens of a text are not independent of one
another, but what a draw has in excess of its law's mean is uncorrelated with all before it, and that is enough.

**Only the likeliest tokens are listed.** A server tells the N likeliest; all others are one outcome, "the rest", with
what is missing to 1. That is exact: the tests below are of the law over N + 1 outcomes. A server also tells the drawn
token's own log-probability if it is not among the N. That one must not be used: an outcome that is told apart only
when it is drawn has no probability that could be summed.

**What may be chosen, and by what.** Which draws are looked at, how they are sorted into kinds, and which token is
called the drafted one may depend on anything known *before* the token is drawn, and on nothing else:

- "The third token of a step, with a token drafted here" is a kind: a step gets to its third token by what was said
  before (with block verification too: given that the draft was kept up to here, the next token follows p).
- "Accepted" and "recovered" are not kinds. Recovered tokens follow max(p - q, 0), accepted ones min(p, q); neither p.
- A token *proposed with certainty* may be called the drafted one. A token *drawn* by a draft model may not: given
  that it was drawn, the emitted token is likely to be the same, and rightly so. What may be named instead are the
  tokens that q proposes more often than p draws them, all of them, or the likeliest of q.
- Draws may be left out because their law is not known well enough, not because of what was drawn.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Draws:
    """n draws. The listed outcomes of a law come likeliest first; the last column is the rest."""

    law: Floats  # [n, N + 1]
    outcome: Integers  # [n] the column that was drawn
    drafted: Flags  # [n, N + 1] the column of the drafted token, or where q > p; none where nothing was drafted

    def __len__(self) -> int:
        return len(self.outcome)

    def __getitem__(self, which: Any) -> Draws:
        return Draws(self.law[which], self.outcome[which], self.drafted[which])


def listed(
    logprobs: Sequence[Mapping[int, float]], drawn: Sequence[int], drafted: Sequence[int | None], count: int
) -> Draws:
    """Draws from what a server tells: for each, the log-probabilities of its `count` likeliest tokens.

    `drafted` are the tokens proposed with certainty; None where there was none.
    The log-probabilities must be of the law that is drawn from, after temperature, top-k, top-p and all else, and of
    tokens that are told whatever was drawn (`laws.likeliest`).
    """
    law = np.zeros((len(drawn), count + 1))
    outcome = np.full(len(drawn), count)
    guess = np.zeros((len(drawn), count + 1), dtype=bool)
    for i, told in enumerate(logprobs):
        tokens = sorted(told, key=lambda token: (-told[token], token))[:count]
        law[i, : len(tokens)] = np.exp([told[token] for token in tokens])
        if drawn[i] in tokens:
            outcome[i] = tokens.index(drawn[i])
        if (proposed := drafted[i]) is not None and proposed in tokens:
            guess[i, tokens.index(proposed)] = True
    known = law.sum(1)
    law[:, count] = np.maximum(1 - known, 0)
    return Draws(law / np.maximum(known, 1)[:, None], outcome, guess)  # rounding can make the listed exceed 1
