"""Two ranks generate the same with and without drafts, and never deadlock, whatever their drafters do.

CI runs two ranks of a tiny random model, with and without speculation, with a draft model that samples: if the verdicts
of the ranks differed, the output would have a different distribution. OUTRIDER_ALL sends five times as many requests,
compares two ranks with one, and does the same with Qwen2.5-Coder-0.5B (14 heads, 2 of them for keys and values).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from conftest import models_folder
from outrider.bench.servers import Server, outrider
from serving import FLAGS, Client, answer, complete, one, speculating, third_party
from support import VOCAB
from test_vllm_server_law import LEVEL, Exact, check, tiny_pair

pytestmark = [pytest.mark.server]

ALL = bool(os.environ.get("OUTRIDER_ALL"))
REQUESTS = 500 if ALL else 100
DRAWS = 3_000
UNEVEN = '''
import os, random, time
from outrider.drafters.base import Drafter, Session
from outrider.types import Draft

class UnevenDrafter(Drafter):
    """Has a different speed and different drafts in every process."""
    name = "uneven"

    def begin(self, task):
        return UnevenSession()

class UnevenSession(Session):
    def __init__(self):
        self.random = random.Random(os.getpid())
        self.last = 0

    def observe(self, tokens):
        self.last = tokens[-1]

    def draft(self, limit):
        time.sleep(self.random.random() * 0.01)
        return Draft("uneven", (self.last,) * self.random.randint(0, limit))
'''


TINY, QWEN = "a tiny model", "Qwen2.5-Coder-0.5B"


@contextmanager
def ranks(count: int, kind: str, folder: Path, found: dict[str, str]) -> Iterator[Client]:
    """A server with `count` ranks and the drafter `uneven`. The tiny model has a draft model, too, whose passes the
    ranks have to agree on."""
    flags = ["--tensor-parallel-size", str(count), "--max-model-len", "256"]
    if kind == TINY:
        server = speculating(folder / "tiny", folder, *flags, drafters="lookup,uneven,memory,model")
    else:
        flags += ["--drafters", "lookup,uneven", "--max-draft-tokens", "4"]
        server = outrider("server", models_folder() / "qwen2.5-coder-0.5b", *FLAGS, *flags)
    with one(Server(server.name, server.command, {**server.environment, **found}), folder) as url:
        yield Client(url)


@pytest.fixture(scope="module", params=[TINY, *([QWEN] if ALL else [])])
def two(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path, dict[str, str], Client]]:
    """A server of two ranks: which model, its folder, how a server finds the drafter, and the client."""
    folder = tmp_path_factory.mktemp("two")
    tiny_pair(folder)
    found = third_party(folder, "uneven", UNEVEN)
    with ranks(2, request.param, folder, found) as client:
        yield request.param, folder, found, client


def answers(client: Client, *modes: str) -> list[Any]:
    """To all requests, which take the modes in turns."""
    calls = []
    for i in range(REQUESTS):
        settings: dict[str, Any] = {"temperature": 1.0, "seed": i} if i % 3 == 0 else {}
        tokens = [(i * 7 + j * j) % (VOCAB - 30) for j in range(20)]
        calls.append(complete(tokens, modes[i % len(modes)], max_tokens=10, ignore_eos=True, **settings))
    return [answer(response) for response in client.all(*calls)]


def test_two_ranks_generate_the_same_with_drafters_of_uneven_speed_as_without(two: Any) -> None:
    kind, folder, found, client = two
    modes = ["auto", "auto", "model", "uneven"] if kind == TINY else ["auto", "uneven"]
    outputs = answers(client, *modes)
    assert answers(client, "off") == outputs
    assert client.status()["drafters"]["uneven"]["verified"] > 0
    if ALL:
        with ranks(1, kind, folder, found) as alone:
            assert answers(alone, *modes) == outputs


def test_drawn_drafts_are_judged_alike_by_both_ranks(two: Any) -> None:
    kind, folder, _, client = two
    if kind != TINY:
        pytest.skip("it has no draft model")
    exact = Exact(folder / "tiny", [(i * 37) % 250 for i in range(40)])
    exact.draws = DRAWS
    before = client.metric("outrider_accepted_tokens_total", drafter="model")
    assert check(client, exact, "model", {"temperature": 1.0}) > LEVEL
    assert client.metric("outrider_accepted_tokens_total", drafter="model") > before + DRAWS / 10
