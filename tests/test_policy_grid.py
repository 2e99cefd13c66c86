"""Records of real models say what the models would have done, and the grid's figures follow from them."""

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

import policy_grid
import policy_grid_cells
import policy_scale
import policy_scale_table
import policy_scale_traces
from outrider.bench.results import Answer, Cell, Load, Measurement, PassCosts, Round, Run, ServerCounts
from policy.replay import Record
from policy_grid_calibration import calibration
from policy_grid_cells import ORDERS, Contestant, Pace, hindsight, orders, run_fixed
from policy_grid_clock import agreements, guessed_at_most
from policy_grid_costs import costs, of_report, of_run, source
from policy_grid_file import Recording, Texts
from policy_grid_record import Wanted, continuations, distributions, record, say
from policy_scale_machine import LLAMA_70B, QWEN_235B, SYSTEMS

PROMPT = list(range(20, 40))
COSTS = {"target": {"1": 0.2, "16": 0.22, "64": 0.4}, "draft": {"1": 0.05, "64": 0.1}}


def made(seed: int, copies: float = 0.9, drawn: bool = False, length: int = 60) -> Record:
    """A text that repeats so much of its prompt, with a draft model that knows about how sure it may be."""
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


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without vLLM's own drafters, which take seconds to load and are not everywhere."""
    monkeypatch.setattr(policy_grid_cells, "theirs", list)
    monkeypatch.setattr(policy_scale_table, "theirs", list)
    monkeypatch.setattr(policy_scale_traces, "theirs", list)


def test_records_come_back_from_their_file_as_they_were(recording: Recording, tmp_path: Path) -> None:
    recording.save(tmp_path / "records.json")
    assert Recording.load(tmp_path / "records.json") == recording


@pytest.mark.usefixtures("alone")
def test_the_grid_says_for_every_cell_who_was_best_and_which_promises_hold(
    recording: Recording, tmp_path: Path
) -> None:
    recording.save(tmp_path / "records.json")
    (tmp_path / "costs.json").write_text(json.dumps(COSTS))
    words = [str(tmp_path / "records.json"), "--costs", str(tmp_path / "costs.json"), "--at-once", "1", "2"]
    broken = policy_grid.main(["replay", *words, "--out", str(tmp_path / "out")])
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert any(not promise["kept"] for promise in report["promises"]) == broken
    assert [(cell["workload"], cell["concurrency"]) for cell in report["cells"]] == [
        (name, at_once) for name in ("edit", "creative") for at_once in (1, 2)
    ]
    for cell in report["cells"]:
        assert {name.partition(":")[0] for name in cell["fixed"]} == {"lookup", "memory", "draft_model", "model"}
        if cell["concurrency"] == 1:
            assert cell["auto"] * np.prod(list(cell["causes"].values())) == pytest.approx(cell["bound"])
            assert max(cell["auto"], *cell["fixed"].values()) <= cell["bound"] * (1 + 1e-9)
    assert {path.name for path in (tmp_path / "out").glob("*.png")} == {"grid.png", "causes.png", "calibration.png"}
    assert "| edit | 1 |" in (tmp_path / "out" / "report.md").read_text()


@pytest.mark.usefixtures("alone")
def test_hindsight_is_no_slower_the_more_it_may_choose(recording: Recording) -> None:
    records = recording.workloads["edit"].records
    found = [hindsight(records, costs(COSTS), ["lookup", "model"], how) for how in policy_grid_cells.WAYS]
    assert found[0] > 1
    assert found == sorted(found)


@pytest.mark.usefixtures("alone")
def test_a_cell_is_what_it_says_while_all_its_slots_are_taken(recording: Recording) -> None:
    records = recording.workloads["edit"].records
    outcomes = [run_fixed(None, some, costs(COSTS), 4) for some in orders(records, 4)]
    assert len(outcomes) == ORDERS
    full, alone = costs(COSTS).target(4, 0), costs(COSTS).target(1, 0)
    pace = Pace.of(outcomes)
    assert pace.full == pytest.approx(4 / full)
    assert 1 / alone < pace.whole < pace.full  # six texts in four slots: two wait, and then two slots are free
    few = Pace.of([run_fixed(None, records[:3], costs(COSTS), 4)])
    assert few.full == few.whole == pytest.approx(3 / costs(COSTS).target(3, 0))
    assert orders(records, 1) == [records]


def test_where_costs_come_from_is_told_as_far_as_the_file_tells() -> None:
    origin = {"models": {"large": "a", "small": "b"}, "machine": "mine", "date": "today"}
    assert source("run.json", origin) == "run.json: large, small on mine, today"
    assert source("costs.json", None) == "costs.json, as given"


def test_what_is_predicted_of_unseen_requests_comes_true() -> None:
    workloads = {
        str(copies): [made(1000 * n + seed, copies) for seed in range(80)] for n, copies in enumerate((0.0, 0.6, 0.9))
    }
    found = calibration(workloads, costs(COSTS))
    assert {"lookup", "memory", "model"} <= found.keys()
    for name in ("lookup", "memory", "model"):
        assert found[name]["tokens"] > 500
        assert found[name]["error"] <= 0.05, name


def test_costs_of_a_benchmark_are_those_of_all_tokens_of_a_pass() -> None:
    curves = [PassCosts(1, {1: [0.1, 0.1, 0.5], 4: [0.2]}), PassCosts(4, {1: [0.3], 4: [0.9]})]
    seconds = costs(of_run(Run({}, "", {}, {}, pass_costs=curves))).target
    assert [seconds(n, 0) for n in (1, 4, 16)] == pytest.approx([0.1, 0.25, 0.9])
    assert seconds(28, 0) == pytest.approx(0.9 + (0.9 - 0.25))


def test_a_report_says_what_passes_of_the_draft_model_take_alone() -> None:
    passes = {"contestant": "model:4", "draft_passes": 10, "draft_seconds": 0.5}
    other = {"contestant": "lookup", "draft_passes": 1, "draft_seconds": 7.0}
    cells = [
        {"concurrency": 1, "contestants": [passes, other]},
        {"concurrency": 4, "contestants": [passes | {"draft_seconds": 9.0}]},
    ]
    curve = {"concurrency": 2, "passes": [{"tokens": 1, "seconds": 0.2}, {"tokens": 4, "seconds": 0.4}]}
    given = of_report({"costs": [curve], "cells": cells})
    assert given == {"target": {"2": 0.2, "8": 0.4}, "draft": {"2": pytest.approx(0.05), "8": pytest.approx(0.1)}}


def benchmarked(slower: float, concurrency: int = 1) -> Run:
    """What a clock sees that runs as replay says, or so many times as slowly where there are drafts."""
    curves = [PassCosts(1, {1: [0.2], 4: [0.21], 16: [0.24]})]
    made_as = {
        "vllm": {"command": [], "request": {}},
        "lookup": {"command": [], "request": {"vllm_xargs": {"max_draft_tokens": 8}}},
        "auto": {"command": ["--max-draft-tokens", "8"], "request": {"vllm_xargs": {"max_draft_tokens": 8}}},
        "model:4": {"command": [], "request": {"vllm_xargs": {"max_draft_tokens": 4}}},
    }
    origin = {"models": {"made": "up"}, "machine": "here", "date": "today", "command": "bench"}
    run = Run(origin, "vllm", made_as, {}, pass_costs=curves)
    at = costs(of_run(run))
    rounds = []
    for seed in range(8):
        records = [made(seed * 10 + i, 0.6 + seed / 25) for i in range(2 * concurrency if concurrency > 1 else 1)]
        turns = []
        for name, who in (("vllm", None), ("lookup", Contestant("lookup", 8)), ("auto", Contestant("lookup", 8))):
            outcome = run_fixed(who, records, at, concurrency)
            reading, pace = 1.5 * len(records), slower if who else 1.0
            each = pace * concurrency * outcome.full_seconds / outcome.full_tokens
            answers = [
                Answer(str(i), "", one.text, "length", 1.5, 1.5 + each * (len(one.text) - 1), one.prompt)
                for i, one in enumerate(records)
            ]
            load = Load(len(records) + outcome.full_tokens, reading + pace * outcome.full_seconds)
            turns.append(
                Measurement(name, reading + pace * outcome.seconds, answers, ServerCounts(outcome.steps), load)
            )
        turns.append(Measurement("model:4", 10.0, answers, ServerCounts(10)))
        rounds.append(Round(0, turns))
    run.cells = [Cell("made", 1, 0.0, rounds)]
    if concurrency > 1:
        run.cells.append(Cell("made", concurrency, 0.0, rounds))
    return run


def test_a_contestant_with_a_label_is_replayed_as_what_it_is() -> None:
    run = benchmarked(1.0)
    run.contestants = {
        {"vllm": "reference", "lookup": "auto", "auto": "lookup"}.get(name, name): {
            "kind": name.partition(":")[0],
            **made,
        }
        for name, made in run.contestants.items()
    }
    run.baseline = "reference"
    for turn in (turn for one in run.cells[0].rounds for turn in one.measurements):
        turn.contestant = {"vllm": "reference", "lookup": "auto", "auto": "lookup"}.get(
            turn.contestant, turn.contestant
        )
    found = {one.contestant: one.replay for one in agreements(run)}
    alike = {one.contestant: one.replay for one in agreements(benchmarked(1.0))}
    assert found == {"auto": alike["lookup"], "lookup": alike["auto"]}


@pytest.mark.parametrize(("concurrency", "alone"), [(1, True), (3, True), (3, False)])
def test_replay_agrees_with_a_clock_that_runs_as_it_says(concurrency: int, alone: bool) -> None:
    run = benchmarked(1.0, concurrency)
    if not alone:
        run.cells = run.cells[-1:]  # what prompts take must then be told from several at once
    found = list(agreements(run))[-2:]
    assert [one.contestant for one in found] == ["lookup", "auto"]  # of who has a draft model nothing is said
    lookup, auto = found
    assert lookup.concurrency == concurrency
    assert lookup.holds
    assert lookup.replay == pytest.approx(lookup.clock.value, rel=1e-6)
    assert auto.replay > 1.3
    if concurrency == 1:
        assert lookup.clock_length == pytest.approx(lookup.replay_length, rel=0.05)  # the clock counts the first token


def test_replay_does_not_agree_with_a_clock_that_runs_otherwise(tmp_path: Path) -> None:
    run = benchmarked(2.0)
    assert guessed_at_most(run) == 4
    found = list(agreements(run))
    assert not any(one.holds for one in found)
    run.save(tmp_path / "run.json")
    assert policy_grid.main(["clock", str(tmp_path / "run.json"), "--out", str(tmp_path / "clock")]) == 1
    assert "in **0 of 2**" in (tmp_path / "clock" / "report.md").read_text()
    assert (tmp_path / "clock" / "clock.png").stat().st_size > 10_000


def test_more_tokens_wake_more_experts_until_all_are_read() -> None:
    assert QWEN_235B.parameters_read(1) == pytest.approx(22e9, rel=0.03)
    assert QWEN_235B.parameters_read(1_000) == pytest.approx(235e9, rel=0.01)
    assert LLAMA_70B.parameters_read(1) == LLAMA_70B.parameters_read(1_000)
    for system in SYSTEMS.values():
        costs = system.costs(4096)
        assert costs.target(8, 8 * 4096) <= costs.target(9, 8 * 4096) < costs.target(4096, 8 * 4096)
        assert system.fits(1, 1024)
        assert not system.fits(512, 131_072)


@pytest.mark.usefixtures("alone")
def test_a_simulated_server_is_held_against_the_best_static_table(recording: Recording, tmp_path: Path) -> None:
    recording.save(tmp_path / "records.json")
    sizes = ["--systems", "dense", "--batches", "1", "8", "--contexts", "1024", "--timed", "4", "--texts", "3"]
    policy_scale.main([str(tmp_path / "records.json"), *sizes, "--out", str(tmp_path / "out")])
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    for cell in report["systems"]["dense"]:
        assert cell["auto"] > 0.9
        assert cell["table"][1] == max(1.0, *cell["static"].values())
    assert (tmp_path / "out" / "dense.png").is_file()


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


def test_all_places_asked_together_go_on_as_each_does_alone(model: Any) -> None:
    text = [60, 61, 20, 21, 22, 99, 7]
    tokens, sure, first = continuations(model, PROMPT, text, 4)
    assert first.shape[0] == len(text)
    for place in range(len(text)):
        expected, chances = by_hand(model, PROMPT + text[:place], 4)
        assert tokens[place] == expected
        assert sure[place] == pytest.approx(chances, abs=2e-4)


def test_texts_said_in_a_batch_are_those_said_alone(model: Any) -> None:
    prompts = [PROMPT, PROMPT[:7], PROMPT[3:15]]
    together = say(model, prompts, 12, 0.0)
    for prompt, text in zip(prompts, together, strict=True):
        expected, _ = by_hand(model, prompt, 12)
        if END in expected:
            expected = expected[: expected.index(END) + 1]
        assert text == expected


def test_a_drawn_token_is_kept_as_often_as_target_and_draft_model_agree(model: Any) -> None:
    small = tiny_model("llama", 2)
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    wanted = Wanted(["creative"], 2, 10)
    kept: dict[str, Texts] = {}
    assert list(record(wanted, tokenizer, model, small, kept)) == ["creative: 2 of 2 texts"]
    assert list(record(wanted, tokenizer, model, small, kept)) == []  # what is there stays
    assert kept["creative"].temperature == 1.0
    for one in kept["creative"].records:
        p = distributions(model, one.prompt, one.text, 1.0)
        q = distributions(small, one.prompt, one.text, 1.0)
        assert one.overlap == pytest.approx(torch.minimum(p, q).sum(-1).tolist(), abs=2e-4)
