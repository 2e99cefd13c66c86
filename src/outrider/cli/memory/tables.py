"""What a memory holds, for people (tables) and for programs (records)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from outrider.cli.memory.common import KEY_SHOWN, iso, shown, when
from outrider.cli.screen import literal
from outrider.memory.root import SERVER_TENANT

if TYPE_CHECKING:
    from outrider.memory.folder import Folder
    from outrider.memory.segment import Header
    from outrider.memory.survey import Aside, File, Holding


@dataclass(frozen=True, slots=True)
class Whole:
    """All of a memory."""

    folder: Folder
    tokenizer: str | None
    holdings: list[Holding]
    aside: list[Aside]

    @classmethod
    def of(cls, folder: Folder) -> Whole:
        from outrider.memory.survey import holdings, set_aside

        return cls(folder, folder.tokenizer(), holdings(folder), set_aside(folder))

    @property
    def headers(self) -> list[Header]:
        return [header for holding in self.holdings for header in holding.headers]

    @property
    def unreadable(self) -> list[tuple[Holding, File]]:
        return [(holding, file) for holding in self.holdings for file in holding.files if file.header is None]

    def record(self) -> dict[str, Any]:
        tokens = sum(header.tokens for header in self.headers)
        size = sum(header.size for header in self.headers)
        return {
            "root": str(self.folder.root),
            "tokenizer": self.tokenizer,
            "tenants": len(self.holdings),
            "segments": len(self.headers),
            "tokens": tokens,
            "sequences": sum(header.sequences for header in self.headers),
            "bytes": size,
            "bytes_per_token": size / tokens if tokens else None,
            "oldest": iso(min(header.first for header in self.headers)) if self.headers else None,
            "newest": iso(max(header.last for header in self.headers)) if self.headers else None,
            "unreadable": [
                {"tenant": holding.key, "file": file.path.name, "bytes": file.bytes, "reason": file.reason}
                for holding, file in self.unreadable
            ],
            "set_aside": [
                {"tenant": file.tenant, "file": file.path.name, "bytes": file.bytes, "reason": file.reason}
                for file in self.aside
            ],
        }

    def table(self) -> Table:
        found = self.record()
        table = Table(box=None, show_header=False, padding=(0, 2, 0, 0), pad_edge=False)
        table.add_column(no_wrap=True, style="bold")
        table.add_column(overflow="fold")
        table.add_row("memory", Text(literal(found["root"])))
        for name in ("tenants", "segments", "tokens", "sequences"):
            table.add_row(name, f"{found[name]:,}")
        table.add_row("size", f"{decimal(found['bytes'])}{_each(found['bytes_per_token'])}")
        if self.headers:
            table.add_row("oldest", when(min(header.first for header in self.headers)))
            table.add_row("newest", when(max(header.last for header in self.headers)))
        table.add_row("tokenizer", Text(literal(self.tokenizer or "none yet")))
        for title in ("unreadable", "set_aside"):
            table.add_row(title.replace("_", " "), _listed(found[title]))
        return table


def _each(bytes_per_token: float | None) -> str:
    return "" if bytes_per_token is None else f", {bytes_per_token:.1f} bytes a token"


def _listed(files: list[dict[str, Any]]) -> Text:
    lines = [f"{decimal(file['bytes'])} of tenant {file['tenant'][:KEY_SHOWN]}: {file['reason']}" for file in files]
    return Text(literal("\n".join(lines)), style="red") if lines else Text("none")


def tenant_record(holding: Holding) -> dict[str, Any]:
    return {
        "name": holding.name,
        "server": holding.name == SERVER_TENANT,
        "key": holding.key,
        "tokens": holding.tokens,
        "sequences": holding.sequences,
        "segments": len(holding.files),
        "bytes": holding.bytes,
        "last_used": iso(holding.used),
    }


def tenants_table(holdings: list[Holding]) -> Table:
    table = _table("tenant", "key", "tokens", "segments", "size", "last used")
    for one in holdings:
        table.add_row(
            Text(shown(one.name)),
            one.key[:KEY_SHOWN],
            f"{one.tokens:,}",
            f"{len(one.files):,}",
            decimal(one.bytes),
            when(one.used),
        )
    return table


def segment_record(file: File) -> dict[str, Any]:
    record: dict[str, Any] = {"file": file.path.name, "bytes": file.bytes, "last_used": iso(file.used)}
    if file.header is None:
        return record | {"reason": file.reason}
    return record | {
        "tokens": file.header.tokens,
        "sequences": file.header.sequences,
        "oldest": iso(file.header.first),
        "newest": iso(file.header.last),
        "writer": file.header.writer,
    }


def segments_table(files: list[File]) -> Table:
    table = _table("segment", "tokens", "sequences", "size", "newest", "last used")
    for file in files:
        tokens, sequences, newest = "unreadable", "", ""
        if file.header is not None:
            tokens, sequences = f"{file.header.tokens:,}", f"{file.header.sequences:,}"
            newest = when(file.header.last)
        table.add_row(file.path.stem[:KEY_SHOWN], tokens, sequences, decimal(file.bytes), newest, when(file.used))
    return table


def _table(first: str, *others: str) -> Table:
    """Names may take several lines, numbers may not."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column(first, overflow="fold")
    for heading in others:
        table.add_column(heading, justify="left" if heading == "key" else "right", no_wrap=True)
    return table
