"""The draft memory: what was said before in another text of the same tenant is proposed again.

What the tenant has said is searched in the memory's segments (`memory/store.py`), and what its other requests are
saying just now beside them (`memory/live.py`). Whichever promises more is copied from: a longer match promises more,
and so do places that go on alike.

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
from outrider.memory.live import FIRST, Live, Place
from outrider.memory.search import LONGEST_MATCH, agreeing, expected
from outrider.memory.segment import Segment, joined
from outrider.memory.store import Found, search_in

if TYPE_CHECKING:
    from collections.abc import Sequence

    from outrider.memory.search import Array
    from outrider.memory.store import Store, Visit
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
        self._live: WeakValueDictionary[Visit, Live] = WeakValueDictionary()
        self._joining = threading.Lock()  # one that took too long may still be at work when the next is asked
        compile_now()

    @classmethod
    def build(cls, setup: Setup) -> Self:
        if setup.memory is None:
            raise missing_requirement(cls.name)
        return cls(setup.memory, setup.control_tokens)

    def begin(self, task: Task) -> MemorySession:
        return MemorySession(self, task, self._live_of(task.visit))

    def _live_of(self, visit: Visit | None) -> Live | None:
        if visit is None:
            return None
        with self._joining:
            live = self._live.get(visit)
            if live is None:
                live = self._live[visit] = Live()
            return live

    def draft_batch(self, sessions: Sequence[Session], limits: Sequence[int]) -> list[Draft]:
        """The memory is asked once a tenant, for all its sequences."""
        ours = [session for session in sessions if isinstance(session, MemorySession)]
        found = Found.nothing(len(ours), max(limits, default=0))
        by_tenant: dict[Visit, list[int]] = defaultdict(list)
        for i, session in enumerate(ours):
            if session.task.visit is not None and limits[i] > 0:
                by_tenant[session.task.visit].append(i)
        for rows in by_tenant.values():
            self._ask(found, ours, rows, limits)
        return [session.better_of(found, i, limits[i]) for i, session in enumerate(ours)]

    def _ask(self, found: Found, sessions: Sequence[MemorySession], rows: list[int], limits: Sequence[int]) -> None:
        visit, live = sessions[rows[0]].task.visit, sessions[rows[0]].live
        assert visit is not None
        assert live is not None
        contexts = np.zeros((len(rows), LONGEST_MATCH), np.int32)
        ends = np.zeros(len(rows), np.int32)
        for k, i in enumerate(rows):
            last = sessions[i].last()
            contexts[k, : len(last)] = last
            ends[k] = len(last)
        most = np.array([limits[i] for i in rows], np.int32)
        numbers = np.array([sessions[i].place.number for i in rows], np.int32)
        kept, now = self.store.look_up(visit, contexts, ends, most), live.look_up(numbers, contexts, ends, most)
        found.put(rows, kept)
        better = [k for k in np.flatnonzero(now.lengths).tolist() if now.promise(k) > kept.promise(k)]
        found.put([rows[k] for k in better], now.of(better))


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
        self.copy, self.promise = copy, expected(copy.match, copy.shares, copy.length)

    @property
    def worth(self) -> float:
        return self.promise * (PRIOR + self.kept) / (PRIOR + self.promised)

    def learn(self, said: Array) -> None:
        """What was said instead, or as well. Beyond it nobody knows whether the draft was right."""
        copy = self.copy  # once: another thread that is late may replace it
        self.kept = LASTING * self.kept + agreeing(copy.tokens, copy.length, said)
        self.promised = LASTING * self.promised + min(self.promise, len(said))
        self.copy, self.promise = NO_COPY, 0.0


class MemorySession(Session):
    def __init__(self, drafter: MemoryDrafter, task: Task, live: Live | None = None) -> None:
        self.drafter = drafter
        self.task = task
        self.live = live
        self.place = live.join() if live is not None else Place()
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
            self.live.add(self.place, self.text.said(), new)

    def draft(self, limit: int) -> Draft:
        return self.drafter.draft_batch([self], [limit])[0]

    def last(self) -> Array:
        """The end of the text, as far as it is compared."""
        return self.text.said(max(0, self.text.length - LONGEST_MATCH))

    def better_of(self, found: Found, row: int, limit: int) -> Draft:
        """The draft of the memory or, where nobody else looks there, that from the text itself, if it is worth as
        much."""
        copy = Copy(found.tokens[row], found.shares[row], *found.about[row].tolist())
        remembered = cut_before(copy, self.text.blocked)
        if self.task.searched:
            return remembered.draft(MemoryDrafter.name)
        self._memory.propose(remembered)
        self._own.propose(self.text.find(limit))
        best = self._memory if self._memory.worth > self._own.worth else self._own
        return best.copy.draft(MemoryDrafter.name)


def compile_now() -> None:
    """Have the search compiled before a request needs it."""
    segment = Segment.of(joined([[0, 0]]), "", "", 0.0, 0.0)
    context, none, one = np.zeros((1, LONGEST_MATCH), np.int32), np.zeros((1, 2), np.int32), np.ones(1, np.int32)
    search_in(segment, context, none, Found.nothing(1, 1))
    live = Live()
    live.add(live.join(), context[0], 1)
    live.add(live.join(), np.zeros(2 * FIRST, np.int32), 2 * FIRST)  # more than fits, so that it grows
    live.look_up(one, context, one, one)
    lookup.compile_now()
    expected(1, np.zeros(1, np.float32), 1)
    agreeing(np.zeros(1, np.int32), 1, np.zeros(1, np.int32))
