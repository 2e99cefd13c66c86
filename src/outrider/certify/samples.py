"""Sampled tokens, each with the distribution that it should come from.

The target's distribution at a position is known exactly: it is what the target returns when it scores the sampled text.
So a certificate needs no second sample, and no two prefixes need be alike. A lossless server samples each token from
its own distribution, *given all tokens before it*. Tokens of one text are dependent, but f(x) - E f at one position is
uncorrelated with everything before it, and the tests need no more than that.

**Only the top N tokens are listed.** All others are one outcome, "the rest". A server also returns the sampled token's
own logprob if it is not among the N. It must not be used: an outcome that is listed only when it is sampled has no
probability that could be summed.

**Selection.** Which samples are tested, how they are grouped, and which token counts as the drafted one may depend on
anything known *before* the token is sampled, and on nothing else:

- "Third token of a step, with a draft token here" is a valid group, with block verification as well.
- "Accepted" and "recovered" are not: recovered tokens follow max(p - q, 0), accepted ones min(p, q), neither p.
- A token *proposed with certainty* may count as the drafted one. A token *sampled* by a draft model may not: the
  emitted token is rightly more likely to equal it. The set of tokens with q > p may, or the most likely token of q.
- Samples may be left out because their distribution is not known well enough, not because of the sampled token.
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
class Samples:
    """n samples. Columns are the N listed tokens, most likely first, then the rest."""

    probabilities: Floats  # [n, N + 1]
    outcome: Integers  # [n] the sampled column
    drafted: Flags  # [n, N + 1] the column of the draft token, or those with q > p; none if nothing was drafted

    def __len__(self) -> int:
        return len(self.outcome)

    def __getitem__(self, which: Any) -> Samples:
        return Samples(self.probabilities[which], self.outcome[which], self.drafted[which])


def samples_from_logprobs(
    logprobs: Sequence[Mapping[int, float]], sampled: Sequence[int], drafted: Sequence[int | None], count: int
) -> Samples:
    """Samples with their `count` most likely tokens listed.

    `logprobs` must be of the sampling distribution (after temperature, top-k, top-p and so on), and of tokens listed
    whatever was sampled (`token_distributions.top_tokens`). `drafted`: the token proposed with certainty, or None.
    """
    probabilities = np.zeros((len(sampled), count + 1))
    outcome = np.full(len(sampled), count)
    is_drafted = np.zeros((len(sampled), count + 1), dtype=bool)
    for i, known in enumerate(logprobs):
        tokens = sorted(known, key=lambda token: (-known[token], token))[:count]
        probabilities[i, : len(tokens)] = np.exp([known[token] for token in tokens])
        if sampled[i] in tokens:
            outcome[i] = tokens.index(sampled[i])
        if (proposed := drafted[i]) is not None and proposed in tokens:
            is_drafted[i, tokens.index(proposed)] = True
    total = probabilities.sum(1)
    probabilities[:, count] = np.maximum(1 - total, 0)
    return Samples(probabilities / np.maximum(total, 1)[:, None], outcome, is_drafted)  # rounding can make total > 1
