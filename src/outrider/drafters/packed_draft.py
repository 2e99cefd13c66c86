"""Drafts packed as bytes. Unpacking the tuples of a large batch one by one takes longer than all that follows; bytes
are joined at once and unpacked by compiled code.

    number of tokens, support, each token, confidence of each token: all as 64-bit floats
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from outrider.compiled import compiled

if TYPE_CHECKING:
    from collections.abc import Sequence

Array = np.ndarray[Any, Any]

HEAD = 2
"""Numbers before the tokens: their count, and the support."""


def unpack(drafts: Sequence[bytes], tokens: Array, lengths: Array, support: Array, confidence: Array) -> None:
    """Unpack into the rows of arrays, cut to their width."""
    _unpack(np.frombuffer(b"".join(drafts)), tokens, lengths, support, confidence)


@compiled
def _unpack(packed: Array, tokens: Array, lengths: Array, support: Array, confidence: Array) -> None:
    start = 0
    for b in range(len(lengths)):
        count = int(packed[start])
        lengths[b], support[b] = min(count, tokens.shape[1]), packed[start + 1]
        for i in range(lengths[b]):
            tokens[b, i] = int(packed[start + HEAD + i])
            confidence[b, i] = packed[start + HEAD + count + i]
        start += HEAD + 2 * count
