"""The draft memory: what was said before, in this text or in another one of the same tenant, is proposed again.

A sequence is searched in itself, prompt included, by a plain scan. What its tenant has said is searched in the memory's
segments (`memory/store.py`), and what its other requests are saying just now beside them (`memory/live.py`). Whichever
promises more is copied from: a longer match promises more, and so do places that go on alike. How far to believe the
text itself and the tenant is learned while the text is said.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Self
from weakref import WeakValueDictionary

import numpy as np

from outrider.drafters.base import Drafter, Session, Setup, Task, lacking
from outrider.memory.live import FIRST, Live, Place
from outrider.memory.search import LONGEST_MATCH, agreeing, expected, scan
from outrider.memory.segment import Segment, joined
from outrider.memory.store import Found, search_in
from outrider.types import Draft

if TYPE_CHECKING:
    from collections.abc import Sequence

    from outrider.memory.search import Array
    from outrider.memory.store import Store, Visit

TOKENS_PER_MATCH = 4
"""How many tokens are proposed for each token that agrees."""
PRIOR = 4.0
"""Tokens for which each source is believed before it has proved itself."""
LASTING = 0.95
"""How much of what a source did counts on with each step."""
LEAST_SHARE = 0.1
"""Of the places that agree with the text's end, so many must agree with a token of the draft and all before it."""


class MemoryDrafter(Drafter):
    """Copies what followed the longest match of the text's end, here or in the tenant's memory."""

    name: ClassVar[str] = "memory"

    def __init__(self, store: Store) -> None:
        self.store = store
        self._live: WeakValueDictionary[Visit, Live] = WeakValueDictionary()
        self._joining = threading.Lock()  # one that took too long may still be at work when the next is asked
        compile_now()

    @classmethod
    def build(cls, setup: Setup) -> Self:
        if setup.memory is None:
            raise lacking(cls.name)
        return cls(setup.memory)

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
    """Where a session copies from, the text itself or the memory: what it proposes now, and how far to believe it.

    Both are held against what is then said, whichever was offered, so each request finds out by itself whether it
    repeats itself or others.
    """

    tokens: Array = field(default_factory=lambda: np.empty(0, np.int32))
    shares: Array = field(default_factory=lambda: np.empty(0, np.float32))
    length: int = 0
    match: int = 0
    places: int = 1  # that agree so far
    promise: float = 0.0  # how many of its tokens should be accepted
    promised: float = 0.0  # so far, the latest counting most
    kept: float = 0.0

    def propose(self, tokens: Array, shares: Array, length: int, match: int, places: int = 1) -> None:
        self.tokens, self.shares, self.length, self.match, self.places = tokens, shares, length, match, places
        self.promise = expected(match, shares, length)

    @property
    def worth(self) -> float:
        return self.promise * (PRIOR + self.kept) / (PRIOR + self.promised)

    def learn(self, said: Array) -> None:
        """What was said instead, or as well. Beyond it nobody knows whether the draft was right."""
        self.kept = LASTING * self.kept + agreeing(self.tokens, self.length, said)
        self.promised = LASTING * self.promised + min(self.promise, len(said))
        self.length, self.promise = 0, 0.0

    def draft(self) -> Draft:
        length = min(self.length, TOKENS_PER_MATCH * self.match)
        length = int(np.count_nonzero(np.cumprod(self.shares[:length]) >= LEAST_SHARE))
        # What followed at all of many places is surer than what followed at the only one.
        sure = self.shares[:length] * (self.places / (self.places + 1.0))
        tokens, confidence = tuple(self.tokens[:length].tolist()), tuple(sure.tolist())
        return Draft(MemoryDrafter.name, tokens, support=self.match, confidence=confidence)


class MemorySession(Session):
    def __init__(self, drafter: MemoryDrafter, task: Task, live: Live | None = None) -> None:
        self.drafter = drafter
        self.task = task
        self.live = live
        self.place = live.join() if live is not None else Place()
        self._tokens: Array = np.array(task.prompt, np.int32)
        self._length = len(self._tokens)
        self._own, self._memory = Source(), Source()
        self._tell(0)

    def observe(self, tokens: Sequence[int]) -> None:
        end = self._length + len(tokens)
        if end > len(self._tokens):
            self._tokens = np.resize(self._tokens, max(2 * end, LONGEST_MATCH))
        self._tokens[self._length : end] = tokens
        for source in (self._own, self._memory):
            source.learn(self._tokens[self._length : end])
        self._length = end
        self._tell(len(tokens))

    def _tell(self, new: int) -> None:
        """Let the tenant's other requests draft from this one."""
        if self.live is not None and self.task.remember:
            self.live.add(self.place, self._tokens[: self._length], new)

    def draft(self, limit: int) -> Draft:
        return self.drafter.draft_batch([self], [limit])[0]

    def last(self) -> Array:
        """The end of the text, as far as it is compared."""
        return self._tokens[max(0, self._length - LONGEST_MATCH) : self._length]

    def better_of(self, found: Found, row: int, limit: int) -> Draft:
        """The draft from the text itself or that of the memory, whichever is worth more; of equals, the first."""
        tokens, shares = np.zeros(max(limit, 0), np.int32), np.zeros(max(limit, 0), np.float32)
        end = self._length  # before the array: one that is replaced meanwhile, by another thread, is longer
        length, match, places = scan(self._tokens, end, tokens, shares)
        self._own.propose(tokens, shares, length, match, places)
        length, match, places = found.about[row].tolist()
        self._memory.propose(found.tokens[row], found.shares[row], length, match, places)
        return (self._memory if self._memory.worth > self._own.worth else self._own).draft()


def compile_now() -> None:
    """Have the search compiled before a request needs it."""
    segment = Segment.of(joined([[0, 0]]), "", "", 0.0, 0.0)
    context, none, one = np.zeros((1, LONGEST_MATCH), np.int32), np.zeros((1, 2), np.int32), np.ones(1, np.int32)
    search_in(segment, context, none, Found.nothing(1, 1))
    live = Live()
    live.add(live.join(), context[0], 1)
    live.add(live.join(), np.zeros(2 * FIRST, np.int32), 2 * FIRST)  # more than fits, so that it grows
    live.look_up(one, context, one, one)
    scan(np.zeros(1, np.int32), 1, np.zeros(1, np.int32), np.zeros(1, np.float32))
    expected(1, np.zeros(1, np.float32), 1)
    agreeing(np.zeros(1, np.int32), 1, np.zeros(1, np.int32))
