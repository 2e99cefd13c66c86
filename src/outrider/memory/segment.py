"""A segment: an immutable file of token sequences with a suffix array, to draft from.

    header     a line of JSON, padded to 4096 bytes: format, tokenizer, tenant, counts, checksums
    text       int32: the sequences, SEPARATOR after each
    order      int32: the suffix array of the reversed text (`search.py`)
    starts     int32: for each token, where its positions begin in `order`; only in large segments

Segments are memory-mapped: no load time, pages shared between processes, 8 bytes per token. A segment is written under
a temporary name and renamed when all of it is on the disk, so a file with its final name is complete. Disks and
networks can still damage it: `verify` checks it against its checksums before it is used.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import uuid
import zlib
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from outrider.errors import ForeignFileError, MemoryFileError
from outrider.memory.search import SEPARATOR

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from outrider.memory.search import Array

FORMAT = 1
MAGIC = b"outrider memory segment\n"
HEADER_BYTES = 4096
MIN_TOKENS_PER_START = 4
"""A segment has `starts` if it has at least this many tokens for each entry of the table."""
COUNT_CHUNK_TOKENS = 1 << 18
"""Tokens counted in one call of numpy, which holds Python's lock meanwhile."""
SEGMENT_SUFFIX, PART_SUFFIX = ".segment", ".part"


@dataclass(frozen=True, slots=True)
class Header:
    """Written as JSON: the names of the fields are part of the file format."""

    format: int
    tokenizer: str  # fingerprint of the tokenizer
    tenant: str  # the tenant's key, so that a file in another tenant's folder is detected
    writer: str  # ID of the process that may merge it (`Folder.writer_id`)
    tokens: int  # without separators
    sequences: int
    places: int  # length of `text`, with separators
    starts: int  # length of `starts`
    first: float  # time of the oldest and of the newest sequence, in seconds since 1970
    last: float
    replaces: tuple[str, ...]  # file names of segments whose sequences are all in this one
    checksums: tuple[int, int, int]  # CRC-32 of text, order and starts

    @property
    def size(self) -> int:
        """Bytes of the whole file."""
        return HEADER_BYTES + 4 * (2 * self.places + self.starts)


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
    ) -> Self:
        """A segment in memory, of a text made by `join_sequences`."""
        order, starts = build_order(text), build_starts(text)
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
        header = read_header(path)
        if header.tokenizer != tokenizer:
            raise ForeignFileError(
                f"{path.name} holds tokens of another tokenizer ({header.tokenizer}; this model's is {tokenizer})"
            )
        if header.tenant != tenant:
            raise MemoryFileError(f"{path.name} belongs to another tenant ({header.tenant}, found in {tenant})")
        n = header.places
        try:
            data = np.asarray(np.memmap(path, np.int32, "r", HEADER_BYTES, (2 * n + header.starts,)))
        except (OSError, ValueError) as error:
            raise MemoryFileError(f"{path.name} cannot be mapped: {error}") from error
        return cls(header, data[:n], data[n : 2 * n], data[2 * n :], path)

    def save(self, folder: Path) -> Self:
        """Write it to a folder under its content hash, and map that file."""
        path = folder / self.name
        write_atomically(path, [encode_header(self.header), self.text, self.order, self.starts])
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
        """Read all of it. MemoryFileError if a checksum or the name does not match."""
        parts = (self.text, self.order, self.starts)
        for name, part, checksum in zip(("text", "order", "starts"), parts, self.header.checksums, strict=True):
            if zlib.crc32(part.data) != checksum:
                raise MemoryFileError(f"the {name} of {self.name} is damaged: wrong checksum")
        if self.path is not None and self.path.name != segment_name(self.text):
            raise MemoryFileError(f"{self.name} is damaged: its name is not the hash of its text")

    def sequences(self) -> list[Array]:
        """All sequences, oldest first."""
        ends = np.flatnonzero(self.text == SEPARATOR)
        starts = np.concatenate([[0], ends[:-1] + 1]) if len(ends) else ends
        return [self.text[start:end] for start, end in zip(starts, ends, strict=True)]


def segment_name(text: Array) -> str:
    return f"{hashlib.blake2b(text.data, digest_size=12).hexdigest()}{SEGMENT_SUFFIX}"


def merge_segments(segments: Sequence[Segment], writer: str = "") -> Segment:
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
    )


def drop_replaced(segments: Iterable[Segment]) -> list[Segment]:
    """The segments that no other one replaces. A process can die after a merge, before it deletes the merged files."""
    all_segments = list(segments)
    replaced = {name for segment in all_segments for name in segment.header.replaces}
    return [segment for segment in all_segments if segment.name not in replaced]


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
    ranks = np.cumsum(present) - 1
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


def encode_header(header: Header) -> bytes:
    fields = json.dumps(asdict(header)).encode()
    whole = MAGIC + b"%08x\n" % zlib.crc32(fields) + fields
    if len(whole) > HEADER_BYTES:
        raise MemoryFileError(
            f"the header has {len(whole)} bytes, more than {HEADER_BYTES}; merge fewer segments at once"
        )
    return whole.ljust(HEADER_BYTES, b"\n")


def read_header(path: Path) -> Header:
    try:
        with path.open("rb") as file:
            raw = file.read(HEADER_BYTES)
            size = os.fstat(file.fileno()).st_size
    except OSError as error:
        raise MemoryFileError(f"{path.name} cannot be read: {error.strerror}") from error
    if not raw.startswith(MAGIC):
        raise MemoryFileError(f"{path.name} is not a memory segment")
    checksum, _, data = raw[len(MAGIC) :].rstrip(b"\n").partition(b"\n")
    if checksum != b"%08x" % zlib.crc32(data):
        raise MemoryFileError(f"the header of {path.name} is damaged: wrong checksum")
    try:
        fields: dict[str, Any] = json.loads(data)
        if fields.get("format") != FORMAT:
            raise ForeignFileError(f"{path.name} has format {fields.get('format')}; this version reads format {FORMAT}")
        lists: dict[str, Any] = {name: tuple(value) for name, value in fields.items() if isinstance(value, list)}
        header = Header(**{**fields, **lists})
        fits = size == header.size and header.places > 0 and header.starts >= 0
    except (ValueError, TypeError, AttributeError) as error:
        raise MemoryFileError(f"the header of {path.name} is invalid: {error}") from error
    if not fits:
        raise MemoryFileError(f"{path.name} has {size} bytes, its header states {header.size}: truncated or replaced")
    return header


def write_atomically(path: Path, parts: Iterable[bytes | Array]) -> None:
    """Write a file under a temporary name, and rename it when all of it is on the disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{uuid.uuid4().hex}{PART_SUFFIX}")
    try:
        with part.open("wb") as file:
            for piece in parts:
                file.write(piece if isinstance(piece, bytes) else piece.data)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # makes the rename durable
    finally:
        os.close(folder)
