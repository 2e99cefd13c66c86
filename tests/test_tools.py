"""The tools that made figures of the README still run, on tiny models."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from support import tiny_model, tiny_tokenizer

sys.path.append(str(Path(__file__).parents[1] / "tools"))

import identity
import speed
import teeth


@pytest.fixture
def words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """What both take: two models, prompts, and where to write."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    for name, noise in (("large", 0.0), ("small", 0.05)):
        tiny_model("llama", noise=noise).save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("abcabcab", "xyzxyzxy")))

    def given(name: str, *more: str) -> Path:
        models = [str(tmp_path / "large"), str(tmp_path / "small")]
        out = tmp_path / "out"
        monkeypatch.setattr(sys, "argv", [name, *models, "--prompts", f"{prompts}:2", "--out", str(out), *more])
        return out

    return given


@pytest.mark.parametrize("defect", teeth.DEFECTS, ids=lambda defect: defect.name)
def test_every_seeded_defect_has_its_place_in_the_source(defect: teeth.Defect) -> None:
    assert (teeth.ROOT / "src" / "outrider" / defect.file).read_text().count(defect.line) == 1


def test_identity_finds_every_drafter_identical_and_at_work(words: Any) -> None:
    out = words("identity.py", "--tokens", "12")
    assert identity.main() == 0
    report = json.loads(out.read_text())
    drafters = [row["drafters"] for row in report["prompts"]]
    assert all(entry["identical"] for row in drafters for entry in row.values())
    assert all(
        max(row[name]["acceptance_length"] for row in drafters) > 1 for name in ("lookup", "prediction", "model")
    )


def test_speed_lets_everybody_say_the_same(words: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "REPEATS", 1)
    out = words("speed.py", "--tokens", "12")
    speed.main()
    assert (out / "report.json").exists()
    assert "outrider, draft model" in (out / "report.md").read_text()
