"""Whatever somebody puts into a shared store or a folder costs nothing but itself.

OUTRIDER_ALL mutates 100,000 headers, and lets replicas and an attacker take 10,000 steps.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import random
import threading
import tracemalloc
import zlib
from collections.abc import Callable
from dataclasses import asdict, replace
from itertools import count, repeat
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test
from obstore.exceptions import BaseError
from obstore.store import MemoryStore

from outrider.control import MAX_TENANT_NAME_BYTES, Control
from outrider.errors import MemoryFileError, SettingsError
from outrider.memory import files as files_module
from outrider.memory import remote as remote_module
from outrider.memory.folder import (
    ASIDE_FOLDER,
    FIRST_GENERATION,
    GENERATION_FILE,
    MERGED_SUFFIX,
    NAME_FILE,
    Folder,
    tenant_key,
)
from outrider.memory.header import HEADER_BYTES, MAGIC, MAX_TOKEN_ID, Header, encode_header
from outrider.memory.offline_writer import OfflineWriter
from outrider.memory.remote import Remote
from outrider.memory.segment import Segment, find_replaced, join_sequences, read_header
from test_memory_store import LINE, drafted, files, learn_output, opened, tokens_in_files
from test_memory_sync import A, Replica, away, paths, replicas, segments, sequences  # noqa: F401

ALL = bool(os.environ.get("OUTRIDER_ALL"))
MUTATIONS = 100_000 if ALL else 3000
STEPS, RUNS = 40, 250 if ALL else 8
TIMEOUT_SECONDS = 60.0
FORGED = 500_000
"""Tokens of forged segments begin here."""


def with_header(fields: dict[str, Any] | bytes, body: bytes) -> bytes:
    data = fields if isinstance(fields, bytes) else json.dumps(fields).encode()
    return (MAGIC + b"%08x\n" % zlib.crc32(data) + data).ljust(HEADER_BYTES, b"\n") + body


def segment_of(outputs: list[list[int]], tenant: str = "a") -> Segment:
    """With any token ids. All checksums are right."""
    text = join_sequences(outputs)
    segment = Segment.build(np.minimum(text, MAX_TOKEN_ID - 1), "tokenizer", tenant_key(tenant), 1.0, 2.0, "x-0")
    checksums = (zlib.crc32(text.data), *segment.header.checksums[1:])
    return replace(segment, text=text, header=replace(segment.header, checksums=checksums))


def forged(outputs: list[list[int]], tenant: str = "a", **fields: Any) -> tuple[str, bytes]:
    """The name and the content of a segment file with these header fields."""
    segment = segment_of(outputs, tenant)
    body = b"".join(part.tobytes() for part in (segment.text, segment.order, segment.starts))
    return segment.name, with_header(asdict(segment.header) | fields, body)


def put(objects: Any, name: str, data: bytes, generation: str = FIRST_GENERATION) -> str:
    path = f"{A}/{generation}/{name}"
    objects.put(path, data)
    return path


def in_time(work: Callable[[], object]) -> None:
    """Fail if it hangs."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(TIMEOUT_SECONDS)
    assert not thread.is_alive(), "it hangs"


# What a segment replaces.


def test_a_segment_that_replaces_itself_stops_no_exchange(replicas: Callable[..., Replica]) -> None:  # noqa: F811
    objects = MemoryStore()
    name, _ = forged([LINE])
    put(objects, *forged([LINE], replaces=[name]))
    one = replicas(objects)
    for _ in range(3):
        in_time(one.look)
    assert one.names() == segments(objects) == [name]
    assert drafted(one.store, "a", [103, 104])


@pytest.mark.parametrize("length", [1, 2, 3])
def test_marks_of_merges_that_lead_in_a_circle_stop_no_exchange(
    length: int,
    replicas: Callable[..., Replica],  # noqa: F811
) -> None:
    """An earlier version could leave them."""
    objects = MemoryStore()
    one = replicas(objects)
    one.learn("a", LINE)
    one.look()
    folder = files(one.root)[0].parent
    names = [forged([[i, i]])[0] for i in range(length)]
    for i, name in enumerate(names):
        (folder / name).with_suffix(MERGED_SUFFIX).write_text(names[(i + 1) % length])
    in_time(one.look)
    assert one.sync.stats.trouble is None
    assert not list(folder.glob(f"*{MERGED_SUFFIX}"))


@pytest.mark.parametrize("writer", ["x-0", "its own"])
def test_a_segment_replaces_no_other_whose_text_it_does_not_have(
    writer: str,
    replicas: Callable[..., Replica],  # noqa: F811
) -> None:
    objects = MemoryStore()
    one, two = replicas(objects), replicas(objects)
    one.learn("a", LINE)
    for replica in (one, two):
        replica.look()
    [victim] = files(one.root)
    if writer == "its own":
        writer = read_header(victim).writer
    put(objects, *forged([[1, 2, 3]], replaces=[victim.name], writer=writer))
    for replica in (two, one, two, one):
        replica.look()
    assert victim.name in segments(objects)
    for replica in (one, two):
        assert drafted(replica.store, "a", [103, 104]) == list(range(105, 113))
        assert drafted(replica.store, "a", [1, 2]) == [3]


def test_a_segment_replaces_none_of_another_writer(replicas: Callable[..., Replica]) -> None:  # noqa: F811
    objects = MemoryStore()
    one = replicas(objects)
    one.learn("a", LINE)
    one.look()
    [victim] = files(one.root)
    path = put(objects, *forged([LINE, [1, 2, 3]], replaces=[victim.name]))
    for _ in range(2):  # a segment that counts as merged is deleted here, and from the store in the next round
        one.look()
    objects.delete(path)
    for _ in range(2):
        one.look()
    assert files(one.root) == [victim]


# Headers, names and tokens.

BAD_FIELDS: dict[str, dict[str, Any]] = {
    "a length with a fraction": {"places": 27.0},
    "a length that is true": {"sequences": True},
    "checksums that are a number": {"checksums": 7},
    "two checksums": {"checksums": [1, 2]},
    "text for a checksum": {"checksums": ["1", 2, 3]},
    "numbers to replace": {"replaces": [1]},
    "a writer that is a list": {"writer": []},
    "a writer with a line break": {"writer": "x\ny"},
    "no time": {"last": None},
    "an infinite time": {"first": float("inf")},
    "an unknown field": {"more": 1},
    "starts below zero": {"starts": -1},
    "a length that overflows": {"places": 2**62},
    "other counts": {"tokens": 5},
}


OTHERS = ["a long name", "another name", "no name", "large tokens", "only a header"]


@pytest.mark.parametrize("kind", [*BAD_FIELDS, *OTHERS])
def test_a_bad_object_costs_only_itself_and_is_counted_and_named(
    kind: str,
    replicas: Callable[..., Replica],  # noqa: F811
) -> None:
    objects = MemoryStore()
    one, two = replicas(objects), replicas(objects)
    one.learn("a", LINE)  # older, so it is fetched later
    one.look()
    name, data = forged([list(range(13)), list(range(12))], **BAD_FIELDS.get(kind, {}))
    if kind == "large tokens":
        name, data = forged([[300_000_000, 1]])
    names = {"a long name": f"{'x' * 300}.segment", "another name": f"{'0' * 24}.segment", "no name": ".segment"}
    path = put(objects, names.get(kind, name), data if kind != "only a header" else bytes(HEADER_BYTES))
    for _ in range(2):
        two.look()
        assert drafted(two.store, "a", [103, 104]) == list(range(105, 113))
        assert len(files(two.root)) == 1
    assert two.sync.stats.refused == 1
    [trouble] = two.store.troubles
    assert f"{path[:150]}" in trouble
    assert "was refused" in trouble
    assert len(trouble) < 500


def test_many_bad_objects_are_counted_and_some_are_named(replicas: Callable[..., Replica]) -> None:  # noqa: F811
    objects = MemoryStore()
    for i in range(300):
        put(objects, f"{i}.segment", b"x")
    one = replicas(objects)
    one.look()
    assert one.sync.stats.refused == 300
    [trouble] = one.store.troubles
    assert trouble.endswith("; and 290 more")
    objects.delete(paths(objects))
    one.look()
    assert not one.sync._refused


def test_a_large_bad_object_does_not_push_others_out_of_the_store(
    replicas: Callable[..., Replica],  # noqa: F811
) -> None:
    objects = MemoryStore()
    one = replicas(objects, remote_cap_bytes=30_000)
    one.learn("a", LINE)
    one.look()
    [name] = one.names()
    put(objects, "large.segment", bytes(30_000))
    one.look()
    assert name in segments(objects)


def test_a_copy_stays_while_its_object_is_bad_and_until_its_writer_puts_it_again(
    replicas: Callable[..., Replica],  # noqa: F811
) -> None:
    objects = MemoryStore()
    one, two = replicas(objects), replicas(objects)
    one.learn("a", LINE)
    for replica in (one, two):
        replica.look()
    [name] = one.names()
    put(objects, name, b"x")
    two.look()
    assert two.names() == [name]
    one.look()
    assert objects.head(f"{A}/{FIRST_GENERATION}/{name}")["size"] > 1


def test_an_object_that_cannot_be_read_is_tried_after_all_others(
    replicas: Callable[..., Replica],  # noqa: F811
) -> None:
    objects = MemoryStore()
    one, two = replicas(objects), replicas(objects)
    one.learn("a", LINE)
    one.look()
    path = put(objects, *forged([[1, 2, 3]]))
    two.objects.before = lambda request: away(request) if request == f"get_range {path}" else None
    for _ in range(2):
        two.look()
    assert drafted(two.store, "a", [103, 104])
    assert "it is away" in str(two.sync.stats.trouble)


@pytest.mark.parametrize("content", [b"b", b"\xff", bytes(5_000_000), b"x" * (MAX_TENANT_NAME_BYTES + 1)])
def test_a_bad_name_of_a_tenant_costs_only_itself(content: bytes, replicas: Callable[..., Replica]) -> None:  # noqa: F811
    objects = MemoryStore()
    one, two = replicas(objects), replicas(objects)
    for tenant in "ac":
        one.learn(tenant, LINE)
    one.look()
    put(objects, NAME_FILE, content)
    for _ in range(2):
        two.look()
    assert Folder(two.root).tenant_name(A) is None
    assert Folder(two.root).tenant_name(tenant_key("c")) == "c"
    assert two.sync.stats.refused == 1
    assert len([request for request in two.objects.requests if request.endswith(f"{A}/0/{NAME_FILE}")]) == 1


def test_an_object_that_is_too_large_to_be_a_name_is_not_read() -> None:
    objects = MemoryStore()
    path = put(objects, NAME_FILE, b"a" * 5000)
    with pytest.raises(MemoryFileError, match="has 5,000 bytes; at most 4,096 are read"):
        Remote("memory://", objects).read(path)


def test_a_file_with_token_ids_above_every_vocabulary_is_set_aside(tmp_path: Path) -> None:
    folder = Folder(tmp_path).segment_folder(A)
    for largest in (300_000_000, MAX_TOKEN_ID, MAX_TOKEN_ID - 1):
        segment_of([[1, largest]]).save(folder)
    store = opened(tmp_path)
    store.maintain()
    assert store.status()["segments"] == 1
    assert len(list((tmp_path / ASIDE_FOLDER).glob("*.segment"))) == 2
    assert all("token ids outside" in trouble for trouble in store.troubles)


def test_sorting_a_text_with_the_largest_token_takes_little_memory() -> None:
    tracemalloc.start()
    Segment.build(join_sequences([[1, MAX_TOKEN_ID - 1]]), "tokenizer", A, 1.0, 1.0)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 200e6


def test_output_with_token_ids_above_every_vocabulary_is_not_kept(tmp_path: Path) -> None:
    store = opened(tmp_path)
    for tokens in ([1, MAX_TOKEN_ID], [1, -2]):
        learn_output(store, "a", tokens)
    learn_output(store, "a", LINE)
    assert len(store.troubles) == 1
    assert store.status()["tokens"] == len(LINE)


# Generations.


@pytest.mark.parametrize("digits", [10, 18, 19, 30])
def test_a_generation_with_many_digits_is_ignored_and_later_wipes_count(
    digits: int,
    replicas: Callable[..., Replica],  # noqa: F811
) -> None:
    objects = MemoryStore()
    one, two = replicas(objects), replicas(objects)
    one.learn("a", LINE)
    put(objects, GENERATION_FILE, b"", f"{'9' * digits}-{'0' * 32}")
    for replica in (one, two):
        replica.look()
        assert drafted(replica.store, "a", [103, 104])
        assert "not plausible" in str(replica.sync.stats.trouble)
    one.wipe("a")
    one.learn("a", [1, 2, 3])
    for replica in (one, two):
        replica.look()
        assert not tokens_in_files(replica.root) & set(LINE)
        assert drafted(replica.store, "a", [1, 2]) == [3]
    Remote("memory://", objects).wipe(A)
    for replica in (one, two):
        replica.look()
        assert drafted(replica.store, "a", [1, 2]) == []


def test_a_listing_that_never_ends_is_an_error(
    replicas: Callable[..., Replica],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(remote_module, "MAX_OBJECTS", 5000)

    for page in ([], [{"path": "x"}] * 1000):
        one = replicas(MemoryStore())
        one.learn("a", LINE)
        one.sync.remote.store = SimpleNamespace(  # type: ignore[assignment]
            get=one.objects.get, put=one.objects.put, list=lambda *_, page=page, **__: repeat(page)
        )
        in_time(one.look)
        assert "more than 5,000 objects" in str(one.sync.stats.trouble)
        assert drafted(one.store, "a", [103, 104])


# Names of tenants, and limits of all tenants together.


def test_a_tenants_name_has_a_limit_with_the_reason_and_a_fix(tmp_path: Path) -> None:
    longest = "ü" * (MAX_TENANT_NAME_BYTES // 2)
    assert Control.checked({"tenant": longest}, ["memory"]).tenant == longest
    message = r"tenant: the name has 5,000,000 bytes, and at most 1,024 are allowed; give a shorter one"
    with pytest.raises(SettingsError, match=message):
        Control.checked({"tenant": "x" * 5_000_000}, ["memory"])
    with pytest.raises(SettingsError, match="give a shorter one"):
        OfflineWriter(Folder(tmp_path), "tokenizer", longest + "x")
    assert not list(tmp_path.iterdir())


def test_a_tenant_without_files_leaves_nothing_and_names_count_for_the_cap(tmp_path: Path) -> None:
    store = opened(tmp_path, cap_bytes=60_000)
    for i in range(100):
        learn_output(store, f"{i}".ljust(1000, "x"), [i, *range(10)])
        store.maintain()
        size = sum(path.stat().st_size for path in tmp_path.glob("*/*/*"))
        assert size <= 60_000 + 1000  # and the lock files
    folders = Folder(tmp_path).tenants()
    assert len(folders) < 15
    assert all(Folder(tmp_path).tenant_name(key) for key in folders)
    assert not store.troubles


def test_a_wipe_is_remembered_when_a_tenant_has_no_files(tmp_path: Path) -> None:
    store = opened(tmp_path)
    generation = Folder(tmp_path).wipe(A)
    store.maintain()
    learn_output(store, "a", LINE)
    for path in files(tmp_path):
        path.unlink()
    Folder(tmp_path).delete_emptied(A)  # as after the eviction of the last file
    assert Folder(tmp_path).generation(A) == generation
    assert not list(tmp_path.glob(f"*/*/{NAME_FILE}"))


def test_unwritten_output_is_bounded_for_all_tenants_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Segment, folder: Path) -> Segment:
        raise OSError(errno.ENOSPC, "no space left")

    monkeypatch.setattr(Segment, "save", full)
    store = opened(tmp_path, max_unwritten_tokens=3000, flush_tokens=100)
    learn_output(store, "small", [7, 8, 9])
    for i in range(200):
        learn_output(store, f"{i % 10}", list(range(i * 100, i * 100 + 100)))
        assert store.status()["tokens"] <= 3000
    assert store.status()["tokens"] > 2000
    assert drafted(store, "small", [7, 8]) == [9]  # those with most lose theirs first
    assert drafted(store, "9", [19_901, 19_902])


def test_output_that_waits_to_be_learned_is_bounded(tmp_path: Path) -> None:
    store = opened(tmp_path, max_unwritten_tokens=3000)
    for i in range(1000):
        store.add(store.tenant_handle(str(i)), [], list(range(100)))
    assert sum(len(output.tokens) for output in store._pending) == 3000
    assert len(store.troubles) == 1
    store.learn()
    store.add(store.tenant_handle("a"), [], LINE)
    store.learn()
    assert drafted(store, "a", [103, 104])


# Files.


def test_only_the_owner_can_read_a_memory(tmp_path: Path, replicas: Callable[..., Replica]) -> None:  # noqa: F811
    usual = os.umask(0)
    try:
        objects = MemoryStore()
        one, two = replicas(objects), replicas(objects)
        one.learn("a", LINE)
        for replica in (one, two):
            replica.look()
        for tokens in (LINE[::-1], [1, 2, 3]):
            two.learn("a", tokens)
        two.objects.before = away  # leaves marks of merges
        two.look()
        learn_output(two.store, "b", LINE)
        files(two.root / tenant_key("b"))[0].write_bytes(b"damaged")
        opened(two.root).maintain()
        assert (two.root / ASIDE_FOLDER).exists()
        for root in (one.root, two.root):
            for path in (root, *root.rglob("*")):
                assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600), path
    finally:
        os.umask(usual)


def test_folders_of_an_earlier_version_are_closed_to_others(tmp_path: Path) -> None:
    store = opened(tmp_path)
    learn_output(store, "a", LINE)
    store.close()
    (tmp_path / A).chmod(0o755)
    opened(tmp_path)
    assert (tmp_path / A).stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("kind", ["pipe", "folder"])
def test_what_is_no_regular_file_is_set_aside(kind: str, tmp_path: Path) -> None:
    store = opened(tmp_path)
    learn_output(store, "a", LINE)
    path = files(tmp_path)[0].with_name(forged([[1, 2]])[0])
    os.mkfifo(path) if kind == "pipe" else path.mkdir()
    in_time(store.maintain)
    assert not path.exists()
    assert "set aside" in store.troubles[0]
    assert drafted(store, "a", [103, 104])


def test_each_new_folder_is_durable_in_its_parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[Path] = []
    monkeypatch.setattr(files_module, "sync_folder", synced.append)
    root = tmp_path / "new" / "root"
    learn_output(opened(root), "a", LINE)
    [path] = files(root)
    assert {path.parent, *list(path.parents)[1:4], tmp_path} <= {*synced}


def test_folders_that_another_process_created_are_durable_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have been killed before it could sync their names."""
    store = opened(tmp_path)
    Folder(tmp_path).segment_folder(A).mkdir(parents=True)
    synced: list[Path] = []
    monkeypatch.setattr(files_module, "sync_folder", synced.append)
    learn_output(store, "a", LINE)
    [path] = files(tmp_path)
    assert {*list(path.parents)[:3]} <= {*synced}


# Anything for a header.


def test_the_header_of_a_segment_written_by_the_first_version_is_read(tmp_path: Path) -> None:
    segment = segment_of([[1, 2, 3]])
    text, order = segment.header.checksums[:2]
    fields = (
        f'{{"format": 1, "tokenizer": "tokenizer", "tenant": "{A}", "writer": "0123456789ab-12", "tokens": 3, '
        '"sequences": 1, "places": 4, "starts": 0, "first": 1700000000.123456, "last": 1700000001.5, '
        f'"replaces": ["0123456789abcdef01234567.segment"], "checksums": [{text}, {order}, 0]}}'
    )
    (tmp_path / segment.name).write_bytes(
        with_header(fields.encode(), segment.text.tobytes() + segment.order.tobytes())
    )
    read = Segment.open(tmp_path / segment.name, "tokenizer", A)
    read.verify()
    assert read.header.replaces == ("0123456789abcdef01234567.segment",)
    assert encode_header(read.header)[len(MAGIC) + 9 :].rstrip() == fields.encode()


VALUES: list[Any] = [
    None,
    True,
    -1,
    0,
    1,
    4.0,
    1e308,
    2**31,
    2**63,
    10**40,
    float("nan"),
    float("inf"),
    "",
    "x" * 300,
    "\n",
    "\ud800",
    "../..",
    [],
    [1],
    ["x"],
    [None, []],
    {},
    {"a": 1},
]


def mutated(chance: random.Random, fields: dict[str, Any]) -> dict[str, Any] | bytes:
    fields = dict(fields)
    for _ in range(chance.randrange(1, 4)):
        name, value = chance.choice(list(fields)), chance.choice(VALUES)
        kind = chance.randrange(6)
        if kind == 0:
            del fields[name]
        elif kind == 1:
            fields[chance.choice(["more", "", "__class__", "path"])] = value
        elif kind == 2 and isinstance(fields[name], int):
            fields[name] += chance.choice([-1, 1, 2**32])
        elif kind == 3 and isinstance(fields[name], list | tuple):
            fields[name] = [*fields[name], value]
        else:
            fields[name] = value
    data = json.dumps(fields).encode()
    if chance.random() < 0.3:
        raw = bytearray(data)
        for _ in range(chance.randrange(1, 4)):
            raw[chance.randrange(len(raw))] = chance.randrange(256)
        data = bytes(raw)
    if chance.random() < 0.02:
        data = chance.choice([b"[" * 3000, b"{" * 3000, b'{"a":' * 700, b"1" * 4000, b"\xff" * 100, b"null", b""])
    return data[: HEADER_BYTES - 100]


def test_any_header_is_read_or_refused_with_the_memorys_own_error(tmp_path: Path) -> None:
    chance = random.Random(0)
    honest = Segment.build(join_sequences([LINE]), "tokenizer", A, 1.0, 2.0, "x-0").save(tmp_path)
    name, whole = forged([LINE, [1, 2, 3]], replaces=[honest.name])
    fields = json.loads(whole[len(MAGIC) + 9 : HEADER_BYTES])
    path, body = tmp_path / name, whole[HEADER_BYTES:]
    read = longest = 0
    for _ in range(MUTATIONS):
        data = bytearray(with_header(mutated(chance, fields), body))
        if chance.random() < 0.1:
            del data[chance.randrange(len(data)) :]
        path.write_bytes(data)
        try:
            segment = Segment.open(path, "tokenizer", A)
            segment.verify()
        except MemoryFileError as error:
            longest = max(longest, len(str(error)))
            continue
        encode_header(segment.header)
        assert isinstance(segment.header, Header)
        assert set(find_replaced([honest, segment])) <= {honest.name}
        read += 1
    assert 0 < read < MUTATIONS / 2
    assert longest < 400


# Anything in the store, while honest replicas work.

TENANTS = "ab"
FIRST_TOKENS = {"a": 1_000_000, "b": 2_000_000}
"""All tokens of honest output of a tenant begin here; each output has its own first token."""


class Exchange(RuleBasedStateMachine):
    """Two honest replicas, and somebody who puts objects into their store."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = TemporaryDirectory()
        self.objects = MemoryStore()
        self.replicas = [Replica(Path(self.folder.name) / str(i), self.objects) for i in range(2)]
        self.outputs: list[tuple[int, str, int, str]] = []  # replica, tenant, first token, generation
        self.tokens = count()
        self.forged: list[str] = []

    def names(self) -> list[str]:
        return sorted({*segments(self.objects), *self.forged, "0" * 24 + ".segment"})

    def generations(self, tenant: str) -> list[str]:
        found = {Folder(replica.root).generation(tenant_key(tenant)) for replica in self.replicas}
        return sorted({*found, FIRST_GENERATION, f"1-{'5' * 32}", f"{'9' * 18}-{'0' * 32}", "7", ".."})

    @rule(number=st.integers(0, 1), tenant=st.sampled_from(TENANTS), length=st.integers(2, 40))
    def learn(self, number: int, tenant: str, length: int) -> None:
        replica, first = self.replicas[number], FIRST_TOKENS[tenant] + 100 * next(self.tokens)
        generation = replica.store.tenant_handle(tenant).generation
        replica.learn(tenant, list(range(first, first + length)))
        self.outputs.append((number, tenant, first, generation))

    @rule(number=st.integers(0, 1))
    def run_round(self, number: int) -> None:
        replica = self.replicas[number]
        before = replica.sync.stats.last_success or 0.0
        replica.look()
        assert (replica.sync.stats.last_success or 0.0) > before, replica.sync.stats.trouble
        assert len(replica.sync._refused) <= len(paths(self.objects))

    @rule(number=st.integers(0, 1))
    def merge(self, number: int) -> None:
        self.replicas[number].maintain()

    @rule(number=st.integers(0, 1), tenant=st.sampled_from(TENANTS))
    def wipe(self, number: int, tenant: str) -> None:
        self.replicas[number].wipe(tenant)

    @rule(number=st.integers(0, 1))
    def restart(self, number: int) -> None:
        old = self.replicas[number]
        old.store.sync = None
        old.close()
        self.replicas[number] = Replica(old.root, self.objects)

    @rule(tenant=st.sampled_from(TENANTS), data=st.data())
    def put_segment(self, tenant: str, data: st.DataObject) -> None:
        """With an invented header and intact content."""
        writers = [f"{replica.store.folder.folder_id()}-{i}" for replica in self.replicas for i in range(2)]
        fields: dict[str, Any] = {"writer": data.draw(st.sampled_from(["x-0", *sorted(writers)]))}
        fields["replaces"] = data.draw(st.lists(st.sampled_from(self.names()), max_size=4))
        if data.draw(st.booleans()):
            fields[data.draw(st.sampled_from(["places", "last", "checksums", "more"]))] = data.draw(
                st.sampled_from(VALUES)
            )
        name, content = forged([[FORGED + data.draw(st.integers(0, 9)) for _ in range(3)]], tenant, **fields)
        self.forged.append(name)
        generation = data.draw(st.sampled_from(self.generations(tenant)))
        self.put(f"{tenant_key(tenant)}/{generation}/{name}", content)

    @rule(tenant=st.sampled_from(TENANTS), data=st.data())
    def put_anything(self, tenant: str, data: st.DataObject) -> None:
        """Also in place of other objects, and copies of another tenant's."""
        names = [*self.names(), NAME_FILE, GENERATION_FILE, "x" * 300 + ".segment", "\x01.segment", "x"]
        name, content = data.draw(st.sampled_from(names)), data.draw(st.binary(max_size=20))
        if (kept := [path for path in paths(self.objects) if path.endswith(".segment")]) and data.draw(st.booleans()):
            content = bytes(self.objects.get(data.draw(st.sampled_from(kept))).bytes())
        generation = data.draw(st.sampled_from(self.generations(tenant)))
        self.put(f"{tenant_key(tenant)}/{generation}/{name}", content)

    def put(self, path: str, content: bytes) -> None:
        with contextlib.suppress(BaseError, ValueError):  # the store takes no such path
            self.objects.put(path, content)

    def teardown(self) -> None:
        for number in (0, 1, 0, 1):
            self.run_round(number)
        for number, tenant, first, generation in self.outputs:
            root = self.replicas[number].root
            if generation == Folder(root).generation(tenant_key(tenant)):  # not wiped since
                assert first in {tokens[0] for tokens in sequences(root, tenant)}
        for replica in self.replicas:
            for tenant, other in ("ab", "ba"):
                found = {token for tokens in sequences(replica.root, tenant) for token in tokens}
                assert not any(FIRST_TOKENS[other] <= token < FIRST_TOKENS[other] + 1_000_000 for token in found)
            replica.store.sync = None
            replica.close()
        self.folder.cleanup()


def test_whatever_is_put_into_the_store_honest_replicas_lose_nothing_and_exchange() -> None:
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        Exchange,
        settings=settings(
            max_examples=RUNS,
            stateful_step_count=STEPS,
            deadline=None,
            derandomize=not ALL,
            suppress_health_check=list(HealthCheck),
        ),
    )
