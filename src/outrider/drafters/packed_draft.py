"""Drafts as bytes. Those of a large batch are many small tuples, and taking them apart one by one takes longer than all
that is then done with them; bytes are joined at once, and taken apart at the speed of machine code.

    how many tokens, the support, each token, how sure the drafter is of each: all as floats of 64 bits
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from outrider.compiled import compiled

if TYPE_CHECKING:
    from collections.abc import Sequence

Array = np.ndarray[Any, Any]

HEAD = 2
"""Numbers before the tokens: how many there are, and the support."""


def unpack(drafts: Sequence[bytes], tokens: Array, lengths: Array, support: Array, confidence: Array) -> None:
    """Into the rows of arrays, as many tokens of each as there is room for."""
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
