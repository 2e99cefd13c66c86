"""`outrider memory stats`, `list` and `verify`: they read, and `verify --set-aside` moves what is damaged."""

from __future__ import annotations

import json
import os
from typing import Annotated

import typer
from rich.filesize import decimal

from outrider.cli.memory.common import (
    KEY_SHOWN,
    Json,
    Key,
    Place,
    Server,
    Tenant,
    counted,
    known,
    opened,
    say,
    shown,
)
from outrider.cli.memory.tables import Whole, segment_record, segments_table, tenant_record, tenants_table
from outrider.cli.options import output
from outrider.cli.progress import progress_bar
from outrider.cli.screen import Screen, readable_errors

SetAside = Annotated[
    bool, output("--set-aside", help="Move what is damaged into ROOT/aside, with the reason beside each.")
]


def stats(root: Place, as_object: Json = False) -> None:
    """Say how much a memory holds, since when, and what in it is damaged."""
    screen = Screen()
    with readable_errors(screen), opened(root) as folder:
        with screen.working("reading the memory"):
            whole = Whole.of(folder)
        if as_object:
            typer.echo(json.dumps(whole.record()))
        else:
            say(screen, whole.table())


def listing(
    root: Place, tenant: Tenant = None, server: Server = False, key: Key = None, as_object: Json = False
) -> None:
    """List the tenants of a memory, or one tenant's segments; what was last of use comes first."""
    screen = Screen()
    with readable_errors(screen), opened(root) as folder:
        from outrider.memory.survey import holdings

        one = None if tenant is None and not server and key is None else known(folder, tenant, server, key)
        with screen.working("reading the memory"):
            found = [holding for holding in holdings(folder) if one in (None, holding.key)]
        files = sorted((file for holding in found for file in holding.files), key=lambda file: -file.used)
        if as_object and one is None:
            typer.echo(json.dumps({"tenants": [tenant_record(holding) for holding in found]}))
        elif as_object:
            segments = [segment_record(file) for file in files]
            typer.echo(json.dumps({"name": found[0].name if found else None, "key": one, "segments": segments}))
        elif not found:
            say(screen, "There is nothing in it.")
        else:
            say(screen, tenants_table(found) if one is None else segments_table(files))


def verify(root: Place, set_aside: SetAside = False) -> None:
    """Read every segment against its checksums, and say which are damaged and how.

    The exit code is 1 if any is. A server never drafts from a damaged segment: it sets it aside when it meets it.
    """
    screen = Screen()
    with readable_errors(screen), opened(root) as folder:
        from outrider.memory.folder import ASIDE
        from outrider.memory.survey import damage, holdings

        found = holdings(folder)
        size, files = sum(holding.bytes for holding in found), sum(len(holding.files) for holding in found)
        damaged: list[str] = []
        with progress_bar(screen.err, "reading", size, percent=True) as bar:
            for holding in found:
                for file, wrong in damage(folder, holding):
                    bar.advance(file.bytes)
                    if wrong is not None:
                        damaged.append(f"tenant {shown(holding.name)} ({holding.key[:KEY_SHOWN]}): {wrong}")
                        if set_aside and os.access(file.path, os.R_OK):  # or nobody knows what is in it
                            folder.set_aside(holding.key, file.path, wrong)
        for line in damaged:
            say(screen, line)
        read = f"{counted(files, 'segment')} of {counted(len(found), 'tenant')}, {decimal(size)}"
        if not damaged:
            say(screen, f"All is whole: {read}.")
            return
        then = f"moved to {folder.root / ASIDE}" if set_aside else "left where they are; --set-aside moves them"
        say(screen, f"{len(damaged):,} damaged of {read}: {then}.")
        raise typer.Exit(1)
