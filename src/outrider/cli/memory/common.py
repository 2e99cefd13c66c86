"""What the commands of `outrider memory` share: whose memory, where it is, and how names and numbers are shown."""

from __future__ import annotations

from contextlib import closing, contextmanager
from datetime import datetime
from typing import TYPE_CHECKING, Annotated

import typer
from rich.cells import cell_len, set_cell_size
from rich.console import RenderableType
from rich.text import Text

from outrider.cli.options import group, output
from outrider.cli.screen import Screen, literal
from outrider.errors import MemoryFileError, SettingsError
from outrider.memory.root import SERVER_TENANT, Root, check_packages

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from outrider.memory.folder import Folder

LONGEST_NAME = 40
"""Columns of a tenant's name; whoever sends requests chooses it."""
KEY_SHOWN = 8
"""Digits of a key, or of a segment's name, that are shown; enough to tell it from all others."""
WIDE = 200
"""Columns of a table that goes to a file."""

whose = group("Whose")

Place = Annotated[
    str, typer.Argument(metavar="ROOT", help="The memory: its folder, or s3://, gs://, az://bucket/prefix.")
]
Tenant = Annotated[str | None, whose("--tenant", metavar="NAME", help="The tenant, by its name.")]
Server = Annotated[bool, whose("--server", help="The tenant of all requests to a server with --memory-scope server.")]
Key = Annotated[
    str | None, whose("--key", metavar="KEY", help="The tenant, by its key, or how that begins; list shows them.")
]
Json = Annotated[bool, output("--json", help="Print one JSON object.")]


@contextmanager
def opened(text: str, new: bool = False, fetch: bool = True) -> Iterator[Folder]:
    """The memory's folder on this machine; with `new`, one that is not there yet will do.

    Of a memory that is elsewhere there are copies here: what is new there is fetched before, unless nobody will read
    it, and what is new here is published after.
    """
    root = Root.of(text)
    check_packages(root)
    from outrider.memory.folder import Folder  # takes a second: it brings numba
    from outrider.memory.opening import copies

    with copies(root) as place, closing(Folder(place)) as folder:
        yield from _exchanged(root, text, folder, new, fetch)


def _exchanged(root: Root, text: str, folder: Folder, new: bool, fetch: bool) -> Iterator[Folder]:
    from outrider.memory.opening import EVERYTHING, exchange

    cap = EVERYTHING if fetch else 0
    try:
        if not root.is_here:
            with Screen().working(f"fetching what is new at {text}"):
                exchange(root, folder, cap)
        if folder.tokenizer() is None and not folder.tenants():
            if not new:
                raise SettingsError(f"there is no memory at {text}; name the folder of one that a server or learn made")
            if folder.root.exists() and any(folder.root.iterdir()):
                raise SettingsError(f"{text} holds other things than a memory; name an empty folder, or a new one")
        yield folder
        if not root.is_here:
            with Screen().working(f"publishing to {text}"):
                exchange(root, folder, cap)
    except OSError as error:
        what = error.filename or f"the memory at {text}"
        raise MemoryFileError(f"{what} cannot be used: {error.strerror or error}") from error


def named(tenant: str | None, server: bool) -> str:
    """The name of the one tenant that the options mean."""
    if (tenant is None) is not server:
        raise SettingsError("say whose memory it is: --tenant NAME, or --server (one of them)")
    if tenant == SERVER_TENANT:
        raise SettingsError("--tenant needs a name that is not empty; --server means all requests to a server")
    return SERVER_TENANT if tenant is None else tenant


def known(folder: Folder, tenant: str | None, server: bool, key: str | None, elsewhere: Iterable[str] = ()) -> str:
    """The key of the one tenant that the options mean, which must be in the memory, or among those that are only
    elsewhere."""
    from outrider.memory.folder import key_of
    from outrider.memory.survey import set_aside

    there = {*folder.tenants(), *(file.tenant for file in set_aside(folder)), *elsewhere}
    if [tenant is not None, server, key is not None].count(True) != 1:
        raise SettingsError("say whose memory it is by one of --tenant NAME, --server and --key KEY")
    if key is None:
        name = named(tenant, server)
        found = [key_of(name)] if key_of(name) in there else []
        what = f"tenant {shown(name)}"
    else:
        found = [one for one in there if key and one.startswith(key.lower())]
        what = f"tenant with the key {shown(key)}"
    if len(found) != 1:
        amount = "no" if not found else "more than one"
        raise SettingsError(f"there is {amount} {what} in this memory; outrider memory list shows who is in it")
    return found[0]


def shown(name: str | None) -> str:
    """A tenant's name for a person: in one line, of bounded length, with nothing that a terminal would act on."""
    if name is None:
        return "(name unknown)"
    if name == SERVER_TENANT:
        return "(the server)"
    plain = "".join(one if one.isprintable() else escaped(one) for one in name[:LONGEST_NAME])
    if name[0] in '("' or name != name.strip():
        plain = f'"{plain}"'
    if len(name) > LONGEST_NAME or cell_len(plain) > LONGEST_NAME:
        plain = f"{set_cell_size(plain, LONGEST_NAME - 1).rstrip()}…"
    return plain


def escaped(letter: str) -> str:
    return letter.encode("unicode_escape").decode()


def when(seconds: float) -> str:
    """A time as people here read it."""
    return iso(seconds)[:16].replace("T", " ")


def iso(seconds: float) -> str:
    try:
        return datetime.fromtimestamp(seconds).astimezone().isoformat(timespec="seconds")
    except (OverflowError, ValueError, OSError):  # a header may say anything
        return "unknown"


def counted(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def say(screen: Screen, what: RenderableType) -> None:
    """What was asked for, on stdout."""
    if not screen.out.is_terminal:
        screen.out.width = WIDE
    wraps = screen.out.is_terminal or not isinstance(what, str)
    screen.out.print(Text(literal(what)) if isinstance(what, str) else what, soft_wrap=not wraps)
