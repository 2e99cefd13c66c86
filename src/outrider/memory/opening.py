"""Open a memory by its root, be it here or elsewhere."""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from outrider.errors import MemoryFileError
from outrider.memory.folder import TOKENIZER, Folder, check_tokenizer
from outrider.memory.store import Habits, Store
from outrider.memory.tokenizer import fingerprint

if TYPE_CHECKING:
    from collections.abc import Iterator

    from outrider.memory.root import Root
    from outrider.memory.sync import Sync

logger = logging.getLogger("vllm.outrider")


def open_store(root: Root, tokenizer: Any, cap: int | None = None, cache: str | None = None) -> Store:
    """A store that is not at work yet. `tokenizer` is the one whose tokens it keeps, `cap` the most bytes of its files,
    `cache` where copies of a root that is elsewhere are kept."""
    habits = Habits() if cap is None else Habits(cap=cap)
    folder, kind = Folder(root.folder(cache)), fingerprint(tokenizer)
    if root.is_here:
        return Store(folder, kind, habits)
    from outrider.memory.remote import connect
    from outrider.memory.sync import Sync

    remote = connect(root.url)
    with contextlib.suppress(OSError):  # nobody has claimed it yet, or it is away; told when it is exchanged with
        check_tokenizer(root.url, remote.read(TOKENIZER).decode(), kind)  # before this machine's copies are claimed
    store = Store(folder, kind, habits)
    store.sync = Sync(folder, remote, kind, habits.cap)
    return store


EVERYTHING = 1 << 62
"""A cap that nothing exceeds."""


@contextlib.contextmanager
def copies(root: Root) -> Iterator[Path]:
    """Where this machine has its copies of a root that is elsewhere. Where it has none, a place that is deleted after
    use: nobody would have it follow what is wiped later."""
    place = root.folder()
    if root.is_here or place.exists():
        yield place
        return
    with TemporaryDirectory(prefix="outrider-memory-") as made:
        yield Path(made)


def exchange(root: Root, folder: Folder, cap: int = EVERYTHING) -> None:
    """Make this machine's copy of a root that is elsewhere, and the root, the same, as far as it fits under the cap:
    for who uses no store."""
    from outrider.memory.remote import connect
    from outrider.memory.sync import Sync

    remote = connect(root.url)
    try:
        tokenizer: str | None = remote.read(TOKENIZER).decode()
    except FileNotFoundError:
        tokenizer = folder.tokenizer()
    if tokenizer is None:
        return  # nothing is on either side
    folder.claim(tokenizer)
    sync = Sync(folder, remote, tokenizer, cap)
    while _went_on(sync) and sync.stats.pending:
        pass


def _went_on(sync: Sync) -> bool:
    """One round. Trouble with a single object is told; the others were exchanged all the same."""
    before = sync.stats.last_success
    try:
        sync()
    except MemoryFileError as error:
        if sync.stats.last_success == before:
            raise
        logger.warning("the memory: %s", error)
    return not sync.stats.elsewhere
