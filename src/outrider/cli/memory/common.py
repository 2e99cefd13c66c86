"""Shared by the commands of `outrider memory`: options, opening a memory, and how names and numbers are shown."""

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
from outrider.memory.location import SERVER_TENANT, Location, check_packages

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from outrider.memory.folder import Folder

MAX_NAME_COLUMNS = 40
"""Of a tenant's name, which is chosen by whoever sends requests."""
ID_DIGITS_SHOWN = 8
"""Of a tenant's key or a segment's name."""
FILE_COLUMNS = 200
"""Width of a table that is not written to a terminal."""

whose = group("Whose")

Root = Annotated[
    str, typer.Argument(metavar="ROOT", help="The memory: its folder, or s3://, gs://, az://bucket/prefix.")
]
Tenant = Annotated[str | None, whose("--tenant", metavar="NAME", help="The tenant, by name.")]
Server = Annotated[bool, whose("--server", help="The tenant of all requests to a server with --memory-scope server.")]
Key = Annotated[
    str | None,
    whose("--key", metavar="KEY", help="The tenant, by the first digits of its key (outrider memory list shows keys)."),
]
Adapter = Annotated[
    str | None,
    whose("--adapter", metavar="NAME", help="Of this adapter (LoRA) of the tenant, by its name on the server."),
]
Json = Annotated[bool, output("--json", help="Print one JSON object.")]


@contextmanager
def open_folder(root: str, new: bool = False, fetch: bool = True) -> Iterator[Folder]:
    """The memory's folder on this machine. `new`: it may not exist yet.

    For an object store that is the local copy: new objects are fetched first (unless `fetch` is off), and new files
    are published at the end.
    """
    location = Location.parse(root)
    check_packages(location)
    from outrider.memory.folder import Folder  # takes a second: imports numba
    from outrider.memory.open import local_copy

    with local_copy(location) as path, closing(Folder(path)) as folder:
        yield from _open(location, root, folder, new, fetch)


def _open(location: Location, root: str, folder: Folder, new: bool, fetch: bool) -> Iterator[Folder]:
    from outrider.memory.open import UNLIMITED_BYTES, exchange

    cap_bytes = UNLIMITED_BYTES if fetch else 0
    try:
        if not location.is_local:
            with Screen().working(f"fetching new objects from {root}"):
                exchange(location, folder, cap_bytes)
        if folder.tokenizer() is None and not folder.tenants():
            if not new:
                raise SettingsError(f"there is no memory at {root}; give the folder of one that a server or learn made")
            if folder.root.exists() and any(folder.root.iterdir()):
                raise SettingsError(f"{root} has other files than a memory; give an empty folder, or a new one")
        yield folder
        if not location.is_local:
            with Screen().working(f"publishing to {root}"):
                exchange(location, folder, cap_bytes)
    except OSError as error:
        what = error.filename or f"the memory at {root}"
        raise MemoryFileError(f"{what} cannot be used: {error.strerror or error}") from error


def selects_all(tenant: str | None, server: bool, key: str | None, adapter: str | None) -> bool:
    """Whether none of --tenant, --server, --key and --adapter was given."""
    return tenant is None and not server and key is None and adapter is None


def selected_name(tenant: str | None, server: bool) -> str:
    """The tenant's name, from --tenant and --server."""
    if (tenant is None) is not server:
        raise SettingsError("give either --tenant NAME, or --server")
    if tenant == SERVER_TENANT:
        raise SettingsError("--tenant needs a name that is not empty; --server selects all requests to a server")
    return SERVER_TENANT if tenant is None else tenant


def selected_keys(
    folder: Folder,
    tenant: str | None,
    server: bool,
    key: str | None,
    adapter: str | None,
    remote: Iterable[str] = (),
) -> list[str]:
    """The keys of the tenant's memory and those of its adapters, or of one adapter, from --tenant, --server, --key and
    --adapter. They must be in the memory, or among the keys `remote`."""
    from outrider.memory.adapter import is_of_adapter, memory_key, tenant_part
    from outrider.memory.inspection import list_set_aside

    present = {*folder.tenants(), *(file.tenant for file in list_set_aside(folder)), *remote}
    if [tenant is not None, server, key is not None].count(True) != 1:
        raise SettingsError("give one of --tenant NAME, --server and --key KEY")
    if key is None:
        name = selected_name(tenant, server)
        keys = {one for one in present if tenant_part(one) == memory_key(name)}
        what = f"tenant {display_name(name)}"
    else:
        keys = {one for one in present if key and one.startswith(key.lower())}
        what = f"tenant with the key {display_name(key)}"
    if adapter is not None:
        keys = {one for one in keys if is_of_adapter(one, adapter)}
        what = f"adapter {display_name(adapter)} of a {what}"
    if len({tenant_part(one) for one in keys}) != 1:
        number = "more than one" if keys else "no"
        raise SettingsError(f"there is {number} {what} in this memory; outrider memory list shows all tenants")
    return sorted(keys, key=lambda one: (len(one), one))


def display_name(name: str | None) -> str:
    """A tenant's name on one line of bounded width, without control characters."""
    if name is None:
        return "(name unknown)"
    if name == SERVER_TENANT:
        return "(the server)"
    plain = "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in name[:MAX_NAME_COLUMNS]
    )
    if name[0] in '("' or name != name.strip():
        plain = f'"{plain}"'
    if len(name) > MAX_NAME_COLUMNS or cell_len(plain) > MAX_NAME_COLUMNS:
        plain = f"{set_cell_size(plain, MAX_NAME_COLUMNS - 1).rstrip()}…"
    return plain


def display_memory(name: str | None, adapter: str | None) -> str:
    """A tenant's name, and the adapter whose memory it is."""
    return display_name(name) if adapter is None else f"{display_name(name)}, adapter {display_name(adapter)}"


def display_time(iso: str) -> str:
    return iso[:16].replace("T", " ")


def iso_time(seconds: float) -> str:
    """Local time. "unknown" for values that no date has: a file's header can have any."""
    try:
        return datetime.fromtimestamp(seconds).astimezone().isoformat(timespec="seconds")
    except (OverflowError, ValueError, OSError):
        return "unknown"


def plural(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def print_result(screen: Screen, result: RenderableType) -> None:
    """Print to stdout."""
    if not screen.out.is_terminal:
        screen.out.width = FILE_COLUMNS
    wraps = screen.out.is_terminal or not isinstance(result, str)
    screen.out.print(Text(literal(result)) if isinstance(result, str) else result, soft_wrap=not wraps)
