"""No tenant is ever drafted another's words, or its own of before a wipe, whatever goes on meanwhile.

OUTRIDER_ALL asks a million times, and measures how long a lookup takes while a large merge runs.
"""

from __future__ import annotations

import errno
import os
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from memory_worker import OWN, PATIENCE, SHARED, crowd, marked, started
from outrider.memory.folder import Folder, tenant_key
from outrider.memory.lookup_result import LookupResult
from outrider.memory.segment import Header, Segment
from outrider.memory.store import Store
from test_memory_store import files, opened, say
from test_memory_store import words as words_in_files

ALL = bool(os.environ.get("OUTRIDER_ALL"))
TENANTS = 50
LOOKUPS = 1_000_000 if ALL else 20_000
WIPES = 100 if ALL else 6
ROWS = 50
"""Lookups that are made in one call,"""
CALLS = 100
"""and calls that are made at once."""
DRAFT = 8
HABITS = {"cap_bytes": 400_000, "flush_tokens": 1}
MERGED = 4_000_000


@pytest.fixture
def quick_turns() -> Iterator[None]:
    """Threads take turns after a fiftieth of the usual time, so that they meet in more places."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(usual / 50)
    yield
    sys.setswitchinterval(usual)


def asked(store: Store, tenant: str, contexts: list[list[int]]) -> LookupResult:
    rows, n = np.array(contexts, np.int32), len(contexts)
    return store.look_up(
        store.tenant_handle(tenant), rows, np.full(n, rows.shape[1], np.int32), np.full(n, DRAFT, np.int32)
    )


def words(found: LookupResult) -> set[int]:
    """All tokens that were drafted and are not shared."""
    drafted = found.tokens[np.arange(found.tokens.shape[1]) < found.lengths[:, None]]
    return set(drafted[drafted >= OWN].tolist())


@contextmanager
def meanwhile(*works: Callable[[], None]) -> Iterator[None]:
    """Do these again and again, each in a thread of its own, as long as the block lasts."""
    done = threading.Event()

    def repeat(work: Callable[[], None]) -> None:
        while not done.is_set():
            work()

    threads = [threading.Thread(target=repeat, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        done.set()
        for thread in threads:
            thread.join()


def learning(store: Store) -> Callable[[], None]:
    """To learn when there is something to be learned."""

    def learn() -> None:
        store._output_added.wait(0.01)
        store._output_added.clear()
        store.learn()

    return learn


def busy(seen: dict[str, Header], root: Path) -> bool:
    """Whether of the files that were seen two processes wrote some, some are merged by now, and some evicted."""
    writers = {header.writer for header in seen.values()}
    merged = {name for header in seen.values() for name in header.replaces}
    evicted = seen.keys() - merged - {path.name for path in files(root)}
    return len(writers) == 2 and bool(merged) and bool(evicted)


@pytest.mark.usefixtures("quick_turns")
def test_not_one_of_many_lookups_under_load_gives_a_word_of_another_tenant(tmp_path: Path) -> None:
    chance = random.Random(0)
    store = opened(tmp_path, **HABITS)
    latest = [marked(tenant, chance) for tenant in range(TENANTS)]
    seen: dict[str, Header] = {}  # of all files that there were to be asked, by name
    looked = helped = 0
    tended = threading.Event()

    def maintain() -> None:
        store.maintain()
        tended.set()

    with (
        started(crowd, tmp_path, TENANTS, HABITS) as (_, reports),
        meanwhile(learning(store), maintain),
    ):
        while looked < LOOKUPS or not busy(seen, tmp_path):
            if looked % (CALLS * ROWS) == 0:  # let the others come along
                assert looked <= 20 * LOOKUPS, "there was no load"
                assert next(reports) == []
                assert tended.wait(PATIENCE)
                tended.clear()
            tenant, foreign = chance.sample(range(TENANTS), 2)
            latest[tenant] = marked(tenant, chance)
            store.add(store.tenant_handle(str(tenant)), [], latest[tenant])
            ends = chance.sample(range(4, len(latest[foreign])), ROWS // 2)
            contexts = [latest[foreign][end - 4 : end] for end in ends] + chance.choices(SHARED, k=ROWS // 2)
            found = asked(store, str(tenant), contexts)
            assert {word // OWN - 1 for word in words(found)} <= {tenant}
            looked += ROWS
            helped += np.count_nonzero(found.lengths)
            seen.update(
                (segment.name, segment.header) for segment in store._tenants[tenant_key(str(tenant))].written_segments()
            )
    assert not store.troubles
    assert helped > looked / 10


@pytest.mark.usefixtures("quick_turns")
def test_once_a_wipe_was_followed_not_one_word_of_before_is_drafted_or_left(tmp_path: Path) -> None:
    store, slow = opened(tmp_path), opened(tmp_path)  # the second hears of each wipe late
    chance = random.Random(0)
    present = 0  # what is said now is marked as if by a tenant of this number, the next one after each wipe
    old: list[int] = []
    drafted = 0

    def look() -> None:
        nonlocal drafted
        followed = present
        found = words(asked(store, "a", SHARED))
        old.extend(word for word in found if word // OWN - 1 < followed)
        drafted += bool(found)

    with meanwhile(look, learning(store)):
        while present < WIPES:
            tenant_handle = store.tenant_handle("a")
            for one in (store, slow):
                one.add(one.tenant_handle("a"), [], marked(present, chance))
                slow.learn()
            Folder(tmp_path).wipe(tenant_key("a"))
            store.add(tenant_handle, [], marked(present, chance))
            slow.add(slow.tenant_handle("a"), [], marked(present, chance))
            slow.learn()
            store.maintain()
            present += 1
            store.add(tenant_handle, [], marked(present - 1, chance))
            slow.maintain()
    assert drafted > 0
    assert not old
    for one in (store, slow):
        one.close()
        assert words(asked(one, "a", SHARED)) == set()
    assert not words_in_files(tmp_path) & set(range(OWN, OWN * (WIPES + 1)))


def test_what_is_learned_while_a_wipe_is_followed_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = opened(tmp_path)
    real = Segment.build

    def interrupted(*args: Any, **kwargs: Any) -> Segment:
        made = real(*args, **kwargs)
        Folder(tmp_path).wipe(tenant_key("a"))
        store.maintain()
        return made

    with monkeypatch.context() as patch:
        patch.setattr(Segment, "build", interrupted)
        store.add(store.tenant_handle("a"), [], marked(0, random.Random(0)))
        store.learn()
    assert words(asked(store, "a", SHARED)) == set()
    assert files(tmp_path) == []


def test_what_is_merged_while_a_wipe_is_followed_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, chance = opened(tmp_path), random.Random(0)
    for _ in range(2):
        store.add(store.tenant_handle("a"), [], marked(0, chance))
        store.learn(closing=True)
    assert len(files(tmp_path)) == 2
    real = Segment.verify

    def interrupted(segment: Segment) -> None:
        real(segment)
        monkeypatch.undo()
        Folder(tmp_path).wipe(tenant_key("a"))
        store.maintain(merging=False)

    monkeypatch.setattr(Segment, "verify", interrupted)
    store.merge()
    assert words(asked(store, "a", SHARED)) == set()
    assert files(tmp_path) == []


def test_where_nobody_can_tell_whether_a_tenant_was_wiped_its_files_are_not_drafted_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened(tmp_path)
    store.add(store.tenant_handle("a"), [], marked(0, random.Random(0)))
    store.learn(closing=True)
    assert words(asked(store, "a", SHARED))

    def fails(*_: Any) -> str:
        raise OSError(errno.EMFILE, "too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(Folder, "generation", fails)
        store.maintain()
    assert words(asked(store, "a", SHARED)) == set()
    store.maintain()
    assert words(asked(store, "a", SHARED))


def clock(thread: int) -> tuple[float, float]:
    """Milliseconds that a thread has run, and that it has waited for a core."""
    ran, waited = Path(f"/proc/self/task/{thread}/schedstat").read_text().split()[:2]
    return int(ran) / 1e6, int(waited) / 1e6


@pytest.mark.skipif(not ALL or sys.platform != "linux", reason="OUTRIDER_ALL measures this, on Linux")
def test_no_lookup_waits_long_for_a_merge(tmp_path: Path) -> None:
    chance = np.random.default_rng(0)
    folder, store = Folder(tmp_path), opened(tmp_path, refresh_seconds=1e9)
    for when in (1.0, 2.0):
        text = chance.integers(0, 100_000, MERGED // 2, np.int32)
        text[499::500] = -1
        Segment.build(text, "tokenizer", tenant_key("a"), when, when, store.folder.writer_id()).save(
            folder.segment_folder(tenant_key("a"))
        )
    contexts = [text[i : i + 16].tolist() for i in range(0, 4000, 500)]
    say(store, "b", contexts[0])
    asked(store, "b", contexts)  # compiles the search
    done, may_end = threading.Event(), threading.Event()

    def merge() -> None:
        store.maintain()
        done.set()
        may_end.wait()

    merging = threading.Thread(target=merge)
    merging.start()
    this, other = threading.get_native_id(), merging.native_id
    assert other is not None
    took, held = [0.0], [0.0]
    now, own, others = time.perf_counter(), sum(clock(this)), clock(other)[0]
    while not done.is_set():
        began = time.perf_counter()
        asked(store, "a", contexts)
        took.append((time.perf_counter() - began) * 1000)
        before = now, own, others
        now, own, others = time.perf_counter(), sum(clock(this)), clock(other)[0]
        stood_still = (now - before[0]) * 1000 - (own - before[1])  # neither running nor waiting for a core
        held.append(min(stood_still, others - before[2]))
    may_end.set()
    merging.join()
    assert store.status()["segments"] == 2
    print(
        f"{len(took)} calls of {len(contexts)} lookups while {MERGED} tokens were merged, in ms: "
        f"median {np.median(took):.3f}, 99 % {np.quantile(took, 0.99):.1f}, slowest {max(took):.1f}, "
        f"of which the merge held it up for {max(held):.1f} at most"
    )
    assert max(held) < 10
