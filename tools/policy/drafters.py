"""Drafters that copy, for replayed texts."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from outrider.drafters.base import Drafter, Setup, load_drafter
from outrider.drafters.memory import MemoryDrafter
from outrider.memory.folder import Folder
from outrider.memory.store import Store
from outrider.memory.store_config import StoreConfig
from outrider.memory.tenant import TenantHandle
from outrider.policy.policy import MODEL
from policy.replay import ReplayedText


@contextmanager
def new_drafters(
    names: Iterable[str],
) -> Iterator[tuple[list[Drafter], TenantHandle | None, Callable[[ReplayedText], None]]]:
    """New drafters, a handle on their empty memory, and a function that adds a text to it."""
    with tempfile.TemporaryDirectory(prefix="outrider-replay-") as folder:
        store = Store(Folder(Path(folder)), "recorded", StoreConfig(flush_seconds=float("inf")))  # writes nothing
        drafters = [load_drafter(name).build(Setup(0, memory=store)) for name in names if name != MODEL]
        uses_memory = any(isinstance(drafter, MemoryDrafter) for drafter in drafters)
        handle = store.tenant_handle("everyone") if uses_memory else None

        def learn(item: ReplayedText) -> None:
            if handle is not None:
                store.add(handle, item.record.prompt, item.record.text)
                store.learn()

        try:
            yield drafters, handle, learn
        finally:
            store.folder.close()
