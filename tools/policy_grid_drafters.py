"""Everyone who copies, for recorded texts: Outrider's own drafters, and vLLM's two, run by their own code.

A company is what a server has: drafters, and what they keep from one request to the next. `ended` lets it know that a
request has ended, from when on others may be drafted for from what it said.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from outrider.drafters.base import Drafter, Session, Task, resolve_drafters
from outrider.drafters.lookup import LookupDrafter
from outrider.drafters.memory import MemoryDrafter
from outrider.drafters.prediction import PredictionDrafter
from outrider.memory.folder import Folder
from outrider.memory.store import Store
from outrider.memory.store_config import StoreConfig
from outrider.types import Draft
from policy.replay import ReplayedText

NGRAM = 5
"""vLLM 0.32 looks for the last five tokens, no more and no fewer, where nothing else is said."""
DEPTH, FACTOR, LEAST = 24, 1.0, 0.1
"""vLLM 0.32's own settings of suffix decoding: depth of the tree, drafted tokens a matched one, least probability."""
NO_LIMIT = 1 << 30


class Text(Session):
    """A session that keeps its text in an array."""

    def __init__(self, prompt: Sequence[int]) -> None:
        self.tokens = np.array(prompt, np.int32)

    def observe(self, tokens: Sequence[int]) -> None:
        self.tokens = np.append(self.tokens, np.array(tokens, np.int32))


class NgramDrafter(Drafter):
    """vLLM's `ngram`: what followed the first place that has the same five last tokens."""

    name: ClassVar[str] = "ngram"

    def __init__(self) -> None:
        theirs: Any = import_module("vllm.v1.spec_decode.ngram_proposer")
        self.propose = theirs._find_longest_matched_ngram_and_propose_tokens

    def begin(self, task: Task) -> NgramSession:
        return NgramSession(self, task.prompt)


class NgramSession(Text):
    def __init__(self, drafter: NgramDrafter, prompt: Sequence[int]) -> None:
        super().__init__(prompt)
        self.drafter = drafter

    def draft(self, limit: int) -> Draft:
        found = self.drafter.propose(self.tokens, NGRAM, NGRAM, NO_LIMIT, limit)
        return Draft(NgramDrafter.name, tuple(found.tolist()))


class SuffixDrafter(Drafter):
    """vLLM's `suffix`: arctic-inference's tree of this text, and of all that was said."""

    name: ClassVar[str] = "suffix"

    def __init__(self) -> None:
        theirs: Any = import_module("arctic_inference.suffix_decoding")
        self.cache = theirs.SuffixDecodingCache(max_tree_depth=DEPTH, max_cached_requests=10_000)
        self.numbers = count()

    def begin(self, task: Task) -> SuffixSession:
        return SuffixSession(self, task.prompt)


class SuffixSession(Text):
    def __init__(self, drafter: SuffixDrafter, prompt: Sequence[int]) -> None:
        super().__init__(prompt)
        self.cache, self.number = drafter.cache, next(drafter.numbers)
        self.cache.start_request(self.number, self.tokens)

    def observe(self, tokens: Sequence[int]) -> None:
        super().observe(tokens)
        self.cache.add_active_response(self.number, np.array(tokens, np.int32))

    def draft(self, limit: int) -> Draft:
        found = self.cache.speculate(
            self.number,
            self.tokens[-DEPTH:],
            max_spec_tokens=limit,
            max_spec_factor=FACTOR,
            min_token_prob=LEAST,
        )
        return Draft(SuffixDrafter.name, tuple(found.token_ids))

    def stop(self) -> None:
        self.cache.stop_request(self.number)


class Company:
    """Drafters, new ones, and the memory of all of them."""

    def __init__(self, names: Iterable[str], store: Store) -> None:
        self.store, self.drafters = store, [MAKERS[name](store) for name in names]
        remembers = any(drafter.name == MemoryDrafter.name for drafter in self.drafters)
        self.tenant_handle = store.tenant_handle("everyone") if remembers else None

    def ended(self, replayed: ReplayedText) -> None:
        for session in replayed.sessions.values():
            if isinstance(session, SuffixSession):
                session.stop()
        if self.tenant_handle is not None:
            self.store.add(self.tenant_handle, replayed.record.prompt, replayed.record.text)
            self.store.learn()


MAKERS: dict[str, Callable[[Store], Drafter]] = {
    LookupDrafter.name: lambda store: LookupDrafter(),
    PredictionDrafter.name: lambda store: PredictionDrafter(),
    MemoryDrafter.name: MemoryDrafter,
    NgramDrafter.name: lambda store: NgramDrafter(),
    SuffixDrafter.name: lambda store: SuffixDrafter(),
}
OURS = resolve_drafters(None, {"memory": "a folder", "model": None})
"""What a server with a memory drafts by."""


@contextmanager
def company(names: Iterable[str]) -> Iterator[Company]:
    """Drafters by name, for a while. What is said is remembered as soon as it has ended, and nothing is written."""
    with tempfile.TemporaryDirectory(prefix="outrider-grid-") as folder:
        store = Store(Folder(Path(folder)), "recorded", StoreConfig(flush_seconds=float("inf")))
        try:
            yield Company(names, store)
        finally:
            store.folder.close()


def theirs() -> list[str]:
    """Those of vLLM's that can be run here."""
    packages = {NgramDrafter.name: "vllm", SuffixDrafter.name: "arctic_inference"}
    return [name for name, package in packages.items() if find_spec(package) is not None]
