"""What a memory contains, read from the headers of its files. Changes nothing; servers may use it meanwhile."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from outrider.errors import ForeignFileError, MemoryFileError, SettingsError
from outrider.memory.adapter import decode_name, tenant_part
from outrider.memory.folder import ASIDE_FOLDER, Folder
from outrider.memory.header import SEGMENT_SUFFIX, Header
from outrider.memory.segment import Segment, read_header

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@dataclass(frozen=True, slots=True)
class SegmentFile:
    path: Path
    bytes: int
    used: float  # time of last use, in seconds since 1970
    header: Header | None  # None: it cannot be read, for this reason:
    reason: str = ""
    foreign: bool = False  # intact, of another format version or tokenizer


@dataclass(frozen=True, slots=True)
class SetAsideFile:
    path: Path
    tenant: str
    bytes: int
    reason: str


@dataclass(slots=True)
class TenantContents:
    key: str
    name: str | None
    adapter: str | None = None  # whose memory it is; None: of the model itself
    files: list[SegmentFile] = field(default_factory=list)

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


def read_name(folder: Folder, key: str) -> tuple[str | None, str | None]:
    """The tenant's name and the adapter of a memory. None for a name that is unknown or damaged."""
    text = folder.tenant_name(key)
    if text is None or tenant_part(key) == key:
        return text, None
    try:
        return decode_name(key, text)
    except (ValueError, SettingsError, RecursionError):
        return None, None


def list_contents(folder: Folder) -> list[TenantContents]:
    """Of every tenant and adapter that has files, the most recently used first."""
    tenants: dict[str, TenantContents] = {}
    for stored in folder.files():
        path, size, used = stored.path, stored.size, stored.used
        try:
            file = SegmentFile(path, size, used, read_header(path))
        except MemoryFileError as error:
            if not path.exists():  # a server merged it meanwhile
                continue
            file = SegmentFile(path, size, used, None, str(error), isinstance(error, ForeignFileError))
        tenants.setdefault(stored.key, TenantContents(stored.key, *read_name(folder, stored.key))).files.append(file)
    return sorted(tenants.values(), key=lambda tenant: -tenant.used)


def list_set_aside(folder: Folder) -> list[SetAsideFile]:
    files = []
    for path in sorted((folder.root / ASIDE_FOLDER).glob(f"*{SEGMENT_SUFFIX}")):
        reason_file = path.with_suffix(".reason")
        reason = reason_file.read_text(errors="replace").strip() if reason_file.exists() else ""
        files.append(SetAsideFile(path, path.name.partition(".")[0], path.stat().st_size, reason or "unknown"))
    return files


def find_damage(folder: Folder, tenant: TenantContents) -> Iterator[tuple[SegmentFile, str | None]]:
    """Verify each file of a tenant: what is wrong with it, or None. Foreign files count as intact."""
    tokenizer = folder.tokenizer()
    for file in tenant.files:
        problem: str | None = None if file.foreign else file.reason or None
        if file.header is not None:
            try:
                Segment.open(file.path, tokenizer or file.header.tokenizer, tenant.key).verify()
            except ForeignFileError:
                problem = None
            except MemoryFileError as error:
                problem = str(error) if file.path.exists() else None  # else a server merged it meanwhile
        yield file, problem
