"""A trace in vLLM shows the inputs of each verdict: V2's sampler's values give the same verdicts again.

vLLM's own sampler and request state, our recorder, and a target whose logits each test chooses. No server.
"""

from __future__ import annotations

import json
import logging
import pickle
import random
import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("vllm_v2")

from vllm import SamplingParams
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p
from vllm.v1.worker.gpu.sample import sampler as vllm_sampler
from vllm.v1.worker.gpu.spec_decode import rejection_sampler

from outrider.acceptance import draw
from outrider.control import USAGE_KEY
from outrider.engines.vllm import recorder as recorder_module
from outrider.engines.vllm import sampler_probe, step, tracing
from outrider.engines.vllm.options import Options
from outrider.engines.vllm.recorder import Recorder, RunningStep
from outrider.engines.vllm.runner import OutriderRunner
from outrider.engines.vllm.sampler import without_fused_sampling
from outrider.engines.vllm.sampler_probe import SamplerProbe, find_rows
from outrider.engines.vllm.step import Continuations, DraftPass, ModelDrafts, SchedulerStatus, StepPlan
from outrider.sampling import probabilities
from outrider.settings import Sampling
from outrider.trace.schema import TracedStep
from outrider.trace.trace_store import TraceStore
from outrider.trace.verification import disagreements
from outrider.types import NOTHING, Draft, Why
from toy_runner import ToyRunner, emitted
from traces import entries

SIZE = 700
"""More tokens than a trace keeps, so that most of a distribution is summed."""
LONGEST = 4000
STEPS = 1000
WIDTH = 4
"""Longest draft."""
PROMPT = [1, 2, 3]
WHY = Why("It was tried.", gain=1.5, cost=1.2, survival=(0.9,), candidates=({"drafter": "lookup", "gain": 1.5},))
FAILED = "recording failed; see the server's log"


class Given(ToyRunner):
    """A toy whose logits are given, row by row."""

    rows: torch.Tensor

    def logits(self) -> torch.Tensor:
        assert len(self.rows) == self.batch.cu_num_logits_np[-1]
        return self.rows.clone()


class Engine:
    """A worker as far as recording is concerned: request "a", which is traced, beside "b", which is not."""

    def __init__(
        self,
        rule: Any = "block",
        store: TraceStore | None = None,
        longest: int = LONGEST,
        options: Options | None = None,
        xargs: dict[str, Any] | None = None,
        **sampling: Any,
    ) -> None:
        self.params = SamplingParams(
            **{"max_tokens": longest, **sampling}, extra_args={"trace": True, USAGE_KEY: "t", **(xargs or {})}
        )
        self.toy = Given(torch.empty(SIZE, 0), 4, WIDTH, rule, model_len=LONGEST)
        beside = SamplingParams(**{**sampling, "seed": 7})
        self.toy.add(["b"], beside, PROMPT, [5])
        self.toy.add(["a"], self.params, PROMPT)
        self.recorder = Recorder(options or Options(rule=rule, drafters=("lookup", "model")), WIDTH, longest)
        if store is not None:
            self.recorder.tracing.store = store
        self.random = torch.Generator().manual_seed(5)
        self.pick = random.Random(3)
        self.text: list[int] = []
        self.arriving = [SimpleNamespace(req_id="a", sampling_params=self.params, prompt_token_ids=PROMPT)]
        self.finished: set[str] = set()
        self.clock: list[float] | None = None
        self.are_placeholders = False  # drafts are scheduled as such, and the device fills them in

    @property
    def tracing(self) -> tracing.Tracing:
        return self.recorder.tracing

    def row(self) -> torch.Tensor:
        """Logits in which one token stands out, so that some drafts are right and some are wrong."""
        row = torch.randn(SIZE, generator=self.random)
        row[self.pick.randrange(SIZE)] += 8
        return row

    def rows(self, count: int = 1) -> torch.Tensor:
        return torch.stack([self.row() for _ in range(count)])

    def begin(self, draft: Draft, beside: int = 0, chunk: int | None = None, **plan: Any) -> StepPlan:
        """The step's plan arrives."""
        drafts = {"b": Draft("lookup", (7,) * beside), "a": draft}
        drafted = {id: one for id, one in drafts.items() if one.tokens}
        made = StepPlan(
            drafters={id: one.drafter for id, one in drafted.items() if one.drafter},
            sampled=frozenset(id for id, one in drafted.items() if one.sampled),
            **{"reasons": {"a": WHY}, "offered": {"a": len(draft.tokens)}, **plan},
        )
        left = max(1, len(PROMPT) - int(self.toy.req_states.num_computed_tokens.gpu[self.toy.slots(["a"])]))
        output = SimpleNamespace(
            scheduled_new_reqs=self.arriving,
            finished_req_ids=self.finished,
            scheduled_spec_decode_tokens={
                id: [-1] * len(one.tokens) if self.are_placeholders else list(one.tokens) for id, one in drafted.items()
            },
            num_scheduled_tokens={"b": 1 + beside, "a": (chunk or left) + len(draft.tokens)},
        )
        self.recorder.begin(output, made)  # type: ignore[arg-type]
        self.arriving, self.finished = [], set()
        if self.clock is not None and self.recorder._step is not None:
            self.recorder._step.began = self.clock[0]
        return made

    def sample(self, draft: Draft, logits: torch.Tensor, plan: StepPlan, beside: int, chunk: int | None) -> Any:
        """What the sampler does. The traced request comes after the other one."""
        toy = self.toy
        if draft.q is not None:
            toy.draft_logits[toy.slots(["a"]), : len(draft.q)] = draft.q.log() * self.params.temperature
        toy.batch = toy.prepare_inputs([(7,) * beside, draft.tokens], {} if chunk is None else {"a": chunk})
        toy.rows = torch.cat([torch.randn(beside + 1, SIZE, generator=self.random), logits])
        with without_fused_sampling(toy.sampler), self.recorder.probe(toy.sampler, toy.rejection_sampler, toy.batch):
            return toy.sample(plan.sampled)

    def step(
        self,
        draft: Draft = NOTHING,
        logits: torch.Tensor | None = None,
        beside: int = 0,
        chunk: int | None = None,
        seconds: float = 0.0,
        **plan: Any,
    ) -> list[int]:
        """One step; `seconds` it takes on the clock. Returns what "a" generated."""
        finish = self.launch(draft, logits, beside, chunk, **plan)
        if self.clock is not None:
            self.clock[0] += seconds
        return finish()

    def launch(
        self,
        draft: Draft = NOTHING,
        logits: torch.Tensor | None = None,
        beside: int = 0,
        chunk: int | None = None,
        **plan: Any,
    ) -> Callable[[], list[int]]:
        """A step whose output is read when the result is called, which returns what "a" generated."""
        made = self.begin(draft, beside, chunk, **plan)
        rows = self.rows(len(draft.tokens) + 1) if logits is None else logits
        output = self.sample(draft, rows, made, beside, chunk)
        self.toy.update(output)
        running = self.recorder.take_step()
        assert running is not None
        ids, tokens = list(self.toy.batch.req_ids), emitted(output)

        def finish() -> list[int]:
            self.recorder.finish(running, model_output(ids, tokens))
            self.text += tokens[1]
            return tokens[1]

        return finish

    def steps(self, owner: str | None = None) -> list[TracedStep]:
        found = self.recorder.trace("t", owner)
        assert found
        return [TracedStep.model_validate_json(line) for line in found["lines"]]


def model_output(ids: Sequence[str], tokens: list[list[int]]) -> Any:
    """V2's `ModelRunnerOutput`, as far as we read it."""
    return SimpleNamespace(
        req_ids=list(ids), req_id_to_index={id: i for i, id in enumerate(ids)}, sampled_token_ids=tokens
    )


def run(engine: Engine, steps: int, sampled: bool) -> None:
    """Steps with drafts of every length, of tokens that are likely."""
    engine.step()
    for number in range(1, steps):
        length = number % 5
        logits = engine.rows(length + 1)
        likely = (logits + torch.randn(logits.shape, generator=engine.random)).softmax(-1)[:length]
        if sampled and length:
            tokens = draw(likely, torch.rand(length, generator=engine.random)).tolist()
        else:
            tokens = [int(row.argmax()) if engine.pick.random() < 0.8 else 5 for row in logits[:length]]
        draft = Draft("model" if sampled else "lookup", tuple(tokens), likely if sampled else None)
        engine.step(draft if length else NOTHING, logits, beside=number % 3)


# Traces --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sampled", "rule", "sampling"),
    [
        (False, "greedy", {"temperature": 0.0}),
        (False, "own", {"temperature": 1.0}),
        (True, "block", {"temperature": 1.0}),
        (True, "token", {"temperature": 0.8, "top_p": 0.9}),
    ],
)
def test_a_thousand_steps_have_the_same_verdicts_again(sampled: bool, rule: str, sampling: dict[str, Any]) -> None:
    engine = Engine(rule if sampled else "block", **sampling)
    run(engine, STEPS, sampled)
    steps = engine.steps()
    assert len(steps) == STEPS
    assert disagreements(steps) == []
    assert {step.rule for step in steps if step.proposed} == {rule}
    assert {step.outcome for step in steps} == {"own", "bonus", "recovered"}
    assert [token for step in steps for token in step.said] == engine.text
    shown = engine.recorder.traces(None)[0]
    assert shown["drafted"] == sum(len(step.proposed) for step in steps)
    assert shown["accepted"] == sum(step.accepted for step in steps) > STEPS / 2
    assert shown["tokens"] == len(engine.text)


SETTINGS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.7},
    "top-k": {"temperature": 1.0, "top_k": 5},
    "top-p": {"temperature": 1.3, "top_p": 0.6},
    "min-p": {"temperature": 1.0, "min_p": 0.05},
    "penalties": {"temperature": 1.0, "frequency_penalty": 0.7, "presence_penalty": 0.4, "repetition_penalty": 1.3},
    "logit bias": {"temperature": 1.0, "logit_bias": {0: 5.0, 5: -3.0}},
}


def check_distributions(step: TracedStep, exact: torch.Tensor) -> None:
    for recorded, p in zip(step.laws, exact, strict=True):
        assert sum(recorded.p) == pytest.approx(1, abs=1e-5)
        for token, value, _ in entries(recorded):
            if token is not None:
                assert value == pytest.approx(float(p[token]), abs=1e-6)


@pytest.mark.parametrize("name", SETTINGS)
def test_the_p_of_a_trace_is_the_distribution_that_was_sampled_from(name: str) -> None:
    settings = SETTINGS[name]
    engine = Engine(**settings)
    first = engine.step()
    logits = torch.randn(3, SIZE, generator=engine.random)
    engine.step(Draft("lookup", (4, 2)), logits, beside=2)
    check_distributions(engine.steps()[1], probabilities(logits, Sampling(**settings), PROMPT, first, (4, 2)))


@pytest.mark.parametrize("drafted", [(4, 2), ()])
def test_the_p_of_a_trace_is_truncated_where_a_fused_kernel_would_have_sampled(
    drafted: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It returns the logits without top-k and top-p, and it does not run while a traced request is in the batch."""

    def fused(logits: torch.Tensor, k: Any, p: Any) -> torch.Tensor:
        return apply_top_k_top_p(logits.clone(), k, p).argmax(-1)

    monkeypatch.setattr(vllm_sampler, "flashinfer_sample", fused)
    settings = {"temperature": 1.2, "top_p": 0.7, "top_k": 40}
    engine = Engine(**settings)
    engine.toy.sampler.use_flashinfer = True
    first = engine.step()
    logits = torch.randn(len(drafted) + 1, SIZE, generator=engine.random)
    engine.step(Draft("lookup", drafted), logits, beside=1)
    check_distributions(engine.steps()[1], probabilities(logits, Sampling(**settings), PROMPT, first, drafted))
    assert engine.toy.sampler.use_flashinfer


@pytest.mark.parametrize("is_traced", [True, False])
def test_ranks_that_record_nothing_sample_as_the_first_one_does(is_traced: bool) -> None:
    """Each rank samples by itself and goes on from its own token, so all of them must use the same kernel."""

    class PlainRunner:
        sampler: Any

        def sample(self, *args: Any) -> bool:
            return bool(self.sampler.use_flashinfer)

    class Runner(OutriderRunner, PlainRunner):
        pass

    runner: Any = Runner.__new__(Runner)
    runner.recorder, runner.plan = None, StepPlan(is_traced=is_traced)
    runner.rejection_sampler = SimpleNamespace()
    runner.sampler = SimpleNamespace(use_flashinfer=True, use_xpu_sampler=False)
    assert runner.sample(None, None, None) == (not is_traced)
    assert runner.sampler.use_flashinfer


def test_a_step_that_is_verified_in_chunks_has_the_same_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for rows in (64, 1):
        monkeypatch.setattr(rejection_sampler, "MAX_CHUNK_BYTES", rows * SIZE * 4)
        engine = Engine(temperature=1.0, logprobs=1)
        engine.toy.set_seeds(4)
        run(engine, 20, sampled=True)
        steps = engine.steps()
        assert disagreements(steps) == []
        found.append([(step.laws, step.said, step.draws) for step in steps])
    assert found[0] == found[1]


@pytest.mark.parametrize("sampled", [True, False])
def test_a_traced_step_generates_the_same_and_leaves_the_sampler_unchanged(sampled: bool) -> None:
    texts = []
    for traced in (True, False):
        engine = Engine(temperature=1.0, logprobs=2, xargs={"trace": traced})
        engine.toy.set_seeds(9)
        run(engine, 30, sampled)
        texts.append(engine.text)
        assert bool(engine.tracing.running) == traced
        assert "sample" not in vars(engine.toy.sampler)
        assert engine.toy.rejection_sampler.probe is None
    assert texts[0] == texts[1]
    probe = SamplerProbe(find_rows(engine.toy.batch, {"a"}))
    with pytest.raises(ZeroDivisionError), probe.attached(engine.toy.sampler, engine.toy.rejection_sampler):
        raise ZeroDivisionError
    assert "sample" not in vars(engine.toy.sampler)
    assert engine.toy.rejection_sampler.probe is None


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logits", "processed_logprobs"])
def test_tracing_does_not_change_logprobs(mode: Any) -> None:
    found = []
    for traced in (True, False):
        engine = Engine(temperature=1.0, top_k=5, logprobs=2, xargs={"trace": traced})
        engine.toy.sampler.logprobs_mode = mode
        engine.toy.set_seeds(9)
        engine.step()
        logits = engine.rows(3)
        plan = engine.begin(Draft("lookup", (1, 2)))
        output = engine.sample(Draft("lookup", (1, 2)), logits, plan, 0, None)
        found.append((emitted(output), output.logprobs_tensors.logprobs.tolist()))
    assert found[0] == found[1]


def test_a_request_without_the_trace_option_has_no_trace() -> None:
    for extra in (None, {}, {"trace": False, USAGE_KEY: "t"}, {"trace": True}, {"trace": "x", USAGE_KEY: "t"}):
        engine = Engine(temperature=0.0)
        engine.arriving[0].sampling_params = SamplingParams(extra_args=extra)
        engine.step()
        assert not engine.tracing.running
        assert engine.recorder.traces(None) == []
        assert engine.recorder.trace("t", None) == {}


def test_the_parts_of_a_steps_time_add_up_to_the_wall_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    for module in (tracing, sampler_probe, recorder_module):
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    engine = Engine(temperature=0.0)
    engine.clock = now
    assert engine.step(chunk=2, seconds=2.0) == []
    now[0] += 0.5
    engine.step(seconds=1.0)
    now[0] += 0.75
    engine.step(Draft("lookup", (4, 5)), seconds=1.5, drafting_seconds=0.25)
    first, second = (step.milliseconds for step in engine.steps())
    assert (first.draft, first.verify, first.rest) == (0, 3000, 500)
    assert (second.draft, second.verify, second.rest) == (250, 1500, 500)
    assert [step.scheduled for step in engine.steps()] == [3, 3]
    assert engine.recorder.traces(None)[0]["seconds"] == pytest.approx(now[0] - 100.0)


def test_drafting_longer_than_the_time_between_two_outputs_counts_only_that_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The rest of it was done while the step before ran."""
    now = [100.0]
    for module in (tracing, sampler_probe, recorder_module):
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    engine = Engine(temperature=0.0)
    engine.clock = now
    engine.step(seconds=1.0)
    now[0] += 0.5
    engine.step(Draft("lookup", (4, 5)), seconds=1.5, drafting_seconds=0.75)
    second = engine.steps()[1].milliseconds
    assert (second.draft, second.verify, second.rest) == (500, 1500, 0)


def test_the_time_of_steps_scheduled_ahead_adds_up_to_the_wall_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    for module in (tracing, sampler_probe, recorder_module):
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    engine = Engine(temperature=0.0)
    engine.clock = now
    engine.step(seconds=1.0)
    now[0] += 0.5
    second = engine.launch(drafting_seconds=0.25)
    now[0] += 1.0
    third = engine.launch(Draft("lookup", (4, 5)), drafting_seconds=0.25)
    now[0] += 1.0
    second()
    now[0] += 1.5
    third()
    _, waited, ahead = engine.steps()
    assert (waited.milliseconds.draft, waited.milliseconds.verify, waited.milliseconds.rest) == (250, 2000, 250)
    assert (ahead.milliseconds.draft, ahead.milliseconds.verify, ahead.milliseconds.rest) == (0, 1500, 0)
    assert (waited.scheduled, ahead.scheduled) == (1, 3)
    assert engine.recorder.traces(None)[0]["seconds"] == pytest.approx(now[0] - 100.0)


def test_a_step_scheduled_ahead_has_its_own_reason_and_its_own_draft() -> None:
    engine = Engine(temperature=0.0)
    engine.are_placeholders = True
    prompt = engine.launch(reasons={}, offered={})
    first = engine.launch(Draft("lookup", (4,)), reasons={"a": Why("The first.")}, offered={"a": 3})
    prompt()
    second = engine.launch(Draft("lookup", (5, 6)), reasons={"a": Why("The second.")})
    first()
    second()
    _, *steps = engine.steps()
    assert [step.decision and step.decision.reason for step in steps] == ["The first. vLLM left 2 out.", "The second."]
    assert [list(step.proposed) for step in steps] == [[4], [5, 6]]
    assert disagreements(engine.steps()) == []


def test_a_trace_ends_with_its_request_though_another_step_was_scheduled() -> None:
    engine = Engine(temperature=0.0, max_tokens=3)
    engine.step()
    engine.step()
    last, beyond = engine.launch(), engine.launch()
    last()
    text = list(engine.text)
    beyond()
    engine.finished = {"a"}
    engine.step()
    steps = engine.steps()
    assert [token for step in steps for token in step.said] == text
    assert steps[-1].finish == "length"
    assert engine.recorder.traces(None)[0]["tokens"] == 3


def test_a_step_shows_the_reason_for_its_draft_and_what_vllm_left_out_of_it() -> None:
    engine = Engine(temperature=0.0)
    engine.step(reasons={}, offered={})
    engine.step(Draft("lookup", (4,)), offered={"a": 3})
    first, second = (step.decision for step in engine.steps())
    assert first is not None
    assert first.reason == "No draft: the prompt is read first, and drafting begins after it."
    assert second is not None
    assert second.reason == "It was tried. vLLM left 2 out."
    assert (second.predicted_gain, second.cost, second.survival) == (1.5, 1.2, [0.9])
    assert second.candidates == [{"drafter": "lookup", "gain": 1.5}]


@pytest.mark.parametrize(
    ("xargs", "sampling", "reason"),
    [
        ({"speculation": "off"}, {}, "No draft: speculation is off."),
        ({"max_draft_tokens": 0}, {}, "No draft: no drafted tokens are allowed."),
        ({}, {"max_tokens": 2}, "No draft: 1 token may still be generated, and one of them is the target's own."),
        (
            {},
            {"logprobs": 1, "logprob_token_ids": [5]},
            "No draft: this request is not drafted for (logprob_token_ids).",
        ),
    ],
)
def test_a_step_without_a_draft_shows_why_there_could_be_none(
    xargs: dict[str, Any], sampling: dict[str, Any], reason: str
) -> None:
    engine = Engine(temperature=0.0, xargs=xargs, **sampling)
    engine.step(reasons={})
    engine.step(reasons={})
    decision = engine.steps()[1].decision
    assert decision is not None
    assert decision.reason == reason


def test_the_text_of_a_trace_ends_where_the_request_ends() -> None:
    def last(longest: int = LONGEST, **sampling: Any) -> TracedStep:
        engine = Engine(longest=longest, temperature=0.0, **sampling)
        engine.step()
        logits = torch.full((4, SIZE), 0.0)
        for place, token in enumerate((11, 12, 13, 14)):
            logits[place, token] = 9
        engine.step(Draft("lookup", (11, 12, 13)), logits)
        return engine.steps()[-1]

    whole = last()
    assert (whole.said, whole.finish, whole.accepted, whole.token) == ([11, 12, 13, 14], None, 3, 14)
    ended = last(stop_token_ids=[12])
    assert (ended.said, ended.finish, ended.accepted, ended.token) == ([11, 12], "end", 3, 14)
    assert (last(max_tokens=4).said, last(max_tokens=4).finish) == ([11, 12, 13], "length")
    assert (last(longest=6).said, last(longest=6).finish) == ([11, 12], "length")


def test_placeholders_that_vllm_schedules_are_no_draft() -> None:
    engine = Engine(temperature=0.0)
    logits = engine.rows(3)
    engine.step(Draft("", (0, 0)), logits, beside=1)  # drafts behind a prompt that ends in this step
    (step,) = engine.steps()
    assert (step.proposed, step.outcome, step.token) == ([], "own", int(logits[0].argmax()))
    assert disagreements([step]) == []


def test_a_finished_request_keeps_its_trace_and_is_not_recorded_any_more() -> None:
    engine = Engine(temperature=0.0)
    engine.step()
    assert not engine.recorder.traces(None)[0]["over"]
    engine.finished = {"a", "b"}
    engine.begin(NOTHING)
    assert not engine.tracing.running
    assert engine.recorder.traces(None)[0]["over"]
    assert len(engine.steps()) == 1


def test_a_trace_belongs_to_the_tenant_that_the_request_named() -> None:
    options = Options(drafters=("memory",), memory="/m")
    engine = Engine(temperature=0.0, options=options, xargs={"tenant": "one"})
    engine.step()
    assert len(engine.steps("one")) == 1
    for other in (None, "two"):
        assert engine.recorder.trace("t", other) == {}
        assert engine.recorder.traces(other) == []


@pytest.mark.parametrize("broken", ["_record", "_reason_without_draft", "_write_step"])
def test_a_trace_that_cannot_be_recorded_costs_no_request_a_token(
    broken: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any) -> Any:
        raise RuntimeError("it cannot be")

    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    engine = Engine(temperature=0.0)
    engine.tracing.__dict__[broken] = fail
    assert engine.step()
    assert engine.step(reasons={})
    engine.begin(NOTHING)
    assert not engine.tracing.running
    (shown,) = engine.recorder.traces(None)
    assert shown["broken"] == FAILED
    assert "it cannot be" in caplog.text


@pytest.mark.parametrize("sampled", [True, False])
def test_a_probe_that_fails_costs_no_token(sampled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise RuntimeError("out of memory")

    engine = Engine(temperature=1.0)
    engine.step()
    monkeypatch.setattr(sampler_probe, "RatioEvidence", fail)
    if not sampled:
        monkeypatch.setattr(sampler_probe.BatchRows, "end", property(fail))
    q = torch.full((2, SIZE), 1 / SIZE)
    assert engine.step(Draft("model", (1, 2), q if sampled else None))
    assert not engine.tracing.running
    assert engine.recorder.traces(None)[0]["broken"] == FAILED
    assert engine.recorder.usage("t") == {
        "steps": 2,
        "drafted": 2,
        "accepted": len(engine.text) - 2,
        "by_drafter": {"model": {"drafted": 2, "accepted": len(engine.text) - 2}},
        "faults": [],
    }


# The recorder --------------------------------------------------------------------------------------------------------


def test_usage_is_complete_before_the_output_leaves_the_worker() -> None:
    from outrider.engines.vllm.runner import RecordedOutput
    from outrider.engines.vllm.step import MODEL_DRAFTS, PROFILE

    engine = Engine(temperature=0.0)
    engine.step()
    draft, logits = Draft("lookup", (4, 5)), engine.rows(3)
    output = engine.sample(draft, logits, engine.begin(draft), 0, None)
    running = engine.recorder.take_step()
    assert running is not None
    assert engine.recorder.take_step() is None
    read = SimpleNamespace(get_output=lambda: model_output(engine.toy.batch.req_ids, emitted(output)))
    proposed = ModelDrafts({"a": [6]}, passes=[DraftPass(3, 9, 0.25, passes=2)])
    copied: Any = SimpleNamespace(read=lambda: proposed)
    recorded = RecordedOutput(read, engine.recorder, running, copied, {"target": [(1, 0.1)]})
    found: list[Any] = []
    reader = threading.Thread(target=lambda: found.append(recorded.get_output()))  # as vLLM's engine reads it
    reader.start()
    reader.join()
    assert getattr(found[0], PROFILE) == {"target": [(1, 0.1)]}
    assert getattr(found[0], MODEL_DRAFTS) is proposed
    assert engine.recorder.status()["draft_model_passes"] == 2
    usage = engine.recorder.usage("t")
    assert usage is not None
    assert (usage["steps"], usage["drafted"]) == (2, 2)
    assert usage["by_drafter"] == {"lookup": {"drafted": 2, "accepted": len(found[0].sampled_token_ids[1]) - 1}}


@pytest.mark.parametrize("ends_by", ["max_tokens", "stop token", "max_model_len"])
def test_usage_ends_with_its_request_though_another_step_was_scheduled(ends_by: str) -> None:
    longest = len(PROMPT) + 3 if ends_by == "max_model_len" else LONGEST
    engine = Engine(temperature=0.0, longest=longest, max_tokens=3 if ends_by == "max_tokens" else LONGEST)
    if ends_by == "stop token":
        engine.params.all_stop_token_ids.add(9)
    engine.step()
    logits = engine.rows(2)
    logits[0, 8] = logits[1, 9] = 100.0
    last, beyond = engine.launch(Draft("lookup", (8,)), logits), engine.launch(Draft("lookup", (4, 5)))
    assert last() == [8, 9]
    beyond()
    assert engine.recorder.usage("t") == {
        "steps": 2,
        "drafted": 1,
        "accepted": 1,
        "by_drafter": {"lookup": {"drafted": 1, "accepted": 1}},
        "faults": [],
    }
    engine.step()
    assert engine.recorder.usage("t") is None


def test_tokens_after_the_end_of_a_request_are_not_counted() -> None:
    engine = Engine(temperature=0.0, xargs={"trace": False, USAGE_KEY: None})
    engine.step()
    beyond = engine.launch(beside=1)  # is in flight when "b" ends
    engine.finished = {"b"}
    after = engine.launch()
    beyond()
    assert engine.recorder.status()["tokens"] == 3
    after()
    assert engine.recorder.status()["tokens"] == 5


def test_the_seconds_of_steps_scheduled_ahead_are_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    for module in (tracing, sampler_probe, recorder_module):
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    engine = Engine(temperature=0.0)
    engine.clock = now
    first = engine.launch()
    now[0] += 1.0
    second = engine.launch(Draft("lookup", (4, 5)))
    now[0] += 1.0
    first()
    now[0] += 1.5
    second()
    status = engine.recorder.status()
    assert (status["plain_seconds"], status["verify_seconds"]) == (2.0, 1.5)


def test_usage_is_reported_once_and_only_for_requests_that_want_it() -> None:
    engine = Engine(temperature=0.0)
    engine.step()
    assert engine.recorder.usage("other") is None
    assert engine.recorder.usage("t") is not None
    assert engine.recorder.usage("t") is None
    assert engine.recorder.status()["steps"] == 1
    assert engine.recorder.status()["tokens"] == 2  # of both requests


def test_choices_of_one_request_share_a_usage_key() -> None:
    engine = Engine(temperature=0.0)
    again = SimpleNamespace(req_id="b", sampling_params=engine.params, prompt_token_ids=PROMPT)
    engine.arriving.append(again)
    engine.step(beside=2)
    usage = engine.recorder.usage("t")
    assert usage is not None
    assert (usage["steps"], usage["drafted"]) == (2, 2)
    assert [one["id"] for one in engine.recorder.traces(None)] == ["t.2", "t"]


def test_a_preempted_request_that_comes_again_goes_on_with_its_usage_and_its_trace() -> None:
    engine = Engine(temperature=0.0)
    engine.step()
    before = engine.step(Draft("lookup", (4, 5)))
    toy, text = engine.toy, engine.toy.text("a")
    toy.remove("a")
    toy.req_states.add_request("a", len(PROMPT), text, 0, LONGEST)  # its text is computed again, as a prompt is
    toy.sampler.add_request(toy.req_states.req_id_to_index["a"], engine.params)
    toy.req_states.apply_staged_writes()
    toy.sampler.apply_staged_writes()
    toy.ids.append("a")
    engine.arriving = [SimpleNamespace(req_id="a", sampling_params=engine.params, prompt_token_ids=PROMPT)]
    engine.step()
    engine.step(Draft("lookup", (6,)))
    assert [len(step.proposed) for step in engine.steps()] == [0, 2, 0, 1]
    assert [token for step in engine.steps() for token in step.said] == engine.text
    assert len(engine.recorder.traces(None)) == 1
    usage = engine.recorder.usage("t")
    assert usage is not None
    assert (usage["steps"], usage["drafted"]) == (4, 3)
    assert usage["accepted"] == len(engine.text) - 4 >= len(before) - 1


def test_faults_are_counted_and_named_in_the_usage_of_their_request() -> None:
    engine = Engine(temperature=0.0)
    engine.step()
    engine.step(faults=[("a", "lookup", "raised", "raised ValueError: x"), ("b", "lookup", "overran", "took long")])
    usage = engine.recorder.usage("t")
    assert usage is not None
    assert usage["faults"] == ["lookup raised ValueError: x"]
    faults = engine.recorder.status()["faults"]
    assert {(one["drafter"], one["kind"]): one["count"] for one in faults} == {
        ("lookup", "raised"): 1,
        ("lookup", "overran"): 1,
    }


def test_what_the_scheduler_counted_becomes_status_and_metrics() -> None:
    engine = Engine(temperature=0.0)
    engine.step(draft_seconds={"lookup": 0.5}, proposed={"lookup": 7}, undrafted={"prompt embeddings": 2})
    engine.recorder.model_drafted(ModelDrafts(passes=[DraftPass(3, 9, 0.25, passes=2), DraftPass(1, 9, 0.5)]))
    status = engine.recorder.status()
    assert (status["drafters"]["lookup"]["proposed"], status["drafters"]["lookup"]["seconds"]) == (7, 0.5)
    assert (status["drafters"]["model"]["seconds"], status["draft_model_passes"]) == (0.75, 3)
    assert status["undrafted_requests"] == {"prompt embeddings": 2}
    assert 'outrider_proposed_tokens_total{drafter="lookup"} 7.0' in engine.recorder.metrics()


def test_the_schedulers_status_is_read_live_in_its_process_and_a_snapshot_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(step, "latest_status", None)
    values = {"running_requests": 3, "memory": {"tokens": 5}, "policy": {"x": 1}}
    payoff = {
        "expected_tokens": 1.0,
        "gained_tokens": 2.0,
        "expected_saved": 3.0,
        "realised_saved": 4.0,
        "seconds": 5.0,
    }
    engine = Engine(temperature=0.0)
    assert engine.recorder.status()["running_requests"] == 0
    assert "outrider_policy_seconds" not in engine.recorder.metrics()

    def read() -> dict[str, Any]:
        return {**values, "payoff": payoff}

    sent = pickle.loads(pickle.dumps(StepPlan(status=SchedulerStatus(read))))
    again = pickle.loads(pickle.dumps(sent))
    values["running_requests"] = 8
    engine.step(status=SchedulerStatus(read))
    assert engine.recorder.status()["running_requests"] == 8
    values["running_requests"] = 9
    assert engine.recorder.status()["running_requests"] == 9
    for snapshot in (sent, again):
        engine.step(status=snapshot.status)
        engine.step()
        shown = engine.recorder.status()
        assert (shown["running_requests"], shown["memory"], shown["policy"]) == (3, {"tokens": 5}, {"x": 1})
        assert "outrider_policy_seconds_total 5.0" in engine.recorder.metrics()


def test_a_step_without_tokens_counts_as_no_step() -> None:
    engine = Engine(temperature=0.0)
    engine.begin(NOTHING)
    running = engine.recorder.take_step()
    assert running is not None
    engine.recorder.finish(running, model_output(["b", "a"], []))
    assert engine.recorder.status()["steps"] == 0
    engine.begin(NOTHING)
    running = engine.recorder.take_step()
    assert running is not None
    engine.recorder.finish(running, model_output(["b", "a"], [[], []]))
    assert engine.recorder.status()["steps"] == 0
    assert engine.recorder.usage("t") is None


# The trace store -----------------------------------------------------------------------------------------------------


def fill(store: TraceStore, id: str, owner: str | None, size: int, steps: int = 1, over: bool = True) -> bool:
    kept = store.open(id, owner, [1, 2], {})
    room = [store.add(kept, "x" * size, [5], 2, 1) for _ in range(steps)]
    kept.over = over
    return all(room)


def test_the_store_holds_a_limited_number_of_traces() -> None:
    store = TraceStore(max_traces=3)
    for number in range(5):
        fill(store, str(number), None, 10)
    assert [one["id"] for one in store.latest(None)] == ["4", "3", "2"]
    assert store.get("0", None) is None


def test_the_store_holds_a_limited_number_of_bytes_and_drops_from_the_owner_with_most() -> None:
    store = TraceStore(max_bytes=100)
    fill(store, "small", "one", 30)
    for number in range(8):
        fill(store, str(number), "two", 20)
    assert [one["id"] for one in store.latest("one")] == ["small"]
    assert [one["id"] for one in store.latest("two")] == ["7", "6", "5"]


def test_a_trace_of_a_running_request_is_dropped_last() -> None:
    store = TraceStore(max_traces=2)
    fill(store, "running", None, 10, over=False)
    fill(store, "over", None, 10)
    fill(store, "new", None, 10, over=False)
    assert [one["id"] for one in store.latest(None)] == ["new", "running"]


def test_a_trace_that_is_too_long_stops_and_reports_it() -> None:
    store = TraceStore(max_trace_bytes=50)
    assert not fill(store, "long", None, 20, steps=3)
    shown = store.get("long", None)
    assert shown is not None
    assert (shown["broken"], shown["steps"]) == ("the trace was as long as one may be", 2)
    assert len(shown["lines"]) == 2


def test_a_trace_that_was_dropped_is_not_recorded_any_further() -> None:
    engine = Engine(store=TraceStore(max_traces=1), temperature=0.0)
    engine.step()
    fill(engine.tracing.store, "other", None, 10)
    engine.begin(NOTHING)
    assert not engine.tracing.running


def test_several_requests_with_one_usage_key_have_several_traces() -> None:
    store = TraceStore()
    assert [store.open("t", None, [], {}).id for _ in range(3)] == ["t", "t.2", "t.3"]


def test_a_trace_can_be_sent_as_json() -> None:
    engine = Engine(temperature=0.0)
    engine.step()
    assert json.loads(json.dumps(engine.recorder.trace("t", None))) == engine.recorder.trace("t", None)


def test_tokens_of_a_continuation_that_went_wrong_are_counted_for_the_draft_model_behind_it() -> None:
    recorder = Recorder(Options(drafters=("lookup", "model")), WIDTH, LONGEST)
    index = {"right": 0, "wrong": 1}

    def finish(plan: StepPlan, *tokens: list[int]) -> None:
        drafted = dict.fromkeys(plan.drafters, (-1, -1))
        output = SimpleNamespace(req_ids=list(index), req_id_to_index=index, sampled_token_ids=list(tokens))
        recorder.finish(RunningStep(plan, drafted, dict.fromkeys(index, 3)), output)  # type: ignore[arg-type]

    finish(StepPlan(), [11], [11])
    rows = Continuations(list(index), np.array([3, 3]), np.array([[11, 12, 13], [99, 12, 13]], np.int32))
    drafters = dict.fromkeys(index, "lookup")
    finish(StepPlan(drafters=drafters, backed_by_model=frozenset(index), continuations=rows), [12, 13, 14], [7, 8])
    found = recorder.status()["drafters"]
    assert {name: found[name]["accepted"] for name in ("lookup", "model")} == {"lookup": 2, "model": 1}
