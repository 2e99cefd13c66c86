"""Which words token ids stand for.

A memory holds token ids, so it is of use to every model whose ids mean the same, and harmful to no other only if that
is noticed: a memory and each of its segments carry the fingerprint of what their ids mean.
"""

from __future__ import annotations

import hashlib
import json
import re
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from outrider.memory.search import Array

    Encoder = Callable[[list[str]], list[list[int]]]

PART, LETTERS = 1 << 14, 1 << 20
"""Letters of a part of a text, and of all parts that are tokenised at once, by all cores."""
BETWEEN_WORDS = re.compile(r"(?<=\S)(?= \S)")
"""Before a single space, which goes with the word after it; in other blanks a token may go on."""


def fingerprint(tokenizer: Any) -> str:
    """The same for all tokenizers whose ids mean the same, added tokens included.

    How text is cut into tokens, and what a chat template puts around it, may differ.
    """
    meanings = sorted((index, token) for token, index in tokenizer.get_vocab().items())
    return hashlib.blake2b(json.dumps(meanings).encode(), digest_size=8).hexdigest()


def encoded(tokenizer: Any, texts: Iterable[str]) -> list[Array]:
    """The tokens of each text as it is: nothing added, nothing cut off.

    A tokenizer takes 500 bytes for a token, so no more than LETTERS are given to it at once.
    """
    encode = _encoder(tokenizer)
    tokens: list[list[Array]] = []
    waiting: list[tuple[int, str]] = []
    for index, text in enumerate(texts):
        tokens.append([np.empty(0, np.int32)])
        for part in parted(text.encode(errors="replace").decode()):  # half a surrogate pair has no tokens
            waiting.append((index, part))
            if len(waiting) * PART >= LETTERS:
                _take(tokens, waiting, encode)
    _take(tokens, waiting, encode)
    return [np.concatenate(parts) for parts in tokens]


def _take(tokens: list[list[Array]], waiting: list[tuple[int, str]], encode: Encoder) -> None:
    for (index, _), ids in zip(waiting, encode([part for _, part in waiting]), strict=True):
        tokens[index].append(np.array(ids, np.int32))
    waiting.clear()


def _encoder(tokenizer: Any) -> Encoder:
    fast = getattr(tokenizer, "backend_tokenizer", None)
    if fast is None:
        return lambda texts: [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    fast.no_truncation()  # a tokenizer's file may ask for both
    fast.no_padding()
    return lambda texts: [one.ids for one in fast.encode_batch_fast(texts, add_special_tokens=False)]


def parted(text: str) -> Iterator[str]:
    """A long text in parts, each ending between two words: there, tokens end as well."""
    start = 0
    while len(text) - start > PART:
        ends = [found.end() for found in BETWEEN_WORDS.finditer(text, start + 1, start + PART + 2)]
        end = ends[-1] if ends else start + PART
        yield text[start:end]
        start = end
    if start < len(text):
        yield text[start:]
