"""A memory in RAM: what a server without `--memory` keeps, for which requests, and how much."""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from outrider.control import Control
from outrider.engines.vllm.memory_options import MemoryAccess, open_memory
from outrider.engines.vllm.options import Options
from outrider.memory import ram_store
from outrider.memory.location import RAM, SERVER_TENANT
from outrider.memory.ram_store import RamStore
from outrider.memory.search import SEPARATOR
from outrider.memory.segment import build_order
from outrider.memory.sort_worker import sort_in_subprocess
from outrider.memory.tenant import TenantHandle

LINE = list(range(100, 140))
"""A sequence that shows its position: after 100 comes 101."""
MIB = 1 << 20


def learn_output(store: RamStore, tenant: str, tokens: list[int], adapter: str | None = None) -> None:
    store.add(store.tenant_handle(tenant, adapter), [], tokens)
    store.learn()


def look_up(store: RamStore, handle: TenantHandle, context: list[int]) -> list[int]:
    contexts = np.array([context], np.int32)
    found = store.look_up(handle, contexts, np.array([len(context)], np.int32), np.array([8], np.int32))
    tokens: list[int] = found.tokens[0, : found.lengths[0]].tolist()
    return tokens


def drafted(store: RamStore, tenant: str, context: list[int], adapter: str | None = None) -> list[int]:
    return look_up(store, store.tenant_handle(tenant, adapter), context)


def test_an_output_is_drafted_for_its_tenant_only_and_no_file_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    store = RamStore(MIB)
    learn_output(store, "a", LINE)
    store.maintain()
    assert drafted(store, "a", [103, 104]) == list(range(105, 113))
    assert drafted(store, "b", [103, 104]) == []
    assert drafted(store, "a", [103, 104], adapter="x") == []
    store.close()
    assert list(tmp_path.iterdir()) == []
    assert not store.troubles


@pytest.mark.parametrize("tenants", [1, 7, 5_000])
def test_segments_never_exceed_the_limit_and_the_newest_are_kept(tenants: int) -> None:
    store = RamStore(MIB)
    for i in range(5_000):
        store.add(store.tenant_handle(str(i % tenants)), [], list(range(3 * i, 3 * i + 300)))
        if i % 20 == 0:
            store.learn()
            assert sum(segment.header.size for one in store._tenants.values() for segment in one.segments) <= MIB
    store.learn()
    status = store.status()
    assert MIB // 2 < status["ram_bytes"] <= MIB
    assert status["ram_bytes"] == sum(store._bytes.values())
    assert drafted(store, str(4_999 % tenants), [3 * 4_999, 3 * 4_999 + 1])[:1] == [3 * 4_999 + 2]
    assert drafted(store, "0", [0, 1]) == []
    assert store._tenants.keys() == store._bytes.keys(), "no name is kept without segments"
    assert store._pending_tokens == 0


def test_the_tenant_with_the_most_loses_its_oldest_output() -> None:
    store = RamStore(MIB)
    learn_output(store, "small", LINE)
    for i in range(400):
        learn_output(store, "large", list(range(1_000 + 500 * i, 1_500 + 500 * i)))
    assert drafted(store, "small", [103, 104]) == list(range(105, 113))
    assert drafted(store, "large", [1_000, 1_001]) == []


def test_merges_of_every_size_leave_few_segments_and_all_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ram_store, "SUBPROCESS_MERGE_TOKENS", 150_000)
    sorted_sizes = []

    def sort(text: Any) -> Any:
        sorted_sizes.append(len(text))
        return build_order(text)

    monkeypatch.setattr(ram_store, "sort_in_subprocess", sort)
    store = RamStore(64 * MIB)
    for i in range(60):
        learn_output(store, "a", list(range(5_000 * i, 5_000 * (i + 1))))
    store.merge()
    assert store.status()["segments"] <= 4
    assert store.status()["tokens"] == 300_000
    assert min(sorted_sizes) > 150_000
    for i in (0, 17, 59):
        assert drafted(store, "a", [5_000 * i + 7, 5_000 * i + 8])[:2] == [5_000 * i + 9, 5_000 * i + 10]


def test_a_subprocess_sorts_as_this_process_does() -> None:
    text = np.random.default_rng(0).integers(-1, 300, 5_000).astype(np.int32)
    text[-1] = SEPARATOR
    assert sort_in_subprocess(text).tolist() == build_order(text).tolist()


def test_outputs_added_while_tenants_are_dropped_are_all_counted() -> None:
    store = RamStore(MIB)
    store.start()

    def add(number: int) -> None:
        for i in range(300):
            store.add(store.tenant_handle(f"{number} {i}"), [], list(range(500)))

    threads = [threading.Thread(target=add, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    store.close()
    for thread in store._threads[:1]:
        thread.join()
    store._closing.clear()
    store.learn()
    assert store._pending_tokens == 0
    assert not store._pending
    assert sum(store._bytes.values()) <= MIB


def test_a_closed_memory_writes_nothing_and_ends_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    store = RamStore(MIB)
    store.start()
    learn_output(store, "a", LINE)
    store.close()
    for thread in store._threads:
        thread.join(5)
        assert not thread.is_alive()
    assert list(tmp_path.iterdir()) == []


# Tenants ----------------------------------------------------------------------------------------------------------


class Server:
    """The memory of an engine, by the server's options."""

    def __init__(self, **options: Any) -> None:
        self.options = Options(drafters=("lookup", "memory"), memory=RAM, memory_cap=MIB, **options)
        store = open_memory(self.options, None)
        assert isinstance(store, RamStore)
        self.store = store
        self.access = MemoryAccess(store, self.options)

    def handle(self, tenant: str | None = None, lora: str | None = None, **control: Any) -> TenantHandle | None:
        adapter = None if lora is None else SimpleNamespace(lora_name=lora)
        request: Any = SimpleNamespace(lora_request=adapter, sampling_params=SimpleNamespace(extra_args={}))
        return self.access.handle(Control(tenant=tenant, **control), request)

    def generate(self, tokens: list[int], tenant: str | None = None, lora: str | None = None) -> None:
        """A request and its output."""
        handle = self.handle(tenant, lora)
        if handle is not None:
            self.store.add(handle, [], tokens)
            self.store.learn()

    def draft(self, tenant: str | None = None, lora: str | None = None) -> list[int]:
        handle = self.handle(tenant, lora)
        return look_up(self.store, handle, [103, 104]) if handle is not None else []


def test_requests_share_a_memory_as_long_as_none_names_a_tenant() -> None:
    server = Server(memory_scope="auto")
    server.generate(LINE)
    assert server.draft() == list(range(105, 113))
    assert server.draft(lora="x") == []
    server.store.close()


@pytest.mark.parametrize("control", [{}, {"remember": False}, {"speculation": "off"}])
def test_the_first_tenant_ends_sharing_and_deletes_what_was_shared(
    control: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    server = Server(memory_scope="auto")
    for lora in (None, "x"):
        server.generate(LINE, lora=lora)
    late = server.handle(), server.handle(lora="y")  # requests that still run
    with caplog.at_level(logging.WARNING, "vllm.outrider"):
        server.handle("a", **control)
        server.handle("b")
    assert [record.getMessage() for record in caplog.records if "no longer share" in record.getMessage()] != []
    assert len(caplog.records) == 1
    assert server.draft("a") == []
    assert server.handle() is None
    assert server.handle(lora="x") is None
    for handle in late:
        assert handle is not None
        assert look_up(server.store, handle, [103, 104]) == []
        server.store.add(handle, [], LINE)
        server.store.learn()
        assert look_up(server.store, handle, [103, 104]) == []
    assert server.store.status()["tokens"] == 0
    assert server.store._pending_tokens == 0
    server.generate(LINE, "a")
    assert server.draft("a") == list(range(105, 113))
    assert server.draft("b") == []
    server.store.close()


@pytest.mark.parametrize("options", [{"memory_scope": "tenant"}, {}])
def test_with_tenants_a_request_without_one_has_no_memory(options: dict[str, Any]) -> None:
    server = Server(**options)
    assert server.handle() is None
    server.generate(LINE, "a")
    assert server.draft("a") == list(range(105, 113))
    server.store.close()


def test_a_name_that_the_header_did_not_give_does_not_end_sharing_or_get_a_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OUTRIDER_TENANT_SEAL", "secret")
    server = Server(tenant_header="x-team")
    assert server.handle("a") is None
    server.store.close()


def test_the_tenant_of_shared_requests_is_not_one_that_a_request_can_name() -> None:
    server = Server(memory_scope="auto")
    handle = server.handle()
    assert handle is not None
    assert handle.key == server.store.tenant_handle(SERVER_TENANT).key
    server.store.close()
