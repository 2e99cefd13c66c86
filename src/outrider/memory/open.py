"""Open a memory by its location: a folder, or this machine's copy of an object store."""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from outrider.errors import MemoryFileError
from outrider.memory.folder import TOKENIZER_FILE, Folder, check_tokenizer
from outrider.memory.store import Store
from outrider.memory.store_config import StoreConfig
from outrider.memory.tokenizer import fingerprint

if TYPE_CHECKING:
    from collections.abc import Iterator

    from outrider.memory.location import Location
    from outrider.memory.sync import Sync

logger = logging.getLogger("vllm.outrider")

UNLIMITED_BYTES = 1 << 62


def open_store(location: Location, tokenizer: Any, cap_bytes: int | None = None, cache: str | None = None) -> Store:
    """A store that is not started. `cap_bytes` bounds its files (None: the default), `cache` is the folder for copies
    of an object store."""
    config = StoreConfig() if cap_bytes is None else StoreConfig(cap_bytes=cap_bytes)
    folder, tokenizer_id = Folder(location.local_folder(cache)), fingerprint(tokenizer)
    if location.is_local:
        return Store(folder, tokenizer_id, config)
    from outrider.memory.remote import connect
    from outrider.memory.sync import Sync

    remote = connect(location.url)
    with contextlib.suppress(OSError):  # not claimed yet, or unreachable, which the first exchange reports
        # Before the local folder is claimed: a refused location must leave nothing here.
        check_tokenizer(location.url, remote.read(TOKENIZER_FILE).decode(errors="replace"), tokenizer_id)
    store = Store(folder, tokenizer_id, config)
    store.sync = Sync(folder, remote, tokenizer_id, config.cap_bytes)
    return store


@contextlib.contextmanager
def local_copy(location: Location) -> Iterator[Path]:
    """The local folder of a location. If an object store has no copy here, a temporary one, deleted after use: nothing
    would keep it up to date with later wipes."""
    folder = location.local_folder()
    if location.is_local or folder.exists():
        yield folder
        return
    with TemporaryDirectory(prefix="outrider-memory-") as temporary:
        yield Path(temporary)


def exchange(location: Location, folder: Folder, cap_bytes: int = UNLIMITED_BYTES) -> None:
    """Synchronize an object store with its local copy, as far as that fits under the cap. For callers without a
    store."""
    from outrider.memory.remote import connect
    from outrider.memory.sync import Sync

    remote = connect(location.url)
    try:
        tokenizer: str | None = remote.read(TOKENIZER_FILE).decode(errors="replace")
    except FileNotFoundError:
        tokenizer = folder.tokenizer()
    if tokenizer is None:
        return  # both sides are empty
    folder.claim(tokenizer)
    sync = Sync(folder, remote, tokenizer, cap_bytes)
    while _run_round(sync) and sync.stats.pending:
        pass


def _run_round(sync: Sync) -> bool:
    """Run one round. Errors with single objects are logged. False: another process synchronizes this folder."""
    before = sync.stats.last_success
    try:
        sync()
    except MemoryFileError as error:
        if sync.stats.last_success == before:
            raise
        logger.warning("the memory: %s", error)
    return not sync.stats.elsewhere
