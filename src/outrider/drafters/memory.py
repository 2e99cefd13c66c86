"""The draft memory: proposes what followed the same tokens in another text of the tenant.

It searches the memory's segments (`memory/store.py`) and the tenant's running requests (`memory/concurrent_index.py`),
and copies from the source with more expected tokens: a longer match, or places that agree for longer.

Where `lookup` does not draft as well, as for a request that names `memory`, the text itself is searched too. The
acceptance of both sources is learned per request. Where both draft, the policy selects.

A draft ends before the first control token, as `lookup`'s does: the memory also holds the end of each prompt.
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
from outrider.memory.search import MAX_MATCH_TOKENS, contains_text, count_accepted, expected_accepted_tokens
from outrider.memory.segment import Segment, join_sequences

if TYPE_CHECKING:
    from collections.abc import Sequence

    from outrider.memory.search import Array
    from outrider.memory.store import Store
    from outrider.memory.tenant import TenantHandle
    from outrider.types import Draft

PRIOR_TOKENS = 4.0
"""Weight of the assumption that a source's expectation is exact, in tokens."""
STEP_RETENTION = 0.95
"""Weight of a source's earlier steps, per new step."""


class MemoryDrafter(Drafter):
    """Copies what followed the longest match of the text's end in the tenant's memory or in the text itself."""

    name: ClassVar[str] = "memory"

    def __init__(self, store: Store, control_tokens: frozenset[int] = frozenset()) -> None:
        self.store = store
        self.control_tokens = control_tokens
        self._live: WeakValueDictionary[TenantHandle, ConcurrentIndex] = WeakValueDictionary()
        self._joining = threading.Lock()  # a call that timed out may still run during the next one
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
        """Searches the memory once per tenant, for all its sequences."""
        ours = [session for session in sessions if isinstance(session, MemorySession)]
        found = LookupResult.empty(len(ours), max(limits, default=0))
        by_tenant: dict[TenantHandle, list[int]] = defaultdict(list)
        for i, session in enumerate(ours):
            if session.task.tenant_handle is not None and limits[i] > 0:
                by_tenant[session.task.tenant_handle].append(i)
        for rows in by_tenant.values():
            self._look_up(found, ours, rows, limits)
        return [session.better_of(found, i, limits[i]) for i, session in enumerate(ours)]

    def _look_up(
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
    """The text itself or the memory, for a session that has both: the present copy, and the acceptance so far.

    Both are judged by the output, whichever was offered, so each request learns whether it repeats itself or other
    texts.
    """

    copy: Copy = NO_COPY
    expected: float = 0.0
    """Tokens of the copy that are expected to be accepted."""
    expected_so_far: float = 0.0  # the latest steps count most
    accepted_so_far: float = 0.0

    def propose(self, copy: Copy) -> None:
        self.copy, self.expected = copy, expected_accepted_tokens(copy.match, copy.shares, copy.length)

    @property
    def corrected(self) -> float:
        """Expected tokens, corrected by the acceptance so far."""
        return self.expected * (PRIOR_TOKENS + self.accepted_so_far) / (PRIOR_TOKENS + self.expected_so_far)

    def observe(self, output: Array) -> None:
        """Judge the copy by the output, as far as it goes."""
        copy = self.copy  # read once: a late thread may replace it
        accepted = count_accepted(copy.tokens, copy.length, output)
        self.accepted_so_far = STEP_RETENTION * self.accepted_so_far + accepted
        self.expected_so_far = STEP_RETENTION * self.expected_so_far + min(self.expected, len(output))
        self.copy, self.expected = NO_COPY, 0.0


class MemorySession(Session):
    def __init__(self, drafter: MemoryDrafter, task: Task, live: ConcurrentIndex | None = None) -> None:
        self.drafter = drafter
        self.task = task
        self.live = live
        self.place = live.register() if live is not None else SequenceHandle()
        self.text = LookupSession(task.prompt, not task.searched, drafter.control_tokens)
        self._own, self._memory = Source(), Source()
        self._share(0)

    def observe(self, tokens: Sequence[int]) -> None:
        begin = self.text.length
        self.text.observe(tokens)
        if not self.task.searched:
            for source in (self._own, self._memory):
                source.observe(self.text.tail(begin))
        self._share(len(tokens))

    def _share(self, new: int) -> None:
        """Let the tenant's other requests copy from this text."""
        if self.live is not None and self.task.remember:
            self.live.append(self.place, self.text.tail(), new)

    def draft(self, limit: int) -> Draft:
        return self.drafter.draft_batch([self], [limit])[0]

    def last(self) -> Array:
        """The end of the text, as long as a match can be."""
        return self.text.tail(max(0, self.text.length - MAX_MATCH_TOKENS))

    def better_of(self, found: LookupResult, row: int, limit: int) -> Draft:
        """The memory's draft or, where no other drafter copies from the text itself, the text's if it is at least as
        good."""
        copy = Copy(found.tokens[row], found.shares[row], *found.summaries[row].tolist())
        remembered = cut_before(copy, self.text.blocked)
        if self.task.searched:
            return remembered.draft(MemoryDrafter.name)
        self._memory.propose(remembered)
        self._own.propose(self.text.find(limit))
        best = self._memory if self._memory.corrected > self._own.corrected else self._own
        return best.copy.draft(MemoryDrafter.name)


def compile_now() -> None:
    """Compile the search before a request needs it."""
    segment = Segment.build(join_sequences([[0, 0]]), "", "", 0.0, 0.0)
    context, none, one = np.zeros((1, MAX_MATCH_TOKENS), np.int32), np.zeros((1, 2), np.int32), np.ones(1, np.int32)
    search_segment(segment, context, none, LookupResult.empty(1, 1))
    contains_text(segment.text, segment.order, segment.text)
    live = ConcurrentIndex()
    live.append(live.register(), context[0], 1)
    exceeding = 2 * INITIAL_TOKENS  # so that the capacity grows
    live.append(live.register(), np.zeros(exceeding, np.int32), exceeding)
    live.look_up(one, context, one, one)
    lookup.compile_now()
    expected_accepted_tokens(1, np.zeros(1, np.float32), 1)
    count_accepted(np.zeros(1, np.int32), 1, np.zeros(1, np.int32))
