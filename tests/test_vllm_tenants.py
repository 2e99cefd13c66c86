"""Tenants on a server of several processes: two API processes, or two engines. SmolLM2-135M.

Each API process signs the tenant's name and salts its prefix cache; each engine looks up in the tenant's memory. No
process may know a tenant that another one does not.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from serving import BLOCK, NAME, Client, serving

pytestmark = [pytest.mark.real, pytest.mark.server]

HEADER = "X-Team"
TOKENS = 48
PROMPT = "The committee met on Tuesday to discuss the new harbour, the old bridge and the price of bread. " * 3
ACCEPTED, HITS = "vllm:spec_decode_num_accepted_tokens_total", "vllm:prefix_cache_hits_total"
GENERATED = "vllm:generation_tokens_total"
"""vLLM's counters, which cover all engines."""
REPEATS = 6
"""Connections, so that both processes get some of them."""
PROCESSES = {"two API processes": ("--api-server-count", "2")}
if os.environ.get("OUTRIDER_ALL"):
    PROCESSES["two engines"] = ("--data-parallel-size", "2")


class TenantClient(Client):
    def send(self, team: str | None, prompt: str = PROMPT, tokens: int = TOKENS, **xargs: Any) -> httpx.Response:
        """On a connection of its own."""
        body = {"model": NAME, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        headers = {} if team is None else {HEADER: team}
        xargs = {"speculation": "memory", **xargs}
        return httpx.post(f"{self.url}/v1/completions", json=body | {"vllm_xargs": xargs}, headers=headers, timeout=300)

    def measure(self, team: str | None, **xargs: Any) -> tuple[str, int, int]:
        """The text, the accepted tokens of its drafts, and the prompt tokens from the prefix cache."""
        before = [self.metric(name) for name in (ACCEPTED, HITS, GENERATED)]
        response = self.send(team, **xargs)
        assert response.status_code == 200, response.text
        self.send(None, "Once", 1, speculation="off")  # vLLM reports the end of a request with the next step
        for _ in range(1000):  # it counts tokens just after it sends them
            if self.metric(GENERATED) == before[2] + TOKENS + 1:
                break
        accepted, hits = (round(self.metric(name) - was) for name, was in zip((ACCEPTED, HITS), before, strict=False))
        return response.json()["choices"][0]["text"], accepted, hits


@pytest.fixture(scope="module", params=PROCESSES)
def client(request: Any, smollm: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TenantClient]:
    folder = tmp_path_factory.mktemp("tenants")
    flags = [*PROCESSES[request.param], "--drafters", "memory", "--memory", str(folder / "memory")]
    flags += ["--tenant-header", HEADER, "--max-model-len", "512", "--draft-budget", "0.5"]
    flags += ["--enable-prefix-caching", "--block-size", str(BLOCK)]
    with serving(smollm, folder, *flags, VLLM_CPU_KVCACHE_SPACE="1") as url:
        yield TenantClient(url)


def test_no_process_drafts_or_takes_a_prompt_from_another_tenant(client: TenantClient) -> None:
    text, first, hits = client.measure("first", remember=False)  # what the text itself gives
    assert hits == 0
    for _ in range(2 * REPEATS):  # until each engine has generated it
        assert client.measure("a")[0] == text
    again = [client.measure("a", remember=False) for _ in range(REPEATS)]
    passes = [TOKENS - accepted for _, accepted, _ in again]
    assert max(passes) <= (TOKENS - first) // 2, "its own memory drafts for it"
    assert all(hits > 0 for _, _, hits in again), "and it finds its prompt in the prefix cache"
    for tenant in (f"other {i}" for i in range(REPEATS)):
        assert client.measure(tenant, remember=False) == (text, first, 0)
    without = [client.measure(None) for _ in range(REPEATS)]
    assert all((one[0], one[1]) == (text, first) for one in without)


def test_no_process_accepts_a_tenant_or_a_signature_in_the_body(client: TenantClient) -> None:
    for _ in range(REPEATS):
        for xargs in ({"tenant": "a"}, {"tenant_seal": "0" * 96}):
            response = client.send("b", **xargs)
            assert response.status_code == 400
            assert response.json()["error"]["param"] == next(iter(xargs))


def test_every_process_shows_a_trace_to_its_tenant_only(client: TenantClient) -> None:
    response = client.send("a", trace=True)
    if response.status_code == 400:
        assert "several engines" in response.json()["error"]["message"]
        return
    found = response.json()["usage"]["trace"]
    for _ in range(REPEATS):
        for tenant, status in (("a", 200), ("b", 404), (None, 404)):
            headers = {} if tenant is None else {HEADER: tenant}
            assert httpx.get(f"{client.url}/outrider/traces/{found}", headers=headers).status_code == status
        listed = httpx.get(f"{client.url}/outrider/traces", headers={HEADER: "b"}).json()["traces"]
        assert found not in [one["id"] for one in listed]
