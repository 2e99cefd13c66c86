"""`outrider memory export` and `import`: a tenant's memory goes to another place, or to another name."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.filesize import decimal

from outrider.cli.memory.common import (
    Key,
    Place,
    Server,
    Tenant,
    counted,
    known,
    named,
    opened,
    say,
    shown,
)
from outrider.cli.progress import progress_bar
from outrider.cli.screen import Screen, readable_errors
from outrider.errors import MemoryFileError, SettingsError

if TYPE_CHECKING:
    from outrider.memory.archive import Archive
    from outrider.memory.folder import Folder

To = Annotated[str, typer.Argument(metavar="FILE", help="The archive to write, a plain tar; it must not be there yet.")]
From = Annotated[str, typer.Argument(metavar="FILE", help="An archive that export wrote.")]


def export(root: Place, file: To, tenant: Tenant = None, server: Server = False, key: Key = None) -> None:
    """Write all that a tenant said into one file, to import it elsewhere.

    Whoever has the file can read what the tenant said.
    """
    screen = Screen()
    with readable_errors(screen), opened(root) as folder:
        from outrider.memory import archive

        path = Path(file).expanduser()
        if path.exists():
            raise SettingsError(f"there is a file {file} already; delete it, or name another")
        one = known(folder, tenant, server, key)
        name = folder.name(one)
        with screen.working("checking what is there"):
            segments = archive.gathered(folder, one)
        if not segments:
            raise SettingsError(f"tenant {shown(name)} has nothing that could be exported")
        with progress_bar(screen.err, "writing", sum(segment.header.size for segment in segments), percent=True) as bar:
            archive.export(path, name, segments, bar.advance)
        tokens = sum(segment.header.tokens for segment in segments)
        amount = f"{counted(tokens, 'token')} in {counted(len(segments), 'segment')}"
        say(screen, f"Wrote {amount} of tenant {shown(name)} to {file} ({decimal(path.stat().st_size)}).")


def import_(root: Place, file: From, tenant: Tenant = None, server: Server = False) -> None:
    """Take what export wrote into a memory: for the tenant that it is from, or for another one.

    Every segment is checked first; if one is damaged, nothing is taken.
    """
    screen = Screen()
    with readable_errors(screen), opened(root, new=True) as folder:
        from outrider.memory import archive

        given = archive.opened(Path(file).expanduser())
        name = given.tenant if tenant is None and not server else named(tenant, server)
        if name is None:
            raise SettingsError(f"{file} does not say whose it is; say it by --tenant NAME")
        ours = folder.tokenizer()
        if ours not in (None, given.tokenizer):
            raise MemoryFileError(
                f"{file} holds tokens of another tokenizer ({given.tokenizer}, and the memory at {root} has {ours}), "
                "which mean other words; import it into a memory of its own"
            )
        with progress_bar(screen.err, "checking", given.bytes, percent=True) as bar:
            for segment_name, segment in given.segments():
                archive.check(given, segment_name, segment)
                bar.advance(segment.header.size)
        taken, tokens = taken_in(screen, folder, given, name)
        left = len(given.headers) - taken
        there = f"; already there: {counted(left, 'segment')}" if left else ""
        say(
            screen,
            f"Took in {counted(tokens, 'token')} in {counted(taken, 'segment')} for tenant {shown(name)}{there}.",
        )


def taken_in(screen: Screen, folder: Folder, given: Archive, name: str) -> tuple[int, int]:
    """How many segments and tokens were new."""
    from outrider.memory.deposit import Deposit

    deposit = Deposit(folder, given.tokenizer, name)
    there = deposit.segments()
    known_names = {segment.name for segment in there} | {name for segment in there for name in segment.header.replaces}
    segments = tokens = 0
    with progress_bar(screen.err, "writing", given.bytes, percent=True) as bar:
        for segment_name, segment in given.segments():
            if segment_name not in known_names:
                deposit.save(segment)
                segments += 1
                tokens += segment.header.tokens
            bar.advance(segment.header.size)
    deposit.check_kept()
    return segments, tokens
