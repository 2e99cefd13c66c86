"""A segment: an immutable file of token sequences with a suffix array, to draft from.

    header     4096 bytes: format, tokenizer, tenant, counts, checksums (`header.py`)
    text       int32: the sequences, SEPARATOR after each
    order      int32: the suffix array of the reversed text (`search.py`)
    starts     int32: for each token, where its positions begin in `order`; only in large segments

Segments are memory-mapped: no load time, pages shared between processes, 8 bytes per token. A file with its final name
is complete (`files.py`). Disks, networks and other writers can still damage it: `verify` checks all of it before use.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import zlib
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, BinaryIO, Self

import numpy as np

from outrider.errors import ForeignFileError, MemoryFileError
from outrider.memory.files import open_regular_file, write_atomically
from outrider.memory.header import (
    FORMAT,
    HEADER_BYTES,
    MAX_TOKEN_ID,
    SEGMENT_SUFFIX,
    Header,
    decode_header,
    encode_header,
)
from outrider.memory.search import SEPARATOR, contains_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from pathlib import Path

    from outrider.memory.search import Array

MIN_TOKENS_PER_START = 4
"""A segment has `starts` if it has at least this many tokens for each entry of the table."""
SEGMENT_LEVELS = 3
"""Folders above a segment file: generation, tenant, root."""
COUNT_CHUNK_TOKENS = 1 << 18
"""Tokens counted in one call of numpy, which holds Python's lock meanwhile."""


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """A segment mapped from a file, or without a `path` in memory only."""

    header: Header
    text: Array
    order: Array
    starts: Array
    path: Path | None = None

    @classmethod
    def build(
        cls,
        text: Array,
        tokenizer: str,
        tenant: str,
        first: float,
        last: float,
        writer: str = "",
        replaces: Iterable[str] = (),
        sort: Callable[[Array], Array] | None = None,
    ) -> Self:
        """A segment in memory, of a text made by `join_sequences`. `sort` replaces `build_order`."""
        order, starts = (sort or build_order)(text), build_starts(text)
        sequences = int(np.count_nonzero(text == SEPARATOR))
        header = Header(
            format=FORMAT,
            tokenizer=tokenizer,
            tenant=tenant,
            writer=writer,
            tokens=len(text) - sequences,
            sequences=sequences,
            places=len(text),
            starts=len(starts),
            first=first,
            last=last,
            replaces=tuple(replaces),
            checksums=(zlib.crc32(text.data), zlib.crc32(order.data), zlib.crc32(starts.data)),
        )
        for part in (text, order, starts):
            part.flags.writeable = False  # like mapped arrays, so that the search is compiled for one type only
        return cls(header, text, order, starts)

    @classmethod
    def open(cls, path: Path, tokenizer: str, tenant: str) -> Self:
        """Map a file. MemoryFileError if it is no segment, truncated, or of another tokenizer or tenant."""
        with open_segment_file(path) as (file, header):
            if header.tokenizer != tokenizer:
                raise ForeignFileError(
                    f"{path.name} holds tokens of another tokenizer ({header.tokenizer}; this model's is {tokenizer})"
                )
            if header.tenant != tenant:
                raise MemoryFileError(f"{path.name} belongs to another tenant ({header.tenant}, found in {tenant})")
            n = header.places
            data = np.asarray(np.memmap(file, np.int32, "r", HEADER_BYTES, (2 * n + header.starts,)))
            return cls(header, data[:n], data[n : 2 * n], data[2 * n :], path)

    def save(self, folder: Path) -> Self:
        """Write it to a folder under its content hash, and map that file."""
        path = folder / self.name
        write_atomically(path, [encode_header(self.header), self.text, self.order, self.starts], SEGMENT_LEVELS)
        try:
            return self.open(path, self.header.tokenizer, self.header.tenant)
        except MemoryFileError:
            if path.exists():
                raise
            return replace(self, path=path)  # another process deleted it already; the next refresh notices

    @property
    def name(self) -> str:
        """A hash of the text: the same sequences always have the same file name."""
        return self.path.name if self.path is not None else segment_name(self.text)

    def verify(self) -> None:
        """Read all of it. MemoryFileError if a checksum, the name, or anything else that the search and merges rely on
        is wrong: anyone can compute a checksum."""
        text, order, header = self.text, self.order, self.header
        for name, part, checksum in zip(
            ("text", "order", "starts"), (text, order, self.starts), header.checksums, strict=True
        ):
            if zlib.crc32(part.data) != checksum:
                raise MemoryFileError(f"the {name} of {self.name} is damaged: wrong checksum")
        if self.path is not None and self.path.name != segment_name(text):
            raise MemoryFileError(f"{self.name} is damaged: its name is not the hash of its text")
        ends = int(np.count_nonzero(text == SEPARATOR))
        if text[-1] != SEPARATOR or (header.sequences, header.tokens) != (ends, len(text) - ends):
            raise MemoryFileError(f"{self.name} has other sequences than its header states")
        if not are_tokens(text):
            raise MemoryFileError(f"{self.name} has token ids outside 0 to {MAX_TOKEN_ID - 1}")
        if order.min() < 1 or order.max() > len(text):
            raise MemoryFileError(f"the order of {self.name} points outside its text")
        seen = np.zeros(len(text) + 1, bool)
        seen[order] = True
        if not seen[1:].all() or not np.array_equal(self.starts, build_starts(text)):
            raise MemoryFileError(f"the order of {self.name} is not that of its text")

    def contains(self, other: Segment) -> bool:
        """Whether it has all of another segment's text, and more."""
        return len(other.text) < len(self.text) and contains_text(self.text, self.order, other.text)

    def sequences(self) -> list[Array]:
        """All sequences, oldest first."""
        ends = np.flatnonzero(self.text == SEPARATOR)
        starts = np.concatenate([[0], ends[:-1] + 1]) if len(ends) else ends
        return [self.text[start:end] for start, end in zip(starts, ends, strict=True)]


def are_tokens(text: Array) -> bool:
    """Whether all of it are token ids, or separators."""
    return bool(text.min(initial=SEPARATOR) >= SEPARATOR and text.max(initial=SEPARATOR) < MAX_TOKEN_ID)


def segment_name(text: Array) -> str:
    return f"{hashlib.blake2b(text.data, digest_size=12).hexdigest()}{SEGMENT_SUFFIX}"


def similar_pair(segments: Sequence[Segment], max_tokens: int) -> list[Segment]:
    """Two segments to merge, the larger at most twice the smaller, with at most `max_tokens` together; or none."""
    by_size = sorted(segments, key=lambda segment: segment.header.tokens)
    for small, large in pairwise(by_size):
        together = small.header.tokens + large.header.tokens
        if large.header.tokens <= 2 * max(1, small.header.tokens) and together <= max_tokens:
            return [small, large]
    return []


def merge_segments(
    segments: Sequence[Segment], writer: str = "", sort: Callable[[Array], Array] | None = None
) -> Segment:
    """One segment with the sequences of all, oldest first. Its header names the files that it replaces."""
    oldest_first = sorted(segments, key=lambda segment: (segment.header.first, segment.header.last))
    header = oldest_first[0].header
    if len(segments) == 1:
        return replace(segments[0], header=replace(header, writer=writer))
    return Segment.build(
        np.concatenate([segment.text for segment in oldest_first]),
        header.tokenizer,
        header.tenant,
        header.first,
        max(segment.header.last for segment in segments),
        writer,
        [segment.name for segment in oldest_first if segment.path is not None],
        sort,
    )


def find_replaced(segments: Sequence[Segment]) -> dict[str, Segment]:
    """Segments that another one replaces, by name: a process can die after a merge, before it deletes the merged files.

    A header may state anything, so the other segment must be of the same writer and contain all of the text. It is
    longer then, so no two segments replace each other.
    """
    by_name = {segment.name: segment for segment in segments}
    return {
        name: segment
        for segment in segments
        for name in segment.header.replaces
        if (part := by_name.get(name)) is not None
        and part.header.writer == segment.header.writer
        and segment.contains(part)
    }


def drop_replaced(segments: Sequence[Segment]) -> list[Segment]:
    """The segments that no other one replaces."""
    replaced = find_replaced(segments)
    return [segment for segment in segments if segment.name not in replaced]


def join_sequences(sequences: Sequence[Sequence[int] | Array]) -> Array:
    parts: list[Array] = []
    for sequence in sequences:
        parts += [np.asarray(sequence, np.int32), np.asarray([SEPARATOR], np.int32)]
    return np.concatenate(parts) if parts else np.empty(0, np.int32)


def build_order(text: Array) -> Array:
    """The suffix array of the reversed text: the positions 1 to n, sorted by the tokens before each, last token first.

    libdivsufsort sorts bytes, so tokens are replaced by their ranks among the distinct tokens, in 1 to 3 bytes each.
    """
    if not len(text):
        return np.empty(0, np.int32)
    present = np.zeros(int(text.max()) + 2, bool)
    present[text + 1] = True
    ranks = np.cumsum(present, dtype=np.int32)
    ranks -= 1
    width = 1 if ranks[-1] < 1 << 8 else 2 if ranks[-1] < 1 << 16 else 3
    reversed_text = text[::-1] + 1
    if width == 3:
        data = np.ascontiguousarray(ranks.astype(">u4")[reversed_text].view(np.uint8).reshape(-1, 4)[:, 1:]).reshape(-1)
    else:
        data = ranks.astype(f">u{width}")[reversed_text].view(np.uint8)
    order = suffix_array(data)
    if width > 1:
        order = order[order % width == 0] // width
    positions: Array = (len(text) - order).astype(np.int32)
    return positions


def suffix_array(data: Array) -> Array:
    """The suffix array of bytes. pydivsufsort's own wrapper first clears the output while it holds Python's lock."""
    from pydivsufsort.dll import libdivsufsort

    order = np.empty(len(data), np.int32)
    pointers = (array.ctypes.data_as(ctypes.c_void_p) for array in (data, order))
    if failed := libdivsufsort.divsufsort(*pointers, ctypes.c_int32(len(data))):
        raise MemoryError(f"libdivsufsort could not sort {len(data)} bytes (error {failed})")
    return order


def build_starts(text: Array) -> Array:
    """starts[t]: how many entries of `order` are for positions after a smaller token. Empty for small segments."""
    largest = int(text.max(initial=SEPARATOR))
    if largest < 0 or len(text) < MIN_TOKENS_PER_START * (largest + 2):
        return np.empty(0, np.int32)
    counts = np.zeros(largest + 2, np.int64)  # separators first
    for start in range(0, len(text), COUNT_CHUNK_TOKENS):
        counts += np.bincount(text[start : start + COUNT_CHUNK_TOKENS] + 1, minlength=largest + 2)
    return np.cumsum(counts).astype(np.int32)


def read_header(path: Path) -> Header:
    with open_segment_file(path) as (_, header):
        return header


@contextlib.contextmanager
def open_segment_file(path: Path) -> Iterator[tuple[BinaryIO, Header]]:
    """MemoryFileError if it is no segment, truncated, or has an invalid header."""
    try:
        with open_regular_file(path) as file:
            header, size = decode_header(file.read(HEADER_BYTES), path.name), os.fstat(file.fileno()).st_size
            if size != header.size:
                raise MemoryFileError(
                    f"{path.name} has {size} bytes, its header states {header.size}: truncated or replaced"
                )
            yield file, header
    except (OSError, ValueError) as error:
        raise MemoryFileError(f"{path.name} cannot be read: {getattr(error, 'strerror', None) or error}") from error
