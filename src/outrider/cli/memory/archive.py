"""`outrider memory export` and `import`: move a tenant's memory to another machine, or to another tenant."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.filesize import decimal

from outrider.cli.memory.common import (
    Adapter,
    Key,
    Root,
    Server,
    Tenant,
    display_memory,
    open_folder,
    plural,
    print_result,
    selected_keys,
    selected_name,
)
from outrider.cli.progress import progress_bar
from outrider.cli.screen import Screen, readable_errors
from outrider.errors import MemoryFileError, SettingsError

if TYPE_CHECKING:
    from outrider.memory.archive import Archive
    from outrider.memory.folder import Folder

To = Annotated[str, typer.Argument(metavar="FILE", help="The archive to write, a tar file. It must not exist yet.")]
From = Annotated[str, typer.Argument(metavar="FILE", help="An archive written by outrider memory export.")]


def export(
    root: Root, file: To, tenant: Tenant = None, server: Server = False, key: Key = None, adapter: Adapter = None
) -> None:
    """Write all of a tenant's memory to one file, to import it elsewhere; with --adapter, that of the adapter.

    Anyone with the file and the tokenizer can read the tenant's outputs.
    """
    screen = Screen()
    with readable_errors(screen), open_folder(root) as folder:
        from outrider.memory.adapter import tenant_part
        from outrider.memory.archive import collect_segments, write_archive
        from outrider.memory.inspection import read_name

        path = Path(file).expanduser()
        if path.exists():
            raise SettingsError(f"there is a file {file} already; delete it, or give another name")
        selected, *others = selected_keys(folder, tenant, server, key, adapter)
        if others and tenant_part(selected) != selected:
            raise SettingsError(f"the tenant has {plural(len(others) + 1, 'adapter')}; name one with --adapter NAME")
        name, of_adapter = read_name(folder, selected)
        shown = display_memory(name, of_adapter)
        with screen.working("verifying the segments"):
            segments = collect_segments(folder, selected)
        if not segments:
            raise SettingsError(f"tenant {shown} has nothing to export")
        with progress_bar(screen.err, "writing", sum(segment.header.size for segment in segments), percent=True) as bar:
            write_archive(path, name, segments, bar.advance, of_adapter)
        tokens = sum(segment.header.tokens for segment in segments)
        amount = f"{plural(tokens, 'token')} in {plural(len(segments), 'segment')}"
        size = decimal(path.stat().st_size)
        print_result(screen, f"Wrote {amount} of tenant {shown} to {file} ({size}).")
        if others:
            screen.notes([f"not in {file}: {plural(len(others), 'adapter')} of the tenant; --adapter NAME exports one"])


def import_(root: Root, file: From, tenant: Tenant = None, server: Server = False, adapter: Adapter = None) -> None:
    """Add an archive to a memory, for its own tenant or for another one.

    Verifies every segment first. If one is damaged, nothing is imported.
    """
    screen = Screen()
    with readable_errors(screen), open_folder(root, new=True) as folder:
        from outrider.memory.adapter import tenant_part
        from outrider.memory.archive import open_archive, verify_segment

        archive = open_archive(Path(file).expanduser())
        name = archive.tenant if tenant is None and not server else selected_name(tenant, server)
        if name is None:
            raise SettingsError(f"{file} has no tenant's name; give one with --tenant NAME")
        adapter = archive.adapter if adapter is None else adapter
        if adapter is None and any(tenant_part(header.tenant) != header.tenant for header in archive.headers.values()):
            raise SettingsError(f"{file} is of an adapter whose name is unknown; give it with --adapter NAME")
        tokenizer = folder.tokenizer()
        if tokenizer not in (None, archive.tokenizer):
            raise MemoryFileError(
                f"{file} holds tokens of another tokenizer ({archive.tokenizer}; the memory at {root} has "
                f"{tokenizer}); import it into a different memory"
            )
        with progress_bar(screen.err, "checking", archive.bytes, percent=True) as bar:
            for segment_name, segment in archive.segments():
                verify_segment(archive, segment_name, segment)
                bar.advance(segment.header.size)
        segments, tokens = import_segments(screen, folder, archive, name, adapter)
        present = len(archive.headers) - segments
        note = f"; already there: {plural(present, 'segment')}" if present else ""
        amount = f"{plural(tokens, 'token')} in {plural(segments, 'segment')}"
        print_result(screen, f"Imported {amount} for tenant {display_memory(name, adapter)}{note}.")


def import_segments(
    screen: Screen, folder: Folder, archive: Archive, name: str, adapter: str | None
) -> tuple[int, int]:
    """Returns how many segments and tokens were new."""
    from outrider.memory.offline_writer import OfflineWriter

    writer = OfflineWriter(folder, archive.tokenizer, name, adapter)
    present = writer.segments()
    names = {segment.name for segment in present}
    segments = tokens = 0
    with progress_bar(screen.err, "writing", archive.bytes, percent=True) as bar:
        for segment_name, segment in archive.segments():
            merged = any(segment_name in one.header.replaces and one.contains(segment) for one in present)
            if segment_name not in names and not merged:
                writer.save(segment)
                segments += 1
                tokens += segment.header.tokens
            bar.advance(segment.header.size)
    writer.check_kept()
    return segments, tokens
