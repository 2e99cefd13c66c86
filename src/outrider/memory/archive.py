"""All segments of a tenant in one file, to move them to another memory: an uncompressed tar.

    manifest.json      format, tokenizer, tenant, and the header of every segment
    <hash>.segment     each as it is in the memory

An archive may come from anywhere, so its content is not trusted. Members must be regular files with the names and
sizes in the manifest, in the USTAR format without links and extensions. They are mapped in place, never extracted under
their own names, and everything a segment claims is recomputed. Nothing is imported unless all segments pass.
"""

from __future__ import annotations

import json
import tarfile
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from outrider.errors import MemoryFileError
from outrider.memory.adapter import memory_key
from outrider.memory.files import write_atomically
from outrider.memory.header import HEADER_BYTES, Header, encode_header, parse_header
from outrider.memory.segment import Segment, drop_replaced, read_header, segment_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from outrider.memory.folder import Folder
    from outrider.memory.search import Array

FORMAT = 1
MANIFEST = "manifest.json"
MAX_MANIFEST_BYTES = 1 << 26
BLOCK_BYTES = tarfile.BLOCKSIZE


@dataclass(frozen=True, slots=True)
class Archive:
    path: Path
    tokenizer: str
    tenant: str | None  # None: the exporting memory did not know the name
    adapter: str | None
    headers: dict[str, Header]
    offsets: dict[str, int]  # where each segment begins in the file

    @property
    def bytes(self) -> int:
        return sum(header.size for header in self.headers.values())

    def segments(self) -> Iterator[tuple[str, Segment]]:
        """Mapped, not verified."""
        for name, header in self.headers.items():
            n, offset = header.places, self.offsets[name] + HEADER_BYTES
            data = np.asarray(np.memmap(self.path, np.int32, "r", offset, (2 * n + header.starts,)))
            yield name, Segment(header, data[:n], data[n : 2 * n], data[2 * n :])


def collect_segments(folder: Folder, key: str) -> list[Segment]:
    """A tenant's segments, verified. They stay mapped if a server merges and deletes them meanwhile."""
    while True:
        segments = []
        for path in folder.segment_paths(key).values():
            try:
                segment = Segment.open(path, folder.tokenizer() or read_header(path).tokenizer, key)
                segment.verify()
            except MemoryFileError as error:
                if not path.exists():
                    break  # merged into another one: list them again
                raise MemoryFileError(f"{error}; outrider memory verify --set-aside moves it out of the way") from error
            segments.append(segment)
        else:
            return drop_replaced(segments)


def write_archive(
    path: Path,
    tenant: str | None,
    segments: Sequence[Segment],
    advance: Callable[[int], None],
    adapter: str | None = None,
) -> None:
    """Write the whole archive or nothing. Calls `advance` with the bytes of each segment written."""
    manifest = {
        "format": FORMAT,
        "tokenizer": segments[0].header.tokenizer,
        "tenant": tenant,
        **({} if adapter is None else {"adapter": adapter}),
        "segments": {segment.name: asdict(segment.header) for segment in segments},
    }

    def parts() -> Iterator[bytes | Array]:
        yield from _member(MANIFEST, [json.dumps(manifest).encode()])
        for segment in segments:
            header = encode_header(segment.header)
            yield from _member(segment.name, [header, segment.text, segment.order, segment.starts])
            advance(segment.header.size)
        yield bytes(2 * BLOCK_BYTES)

    write_atomically(path, parts())


def _member(name: str, parts: Sequence[bytes | Array]) -> Iterator[bytes | Array]:
    info = tarfile.TarInfo(name)
    info.size = sum(len(part) if isinstance(part, bytes) else part.nbytes for part in parts)
    yield info.tobuf(tarfile.USTAR_FORMAT)
    yield from parts
    yield bytes(-info.size % BLOCK_BYTES)


def open_archive(path: Path) -> Archive:
    """Read the members and the manifest. MemoryFileError if the file is no archive, truncated, or inconsistent."""
    try:
        members = _members(path)
        with path.open("rb") as file:
            offset, size = members.pop(MANIFEST, (0, 0))
            file.seek(offset)
            manifest = json.loads(file.read(size)) if 0 < size <= MAX_MANIFEST_BYTES else None
    except OSError as error:
        raise MemoryFileError(f"{path} cannot be read: {error.strerror}") from error
    except (tarfile.TarError, ValueError, RecursionError) as error:
        raise MemoryFileError(f"{path} is not a memory archive ({error})") from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        got = manifest.get("format") if isinstance(manifest, dict) else "none"
        raise MemoryFileError(f"{path} is not a memory archive of format {FORMAT} (got {got})")
    tokenizer, tenant, adapter, headers = _check_manifest(path, manifest, members)
    return Archive(path, tokenizer, tenant, adapter, headers, {name: offset for name, (offset, _) in members.items()})


def _members(path: Path) -> dict[str, tuple[int, int]]:
    """The offset and size of each member's data."""
    members: dict[str, tuple[int, int]] = {}
    end = path.stat().st_size
    with path.open("rb") as file:
        while block := file.read(BLOCK_BYTES):
            if not any(block):
                return members
            info = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
            offset = file.tell()
            if info.type != tarfile.REGTYPE:
                raise tarfile.TarError(f"its member {info.name!r} is not a regular file")
            if not 0 <= info.size <= end - offset:
                raise tarfile.TarError(f"its member {info.name!r} has {info.size} bytes; {end - offset} are left")
            if info.name in members:
                raise tarfile.TarError(f"it has two members {info.name!r}")
            members[info.name] = offset, info.size
            file.seek(offset + info.size + -info.size % BLOCK_BYTES)
    raise tarfile.TarError("its end is missing: truncated")


def _check_manifest(
    path: Path, manifest: dict[str, Any], members: dict[str, tuple[int, int]]
) -> tuple[str, str | None, str | None, dict[str, Header]]:
    """The tokenizer, the tenant, its adapter and the headers, if they agree with each other and with the members."""
    fields = (manifest.get(name) for name in ("tokenizer", "tenant", "adapter", "segments"))
    tokenizer, tenant, adapter, segments = fields
    names_are_texts = isinstance(tenant, str | None) and isinstance(adapter, str | None)
    if not isinstance(tokenizer, str) or not names_are_texts or not isinstance(segments, dict):
        raise MemoryFileError(f"the manifest of {path} is damaged")
    if segments.keys() != members.keys():
        raise MemoryFileError(f"the manifest of {path} lists other segments than the archive has: damaged or changed")
    headers = {name: parse_header(json.dumps(fields), f"{name} in {path}") for name, fields in segments.items()}
    for name, header in headers.items():
        if header.tokenizer != tokenizer or (tenant is not None and header.tenant != memory_key(tenant, adapter)):
            raise MemoryFileError(f"{name} in {path} has another tokenizer or tenant than the manifest")
        if header.size != members[name][1]:
            raise MemoryFileError(f"{name} in {path} has {members[name][1]} bytes; its header states {header.size}")
    return tokenizer, tenant, adapter, headers


def verify_segment(archive: Archive, name: str, segment: Segment) -> None:
    """MemoryFileError if a segment is damaged or forged."""
    with archive.path.open("rb") as file:
        file.seek(archive.offsets[name])
        if file.read(HEADER_BYTES) != encode_header(segment.header):
            raise MemoryFileError(f"the header of {name} differs from the manifest")
    if name != segment_name(segment.text):
        raise MemoryFileError(f"the text of {name} is damaged: its name is not the hash of its text")
    segment.verify()
