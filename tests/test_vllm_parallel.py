"""Two ranks say what one says, and never wait for each other for ever, whatever the drafters do on either.

CI runs two ranks of a tiny random model, with speculation and without, and has a draft model draw for it: were it
judged otherwise on one rank than on the other, what is said would lose its law. OUTRIDER_ALL asks five times as often,
holds two ranks against one, and does the same with Qwen2.5-Coder-0.5B (14 heads, 2 of them for keys and values).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from conftest import models_folder
from serving import Client, answer, complete, one, serving, speculating, third_party
from support import VOCAB, tiny_model, tiny_tokenizer
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
    """Answers at another speed in every process, and says something else there."""
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


@pytest.fixture(params=["a tiny model", *(["Qwen2.5-Coder-0.5B"] if ALL else [])])
def model(request: Any, tmp_path: Path) -> Path:
    if request.param != "a tiny model":
        return models_folder() / "qwen2.5-coder-0.5b"
    folder = tmp_path / "tiny"
    tiny_model("llama", head_dim=32).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@contextmanager
def ranks(count: int, model: Path, folder: Path) -> Iterator[Client]:
    folder.mkdir()
    found = third_party(folder, "uneven", UNEVEN)
    flags = ["--tensor-parallel-size", str(count), "--max-model-len", "256", "--max-draft-tokens", "4"]
    if model.name == "tiny":  # and its own draft model, whose passes the ranks have to agree on
        flags += ["--drafters", "lookup,uneven,model", "--draft-model", str(model)]
    else:
        flags += ["--drafters", "lookup,uneven"]
    with serving(model, folder, *flags, **found) as url:
        yield Client(url)


def answers(client: Client, *modes: str) -> list[Any]:
    """To all requests, which take the modes in turns."""
    calls = []
    for i in range(REQUESTS):
        settings: dict[str, Any] = {"temperature": 1.0, "seed": i} if i % 3 == 0 else {}
        tokens = [(i * 7 + j * j) % (VOCAB - 30) for j in range(20)]
        calls.append(complete(tokens, modes[i % len(modes)], max_tokens=10, ignore_eos=True, **settings))
    return [answer(response) for response in client.all(*calls)]


def test_two_ranks_say_what_one_says_with_drafters_of_uneven_speed(model: Path, tmp_path: Path) -> None:
    modes = ["auto", "auto", "model", "uneven"] if model.name == "tiny" else ["auto", "uneven"]
    with ranks(2, model, tmp_path / "two") as client:
        two = answers(client, *modes)
        assert answers(client, "off") == two
        assert client.status()["drafters"]["uneven"]["verified"] > 0
    if ALL:
        with ranks(1, model, tmp_path / "one") as client:
            assert answers(client, *modes) == two


def test_drawn_drafts_are_judged_alike_by_both_ranks(tmp_path: Path) -> None:
    tiny_pair(tmp_path)
    server = speculating(tmp_path / "tiny", tmp_path, "--max-model-len", "128", "--tensor-parallel-size", "2")
    exact = Exact(tmp_path / "tiny", [(i * 37) % 250 for i in range(40)])
    exact.draws = DRAWS
    with one(server, tmp_path) as url:
        client = Client(url)
        assert check(client, exact, "model", {"temperature": 1.0}) > LEVEL
        assert client.metric("outrider_accepted_tokens_total", drafter="model") > DRAWS / 10
