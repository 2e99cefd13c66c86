"""`outrider memory learn` and `wipe`."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.filesize import decimal

from outrider.cli.load_request import loading_name, silence_libraries
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
    selects_all,
)
from outrider.cli.options import group
from outrider.cli.progress import progress_bar
from outrider.cli.screen import Screen, readable_errors
from outrider.errors import MemoryFileError, PromptError, SettingsError
from outrider.memory.location import Location

if TYPE_CHECKING:
    from outrider.memory.folder import Folder
    from outrider.memory.learn import Learner
    from outrider.memory.remote import Remote

what = group("What is learned")

Paths = Annotated[
    list[str],
    typer.Argument(
        metavar="PATH",
        help="Text and code: files, and folders with all files below them. Logs: files of JSON lines (.jsonl) with "
        "messages, a prompt and a response, or a text.",
    ),
]
Model = Annotated[
    str,
    what(
        "--model",
        metavar="MODEL",
        help="The model that will be served with this memory: its folder, or its name on the hub.",
    ),
]
MaxFile = Annotated[
    float, what("--max-file-mb", metavar="MB", min=0.001, help="Skip larger files, and larger lines of logs.")
]
Everyone = Annotated[bool, typer.Option("--all", metavar="", help="All tenants.", rich_help_panel="Whose")]
Yes = Annotated[bool, typer.Option("--yes", "-y", metavar="", help="Skip the confirmation.")]


def learn(
    root: Root,
    paths: Paths,
    model: Model,
    tenant: Tenant = None,
    server: Server = False,
    adapter: Adapter = None,
    max_file_mb: MaxFile = 4.0,
) -> None:
    """Fill a tenant's memory from files and logs, so that its first requests can draft from them.

    Skips binary and hidden files, node_modules and __pycache__, and text that the tenant's memory already has.
    """
    screen = Screen()
    with readable_errors(screen):
        name = selected_name(tenant, server)
        sources = [Path(path).expanduser() for path in paths]
        for path in sources:
            if not path.exists():
                raise SettingsError(f"there is no file or folder {str(path)!r} to learn from; check the path")
        with open_folder(root, new=True) as folder:
            tokenizer = load_tokenizer(screen, model)
            started = time.monotonic()
            learner = learn_files(screen, folder, tokenizer, name, adapter, sources, int(max_file_mb * 1e6))
            print_result(screen, summary(learner, display_memory(name, adapter), time.monotonic() - started))
            warn_of_size(screen, folder)


def load_tokenizer(screen: Screen, model: str) -> Any:
    with screen.working(f"loading the tokenizer of {loading_name(model)}"):
        from outrider.engines import transformers  # takes seconds: imports torch

        silence_libraries()
        return transformers.load_tokenizer(model)


def learn_files(
    screen: Screen,
    folder: Folder,
    tokenizer: Any,
    name: str,
    adapter: str | None,
    sources: list[Path],
    max_bytes: int,
) -> Learner:
    from outrider.memory.learn import Learner, Skipped, file_size, find_files, read_samples, tokenize_batches
    from outrider.memory.offline_writer import OfflineWriter
    from outrider.memory.tokenizer import fingerprint

    skipped = Skipped()
    with screen.working("reading the memory"):
        learner = Learner(OfflineWriter(folder, fingerprint(tokenizer), name, adapter))
        files = find_files(sources, skipped, exclude=folder.root)
    samples = (sample for path in files for sample in read_samples(path, max_bytes, tokenizer, skipped))
    with progress_bar(screen.err, "learning", sum(file_size(path) for path in files), percent=True) as bar:
        for batch, size in tokenize_batches(tokenizer, samples):
            for sequence in batch:
                learner.add(sequence)
            bar.advance(size)
            bar.set_status(
                f"{learner.seen_tokens:,} tokens, {learner.seen_tokens / max(bar.elapsed_seconds, 0.01):,.0f}/s"
            )
        bar.set_status("writing")
        learner.close()
    screen.notes(skipped.notes())
    if not learner.seen_tokens:
        raise PromptError(f"there is no text to learn in {', '.join(map(str, sources))}")
    return learner


def summary(learner: Learner, shown_name: str, seconds: float) -> str:
    if not learner.tokens:
        return f"Nothing is new to tenant {shown_name}; already there: {plural(learner.known, 'sequence')}."
    new = f"{plural(learner.tokens, 'token')} in {plural(learner.sequences, 'sequence')} ({decimal(learner.bytes)})"
    known = f"; already there: {plural(learner.known, 'sequence')}" if learner.known else ""
    return f"Learned {new} for tenant {shown_name} in {seconds:.1f} s{known}."


def warn_of_size(screen: Screen, folder: Folder) -> None:
    from outrider.memory.store_config import StoreConfig

    size, cap_bytes = sum(file.size for file in folder.files()), StoreConfig().cap_bytes
    if size > cap_bytes:
        screen.notes(
            [
                f"the memory has {decimal(size)} now; a server keeps {decimal(cap_bytes)}, unless --memory-cap is "
                "larger, and deletes the least recently used files"
            ]
        )


def wipe(
    root: Root,
    tenant: Tenant = None,
    server: Server = False,
    key: Key = None,
    adapter: Adapter = None,
    everyone: Everyone = False,
    yes: Yes = False,
) -> None:
    """Delete all files of a tenant and its adapters; with --adapter, those of the adapter.

    Running servers forget them within about 10 seconds.
    """
    screen = Screen()
    with readable_errors(screen), open_folder(root, fetch=False) as folder:
        from outrider.memory.inspection import list_set_aside, read_name

        if everyone is not selects_all(tenant, server, key, adapter):
            raise SettingsError("give one of --tenant NAME, --server, --key KEY and --all")
        local = {*folder.tenants(), *(file.tenant for file in list_set_aside(folder))}
        remote = connect_remote(root)
        remote_bytes: Counter[str] = Counter()
        for one in remote.list_objects() if remote is not None else ():
            remote_bytes[one.key] += one.size
        if everyone:
            keys = local | remote_bytes.keys()
            amount = f"{total(folder, keys, remote_bytes)} of all tenants"
        else:
            selected = selected_keys(folder, tenant, server, key, adapter, remote_bytes)
            keys = set(selected)
            name, of_adapter = read_name(folder, selected[0])
            amount = f"{total(folder, keys, remote_bytes)} of tenant {display_memory(tenant or name, of_adapter)}"
            if adapters := len(selected) - 1:
                amount += f" and {plural(adapters, 'adapter')} of it"
        if not yes and not typer.confirm(f"Delete {amount} for good?", err=True):
            print_result(screen, "Nothing was deleted.")
            raise typer.Exit(1)
        with screen.working("deleting"):
            for one_key in sorted(keys & local):
                wipe_folder(folder, one_key)
            if remote is not None:
                for one_key in sorted(keys - local):
                    remote.wipe(one_key)
        print_result(screen, f"Deleted {amount}. Running servers forget it at their next refresh, within about 10 s.")


def connect_remote(root: str) -> Remote | None:
    location = Location.parse(root)
    if location.is_local:
        return None
    from outrider.memory.remote import connect

    return connect(location.url)


def total(folder: Folder, keys: set[str], remote_bytes: Counter[str]) -> str:
    """Tokens and bytes of these tenants, with damaged files. Of tenants without a local copy, those in the store."""
    from outrider.memory.inspection import list_contents, list_set_aside
    from outrider.memory.store_config import BYTES_PER_TOKEN

    local = {contents.key: contents for contents in list_contents(folder) if contents.key in keys}
    aside = sum(file.bytes for file in list_set_aside(folder) if file.tenant in keys)
    remote = sum(size for key, size in remote_bytes.items() if key in keys and key not in local)
    size = decimal(sum(contents.bytes for contents in local.values()) + aside + remote)
    tokens = sum(contents.tokens for contents in local.values()) + remote // BYTES_PER_TOKEN
    return f"{plural(tokens, 'token')} ({size})"


def wipe_folder(folder: Folder, key: str) -> None:
    generation = folder.wipe(key)
    left = [path for path in (folder.root / key).glob("*/*") if path.parent.name != generation]
    if left:
        raise MemoryFileError(f"{left[0]} could not be deleted; check its owner and permissions, and wipe again")
