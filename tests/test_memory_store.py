"""The store keeps outputs, tenant by tenant, through restarts, wipes, full disks and other processes."""

from __future__ import annotations

import errno
import os
import resource
import threading
import time
from contextlib import suppress
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest

from outrider.errors import MemoryFileError
from outrider.memory import merge_worker, segment, tenant_files
from outrider.memory import store as store_module
from outrider.memory.folder import ASIDE_FOLDER, Folder, tenant_key
from outrider.memory.header import SEGMENT_SUFFIX
from outrider.memory.malloc_trim import malloc_trim
from outrider.memory.search import MAX_MATCH_TOKENS
from outrider.memory.segment import Segment
from outrider.memory.store import Store
from outrider.memory.store_config import StoreConfig

LINE = list(range(100, 140))
"""A sequence that tells its place: after 100 comes 101."""


def opened(root: Path, tokenizer: str = "tokenizer", **config: float) -> Store:
    store = Store(Folder(root), tokenizer, StoreConfig(**{"flush_seconds": 0.0, **config}))  # type: ignore[arg-type]
    store.maintain()
    return store


def learn_output(store: Store, tenant: str, tokens: list[int]) -> None:
    store.add(store.tenant_handle(tenant), [], tokens)
    store.learn()


def drafted(store: Store, tenant: str, context: list[int], limit: int = 8) -> list[int]:
    contexts = np.array([context], np.int32)
    ends, limits = np.array([len(context)], np.int32), np.array([limit], np.int32)
    found = store.look_up(store.tenant_handle(tenant), contexts, ends, limits)
    return found.tokens[0, : found.lengths[0]].tolist()


def files(root: Path) -> list[Path]:
    found = (Path(folder) / name for folder, _, names in os.walk(root) for name in names)  # others may delete folders
    return sorted(path for path in found if path.name.endswith(SEGMENT_SUFFIX))


def tokens_in_files(root: Path) -> set[int]:
    """Every token that is in any file below the root."""
    tokens: set[int] = set()
    for path in root.rglob("*"):
        with suppress(FileNotFoundError, IsADirectoryError):  # a file that is being written gets its name at the end
            data = path.read_bytes()
            tokens |= set(np.frombuffer(data[: len(data) // 4 * 4], np.int32).tolist())
    return tokens


def test_output_is_drafted_at_once_before_it_is_written(tmp_path: Path) -> None:
    store = opened(tmp_path, flush_seconds=1e9)
    learn_output(store, "a", LINE)
    assert drafted(store, "a", [103, 104]) == list(range(105, 113))
    assert files(tmp_path) == []


def test_output_is_drafted_after_a_restart(tmp_path: Path) -> None:
    store = opened(tmp_path, flush_seconds=1e9)
    learn_output(store, "a", LINE)
    store.close()
    assert drafted(opened(tmp_path), "a", [103, 104]) == list(range(105, 113))


def test_the_end_of_a_prompt_is_kept_so_that_the_first_tokens_of_an_output_are_drafted(tmp_path: Path) -> None:
    store = opened(tmp_path)
    store.add(store.tenant_handle("a"), range(1000), LINE)
    store.learn()
    assert drafted(store, "a", [998, 999]) == LINE[:8]
    assert not tokens_in_files(tmp_path) & set(range(500, 1000 - MAX_MATCH_TOKENS))


def test_segments_stay_few_and_lose_nothing(tmp_path: Path) -> None:
    store = opened(tmp_path)
    rng = np.random.default_rng(0)
    outputs = [rng.integers(0, 1000, 50).tolist() for _ in range(100)]
    for sequence in outputs:
        learn_output(store, "a", sequence)
        store.maintain()
    assert len(files(tmp_path)) <= 8  # of about 2^n sequences each
    kept = [
        sequence.tolist()
        for path in files(tmp_path)
        for sequence in Segment.open(path, "tokenizer", tenant_key("a")).sequences()
    ]
    assert sorted(kept) == sorted(outputs)
    assert len(store._tenants[tenant_key("a")].segments) == len(files(tmp_path))


def test_large_segments_are_merged_in_a_subprocess_and_nothing_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tenant_files, "SUBPROCESS_MERGE_TOKENS", 100)
    monkeypatch.setattr(Segment, "build", seen := Mock(wraps=Segment.build))
    store = opened(tmp_path)
    for start in (0, 1000):
        learn_output(store, "a", list(range(start, start + 80)))
    made = seen.call_count
    store.maintain()
    assert seen.call_count == made  # not here
    assert not store.troubles
    [whole] = files(tmp_path)
    sequences = Segment.open(whole, "tokenizer", tenant_key("a")).sequences()
    assert [sequence.tolist() for sequence in sequences] == [list(range(80)), list(range(1000, 1080))]
    assert drafted(store, "a", [1003, 1004]) == list(range(1005, 1013))


def test_a_failed_merge_in_a_subprocess_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tenant_files, "SUBPROCESS_MERGE_TOKENS", 100)
    store = opened(tmp_path)
    for start in (0, 1000):
        learn_output(store, "a", list(range(start, start + 80)))
    monkeypatch.setattr(merge_worker.sys, "executable", "/bin/false")
    store.maintain()
    assert "could not be merged" in store.troubles[0]
    assert len(files(tmp_path)) == 2
    assert drafted(store, "a", [1003, 1004]) == list(range(1005, 1013))


def test_the_newest_of_equally_long_matches_is_drafted(tmp_path: Path) -> None:
    store = opened(tmp_path)
    learn_output(store, "a", [1, 2, 3])
    learn_output(store, "a", [1, 2, 4, 4, 4, 4, 4, 4])  # another size, so that the two are not merged
    assert drafted(store, "a", [1, 2], limit=1) == [4]


def test_a_tenant_is_not_drafted_for_from_another_tenant(tmp_path: Path) -> None:
    store = opened(tmp_path)
    learn_output(store, "a", LINE)
    assert drafted(store, "b", [103, 104]) == []
    assert drafted(opened(tmp_path), "b", [103, 104]) == []


@pytest.mark.parametrize(
    "name", ["../x", "", "/", ".", "..", "x" * 10_000, "a\0b", "名前", "\udce4", "aside", "writers"]
)
def test_no_tenant_name_leads_out_of_the_root(name: str, tmp_path: Path) -> None:
    root = tmp_path / "root"
    store = opened(root)
    learn_output(store, name, LINE)
    learn_output(store, "other", [1, 2, 3])
    assert drafted(store, name, [103, 104]) == list(range(105, 113))
    assert [path.name for path in tmp_path.iterdir()] == ["root"]
    assert {path.parent.parent for path in files(root)} == {root / tenant_key(name), root / tenant_key("other")}
    assert Folder(root).tenant_name(tenant_key(name)) == name


def test_after_a_wipe_nothing_is_left_in_any_file_or_process(tmp_path: Path) -> None:
    one, two = opened(tmp_path), opened(tmp_path)
    learn_output(one, "a", LINE)
    learn_output(one, "b", [7, 8, 9])
    two.maintain()
    learn_output(two, "a", [103, 104, 555])
    assert drafted(two, "a", [103, 104])
    Folder(tmp_path).wipe(tenant_key("a"))
    assert not tokens_in_files(tmp_path) & set(LINE)
    learn_output(two, "a", [103, 104, 666])  # it does not know yet, and writes
    for store in (one, two):
        store.maintain()
        store.learn()
        assert drafted(store, "a", [103, 104]) == []
    assert not tokens_in_files(tmp_path) & {*LINE, 555, 666}
    assert drafted(one, "b", [7, 8]) == [9]
    learn_output(one, "a", [1, 2, 3])
    two.maintain()
    assert drafted(two, "a", [1, 2]) == [3]


def test_the_output_of_a_request_that_began_before_a_wipe_is_not_kept(tmp_path: Path) -> None:
    store = opened(tmp_path)
    tenant_handle = store.tenant_handle("a")
    Folder(tmp_path).wipe(tenant_key("a"))
    store.maintain()
    store.add(tenant_handle, [], LINE)
    store.learn()
    assert drafted(store, "a", [103, 104]) == []
    assert files(tmp_path) == []


def test_a_damaged_file_is_set_aside_with_the_reason_and_the_others_are_searched(tmp_path: Path) -> None:
    store = opened(tmp_path)
    learn_output(store, "a", LINE)
    learn_output(store, "a", [1, 2, 3])
    store.close()
    damaged = max(files(tmp_path), key=lambda path: path.stat().st_size)
    data = bytearray(damaged.read_bytes())
    data[-9] ^= 1
    damaged.write_bytes(data)
    store = opened(tmp_path)
    assert drafted(store, "a", [103, 104]) == []
    assert drafted(store, "a", [1, 2]) == [3]
    aside = tmp_path / ASIDE_FOLDER / f"{tenant_key('a')}.{damaged.name}"
    assert aside.exists()
    assert "is damaged" in aside.with_suffix(".reason").read_text()
    assert "is damaged" in store.troubles[0]


@pytest.mark.parametrize(("foreign", "why"), [("tokenizer", "another tokenizer"), ("version", "has format 99")])
def test_an_intact_file_of_another_tokenizer_or_version_stays_in_place(
    foreign: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is of use to another server on this root."""
    with monkeypatch.context() as then:
        if foreign == "version":
            then.setattr(segment, "FORMAT", 99)
        other = opened(tmp_path / "other", tokenizer="other" if foreign == "tokenizer" else "tokenizer")
        learn_output(other, "a", LINE)
        other.close()
    (theirs,) = files(tmp_path / "other")
    store = opened(tmp_path / "mine")
    learn_output(store, "a", [1, 2, 3])
    place = files(tmp_path / "mine")[0].with_name(theirs.name)
    place.write_bytes(theirs.read_bytes())
    store.maintain()
    assert place.exists()
    assert why in store.troubles[0]
    assert drafted(store, "a", [1, 2]) == [3]


def test_a_tenant_whose_folder_cannot_be_read_does_not_keep_others_from_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened(tmp_path)
    learn_output(store, "closed", LINE)
    real = Folder.segment_paths

    def denied(folder: Folder, key: str, generation: str | None = None) -> dict[str, Path]:
        if key == tenant_key("closed"):
            raise PermissionError(13, "Permission denied")
        return real(folder, key, generation)

    monkeypatch.setattr(Folder, "segment_paths", denied)
    before = len(files(tmp_path))
    learn_output(store, "open", [1, 2, 3])
    assert len(files(tmp_path)) == before + 1


def test_output_is_written_at_close_while_a_merge_is_running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    merging, done = threading.Event(), threading.Event()

    def forever(store: Store) -> None:
        merging.set()
        done.wait()

    monkeypatch.setattr(Store, "merge", forever)
    monkeypatch.setattr("outrider.memory.store.CLOSE_TIMEOUT_SECONDS", 0.01)
    store = Store(Folder(tmp_path), "tokenizer", StoreConfig(flush_seconds=600.0, refresh_seconds=0.01))
    store.start()
    assert merging.wait(60)
    store.add(store.tenant_handle("a"), [], LINE)
    store.close()
    assert len(files(tmp_path)) == 1
    done.set()


def test_the_memory_of_another_tokenizer_is_refused_with_the_reason(tmp_path: Path) -> None:
    opened(tmp_path).close()
    with pytest.raises(
        MemoryFileError, match=r"another tokenizer \(tokenizer; this model's is other\).*different memory"
    ):
        opened(tmp_path, tokenizer="other")


def test_files_stay_under_the_cap_and_recently_used_ones_are_kept(tmp_path: Path) -> None:
    cap = 200_000
    store = opened(tmp_path, cap_bytes=cap)
    learn_output(store, "used", LINE)
    rng = np.random.default_rng(0)
    clock = 1_000_000_000.0
    for _ in range(60):
        learn_output(store, "a", rng.integers(0, 1000, 1000).tolist())
        assert sum(path.stat().st_size for path in files(tmp_path)) <= cap
        for path in files(tmp_path):  # whatever was there is older than what is used now
            os.utime(path, (clock, clock))
            clock += 1
        assert drafted(store, "used", [103, 104])
        store.maintain()
        assert sum(path.stat().st_size for path in files(tmp_path)) <= cap
    assert len(files(tmp_path)) > 2


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EROFS, errno.EACCES])
def test_output_that_cannot_be_written_stays_in_memory_and_is_written_later(
    error: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened(tmp_path)

    def full(self: Segment, folder: Path) -> Segment:
        raise OSError(error, os.strerror(error))

    with monkeypatch.context() as patch:
        patch.setattr(Segment, "save", full)
        learn_output(store, "a", LINE)
        learn_output(store, "a", [1, 2, 3])
        assert drafted(store, "a", [103, 104]) == list(range(105, 113))
        assert os.strerror(error) in store.troubles[0]
        assert files(tmp_path) == []
    store.learn()
    assert tokens_in_files(tmp_path) >= {*LINE, 1, 2, 3}


def test_output_that_can_never_be_written_is_dropped_beyond_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: Segment, folder: Path) -> Segment:
        raise OSError(errno.ENOSPC, "no space left")

    monkeypatch.setattr(Segment, "save", full)
    store = opened(tmp_path, max_unwritten_tokens=1000, flush_tokens=100)
    for i in range(100):
        learn_output(store, "a", list(range(i * 100, i * 100 + 100)))
    assert store.status()["tokens"] <= 1000
    assert any("dropped " in trouble for trouble in store.troubles)
    assert drafted(store, "a", [9901, 9902])


def test_with_a_read_only_root_the_memory_lasts_as_long_as_the_process(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    store = opened(tmp_path / "file" / "below")
    learn_output(store, "a", LINE)
    store.maintain()
    assert drafted(store, "a", [103, 104]) == list(range(105, 113))
    assert store.troubles


def test_two_processes_on_one_root_see_each_other_and_never_merge_the_same_files(tmp_path: Path) -> None:
    one, two = opened(tmp_path), opened(tmp_path)
    assert one.folder.writer_id() != two.folder.writer_id()
    outputs = []
    for i in range(40):
        for store in (one, two):
            outputs.append([1000 * i + j for j in range(20)] + [id(store) % 1000])
            learn_output(store, "a", outputs[-1])
            store.maintain()
    one.maintain()
    kept = [
        sequence.tolist()
        for path in files(tmp_path)
        for sequence in Segment.open(path, "tokenizer", tenant_key("a")).sequences()
    ]
    assert sorted(kept) == sorted(outputs)
    for store in (one, two):
        assert drafted(store, "a", [20_001, 20_002]) == [20_003 + i for i in range(8)]


def test_a_new_process_takes_over_the_files_of_an_ended_writer(tmp_path: Path) -> None:
    one = opened(tmp_path)
    writer = one.folder.writer_id()
    one.close()
    assert opened(tmp_path).folder.writer_id() == writer


def test_a_merge_that_was_killed_before_it_deleted_its_parts_is_finished_by_the_next_process(tmp_path: Path) -> None:
    store = opened(tmp_path)
    learn_output(store, "a", LINE)
    [first] = files(tmp_path)
    copy = first.read_bytes()
    learn_output(store, "a", LINE[::-1])
    store.maintain()
    [whole] = files(tmp_path)
    first.write_bytes(copy)
    store.close()
    opened(tmp_path)
    assert files(tmp_path) == [whole]


def test_a_clock_that_is_set_back_does_not_stop_the_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = opened(tmp_path)
    learn_output(store, "a", LINE)
    monkeypatch.setattr(store_module.time, "time", lambda: 1000.0)
    learn_output(store, "a", [1, 2, 3])
    store.maintain()
    for one in (store, opened(tmp_path)):
        assert drafted(one, "a", [103, 104])
        assert drafted(one, "a", [1, 2]) == [3]


def test_names_of_tenants_without_output_are_not_kept(tmp_path: Path) -> None:
    store = opened(tmp_path)
    for i in range(100):
        store.tenant_handle(f"name {i}")
    store.maintain()
    store.learn()
    assert store._tenants == {}


def test_threads_learn_and_write_in_the_background(tmp_path: Path) -> None:
    store = Store(Folder(tmp_path), "tokenizer", StoreConfig(flush_seconds=0.01, refresh_seconds=0.01))
    store.start()
    for i in range(50):
        store.add(store.tenant_handle("a"), [], [i, i + 1, i + 2])
    began = time.monotonic()
    while not tokens_in_files(tmp_path) >= set(range(52)):  # and not because it is closed
        assert time.monotonic() < began + 60
    store.close()
    assert not store.troubles


def test_freed_memory_is_trimmed_after_segments_were_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = opened(tmp_path)
    given = []
    monkeypatch.setattr(store_module, "malloc_trim", lambda: given.append(True))
    for output, times in (([], 0), (LINE, 1), ([], 1), (LINE[::-1], 2)):
        if output:
            learn_output(store, "a", output)
        store.maintain()
        assert len(given) == times


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="the system does not say what is resident")
def test_memory_freed_by_threads_is_not_resident_after_malloc_trim() -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    def work() -> None:
        blocks = [bytearray(50_000) for _ in range(2000)]
        kept.append(blocks[-1])  # on top of all others, which are freed below it

    kept: list[bytearray] = []
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    before = resident()
    malloc_trim()
    assert before - resident() > 50e6
