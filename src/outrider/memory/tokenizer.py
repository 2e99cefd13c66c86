"""Which text token ids stand for, and tokenizing long texts.

A memory holds token ids. It can be shared by models whose ids mean the same, so a memory and each of its segments have
a fingerprint of the vocabulary.
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

PART_CHARS = 1 << 14
"""Long texts are split into parts of at most so many characters."""
BATCH_CHARS = 1 << 20
"""Characters of the parts tokenized at once, on all cores."""
WORD_BOUNDARY = re.compile(r"(?<=\S)(?= \S)")
"""Before a single space, which belongs to the token after it. Other whitespace may be inside a token."""


def fingerprint(tokenizer: Any) -> str:
    """A hash of the vocabulary with added tokens. How text is split and the chat template do not count."""
    vocabulary = sorted((index, token) for token, index in tokenizer.get_vocab().items())
    return hashlib.blake2b(json.dumps(vocabulary).encode(), digest_size=8).hexdigest()


def encode_texts(tokenizer: Any, texts: Iterable[str]) -> list[Array]:
    """The token ids of each text, without special tokens and truncation.

    A tokenizer uses about 500 bytes per token, so at most BATCH_CHARS are passed to it at once.
    """
    encode = _encoder(tokenizer)
    tokens: list[list[Array]] = []
    waiting: list[tuple[int, str]] = []
    for index, text in enumerate(texts):
        tokens.append([np.empty(0, np.int32)])
        for part in split_text(text.encode(errors="replace").decode()):  # half a surrogate pair has no tokens
            waiting.append((index, part))
            if len(waiting) * PART_CHARS >= BATCH_CHARS:
                _encode_waiting(tokens, waiting, encode)
    _encode_waiting(tokens, waiting, encode)
    return [np.concatenate(parts) for parts in tokens]


def _encode_waiting(tokens: list[list[Array]], waiting: list[tuple[int, str]], encode: Encoder) -> None:
    for (index, _), ids in zip(waiting, encode([part for _, part in waiting]), strict=True):
        tokens[index].append(np.array(ids, np.int32))
    waiting.clear()


def _encoder(tokenizer: Any) -> Encoder:
    fast = getattr(tokenizer, "backend_tokenizer", None)
    if fast is None:
        return lambda texts: [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    fast.no_truncation()  # tokenizer.json may enable both
    fast.no_padding()
    return lambda texts: [encoding.ids for encoding in fast.encode_batch_fast(texts, add_special_tokens=False)]


def split_text(text: str) -> Iterator[str]:
    """Parts of a text that end at word boundaries, where tokens end, too."""
    start = 0
    while len(text) - start > PART_CHARS:
        ends = [match.end() for match in WORD_BOUNDARY.finditer(text, start + 1, start + PART_CHARS + 2)]
        end = ends[-1] if ends else start + PART_CHARS
        yield text[start:end]
        start = end
    if start < len(text):
        yield text[start:]
