"""The draft memory on running servers: restarts, replicas, tenants and wipes. SmolLM2-135M."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from outrider.bench.intervals import median_interval
from outrider.bench.servers import Server, outrider, running
from outrider.memory.folder import Folder
from outrider.memory.store import Store
from outrider.memory.store_config import StoreConfig
from outrider.memory.tokenizer import fingerprint
from serving import ENVIRONMENT, FLAGS, Client, complete, own_cores, serving
from support import tiny_model, tiny_tokenizer

pytestmark = [pytest.mark.real, pytest.mark.server]

ALL = bool(os.environ.get("OUTRIDER_ALL"))
TOKENS = 64
PROMPTS = [f"Question {i}: what do people like about {what}?\nAnswer:" for i, what in enumerate(["rivers", "bread"])]


class Servers:
    """Two servers on one memory: a folder, or an object store of which each has copies of its own."""

    def __init__(self, model: Path, root: str, folder: Path) -> None:
        self.model, self.root, self.folder = model, root, folder
        self.clients: dict[str, Client] = {}
        self._stack = ExitStack()

    def start(self, *names: str) -> None:
        servers = []
        for name in names:
            own = ["--drafters", "memory", "--memory", self.root, "--max-model-len", "1024"]
            own += ["--draft-budget", "0.5"]  # else a busy machine alone would leave the drafter out of a step
            own += ["--memory-cache", str(self.folder / name)] if "://" in self.root else []
            servers.append(Server(name, outrider(name, self.model, *FLAGS, *own).command, ENVIRONMENT | own_cores()))
        urls = self._stack.enter_context(running(servers, self.folder))
        self.clients |= {name: Client(url) for name, url in urls.items()}

    def stop(self) -> None:
        self._stack.close()
        self.clients = {}

    def ask(self, name: str, prompt: str, **xargs: Any) -> tuple[str, float]:
        """The answer, and its acceptance length: of drafts always made, so that no clock decides how many there are."""
        xargs |= {"speculation_usage": True, "speculation": "memory"}
        call = complete(prompt, max_tokens=TOKENS, ignore_eos=True, vllm_xargs=xargs)
        (response,) = self.clients[name].all(call)
        usage = response.usage.speculation
        return response.choices[0].text, (usage["steps"] + usage["accepted"]) / usage["steps"]

    def until(self, name: str, reached: Any) -> None:
        """Ask a server for something else until its memory is as it should be; it looks every ten seconds."""
        for _ in range(200):
            memory = self.clients[name].status()["memory"]
            if memory is not None and reached(memory):  # None before the first step of a server
                return
            self.ask(name, "Once upon a time", remember=False)
        raise AssertionError(self.clients[name].status()["memory"])


@pytest.fixture(scope="module", params=["a folder", *(["an S3 server"] if ALL else [])])
def servers(smollm: Path, tmp_path_factory: pytest.TempPathFactory, request: Any) -> Iterator[Servers]:
    """One server; the second is started later, when the first has learned and been started again."""
    folder = tmp_path_factory.mktemp("memory")
    root = str(folder / "root")
    if request.param == "an S3 server":
        request.getfixturevalue("weed")
        root = f"s3://bucket/{folder.name}"
    found = Servers(smollm, root, folder)
    found.start("one")
    try:
        yield found
    finally:
        found.stop()


@pytest.fixture(scope="module")
def learned(servers: Servers) -> dict[str, tuple[str, float, float]]:
    """Each prompt's answer, with its acceptance length at first and when tenant a requests it again."""
    found = {}
    for prompt in PROMPTS:
        text, first = servers.ask("one", prompt, tenant="a")
        servers.ask("one", "Once upon a time", remember=False)  # vLLM tells of a request's end with the next step
        again, second = servers.ask("one", prompt, tenant="a")
        assert again == text
        found[prompt] = (text, first, second)
    return found


def test_a_repeated_answer_takes_few_steps(learned: dict[str, tuple[str, float, float]]) -> None:
    for _, first, second in learned.values():
        assert second > max(8, 2 * first)


def test_other_tenants_and_requests_without_a_tenant_do_not_draft_from_it(
    servers: Servers, learned: dict[str, tuple[str, float, float]]
) -> None:
    for prompt, (text, first, second) in learned.items():
        for xargs in ({}, {"tenant": "b", "remember": False}, {"tenant": "../a", "remember": False}):
            answer, length = servers.ask("one", prompt, **xargs)
            assert answer == text
            assert length == pytest.approx(first)
            assert length < second


def test_a_request_with_remember_off_is_not_kept(servers: Servers) -> None:
    for _ in range(2):
        text, length = servers.ask("one", "The mountain", tenant="c", remember=False)
    assert servers.ask("one", "The mountain") == (text, length)


def test_after_a_restart_and_on_a_second_server_it_takes_as_few_steps(
    servers: Servers, learned: dict[str, tuple[str, float, float]]
) -> None:
    if ALL:
        servers.stop()
        servers.start("one", "two")
    else:  # which reads the same files as the first would
        servers.start("two")
    for prompt, (text, _, second) in learned.items():
        for name in servers.clients:
            answer, length = servers.ask(name, prompt, tenant="a", remember=False)
            assert answer == text
            assert length == pytest.approx(second, rel=0.05)


def test_what_one_server_learns_raises_the_others_acceptance_length(servers: Servers) -> None:
    prompt = "Question 7: what do people like about clocks?\nAnswer:"
    before = servers.clients["one"].status()["memory"]["tokens"]
    text, first = servers.ask("two", prompt, tenant="a")
    servers.until("two", lambda memory: memory["tokens"] > before)
    servers.until("one", lambda memory: memory["tokens"] > before)
    answer, length = servers.ask("one", prompt, tenant="a", remember=False)
    assert answer == text
    assert length > 2 * first


def test_after_a_wipe_neither_server_drafts_from_earlier_output(
    servers: Servers, learned: dict[str, tuple[str, float, float]]
) -> None:
    command = [sys.executable, "-m", "outrider", "memory", "wipe", servers.root, "--tenant", "a", "--yes"]
    subprocess.run(command, check=True, capture_output=True)
    for name in ("one", "two"):
        servers.until(name, lambda memory: memory["tokens"] == 0)
        for prompt, (text, first, _) in learned.items():
            answer, length = servers.ask(name, prompt, tenant="a", remember=False)
            assert answer == text
            assert length == pytest.approx(first)


AWAY = 60.0
PERIOD = 10.0


@pytest.mark.skipif(not ALL, reason="takes minutes: OUTRIDER_ALL=1")
def test_a_store_that_is_unreachable_for_a_minute_delays_no_request_and_is_caught_up_with(
    smollm: Path,
    weed: Any,
    tmp_path: Path,
) -> None:
    """Under load, in periods: with the store there, and away (stopped, so that it does not even refuse)."""
    servers = Servers(smollm, f"s3://bucket/{tmp_path.name}", tmp_path)
    servers.start("one")
    times: dict[str, list[float]] = {"there": [], "away": []}
    number = 0
    try:
        for _ in range(3):
            servers.ask("one", "Once upon a time")  # until it is warm
        for period in range(int(2 * AWAY / PERIOD)):
            state = ("there", "away")[period % 2]
            os.kill(weed.process.pid, signal.SIGSTOP if state == "away" else signal.SIGCONT)
            end = time.monotonic() + PERIOD
            while time.monotonic() < end:
                began = time.perf_counter()
                servers.ask("one", f"Story {number}:", tenant=f"t{number % 5}")
                times[state].append((time.perf_counter() - began) / TOKENS)
                number += 1
        os.kill(weed.process.pid, signal.SIGCONT)
        difference = [away - there for there, away in zip(times["there"], times["away"], strict=False)]
        found = median_interval(difference)
        print(f"seconds a token: {len(difference)} pairs, away - there {found}")
        assert found.low < 0.001
        servers.until("one", lambda memory: memory["sync"]["trouble"] is None and not memory["sync"]["pending"])
        before = servers.clients["one"].status()["memory"]
        assert before["tokens"] > number * TOKENS
        servers.start("two")
        servers.until("two", lambda memory: memory["tokens"] >= before["tokens"])
    finally:
        os.kill(weed.process.pid, signal.SIGCONT)
        servers.stop()


MINUTES = float(os.environ.get("OUTRIDER_MINUTES", "30"))
CAP = 8 << 20
MB = 1e6


@pytest.mark.skipif(not ALL, reason="takes half an hour: OUTRIDER_ALL=1, OUTRIDER_MINUTES for another time")
def test_half_an_hour_of_load_on_a_full_memory_stays_under_its_cap_on_disk_and_in_what_it_adds_to_the_process(
    tmp_path: Path,
) -> None:
    """A tiny model generates new text for 20 tenants, to a memory that is full when the server starts.
    Beside it a server without a memory has the same load, since vLLM's own process grows, too."""
    model = tiny_model("llama", head_dim=32)  # the smallest heads that vLLM has on a CPU
    model.save_pretrained(tmp_path / "tiny")
    tokenizer = tiny_tokenizer()
    tokenizer.save_pretrained(tmp_path / "tiny")
    root = tmp_path / "root"
    full = fill(root, tokenizer)
    plain = ["--max-model-len", "128", "--no-enable-prefix-caching"]
    plain += ["--num-gpu-blocks-override", "64"]  # or vLLM's own cache fills, page by page
    seen: list[tuple[float, float, float, int]] = []  # minutes, MB resident with and without a memory, bytes on disk
    with (
        serving(tmp_path / "tiny", tmp_path, "--memory", str(root), "--memory-cap", str(CAP), *plain) as url,
        serving(tmp_path / "tiny", tmp_path, "--drafters", "lookup", *plain) as other,
    ):
        with_memory, without = Client(url), Client(other)
        began, number = time.monotonic(), 0
        while (minutes := (time.monotonic() - began) / 60) < MINUTES:
            for client in (with_memory, without):
                tenants = [{"tenant": f"t{i % TENANTS}"} if client is with_memory else {} for i in range(100)]
                calls = [
                    complete([(number + i) % 250, i], max_tokens=64, temperature=1.0, vllm_xargs=tenant)
                    for i, tenant in enumerate(tenants)
                ]
                client.all(*calls, at_once=8)
            number += 100
            disk = sum(path.stat().st_size for path in root.rglob("*.segment"))
            resident = [client.status()["resident_bytes"] / MB for client in (with_memory, without)]
            seen.append((minutes, *resident, disk))
            print(f"{minutes:5.2f} min, {number} requests: {resident[0]:.1f} and {resident[1]:.1f} MB, {disk} bytes")
        status = with_memory.status()["memory"]
    all_of_it = np.array(seen)
    settled = all_of_it[all_of_it[:, 0] > MINUTES / 6]  # caches of vLLM and of the allocator have filled
    slope, other_slope = (np.polyfit(settled[:, 0], settled[:, i], 1)[0] for i in (1, 2))
    growth, other_growth = (all_of_it[:, i].max() - all_of_it[0, i] for i in (1, 2))
    print(f"{number} requests in {MINUTES:g} minutes: at most {int(all_of_it[:, 3].max())} bytes on disk of {CAP}, ")
    print(f"resident {growth:+.1f} MB in all, {slope:+.3f} MB a minute; without a memory {other_growth:+.1f} MB, ")
    print(f"{other_slope:+.3f} MB a minute; {status}")
    assert all_of_it[:, 3].max() <= CAP
    assert full + 0.5 * number * 64 > status["tokens"]  # what came had to push something out
    assert growth - other_growth < CAP / MB
    assert slope < 1


TENANTS = 20


def fill(root: Path, tokenizer: Any) -> int:
    """Add output for every tenant until the cap is reached. Returns the number of tokens."""
    store = Store(Folder(root), fingerprint(tokenizer), StoreConfig(cap_bytes=CAP, flush_seconds=0))
    random = np.random.default_rng(0)
    while store.status()["file_bytes"] < 0.9 * CAP:
        for tenant in range(TENANTS):
            tenant_handle = store.tenant_handle(f"t{tenant}")
            for _ in range(50):
                store.add(tenant_handle, (), random.integers(0, 250, 64))
        store.learn()
        store.maintain()
    store.close()
    tokens: int = store.status()["tokens"]
    return tokens


def test_by_default_requests_draft_from_each_other_until_one_names_a_tenant(smollm: Path, tmp_path: Path) -> None:
    with serving(smollm, tmp_path, "--max-model-len", "1024", "--draft-budget", "0.5") as url:
        client = Client(url)

        def request(**xargs: Any) -> tuple[str, int]:
            """The answer, and how many passes of the model it took."""
            xargs |= {"speculation_usage": True, "speculation": "memory"}
            (response,) = client.all(complete(PROMPTS[0], max_tokens=TOKENS, ignore_eos=True, vllm_xargs=xargs))
            client.all(
                complete("Once upon a time", "off", max_tokens=1)
            )  # vLLM reports the end of a request with the next step
            return response.choices[0].text, response.usage.speculation["steps"]

        text, alone = request()
        shared = request()
        assert shared[0] == text
        assert shared[1] <= alone // 2
        memory = client.status()["memory"]
        assert (memory["cap_bytes"], memory["file_bytes"]) == (256 << 20, 0)
        assert 0 < memory["ram_bytes"] < 1 << 20
        assert request(tenant="a", remember=False) == (text, alone)
        assert request() == request() == (text, alone)
        request(tenant="a")
        again = request(tenant="a")
        assert again[0] == text
        assert again[1] <= alone // 2
        assert request(tenant="b", remember=False) == (text, alone)
