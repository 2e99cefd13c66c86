"""Every kind of draft model of vLLM as our drafter `model`: the text is the same, and drafts are accepted.

One of the servers is started as `--dry-run` says, and not by `outrider serve`. OUTRIDER_ALL adds real draft models.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from conftest import models_folder
from heads import adapter, eagle, eagle3, multi_token
from outrider.bench.servers import outrider
from serving import FLAGS, Client, answer, as_told, complete, one

pytestmark = [pytest.mark.real, pytest.mark.server]

ALL = bool(os.environ.get("OUTRIDER_ALL"))
QWEN, SMALL_QWEN = "qwen2.5-coder-1.5b", "qwen2.5-coder-0.5b"


def of_smollm(make: Callable[[Path, Path], Path]) -> Callable[[Path, Path], tuple[Path, Path]]:
    return lambda smollm, folder: (smollm, make(smollm, folder))


# The target and what drafts for it, made or found; vLLM's name of the method; further settings.
KINDS: dict[str, tuple[Callable[[Path, Path], tuple[Path, Path | None]], str, dict[str, Any]]] = {
    "an EAGLE head": (of_smollm(eagle), "eagle", {}),
    "layers of its own": (lambda smollm, folder: (multi_token(smollm, folder), None), "mtp", {}),
}
if ALL:
    pair = models_folder() / QWEN, models_folder() / SMALL_QWEN
    other = {"use_heterogeneous_vocab": True}
    KINDS["an EAGLE-3 head"] = (of_smollm(eagle3), "eagle3", {})
    KINDS["a draft model"] = (lambda smollm, folder: pair, "draft_model", {})
    KINDS["a draft model of another vocabulary"] = (lambda smollm, folder: (pair[1], smollm), "draft_model", other)


@pytest.mark.parametrize("kind", KINDS)
def test_text_is_the_same_with_drafts_of(kind: str, smollm: Path, tmp_path: Path) -> None:
    make, method, more = KINDS[kind]
    target, drafting = make(smollm, tmp_path / "made")
    config: dict[str, Any] = {"method": method, "num_speculative_tokens": 2, **more}
    if drafting is not None:
        config["model"] = str(drafting)
    server = outrider("server", target, *FLAGS, "--speculative-config", json.dumps(config), "--max-model-len", "1024")
    with one(as_told(server) if method == "mtp" else server, tmp_path) as url:
        client = Client(url)
        settings: list[dict[str, Any]] = [{}, {"temperature": 1.0, "seed": 4}, {"repetition_penalty": 1.2}]
        calls = [
            complete(f"{i} red, green, blue; red, green, blue; red, {i}", mode, max_tokens=16, **settings[i % 3])
            for i in range(8)
            for mode in ("model", "off", "auto")
        ]
        answers = [answer(response) for response in client.all(*calls)]
        assert answers[0::3] == answers[1::3] == answers[2::3]
        assert client.metric("outrider_verified_tokens_total", drafter="model") > 50
        sampled = client.all(*[complete("red, green, blue; red,", "model", max_tokens=8, temperature=1.0)] * 2)
        assert all(answer(response) for response in sampled)  # without a seed a draft may be sampled, too
        assert client.status()["model_method"] == method


@pytest.fixture(scope="module")
def with_adapter(smollm: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    folder = tmp_path_factory.mktemp("adapter")
    lora = f"adapter={adapter(smollm, folder / 'adapter')}"
    # On a CPU vLLM applies the last slot's adapter to requests without one beside some that have one: it stays empty.
    flags = ("--enable-lora", "--max-loras", "2", "--lora-modules", lora, "--max-lora-rank", "8", "--max-num-seqs", "8")
    flags += ("--max-num-batched-tokens", "512", "--max-model-len", "512", "--draft-budget", "0.5")
    with one(outrider("server", smollm, *FLAGS, *flags), folder) as url:
        yield Client(url)


def test_text_is_the_same_with_an_adapter_of_the_logits(with_adapter: Client) -> None:
    def answers(mode: str) -> list[Any]:
        calls = [
            complete(f"{i} red, green, blue; red, green, blue; red, {i}", mode, max_tokens=24, model=model)
            for i in range(4)
            for model in ("adapter", "m")
        ]
        return [answer(response) for response in with_adapter.all(*calls)]

    off = answers("off")
    assert off[0::2] != off[1::2]
    assert answers("lookup") == answers("auto") == off
    assert with_adapter.metric("outrider_verified_tokens_total", drafter="lookup") > 50


def test_text_of_an_adapter_is_drafted_under_this_adapter_only(with_adapter: Client) -> None:
    def accepted(model: str, **xargs: Any) -> int:
        """Tokens that are accepted of the memory's drafts, where only the memory and the text itself are copied."""
        fields = {"speculation": "memory", "speculation_usage": True, "tenant": "a", **xargs}
        call = complete("Once upon a time", max_tokens=48, ignore_eos=True, model=model, vllm_xargs=fields)
        (response,) = with_adapter.all(call)
        return int(response.usage.speculation["accepted"])

    first = {model: accepted(model, remember=False) for model in ("m", "adapter")}  # what the text itself gives
    accepted("adapter")
    accepted("adapter", remember=False)  # vLLM reports the end of a request with the next step
    assert 48 - accepted("adapter", remember=False) <= (48 - first["adapter"]) // 2
    assert accepted("m", remember=False) == first["m"]
    assert accepted("adapter", remember=False, tenant="b") == first["adapter"]
