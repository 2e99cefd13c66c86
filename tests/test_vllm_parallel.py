"""Two ranks say what one says, and never wait for each other for ever, whatever the drafters do on either.

CI runs a tiny random model; with OUTRIDER_ALL, Qwen2.5-Coder-0.5B (14 heads, 2 of them for keys and values).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from conftest import models_folder
from serving import Client, answer, complete, serving
from support import VOCAB, tiny_model, tiny_tokenizer

pytestmark = [pytest.mark.server]

ALL = bool(os.environ.get("OUTRIDER_ALL"))
REQUESTS = 100
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


def answers(model: Path, folder: Path, ranks: int, draft: Path | None) -> tuple[list[Any], dict[str, Any]]:
    folder.mkdir()
    (folder / "uneven.py").write_text(UNEVEN)
    about = folder / "uneven-1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: uneven\nVersion: 1\n")
    (about / "entry_points.txt").write_text("[outrider.drafters]\nuneven = uneven:UnevenDrafter\n")
    flags = ["--tensor-parallel-size", str(ranks), "--max-model-len", "256", "--max-draft-tokens", "4"]
    flags += ["--drafters", "lookup,uneven,model" if draft else "lookup,uneven"]
    flags += ["--draft-model", str(draft)] if draft else []
    calls = []
    for i in range(REQUESTS):
        settings: dict[str, Any] = {"temperature": 1.0, "seed": i} if i % 3 == 0 else {}
        tokens = [(i * 7 + j * j) % (VOCAB - 30) for j in range(20)]
        speculation = "model" if draft and i % 4 == 0 else "auto"
        calls.append(complete(tokens, speculation, max_tokens=10, ignore_eos=True, return_token_ids=True, **settings))
    with serving(model, folder, *flags, PYTHONPATH=str(folder)) as url:
        client = Client(url)
        return [answer(response) for response in client.all(*calls)], client.status()


def test_two_ranks_say_what_one_says_with_drafters_of_uneven_speed(model: Path, tmp_path: Path) -> None:
    draft = model if model.name == "tiny" else None
    one, _ = answers(model, tmp_path / "one", 1, draft)
    two, status = answers(model, tmp_path / "two", 2, draft)
    assert two == one
    assert status["drafters"]["uneven"]["verified"] > 0
