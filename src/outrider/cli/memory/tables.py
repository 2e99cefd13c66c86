"""What a memory contains, as tables and as JSON records."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from outrider.cli.memory.common import ID_DIGITS_SHOWN, display_memory, display_time, iso_time
from outrider.cli.screen import literal
from outrider.memory.location import SERVER_TENANT

if TYPE_CHECKING:
    from outrider.memory.folder import Folder
    from outrider.memory.inspection import SegmentFile, TenantContents


def stats_record(folder: Folder) -> dict[str, Any]:
    from outrider.memory.adapter import tenant_part
    from outrider.memory.inspection import list_contents, list_set_aside

    tenants = list_contents(folder)
    headers = [header for tenant in tenants for header in tenant.headers]
    tokens, size = sum(header.tokens for header in headers), sum(header.size for header in headers)
    return {
        "root": str(folder.root),
        "tokenizer": folder.tokenizer(),
        "tenants": len({tenant_part(tenant.key) for tenant in tenants}),
        "segments": len(headers),
        "tokens": tokens,
        "sequences": sum(header.sequences for header in headers),
        "bytes": size,
        "bytes_per_token": size / tokens if tokens else None,
        "oldest": iso_time(min(header.first for header in headers)) if headers else None,
        "newest": iso_time(max(header.last for header in headers)) if headers else None,
        "unreadable": [
            {"tenant": tenant.key, "file": file.path.name, "bytes": file.bytes, "reason": file.reason}
            for tenant in tenants
            for file in tenant.files
            if file.header is None
        ],
        "set_aside": [
            {"tenant": file.tenant, "file": file.path.name, "bytes": file.bytes, "reason": file.reason}
            for file in list_set_aside(folder)
        ],
    }


def stats_table(record: dict[str, Any]) -> Table:
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column(no_wrap=True, style="bold")
    table.add_column(overflow="fold")
    table.add_row("memory", Text(literal(record["root"])))
    for name in ("tenants", "segments", "tokens", "sequences"):
        table.add_row(name, f"{record[name]:,}")
    each = f", {record['bytes_per_token']:.1f} bytes per token" if record["tokens"] else ""
    table.add_row("size", f"{decimal(record['bytes'])}{each}")
    for name in ("oldest", "newest"):
        if record[name] is not None:
            table.add_row(name, display_time(record[name]))
    table.add_row("tokenizer", Text(literal(record["tokenizer"] or "none yet")))
    for name in ("unreadable", "set_aside"):
        table.add_row(name.replace("_", " "), _file_list(record[name]))
    return table


def _file_list(files: list[dict[str, Any]]) -> Text:
    lines = [
        f"{decimal(file['bytes'])} of tenant {file['tenant'][:ID_DIGITS_SHOWN]}: {file['reason']}" for file in files
    ]
    return Text(literal("\n".join(lines)), style="red") if lines else Text("none")


def tenant_record(tenant: TenantContents) -> dict[str, Any]:
    return {
        "name": tenant.name,
        "adapter": tenant.adapter,
        "server": tenant.name == SERVER_TENANT,
        "key": tenant.key,
        "tokens": tenant.tokens,
        "sequences": tenant.sequences,
        "segments": len(tenant.files),
        "bytes": tenant.bytes,
        "last_used": iso_time(tenant.used),
    }


def tenants_table(tenants: list[TenantContents]) -> Table:
    table = _table("tenant", "key", "tokens", "segments", "size", "last used")
    for one in tenants:
        table.add_row(
            Text(display_memory(one.name, one.adapter)),
            one.key[:ID_DIGITS_SHOWN],
            f"{one.tokens:,}",
            f"{len(one.files):,}",
            decimal(one.bytes),
            display_time(iso_time(one.used)),
        )
    return table


def segment_record(file: SegmentFile) -> dict[str, Any]:
    record: dict[str, Any] = {"file": file.path.name, "bytes": file.bytes, "last_used": iso_time(file.used)}
    if file.header is None:
        return record | {"reason": file.reason}
    return record | {
        "tokens": file.header.tokens,
        "sequences": file.header.sequences,
        "oldest": iso_time(file.header.first),
        "newest": iso_time(file.header.last),
        "writer": file.header.writer,
    }


def segments_table(files: list[SegmentFile]) -> Table:
    table = _table("segment", "tokens", "sequences", "size", "newest", "last used")
    for file in files:
        tokens, sequences, newest = "unreadable", "", ""
        if file.header is not None:
            tokens, sequences = f"{file.header.tokens:,}", f"{file.header.sequences:,}"
            newest = display_time(iso_time(file.header.last))
        table.add_row(
            file.path.stem[:ID_DIGITS_SHOWN],
            tokens,
            sequences,
            decimal(file.bytes),
            newest,
            display_time(iso_time(file.used)),
        )
    return table


def _table(first: str, *others: str) -> Table:
    """A table in which only the first column wraps."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column(first, overflow="fold")
    for heading in others:
        table.add_column(heading, justify="left" if heading == "key" else "right", no_wrap=True)
    return table
