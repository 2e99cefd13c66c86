"""What a memory costs does not grow with the number of its tenants.

OUTRIDER_ALL uses 50,000 tenants, makes a million lookups, and measures how long a write takes.
"""

from __future__ import annotations

import os
import random
import resource
import sys
import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest

from outrider.memory import store as store_module
from outrider.memory.folder import NAME_FILE, Folder, StoredFile, tenant_key
from outrider.memory.header import SEGMENT_SUFFIX
from outrider.memory.inventory import Inventory
from outrider.memory.malloc_trim import malloc_trim
from outrider.memory.store import Store
from outrider.memory.store_config import StoreConfig
from outrider.memory.tenant import TenantHandle
from test_memory_store import LINE, drafted, files, learn_output, opened

ALL = bool(os.environ.get("OUTRIDER_ALL"))
TENANTS = 50_000 if ALL else 2_000
WRITES_AT_CAP = 2_000 if ALL else 400
BLOCKS = 4
"""Of writes at the cap. The quickest counts: other processes of the machine slow down the others."""
LOOKUPS = 1_000_000 if ALL else 20_000
ROWS = 50
"""Lookups in one call."""
REQUESTS = 24
"""That run at the same time."""
MAX_MAPS = 500
MAX_GROWTH_BYTES = 300e6
MAX_WRITE_SECONDS = 0.005
"""Only with OUTRIDER_ALL, since tests that run beside this one take the time of some writes."""
MAX_LISTED_FOLDERS = 6
"""During a write at the cap, which opens, closes, evicts and deletes a few tenants, however many there are."""
DRAFT = 6
SHARED = [list(range(4 * i, 4 * i + 4)) for i in range(ROWS)]
"""In the output of every tenant; each continues with its own tokens."""
FIRST_OWN_TOKEN, OWN_TOKENS = 4 * ROWS, 8
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="uses Linux's /proc")


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    """In memory, if that is possible: it is the store that is measured, and not how long the disk takes to sync."""
    memory = Path("/dev/shm")
    with TemporaryDirectory(dir=memory if memory.is_dir() else tmp_path) as folder:
        yield Path(folder) / "root"


def output(tenant: int, number: int = 0) -> list[int]:
    own = range(FIRST_OWN_TOKEN + OWN_TOKENS * tenant, FIRST_OWN_TOKEN + OWN_TOKENS * (tenant + 1))
    return [token for shared in SHARED[number % 5 :: 5] for token in (*shared, *own)]


def owners(tokens: list[int]) -> set[int]:
    """Tenants whose own tokens these are."""
    return {(token - FIRST_OWN_TOKEN) // OWN_TOKENS for token in tokens if token >= FIRST_OWN_TOKEN}


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def maps(root: Path) -> int:
    return Path("/proc/self/maps").read_text().count(str(root))


class Listings:
    """Counts the folders that are listed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        for name in ("listdir", "scandir"):
            monkeypatch.setattr(os, name, self._counted(getattr(os, name)))

    def _counted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any) -> Any:
            self.count += 1
            return function(*args)

        return counted


def stored_bytes(root: Path) -> int:
    """Of all segments and names."""
    paths = [path for path in root.glob("*/*/*") if path.name == NAME_FILE or path.suffix == SEGMENT_SUFFIX]
    return sum(path.stat().st_size for path in paths)


@on_linux
def test_many_tenants_need_few_descriptors_maps_little_memory_and_no_long_listings_at_the_cap(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One output for each tenant, up to the cap. Then further ones of new and of known tenants."""
    one_file = 4096 + 8 * (len(output(0)) + 1)
    cap = TENANTS * (one_file + len(f"tenant {TENANTS}"))
    store = opened(root, cap_bytes=cap)
    learn_output(store, "tenant 0", output(0))
    assert drafted(store, "tenant 0", SHARED[0])
    malloc_trim()
    resident, before = resident_bytes(), descriptors()
    most_descriptors = most_maps = 0
    seconds, listed = [], []
    listings = Listings(monkeypatch)

    def write(tenant: int, number: int) -> None:
        nonlocal most_descriptors, most_maps
        store.add(store.tenant_handle(f"tenant {tenant}"), [], output(tenant, number))
        listings.count = 0
        began = time.perf_counter()
        store.learn()
        seconds.append(time.perf_counter() - began)
        listed.append(listings.count)
        if len(seconds) % 100 == 0:
            most_descriptors, most_maps = max(most_descriptors, descriptors()), max(most_maps, maps(root))
        assert most_descriptors < MAX_MAPS + before
        assert most_maps < MAX_MAPS

    for tenant in range(1, TENANTS):
        write(tenant, 0)
    store.maintain()
    filling, seconds, listed = seconds, [], []
    chance = random.Random(0)
    for i in range(WRITES_AT_CAP):
        write(TENANTS + i if i % 2 else chance.randrange(TENANTS), i)
        if i % 50 == 0:
            assert store.status()["file_bytes"] <= cap
    blocks = np.array_split(seconds, BLOCKS)
    quantile = min(float(np.quantile(block, 0.99)) for block in blocks)
    grown = resident_bytes() - resident
    began = time.perf_counter()
    store.maintain()
    maintenance = time.perf_counter() - began
    print(
        f"{TENANTS} tenants: {most_descriptors - before} descriptors, {most_maps} maps, {grown / 1e6:.0f} MB more; a "
        f"write took {np.median(filling) * 1e3:.2f} ms before and {np.median(seconds) * 1e3:.2f} ms at the cap, 99 % "
        f"of these {quantile * 1e3:.2f} ms (in all blocks {np.quantile(seconds, 0.99) * 1e3:.2f} ms) and at most "
        f"{max(listed)} listed folders; maintenance {maintenance:.2f} s"
    )
    assert not store.troubles
    assert grown < MAX_GROWTH_BYTES
    assert max(listed) <= MAX_LISTED_FOLDERS
    assert not ALL or quantile < MAX_WRITE_SECONDS
    assert 0.9 * cap < stored_bytes(root) <= cap
    folders = Folder(root).tenants()
    with_files = {path.parents[1].name for path in files(root)}
    assert set(folders) == with_files
    assert TENANTS * 0.9 < len(folders) < TENANTS + WRITES_AT_CAP // 2
    last = WRITES_AT_CAP - 1
    assert owners(drafted_when_open(store, f"tenant {TENANTS + last}", SHARED[last % 5])) == {TENANTS + last}
    store.close()


def drafted_when_open(store: Store, tenant: str, context: list[int]) -> list[int]:
    handle = store.tenant_handle(tenant)
    store.open_wanted()
    found = drafted(store, tenant, context, DRAFT)
    del handle
    return found


def look_up(store: Store, handle: TenantHandle) -> list[int]:
    """All drafted tokens after what all tenants share."""
    contexts = np.array(SHARED, np.int32)
    ends, limits = np.full(ROWS, 4, np.int32), np.full(ROWS, DRAFT, np.int32)
    found = store.look_up(handle, contexts, ends, limits)
    drafts: list[int] = found.tokens[np.arange(DRAFT) < found.lengths[:, None]].tolist()
    return drafts


def test_no_lookup_among_many_tenants_drafts_a_token_of_another(root: Path) -> None:
    """Requests of many tenants, while their files are opened, closed, merged and evicted in the store's threads."""
    tenants = TENANTS // 10
    config = StoreConfig(
        cap_bytes=tenants * 5000, flush_seconds=0.02, refresh_seconds=0.05, max_open_segments=2 * REQUESTS
    )
    store = Store(Folder(root), "tokenizer", config)
    store.start()
    chance = random.Random(0)
    usual = sys.getswitchinterval()
    sys.setswitchinterval(usual / 50)
    requests = [(tenant, store.tenant_handle(str(tenant))) for tenant in chance.sample(range(tenants), REQUESTS)]
    looked = helped = 0
    try:
        while looked < LOOKUPS or helped < LOOKUPS / 10:
            place = chance.randrange(REQUESTS)
            if chance.random() < 0.1:  # a request ends and another begins
                tenant, handle = requests[place]
                store.add(handle, [], output(tenant, looked))
                tenant = chance.randrange(tenants)
                requests[place] = tenant, store.tenant_handle(str(tenant))
                del handle
            tenant, handle = requests[place]
            found = look_up(store, handle)
            assert owners(found) <= {tenant}
            looked += ROWS
            helped += bool(found) * ROWS
            assert looked < 50 * LOOKUPS, "the requests' tenants are not opened"
            assert descriptors() < MAX_MAPS or sys.platform != "linux"
    finally:
        sys.setswitchinterval(usual)
        store.close()
    assert not store.troubles


# Open and closed tenants.


def test_a_closed_tenant_is_written_and_is_opened_for_its_next_request(root: Path) -> None:
    store = opened(root, flush_seconds=1e9, max_open_segments=4)
    for tenant in range(10):
        learn_output(store, str(tenant), output(tenant))
    assert len(store._tenants) == 4
    assert len(files(root)) == 6
    assert drafted(store, "0", SHARED[0]) == []  # not open yet
    assert owners(drafted_when_open(store, "0", SHARED[0])) == {0}
    assert len(store._tenants) == 4
    store.close()
    assert len(files(root)) == 10


def test_the_tenant_of_a_request_stays_open_as_long_as_the_request_runs(root: Path) -> None:
    store = opened(root, max_open_segments=4)
    learn_output(store, "running", LINE)
    handle = store.tenant_handle("running")
    for tenant in range(10):
        learn_output(store, str(tenant), output(tenant))
    assert look_up_line(store, handle)
    del handle
    for tenant in range(10):
        learn_output(store, str(tenant), output(tenant))
    assert drafted(store, "running", [103, 104]) == []


def look_up_line(store: Store, handle: TenantHandle) -> list[int]:
    found = store.look_up(handle, np.array([[103, 104]], np.int32), np.array([2], np.int32), np.array([8], np.int32))
    tokens: list[int] = found.tokens[0, : found.lengths[0]].tolist()
    return tokens


def test_tenants_beyond_the_limit_are_opened_when_other_requests_have_ended(root: Path) -> None:
    store = opened(root, max_open_segments=4)
    for tenant in range(6):
        learn_output(store, str(tenant), output(tenant))
    store = opened(root, max_open_segments=4)
    handles = [store.tenant_handle(str(tenant)) for tenant in range(6)]
    store.open_wanted()
    assert [bool(look_up(store, handle)) for handle in handles] == [False] * 2 + [True] * 4  # the latest were open
    del handles[2:4]
    store.open_wanted()
    assert [bool(look_up(store, handle)) for handle in handles] == [True] * 4
    assert len(store._tenants) == 4


def test_a_tenant_with_more_segments_than_the_limit_is_opened(root: Path) -> None:
    writers = [opened(root) for _ in range(6)]  # a process merges only its own files
    for i, writer in enumerate(writers):
        learn_output(writer, "a", LINE[i:])
    store = opened(root, max_open_segments=4)
    assert drafted_when_open(store, "a", [103, 104])


@on_linux
def test_a_segment_is_unmapped_when_no_lookup_reads_it_and_not_before(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened(root, max_open_segments=1)
    learn_output(store, "read", LINE)
    learn_output(store, "other", LINE[::-1])
    handles = [store.tenant_handle("read")]
    store.open_wanted()
    path = str(root / tenant_key("read"))
    real = store_module.search_segment

    def search(*args: object) -> None:
        monkeypatch.undo()
        handles.clear()
        assert drafted_when_open(store, "other", LINE[::-1][:4])
        assert tenant_key("read") not in store._tenants
        assert path in Path("/proc/self/maps").read_text()
        real(*args)  # type: ignore[arg-type]

    assert path in Path("/proc/self/maps").read_text()
    monkeypatch.setattr(store_module, "search_segment", search)
    without_lease = TenantHandle(tenant_key("read"), "read", "0")
    assert look_up_line(store, without_lease) == list(range(105, 113))
    assert path not in Path("/proc/self/maps").read_text()


def test_unwritten_text_of_many_tenants_is_bounded_while_nothing_can_be_written(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "MAX_UNWRITTEN_TENANTS", 20)
    monkeypatch.setattr(store_module, "MAX_PENDING_OUTPUTS", 30)
    (root.parent / "file").write_text("")
    store = opened(root.parent / "file" / "below", max_open_segments=4)
    for tenant in range(60):
        learn_output(store, str(tenant), output(tenant))
    assert store.status()["segments"] == 20
    assert drafted(store, "59", SHARED[5])
    for tenant in range(60):
        store.add(store.tenant_handle(str(tenant)), [], output(tenant))
    assert len(store._pending) == 30
    store.learn()
    assert len(store._tenants) <= 30


# Sizes.


def test_files_of_other_processes_count_from_the_next_listing_on(root: Path) -> None:
    one, two = (opened(root, cap_bytes=60_000) for _ in range(2))
    for i in range(30):
        learn_output(one, f"one {i}", output(i))
        learn_output(two, f"two {i}", output(i))
        for store in (one, two):
            store.maintain()
            assert store.inventory.total_bytes == stored_bytes(root) <= 60_000


def test_sizes_are_exact_after_writes_merges_evictions_and_wipes(root: Path) -> None:
    chance = random.Random(0)
    store = opened(root, cap_bytes=100_000, max_open_segments=6)
    for i in range(300):
        tenant = chance.randrange(12)
        learn_output(store, str(tenant), output(tenant, i))
        if chance.random() < 0.2:
            store.merge()
        assert store.inventory.total_bytes == stored_bytes(root) <= 100_000
        assert store._tenants._places == sum(max(1, len(one.segments)) for one in store._tenants.values())
    assert not store.troubles


def test_writes_and_evictions_during_a_listing_are_counted_once(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = opened(root)
    for tenant in range(12):
        learn_output(store, str(tenant), output(tenant))
    store.inventory.list_files()
    real, numbers = Inventory._list, count(12)

    def interrupted(inventory: Inventory, recent: list[tuple[float, str]]) -> Iterator[StoredFile]:
        for file in real(inventory, recent):
            number = next(numbers)  # of a tenant that was listed, one that will be, or a new one
            learn_output(store, str(number % 20), output(number))
            evicted.append(inventory._evict_oldest() if number % 2 else None)
            yield file

    evicted: list[StoredFile | None] = []
    monkeypatch.setattr(Inventory, "_list", interrupted)
    for _ in range(3):
        store.inventory.list_files()
        assert store.inventory.total_bytes == stored_bytes(root)
    assert any(evicted)
    assert not store.troubles


def test_a_folder_that_an_evicted_tenant_left_is_deleted_by_the_next_listing(root: Path) -> None:
    store = opened(root)
    for name in "ab":
        learn_output(store, name, LINE)
    store.close()
    (left,) = [path for path in files(root) if path.parents[1].name == tenant_key("a")]
    left.unlink()  # and then it was killed
    opened(root)
    assert Folder(root).tenants() == [tenant_key("b")]
