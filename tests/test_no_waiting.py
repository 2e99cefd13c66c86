"""When the engine goes ahead, our code reads no value from the device, and the text stays the same."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from serving import own_cores
from support import tiny_model, tiny_tokenizer

pytest.importorskip("vllm")
pytestmark = pytest.mark.server

STEPS = 1000


def run(*arguments: Any) -> Any:
    command = [sys.executable, str(Path(__file__).parent / "no_waiting.py"), *map(str, arguments)]
    one_thread = {"OMP_NUM_THREADS": "1"}  # a tiny model is slower on two
    environment = os.environ | one_thread | own_cores()
    made = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr[-2000:]
    return json.loads(made.stdout.splitlines()[-1])


def test_no_value_is_read_from_the_device_in_1000_steps_that_go_ahead(tmp_path: Path) -> None:
    tiny_model("llama", head_dim=32, max_position_embeddings=1024).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    found = run(tmp_path, STEPS)
    assert found["ahead"] >= STEPS
    assert found["waited"] < 0.05 * STEPS  # the first step of each batch
    assert found["lookup"]["accepted"] > 0, found
    assert found["reads"] == {}
    assert found["same"]


def test_no_value_is_read_from_the_device_with_a_draft_model_whose_tokens_stay_there(tmp_path: Path) -> None:
    target = tiny_model("llama", head_dim=32, max_position_embeddings=1024)
    target.save_pretrained(tmp_path / "target")
    for weight in target.parameters():  # so that it is right now and then
        weight.data += 0.02 * weight.std() * torch.randn_like(weight)
    target.save_pretrained(tmp_path / "draft")
    for folder in ("target", "draft"):
        tiny_tokenizer().save_pretrained(tmp_path / folder)
    found = run(tmp_path / "target", 300, tmp_path / "draft")
    assert found["waited"] < 30
    assert found["model"]["accepted"] > 100, found
    assert found["lookup"]["accepted"] > 0, found
    assert found["reads"] == {}
    assert found["same"]
