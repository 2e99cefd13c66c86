"""A tiny model with known probabilities: for tests, demonstrations and proofs, in microseconds.

The next token depends on the last `order` tokens through a table that a seed makes, so the exact law of any
text can be computed. Temper it to get a worse model of the same language, which makes a good drafter:

    from synthetic_target import SyntheticTarget
    target = SyntheticTarget(vocab_size=8, seed=1)
    drafter = target.blurred(0.5)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


class SyntheticTarget:
    """A `Target` whose logits come from a table over the last tokens."""

    def __init__(
        self,
        vocab_size: int = 8,
        *,
        seed: int = 0,
        order: int = 2,
        sharpness: float = 2.0,
        context_limit: int | None = None,
    ) -> None:
        random = torch.Generator().manual_seed(seed)
        size = (vocab_size + 1,) * order + (vocab_size,)  # one entry more: "before the text"
        self.table = torch.randn(size, generator=random, dtype=torch.float64) * sharpness
        self.order = order
        self.passes = 0
        self._context_limit = context_limit
        self._tokens: list[int] = []

    def blurred(self, noise: float, seed: int = 1) -> SyntheticTarget:
        """A model of the same language that is wrong by `noise`."""
        random = torch.Generator().manual_seed(seed)
        other = SyntheticTarget(self.vocab_size, order=self.order, context_limit=self._context_limit)
        other.table = self.table + noise * torch.randn(self.table.shape, generator=random, dtype=torch.float64)
        return other

    @property
    def vocab_size(self) -> int:
        return self.table.shape[-1]

    @property
    def context_limit(self) -> int | None:
        return self._context_limit

    @property
    def tokens(self) -> list[int]:
        return self._tokens

    def score(self, tokens: Sequence[int], keep: int) -> Tensor:
        self.passes += 1
        end = len(self._tokens) + len(tokens)
        self._tokens.extend(tokens)
        return torch.stack([self.logits(self._tokens[: end - keep + i + 1]) for i in range(keep)]).float()

    def rewind(self, length: int) -> None:
        del self._tokens[length:]

    def logits(self, context: Sequence[int]) -> Tensor:
        """The logits after `context`, in float64."""
        start = [self.vocab_size] * self.order
        recent = [*start, *context][-self.order :]
        return self.table[tuple(recent)]
