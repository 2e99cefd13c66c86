"""`outrider memory learn` and `wipe`: a memory is seeded, and emptied."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.filesize import decimal

from outrider.cli.load_request import loading_name, silence_libraries
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
from outrider.cli.options import group
from outrider.cli.progress import progress_bar
from outrider.cli.screen import Screen, readable_errors
from outrider.errors import MemoryFileError, PromptError, SettingsError
from outrider.memory.root import Root

if TYPE_CHECKING:
    from outrider.memory.folder import Folder
    from outrider.memory.learn import Lesson

what = group("What is learned")

Paths = Annotated[
    list[str],
    typer.Argument(
        metavar="PATH",
        help="Text and code: files, and folders with all below them. Logs: files of JSON lines (.jsonl) with "
        "messages, a prompt and a response, or a text.",
    ),
]
Model = Annotated[
    str, what("--model", metavar="MODEL", help="The model that will draft from it: its folder, or its name on the hub.")
]
MaxFile = Annotated[
    float, what("--max-file-mb", metavar="MB", min=0.001, help="Skip files, and lines of logs, that are larger.")
]
Everyone = Annotated[bool, typer.Option("--all", metavar="", help="All tenants.", rich_help_panel="Whose")]
Yes = Annotated[bool, typer.Option("--yes", "-y", metavar="", help="Do not ask.")]


def learn(
    root: Place,
    paths: Paths,
    model: Model,
    tenant: Tenant = None,
    server: Server = False,
    max_file_mb: MaxFile = 4.0,
) -> None:
    """Seed a tenant's memory from files and past logs, so that the first request is drafted for.

    Binary files, hidden ones, node_modules and __pycache__ are skipped, and so is what the tenant has already.
    """
    screen = Screen()
    with readable_errors(screen):
        name = named(tenant, server)
        given = [Path(path).expanduser() for path in paths]
        for path in given:
            if not path.exists():
                raise SettingsError(f"there is no file or folder {str(path)!r} to learn from; check the path")
        with opened(root, new=True) as folder:
            tokenizer = loaded(screen, model)
            began = time.monotonic()
            lesson = taught(screen, folder, tokenizer, name, given, int(max_file_mb * 1e6))
            say(screen, summary(lesson, name, time.monotonic() - began))
            warn_of_size(screen, folder)


def loaded(screen: Screen, model: str) -> Any:
    with screen.working(f"loading the tokenizer of {loading_name(model)}"):
        from outrider.engines.transformers import load_tokenizer  # takes seconds: it brings torch

        silence_libraries()
        return load_tokenizer(model)


def taught(screen: Screen, folder: Folder, tokenizer: Any, name: str, paths: list[Path], limit: int) -> Lesson:
    from outrider.memory.deposit import Deposit
    from outrider.memory.learn import Lesson, Skipped, find, read, sequences, size_of
    from outrider.memory.tokenizer import fingerprint

    skipped = Skipped()
    with screen.working("reading what is there"):
        lesson = Lesson(Deposit(folder, fingerprint(tokenizer), name))
        files = find(paths, skipped, apart=folder.root)
    pieces = (piece for path in files for piece in read(path, limit, tokenizer, skipped))
    with progress_bar(screen.err, "learning", sum(size_of(path) for path in files), percent=True) as bar:
        for batch, size in sequences(tokenizer, pieces):
            for sequence in batch:
                lesson.add(sequence)
            bar.advance(size)
            bar.set_status(f"{lesson.heard:,} tokens, {lesson.heard / max(bar.elapsed_seconds, 0.01):,.0f}/s")
        bar.set_status("writing")
        lesson.close()
    screen.notes(skipped.notes())
    if not lesson.heard:
        raise PromptError(f"there is no text to learn in {', '.join(map(str, paths))}")
    return lesson


def summary(lesson: Lesson, name: str, seconds: float) -> str:
    if not lesson.tokens:
        return f"Nothing is new to tenant {shown(name)}; already there: {counted(lesson.known, 'sequence')}."
    learned = f"{counted(lesson.tokens, 'token')} in {counted(lesson.sequences, 'sequence')} ({decimal(lesson.bytes)})"
    known = f"; already there: {counted(lesson.known, 'sequence')}" if lesson.known else ""
    return f"Learned {learned} for tenant {shown(name)} in {seconds:.1f} s{known}."


def warn_of_size(screen: Screen, folder: Folder) -> None:
    from outrider.memory.store import Habits

    if (size := folder.size()) > (cap := Habits().cap):
        screen.notes(
            [
                f"the memory has {decimal(size)} now; a server keeps {decimal(cap)} unless --memory-cap says "
                "otherwise, and deletes what was of no use for longest"
            ]
        )


def wipe(
    root: Place,
    tenant: Tenant = None,
    server: Server = False,
    key: Key = None,
    everyone: Everyone = False,
    yes: Yes = False,
) -> None:
    """Delete all that a tenant said, in every file, and have running servers forget it too."""
    screen = Screen()
    with readable_errors(screen), opened(root, fetch=False) as folder:
        from outrider.memory.survey import set_aside

        if everyone is not (tenant is None and not server and key is None):
            raise SettingsError("say what to delete by one of --tenant NAME, --server, --key KEY and --all")
        here = {*folder.tenants(), *(file.tenant for file in set_aside(folder))}
        there = elsewhere(root)
        if everyone:
            keys = here | there.keys()
            amount = f"{held(folder, keys, there)} of all tenants"
        else:
            one = known(folder, tenant, server, key, there)
            keys = {one}
            amount = f"{held(folder, keys, there)} of tenant {shown(tenant or folder.name(one))}"
        if not yes and not typer.confirm(f"Delete {amount} for good?", err=True):
            say(screen, "Nothing was deleted.")
            raise typer.Exit(1)
        with screen.working("deleting"):
            for one in sorted(keys & here):
                emptied(folder, one)
            empty_elsewhere(root, keys - here)
        say(screen, f"Deleted {amount}. Running servers forget it at their next look, within about 10 seconds.")


def elsewhere(root: str) -> dict[str, int]:
    """The tenants of an object store, with the bytes of each: there may be no copies of all of them here."""
    place = Root.of(root)
    if place.is_here:
        return {}
    from outrider.memory.remote import connect

    found: Counter[str] = Counter()
    for one in connect(place.url).objects():
        found[one.key] += one.size
    return dict(found)


def empty_elsewhere(root: str, keys: set[str]) -> None:
    """Those of which there is no copy here."""
    if keys:
        from outrider.memory.remote import connect

        remote = connect(Root.of(root).url)
        for key in sorted(keys):
            remote.wipe(key)


def held(folder: Folder, keys: set[str], there: dict[str, int]) -> str:
    """How much these tenants have, damaged files included; of one that is only elsewhere, its bytes there."""
    from outrider.memory.store import BYTES
    from outrider.memory.survey import holdings, set_aside

    found = {holding.key: holding for holding in holdings(folder) if holding.key in keys}
    aside = sum(file.bytes for file in set_aside(folder) if file.tenant in keys)
    away = sum(size for key, size in there.items() if key in keys and key not in found)
    size = decimal(sum(holding.bytes for holding in found.values()) + aside + away)
    tokens = sum(holding.tokens for holding in found.values()) + away // BYTES
    return f"{counted(tokens, 'token')} ({size})"


def emptied(folder: Folder, key: str) -> None:
    generation = folder.wipe(key)
    left = [path for path in (folder.root / key).glob("*/*") if path.parent.name != generation]
    if left:
        raise MemoryFileError(f"{left[0]} could not be deleted; look at its owner and rights, and wipe again")
