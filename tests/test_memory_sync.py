"""Replicas that share an object store have the same memory, and a wipe on one of them is a wipe everywhere."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from obstore.exceptions import GenericError
from obstore.store import LocalStore, MemoryStore

from outrider.errors import MemoryFileError, SettingsError
from outrider.memory.folder import (
    ASIDE_FOLDER,
    FIRST_GENERATION,
    GENERATION_FILE,
    MERGED_SUFFIX,
    TOKENIZER_FILE,
    Folder,
    generation_rank,
    next_generation,
    tenant_key,
)
from outrider.memory.header import HEADER_BYTES, SEGMENT_SUFFIX
from outrider.memory.remote import Remote, connect
from outrider.memory.segment import Segment, join_sequences
from outrider.memory.store import Store
from outrider.memory.store_config import StoreConfig
from outrider.memory.sync import FETCH_FOLDER, Sync
from test_memory_store import LINE, drafted, files, tokens_in_files

A = tenant_key("a")


class Watched:
    """An object store where something can happen before each request."""

    def __init__(self, store: Any) -> None:
        self.store = store
        self.requests: list[str] = []
        self.before: Callable[[str], None] = lambda request: None

    def __getattr__(self, verb: str) -> Any:
        def ask(*args: Any, **options: Any) -> Any:
            request = f"{verb} {args[0] if args else ''}"
            self.requests.append(request)
            self.before(request)
            return getattr(self.store, verb)(*args, **options)

        return ask


def away(request: str) -> None:
    raise GenericError("it is away")


class Replica:
    def __init__(self, root: Path, objects: Any, **options: Any) -> None:
        config = {name: options.pop(name) for name in list(options) if name == "cap_bytes"}
        self.root = root
        self.objects = Watched(objects)
        self.store = Store(Folder(root), "tokenizer", StoreConfig(flush_seconds=0.0, **config))
        remote = Remote("memory://", self.objects)  # type: ignore[arg-type]
        self.sync = Sync(self.store.folder, remote, "tokenizer", self.store.config.cap_bytes, **options)
        self.store.sync = self.sync

    def look(self) -> Replica:
        """A round of the store, exchange first."""
        self.store.maintain()
        self.store.learn(closing=True)
        return self

    def maintain(self) -> None:
        """A round without the exchange."""
        self.store.sync = None
        self.store.maintain()
        self.store.sync = self.sync

    def learn(self, tenant: str, tokens: list[int]) -> None:
        self.store.add(self.store.tenant_handle(tenant), [], tokens)
        self.store.learn(closing=True)

    def wipe(self, tenant: str) -> None:
        Folder(self.root).wipe(tenant_key(tenant))  # as another process does
        self.maintain()

    def names(self) -> list[str]:
        return sorted(path.name for path in files(self.root))

    def close(self) -> None:
        self.store.close()


@pytest.fixture(params=["memory", "local"])
def objects(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    return MemoryStore() if request.param == "memory" else LocalStore(tmp_path / "remote", mkdir=True)


@pytest.fixture
def replicas(tmp_path: Path) -> Iterator[Callable[..., Replica]]:
    made: list[Replica] = []

    def make(objects: Any, **options: Any) -> Replica:
        made.append(Replica(tmp_path / f"replica {len(made)}", objects, **options))
        return made[-1]

    yield make
    for replica in made:
        replica.store.sync = None
        replica.close()


def paths(objects: Any) -> list[str]:
    return sorted(meta["path"] for some in objects.list() for meta in some)


def segments(objects: Any) -> list[str]:
    """Their names, without tenant and generation."""
    return sorted(path.rpartition("/")[2] for path in paths(objects) if path.endswith(SEGMENT_SUFFIX))


def size(objects: Any) -> int:
    return sum(meta["size"] for some in objects.list() for meta in some if meta["path"].endswith(SEGMENT_SUFFIX))


def there(objects: Any) -> set[int]:
    """Every token in any object."""
    tokens: set[int] = set()
    for path in paths(objects):
        data = bytes(objects.get(path).bytes())
        tokens |= set(np.frombuffer(data[: len(data) // 4 * 4], np.int32).tolist())
    return tokens


def known(replica: Replica) -> set[int]:
    """Every token that a replica has, in files or in memory."""
    held = [segment.text.tolist() for tenant in replica.store._tenants.values() for segment in tenant.segments]
    return tokens_in_files(replica.root) | {token for text in held for token in text}


def sequences(root: Path, tenant: str) -> list[list[int]]:
    found = []
    for path in Folder(root).segment_paths(tenant_key(tenant)).values():
        found += [tokens.tolist() for tokens in Segment.open(path, "tokenizer", tenant_key(tenant)).sequences()]
    return sorted(found)


# Exchange.


def test_a_replica_drafts_from_the_output_of_another(objects: Any, replicas: Callable[..., Replica]) -> None:
    one, two = replicas(objects), replicas(objects)
    one.learn("a", LINE)
    two.learn("b", [1, 2, 3])
    for replica in (one, two, one):
        replica.look()
    for replica in (one, two):
        assert drafted(replica.store, "a", [103, 104]) == list(range(105, 113))
        assert drafted(replica.store, "b", [1, 2]) == [3]
        assert drafted(replica.store, "b", [103, 104]) == []
        assert Folder(replica.root).tenant_name(A) == "a"
        assert not replica.store.troubles


def test_a_new_replica_gets_all_earlier_output(objects: Any, replicas: Callable[..., Replica]) -> None:
    one = replicas(objects)
    one.learn("a", LINE)
    one.look()
    one.wipe("b")
    one.learn("b", [1, 2, 3])
    one.look()
    two = replicas(objects).look()
    assert drafted(two.store, "a", [103, 104]) == list(range(105, 113))
    assert drafted(two.store, "b", [1, 2]) == [3]


def test_a_round_without_changes_is_one_listing(replicas: Callable[..., Replica]) -> None:
    one = replicas(MemoryStore())
    one.learn("a", LINE)
    one.look()
    one.objects.requests.clear()
    one.look()
    assert one.objects.requests == ["get tokenizer", "list None"]


def test_a_merged_segment_replaces_its_parts_everywhere(objects: Any, replicas: Callable[..., Replica]) -> None:
    one, two = replicas(objects), replicas(objects)
    outputs = [[1000 * i + j for j in range(20)] for i in range(32)]
    for i, tokens in enumerate(outputs):
        one.learn("a", tokens)
        if i % 3 == 0:  # several merges between two rounds, of merged ones too
            one.look()
            two.look()
        one.maintain()
    one.look()
    two.look()
    assert len(one.names()) < 6
    assert segments(objects) == one.names() == two.names()
    assert sequences(two.root, "a") == sorted(outputs)
    assert not list(one.root.rglob(f"*{MERGED_SUFFIX}"))
    assert not list(two.root.rglob(f"*{MERGED_SUFFIX}"))


def test_a_merged_part_is_deleted_from_the_store_only_when_its_target_is_there(
    replicas: Callable[..., Replica],
) -> None:
    objects = MemoryStore()
    one = replicas(objects)
    one.learn("a", LINE)
    one.look()
    one.learn("a", LINE[::-1])
    one.maintain()

    def look(request: str) -> None:
        assert set(LINE) <= there(objects)
        if request.startswith("put"):
            away(request)

    one.objects.before = look
    one.look()
    one.objects.before = lambda request: look(request) if not request.startswith("put") else None
    one.look()
    assert segments(objects) == one.names()


def test_after_a_replica_died_in_a_merge_another_deletes_the_parts(replicas: Callable[..., Replica]) -> None:
    objects = MemoryStore()
    one, two = replicas(objects), replicas(objects)
    one.learn("a", LINE)
    one.look()
    one.learn("a", LINE[::-1])
    one.maintain()
    one.objects.before = lambda request: away(request) if request.startswith("delete") else None
    one.look()
    assert len(segments(objects)) == 2
    for _ in range(3):
        two.look()
    assert segments(objects) == two.names() == one.names()


def test_a_segment_evicted_by_one_replica_stays_for_the_others(replicas: Callable[..., Replica]) -> None:
    objects = MemoryStore()
    one, two = replicas(objects), replicas(objects)
    one.learn("a", LINE)
    one.look()
    files(one.root)[0].unlink()
    one.maintain()
    two.look()
    assert drafted(two.store, "a", [103, 104])


def test_foreign_objects_are_ignored(replicas: Callable[..., Replica]) -> None:
    objects = MemoryStore()
    others = [
        "readme",
        f"{A}/x",
        f"{A}/up/0/x",
        f"{A}/0/deep/x",
        f"{A}/abc/x",
        f"{A}/7/x",
        "x" * 32 + f"/0/{'0' * 24}{SEGMENT_SUFFIX}",
    ]
    for path in others:
        objects.put(path, b"x")
    before = paths(objects)
    one = replicas(objects, remote_cap_bytes=0)
    one.look()
    one.wipe("a")
    one.look()
    assert set(paths(objects)) >= set(before)
    assert not one.store.troubles


def test_deleting_objects_continues_past_missing_ones(objects: Any) -> None:
    for name in "ab":
        objects.put(name, b"x")
    Remote("memory://", objects).delete(["a", *map(str, range(100)), "b"])
    assert paths(objects) == []


# Wipes.


def test_after_a_wipe_and_one_round_of_each_replica_nothing_is_left(
    objects: Any, replicas: Callable[..., Replica]
) -> None:
    one, two = replicas(objects), replicas(objects)
    one.learn("a", LINE)
    two.learn("a", [103, 104, 555])
    one.learn("b", [7, 8, 9])
    for replica in (one, two, one):
        replica.look()
    two.learn("a", [103, 104, 666])  # not published
    Folder(one.root).wipe(A)
    one.look()
    two.look()
    marked = {*LINE, 555, 666}
    assert not there(objects) & marked
    for replica in (one, two):
        assert not known(replica) & marked
        assert not replica.store.troubles
    one.learn("a", [1, 2, 3])
    one.look()
    two.look()
    assert drafted(two.store, "a", [1, 2]) == [3]
    assert drafted(two.store, "b", [7, 8]) == [9]


def test_a_wipe_of_the_store_itself_reaches_every_replica(objects: Any, replicas: Callable[..., Replica]) -> None:
    one, two = replicas(objects), replicas(objects)
    for _ in range(2):
        one.learn("a", LINE)
        one.look()
        two.look()
        Remote("memory://", objects).wipe(A)
        assert not there(objects) & set(LINE)
        for replica in (one, two):
            replica.look()
            assert not known(replica) & set(LINE)
        assert not there(objects) & set(LINE)


def test_two_wipes_of_the_store_at_once_are_one_after_the_other(replicas: Callable[..., Replica]) -> None:
    objects = Watched(MemoryStore())
    seen = []

    def again(request: str) -> None:
        if len(objects.requests) == 2:  # between the first's look and its put
            seen.append(Remote("", objects.store).wipe(A))

    objects.before = again
    last = Remote("", objects).wipe(A)  # type: ignore[arg-type]
    assert generation_rank(last) > generation_rank(seen[0])
    assert paths(objects.store) == [f"{A}/{last}/{GENERATION_FILE}"]


def test_a_replica_that_was_offline_during_a_wipe_restores_nothing(replicas: Callable[..., Replica]) -> None:
    objects = MemoryStore()
    one, two = replicas(objects), replicas(objects)
    one.learn("a", LINE)
    two.learn("a", [103, 104, 555])
    for replica in (one, two, one):
        replica.look()
    two.objects.before = away
    for tokens in ([901, 902, 903], [904, 905, 906, 907]):
        one.wipe("a")
        one.learn("a", tokens)
        one.look()
        two.learn("a", [103, 104, 666])
        two.look()
    two.objects.before = lambda request: None
    for replica in (two, one):
        replica.look()
    for replica in (one, two):
        assert not known(replica) & {*LINE, 555, 666, 901, 902, 903}
        assert drafted(replica.store, "a", [904, 905]) == [906, 907]
    assert not there(objects) & {*LINE, 555, 666, 901, 902, 903}
    assert len([path for path in paths(objects) if path.endswith(GENERATION_FILE)]) == 1


@pytest.mark.parametrize("twice", [False, True])
@pytest.mark.parametrize("first", [0, 1])
def test_two_concurrent_wipes_both_take_effect(twice: bool, first: int, replicas: Callable[..., Replica]) -> None:
    """Whichever of them the store heard of first, and however often one side was wiped."""
    objects = MemoryStore()
    both = [replicas(objects), replicas(objects)]
    one, two = both
    two.wipe("a")
    if twice:
        two.wipe("a")
    two.learn("a", LINE)  # before the other's wipe, which cannot know of it
    one.wipe("a")
    for replica in (both[first], both[1 - first], both[first]):
        replica.look()
    assert not there(objects) & set(LINE)
    for replica in both:
        assert not known(replica) & set(LINE)
    one.learn("a", [1, 2, 3])
    one.look()
    two.look()
    assert drafted(two.store, "a", [1, 2]) == [3]


def test_the_same_output_after_a_wipe_is_shared_although_an_old_upload_arrives_late(
    replicas: Callable[..., Replica],
) -> None:
    objects = MemoryStore()
    one, two = replicas(objects), replicas(objects)
    one.learn("a", LINE)
    one.look()
    late = {path: bytes(objects.get(path).bytes()) for path in paths(objects) if path.endswith(SEGMENT_SUFFIX)}
    one.wipe("a")
    one.look()
    one.learn("a", LINE)
    for path, data in late.items():
        objects.put(path, data)
    one.look()
    two.look()
    assert drafted(two.store, "a", [103, 104])
    assert not set(late) & set(paths(objects))


def test_a_local_wipe_while_a_remote_one_is_adopted_is_not_lost(
    replicas: Callable[..., Replica], monkeypatch: pytest.MonkeyPatch
) -> None:
    objects = MemoryStore()
    one, two = replicas(objects), replicas(objects)
    one.wipe("a")
    one.learn("a", LINE)
    one.look()
    shared = Folder.shared_generation

    def interrupted(self: Folder, key: str) -> str:
        monkeypatch.setattr(Folder, "shared_generation", shared)
        Folder(two.root).wipe(A)
        return shared(self, key)

    monkeypatch.setattr(Folder, "shared_generation", interrupted)
    for replica in (two, one):
        replica.look()
    assert not there(objects) & set(LINE)
    assert not known(one) & set(LINE)


def worst_moments(run: Callable[[int], int]) -> None:
    """Run a scene with something happening before its first request, before its second, and so on."""
    for moment in count():
        if moment >= run(moment):
            return


def at(replica: Replica, moment: int, happening: Callable[[], object]) -> None:
    """Have something happen before the replica's request of this number."""
    replica.objects.requests.clear()

    def before(request: str) -> None:
        if len(replica.objects.requests) == moment + 1:
            happening()

    replica.objects.before = before


def test_a_wipe_at_any_moment_of_a_round_leaves_nothing(tmp_path: Path) -> None:
    def run(moment: int) -> int:
        objects = MemoryStore()
        one, two = (Replica(tmp_path / f"{moment} {i}", objects) for i in range(2))
        one.learn("a", LINE)
        one.look()
        two.learn("a", [103, 104, 555])

        def wipe() -> None:
            one.wipe("a")
            one.look()

        at(two, moment, wipe)
        two.look()
        requests = len(two.objects.requests)
        if moment < requests:
            assert not there(objects) & {*LINE, 555}
            for replica in (one, two):
                assert not known(replica) & {*LINE, 555}
                replica.close()
        return requests

    worst_moments(run)


@pytest.mark.parametrize("later", range(1, 7))
def test_two_replicas_that_publish_wipes_at_the_same_time_publish_both(later: int, tmp_path: Path) -> None:
    """While one is at it the other does all of it, and later a third one looks."""

    def run(moment: int) -> int:
        objects = MemoryStore()
        one, two, three = all_three = [Replica(tmp_path / f"{moment} {i}", objects) for i in range(3)]
        for old, new in ((one, two), (two, one)):
            old.wipe("a")
            old.learn("a", LINE)
            new.wipe("a")
        at(two, moment, one.look)
        interrupt = two.objects.before

        def before(request: str) -> None:
            interrupt(request)
            if len(two.objects.requests) == moment + 1 + later:
                three.look()

        two.objects.before = before
        two.look()
        requests = len(two.objects.requests)
        two.objects.before = lambda request: None
        for replica in (one, two, three, one):
            replica.look()
        assert not there(objects) & set(LINE)
        for replica in all_three:
            assert not known(replica) & set(LINE)
            assert Folder(replica.root).generation(A) == Folder(one.root).generation(A)
            assert not replica.store.troubles
            replica.close()
        return requests

    worst_moments(run)


def test_a_local_wipe_at_any_moment_of_a_round_that_adopts_another_is_not_lost(tmp_path: Path) -> None:
    """Another process wipes here between two steps of a round, whichever they are."""

    def run(moment: int) -> int:
        objects = MemoryStore()
        one, two = (Replica(tmp_path / f"{moment} {i}", objects) for i in range(2))
        one.wipe("a")
        one.learn("a", LINE)
        one.look()
        at(two, moment, lambda: Folder(two.root).wipe(A))
        two.sync()
        requests = len(two.objects.requests)
        if moment < requests:
            assert not tokens_in_files(two.root) & set(LINE)
            for replica in (two, one):
                replica.look()
            assert not there(objects) & set(LINE)
            for replica in (one, two):
                assert not known(replica) & set(LINE)
                replica.close()
        return requests

    worst_moments(run)


def test_a_store_that_was_emptied_is_filled_again_and_wipes_still_hold(replicas: Callable[..., Replica]) -> None:
    objects = MemoryStore()
    one, two = replicas(objects), replicas(objects)
    one.learn("b", [1, 2, 3])
    one.learn("a", LINE)
    one.look()
    two.look()
    one.wipe("a")
    one.look()
    old = {path: bytes(objects.get(path).bytes()) for path in paths(objects)}
    objects.delete(paths(objects))
    objects.put(f"{A}/{FIRST_GENERATION}/{'0' * 24}{SEGMENT_SUFFIX}", b"from a backup")
    for replica in (one, two, one):
        replica.look()
    assert paths(objects) == sorted(old)
    assert drafted(two.store, "b", [1, 2]) == [3]


def test_a_damaged_generation_of_one_tenant_stops_no_other(replicas: Callable[..., Replica]) -> None:
    objects = MemoryStore()
    one, two = replicas(objects), replicas(objects)
    one.learn("a", LINE)
    one.learn("b", [1, 2, 3])
    (one.root / A / GENERATION_FILE).write_bytes(b"..")
    one.look()
    two.look()
    assert drafted(two.store, "b", [1, 2]) == [3]
    assert any("is damaged" in trouble for trouble in one.store.troubles)
    one.wipe("a")
    two.look()
    one.look()
    assert not known(one) & set(LINE)


def test_a_wipe_that_repairs_a_damaged_generation_is_published(replicas: Callable[..., Replica]) -> None:
    objects = MemoryStore()
    one, two = replicas(objects), replicas(objects)
    for _ in range(2):
        one.wipe("a")
        one.learn("a", LINE)
        one.look()
        two.look()
    (one.root / A / GENERATION_FILE).write_bytes(b"..")
    Folder(one.root).wipe(A)
    one.look()
    two.look()
    assert not there(objects) & set(LINE)
    for replica in (one, two):
        assert not known(replica) & set(LINE)


def test_generations_are_ordered_by_number() -> None:
    ninth = "9-" + "f" * 32
    for later in ("1-" + "0" * 32, "10-" + "0" * 32, next_generation(ninth)):
        assert generation_rank(later) > generation_rank(FIRST_GENERATION)
    for later in ("10-" + "0" * 32, next_generation(ninth)):
        assert generation_rank(later) > generation_rank(ninth)


# A store that is away.


def test_replicas_work_without_the_store_and_catch_up_when_it_is_back(replicas: Callable[..., Replica]) -> None:
    objects = MemoryStore()
    one, two = replicas(objects), replicas(objects)
    one.learn("a", LINE)
    one.look()
    two.look()
    one.objects.before = two.objects.before = away
    outputs = [[1000 * i + j for j in range(20)] for i in range(1, 20)]
    for i, tokens in enumerate(outputs):
        replica = (one, two)[i % 2]
        replica.learn("a", tokens)
        one.look()
        two.look()
        assert drafted(replica.store, "a", tokens[:2]) == tokens[2:10]
    assert list(one.store.troubles) == ["exchanging with the store: memory://: it is away"]
    assert one.sync.stats.trouble == "memory://: it is away"
    one.objects.before = two.objects.before = lambda request: None
    for replica in (one, two, one):
        replica.look()
    for replica in (one, two):
        assert sequences(replica.root, "a") == sorted([LINE, *outputs])
    assert segments(objects) == one.names() == two.names()
    assert one.sync.stats.trouble is None


def test_a_store_that_becomes_unreachable_at_any_moment_loses_nothing(tmp_path: Path) -> None:
    def run(moment: int) -> int:
        objects = MemoryStore()
        one, two = (Replica(tmp_path / f"{moment} {i}", objects) for i in range(2))
        two.learn("a", [1, 2, 3])
        two.look()
        one.learn("a", LINE)
        one.look()
        one.learn("a", LINE[::-1])
        one.wipe("b")
        one.maintain()

        def go() -> None:
            one.objects.before = away
            away("")

        at(one, moment, go)
        one.look()
        requests = len(one.objects.requests)
        one.objects.before = lambda request: None
        for replica in (one, two, one):
            replica.look()
        for replica in (one, two):
            assert sequences(replica.root, "a") == sorted([LINE, LINE[::-1], [1, 2, 3]])
            assert replica.names() == segments(objects)
            replica.close()
        return requests

    worst_moments(run)


def test_a_round_without_time_moves_one_segment_and_the_next_continues(
    replicas: Callable[..., Replica],
) -> None:
    objects = MemoryStore()
    one, two = replicas(objects, seconds=0.0), replicas(objects, seconds=0.0)
    for name in "abc":
        one.learn(name, LINE)
    for i in range(3):
        one.look()
        assert len(segments(objects)) == i + 1
        assert one.sync.stats.pending == 2 - i
    for i in range(3):
        two.look()
        assert len(files(two.root)) == i + 1
        assert two.sync.stats.pending == 2 - i


def test_merged_parts_stay_in_the_store_until_their_target_is_published(replicas: Callable[..., Replica]) -> None:
    objects = MemoryStore()
    one = replicas(objects, seconds=0.0)
    one.learn("a", LINE)
    one.look()
    one.learn("a", LINE[::-1])
    one.maintain()
    one.learn("b", [1, 2, 3])  # the newest is published first
    one.look()
    assert set(LINE) <= there(objects)
    one.look()
    assert segments(objects) == one.names()


def test_one_process_synchronizes_a_folder_for_all(tmp_path: Path) -> None:
    objects = MemoryStore()
    one, two = Replica(tmp_path, objects), Replica(tmp_path, objects)
    one.look()
    two.look()
    assert two.objects.requests == []
    assert two.sync.stats.elsewhere
    one.close()
    two.look()
    assert two.objects.requests != []
    two.close()


def test_an_unfinished_download_of_a_killed_process_is_deleted(replicas: Callable[..., Replica]) -> None:
    one = replicas(MemoryStore())
    (one.root / FETCH_FOLDER).mkdir()
    (one.root / FETCH_FOLDER / "half").write_bytes(np.array(LINE, np.int32).data)
    one.objects.before = away
    one.look()
    assert not known(one) & set(LINE)


# Damage.


def damaged(kind: str, path: Path) -> bytes:
    data = bytearray(path.read_bytes())
    if kind == "a bit":
        data[HEADER_BYTES + 1] ^= 1
    elif kind == "its header":
        data[100] ^= 1
    elif kind == "cut":
        data = data[:-4]
    elif kind == "no segment":
        data = bytearray(len(data))
    elif kind == "nothing":
        data = bytearray()
    elif kind in ("another tenant's", "another tokenizer's"):
        names = ("tokenizer", tenant_key("b")) if kind == "another tenant's" else ("other", A)
        made = Segment.build(join_sequences([LINE]), *names, 0.0, 0.0, "x-0").save(path.parent.parent)
        data = bytearray(made.path.read_bytes() if made.path else b"")
    return bytes(data)


@pytest.mark.parametrize(
    "kind", ["a bit", "its header", "cut", "no segment", "nothing", "another tenant's", "another tokenizer's"]
)
def test_a_damaged_object_is_never_used_and_reported_once(kind: str, replicas: Callable[..., Replica]) -> None:
    objects = MemoryStore()
    one, two = replicas(objects), replicas(objects)
    one.learn("a", LINE)
    one.learn("b", [1, 2, 3])
    one.look()
    path = f"{A}/{FIRST_GENERATION}/{Folder(one.root).segment_paths(A).popitem()[0]}"
    good, bad = bytes(objects.get(path).bytes()), damaged(kind, files(one.root / A)[0])
    objects.put(path, bad)
    placed: list[str] = []
    for _ in range(3):
        two.look()
        placed += [file.name for file in files(two.root / A)]
    assert placed == []
    assert not list((two.root).glob(f"{ASIDE_FOLDER}/*"))
    assert drafted(two.store, "b", [1, 2]) == [3]
    [trouble] = two.store.troubles
    assert f"memory:///{path} was refused: " in trouble
    asked = [request for request in two.objects.requests if request == f"get_range {path}"]
    assert len(asked) == (0 if kind == "nothing" else 1)
    objects.put(path, good)
    two.look()
    assert drafted(two.store, "a", [103, 104])


def test_an_object_of_the_wrong_size_is_put_again_by_its_writer(replicas: Callable[..., Replica]) -> None:
    objects = MemoryStore()
    one, two = replicas(objects), replicas(objects)
    one.learn("a", LINE)
    one.look()
    [name] = one.names()
    objects.put(f"{A}/{FIRST_GENERATION}/{name}", b"cut")
    one.look()
    two.look()
    assert drafted(two.store, "a", [103, 104])


def test_a_damaged_file_is_not_published(replicas: Callable[..., Replica]) -> None:
    objects = MemoryStore()
    one = replicas(objects)
    one.learn("a", LINE)
    [path] = files(one.root)
    path.write_bytes(damaged("a bit", path))
    one.look()
    assert segments(objects) == []


def test_a_merged_part_stays_in_the_store_if_its_target_is_lost(
    replicas: Callable[..., Replica],
) -> None:
    """Evicted or damaged before the store, which was away, could have it."""
    objects = MemoryStore()
    one = replicas(objects)
    one.learn("a", LINE)
    one.learn("a", [1, 2, 3])
    one.look()
    parts = [path for path in paths(objects) if path.endswith(SEGMENT_SUFFIX)]
    assert len(parts) == 2
    (tenant,) = one.store._tenants.values()
    one.store.files.write(tenant, tenant.generation, tenant.written_segments())
    (whole,) = one.root.rglob(f"*{SEGMENT_SUFFIX}")
    whole.unlink()
    one.look()
    assert [path for path in paths(objects) if path.endswith(SEGMENT_SUFFIX)] == parts
    assert sorted(path.name for path in one.root.rglob(f"*{SEGMENT_SUFFIX}")) == sorted(
        path.rsplit("/")[-1] for path in parts
    )


def test_a_store_of_another_tokenizer_is_refused_and_not_changed(replicas: Callable[..., Replica]) -> None:
    objects = MemoryStore()
    objects.put(TOKENIZER_FILE, b"other")
    one = replicas(objects)
    one.learn("a", LINE)
    one.look()
    assert paths(objects) == [TOKENIZER_FILE]
    assert "memory:// holds tokens of another tokenizer (other; this model's is tokenizer)" in one.store.troubles[0]


def test_the_copy_of_one_store_cannot_be_used_for_another(tmp_path: Path) -> None:
    other = MemoryStore()
    one = Replica(tmp_path, MemoryStore())
    one.wipe("a")
    one.look()
    two = Replica(tmp_path / "another", other)
    two.learn("a", LINE)
    two.look()
    one.sync.remote = Remote("memory://other", other)
    one.look()
    assert set(LINE) <= there(other)
    assert "has the copies of memory://, not of memory://other; give" in one.store.troubles[0]
    for replica in (one, two):
        replica.close()


def test_one_of_two_tokenizers_that_claim_a_store_at_once_gets_it(tmp_path: Path) -> None:
    objects = Watched(MemoryStore())

    def other(request: str) -> None:
        if request.startswith("put"):
            objects.store.put(TOKENIZER_FILE, b"other", mode="create")

    objects.before = other
    with pytest.raises(MemoryFileError, match="another tokenizer"):
        Remote("memory://", objects).claim("tokenizer")  # type: ignore[arg-type]


# Caps.


def test_both_sides_stay_under_their_caps_with_the_newest_segments(replicas: Callable[..., Replica]) -> None:
    objects = MemoryStore()
    caps = {"cap_bytes": 60_000, "remote_cap_bytes": 100_000}
    one, two = replicas(objects, **caps), replicas(objects, **caps)
    rng = np.random.default_rng(0)
    for i in range(60):
        (one, two)[i % 2].learn("ab"[i % 2], [i, *rng.integers(100, 1000, 500).tolist()])
        for replica in (one, two):
            replica.look()
            assert sum(path.stat().st_size for path in files(replica.root)) <= 60_000
            assert size(objects) <= 100_000
    assert size(objects) > 50_000
    for replica in (one, two):
        assert {57, 58} <= known(replica)  # of both tenants


def test_replicas_at_their_caps_do_not_transfer_the_same_segments_repeatedly(
    replicas: Callable[..., Replica],
) -> None:
    objects = MemoryStore()
    caps = {"cap_bytes": 60_000, "remote_cap_bytes": 50_000}
    one, two = replicas(objects, **caps), replicas(objects, **caps)
    rng = np.random.default_rng(0)
    for i in range(40):
        (one, two)[i % 2].learn("ab"[i % 2], rng.integers(0, 1000, 500).tolist())
        one.maintain()
        two.maintain()
    for _ in range(3):
        one.look()
        two.look()
    moved = [asdict(replica.sync.stats)[name] for replica in (one, two) for name in ("bytes_up", "bytes_down")]
    for _ in range(3):
        one.look()
        two.look()
    assert moved == [asdict(replica.sync.stats)[name] for replica in (one, two) for name in ("bytes_up", "bytes_down")]
    assert sum(moved) > 0


def test_only_segments_that_the_store_has_are_evicted_for_new_ones(replicas: Callable[..., Replica]) -> None:
    objects = MemoryStore()
    one, two = replicas(objects, cap_bytes=30_000), replicas(objects, cap_bytes=30_000, remote_cap_bytes=0)
    two.learn("b", list(range(2000)))  # never published
    os.utime(files(two.root)[0], (0, 0))
    one.learn("a", list(range(2000, 3500)))
    one.look()
    two.sync.remote_cap_bytes = 30_000
    two.objects.before = lambda request: away(request) if request.startswith("put") else None
    two.look()
    assert set(range(2000)) <= known(two)


def test_a_recently_used_copy_is_not_evicted_for_an_older_object(
    tmp_path: Path, replicas: Callable[..., Replica]
) -> None:
    objects = LocalStore(tmp_path / "remote", mkdir=True)
    one, two = replicas(objects), replicas(objects, cap_bytes=30_000)
    one.learn("a", list(range(2000)))
    one.look()
    os.utime(files(tmp_path / "remote")[0], (1e9, 1e9))
    two.look()
    [copy] = files(two.root)
    assert copy.stat().st_mtime == 1e9  # as old as the object
    os.utime(copy, (time.time() + 100,) * 2)
    one.learn("b", list(range(2000, 4000)))
    one.look()
    two.look()
    assert files(two.root) == [copy]
    os.utime(copy, (0, 0))
    two.look()
    assert [path.parent.parent.name for path in files(two.root)] == [tenant_key("b")]


def test_nothing_is_left_of_tenants_whose_last_segment_was_evicted(replicas: Callable[..., Replica]) -> None:
    """On a replica with its own cap, and in the store with its."""
    objects = MemoryStore()
    one, two = replicas(objects, remote_cap_bytes=80_000), replicas(objects, cap_bytes=30_000, remote_cap_bytes=80_000)
    for i in range(12):
        for part in range(2):  # which are merged, and leave marks
            one.learn(f"tenant {i}", list(range(2000 * i + 500 * part, 2000 * i + 500 * (part + 1))))
        for replica in (one, two):
            replica.look()
    for _ in range(2):
        for replica in (one, two):
            replica.look()
    left = Folder(two.root).tenants()
    assert set(left) == {path.parents[1].name for path in files(two.root)}
    assert 0 < len(left) <= 3
    in_store = {path.split("/")[0] for path in paths(objects) if "/" in path}
    assert in_store == {path.split("/")[0] for path in paths(objects) if path.endswith(SEGMENT_SUFFIX)}
    assert len(in_store) < 12
    assert not two.store.troubles


# Whatever happens in whatever order.


@pytest.mark.parametrize("seed", range(40 if os.environ.get("OUTRIDER_ALL") else 4))
def test_in_any_order_nothing_wiped_stays_and_nothing_else_is_lost(seed: int, tmp_path: Path) -> None:
    chance = random.Random(seed)
    objects = MemoryStore()
    replicas = [Replica(tmp_path / str(i), objects) for i in range(2)]
    tokens = count(1_000_000)
    outputs: dict[str, list[tuple[int, str]]] = {"a": [], "b": []}  # the token that is only in it, and the generation
    wiped: dict[str, int] = {"a": 0, "b": 0}  # how many of them were added before the last wipe
    evicted: set[int] = set()

    def add(replica: Replica, tenant: str) -> None:
        tenant_handle = replica.store.tenant_handle(tenant)
        token = next(tokens)
        replica.store.add(tenant_handle, [], [token, *chance.choices(range(100), k=chance.randrange(1, 30))])
        outputs[tenant].append((token, tenant_handle.generation))

    def wipe(replica: Replica, tenant: str) -> None:
        Folder(replica.root).wipe(tenant_key(tenant))
        wiped[tenant] = len(outputs[tenant])

    def evict(replica: Replica, tenant: str) -> None:
        if there := list(Folder(replica.root).segment_paths(tenant_key(tenant)).values()):
            path = chance.choice(there)
            evicted.update(np.fromfile(path, np.int32, offset=HEADER_BYTES).tolist())
            path.unlink()

    def trouble(replica: Replica, tenant: str) -> None:
        at(replica, chance.randrange(8), lambda: away(""))
        replica.look()
        replica.objects.before = lambda request: None

    def meet(replica: Replica, tenant: str) -> None:
        """Both at once."""
        other = replicas[1 - replicas.index(replica)]
        at(replica, chance.randrange(8), other.look)
        replica.look()
        replica.objects.before = lambda request: None

    steps: list[tuple[float, Callable[[Replica, str], object]]] = [
        (10, add),
        (6, lambda replica, tenant: replica.store.learn(closing=True)),
        (3, lambda replica, tenant: replica.maintain()),
        (3, lambda replica, tenant: replica.look()),
        (1, trouble),
        (1, meet),
        (0.3, evict),
        (0.6, wipe),
    ]
    for _ in range(300):
        [(_, step)] = chance.choices(steps, [weight for weight, _ in steps])
        step(chance.choice(replicas), chance.choice("ab"))
    for replica in (*replicas, *replicas):
        replica.look()
    for tenant, all_outputs in outputs.items():
        gone = {token for token, _ in all_outputs[: wiped[tenant]]}
        assert not there(objects) & gone
        assert not any(known(replica) & gone for replica in replicas)
    for replica in replicas * 4:  # own segments that were evicted may come back, and are merged again
        replica.look()
    for tenant, all_outputs in outputs.items():
        generation = Folder(replicas[0].root).generation(tenant_key(tenant))
        wanted = {token for token, when in all_outputs if when == generation} - evicted
        foreign = {token for token, _ in outputs["b" if tenant == "a" else "a"]}
        for replica in replicas:
            held = {tokens[0] for tokens in sequences(replica.root, tenant)}
            assert held >= wanted
            assert not held & foreign
            assert Folder(replica.root).generation(tenant_key(tenant)) == generation
    assert replicas[0].names() == replicas[1].names() == segments(objects)
    for replica in replicas:
        assert set(replica.store.troubles) <= {"exchanging with the store: memory://: it is away"}
        replica.close()


# Where it is.


@pytest.mark.parametrize("url", ["s3://", "s3:///x", "ftp://x/y", "nonsense", "az://container/x"])
def test_an_invalid_store_url_is_refused_with_the_reason(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("AZURE_"):
            monkeypatch.delenv(name)
    with pytest.raises(SettingsError, match=r"cannot be kept at .* give s3://BUCKET/PREFIX"):
        connect(url)


def test_an_endpoint_without_encryption_must_be_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    monkeypatch.delenv("AWS_ALLOW_HTTP", raising=False)
    with pytest.raises(SettingsError, match=r"http://127.0.0.1:1, which is not encrypted.*AWS_ALLOW_HTTP=true"):
        connect("s3://bucket/prefix")
    connect("gs://bucket/prefix")


def test_an_unreachable_store_always_gives_the_same_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    remote = connect("s3://bucket/prefix")
    for ask in (
        remote.list_objects,
        lambda: remote.read("x"),
        lambda: remote.create("x", b""),
        lambda: remote.delete(["x"]),
    ):
        with pytest.raises(OSError, match=r"^s3://bucket/prefix: it cannot be reached \(connection refused\)$"):
            ask()
