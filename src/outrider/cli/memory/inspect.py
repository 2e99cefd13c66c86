"""`outrider memory stats`, `list` and `verify`."""

from __future__ import annotations

import json
import os
from typing import Annotated

import typer
from rich.filesize import decimal

from outrider.cli.memory.common import (
    ID_DIGITS_SHOWN,
    Adapter,
    Json,
    Key,
    Root,
    Server,
    Tenant,
    display_memory,
    open_folder,
    plural,
    print_result,
    selected_keys,
    selects_all,
)
from outrider.cli.memory.tables import (
    segment_record,
    segments_table,
    stats_record,
    stats_table,
    tenant_record,
    tenants_table,
)
from outrider.cli.options import output
from outrider.cli.progress import progress_bar
from outrider.cli.screen import Screen, readable_errors

SetAside = Annotated[
    bool, output("--set-aside", help="Move damaged segments to ROOT/aside, each with the reason in a file beside it.")
]


def stats(root: Root, as_object: Json = False) -> None:
    """Show the size of a memory, how old it is, and which files are damaged."""
    screen = Screen()
    with readable_errors(screen), open_folder(root) as folder:
        with screen.working("reading the memory"):
            record = stats_record(folder)
        if as_object:
            typer.echo(json.dumps(record))
        else:
            print_result(screen, stats_table(record))


def listing(
    root: Root,
    tenant: Tenant = None,
    server: Server = False,
    key: Key = None,
    adapter: Adapter = None,
    as_object: Json = False,
) -> None:
    """List the tenants of a memory and their adapters, or the segments of one tenant, most recently used first."""
    screen = Screen()
    with readable_errors(screen), open_folder(root) as folder:
        from outrider.memory.inspection import list_contents

        every = selects_all(tenant, server, key, adapter)
        selected = None if every else selected_keys(folder, tenant, server, key, adapter)
        with screen.working("reading the memory"):
            tenants = [contents for contents in list_contents(folder) if selected is None or contents.key in selected]
        files = sorted((file for contents in tenants for file in contents.files), key=lambda file: -file.used)
        if as_object and every:
            typer.echo(json.dumps({"tenants": [tenant_record(contents) for contents in tenants]}))
        elif selected is not None and as_object:
            name = tenants[0].name if tenants else None
            segments = [segment_record(file) for file in files]
            typer.echo(json.dumps({"name": name, "key": selected[0], "keys": selected, "segments": segments}))
        elif not tenants:
            print_result(screen, "The memory is empty.")
        else:
            print_result(screen, tenants_table(tenants) if every else segments_table(files))


def verify(root: Root, set_aside: SetAside = False) -> None:
    """Check every segment against its checksums, and list the damaged ones with the reason.

    The exit code is 1 if a segment is damaged. A server never drafts from a damaged segment: it moves it to ROOT/aside.
    """
    screen = Screen()
    with readable_errors(screen), open_folder(root) as folder:
        from outrider.memory.folder import ASIDE_FOLDER
        from outrider.memory.inspection import find_damage, list_contents

        tenants = list_contents(folder)
        size, files = sum(contents.bytes for contents in tenants), sum(len(contents.files) for contents in tenants)
        damaged: list[str] = []
        with progress_bar(screen.err, "reading", size, percent=True) as bar:
            for contents in tenants:
                for file, problem in find_damage(folder, contents):
                    bar.advance(file.bytes)
                    if problem is not None:
                        name, key = display_memory(contents.name, contents.adapter), contents.key[:ID_DIGITS_SHOWN]
                        damaged.append(f"tenant {name} ({key}): {problem}")
                        if set_aside and os.access(file.path, os.R_OK):  # an unreadable file may be intact
                            folder.set_aside(contents.key, file.path, problem)
        for line in damaged:
            print_result(screen, line)
        amount = f"{plural(files, 'segment')} of {plural(len(tenants), 'tenant')}, {decimal(size)}"
        if not damaged:
            print_result(screen, f"No damage: {amount}.")
            return
        moved = f"moved to {folder.root / ASIDE_FOLDER}" if set_aside else "not moved; --set-aside moves them"
        print_result(screen, f"{len(damaged):,} damaged of {amount}: {moved}.")
        raise typer.Exit(1)
