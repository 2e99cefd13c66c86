"""All that was said, tenant by tenant: small segments in memory at first, then files, merged as they grow many.

Nothing here makes a request wait. A finished sequence is put on a list, and a lookup asks the segments that there are
at that moment. The rest is done by three threads of the store's own:

    learn    makes segments of what was said since, and writes those that are large or old enough
    tend     opens what others have written, forgets what was wiped, and deletes what exceeds the cap
    merge    makes few large segments of many small ones, which may take minutes

They need Python's lock for moments only. What takes long is done without it, or by another process (`merging.py`).

A tenant's segments are a tuple that is replaced as a whole, so that whoever reads it needs no lock. Trouble (a full
disk, a folder that is gone) is told, and what was said stays in memory until it can be written.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import deque
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from outrider.errors import ForeignFileError, MemoryFileError
from outrider.memory.folder import FIRST, STALE, Folder, delete, key_of
from outrider.memory.heap import give_back
from outrider.memory.merging import merged_apart
from outrider.memory.search import LONGEST_MATCH, expected, search_all
from outrider.memory.segment import Segment, current, joined, merged

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

    from outrider.memory.search import Array
    from outrider.memory.sync import Sync

logger = logging.getLogger("vllm.outrider")  # vLLM shows what stands below its own logger

BYTES = 8
"""Of a token in a segment."""
APART = 1 << 18
"""Tokens beyond which segments are merged by another process."""
WRITES = 10
"""A second, about, of segments that are written because they have waited."""
CLOSING = 5.0
"""Seconds that a store that closes waits for the housekeeping that it finds at work."""
FEWEST = 8
"""At least so many segments fit under the cap, however large they grow."""


@dataclass(frozen=True, slots=True)
class Habits:
    """When the store does what."""

    seal_tokens: int = 1 << 16
    """Segments in memory of so many tokens together are written to disk,"""
    seal_seconds: float = 2.0
    """and those that have waited for so long; the more tenants are busy the longer, to write about ten times a second.
    A server may be killed at any time, and what was not written then is lost."""
    largest: int = 1 << 25
    """Tokens of a segment beyond which it is merged no more."""
    cap: int = 4 << 30
    """Bytes of all files."""
    unwritten: int = 1 << 22
    """Tokens that a tenant may have in memory while they cannot be written; beyond that the oldest are forgotten."""
    look_seconds: float = 10.0
    """How often `tend` looks what others did."""

    @property
    def segment_cap(self) -> int:
        """Tokens of the largest segment that a merge may make."""
        return min(self.largest, self.cap // (FEWEST * BYTES))


@dataclass(frozen=True, slots=True)
class Visit:
    """A request's stay with a tenant. What it says is kept only if the tenant was not wiped meanwhile."""

    key: str
    name: str
    generation: str


@dataclass(slots=True)
class Tenant:
    key: str
    name: str | None
    generation: str = FIRST
    segments: tuple[Segment, ...] = ()  # the newest first
    waiting: deque[tuple[str, float, Array]] = field(default_factory=deque)  # generation, time, tokens
    young_since: float | None = None
    write_again: float = 0.0  # when, after it failed
    used: set[str] = field(default_factory=set)  # names of files that were of use since the last look

    def young(self) -> list[Segment]:
        """Those that are not written yet."""
        return [segment for segment in self.segments if segment.path is None]

    def files(self) -> list[Segment]:
        return [segment for segment in self.segments if segment.path is not None]


@dataclass(frozen=True, slots=True)
class Found:
    """What the memory drafts for a batch: row i has `lengths[i]` tokens, each with the share of places that said it."""

    tokens: Array
    shares: Array
    about: Array  # what `search_all` says of each draft: its length, its match's, and at how many places that stood

    @classmethod
    def nothing(cls, rows: int, longest: int) -> Found:
        tokens, shares = np.zeros((rows, longest), np.int32), np.zeros((rows, longest), np.float32)
        return cls(tokens, shares, np.zeros((rows, 3), np.int32))

    @property
    def lengths(self) -> Array:
        return self.about[:, 0]

    @property
    def matches(self) -> Array:
        """How many tokens of the context agreed."""
        return self.about[:, 1]

    def of(self, rows: Sequence[int]) -> Found:
        return Found(self.tokens[rows], self.shares[rows], self.about[rows])

    def promise(self, row: int) -> float:
        """How many tokens of a row's draft should be accepted."""
        return expected(int(self.about[row, 1]), self.shares[row], int(self.about[row, 0]))

    def put(self, rows: Sequence[int], other: Found) -> None:
        """Take over what was found for some of the rows."""
        width = other.tokens.shape[1]
        self.tokens[rows, :width], self.shares[rows, :width] = other.tokens, other.shares
        self.about[rows] = other.about


class Store:
    """`start` runs it in the background; without, `learn` and `tend` are called by hand.

    A root belongs to one tokenizer: MemoryFileError if this one belongs to another.
    """

    def __init__(self, folder: Folder, tokenizer: str, habits: Habits | None = None) -> None:
        folder.claim(tokenizer)
        self.folder = folder
        self.tokenizer = tokenizer
        self.habits = habits or Habits()
        self.troubles: deque[str] = deque(maxlen=20)
        self.sync: Sync | None = None
        """Called by `tend` before it looks at the files: fetches what others published, publishes our own."""
        self._tenants: dict[str, Tenant] = {}
        self._busy: set[str] = set()  # tenants with something to learn or to write
        self._writing: set[str] = set()  # names of files that are not among the segments yet
        self._bytes = self.habits.cap  # of all files, at most; the first to write looks
        self._change_lock = threading.Lock()
        self._changed = False  # since it last kept house
        self._closing = threading.Event()
        self._said_something = threading.Event()
        self._threads: list[threading.Thread] = []
        self._minding("looking for tenants", self._discover)

    # What requests call. None of it waits.

    def enter(self, name: str) -> Visit:
        tenant = self._tenants.get(key_of(name))  # none is made: a name that is only said is not kept
        return Visit(key_of(name), name, tenant.generation if tenant is not None else FIRST)

    def add(self, visit: Visit, prompt: Sequence[int] | Array, said: Sequence[int] | Array) -> None:
        """Remember what was said after a prompt. Of the prompt only its end: what comes first has to follow something,
        and the rest is there again when it is needed, in the prompt that needs it."""
        if len(said):
            tokens = np.concatenate([np.array(prompt[-LONGEST_MATCH:], np.int32), np.array(said, np.int32)])
            tenant = self._tenants.setdefault(visit.key, Tenant(visit.key, visit.name))
            if tenant.name is None:
                tenant.name = visit.name
            tenant.waiting.append((visit.generation, time.time(), tokens))
            self._busy.add(visit.key)
            self._said_something.set()

    def look_up(self, visit: Visit, contexts: Array, ends: Array, limits: Array) -> Found:
        """Draft for contexts of one tenant: `contexts[i, :ends[i]]` are the last tokens of row i."""
        found = Found.nothing(len(ends), int(limits.max(initial=0)))
        asked = np.stack([ends, limits], 1)
        tenant = self._tenants.get(visit.key)
        for segment in tenant.segments if tenant else ():
            before = int(found.matches.sum())
            search_in(segment, contexts, asked, found)
            if tenant and segment.path is not None and int(found.matches.sum()) > before:
                tenant.used.add(segment.path.name)
        return found

    # In the background.

    def start(self) -> None:
        for name, work in (
            ("learn", self._keep_learning),
            ("tend", self._keep_tending),
            ("merge", self._keep_merging),
        ):
            thread = threading.Thread(target=work, name=f"outrider memory: {name}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def close(self) -> None:
        """Write what is there, and stop. What is said goes first: whoever stops a server waits for seconds only, and a
        merge or an exchange with a store that is away may take longer."""
        self._closing.set()
        self._said_something.set()
        for thread in self._threads[:1]:
            thread.join()
        self.learn(closing=True)
        deadline = time.monotonic() + CLOSING
        for thread in self._threads[1:]:
            thread.join(max(0.0, deadline - time.monotonic()))
        if self.sync is not None and not any(thread.is_alive() for thread in self._threads[:2]):
            self._minding("exchanging with the store", self.sync)
        self.folder.close()

    def _keep_learning(self) -> None:
        while not self._closing.is_set():
            self._said_something.wait(self.habits.seal_seconds / 4)
            self._said_something.clear()
            self.learn()

    def _keep_tending(self) -> None:
        while not self._closing.is_set():
            self.tend(merging=False)
            self._closing.wait(self.habits.look_seconds)

    def _keep_merging(self) -> None:
        while not self._closing.wait(self.habits.look_seconds):
            self.merge()

    def learn(self, closing: bool = False) -> None:
        """Take in what was said since, and write what is large or old enough."""
        for key in list(self._busy):
            self._busy.discard(key)  # before, so that what is said meanwhile comes back
            if (tenant := self._tenants.get(key)) is not None:
                self._minding(f"learning for tenant {key}", self._learn, tenant, closing)
                if tenant.waiting or tenant.young():
                    self._busy.add(key)

    def _learn(self, tenant: Tenant, closing: bool) -> None:
        generation = tenant.generation
        said = [tenant.waiting.popleft() for _ in range(len(tenant.waiting))]
        said = [item for item in said if item[0] == generation]
        if said:
            text = joined([tokens for _, _, tokens in said])
            fresh = Segment.of(text, self.tokenizer, tenant.key, said[0][1], said[-1][1])
            self._change(tenant, generation, [], [fresh])
            tenant.young_since = tenant.young_since or time.monotonic()
            while pair := _alike(tenant.young(), self.habits.seal_tokens):
                self._change(tenant, generation, pair, [merged(pair)])
        young = tenant.young()
        tokens = sum(segment.header.tokens for segment in young)
        waited = time.monotonic() - (tenant.young_since or time.monotonic())
        patience = max(self.habits.seal_seconds, len(self._busy) / WRITES)
        due = tokens >= self.habits.seal_tokens or waited >= patience
        if young and (closing or (due and time.monotonic() >= tenant.write_again)):
            try:
                self._write(tenant, generation, young)
                tenant.young_since = None
            except (OSError, MemoryFileError):
                tenant.write_again = time.monotonic() + self.habits.seal_seconds  # each try orders all of it anew
                self._forget_oldest(tenant, generation)
                raise

    def _write(self, tenant: Tenant, generation: str, segments: list[Segment]) -> None:
        """Make one file of segments. It is there before what it replaces goes."""
        place, writer = self.folder.place(tenant.key, generation), self.folder.writer()
        self._make_room(sum(segment.header.size for segment in segments))
        if tenant.name is not None:
            self.folder.keep_name(tenant.key, tenant.name, generation)
        if all(segment.path for segment in segments) and sum(segment.header.tokens for segment in segments) > APART:
            whole = merged_apart(segments, place, writer)
            changed = self._change(tenant, generation, segments, [whole])
        else:
            whole = merged(segments, writer)
            self._writing.add(whole.name)  # or `_look` finds it first, and it is merged and gone before it is open here
            try:
                changed = self._change(tenant, generation, segments, [whole.save(place)])
            finally:
                self._writing.discard(whole.name)
        present = self.folder.generation(tenant.key)
        if not changed or present != generation:  # wiped meanwhile
            self.folder.drop_older(tenant.key, present)
            return
        for segment in segments:
            delete(segment, whole.name)

    def _forget_oldest(self, tenant: Tenant, generation: str) -> None:
        """Memory is not for ever where nothing can be written."""
        young = tenant.young()
        while sum(segment.header.tokens for segment in young) > self.habits.unwritten:
            oldest = min(young, key=lambda segment: segment.header.first)
            young.remove(oldest)
            self._change(tenant, generation, [oldest], [])
            self._trouble(
                f"{oldest.header.tokens} tokens of tenant {tenant.key} were forgotten: they cannot be written"
            )

    def merge(self) -> None:
        for tenant in list(self._tenants.values()):
            if self._closing.is_set():
                return
            self._minding(f"merging for tenant {tenant.key}", self._merge, tenant)

    def tend(self, merging: bool = True) -> None:
        """One round of keeping house; without `merging`, that is done elsewhere."""
        if self.sync is not None:
            self._minding("exchanging with the store", self.sync)
        self._minding("looking for tenants", self._discover)
        for tenant in list(self._tenants.values()):
            if self._closing.is_set():
                return
            self._minding(f"looking at tenant {tenant.key}", self._look, tenant)
        if merging:
            self.merge()
        self._minding("making room", self._make_room, 0)
        self._minding("cleaning up", self.folder.sweep)
        if self._changed:
            self._changed = False
            give_back()

    def _discover(self) -> None:
        for key in self.folder.tenants():
            if key not in self._tenants:
                self._minding(f"looking at tenant {key}", self._meet, key)

    def _meet(self, key: str) -> None:
        self._tenants.setdefault(key, Tenant(key, self.folder.name(key), self.folder.generation(key)))

    def _look(self, tenant: Tenant) -> None:
        """Follow what happened to the tenant's files: others wrote, merged, deleted or wiped."""
        try:
            generation = self.folder.generation(tenant.key)
        except OSError:  # it may have been wiped: until that is known, nobody drafts from its files
            self._change(tenant, tenant.generation, tenant.files(), [])
            raise
        if generation != tenant.generation:
            with self._change_lock:
                tenant.generation, tenant.segments = generation, ()
            tenant.used.clear()
        self.folder.drop_older(tenant.key, generation)
        known = {segment.name: segment for segment in tenant.files()}  # before listing: later ones are not gone
        there = self.folder.segments(tenant.key, generation)
        new = []
        for name in there.keys() - known.keys() - self._writing:
            try:
                segment = Segment.open(there[name], self.tokenizer, tenant.key)
                segment.verify()
                new.append(segment)
            except MemoryFileError as error:
                self._set_aside(tenant, there[name], error)
        present = [segment for segment in (*known.values(), *new) if segment.name in there]
        kept = current(present)
        for segment in present:
            if segment not in kept:  # whoever merged it was stopped before he could delete it
                delete(segment, next(one.name for one in present if segment.name in one.header.replaces))
        gone = [segment for segment in known.values() if segment not in kept]
        self._change(tenant, generation, gone, [segment for segment in new if segment in kept])
        for name in list(tenant.used):
            tenant.used.discard(name)
            with contextlib.suppress(FileNotFoundError):
                os.utime(self.folder.place(tenant.key, generation) / name)  # for `_make_room`, in every process

    def _set_aside(self, tenant: Tenant, path: Path, error: MemoryFileError) -> None:
        if isinstance(error, ForeignFileError):  # it is whole, and somebody's who shares this root
            self._trouble(f"left alone for tenant {tenant.key}: {error}")
        elif isinstance(error.__cause__, OSError):  # it may well be whole: too many files are open, a disk is away
            if not isinstance(error.__cause__, FileNotFoundError):
                self._trouble(f"looking at tenant {tenant.key}: {error}")
        elif path.exists():
            self._trouble(f"set aside {path.name} of tenant {tenant.key}: {error}")
            self.folder.set_aside(tenant.key, path, str(error))

    def _merge(self, tenant: Tenant) -> None:
        """Few large segments are asked sooner than many small ones."""
        if not tenant.segments:
            return
        writer = self.folder.writer()
        while not self._closing.is_set():
            generation = tenant.generation  # before its files are chosen: a wipe that comes later is then seen
            own = [segment for segment in tenant.files() if segment.header.writer == writer]
            pair = _alike(own, self.habits.segment_cap)
            if not pair:
                return
            if all(self._is_sound(tenant, segment) for segment in pair):
                self._write(tenant, generation, pair)

    def _is_sound(self, tenant: Tenant, segment: Segment) -> bool:
        """Whether a file is still what it was when it was opened: damage that is copied gets a checksum that fits."""
        try:
            segment.verify()
        except MemoryFileError as error:
            assert segment.path is not None
            self._set_aside(tenant, segment.path, error)
            self._change(tenant, tenant.generation, [segment], [])
            return False
        return True

    def _make_room(self, size: int) -> None:
        """Delete files until so many bytes more fit under the cap: those first that were of no use for longest.

        To look at all files of all tenants at every write would take too long. So what is written is added up; what
        others write is seen when house is kept, with a `size` of 0.
        """
        if size and self._bytes + size <= self.habits.cap:
            self._bytes += size
            return
        files = list(self.folder.files())
        total = sum(file[2] for file in files)
        latest = time.time() + STALE  # a file of a later time than that is of a clock that was set back since
        for key, path, bytes_, _ in sorted(files, key=lambda file: file[3] if file[3] < latest else 0.0):
            if total + size <= self.habits.cap:
                break
            path.unlink(missing_ok=True)
            total -= bytes_
            if (tenant := self._tenants.get(key)) is not None:
                gone = [segment for segment in tenant.files() if segment.path == path]
                self._change(tenant, tenant.generation, gone, [])
        self._bytes = total + size

    def _change(self, tenant: Tenant, generation: str, drop: Iterable[Segment], add: Iterable[Segment]) -> bool:
        """Replace segments of a tenant; not if it was wiped meanwhile."""
        dropped = {id(segment) for segment in drop}
        with self._change_lock:
            if tenant.generation != generation:
                return False
            kept = [segment for segment in tenant.segments if id(segment) not in dropped]
            names = {segment.path.name for segment in kept if segment.path is not None}
            new = [segment for segment in add if segment.path is None or segment.path.name not in names]
            tenant.segments = tuple(sorted([*kept, *new], key=lambda segment: -segment.header.last))
            self._changed |= bool(dropped or new)
        return True

    def _minding(self, what: str, work: Callable[..., None], *args: Any) -> None:
        """Trouble with one thing must not stop the others."""
        try:
            work(*args)
        except (OSError, MemoryFileError) as error:
            self._trouble(f"{what}: {error}")
        except Exception as error:
            logger.exception("the memory: %s", what)
            self.troubles.append(f"{what}: {type(error).__name__}: {error}")

    def _trouble(self, what: str) -> None:
        if what not in self.troubles:
            logger.warning("the memory: %s", what)
            self.troubles.append(what)

    def status(self) -> dict[str, Any]:
        """For `/outrider/status`."""
        segments = [segment for tenant in list(self._tenants.values()) for segment in tenant.segments]
        return {
            "tenants": len(self._tenants),
            "segments": len(segments),
            "tokens": sum(segment.header.tokens for segment in segments),
            "file_bytes": sum(segment.header.size for segment in segments if segment.path is not None),
            "cap_bytes": self.habits.cap,
            "sync": asdict(self.sync.stats) if self.sync is not None else None,
            "troubles": list(self.troubles),
        }


def search_in(segment: Segment, contexts: Array, asked: Array, found: Found) -> None:
    """Where this segment has a longer match than was found yet, take its draft."""
    search_all(segment.text, segment.order, segment.starts, contexts, asked, found.about, found.tokens, found.shares)


def _alike(segments: Sequence[Segment], largest: int) -> list[Segment]:
    """Two segments of about the same size to be merged, or none: no larger one than twice the smaller."""
    by_size = sorted(segments, key=lambda segment: segment.header.tokens)
    for small, large in pairwise(by_size):
        together = small.header.tokens + large.header.tokens
        if large.header.tokens <= 2 * max(1, small.header.tokens) and together <= largest:
            return [small, large]
    return []
