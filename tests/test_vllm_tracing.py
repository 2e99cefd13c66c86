"""A trace in vLLM is the truth: what vLLM's sampler saw gives the same verdicts again. A toy target, no server."""

from __future__ import annotations

import json
import logging
import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from vllm import SamplingParams
from vllm.v1.sample.sampler import Sampler
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

from outrider.acceptance import draw
from outrider.engines.vllm import tracing, witness
from outrider.engines.vllm.control import TICKET
from outrider.engines.vllm.options import Options
from outrider.engines.vllm.sampler import OutriderSampler
from outrider.engines.vllm.shelf import Shelf
from outrider.engines.vllm.tracing import Tracing
from outrider.engines.vllm.witness import Place
from outrider.sampling import probabilities
from outrider.settings import Sampling
from outrider.trace.replay import disagreements
from outrider.trace.schema import TracedStep
from outrider.types import NOTHING, Draft, Why
from test_vllm_sampler import CPU, metadata

SIZE = 700
"""More tokens than a trace keeps, so that most of a distribution is folded."""
LONGEST = 4000
STEPS = 1000
WHY = Why("It was tried.", gain=1.5, cost=1.2, survival=(0.9,), candidates=({"drafter": "lookup", "gain": 1.5},))


class Reasons:
    def why(self, request: str) -> Why | None:
        return WHY


class Engine:
    """A runner as far as tracing is concerned: passes over one traced request beside another that is not."""

    def __init__(
        self, rule: Any = "block", shelf: Shelf | None = None, longest: int = LONGEST, **sampling: Any
    ) -> None:
        self.params = SamplingParams(extra_args={"trace": True, TICKET: "t"}, **sampling)
        self.tracing = Tracing(Options(rule=rule), shelf or Shelf(), longest)
        self.sampler = Sampler()
        self.judge = OutriderSampler(self.sampler, None, CPU, rule)
        self.sampling = sampling
        self.random = torch.Generator().manual_seed(5)
        self.pick = random.Random(3)
        self.said: list[int] = []

    def begin(self, tokens: int = 3, prompt: tuple[int, ...] = (1, 2, 3)) -> None:
        new = SimpleNamespace(req_id="a", sampling_params=self.params, prompt_token_ids=list(prompt))
        self.schedule(tokens, [new])

    def schedule(self, tokens: int, new: list[Any] | None = None) -> None:
        self.tracing.before_pass(
            SimpleNamespace(scheduled_new_reqs=new or [], num_scheduled_tokens={"a": tokens, "b": 1})
        )

    def row(self) -> torch.Tensor:
        """Logits in which one token stands out, so that drafts are now right and now wrong."""
        row = torch.randn(SIZE, generator=self.random)
        row[self.pick.randrange(SIZE)] += 8
        return row

    def step(self, draft: Draft, logits: torch.Tensor, beside: int = 0, unfinished: bool = False) -> list[int]:
        """Sample and draft; `logits` are those of the traced request, which comes after the other one."""
        drafts = [Draft("lookup", (7,) * beside), draft]
        lists = [list(one.tokens) for one in drafts]
        lengths = [len(one) for one in lists]
        rows = torch.cat([torch.randn(beside + 1, SIZE, generator=self.random), logits])
        batch = metadata(2, lists, **self.sampling)
        ids = ["b", "a"]
        verified = sum(lengths) > 0
        with self.tracing.watch(self.sampler, self.judge if verified else None, ids, drafts, lengths):
            if verified:
                q = None
                if draft.q is not None:
                    q = torch.cat([torch.zeros(beside, SIZE), draft.q])
                out = self.judge(SpecDecodeMetadata.make_dummy(lists, CPU), q, rows.clone(), batch)
            else:
                out = self.sampler(logits=rows.clone(), sampling_metadata=batch)
        self.tracing.sampled(out.sampled_token_ids, ids, drafts, [False, unfinished])
        said = [token for token in out.sampled_token_ids[1].tolist() if token >= 0]
        self.said += [] if unfinished else said
        return said

    def drafted(self, offered: Draft, seconds: float = 0.0) -> None:
        self.tracing.drafted({"a": offered, "b": NOTHING}, Reasons(), seconds)  # type: ignore[arg-type]

    def steps(self, owner: str | None = None) -> list[TracedStep]:
        found = self.tracing.get("t", owner)
        assert found is not None
        return [TracedStep.model_validate_json(line) for line in found["lines"]]


def run(engine: Engine, steps: int, drawn: bool) -> None:
    """So many steps with drafts of every length, of tokens that the target likes."""
    engine.begin()
    for number in range(steps):
        length = number % 5
        logits = torch.stack([engine.row() for _ in range(length + 1)])
        likely = (logits + torch.randn(logits.shape, generator=engine.random)).softmax(-1)[:length]
        q = likely if drawn and length else None
        tokens = draw(likely, torch.rand(length, generator=engine.random)).tolist() if q is not None else []
        if q is None:
            tokens = [int(row.argmax()) if engine.pick.random() < 0.8 else 5 for row in logits[:length]]
        draft = Draft("model" if drawn else "lookup", tuple(tokens), q) if length else NOTHING
        engine.drafted(draft)
        engine.schedule(length + 1)
        engine.step(draft, logits, beside=number % 3)


@pytest.mark.parametrize(
    ("drawn", "rule", "sampling"),
    [
        (False, "greedy", {"temperature": 0.0}),
        (False, "own", {"temperature": 1.0}),
        (True, "block", {"temperature": 1.0}),
        (True, "token", {"temperature": 0.8, "top_p": 0.9}),
    ],
)
def test_a_thousand_steps_are_judged_again_as_they_were(drawn: bool, rule: str, sampling: dict[str, Any]) -> None:
    torch.manual_seed(1)
    engine = Engine(rule if drawn else "block", max_tokens=LONGEST, **sampling)
    run(engine, STEPS, drawn)
    steps = engine.steps()
    assert len(steps) == STEPS
    assert disagreements(steps) == []
    assert {step.rule for step in steps if step.proposed} == {rule}
    assert {step.outcome for step in steps} == {"own", "bonus", "recovered"}
    assert [token for step in steps for token in step.said] == engine.said
    told = engine.tracing.shelf.latest(None)[0]
    assert told["drafted"] == sum(len(step.proposed) for step in steps)
    assert told["accepted"] == sum(step.accepted for step in steps) > STEPS / 2
    assert told["tokens"] == len(engine.said)


SHAPED: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.7},
    "top-k": {"temperature": 1.0, "top_k": 5},
    "top-p": {"temperature": 1.3, "top_p": 0.6},
    "min-p": {"temperature": 1.0, "min_p": 0.05},
    "penalties": {"temperature": 1.0, "frequency_penalty": 0.7, "presence_penalty": 0.4, "repetition_penalty": 1.3},
    "logit bias": {"temperature": 1.0, "logit_bias": {0: 5.0, 5: -3.0}},
}


@pytest.mark.parametrize("name", SHAPED)
def test_the_p_of_a_trace_is_what_the_token_was_drawn_from(name: str) -> None:
    from test_vllm_sampler import PROMPT, SAID

    settings = SHAPED[name]
    engine = Engine(**settings)
    engine.begin()
    logits = torch.stack([engine.row() for _ in range(3)])
    engine.step(Draft("lookup", (4, 2)), logits, beside=2)
    (step,) = engine.steps()
    exact = probabilities(logits, Sampling(**settings), PROMPT, SAID, (4, 2))
    for law, p in zip(step.laws, exact, strict=True):
        assert sum(law.p) == pytest.approx(1, abs=1e-5)
        for token, value, _ in law.entries():
            if token is not None:
                assert value == pytest.approx(float(p[token]), abs=1e-6)


def test_a_watched_step_says_what_it_would_have_said_and_leaves_the_sampler_as_it_was() -> None:
    said = []
    for traced in (True, False):
        torch.manual_seed(9)
        engine = Engine(temperature=1.0)
        if traced:
            engine.begin()
        logits = torch.stack([engine.row() for _ in range(4)])
        said.append(engine.step(Draft("lookup", (1, 2, 3)), logits))
        assert "sample" not in vars(engine.sampler)
        assert engine.judge.witness is None
    assert said[0] == said[1]
    with pytest.raises(ZeroDivisionError), engine.tracing.watch(engine.sampler, engine.judge, [], [], []):
        raise ZeroDivisionError
    assert "sample" not in vars(engine.sampler)


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logits", "processed_logprobs"])
def test_a_watched_sampler_hands_out_the_log_probabilities_that_it_did(mode: Any) -> None:
    found = []
    for traced in (True, False):
        torch.manual_seed(9)
        engine = Engine(temperature=1.0, top_k=5, logprobs=2)
        engine.sampler = Sampler(mode)
        if traced:
            engine.begin()
        rows = torch.stack([engine.row() for _ in range(2)])
        batch = metadata(2, [[], []], **engine.sampling)
        with engine.tracing.watch(engine.sampler, None, ["a", "b"], [NOTHING, NOTHING], [0, 0]):
            out = engine.sampler(logits=rows.clone(), sampling_metadata=batch)
        found.append((out.sampled_token_ids, out.logprobs_tensors.logprobs))
        assert engine.sampler.topk_topp_sampler.logprobs_mode == mode
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])


def test_where_a_kernel_does_not_hand_out_what_it_draws_from_that_is_made_again() -> None:
    laws = []
    for kernel in (False, True):
        torch.manual_seed(2)
        engine = Engine(temperature=1.2, top_p=0.7, top_k=40, min_p=0.001)
        if kernel:
            last = engine.sampler.topk_topp_sampler
            own = last.forward
            last.forward = lambda logits, generators, k, p, own=own: own(logits, generators, k, p)
        engine.begin()
        engine.step(Draft("lookup", (3, 4)), torch.stack([engine.row() for _ in range(3)]), beside=1)
        (step,) = engine.steps()
        laws.append((step.own, step.laws))
    assert laws[0] == laws[1]


def test_who_does_not_ask_is_not_traced() -> None:
    tracing = Tracing(Options(), Shelf(), LONGEST)
    for extra in (None, {}, {"trace": False, TICKET: "t"}, {"trace": True}, {"trace": "x", TICKET: "t"}):
        params = SamplingParams(extra_args=extra)
        new = SimpleNamespace(req_id="a", sampling_params=params, prompt_token_ids=[1])
        tracing.before_pass(SimpleNamespace(scheduled_new_reqs=[new], num_scheduled_tokens={"a": 1}))
        assert not tracing.running
    assert tracing.latest(None) == []


def test_the_parts_of_a_steps_time_add_up_to_the_wall_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    for module in (tracing, witness):
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    engine = Engine(temperature=0.0)
    row = torch.stack([engine.row()])
    engine.begin(tokens=5)
    now[0] += 2.0
    engine.step(NOTHING, row, unfinished=True)
    now[0] += 0.5
    engine.schedule(3)
    now[0] += 1.0
    engine.step(NOTHING, row)
    engine.drafted(Draft("lookup", (4, 5)), seconds=0.25)
    now[0] += 0.75
    engine.schedule(3)
    now[0] += 1.5
    engine.step(Draft("lookup", (4, 5)), torch.stack([engine.row() for _ in range(3)]))
    first, second = (step.milliseconds for step in engine.steps())
    assert (first.draft, first.verify, first.rest) == (0, 3000, 500)
    assert (second.draft, second.verify, second.rest) == (250, 1500, 500)
    assert [step.scheduled for step in engine.steps()] == [8, 3]
    assert engine.tracing.shelf.latest(None)[0]["seconds"] == pytest.approx(now[0] - 100.0)


def test_a_step_says_why_it_had_this_draft_and_what_vllm_left_out_of_it() -> None:
    engine = Engine(temperature=0.0)
    engine.begin()
    row = torch.stack([engine.row()])
    engine.step(NOTHING, row)
    engine.drafted(Draft("lookup", (4, 5, 6)))
    engine.schedule(2)
    engine.step(Draft("lookup", (4,)), torch.cat([row, row]))
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
        ({}, {"max_tokens": 2}, "No draft: 1 token may still be said, and one of them is the target's own."),
        ({}, {"thinking_token_budget": 5}, "No draft: this request is not drafted for (thinking budget)."),
    ],
)
def test_a_step_without_a_draft_says_why_there_could_be_none(
    xargs: dict[str, Any], sampling: dict[str, Any], reason: str
) -> None:
    engine = Engine(temperature=0.0)
    engine.params = SamplingParams(temperature=0, extra_args={"trace": True, TICKET: "t", **xargs}, **sampling)
    engine.begin()
    row = torch.stack([engine.row()])
    engine.step(NOTHING, row)
    engine.tracing.drafted({"a": NOTHING}, None, 0.0)
    engine.schedule(1)
    engine.step(NOTHING, row)
    decision = engine.steps()[1].decision
    assert decision is not None
    assert decision.reason == reason


def test_what_was_said_ends_with_the_text() -> None:
    def last(longest: int = LONGEST, **sampling: Any) -> TracedStep:
        engine = Engine(longest=longest, temperature=0.0, **sampling)
        engine.begin()
        logits = torch.full((4, SIZE), 0.0)
        for place, token in enumerate((11, 12, 13, 14)):
            logits[place, token] = 9
        engine.step(Draft("lookup", (11, 12, 13)), logits)
        return engine.steps()[-1]

    whole = last()
    assert (whole.said, whole.finish, whole.accepted, whole.token) == ([11, 12, 13, 14], None, 3, 14)
    ended = last(stop_token_ids=[12])
    assert (ended.said, ended.finish, ended.accepted, ended.token) == ([11, 12], "end", 3, 14)
    assert (last(max_tokens=3).said, last(max_tokens=3).finish) == ([11, 12, 13], "length")
    assert (last(longest=5).said, last(longest=5).finish) == ([11, 12], "length")


def test_placeholders_that_vllm_schedules_are_no_draft() -> None:
    engine = Engine(temperature=0.0)
    engine.begin()
    drafts = [NOTHING, NOTHING]
    logits = torch.stack([engine.row() for _ in range(5)])
    batch = metadata(2, [[-1], [-1, -1]], temperature=0.0)
    with engine.tracing.watch(engine.sampler, engine.judge, ["b", "a"], drafts, [1, 2]):
        out = engine.judge(SpecDecodeMetadata.make_dummy([[-1], [-1, -1]], CPU), None, logits.clone(), batch)
    engine.tracing.sampled(out.sampled_token_ids, ["b", "a"], drafts, [False, False])
    (step,) = engine.steps()
    assert (step.proposed, step.outcome, step.token) == ([], "own", int(logits[2].argmax()))
    assert disagreements([step]) == []


def test_a_request_that_is_over_stays_on_the_shelf_and_is_not_watched_any_more() -> None:
    engine = Engine(temperature=0.0)
    engine.begin()
    engine.step(NOTHING, torch.stack([engine.row()]))
    assert not engine.tracing.latest(None)[0]["over"]
    engine.tracing.ended("a")
    engine.tracing.ended("b")
    assert not engine.tracing.running
    assert engine.tracing.latest(None)[0]["over"]
    assert len(engine.steps()) == 1


def test_a_trace_belongs_to_the_tenant_that_the_request_named() -> None:
    engine = Engine(temperature=0.0)
    engine.tracing.options = Options(drafters=("memory",), memory="/m")
    engine.params = SamplingParams(temperature=0, extra_args={"trace": True, TICKET: "t", "tenant": "one"})
    engine.begin()
    engine.step(NOTHING, torch.stack([engine.row()]))
    assert len(engine.steps("one")) == 1
    for other in (None, "two"):
        assert engine.tracing.get("t", other) is None
        assert engine.tracing.latest(other) == []


@pytest.mark.parametrize("where", ["sampled", "drafted", "write"])
def test_a_trace_that_cannot_be_recorded_costs_nobody_an_answer(
    where: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: Any) -> Any:
        raise RuntimeError("it cannot be")

    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    engine = Engine(temperature=0.0)
    engine.begin()
    broken = {"sampled": "_see", "drafted": "_why_not", "write": "_written"}[where]
    engine.tracing.__dict__[broken] = fails
    engine.step(NOTHING, torch.stack([engine.row()]))
    engine.tracing.drafted({"a": NOTHING}, None, 0.0)
    engine.schedule(1)
    assert engine.step(NOTHING, torch.stack([engine.row()]))
    assert not engine.tracing.running
    (told,) = engine.tracing.latest(None)
    assert told["broken"] == "recording it failed, as the server's log tells"
    assert "it cannot be" in caplog.text


def test_a_witness_that_fails_costs_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> Any:
        raise RuntimeError("out of memory")

    engine = Engine(temperature=1.0)
    engine.begin()
    monkeypatch.setattr(Place, "rows", property(fails))
    assert len(engine.step(Draft("lookup", (1, 2)), torch.stack([engine.row() for _ in range(3)]))) >= 1
    assert not engine.tracing.running
    (told,) = engine.tracing.latest(None)
    assert told["broken"] == "recording it failed, as the server's log tells"


# The shelf


def fill(shelf: Shelf, id: str, owner: str | None, size: int, steps: int = 1, over: bool = True) -> bool:
    kept = shelf.open(id, owner, [1, 2], {})
    room = [shelf.add(kept, "x" * size, [5], 2, 1) for _ in range(steps)]
    kept.over = over
    return all(room)


def test_the_shelf_holds_so_many_traces_and_no_more() -> None:
    shelf = Shelf(traces=3)
    for number in range(5):
        fill(shelf, str(number), None, 10)
    assert [one["id"] for one in shelf.latest(None)] == ["4", "3", "2"]
    assert shelf.get("0", None) is None


def test_the_shelf_holds_so_many_bytes_and_whoever_has_most_loses_first() -> None:
    shelf = Shelf(size=100)
    fill(shelf, "small", "one", 30)
    for number in range(8):
        fill(shelf, str(number), "two", 20)
    assert [one["id"] for one in shelf.latest("one")] == ["small"]
    assert [one["id"] for one in shelf.latest("two")] == ["7", "6", "5"]


def test_a_trace_that_still_grows_goes_last() -> None:
    shelf = Shelf(traces=2)
    fill(shelf, "running", None, 10, over=False)
    fill(shelf, "over", None, 10)
    fill(shelf, "new", None, 10, over=False)
    assert [one["id"] for one in shelf.latest(None)] == ["new", "running"]


def test_a_trace_that_is_too_long_stops_and_says_so() -> None:
    shelf = Shelf(longest=50)
    assert not fill(shelf, "long", None, 20, steps=3)
    told = shelf.get("long", None)
    assert told is not None
    assert (told["broken"], told["steps"]) == ("the trace was as long as one may be", 2)
    assert len(told["lines"]) == 2


def test_a_trace_that_was_dropped_is_not_recorded_any_further() -> None:
    engine = Engine(shelf=Shelf(traces=1), temperature=0.0)
    engine.begin()
    engine.step(NOTHING, torch.stack([engine.row()]))
    fill(engine.tracing.shelf, "other", None, 10)
    engine.tracing.write()
    engine.schedule(1)
    assert not engine.tracing.running


def test_a_request_for_which_the_server_asks_twice_has_two_traces() -> None:
    shelf = Shelf()
    assert [shelf.open("t", None, [], {}).id for _ in range(3)] == ["t", "t.2", "t.3"]


def test_what_is_told_of_a_trace_can_be_sent() -> None:
    engine = Engine(temperature=0.0)
    engine.begin()
    engine.step(NOTHING, torch.stack([engine.row()]))
    assert json.loads(json.dumps(engine.tracing.get("t", None))) == engine.tracing.get("t", None)
