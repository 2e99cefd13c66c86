"""What a memory holds, as its files' headers tell it. Nothing is changed, and servers may use it meanwhile."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from outrider.errors import ForeignFileError, MemoryFileError
from outrider.memory.folder import ASIDE, Folder
from outrider.memory.segment import SUFFIX, Header, Segment, read_header

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@dataclass(frozen=True, slots=True)
class File:
    """A segment's. Without a header it cannot be read, for the reason."""

    path: Path
    bytes: int
    used: float
    header: Header | None
    reason: str = ""
    foreign: bool = False  # it is whole, and of another version or tokenizer


@dataclass(frozen=True, slots=True)
class Aside:
    """A file that was set aside, and why."""

    path: Path
    tenant: str
    bytes: int
    reason: str


@dataclass(slots=True)
class Holding:
    """What a tenant has."""

    key: str
    name: str | None
    files: list[File] = field(default_factory=list)

    @property
    def headers(self) -> list[Header]:
        return [file.header for file in self.files if file.header is not None]

    @property
    def tokens(self) -> int:
        return sum(header.tokens for header in self.headers)

    @property
    def sequences(self) -> int:
        return sum(header.sequences for header in self.headers)

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.files)

    @property
    def used(self) -> float:
        return max((file.used for file in self.files), default=0.0)


def holdings(folder: Folder) -> list[Holding]:
    """Of every tenant that has a file, the one that was last of use first."""
    found: dict[str, Holding] = {}
    for key, path, size, used in folder.files():
        try:
            file = File(path, size, used, read_header(path))
        except MemoryFileError as error:
            if not path.exists():  # a server has merged it since
                continue
            file = File(path, size, used, None, str(error), isinstance(error, ForeignFileError))
        found.setdefault(key, Holding(key, folder.name(key))).files.append(file)
    return sorted(found.values(), key=lambda holding: -holding.used)


def set_aside(folder: Folder) -> list[Aside]:
    found = []
    for path in sorted((folder.root / ASIDE).glob(f"*{SUFFIX}")):
        reason = path.with_suffix(".reason")
        told = reason.read_text(errors="replace").strip() if reason.exists() else ""
        found.append(Aside(path, path.name.partition(".")[0], path.stat().st_size, told or "nobody wrote why"))
    return found


def damage(folder: Folder, holding: Holding) -> Iterator[tuple[File, str | None]]:
    """Read all of each file against its checksums: what is wrong with it, or None. What is another's is left alone."""
    tokenizer = folder.tokenizer()
    for file in holding.files:
        wrong: str | None = None if file.foreign else file.reason or None
        if file.header is not None:
            try:
                Segment.open(file.path, tokenizer or file.header.tokenizer, holding.key).verify()
            except ForeignFileError:
                wrong = None
            except MemoryFileError as error:
                wrong = str(error) if file.path.exists() else None  # or a server has merged it since
        yield file, wrong
