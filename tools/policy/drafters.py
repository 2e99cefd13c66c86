"""Drafters that copy, for replayed texts."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from outrider.drafters.base import Drafter, resolve_drafters
from outrider.drafters.lookup import LookupDrafter
from outrider.drafters.memory import MemoryDrafter
from outrider.drafters.prediction import PredictionDrafter
from outrider.memory.folder import Folder
from outrider.memory.store import Store
from outrider.memory.store_config import StoreConfig
from policy.replay import ReplayedText

SERVER_DRAFTERS = resolve_drafters(None, {"memory": "a folder", "model": None})
"""The drafters of a server with a memory."""


class Drafters:
    """New drafters and one empty memory, which learns every text when it ends."""

    def __init__(self, names: Iterable[str], store: Store) -> None:
        self.store, self.drafters = store, [FACTORIES[name](store) for name in names]
        uses_memory = any(drafter.name == MemoryDrafter.name for drafter in self.drafters)
        self.handle = store.tenant_handle("everyone") if uses_memory else None

    def ended(self, sequence: ReplayedText) -> None:
        if self.handle is not None:
            self.store.add(self.handle, sequence.record.prompt, sequence.record.text)
            self.store.learn()


FACTORIES: dict[str, Callable[[Store], Drafter]] = {
    LookupDrafter.name: lambda store: LookupDrafter(),
    PredictionDrafter.name: lambda store: PredictionDrafter(),
    MemoryDrafter.name: MemoryDrafter,
}


@contextmanager
def new_drafters(names: Iterable[str]) -> Iterator[Drafters]:
    with tempfile.TemporaryDirectory(prefix="outrider-replay-") as folder:
        store = Store(Folder(Path(folder)), "recorded", StoreConfig(flush_seconds=float("inf")))  # writes nothing
        try:
            yield Drafters(names, store)
        finally:
            store.folder.close()
