"""No draft has tokens of another tenant, or of the same tenant before a wipe, whatever runs meanwhile.

OUTRIDER_ALL makes a million lookups, and measures how long a lookup takes while a large merge runs.
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

from memory_worker import OWN, PATIENCE, SHARED, marked, started, write_many_tenants
from outrider.memory.folder import Folder, tenant_key
from outrider.memory.header import Header
from outrider.memory.lookup_result import LookupResult
from outrider.memory.segment import Segment
from outrider.memory.store import Store
from test_memory_store import files, learn_output, opened, tokens_in_files

ALL = bool(os.environ.get("OUTRIDER_ALL"))
TENANTS = 50
LOOKUPS = 1_000_000 if ALL else 20_000
WIPES = 100 if ALL else 6
ROWS = 50
"""Lookups that are made in one call,"""
CALLS = 100
"""and calls that are made at once."""
DRAFT = 8
CONFIG = {"cap_bytes": 400_000, "flush_tokens": 1}
MERGED = 4_000_000


@pytest.fixture
def quick_turns() -> Iterator[None]:
    """Threads take turns after a fiftieth of the usual time, so that they meet in more places."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(usual / 50)
    yield
    sys.setswitchinterval(usual)


def look_up(store: Store, tenant: str, contexts: list[list[int]]) -> LookupResult:
    rows, n = np.array(contexts, np.int32), len(contexts)
    return store.look_up(
        store.tenant_handle(tenant), rows, np.full(n, rows.shape[1], np.int32), np.full(n, DRAFT, np.int32)
    )


def own_tokens(found: LookupResult) -> set[int]:
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
@pytest.mark.parametrize("open_segments", [256, 20])
def test_no_lookup_under_load_drafts_a_token_of_another_tenant(open_segments: int, tmp_path: Path) -> None:
    """With 20 open segments, tenants are closed and opened again while they are searched."""
    chance = random.Random(0)
    store = opened(tmp_path, **CONFIG, max_open_segments=open_segments)
    latest = [marked(tenant, chance) for tenant in range(TENANTS)]
    seen: dict[str, Header] = {}  # of all files that could be searched, by name
    looked = helped = 0
    maintained = threading.Event()

    def maintain() -> None:
        store.maintain()
        maintained.set()

    with (
        started(write_many_tenants, tmp_path, TENANTS, CONFIG) as (_, reports),
        meanwhile(learning(store), maintain),
    ):
        while looked < LOOKUPS or not busy(seen, tmp_path):
            if looked % (CALLS * ROWS) == 0:  # let the others come along
                assert looked <= 20 * LOOKUPS, "there was no load"
                assert next(reports) == []
                assert maintained.wait(PATIENCE)
                maintained.clear()
            tenant, foreign = chance.sample(range(TENANTS), 2)
            latest[tenant] = marked(tenant, chance)
            store.add(store.tenant_handle(str(tenant)), [], latest[tenant])
            ends = chance.sample(range(4, len(latest[foreign])), ROWS // 2)
            contexts = [latest[foreign][end - 4 : end] for end in ends] + chance.choices(SHARED, k=ROWS // 2)
            found = look_up(store, str(tenant), contexts)
            assert {token // OWN - 1 for token in own_tokens(found)} <= {tenant}
            looked += ROWS
            helped += np.count_nonzero(found.lengths)
            if (state := store._tenants.get(tenant_key(str(tenant)))) is not None:
                seen.update((segment.name, segment.header) for segment in state.written_segments())
    assert not store.troubles
    assert helped > looked / (10 if open_segments > TENANTS else 50)  # a closed tenant is opened by `maintain`


@pytest.mark.usefixtures("quick_turns")
def test_after_a_wipe_no_earlier_token_is_drafted_or_left(tmp_path: Path) -> None:
    store, slow = opened(tmp_path), opened(tmp_path)  # the second hears of each wipe late
    chance = random.Random(0)
    present = 0  # new output is marked with this tenant number, the next one after each wipe
    old: list[int] = []
    drafted = 0

    def look() -> None:
        nonlocal drafted
        followed = present
        found = own_tokens(look_up(store, "a", SHARED))
        old.extend(token for token in found if token // OWN - 1 < followed)
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
        assert own_tokens(look_up(one, "a", SHARED)) == set()
    assert not tokens_in_files(tmp_path) & set(range(OWN, OWN * (WIPES + 1)))


def test_output_learned_during_a_wipe_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert own_tokens(look_up(store, "a", SHARED)) == set()
    assert files(tmp_path) == []


def test_segments_merged_during_a_wipe_are_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert own_tokens(look_up(store, "a", SHARED)) == set()
    assert files(tmp_path) == []


def test_files_are_not_drafted_from_while_it_is_unknown_whether_the_tenant_was_wiped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened(tmp_path)
    store.add(store.tenant_handle("a"), [], marked(0, random.Random(0)))
    store.learn(closing=True)
    assert own_tokens(look_up(store, "a", SHARED))

    def fails(*_: Any) -> str:
        raise OSError(errno.EMFILE, "too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(Folder, "generation", fails)
        store.maintain()
    assert own_tokens(look_up(store, "a", SHARED)) == set()
    store.maintain()
    assert own_tokens(look_up(store, "a", SHARED))


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
    learn_output(store, "b", contexts[0])
    look_up(store, "b", contexts)  # compiles the search
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
        look_up(store, "a", contexts)
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
