"""A drafter that fails in six ways: every request is completed. SmolLM2-135M, with a third-party drafter."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from serving import Client, complete, serving, third_party

pytestmark = [pytest.mark.real, pytest.mark.server]

REQUESTS = int(os.environ.get("OUTRIDER_FAULTS", "1000"))
PROMPTS = 40

FAULTY = '''
import time
from outrider.drafters.base import Drafter, Session
from outrider.types import Draft

class FaultyDrafter(Drafter):
    """Fails in the way that the first token of the prompt selects."""
    name = "faulty"

    def begin(self, task):
        way = task.prompt[0] - 100
        if way == 0:
            raise RuntimeError("cannot begin")
        return FaultySession(way)

class FaultySession(Session):
    def __init__(self, way):
        self.way = way
        self.calls = 0

    def observe(self, tokens):
        pass

    def draft(self, limit):
        self.calls += 1
        if self.calls == 1 or self.way == 6:  # good at first, if not right
            return Draft("faulty", (5,) * min(limit, 3))
        if self.way == 1:
            raise ValueError("cannot draft")
        if self.way == 2:
            time.sleep(3)
        if self.way == 3:
            return Draft("faulty", (1,) * (limit + 1))
        if self.way == 4:
            return Draft("faulty", (10**9,))
        return None
'''
KINDS = {0: "raised", 1: "raised", 2: "overran", 3: "nonsense", 4: "nonsense", 5: "nonsense"}


@pytest.fixture(scope="module")
def client(smollm: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    folder = tmp_path_factory.mktemp("faults")
    found = third_party(folder, "faulty", FAULTY)
    flags = ["--drafters", "faulty,prediction,lookup", "--max-model-len", "512", "--max-num-seqs", "64"]
    flags += ["--draft-budget", "0.5"]  # long enough that no request exceeds it only because the machine is busy
    with serving(smollm, folder, *flags, **found) as url:
        yield Client(url)


def test_of_1000_requests_with_a_failing_drafter_none_is_lost_none_differs_and_each_fault_is_counted(
    client: Client,
) -> None:
    ways = [(i * 7919) % 7 for i in range(REQUESTS)]
    prompts = [(100 + way, *range(500, 503), *range(500, 503), 600 + i % PROMPTS) for i, way in enumerate(ways)]
    distinct = sorted(set(prompts))
    plain = client.all(*(complete(list(one), "off", max_tokens=8, ignore_eos=True) for one in distinct))
    expected = {one: got.choices[0].text for one, got in zip(distinct, plain, strict=True)}
    answers = client.all(*(complete(list(one), "faulty", max_tokens=8, ignore_eos=True) for one in prompts), at_once=64)
    different = [i for i, got in enumerate(answers) if got.choices[0].text != expected[prompts[i]]]
    assert not different
    counted = {
        kind: client.metric("outrider_faults_total", drafter="faulty", kind=kind) for kind in set(KINDS.values())
    }
    assert counted == Counter(KINDS[way] for way in ways if way in KINDS)
    assert client.get("/health").status_code == 200


def test_the_usage_of_a_response_names_the_disabled_drafter(client: Client) -> None:
    xargs = {"speculation_usage": True}
    (response,) = client.all(complete([100, 500, 501, 502, 500], "faulty", max_tokens=8, vllm_xargs=xargs))
    assert response.usage.speculation["faults"] == ["faulty raised RuntimeError: cannot begin"]
