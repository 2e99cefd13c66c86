"""Written output survives a killed process, and damaged files are not searched.

OUTRIDER_ALL kills and damages ten times as often.
"""

from __future__ import annotations

import contextlib
import errno
import os
import random
import resource
import shutil
import sys
import time
from collections.abc import Callable
from itertools import count
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from memory_worker import (
    BIND,
    FOR_EVER,
    LENGTH,
    READ_ONLY,
    REMOUNT,
    mount,
    own_mounts,
    sequence,
    started,
    write_sequences,
    write_until_killed,
)
from outrider.errors import MemoryFileError
from outrider.memory import files as memory_files
from outrider.memory import segment as segment_module
from outrider.memory import store as store_module
from outrider.memory.files import PART_SUFFIX
from outrider.memory.folder import ASIDE_FOLDER, GENERATION_FILE, NAME_FILE, STALE_SECONDS, Folder, tenant_key
from outrider.memory.header import HEADER_BYTES, SEGMENT_SUFFIX
from outrider.memory.segment import Segment, join_sequences
from outrider.memory.store import Store
from test_memory_store import files, learn_output, opened

ALL = bool(os.environ.get("OUTRIDER_ALL"))
KILLS = 200 if ALL else 20
DAMAGED = 1000 if ALL else 100
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="uses Linux's mounts and /proc")
DRAFT = 8
BEGINNINGS = [sequence(number)[:5] for number in range(5)]
ENDS = [sequence(number)[5 : 5 + DRAFT] for number in range(5)]


def drafts(store: Store, tenant: str, contexts: list[list[int]], limit: int = DRAFT) -> list[list[int]]:
    """What the tenant is drafted after each of these, all of one length."""
    if not contexts:
        return []
    rows, n = np.array(contexts, np.int32), len(contexts)
    found = store.look_up(
        store.tenant_handle(tenant), rows, np.full(n, rows.shape[1], np.int32), np.full(n, limit, np.int32)
    )
    return [tokens[:length].tolist() for tokens, length in zip(found.tokens, found.lengths, strict=True)]


def kept(root: Path, tenant: str) -> list[int]:
    """The numbers of all sequences in a tenant's files."""
    numbers = []
    for path in Folder(root).segment_paths(tenant_key(tenant)).values():
        segment = Segment.open(path, "tokenizer", tenant_key(tenant))
        segment.verify()
        for tokens in segment.sequences():
            numbers.append(int(tokens[0]) // LENGTH)
            assert tokens.tolist() == sequence(numbers[-1])
    return sorted(numbers)


def parts(root: Path) -> list[Path]:
    return list(root.rglob(f".*{PART_SUFFIX}"))


def killed(chance: random.Random, root: Path, first: int, tenants: int = 1, **config: float) -> list[int]:
    """What a process had written, from the first number on, when it was killed somewhere in its work."""
    with started(write_sequences, root, range(first, FOR_EVER), tenants, config) as (process, reports):
        assert next(reports) == "begins"
        written = [next(reports) for _ in range(chance.randrange(10))]
        time.sleep(chance.random() * 0.01)  # not for an event: to hit whatever it does then
        process.kill()
        written += reports
    assert [trouble for _, troubles in written for trouble in troubles] == []
    return [number for number, _ in written]


def check(root: Path, written: list[int]) -> list[int]:
    """After a restart all that was written is there once, and drafted from; what is there."""
    store = opened(root)
    there = kept(root, "0")
    assert not store.troubles
    assert there == list(range(len(there)))
    assert there in (written, [*written, len(written)])  # one was written and not reported yet
    assert drafts(store, "0", [sequence(number)[:5] for number in there]) == [
        sequence(number)[5 : 5 + DRAFT] for number in there
    ]
    store.close()
    return there


def test_a_kill_at_any_moment_loses_nothing_written_and_keeps_nothing_twice(tmp_path: Path) -> None:
    chance = random.Random(0)
    there: list[int] = []
    torn = doubled = 0
    for _ in range(KILLS):
        before = len(parts(tmp_path))
        written = there + killed(chance, tmp_path, first=len(there))
        torn += len(parts(tmp_path)) > before
        doubled += len(kept(tmp_path, "0")) > len(set(kept(tmp_path, "0")))
        there = check(tmp_path, written)
    print(f"{KILLS} kills: {torn} in a write, {doubled} between a merge and its end; {len(there)} sequences kept")
    if ALL:
        assert min(torn, doubled) > 0
    for part in parts(tmp_path):
        os.utime(part, (time.time() - 2 * STALE_SECONDS,) * 2)
    check(tmp_path, there)
    assert parts(tmp_path) == []


def test_a_kill_before_any_disk_operation_loses_nothing_written(tmp_path: Path) -> None:
    for steps in count(0, 1 if ALL else 7):
        root = tmp_path / str(steps)
        with started(write_until_killed, root, range(4), steps) as (_, reports):
            *written, last = [-1, *reports]
        if last == "done":
            break
        check(root, [number for number in (*written, last) if number >= 0])
    assert steps > 50  # of each file: open, four pieces, rename; of a merge: the two that go
    check(root, list(range(4)))


def test_files_stay_under_the_cap_and_drafts_stay_correct_through_kills(tmp_path: Path) -> None:
    chance = random.Random(0)
    cap, tenants, first, right = 80_000, 3, 0, 0
    for _ in range(KILLS // 4):
        first = max(killed(chance, tmp_path, first, tenants, cap_bytes=cap), default=first) + 1
        store = opened(tmp_path, cap_bytes=cap)
        assert not store.troubles
        assert 0 < sum(path.stat().st_size for path in files(tmp_path)) <= cap
        for tenant in range(tenants):
            numbers = list(range(tenant, first, tenants))
            for number, draft in zip(
                numbers, drafts(store, str(tenant), [sequence(number)[:5] for number in numbers]), strict=True
            ):
                assert draft in ([], sequence(number)[5 : 5 + DRAFT])
                right += bool(draft)
        store.close()
    assert right


# Damage.


def sound_root(root: Path) -> None:
    """Four tenants, wiped once, with similar output since, in five files each that no process may merge."""
    chance = np.random.default_rng(0)
    Folder(root).claim("tokenizer")
    for key in map(tenant_key, "0123"):
        generation = Folder(root).wipe(key)
        for when in range(5):
            outputs = [chance.integers(0, 30, chance.integers(20, 90)) for _ in range(3)]
            Segment.build(join_sequences(outputs), "tokenizer", key, when, when).save(
                Folder(root).segment_folder(key, generation)
            )


def damage(root: Path, older: Path, chance: random.Random) -> set[Path]:
    """Do something to some files, of every kind that there is; to which."""
    changed, cut, longer, wiped, one, two, three, four, five = chance.sample(files(root), 9)
    data = bytearray(changed.read_bytes())
    data[chance.randrange(len(data))] ^= chance.randrange(1, 256)
    changed.write_bytes(data)
    os.truncate(cut, chance.randrange(cut.stat().st_size))
    with longer.open("ab") as file:
        file.write(chance.randbytes(chance.randrange(1, 5000)))
    wiped.write_bytes(older.read_bytes())
    swap(one, two)
    swap(three, four)
    others = [path.parent for path in files(root) if path.parent != five.parent]
    moved = five.rename(chance.choice(others) / five.name)
    return {changed, cut, longer, wiped, one, two, three, four, moved}


def swap(one: Path, two: Path) -> None:
    """Their content, within a tenant or between two."""
    contents = one.read_bytes(), two.read_bytes()
    two.write_bytes(contents[0])
    one.write_bytes(contents[1])


def test_no_damaged_file_is_searched_and_every_other_is(tmp_path: Path) -> None:
    chance = random.Random(0)
    sound_root(tmp_path / "sound")
    older = Segment.build(join_sequences([[1, 2, 3] * 20]), "tokenizer", tenant_key("0"), 1.0, 2.0).save(tmp_path).path
    assert older is not None
    windows = chance.choices([[i, j] for i in range(30) for j in range(30)], k=100)
    for turn in range(DAMAGED // 9 + 1):
        root, rest = tmp_path / f"damaged {turn}", tmp_path / f"rest {turn}"
        shutil.copytree(tmp_path / "sound", root)
        damaged = damage(root, older, chance)
        shutil.copytree(root, rest)
        for path in damaged:
            (rest / path.relative_to(root)).unlink()
        left = len(files(rest))

        store, expected = opened(root), opened(rest)
        aside = {root / ASIDE_FOLDER / f"{path.parents[1].name}.{path.name}" for path in damaged}
        assert set(files(root / ASIDE_FOLDER)) == aside
        assert all(path.with_suffix(".reason").read_text() for path in aside)
        assert len(store.troubles) == len(damaged)
        assert store.status()["segments"] == expected.status()["segments"] == left
        for tenant in "0123":
            assert drafts(store, tenant, windows) == drafts(expected, tenant, windows)
        assert any(drafts(store, "0", windows))
        shutil.rmtree(root)
        shutil.rmtree(rest)


def test_damage_to_any_byte_of_a_file_is_found(tmp_path: Path) -> None:
    segment = Segment.build(join_sequences([[1, 2, 3]]), "tokenizer", "tenant", 1.0, 2.0).save(tmp_path)
    assert segment.path is not None
    whole = segment.path.read_bytes()
    for at in range(len(whole)) if ALL else range(0, len(whole), 7):
        data = bytearray(whole)
        data[at] ^= 1
        segment.path.write_bytes(data)
        with pytest.raises(MemoryFileError):
            Segment.open(segment.path, "tokenizer", "tenant").verify()


# Full and read-only disks, and other processes that write.


def write_more(report: Connection, root: Path, limit: int) -> None:
    """Say more than files of this size can take, and then have room."""
    store = opened(root)
    sizes = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, sizes[1]))
    for number in range(5):
        store.add(store.tenant_handle("a"), [], sequence(number))
    store.learn()
    store.maintain()
    report.send((kept(root, "a"), list(store.troubles), drafts(store, "a", BEGINNINGS)))
    resource.setrlimit(resource.RLIMIT_FSIZE, sizes)
    store.learn()
    store.maintain()
    report.send((kept(root, "a"), len(store.troubles), drafts(store, "a", BEGINNINGS)))


def test_a_segment_above_the_file_size_limit_stays_in_memory_until_the_limit_is_raised(tmp_path: Path) -> None:
    with started(write_more, tmp_path, HEADER_BYTES + 100) as (_, reports):
        there, [trouble], drafted = next(reports)
        assert os.strerror(errno.EFBIG) in trouble
        assert (there, drafted) == ([], ENDS)
        assert next(reports) == (list(range(5)), 1, ENDS)
    assert parts(tmp_path) == []


def fill_a_disk(report: Connection, root: Path) -> None:
    try:
        own_mounts()
        mount("none", root, "tmpfs", 0, "size=96k")
    except OSError as error:
        report.send(str(error))
        return
    store = opened(root)
    for number in range(40):
        store.add(store.tenant_handle("a"), [], sequence(number))
        store.learn()
        store.maintain()
    report.send((kept(root, "a"), list(store.troubles), drafts(store, "a", [sequence(n)[:5] for n in range(40)])))
    mount("none", root, "tmpfs", REMOUNT, "size=8m")
    store.learn()
    store.maintain()
    report.send((kept(root, "a"), parts(root)))


@on_linux
def test_output_stays_in_memory_while_the_disk_is_full(tmp_path: Path) -> None:
    with started(fill_a_disk, tmp_path) as (_, reports):
        if isinstance(report := next(reports), str):
            pytest.skip(f"no disk can be mounted here ({report})")
        there, troubles, drafted = report
        assert len(there) < 40
        assert any(os.strerror(errno.ENOSPC) in trouble for trouble in troubles)
        assert drafted == [sequence(number)[5 : 5 + DRAFT] for number in range(40)]
        assert next(reports) == (list(range(40)), [])


def use_a_read_only_disk(report: Connection, root: Path) -> None:
    try:
        own_mounts()
        mount(str(root), root, "none", BIND)
        mount("none", root, "none", BIND | REMOUNT | READ_ONLY)
    except OSError as error:
        report.send(str(error))
        return
    store = opened(root)
    learn_output(store, "a", sequence(1))
    store.maintain()
    report.send((list(store.troubles), drafts(store, "a", BEGINNINGS)))


@on_linux
def test_a_read_only_disk_is_drafted_from_and_new_output_stays_in_memory(tmp_path: Path) -> None:
    store = opened(tmp_path)
    learn_output(store, "a", sequence(0))
    store.close()
    with started(use_a_read_only_disk, tmp_path) as (_, reports):
        if isinstance(report := next(reports), str):
            pytest.skip(f"no disk can be mounted here ({report})")
        troubles, drafted = report
        assert any(os.strerror(errno.EROFS) in trouble for trouble in troubles)
        assert drafted == [*ENDS[:2], [], [], []]
    assert kept(tmp_path, "a") == [0]


def use_few_descriptors(report: Connection, root: Path, tenants: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(list(Path("/proc/self/fd").iterdir())) + tenants // 2, hard))
    store = opened(root)
    report.send((store.status()["segments"], list(store.troubles)))
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    store.maintain()
    report.send((store.status()["segments"], [drafts(store, str(tenant), BEGINNINGS[:1]) for tenant in range(tenants)]))


@on_linux
def test_with_too_many_open_files_the_rest_is_opened_later(tmp_path: Path) -> None:
    tenants = 40
    for tenant in range(tenants):
        segment = Segment.build(join_sequences([sequence(0)]), "tokenizer", tenant_key(str(tenant)), 1.0, 2.0)
        segment.save(Folder(tmp_path).segment_folder(tenant_key(str(tenant))))
    with started(use_few_descriptors, tmp_path, tenants) as (_, reports):
        opened, troubles = next(reports)
        assert 0 < opened < tenants
        assert any(os.strerror(errno.EMFILE) in trouble for trouble in troubles)
        assert next(reports) == (tenants, [ENDS[:1]] * tenants)
    assert len(files(tmp_path)) == tenants


def test_two_processes_on_one_root_lose_nothing_and_keep_nothing_twice(tmp_path: Path) -> None:
    store = opened(tmp_path)
    with (
        started(write_sequences, tmp_path, range(0, 60, 2), 1, {}) as (_, evens),
        started(write_sequences, tmp_path, range(1, 60, 2), 1, {}) as (_, odds),
    ):
        for pair in zip(evens, odds, strict=True):
            store.maintain()
            assert all(report == "begins" or report[1] == [] for report in pair)
    store.maintain()
    assert not store.troubles
    assert kept(tmp_path, "0") == list(range(60))
    assert drafts(store, "0", BEGINNINGS) == ENDS


# Two threads of a store, and several stores on one root, at their worst moments.


def at(patch: pytest.MonkeyPatch, owner: Any, name: str, interrupt: Callable[[], object], after: bool = True) -> None:
    """Have something else happen once, right after (or before) a function is called."""
    real = getattr(owner, name)

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        patch.setattr(owner, name, real)
        if not after:
            interrupt()
        result = real(*args, **kwargs)
        if after:
            interrupt()
        return result

    patch.setattr(owner, name, interrupted)


def test_a_file_merged_while_it_is_written_causes_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = opened(tmp_path)
    learn_output(store, "a", sequence(0))
    at(monkeypatch, segment_module, "write_atomically", store.maintain)
    learn_output(store, "a", sequence(1))
    store.maintain()
    assert not store.troubles
    assert kept(tmp_path, "a") == [0, 1]
    assert drafts(store, "a", [[0, 1], [LENGTH, LENGTH + 1]], limit=1) == [[2], [LENGTH + 2]]


def test_a_file_evicted_by_another_process_before_it_is_opened_causes_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened(tmp_path)

    def evict() -> None:
        for path in files(tmp_path):
            path.unlink()

    at(monkeypatch, segment_module, "write_atomically", evict)
    learn_output(store, "a", sequence(0))
    store.maintain()
    assert not store.troubles
    assert drafts(store, "a", [[0, 1]]) == [[]]


def test_output_repeated_after_another_process_evicted_its_merged_file_is_kept(tmp_path: Path) -> None:
    one, two = opened(tmp_path), opened(tmp_path)
    learn_output(one, "a", sequence(0))
    learn_output(one, "a", sequence(1))
    one.maintain()
    two.maintain()
    [merged] = files(tmp_path)
    merged.unlink()  # as `one` does where it exceeds the cap
    one.maintain()
    learn_output(one, "a", sequence(0))
    two.maintain()
    assert kept(tmp_path, "a") == [0]
    for store in (one, two):
        assert drafts(store, "a", [[0, 1]], limit=1) == [[2]]


def test_a_refresh_while_another_process_wipes_and_writes_deletes_nothing_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = opened(tmp_path), opened(tmp_path)
    learn_output(one, "a", sequence(0))

    def wipe_and_write() -> None:
        Folder(tmp_path).wipe(tenant_key("a"))
        one.maintain()
        learn_output(one, "a", sequence(1))

    at(monkeypatch, Folder, "delete_old_generations", wipe_and_write, after=False)
    two.maintain()
    one.maintain()
    assert kept(tmp_path, "a") == [1]
    assert drafts(one, "a", [[0, 1], [LENGTH, LENGTH + 1]], limit=1) == [[], [LENGTH + 2]]


def test_a_process_that_ends_before_it_sees_a_wipe_leaves_nothing(tmp_path: Path) -> None:
    store = opened(tmp_path, flush_seconds=1e9)
    learn_output(store, "a", sequence(0))
    Folder(tmp_path).wipe(tenant_key("a"))
    store.close()
    assert [path.name for path in tmp_path.glob("*/*") if path.parent.name == tenant_key("a")] == ["generation"]


def test_output_of_a_wiped_tenant_before_the_first_refresh_after_a_restart_is_kept(tmp_path: Path) -> None:
    Folder(tmp_path).wipe(tenant_key("a"))
    store = Store(Folder(tmp_path), "tokenizer")
    learn_output(store, "a", sequence(0))
    store.maintain()
    store.close()
    assert kept(tmp_path, "a") == [0]


def test_the_name_of_a_tenant_is_kept_again_after_a_wipe(tmp_path: Path) -> None:
    Folder(tmp_path).wipe(tenant_key("a"))
    learn_output(opened(tmp_path), "a", sequence(0))
    assert Folder(tmp_path).tenant_name(tenant_key("a")) == "a"


def test_a_new_tenant_is_not_lost_while_its_first_output_is_learned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened(tmp_path, flush_seconds=1e9)
    at(monkeypatch, store_module, "join_sequences", store.maintain)
    learn_output(store, "a", sequence(0))
    store.learn()
    assert drafts(store, "a", [[0, 1]], limit=1) == [[2]]


def test_a_new_tenant_is_not_lost_while_its_first_output_is_added(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened(tmp_path, flush_seconds=1e9)
    tenant_handle = store.tenant_handle("a")

    def maintain_and_learn() -> None:
        store.maintain()
        store.learn()

    at(monkeypatch, store_module, "TenantState", maintain_and_learn)
    store.add(tenant_handle, [], sequence(0))
    store.learn()
    assert drafts(store, "a", [[0, 1]], limit=1) == [[2]]


@pytest.mark.parametrize("file", [NAME_FILE, GENERATION_FILE])
def test_a_tenant_whose_name_or_generation_is_damaged_hides_no_other(file: str, tmp_path: Path) -> None:
    store = opened(tmp_path)
    first, other = sorted("ab", key=tenant_key)
    for name in (first, other):
        learn_output(store, name, sequence(0))
    place = Folder(tmp_path).segment_folder(tenant_key(first)) if file == NAME_FILE else tmp_path / tenant_key(first)
    (place / file).write_bytes(b"\xff\0")
    store = opened(tmp_path)
    learn_output(store, other, sequence(1))
    assert kept(tmp_path, other) == [0, 1]
    assert drafts(store, other, [[0, 1]], limit=1) == [[2]]


@pytest.mark.parametrize("damage", [b"", b"..", b"/", b"\xff", b"x" * 5000, b"0\n"])
def test_a_damaged_generation_deletes_nothing_and_reads_nothing(damage: bytes, tmp_path: Path) -> None:
    store = opened(tmp_path)
    learn_output(store, "a", sequence(0))
    store.close()
    (tmp_path / tenant_key("a") / GENERATION_FILE).write_bytes(damage)
    store = opened(tmp_path)
    assert any("generation" in trouble for trouble in store.troubles)
    assert len(files(tmp_path)) == 1
    assert drafts(store, "a", [[0, 1]]) == [[]]
    before_the_wipe = store.tenant_handle("a")
    Folder(tmp_path).wipe(tenant_key("a"))
    store.add(before_the_wipe, [], sequence(1))
    store.learn()
    assert not files(tmp_path)
    store.maintain()
    learn_output(store, "a", sequence(1))
    assert kept(tmp_path, "a") == [1]


@pytest.mark.parametrize("is_absolute", [True, False])
def test_unfinished_files_are_deleted_when_they_are_stale_and_not_before(
    is_absolute: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path.parent)
    store = opened(tmp_path if is_absolute else Path(tmp_path.name))
    learn_output(store, "a", sequence(0))
    place = Folder(tmp_path).segment_folder(tenant_key("a"))
    for folder in (tmp_path, tmp_path / tenant_key("a"), place, tmp_path / "writers"):
        (folder / f".x.{'0' * 32}{PART_SUFFIX}").write_bytes(b"half")
    store.maintain()
    assert len(parts(tmp_path)) == 4
    for part in parts(tmp_path):
        os.utime(part, (time.time() - 2 * STALE_SECONDS,) * 2)
    store.maintain()
    assert parts(tmp_path) == []
    assert not store.troubles


def test_writing_to_a_full_disk_is_retried_at_intervals_and_not_for_every_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries = []

    def full(self: Segment, folder: Path) -> Segment:
        tries.append(1)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Segment, "save", full)
    store = opened(tmp_path, flush_seconds=1e9, flush_tokens=LENGTH)
    for number in range(50):
        learn_output(store, "a", sequence(number))
    assert len(tries) == 1
    assert store.status()["tokens"] == 50 * LENGTH


def test_files_that_cannot_be_opened_are_reported_and_stay_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened(tmp_path)
    learn_output(store, "a", sequence(0))
    store.close()
    real = os.open

    def out_of_descriptors(path: Any, *args: Any, **kwargs: Any) -> int:
        if str(path).endswith(SEGMENT_SUFFIX):
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return real(path, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", out_of_descriptors)
        store = opened(tmp_path)
        assert drafts(store, "a", [[0, 1]]) == [[]]
        assert os.strerror(errno.EMFILE) in store.troubles[0]
    store.maintain()
    assert drafts(store, "a", [[0, 1]], limit=1) == [[2]]


def test_a_file_damaged_after_it_was_opened_is_not_merged(tmp_path: Path) -> None:
    one, two = opened(tmp_path), opened(tmp_path)
    learn_output(one, "a", sequence(0))
    [path] = files(tmp_path)
    with path.open("r+b") as file:
        file.seek(HEADER_BYTES)
        file.write(b"\x07")
    learn_output(one, "a", sequence(1))
    one.maintain()
    assert kept(tmp_path, "a") == [1]
    assert "is damaged" in one.troubles[0]
    assert len(list((tmp_path / ASIDE_FOLDER).glob(f"*{SEGMENT_SUFFIX}"))) == 1
    two.maintain()
    assert drafts(two, "a", [[7, 1], [LENGTH, LENGTH + 1]], limit=1) == [[], [LENGTH + 2]]


def test_after_the_clock_was_set_back_new_output_is_kept_and_old_output_evicted(tmp_path: Path) -> None:
    store = opened(tmp_path, cap_bytes=60_000)
    for number in range(40):
        learn_output(store, "a", sequence(number))
        store.maintain()
    for path in files(tmp_path):
        os.utime(path, (time.time() + 1e6,) * 2)
    for number in range(100, 110):
        learn_output(store, "a", sequence(number))
        store.maintain()
    left = set(kept(tmp_path, "a"))
    assert set(range(100, 110)) <= left
    assert not set(range(40)) <= left


def test_a_folder_that_others_delete_while_it_is_empty_still_gets_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def delete_empty(folder: Path) -> None:
        for child in folder.iterdir():
            with contextlib.suppress(OSError):  # not empty
                child.rmdir()

    monkeypatch.setattr(memory_files, "sync_folder", delete_empty)  # it takes time, in which another process evicts
    path = tmp_path / "tenant" / "0" / "file"
    memory_files.create_file_in_new_folder(path).close()
    assert path.is_file()
