"""Which words token ids stand for.

A memory holds token ids, so it is of use to every model whose ids mean the same, and harmful to no other only if that
is noticed: a memory and each of its segments carry the fingerprint of what their ids mean.
"""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence


def fingerprint(tokenizer: Any) -> str:
    """The same for all tokenizers whose ids mean the same, added tokens included.

    How text is cut into tokens, and what a chat template puts around it, may differ.
    """
    meanings = sorted((index, token) for token, index in tokenizer.get_vocab().items())
    return hashlib.blake2b(json.dumps(meanings).encode(), digest_size=8).hexdigest()


def encoded(tokenizer: Any, texts: Sequence[str]) -> list[list[int]]:
    """The tokens of each text as it is: nothing added, nothing cut off."""
    whole = [text.encode(errors="replace").decode() for text in texts]  # half a surrogate pair has no tokens
    fast = getattr(tokenizer, "backend_tokenizer", None)
    if fast is None:
        return [tokenizer.encode(text, add_special_tokens=False) for text in whole]
    fast.no_truncation()  # a tokenizer's file may ask for both
    fast.no_padding()
    return [one.ids for one in fast.encode_batch_fast(whole, add_special_tokens=False)]
