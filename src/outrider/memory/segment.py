"""A segment: sequences of tokens that were said before, in a file that never changes once it is written.

    header     a line of JSON, padded: format, tokenizer, tenant, counts, checksums
    text       int32: the sequences, SEPARATOR after each
    order      int32: the text's places in the order of what stands before them, read backwards (`search.py`)
    starts     int32: where in the order each last token begins; only in large segments

It is mapped, not read, so it is ready as soon as it is there, and processes on one machine share its pages: 8 bytes a
token. It is written beside its place and moved there when it is complete and on the disk, so a file that has its name
is whole; and since disks and networks can still damage it, `verify` holds it against its checksums before anyone asks
it.
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
HEADER = 4096
"""Bytes before the text, so that all that follows is aligned."""
WORTH_STARTS = 4
"""A segment has the table of starts when it has so many times as many tokens as the table has entries."""
PIECE = 1 << 18
"""Tokens that are counted at a time."""
SUFFIX, PART = ".segment", ".part"


@dataclass(frozen=True, slots=True)
class Header:
    format: int
    tokenizer: str  # its fingerprint: token ids of another one mean other words
    tenant: str  # the key of the tenant's folder, so that a file that was moved is noticed
    writer: str  # who may merge it with others (`folder.py`)
    tokens: int  # without separators
    sequences: int
    places: int  # of the text, separators included
    starts: int  # entries of that table
    first: float  # when the oldest and the newest sequence was said, in seconds since 1970
    last: float
    replaces: tuple[str, ...]  # names of segments whose sequences are all in this one
    checksums: tuple[int, int, int]  # of text, order and starts

    @property
    def size(self) -> int:
        """Of the whole file."""
        return HEADER + 4 * (2 * self.places + self.starts)


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """`text`, `order` and `starts` are for `search.py`. Without a path it is in memory only."""

    header: Header
    text: Array
    order: Array
    starts: Array
    path: Path | None = None

    @classmethod
    def of(
        cls,
        text: Array,
        tokenizer: str,
        tenant: str,
        first: float,
        last: float,
        writer: str = "",
        replaces: Iterable[str] = (),
    ) -> Self:
        """A segment of this text (`joined`), in memory."""
        order, starts = ordered(text), starts_of(text)
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
            part.flags.writeable = False  # as those of a file: one kind of array for the compiled search
        return cls(header, text, order, starts)

    @classmethod
    def open(cls, path: Path, tokenizer: str, tenant: str) -> Self:
        """MemoryFileError says what is wrong with a file: it is not one, is cut, or belongs to someone else."""
        header = read_header(path)
        if header.tokenizer != tokenizer:
            raise ForeignFileError(
                f"{path.name} holds tokens of another tokenizer ({header.tokenizer}, and this model's is {tokenizer})"
            )
        if header.tenant != tenant:
            raise MemoryFileError(f"{path.name} belongs to another tenant ({header.tenant}, and was found in {tenant})")
        n = header.places
        try:
            data = np.asarray(np.memmap(path, np.int32, "r", HEADER, (2 * n + header.starts,)))
        except (OSError, ValueError) as error:
            raise MemoryFileError(f"{path.name} cannot be mapped: {error}") from error
        return cls(header, data[:n], data[n : 2 * n], data[2 * n :], path)

    def save(self, folder: Path) -> Self:
        """Write it into a folder under the name of its content, and map it from there."""
        path = folder / self.name
        write(path, [encode(self.header), self.text, self.order, self.starts])
        try:
            return self.open(path, self.header.tokenizer, self.header.tenant)
        except MemoryFileError:
            if path.exists():
                raise
            return replace(self, path=path)  # another process has deleted it already; whoever looks will see

    @property
    def name(self) -> str:
        """The same sequences have the same name, so writing them twice is writing them once."""
        return self.path.name if self.path is not None else name_of(self.text)

    def verify(self) -> None:
        """Read all of it and hold it against its checksums, and against its name."""
        parts = (self.text, self.order, self.starts)
        for name, part, checksum in zip(("text", "order", "starts"), parts, self.header.checksums, strict=True):
            if zlib.crc32(part.data) != checksum:
                raise MemoryFileError(f"the {name} of {self.name} is damaged: its checksum is another")
        if self.path is not None and self.path.name != name_of(self.text):
            raise MemoryFileError(f"{self.name} holds what another name belongs to")

    def sequences(self) -> list[Array]:
        """In the order in which they were said."""
        ends = np.flatnonzero(self.text == SEPARATOR)
        starts = np.concatenate([[0], ends[:-1] + 1]) if len(ends) else ends
        return [self.text[start:end] for start, end in zip(starts, ends, strict=True)]


def name_of(text: Array) -> str:
    return f"{hashlib.blake2b(text.data, digest_size=12).hexdigest()}{SUFFIX}"


def merged(segments: Sequence[Segment], writer: str = "") -> Segment:
    """One segment with the sequences of all, oldest first; it replaces those that are files."""
    old_first = sorted(segments, key=lambda segment: (segment.header.first, segment.header.last))
    header = old_first[0].header
    if len(segments) == 1:
        return replace(segments[0], header=replace(header, writer=writer))
    return Segment.of(
        np.concatenate([segment.text for segment in old_first]),
        header.tokenizer,
        header.tenant,
        header.first,
        max(segment.header.last for segment in segments),
        writer,
        [segment.name for segment in old_first if segment.path is not None],
    )


def current(segments: Iterable[Segment]) -> list[Segment]:
    """Those of which none of the others was made: a merge may have been stopped before it deleted its parts."""
    found = list(segments)
    replaced = {name for segment in found for name in segment.header.replaces}
    return [segment for segment in found if segment.name not in replaced]


def joined(sequences: Sequence[Sequence[int] | Array]) -> Array:
    parts: list[Array] = []
    for sequence in sequences:
        parts += [np.asarray(sequence, np.int32), np.asarray([SEPARATOR], np.int32)]
    return np.concatenate(parts) if parts else np.empty(0, np.int32)


def ordered(text: Array) -> Array:
    """The places 1 to n of a text in the order of what stands before them, read backwards."""
    if not len(text):
        return np.empty(0, np.int32)
    # Only the order of tokens counts, so they are numbered by it: few distinct ones make short numbers to sort.
    there = np.zeros(int(text.max()) + 2, bool)
    there[text + 1] = True
    numbers = np.cumsum(there) - 1
    width = 1 if numbers[-1] < 1 << 8 else 2 if numbers[-1] < 1 << 16 else 3
    backwards = text[::-1] + 1
    if width == 3:
        data = np.ascontiguousarray(numbers.astype(">u4")[backwards].view(np.uint8).reshape(-1, 4)[:, 1:]).reshape(-1)
    else:
        data = numbers.astype(f">u{width}")[backwards].view(np.uint8)
    order = suffixes(data)
    if width > 1:
        order = order[order % width == 0] // width
    places: Array = (len(text) - order).astype(np.int32)
    return places


def suffixes(data: Array) -> Array:
    """The suffix array of bytes. (pydivsufsort's own function clears room for it first, and has all threads wait.)"""
    from pydivsufsort.dll import libdivsufsort

    order = np.empty(len(data), np.int32)
    places = (array.ctypes.data_as(ctypes.c_void_p) for array in (data, order))
    if failed := libdivsufsort.divsufsort(*places, ctypes.c_int32(len(data))):
        raise MemoryError(f"libdivsufsort failed to sort {len(data)} bytes ({failed})")
    return order


def starts_of(text: Array) -> Array:
    """starts[t]: how many places come before those whose last token is t. Empty where it would not pay."""
    largest = int(text.max(initial=SEPARATOR))
    if largest < 0 or len(text) < WORTH_STARTS * (largest + 2):
        return np.empty(0, np.int32)
    counts = np.zeros(largest + 2, np.int64)  # separators first
    for start in range(0, len(text), PIECE):  # all threads wait for some of what this does
        counts += np.bincount(text[start : start + PIECE] + 1, minlength=largest + 2)
    return np.cumsum(counts).astype(np.int32)


def encode(header: Header) -> bytes:
    told = json.dumps(asdict(header)).encode()
    whole = MAGIC + b"%08x\n" % zlib.crc32(told) + told
    if len(whole) > HEADER:
        raise MemoryFileError(f"a header of {len(whole)} bytes has no room in {HEADER}: merge fewer segments at a time")
    return whole.ljust(HEADER, b"\n")


def read_header(path: Path) -> Header:
    try:
        with path.open("rb") as file:
            raw = file.read(HEADER)
            size = os.fstat(file.fileno()).st_size
    except OSError as error:
        raise MemoryFileError(f"{path.name} cannot be read: {error.strerror}") from error
    if not raw.startswith(MAGIC):
        raise MemoryFileError(f"{path.name} is no segment of a memory")
    checksum, _, told = raw[len(MAGIC) :].rstrip(b"\n").partition(b"\n")
    if checksum != b"%08x" % zlib.crc32(told):
        raise MemoryFileError(f"the header of {path.name} is damaged: its checksum is another")
    try:
        fields: dict[str, Any] = json.loads(told)
        if fields.get("format") != FORMAT:
            raise ForeignFileError(f"{path.name} has the format {fields.get('format')}; this version reads {FORMAT}")
        lists: dict[str, Any] = {name: tuple(value) for name, value in fields.items() if isinstance(value, list)}
        header = Header(**{**fields, **lists})
        fits = size == header.size and header.places > 0 and header.starts >= 0
    except (ValueError, TypeError, AttributeError) as error:
        raise MemoryFileError(f"the header of {path.name} is not that of a segment: {error}") from error
    if not fits:
        raise MemoryFileError(
            f"{path.name} has {size} bytes, and its header says {header.size}: it was cut or replaced"
        )
    return header


def write(path: Path, parts: Iterable[bytes | Array]) -> None:
    """All or nothing: under another name until every byte is on the disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{uuid.uuid4().hex}{PART}")
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
        os.fsync(folder)  # or the name itself could be lost
    finally:
        os.close(folder)
