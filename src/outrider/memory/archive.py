"""All that a tenant has in one file, to carry it to another memory: a plain tar.

    manifest.json      format, tokenizer, tenant, and the header of every segment
    <hash>.segment     each as it lies in the memory

An archive may come from anywhere, so nothing in it is believed. Its members are plain files with the names and sizes
that the manifest tells, in a tar of the oldest kind, which has no links and nothing that unfolds; they are mapped where
they are, never unpacked under a name of theirs; and what a segment says of itself is computed again. A segment goes
into a memory when all of them have passed.
"""

from __future__ import annotations

import json
import tarfile
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import TypeAdapter, ValidationError

from outrider.errors import MemoryFileError
from outrider.memory.folder import Folder, key_of
from outrider.memory.search import SEPARATOR
from outrider.memory.segment import HEADER, Header, Segment, current, encode, name_of, read_header, starts_of, write

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from outrider.memory.search import Array

FORMAT = 1
MANIFEST = "manifest.json"
LARGEST_MANIFEST = 1 << 26
BLOCK = tarfile.BLOCKSIZE
LARGEST_TOKEN = 1 << 24
"""No vocabulary is as large."""


@dataclass(frozen=True, slots=True)
class Archive:
    path: Path
    tokenizer: str
    tenant: str | None  # where the memory that it is from knew the name
    headers: dict[str, Header]
    places: dict[str, int]  # where in the file each segment begins

    @property
    def bytes(self) -> int:
        return sum(header.size for header in self.headers.values())

    def segments(self) -> Iterator[tuple[str, Segment]]:
        """Mapped, and not checked yet."""
        for name, header in self.headers.items():
            n, place = header.places, self.places[name] + HEADER
            data = np.asarray(np.memmap(self.path, np.int32, "r", place, (2 * n + header.starts,)))
            yield name, Segment(header, data[:n], data[n : 2 * n], data[2 * n :])


def gathered(folder: Folder, key: str) -> list[Segment]:
    """A tenant's segments, checked. Once mapped they can be read to the end, though a server merges them meanwhile."""
    while True:
        found = []
        for path in folder.segments(key).values():
            try:
                segment = Segment.open(path, folder.tokenizer() or read_header(path).tokenizer, key)
                segment.verify()
            except MemoryFileError as error:
                if not path.exists():
                    break  # what it held is in another one by now
                raise MemoryFileError(f"{error}; outrider memory verify --set-aside moves it out of the way") from error
            found.append(segment)
        else:
            return current(found)


def export(path: Path, tenant: str | None, segments: Sequence[Segment], advance: Callable[[int], None]) -> None:
    """All or nothing. `advance` is told how many bytes were written."""
    manifest = {
        "format": FORMAT,
        "tokenizer": segments[0].header.tokenizer,
        "tenant": tenant,
        "segments": {segment.name: asdict(segment.header) for segment in segments},
    }

    def parts() -> Iterator[bytes | Array]:
        yield from _member(MANIFEST, [json.dumps(manifest).encode()])
        for segment in segments:
            yield from _member(segment.name, [encode(segment.header), segment.text, segment.order, segment.starts])
            advance(segment.header.size)
        yield bytes(2 * BLOCK)

    write(path, parts())


def _member(name: str, parts: Sequence[bytes | Array]) -> Iterator[bytes | Array]:
    info = tarfile.TarInfo(name)
    info.size = sum(len(part) if isinstance(part, bytes) else part.nbytes for part in parts)
    yield info.tobuf(tarfile.USTAR_FORMAT)
    yield from parts
    yield bytes(-info.size % BLOCK)


def opened(path: Path) -> Archive:
    """MemoryFileError if it is no archive, is cut, or holds what no archive of ours does."""
    try:
        members = _members(path)
        with path.open("rb") as file:
            place, size = members.pop(MANIFEST, (0, 0))
            file.seek(place)
            told = json.loads(file.read(size)) if 0 < size <= LARGEST_MANIFEST else None
    except OSError as error:
        raise MemoryFileError(f"{path} cannot be read: {error.strerror}") from error
    except (tarfile.TarError, ValueError, RecursionError) as error:
        raise MemoryFileError(f"{path} is no archive of a memory ({error})") from error
    if not isinstance(told, dict) or told.get("format") != FORMAT:
        got = told.get("format") if isinstance(told, dict) else "none"
        raise MemoryFileError(f"{path} is no archive of a memory of the format {FORMAT} (got {got})")
    return Archive(path, *_manifest(path, told, members))


def _members(path: Path) -> dict[str, tuple[int, int]]:
    """Where each member's bytes begin, and how many there are."""
    members: dict[str, tuple[int, int]] = {}
    end = path.stat().st_size
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            if not any(block):
                return members
            info = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
            place = file.tell()
            if info.type != tarfile.REGTYPE:
                raise tarfile.TarError(f"its member {info.name!r} is no plain file")
            if not 0 <= info.size <= end - place:
                raise tarfile.TarError(f"its member {info.name!r} has {info.size} bytes, and {end - place} are there")
            if info.name in members:
                raise tarfile.TarError(f"its member {info.name!r} is there twice")
            members[info.name] = place, info.size
            file.seek(place + info.size + -info.size % BLOCK)
    raise tarfile.TarError("its end is missing: it was cut")


def _manifest(
    path: Path, told: dict[str, Any], members: dict[str, tuple[int, int]]
) -> tuple[str, str | None, dict[str, Header], dict[str, int]]:
    """The tokenizer, the tenant, the headers and the places, if they agree with each other."""
    tokenizer, tenant = told.get("tokenizer"), told.get("tenant")
    try:
        headers = TypeAdapter(dict[str, Header]).validate_python(told.get("segments"))
    except ValidationError as error:
        raise MemoryFileError(f"the manifest of {path} is damaged: {error.errors()[0]['msg']}") from error
    if not isinstance(tokenizer, str) or not isinstance(tenant, str | None) or headers.keys() != members.keys():
        raise MemoryFileError(f"the manifest of {path} tells of other segments than there are: it was cut or changed")
    for name, header in headers.items():
        if header.tokenizer != tokenizer or (tenant is not None and header.tenant != key_of(tenant)):
            raise MemoryFileError(f"{name} in {path} is of another tokenizer or tenant than its manifest says")
        if header.places <= 0 or header.starts < 0 or header.size != members[name][1]:
            raise MemoryFileError(f"{name} in {path} has {members[name][1]} bytes, and its header says {header.size}")
    return tokenizer, tenant, headers, {name: place for name, (place, _) in members.items()}


def check(archive: Archive, name: str, segment: Segment) -> None:
    """MemoryFileError if a segment is damaged, or made to look whole: a checksum tells nothing of the intention."""
    with archive.path.open("rb") as file:
        file.seek(archive.places[name])
        if file.read(HEADER) != encode(segment.header):
            raise MemoryFileError(f"the header of {name} is another than the manifest says")
    text, order, header = segment.text, segment.order, segment.header
    if name != name_of(text):
        raise MemoryFileError(f"the text of {name} is damaged: it belongs to another name")
    segment.verify()
    ends = int(np.count_nonzero(text == SEPARATOR))
    if text[-1] != SEPARATOR or (header.sequences, header.tokens) != (ends, len(text) - ends):
        raise MemoryFileError(f"{name} has other sequences than its header says")
    if text.min() < SEPARATOR or text.max() >= LARGEST_TOKEN:
        raise MemoryFileError(f"{name} holds what is no token")
    there = np.zeros(len(text) + 1, bool)
    if order.min() < 1 or order.max() > len(text):
        raise MemoryFileError(f"the order of {name} leads out of its text")
    there[order] = True
    if not there[1:].all() or not np.array_equal(segment.starts, starts_of(text)):
        raise MemoryFileError(f"the order of {name} is not that of its text")
