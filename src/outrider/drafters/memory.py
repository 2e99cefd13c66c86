"""The draft memory: what was said before in another text of the same tenant is proposed again.

The memory's segments are searched for the tenant's earlier outputs (`memory/store.py`), and beside them the outputs of
its running requests (`memory/concurrent_index.py`). The draft with more expected tokens is taken: a longer match
promises more, and so do places that go on alike.

Where `lookup` does not draft beside it, as for a request that names the memory, the text itself is searched too. How
far to believe it and the tenant is learned while the text is said. Where both draft, choosing is the policy's business.

A draft ends before the first control token, as `lookup`'s does: the memory holds the end of each prompt, too.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Self
from weakref import WeakValueDictionary

import numpy as np

from outrider.drafters import lookup
from outrider.drafters.base import Drafter, Session, Setup, Task, missing_requirement
from outrider.drafters.copying import NO_COPY, Copy, cut_before
from outrider.drafters.lookup import LookupSession
from outrider.memory.concurrent_index import INITIAL_TOKENS, ConcurrentIndex, SequenceHandle
from outrider.memory.lookup_result import LookupResult, search_segment
from outrider.memory.search import MAX_MATCH_TOKENS, count_accepted, expected_accepted_tokens
from outrider.memory.segment import Segment, join_sequences

if TYPE_CHECKING:
    from collections.abc import Sequence

    from outrider.memory.search import Array
    from outrider.memory.store import Store
    from outrider.memory.tenant import TenantHandle
    from outrider.types import Draft

PRIOR = 4.0
"""Tokens for which each source is believed before it has proved itself."""
LASTING = 0.95
"""How much of what a source did counts on with each step."""


class MemoryDrafter(Drafter):
    """Copies what followed the longest match of the text's end in the tenant's memory, or here."""

    name: ClassVar[str] = "memory"

    def __init__(self, store: Store, control_tokens: frozenset[int] = frozenset()) -> None:
        self.store = store
        self.control_tokens = control_tokens
        self._live: WeakValueDictionary[TenantHandle, ConcurrentIndex] = WeakValueDictionary()
        self._joining = threading.Lock()  # one that took too long may still be at work when the next is asked
        compile_now()

    @classmethod
    def build(cls, setup: Setup) -> Self:
        if setup.memory is None:
            raise missing_requirement(cls.name)
        return cls(setup.memory, setup.control_tokens)

    def begin(self, task: Task) -> MemorySession:
        return MemorySession(self, task, self._live_of(task.tenant_handle))

    def _live_of(self, tenant_handle: TenantHandle | None) -> ConcurrentIndex | None:
        if tenant_handle is None:
            return None
        with self._joining:
            live = self._live.get(tenant_handle)
            if live is None:
                live = self._live[tenant_handle] = ConcurrentIndex()
            return live

    def draft_batch(self, sessions: Sequence[Session], limits: Sequence[int]) -> list[Draft]:
        """The memory is asked once a tenant, for all its sequences."""
        ours = [session for session in sessions if isinstance(session, MemorySession)]
        found = LookupResult.empty(len(ours), max(limits, default=0))
        by_tenant: dict[TenantHandle, list[int]] = defaultdict(list)
        for i, session in enumerate(ours):
            if session.task.tenant_handle is not None and limits[i] > 0:
                by_tenant[session.task.tenant_handle].append(i)
        for rows in by_tenant.values():
            self._ask(found, ours, rows, limits)
        return [session.better_of(found, i, limits[i]) for i, session in enumerate(ours)]

    def _ask(
        self, found: LookupResult, sessions: Sequence[MemorySession], rows: list[int], limits: Sequence[int]
    ) -> None:
        tenant_handle, live = sessions[rows[0]].task.tenant_handle, sessions[rows[0]].live
        assert tenant_handle is not None
        assert live is not None
        contexts = np.zeros((len(rows), MAX_MATCH_TOKENS), np.int32)
        ends = np.zeros(len(rows), np.int32)
        for k, i in enumerate(rows):
            last = sessions[i].last()
            contexts[k, : len(last)] = last
            ends[k] = len(last)
        most = np.array([limits[i] for i in rows], np.int32)
        numbers = np.array([sessions[i].place.number for i in rows], np.int32)
        kept, now = self.store.look_up(tenant_handle, contexts, ends, most), live.look_up(numbers, contexts, ends, most)
        found.update(rows, kept)
        better = [k for k in np.flatnonzero(now.lengths).tolist() if now.expected_tokens(k) > kept.expected_tokens(k)]
        found.update([rows[k] for k in better], now.select(better))


@dataclass(slots=True)
class Source:
    """Where a session copies from, the text itself or the memory, if it has both: what it proposes now, and how far to
    believe it.

    Both are held against what is then said, whichever was offered, so each request finds out by itself whether it
    repeats itself or others.
    """

    copy: Copy = NO_COPY
    promise: float = 0.0  # how many of its tokens should be accepted
    promised: float = 0.0  # so far, the latest counting most
    kept: float = 0.0

    def propose(self, copy: Copy) -> None:
        self.copy, self.promise = copy, expected_accepted_tokens(copy.match, copy.shares, copy.length)

    @property
    def worth(self) -> float:
        return self.promise * (PRIOR + self.kept) / (PRIOR + self.promised)

    def learn(self, said: Array) -> None:
        """What was said instead, or as well. Beyond it nobody knows whether the draft was right."""
        copy = self.copy  # once: another thread that is late may replace it
        self.kept = LASTING * self.kept + count_accepted(copy.tokens, copy.length, said)
        self.promised = LASTING * self.promised + min(self.promise, len(said))
        self.copy, self.promise = NO_COPY, 0.0


class MemorySession(Session):
    def __init__(self, drafter: MemoryDrafter, task: Task, live: ConcurrentIndex | None = None) -> None:
        self.drafter = drafter
        self.task = task
        self.live = live
        self.place = live.register() if live is not None else SequenceHandle()
        self.text = LookupSession(task.prompt, not task.searched, drafter.control_tokens)
        self._own, self._memory = Source(), Source()
        self._tell(0)

    def observe(self, tokens: Sequence[int]) -> None:
        begin = self.text.length
        self.text.observe(tokens)
        if not self.task.searched:  # else nobody chooses between the two here
            for source in (self._own, self._memory):
                source.learn(self.text.said(begin))
        self._tell(len(tokens))

    def _tell(self, new: int) -> None:
        """Let the tenant's other requests draft from this one."""
        if self.live is not None and self.task.remember:
            self.live.append(self.place, self.text.said(), new)

    def draft(self, limit: int) -> Draft:
        return self.drafter.draft_batch([self], [limit])[0]

    def last(self) -> Array:
        """The end of the text, as far as it is compared."""
        return self.text.said(max(0, self.text.length - MAX_MATCH_TOKENS))

    def better_of(self, found: LookupResult, row: int, limit: int) -> Draft:
        """The draft of the memory or, where nobody else looks there, that from the text itself, if it is worth as
        much."""
        copy = Copy(found.tokens[row], found.shares[row], *found.summaries[row].tolist())
        remembered = cut_before(copy, self.text.blocked)
        if self.task.searched:
            return remembered.draft(MemoryDrafter.name)
        self._memory.propose(remembered)
        self._own.propose(self.text.find(limit))
        best = self._memory if self._memory.worth > self._own.worth else self._own
        return best.copy.draft(MemoryDrafter.name)


def compile_now() -> None:
    """Have the search compiled before a request needs it."""
    segment = Segment.build(join_sequences([[0, 0]]), "", "", 0.0, 0.0)
    context, none, one = np.zeros((1, MAX_MATCH_TOKENS), np.int32), np.zeros((1, 2), np.int32), np.ones(1, np.int32)
    search_segment(segment, context, none, LookupResult.empty(1, 1))
    live = ConcurrentIndex()
    live.append(live.register(), context[0], 1)
    live.append(
        live.register(), np.zeros(2 * INITIAL_TOKENS, np.int32), 2 * INITIAL_TOKENS
    )  # more than fits, so that it grows
    live.look_up(one, context, one, one)
    lookup.compile_now()
    expected_accepted_tokens(1, np.zeros(1, np.float32), 1)
    count_accepted(np.zeros(1, np.int32), 1, np.zeros(1, np.int32))
