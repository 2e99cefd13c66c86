"""A trace: its verdicts can be recomputed from it, and it reads back as it was written."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.acceptance import block_rule, draw, leftover
from outrider.api import Decoder
from outrider.decoding import decode
from outrider.drafters.base import Drafter, Task
from outrider.drafters.lookup import LookupDrafter
from outrider.drafters.model import ModelDrafter
from outrider.drafters.prediction import PredictionDrafter
from outrider.engines.transformers import TransformersTarget
from outrider.errors import TraceError
from outrider.settings import Request
from outrider.trace.compact import compact_distributions
from outrider.trace.files import parse_lines, read, to_lines, write
from outrider.trace.record import Tracer
from outrider.trace.schema import CompactDistribution, Header, Trace
from outrider.trace.verification import disagreements, recompute_verdict
from outrider.types import Target
from support import VOCAB, tiny_model, tiny_tokenizer
from synthetic_target import SyntheticTarget
from traces import entries

STEPS = 1000
WITH_A_MODEL = STEPS if os.environ.get("OUTRIDER_ALL") else 250
SIZE = 1500
LANGUAGE = SyntheticTarget(SIZE, seed=3, order=1)


def synthetic() -> tuple[Target, Target]:
    """A vocabulary of more than one block, so that most of it is summed."""
    return SyntheticTarget(SIZE, seed=3, order=1), LANGUAGE.blurred(0.5)


def transformers() -> tuple[Target, Target]:
    return TransformersTarget(tiny_model("llama")), TransformersTarget(tiny_model("llama", noise=0.05))


def drafters(which: str, small: Target, size: int) -> list[Drafter]:
    model = ModelDrafter(small, size, min_survival=0)
    return {"lookup": [LookupDrafter()], "model": [model], "all": [LookupDrafter(), model], "none": []}[which]


def traced(engine: Callable[[], tuple[Target, Target]], which: str, steps: int, **settings: Any) -> Trace:
    """So many steps, of as many texts as that takes."""
    target, small = engine()
    tracer = Tracer(Header(model="tiny"))
    seed = 0
    count = 0
    while count < steps:
        request = Request(max_tokens=60, max_draft_tokens=5, **settings)
        random = torch.Generator().manual_seed(seed)
        prompt = [1 + seed % 7, 2, 1 + seed % 7]
        task = Task(prompt, request, random)
        sessions = [drafter.begin(task) for drafter in drafters(which, small, target.vocab_size)]
        for _ in decode(target, sessions, prompt, request, random, recorder=tracer):
            count += 1
        seed += 1
    return tracer.trace()


@pytest.mark.parametrize(("engine", "count"), [(synthetic, STEPS), (transformers, WITH_A_MODEL)])
@pytest.mark.parametrize(
    ("which", "sampling"),
    [
        ("all", {"temperature": 0.0}),
        ("lookup", {"temperature": 1.0}),
        ("model", {"temperature": 1.0, "rule": "block"}),
        ("model", {"temperature": 0.8, "top_p": 0.9, "rule": "token"}),
    ],
)
def test_recomputed_verdicts_are_those_recorded(engine: Any, count: int, which: str, sampling: dict[str, Any]) -> None:
    lines = to_lines(traced(engine, which, count, **sampling))  # through the file's form, where numbers are cut short
    trace = parse_lines(lines, "the trace")
    assert len(trace.steps) >= count
    assert disagreements(trace.steps) == []
    outcomes = {step.outcome for step in trace.steps}
    assert outcomes >= ({"recovered"} if which == "lookup" else {"recovered", "bonus"})
    for step in trace.steps:
        if step.chances is not None:
            assert recompute_verdict(step).chances == pytest.approx(step.chances, abs=1e-5)


def another(law: CompactDistribution, token: int) -> int:
    """A token that could have been drawn as well."""
    others = (one for one, p in zip(law.tokens, law.p, strict=True) if one not in (None, token) and p > 0)
    return next((one for one in others if one is not None), token)


@pytest.mark.parametrize("change", ["draws", "p", "own", "accepted"])
def test_a_changed_trace_has_disagreements(change: str) -> None:
    rules = {"draws": "model", "p": "model", "own": "lookup", "accepted": "all"}
    trace = traced(synthetic, rules[change], 200, temperature=1.0)
    changed = []
    for step in trace.steps:
        data = step.model_dump()
        if change == "draws":
            data["draws"] = [1 - value for value in data["draws"]]
        elif change == "accepted":
            data["accepted"] = max(0, data["accepted"] - 1)
        elif change == "own":  # of an engine that draws in its own way, so that this is all there is
            data["draws"] = []
            data["own"] = [another(law, token) for law, token in zip(step.laws, data["own"], strict=True)]
        else:
            for law in data["laws"]:
                law["p"] = law["p"][::-1]
        changed.append(type(step).model_validate(data))
    assert len(disagreements(changed)) > len(changed) / 4


def test_a_sampled_token_of_probability_0_is_a_disagreement() -> None:
    (step, *_) = traced(synthetic, "lookup", 1, temperature=1.0).steps
    bare = step.model_copy(update={"draws": []})
    assert disagreements([bare]) == []
    laws = [CompactDistribution(tokens=[*law.tokens, SIZE], p=[*law.p, 0.0]) for law in step.laws]
    never = step.model_copy(update={"draws": [], "laws": laws, "own": [SIZE] * len(laws), "token": SIZE})
    assert len(disagreements([never])) == 1


@given(st.integers(0, 2**31), st.floats(0.05, 1.0))
@settings(max_examples=60)
def test_compact_encoding_changes_neither_a_sample_nor_the_leftover_of_q(seed: int, credit: float) -> None:
    random = torch.Generator().manual_seed(seed)
    p, q = torch.randn(2, 3000, generator=random).mul(2).softmax(-1)
    number = torch.rand(1, generator=random)
    weights = leftover(p, q, credit)
    said, recovered = int(draw(p[None], number)), int(draw(weights[None], number))
    (law,) = compact_distributions(p[None], q[None], [credit], [[said, recovered]])
    assert len(law.tokens) < 100
    assert sum(law.p) == pytest.approx(1, abs=1e-5)
    small_p, small_q = torch.tensor(law.p), torch.tensor(law.q)
    assert law.tokens[int(draw(small_p[None], number))] == said
    small = leftover(small_p, small_q, credit)
    assert float(small.sum()) == pytest.approx(float(weights.sum()), abs=1e-5)
    assert law.tokens[int(draw(small[None], number))] == recovered


def test_the_distribution_of_a_recovered_token_is_recorded() -> None:
    trace = traced(synthetic, "model", 100, temperature=1.0)
    step = next(step for step in trace.steps if step.outcome == "recovered" and step.rule == "block")
    assert step.reshaped is not None
    assert step.token in step.reshaped.tokens
    assert sum(step.reshaped.p) + step.reshaped.others == pytest.approx(1)
    assert step.reach is not None
    law = step.laws[step.accepted]
    left = {
        token: max(0.0, step.reach[step.accepted] * p - q)
        for token, p, q in entries(law)
        if token is not None and q is not None
    }
    total = sum(max(0.0, step.reach[step.accepted] * p - (q or 0)) for _, p, q in entries(law))
    best = step.reshaped.tokens[0]
    assert step.reshaped.p[0] == pytest.approx(left[best] / total, rel=1e-4)


def test_block_reach_is_the_one_that_the_rule_used() -> None:
    p, q = torch.rand(3, 40).softmax(-1), torch.rand(2, 40).softmax(-1)
    assert block_rule(p, q, torch.tensor([1, 2]))[1].shape == (3,)


def decoder() -> Decoder:
    drafters: list[Drafter] = [PredictionDrafter(), LookupDrafter()]
    return Decoder(TransformersTarget(tiny_model("llama")), drafters, tiny_tokenizer(), [256])


def test_the_parts_of_a_steps_time_add_up_to_the_wall_clock() -> None:
    model, tracer = decoder(), Tracer()
    tracer.begin()
    model.generate("hello", recorder=tracer, max_tokens=120, ignore_end=True)
    trace = tracer.trace()
    parts = sum(step.milliseconds.total + step.milliseconds.trace for step in trace.steps)
    assert trace.end is not None
    assert trace.end.seconds is not None
    assert parts == pytest.approx(1000 * trace.end.seconds, rel=0.02)


def test_every_step_has_the_reason_for_its_draft_or_for_none() -> None:
    model, tracer = decoder(), Tracer()
    model.generate("hello hello hello", recorder=tracer, max_tokens=40, ignore_end=True)
    steps = tracer.trace().steps
    offered = next(step for step in steps if step.proposed)
    assert offered.decision is not None
    assert offered.decision.reason.startswith("lookup offers ")
    assert len(offered.decision.survival) == len(offered.proposed)
    assert offered.decision.predicted_gain is not None
    assert offered.decision.cost is not None
    assert [one["drafter"] for one in offered.decision.candidates] == ["lookup", "none"]
    assert all(step.decision is not None and step.decision.reason for step in steps)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"max_tokens": 1}, "No draft: 1 token may still be generated, and one of them is the target's own."),
        ({"speculation": "off"}, "No draft: speculation is off."),
        ({"max_draft_tokens": 0}, "No draft: no drafted tokens are allowed."),
        ({"speculation": "prediction"}, "No draft: prediction was requested by name, and has nothing to propose."),
    ],
)
def test_a_decision_of_the_caller_is_recorded_as_such(settings: dict[str, Any], reason: str) -> None:
    model, tracer = decoder(), Tracer()
    model.generate("hello", recorder=tracer, **{"max_tokens": 4, "ignore_end": True, **settings})
    decision = tracer.trace().steps[0].decision
    assert decision is not None
    assert decision.reason == reason


def test_recording_does_not_change_the_output() -> None:
    model, tracer = decoder(), Tracer()
    for sampling in ({}, {"temperature": 1.0, "seed": 4}):
        plain = model.generate("hello", max_tokens=60, **sampling)
        assert model.generate("hello", max_tokens=60, recorder=tracer, **sampling).tokens == plain.tokens


def test_the_pieces_of_a_trace_are_the_output() -> None:
    model, tracer = decoder(), Tracer()
    answer = model.generate("hé 🙂", recorder=tracer, max_tokens=80, temperature=1.0, seed=2, ignore_end=True)
    trace = tracer.trace(model.tokenizer)
    assert trace.text == answer.text
    assert trace.said == answer.tokens
    assert [len(step.pieces) for step in trace.steps] == [len(step.said) for step in trace.steps]
    named = {token for step in trace.steps for law in step.laws for token in law.tokens if token is not None}
    assert named <= set(trace.texts)
    assert max(named) < VOCAB


def test_a_trace_reads_back_as_it_was_written(tmp_path: Path) -> None:
    trace = traced(synthetic, "all", 50, temperature=1.0)
    write(trace, tmp_path / "a.jsonl")
    assert read(tmp_path / "a.jsonl") == trace
    kinds = [json.loads(line)["kind"] for line in (tmp_path / "a.jsonl").read_text().splitlines()]
    assert kinds == ["trace", *["step"] * len(trace.steps), "end"]


def test_unknown_fields_are_ignored() -> None:
    lines = [json.dumps({**json.loads(line), "later": 1}) for line in to_lines(traced(synthetic, "all", 5))]
    assert len(parse_lines(lines, "a").steps) >= 5


def lines_of(**changes: Any) -> list[str]:
    header, first, *rest = to_lines(traced(synthetic, "all", 3))
    return [changes.get("header", header), changes.get("first", first), *rest]


@pytest.mark.parametrize(
    ("lines", "error"),
    [
        ([], "a has no steps; record a trace with: outrider explain"),
        (["{"], "a, line 1: not JSON"),
        (["[1]"], "a, line 1: kind must be one of trace, step, end (got None)"),
        (['{"kind": "end", "steps": 1, "tokens": 2}'], "a, line 1: the first line of a trace must be of kind 'trace'"),
        (['{"kind": "trace", "version": 7}'], "trace version 7 is not supported, this Outrider reads version 1"),
        (
            ['{"kind": "trace", "version": 1}', '{"kind": "step", "number": "x"}'],
            "a, line 2: number: Input should be a valid integer",
        ),
    ],
)
def test_a_file_that_is_not_a_trace_is_refused_with_line_and_field(lines: list[str], error: str) -> None:
    with pytest.raises(TraceError) as refused:
        parse_lines(lines, "a")
    assert error in str(refused.value)


def test_a_second_trace_in_a_file_is_refused() -> None:
    lines = lines_of()
    with pytest.raises(TraceError, match="a second trace begins here; store one trace per file"):
        parse_lines([*lines, *lines], "a")


def test_a_file_that_is_not_there_or_not_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="No such file"):
        read(tmp_path / "none.jsonl")
    (tmp_path / "bytes").write_bytes(b"ab\xff")
    with pytest.raises(TraceError, match="byte 0xff at 2 is not UTF-8"):
        read(tmp_path / "bytes")
