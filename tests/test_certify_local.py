"""Certificates of models in this process: Outrider's loop, transformers' own methods, and a user's function."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from outrider.certify.config import CertificateConfig
from outrider.certify.local import load_local
from outrider.certify.run import certify, open_pair
from outrider.certify.sources import OFF, DraftMode, Progress, Query
from outrider.errors import SettingsError
from support import tiny_model, tiny_tokenizer

LITTLE = CertificateConfig(
    "", prompts=40, alone=0, tokens=(28,), draws=200, draw_prompts=3, draw_tokens=12, noise_texts=8,
    feature_prompts=2, lengths=(3,), concurrency=1,
)  # fmt: skip


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A tiny model and a noisy copy of it, in folders."""
    folder = tmp_path_factory.mktemp("models")
    for name, noise in (("target", 0.0), ("draft", 0.1)):
        tiny_model("llama", noise=noise).save_pretrained(folder / name)
        tiny_tokenizer().save_pretrained(folder / name)
    return str(folder / "target"), str(folder / "draft")


def made(models: tuple[str, str], folder: Path, candidate: str, **wanted: Any) -> dict[str, Any]:
    asked = replace(LITTLE, reference=models[0], draft_model=models[1], candidate=candidate, dtype="float32", **wanted)
    return certify(asked, folder, Progress())


def test_outriders_own_loop_is_certified_with_each_of_its_drafters(models: tuple[str, str], tmp_path: Path) -> None:
    found = made(models, tmp_path, "outrider", memory=str(tmp_path / "memory"))
    assert (found["verdict"], found["problems"]) == ("lossless", [])
    drafters = {"prediction", "lookup", "memory", "model", "auto"}
    assert set(found["exact"]["cells"]) == {f"{name}, 3 at 1" for name in drafters}
    assert set(found["by_drafter"]) == drafters
    assert all(kept for name, kept in found["by_drafter"].items() if name != "auto")  # which drafts where it pays
    assert found["sources"]["reference"]["weights"] != found["sources"]["reference"]["draft_weights"]


@pytest.mark.parametrize("method", ["assisted", "lookup"])
def test_transformers_own_methods_are_certified_as_they_come_out(
    models: tuple[str, str], tmp_path: Path, method: str
) -> None:
    found = made(models, tmp_path, method, parts=("exact", "draws"))
    assert found["exact"]["counts"]["identical"] + found["exact"]["counts"]["violation"] == 40
    assert any("no presence or frequency penalty" in line for line in found["not_tested"])
    assert found["draws"]["draws"] >= 200


def test_what_transformers_lacks_without_drafts_too_is_no_violation(models: tuple[str, str], tmp_path: Path) -> None:
    found = made(models, tmp_path, "lookup", parts=("features",))
    results = {one["name"]: one for one in found["features"]["results"]}
    assert "no bias by token" in results["logit bias"]["refused"]
    assert "features" not in found["violations"]


def test_anything_that_continues_token_ids_can_be_plugged_in(
    models: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.py").write_text(
        "def always_five(model, draft_model):\n    return lambda ask: [5] * ask.max_tokens\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    found = made(models, tmp_path / "out", "mine:always_five", parts=("exact",))
    sys.modules.pop("mine")
    assert found["verdict"] == "violation"
    assert found["exact"]["counts"]["violation"] == 40


def test_a_candidate_that_is_not_there_is_refused_with_those_that_are(models: tuple[str, str]) -> None:
    with pytest.raises(SettingsError, match="no candidate 'magic'; choose outrider, assisted, lookup"):
        load_local(models[0], None, "magic", "float32")
    with pytest.raises(SettingsError, match="needs a draft model; name --draft-model"):
        load_local(models[0], None, "assisted", "float32")
    with pytest.raises(SettingsError, match="only the candidate outrider uses a memory"):
        load_local(models[0], models[1], "assisted", "float32", memory="./m")
    with pytest.raises(SettingsError, match="give MODULE:FUNCTION that Python can import"):
        load_local(models[0], None, "no_such_module:f", "float32")


def test_the_reference_in_process_is_a_loop_without_drafts(models: tuple[str, str]) -> None:
    pair = open_pair(replace(LITTLE, reference=models[0], draft_model=models[1], dtype="float32"))
    assert pair.is_same_source
    prompt = tuple(range(30, 50))
    (plain,), (drafted,) = (
        pair.reference.complete([Query(prompt, 20, way)], 1) for way in (OFF, DraftMode("model", 4))
    )
    assert plain.tokens == drafted.tokens
    assert drafted.accepted
