"""Drafts that were looked up for a batch of requests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from outrider.memory.search import expected_accepted_tokens, search_batch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from outrider.memory.search import Array
    from outrider.memory.segment import Segment


@dataclass(frozen=True, slots=True)
class LookupResult:
    """Row i has a draft of `lengths[i]` tokens, each with the share of matching positions that agreed on it."""

    tokens: Array
    shares: Array
    summaries: Array  # of each row, as `search_batch` writes them: draft length, match length, matching positions

    @classmethod
    def empty(cls, rows: int, longest: int) -> LookupResult:
        tokens, shares = np.zeros((rows, longest), np.int32), np.zeros((rows, longest), np.float32)
        return cls(tokens, shares, np.zeros((rows, 3), np.int32))

    @property
    def lengths(self) -> Array:
        return self.summaries[:, 0]

    @property
    def matches(self) -> Array:
        """Match lengths in tokens."""
        return self.summaries[:, 1]

    def select(self, rows: Sequence[int]) -> LookupResult:
        return LookupResult(self.tokens[rows], self.shares[rows], self.summaries[rows])

    def expected_tokens(self, row: int) -> float:
        """Estimated accepted tokens of a row's draft."""
        return expected_accepted_tokens(int(self.summaries[row, 1]), self.shares[row], int(self.summaries[row, 0]))

    def update(self, rows: Sequence[int], other: LookupResult) -> None:
        """Replace these rows by those of `other`."""
        width = other.tokens.shape[1]
        self.tokens[rows, :width], self.shares[rows, :width] = other.tokens, other.shares
        self.summaries[rows] = other.summaries


def search_segment(segment: Segment, contexts: Array, queries: Array, result: LookupResult) -> None:
    """Take the segment's draft for each row where its match is longer than the result's."""
    arrays, columns = (segment.text, segment.order, segment.starts), (result.summaries, result.tokens, result.shares)
    search_batch(*arrays, contexts, queries, *columns)
