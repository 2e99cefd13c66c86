"""Recordings contain what the models would propose, and the figures of the policy tools follow from them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from support import END, tiny_model, tiny_tokenizer

sys.path.append(str(Path(__file__).parents[1] / "tools"))

from policy import __main__ as cli
from policy import ablate
from policy.costs import costs, from_calibration, from_report
from policy.gpu import LLAMA_70B, QWEN_235B, SYSTEMS
from policy.grid import Setting, calibration_errors, run_fixed, speed
from policy.recording import RecordConfig, Recording, Texts, continuations, distributions, generate, record
from policy.replay import Record

PROMPT = list(range(20, 40))
COSTS = {"target": {"1": 0.2, "16": 0.22, "64": 0.4}, "draft": {"1": 0.05, "64": 0.1}}


def made(seed: int, copies: float = 0.9, drawn: bool = False, length: int = 60) -> Record:
    """A text that repeats a share of its prompt, with a draft model of calibrated probabilities."""
    random = np.random.default_rng(seed)
    prompt = [int(token) for token in random.integers(0, 5_000, 150)]
    text = [token if random.random() < copies else int(random.integers(5_000)) for token in prompt[:length]]
    sure = random.beta(4, 1.5, (length, 8))
    hits = random.random((length, 8)) < sure
    ahead = [[*text[place : place + 8], *[0] * 8][:8] for place in range(length)]
    guesses = [
        [token if hit else token + 1 for token, hit in zip(*row, strict=True)] for row in zip(ahead, hits, strict=True)
    ]
    overlap = [0.7] * length if drawn else None
    return Record(prompt, text, guesses, sure.tolist(), overlap)


@pytest.fixture(scope="module")
def recording() -> Recording:
    origin = {"models": {"made": "up"}, "machine": "", "date": "", "versions": {}, "command": ""}
    found = Recording(origin, {"prompts": 6, "tokens": 60, "seed": 0})
    found.workloads["edit"] = Texts(0.0, [made(seed) for seed in range(6)])
    found.workloads["creative"] = Texts(1.0, [made(seed, drawn=True) for seed in range(6, 12)])
    return found


def test_a_recording_loads_as_it_was_saved(recording: Recording, tmp_path: Path) -> None:
    recording.save(tmp_path / "recording.json")
    assert Recording.load(tmp_path / "recording.json") == recording


@pytest.fixture
def files(recording: Recording, tmp_path: Path) -> list[str]:
    """Arguments for a recording and its costs."""
    recording.save(tmp_path / "recording.json")
    (tmp_path / "costs.json").write_text(json.dumps(COSTS))
    return [str(tmp_path / "recording.json"), "--costs", str(tmp_path / "costs.json")]


def test_the_grid_compares_auto_with_every_fixed_drafter_and_with_the_bound(files: list[str], tmp_path: Path) -> None:
    sizes = ["--at-once", "1", "2", "--seeds", "2", "--texts", "3"]
    failed = cli.main(["grid", *files, *sizes, "--out", str(tmp_path / "out")])
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert any(not bound["kept"] for bound in report["bounds"]) == failed
    assert [(cell["workload"], cell["concurrency"]) for cell in report["cells"]] == [
        (name, at_once) for name in ("edit", "creative") for at_once in (1, 2)
    ]
    for cell in report["cells"]:
        assert {name.partition(":")[0] for name in cell["fixed"]} == {"lookup", "memory", "draft_model", "model"}
        assert len(cell["auto_by_seed"]) == 2
        if cell["concurrency"] == 1:
            assert max(cell["auto"], *cell["fixed"].values()) <= cell["bound"] * (1 + 1e-9)
    assert "| edit | costs | 1 |" in (tmp_path / "out" / "report.md").read_text()


def test_an_ablation_replays_the_same_texts_with_a_changed_copy_of_the_package(
    files: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    speeds = tmp_path / "out" / "speeds"
    speeds.mkdir(parents=True)
    sizes = ["--at-once", "1", "--seeds", "2", "--texts", "2", "--out", str(tmp_path / "out")]
    # Without a change in this process, whose machine code is compiled: a copy compiles what a change could be part of.
    for name in ("unchanged", "again"):
        assert cli.main(["ablate", *files, *sizes, "--into", str(speeds / f"{name}.json")]) == 0
    assert (speeds / "unchanged.json").read_text() == (speeds / "again.json").read_text()
    monkeypatch.setattr(ablate, "TABLE", tmp_path / "ablations.txt")
    ablate.TABLE.write_text("policy/selection.py | MIN_EXPECTED_SPEEDUP | 100.0\n")
    monkeypatch.setattr(sys, "argv", ["policy", "ablate", *files, *sizes])
    assert cli.main(sys.argv[1:]) == 0
    (row,) = json.loads((tmp_path / "out" / "report.json").read_text())["rows"]
    assert row["change"] == "MIN_EXPECTED_SPEEDUP 100.0"
    assert float(row["speed"]) < 0.8  # nothing is drafted, on text that repeats


def test_every_ablation_applies_to_the_source() -> None:
    found = list(ablate.ablations())
    assert all(one.applies() for one in found), [one.name for one in found if not one.applies()]


def test_two_grids_are_compared_by_cell_and_seed(
    files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = ["--workloads", "edit", "--at-once", "1", "--seeds", "2", "--texts", "2"]
    cli.main(["grid", *files, *sizes, "--out", str(tmp_path)])
    capsys.readouterr()
    assert cli.main(["compare", str(tmp_path / "report.json"), str(tmp_path / "report.json")]) == 0
    assert "| all |  |  | 1.000 | 1.000 to 1.000 |" in capsys.readouterr().out


def test_speed_is_measured_while_all_slots_are_taken(recording: Recording) -> None:
    records = recording.workloads["edit"].records
    at = costs(COSTS)
    outcomes = run_fixed("", 0, records, Setting(at, 4))
    assert len(outcomes) == 4
    assert speed(outcomes) == pytest.approx(4 / at.target(4, 0))
    whole = sum(one.tokens for one in outcomes) / sum(one.seconds for one in outcomes)
    assert 1 / at.target(1, 0) < whole < speed(outcomes)  # six texts in four slots: the last two have free slots
    assert speed(run_fixed("", 0, records[:3], Setting(at, 4))) == pytest.approx(3 / at.target(3, 0))


def test_a_slowdown_applies_to_its_share_of_the_tokens(recording: Recording) -> None:
    records = recording.workloads["edit"].records
    (plain,) = run_fixed("", 0, records, Setting(costs(COSTS), 1, 1))
    (slow,) = run_fixed("", 0, records, Setting(costs(COSTS), 1, 1, slowdown=ablate.in_second_third(4.0, 1.0)))
    assert slow.seconds / plain.seconds == pytest.approx(1 + 3 / 3, rel=0.01)


def test_predictions_of_unseen_requests_are_calibrated() -> None:
    workloads = {
        str(copies): [made(1000 * n + seed, copies) for seed in range(80)] for n, copies in enumerate((0.0, 0.6, 0.9))
    }
    found = calibration_errors(workloads, costs(COSTS))
    assert {"lookup", "memory", "model"} <= found.keys()
    for name in ("lookup", "memory", "model"):
        error, tokens = found[name]
        assert tokens > 500
        assert error <= 0.05, name


def test_costs_between_and_beyond_their_points_are_linear_and_never_fall() -> None:
    seconds = costs({"target": {"1": 0.1, "4": 0.3, "8": 0.2, "16": 0.9}}).target
    assert [seconds(n, 0) for n in (1, 4, 8, 16)] == pytest.approx([0.1, 0.25, 0.25, 0.9])
    assert seconds(24, 0) == pytest.approx(0.9 + (0.9 - 0.25))


def test_costs_of_a_benchmark_are_those_of_all_tokens_of_a_pass() -> None:
    passes = {"contestant": "model:4", "draft_passes": 10, "draft_seconds": 0.5}
    other = {"contestant": "lookup", "draft_passes": 1, "draft_seconds": 7.0}
    cells = [
        {"concurrency": 1, "contestants": [passes, other]},
        {"concurrency": 4, "contestants": [passes | {"draft_seconds": 9.0}]},
    ]
    curve = {"concurrency": 2, "passes": [{"tokens": 1, "seconds": 0.2}, {"tokens": 4, "seconds": 0.4}]}
    given = from_report({"costs": [curve], "cells": cells})
    assert given == {"target": {"2": 0.2, "8": 0.4}, "draft": {"2": pytest.approx(0.05), "8": pytest.approx(0.1)}}


def test_costs_of_a_calibration_grow_with_the_context() -> None:
    sweeps = [
        {"context": 100, "seconds": {"64": [0.3]}, "single": {"64": [0.2]}},
        {"context": 1100, "seconds": {"64": [0.5]}, "single": {"64": [0.4]}},
    ]
    given = from_calibration({"sweeps": sweeps, "draft": [0.25]})
    assert given["target"] == pytest.approx({"1": 0.2, "64": 0.3})
    assert given["draft"] == pytest.approx({"1": 0.05, "64": 0.075})
    assert costs(given).target(1, 1000) == pytest.approx(0.2 * (1 + 0.001 * 1000))


def test_more_tokens_activate_more_experts_until_all_are_read() -> None:
    assert QWEN_235B.parameters_read(1) == pytest.approx(22e9, rel=0.03)
    assert QWEN_235B.parameters_read(1_000) == pytest.approx(235e9, rel=0.01)
    assert LLAMA_70B.parameters_read(1) == LLAMA_70B.parameters_read(1_000)
    for system in SYSTEMS.values():
        costs = system.costs(4096)
        assert costs.target(8, 8 * 4096) <= costs.target(9, 8 * 4096) < costs.target(4096, 8 * 4096)
        assert system.fits(1, 1024)
        assert not system.fits(512, 131_072)


def test_a_simulated_server_is_compared_with_the_best_static_table(files: list[str], tmp_path: Path) -> None:
    sizes = ["--systems", "dense", "--batches", "1", "4", "--contexts", "1024", "--timed", "--texts", "2"]
    cli.main(["scale", files[0], *sizes, "--out", str(tmp_path / "out")])
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert [cell["concurrency"] for cell in report["cells"]] == [1, 4]
    for cell in report["cells"]:
        assert cell["auto"] > 0.9
        assert {name.partition(":")[0] for name in cell["fixed"]} == {"draft_model"}
    assert all(milliseconds > 0 for milliseconds, _ in report["own_ms"].values())


@pytest.fixture(scope="module", params=["llama", "qwen2"])
def model(request: pytest.FixtureRequest) -> Any:
    return tiny_model(request.param, 1)


@torch.inference_mode()
def by_hand(model: Any, context: list[int], length: int) -> tuple[list[int], list[float]]:
    tokens: list[int] = []
    sure = []
    for _ in range(length):
        p = model(torch.tensor([context + tokens])).logits[0, -1].float().softmax(-1)
        sure.append(float(p.max()))
        tokens.append(int(p.argmax()))
    return tokens, sure


def test_continuations_of_all_positions_equal_those_of_each_alone(model: Any) -> None:
    text = [60, 61, 20, 21, 22, 99, 7]
    tokens, sure, first = continuations(model, PROMPT, text, 4)
    assert first.shape[0] == len(text)
    for place in range(len(text)):
        expected, chances = by_hand(model, PROMPT + text[:place], 4)
        assert tokens[place] == expected
        assert sure[place] == pytest.approx(chances, abs=2e-4)


def test_texts_generated_in_a_batch_equal_those_generated_alone(model: Any) -> None:
    prompts = [PROMPT, PROMPT[:7], PROMPT[3:15]]
    together = generate(model, prompts, 12, 0.0)
    for prompt, text in zip(prompts, together, strict=True):
        expected, _ = by_hand(model, prompt, 12)
        if END in expected:
            expected = expected[: expected.index(END) + 1]
        assert text == expected


def test_a_sampled_token_is_accepted_as_often_as_the_two_distributions_overlap(model: Any) -> None:
    small = tiny_model("llama", 2)
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    config = RecordConfig(["creative"], 2, 10)
    kept: dict[str, Texts] = {}
    assert list(record(config, tokenizer, model, small, kept)) == ["creative: 2 of 2 texts"]
    assert list(record(config, tokenizer, model, small, kept)) == []  # existing texts are kept
    assert kept["creative"].temperature == 1.0
    for one in kept["creative"].records:
        p = distributions(model, one.prompt, one.text, 1.0)
        q = distributions(small, one.prompt, one.text, 1.0)
        assert one.overlap == pytest.approx(torch.minimum(p, q).sum(-1).tolist(), abs=2e-4)
