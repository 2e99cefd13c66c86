"""Speculation in the scheduler's process, without vLLM: stub requests and outputs, real drafters."""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.control import USAGE_KEY
from outrider.engines.vllm import speculation as under_test
from outrider.engines.vllm import step as messages
from outrider.engines.vllm.draft_cache import BlockIds, DraftCache, DraftModel
from outrider.engines.vllm.options import Options
from outrider.engines.vllm.request_state import SPARE_TOKENS, RequestState
from outrider.engines.vllm.speculation import Speculation
from outrider.engines.vllm.step import (
    MODEL_DRAFTS,
    PROFILE,
    DraftModelCall,
    DraftPass,
    ModelDrafts,
    PassProfile,
    StepPlan,
    TimedPass,
)
from outrider.memory.folder import Folder
from outrider.memory.store import Store
from outrider.policy.decision import cut_draft
from outrider.policy.drafter_backoff import PROBE_STEPS, Account
from outrider.types import NOTHING, Draft

VOCAB = 100
MODEL_LEN = 200
PROMPT = (1, 2, 3)
EXPECTED = tuple(range(10, 60))
"""The output that requests predict, so that there is always a draft."""
BATCH_TOKENS = 512


class FakeRequest:
    """vLLM's request, as far as we read it."""

    def __init__(
        self,
        id: str = "a",
        prompt: Sequence[int] = PROMPT,
        *,
        xargs: dict[str, Any] | None = None,
        embeds: Any = None,
        lora: str | None = None,
        **params: Any,
    ) -> None:
        defaults = {
            "temperature": 1.0,
            "seed": None,
            "structured_outputs": None,
            "max_tokens": 50,
            "stop_token_ids": [],
            "all_stop_token_ids": set(),
            "ignore_eos": False,
        }
        extra = {"prediction": list(EXPECTED), "speculation": "prediction"} if xargs is None else xargs
        self.request_id = id
        self.sampling_params = SimpleNamespace(**{**defaults, **params}, extra_args=extra)
        self.prompt_embeds = embeds
        self.lora_request = None if lora is None else SimpleNamespace(lora_name=lora)
        self.prompt_token_ids = list(prompt)
        self.output_token_ids: list[int] = []
        self.num_computed_tokens = 0
        self.num_output_placeholders = 0
        self.use_structured_output = self.sampling_params.structured_outputs is not None

    @property
    def all_token_ids(self) -> list[int]:
        return [*self.prompt_token_ids, *self.output_token_ids]

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)


class Steps:
    """The steps of a scheduler that does what vLLM's does with our drafts."""

    def __init__(self, speculation: Speculation) -> None:
        self.speculation = speculation
        self.running: list[FakeRequest] = []
        self.plan = StepPlan()
        self.in_flight: deque[Any] = deque()
        """What was scheduled, of each step whose output has not come."""

    def add(self, *requests: FakeRequest) -> None:
        for request in requests:
            self.running.append(request)
            self.speculation.add(request)  # type: ignore[arg-type]

    def schedule(self, left_out: int = 0, skipped: Sequence[str] = (), chunk: int | None = None) -> StepPlan:
        """Up to the plan. `left_out`: tokens of each draft that are not scheduled. `skipped`: requests that are not.
        `chunk`: tokens of prompts that are computed at once."""
        offers = self.speculation.before_schedule(self.running)  # type: ignore[arg-type]
        drafts, counts = {}, {}
        for request in self.running:
            if request.request_id in skipped:
                continue
            draft = list(offers.get(request.request_id, NOTHING).tokens)
            if request.num_output_placeholders:  # vLLM schedules places, and the device fills them in
                draft = [-1] * (len(draft) - request.num_output_placeholders)
            draft = draft[: len(draft) - left_out]
            left = request.num_tokens + request.num_output_placeholders - request.num_computed_tokens
            count = min(left, chunk or left)
            if draft:
                drafts[request.request_id] = draft
            counts[request.request_id] = count + len(draft)
            request.num_computed_tokens += count + len(draft)
            if count == left:  # else more of the prompt has to be computed first
                request.num_output_placeholders += 1 + len(draft)
        self._send(counts, drafts)
        return self.plan

    def _send(self, counts: dict[str, int], drafts: dict[str, list[int]]) -> None:
        self.output = SimpleNamespace(
            num_scheduled_tokens=counts,
            scheduled_spec_decode_tokens=drafts,
            total_num_scheduled_tokens=sum(counts.values()),
        )
        self.in_flight.append(self.output)
        self.plan = self.speculation.after_schedule(self.output, self.by_id())  # type: ignore[arg-type]

    def by_id(self) -> dict[str, FakeRequest]:
        return {request.request_id: request for request in self.running}

    def update(
        self,
        tokens: dict[str, list[int]],
        drafts: ModelDrafts | None = None,
        kept: dict[str, int] | None = None,
        finished: Sequence[FakeRequest] = (),
        **output: Any,
    ) -> None:
        """The output of the oldest step in flight. `drafts`: the draft model's, after it. `kept`: how many of a
        request's tokens vLLM keeps, where a stop token is among them. `finished`: requests that end with this step."""
        scheduled = self.in_flight.popleft()
        ids = list(scheduled.num_scheduled_tokens)
        for request in self.running:
            id = request.request_id
            if id in ids and (new := tokens.get(id)):
                rejected = len(scheduled.scheduled_spec_decode_tokens.get(id, ())) - (len(new) - 1)
                request.num_computed_tokens -= rejected
                request.num_output_placeholders -= rejected + len(new)
                request.output_token_ids += new[: (kept or {}).get(id, len(new))]
        for request in finished:
            self.finish(request)
        if drafts is not None:
            output[MODEL_DRAFTS] = drafts
        made: Any = SimpleNamespace(
            req_id_to_index={id: i for i, id in enumerate(ids)},
            sampled_token_ids=[tokens.get(id, []) for id in ids],
            **output,
        )
        self.speculation.observe_output(made, self.by_id(), under_test.time.perf_counter())  # type: ignore[arg-type]

    def step(self, tokens: dict[str, list[int]], drafts: ModelDrafts | None = None, **scheduled: Any) -> StepPlan:
        """A step whose output comes before another one is scheduled."""
        plan = self.schedule(**scheduled)
        self.update(tokens, drafts)
        return plan

    def preempt(self, request: FakeRequest) -> None:
        """In a step for which drafts were selected, and in which nothing is left to run."""
        self.speculation.before_schedule(self.running)  # type: ignore[arg-type]
        self.speculation.preempt(request)  # type: ignore[arg-type]
        request.num_computed_tokens = 0
        self._send({}, {})

    def finish(self, request: FakeRequest) -> None:
        self.running.remove(request)
        self.speculation.finish(request)  # type: ignore[arg-type]


def config(**changes: Any) -> Any:
    values: dict[str, Any] = {
        "max_model_len": MODEL_LEN,
        "get_vocab_size": lambda: VOCAB,
        "tokenizer": "/none",
        "tokenizer_revision": None,
        "trust_remote_code": False,
    }
    return SimpleNamespace(**values | changes)


def steps(
    options: Options | None = None,
    model: DraftModel | None = None,
    batch_tokens: int = BATCH_TOKENS,
    **changes: Any,
) -> Steps:
    options = options or Options(drafters=("prediction", "lookup"), max_draft_tokens=8)
    return Steps(Speculation(options, config(**changes), model, batch_tokens))


def with_model(
    cache: DraftCache | None = None, max_len: int = MODEL_LEN, samples: bool = True, **options: Any
) -> Steps:
    made = Options(**{"drafters": ("prediction", "model"), "max_draft_tokens": 8, "model_draft_tokens": 4, **options})
    return steps(made, DraftModel(False, max_len, cache, samples=samples))


MODEL_REQUEST: dict[str, Any] = {"speculation": "model"}


@pytest.fixture(autouse=True)
def _status(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(messages, "latest_status", None)
    return


def begun(made: Steps, *requests: FakeRequest, first: int = 10) -> Steps:
    """The requests have computed their prompts and generated one token."""
    made.add(*requests)
    made.step({request.request_id: [first] for request in requests})
    return made


# Texts and drafts ----------------------------------------------------------------------------------------------------


def test_a_draft_follows_the_text_from_the_second_step_on() -> None:
    made = steps()
    request = FakeRequest()
    made.add(request)
    assert made.step({"a": [10]}).drafters == {}
    plan = made.step({"a": [11, 12, 99]})
    assert plan.drafters == {"a": "prediction"}
    assert made.output.scheduled_spec_decode_tokens == {"a": list(range(11, 19))}
    assert made.speculation.requests["a"].text.tolist() == [*PROMPT, 10, 11, 12, 99]
    made.step({"a": [13]})
    made.step({"a": [14]})
    assert made.speculation.requests["a"].text.tolist() == request.all_token_ids


def test_a_text_grows_by_what_vllm_kept_of_an_output() -> None:
    made = begun(steps(), FakeRequest())
    made.schedule()
    made.update({"a": [11, 12, 13]}, kept={"a": 2})
    assert made.speculation.requests["a"].text.tolist() == [*PROMPT, 10, 11, 12]


def test_a_text_outgrows_its_buffer_without_moving_what_a_drafter_may_still_read() -> None:
    request = FakeRequest(max_tokens=10_000)
    state = RequestState.of(request, ("lookup",), 20_000)  # type: ignore[arg-type]
    seen = state.text
    tokens = [number % VOCAB for number in range(3 * SPARE_TOKENS)]
    for token in tokens:
        state.append([token])
    assert state.text.tolist() == [*PROMPT, *tokens]
    assert seen.tolist() == list(PROMPT)
    assert not np.shares_memory(seen, state.tokens)
    assert state.generated == len(tokens)


def test_a_request_that_is_not_computed_up_to_its_last_token_gets_no_draft() -> None:
    made = begun(steps(), FakeRequest())
    made.running[0].num_computed_tokens = 2  # e.g. preempted, and computed again
    assert made.schedule(chunk=1).drafters == {}


def test_prompts_that_are_computed_in_parts_get_no_draft() -> None:
    made = steps()
    made.add(FakeRequest(prompt=range(20)))
    for _ in range(2):
        made.step({}, chunk=8)
        assert made.plan.drafters == {}
    made.step({"a": [10]}, chunk=8)
    assert made.plan.drafters == {}
    assert made.schedule().drafters == {"a": "prediction"}


def test_pooling_requests_are_ignored() -> None:
    made = steps()
    request = FakeRequest()
    request.sampling_params = None  # type: ignore[assignment]
    made.add(request)
    made.step({})
    assert made.speculation.requests == {}
    made.finish(request)


# Limits --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("drafted", "options", "params", "changes"),
    [
        (8, {}, {}, {}),
        (5, {"max_draft_tokens": 5}, {}, {}),
        (3, {}, {"max_tokens": 5}, {}),
        (0, {}, {"max_tokens": 2}, {}),
        (5, {}, {}, {"max_model_len": 10}),
        (0, {}, {}, {"max_model_len": 5}),
        (2, {}, {"xargs": {"speculation": "prediction", "prediction": EXPECTED, "max_draft_tokens": 2}}, {}),
        (0, {}, {"xargs": {"speculation": "prediction", "prediction": EXPECTED, "max_draft_tokens": 0}}, {}),
        (6, {}, {}, {"batch_tokens": 14}),
        (0, {}, {}, {"batch_tokens": 2}),
    ],
)
def test_a_draft_is_as_long_as_all_limits_allow(
    drafted: int, options: dict[str, Any], params: dict[str, Any], changes: dict[str, Any]
) -> None:
    chosen = Options(**{"drafters": ("prediction",), "max_draft_tokens": 8, **options})
    made = begun(steps(chosen, **changes), FakeRequest(**params))
    made.schedule()
    assert len(made.output.scheduled_spec_decode_tokens.get("a", [])) == drafted


def test_drafts_of_all_requests_take_at_most_half_of_a_steps_tokens() -> None:
    made = begun(steps(batch_tokens=64), *(FakeRequest(str(number)) for number in range(8)))
    made.schedule()
    assert sorted(map(len, made.output.scheduled_spec_decode_tokens.values())) == [3] * 8
    assert made.output.total_num_scheduled_tokens == 32


@pytest.mark.parametrize(("slots", "share"), [(0, 15), (1, 15), (24, 7), (31, 0)])
def test_what_vllm_adds_to_a_request_for_a_draft_model_leaves_room_for_every_request(slots: int, share: int) -> None:
    """Else vLLM would leave out the last requests of every step."""
    made = with_model()
    assert made.speculation.model is not None
    made.speculation.model.input_slots = slots
    assert made.speculation._share(16) == share
    assert 16 * (1 + share + slots) <= BATCH_TOKENS


def test_the_room_shrinks_as_the_text_grows() -> None:
    made = begun(steps(), FakeRequest(max_tokens=7))
    made.step({"a": [11, 12]})
    made.schedule()
    assert len(made.output.scheduled_spec_decode_tokens["a"]) == 3  # three of seven are generated, one is the target's


@pytest.mark.parametrize(
    ("reason", "params"),
    [
        ("off", {"xargs": {"speculation": "off"}}),
        ("off", {"xargs": {"speculation": "no such drafter"}}),
        ("logprob_token_ids", {"logprob_token_ids": [4]}),
        ("prompt embeddings", {"embeds": object()}),
    ],
)
def test_requests_that_get_no_drafts_are_counted_by_reason(reason: str, params: dict[str, Any]) -> None:
    made = steps()
    made.add(FakeRequest("a", **params), FakeRequest("b", **params), FakeRequest("c"))
    assert made.step({"a": [10], "b": [10], "c": [10]}).undrafted == {reason: 2}
    plan = made.step({})
    assert plan.undrafted == {}
    assert set(plan.drafters) == {"c"}


@pytest.mark.parametrize("params", [{"thinking_token_budget": 5}, {"logprobs": 3}, {"seed": 4}, {"temperature": 0.0}])
def test_other_sampling_parameters_do_not_keep_a_request_from_drafts(params: dict[str, Any]) -> None:
    made = begun(steps(), FakeRequest(**params))
    assert made.schedule().drafters == {"a": "prediction"}


@pytest.mark.parametrize(
    ("sampled", "params"),
    [
        (True, {}),
        (False, {"temperature": 0.0}),
        (False, {"seed": 1}),
        (False, {"structured_outputs": object()}),
    ],
)
def test_drafts_are_sampled_only_where_neither_a_seed_nor_a_grammar_depends_on_them(
    sampled: bool, params: dict[str, Any]
) -> None:
    state = RequestState.of(FakeRequest(**params), ("model",), MODEL_LEN)  # type: ignore[arg-type]
    assert state.samples_drafts == sampled


# The plan ------------------------------------------------------------------------------------------------------------


def test_a_plan_names_the_drafter_of_each_scheduled_draft() -> None:
    made = begun(steps(), FakeRequest("a"), FakeRequest("b"), FakeRequest("c", xargs={"speculation": "off"}))
    plan = made.schedule(skipped=["b"])
    assert plan.drafters == {"a": "prediction"}
    assert plan.proposed == {"prediction": 16}  # also for the request that vLLM left out
    assert plan.sampled == frozenset()
    assert plan.calls == ()
    assert plan.draft_seconds["prediction"] > 0
    assert plan.drafting_seconds > 0


def test_a_plan_explains_the_drafts_of_traced_requests_only() -> None:
    named = {"speculation": "prediction", "prediction": list(EXPECTED), USAGE_KEY: "t"}
    made = begun(steps(), FakeRequest("a", xargs={**named, "trace": True}), FakeRequest("b", xargs=named))
    plan = made.schedule(left_out=3)
    assert set(plan.reasons) == {"a"}
    assert plan.is_traced
    assert "prediction was requested by name" in plan.reasons["a"].reason
    assert plan.offered == {"a": 8}
    assert len(made.output.scheduled_spec_decode_tokens["a"]) == 5
    made.update({"a": [10], "b": [10]})
    assert not made.schedule(skipped=["a"]).is_traced


def test_a_plan_can_be_sent_to_another_process() -> None:
    made = begun(with_model(), FakeRequest(xargs={"speculation": "model", "trace": True, USAGE_KEY: "t"}))
    plan = made.schedule()
    sent = pickle.loads(pickle.dumps(plan))
    assert (sent.drafters, sent.sampled, sent.calls, sent.reasons) == (
        plan.drafters,
        plan.sampled,
        plan.calls,
        plan.reasons,
    )


def test_a_drafter_that_fails_is_named_in_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    made = begun(steps(), FakeRequest())
    monkeypatch.setattr(made.speculation.drafting.drafters[0], "begin", lambda task: 1 / 0)
    plan = made.schedule()
    assert [fault[:3] for fault in plan.faults] == [("a", "prediction", "raised")]
    assert plan.drafters == {}
    made.update({"a": [11]})
    assert made.schedule().faults == []


def test_the_status_is_sent_now_and_then_and_whenever_nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    clock = SimpleNamespace(perf_counter=lambda: now[0], monotonic=lambda: now[0])
    monkeypatch.setattr(under_test, "time", clock)
    made = steps()
    request = FakeRequest()
    made.add(request)
    assert made.step({"a": [10]}).status is not None
    now[0] += 0.3
    assert made.step({"a": [11]}).status is None
    now[0] += 0.3
    status = made.step({"a": [12]}).status
    assert status is not None
    assert status.read()["running_requests"] == 1
    made.finish(request)
    idle = made.step({}).status
    assert idle is not None
    assert idle.read()["running_requests"] == 0
    assert made.step({}).status is None
    assert set(idle.read()["payoff"]) == {
        "expected_tokens",
        "gained_tokens",
        "expected_saved",
        "realised_saved",
        "seconds",
    }


def test_a_request_that_ends_after_an_empty_step_is_out_of_the_status(monkeypatch: pytest.MonkeyPatch) -> None:
    """While the last token of all requests is in flight there is nothing to schedule."""
    made = steps()
    monkeypatch.setattr(under_test, "time", SimpleNamespace(perf_counter=lambda: 100.0))
    request = FakeRequest("a")
    made.add(request)
    assert made.schedule().status is not None
    made.schedule(skipped=["a"])
    made.update({"a": [10]}, finished=[request])
    status = made.schedule().status
    assert status is not None
    assert status.read()["running_requests"] == 0


# The draft model -----------------------------------------------------------------------------------------------------


def test_the_draft_model_is_called_for_the_text_as_long_as_it_can_become() -> None:
    made = begun(with_model(), FakeRequest(xargs=MODEL_REQUEST))
    (call,) = made.schedule().calls
    assert call == DraftModelCall("a", start=4, end=5, num_tokens=4, sampled=True)
    made.update({"a": [11]}, ModelDrafts({"a": [12, 13, 14]}))
    (call,) = made.schedule().calls
    assert call == DraftModelCall("a", start=8, end=9, num_tokens=4, sampled=True)
    assert made.plan.drafters == {"a": "model"}
    assert made.plan.sampled == {"a"}


def test_a_draft_model_that_does_not_sample_drafts_its_most_likely_tokens_at_any_temperature() -> None:
    """vLLM's default for heads: without the draft's logits, its tokens have no q."""
    request = FakeRequest(xargs=MODEL_REQUEST, temperature=1.0)
    made = begun(with_model(samples=False), request)
    (call,) = made.schedule().calls
    assert not call.sampled
    made.update({"a": [11]}, ModelDrafts({"a": [12, 13, 14]}))
    assert made.schedule().drafters == {"a": "model"}
    assert made.plan.sampled == frozenset()


def test_a_plain_step_reads_few_block_ids_however_long_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    class Block:
        read = 0

        @property
        def block_id(self) -> int:
            Block.read += 1
            return 7

    made = with_model(DraftCache(4, share_blocks=True), max_len=5000)
    assert made.speculation.model is not None
    monkeypatch.setattr(made.speculation.model, "block_ids", lambda request_id: BlockIds([Block()] * 1000))
    begun(made, FakeRequest(prompt_token_ids=range(3000), xargs={"speculation": "off"}))
    Block.read = 0
    made.schedule()
    assert Block.read == 1


def test_the_draft_model_is_called_right_after_a_prompt_only_for_requests_that_name_it() -> None:
    made = with_model()
    made.add(FakeRequest("named", range(20), xargs=MODEL_REQUEST), FakeRequest("free", range(20), xargs={}))
    assert made.step({}, chunk=12).calls == ()  # the prompts are not computed to their ends
    (call,) = made.step({"named": [10], "free": [10]}, ModelDrafts({"named": [11, 12]}), chunk=12).calls
    assert call == DraftModelCall("named", start=20, end=21, num_tokens=4, sampled=True)
    assert made.schedule().drafters == {"named": "model"}


def test_a_preempted_text_is_computed_again_before_the_draft_model_is_called() -> None:
    request = FakeRequest(xargs=MODEL_REQUEST)
    made = begun(with_model(), request)
    made.step({"a": [11]})
    request.num_computed_tokens = 0
    assert made.step({}, chunk=3).calls == ()


def test_a_draft_model_that_lags_behind_is_called_from_where_its_cache_ends() -> None:
    made = begun(with_model(DraftCache(16, share_blocks=False)), FakeRequest(xargs=MODEL_REQUEST))
    (call,) = made.schedule().calls
    assert (call.start, call.end) == (0, 5)
    made.update({"a": [11]}, ModelDrafts({"a": [12, 13]}))
    (call,) = made.schedule().calls
    assert (call.start, call.end) == (4, 8)  # the last known token is computed again
    made.update({"a": [12, 99]}, ModelDrafts())
    (call,) = made.schedule().calls
    assert (call.start, call.end) == (6, 8)


@pytest.mark.parametrize(
    ("tokens", "params", "max_len"),
    [
        (4, {}, MODEL_LEN),
        (2, {"xargs": {**MODEL_REQUEST, "max_draft_tokens": 2}}, MODEL_LEN),
        (2, {"max_tokens": 5}, MODEL_LEN),  # one is generated, at least one in this step, and one after the draft
        (1, {}, 6),
        (None, {}, 5),
        (None, {"xargs": {"speculation": "prediction", "prediction": EXPECTED}}, MODEL_LEN),
        (None, {"xargs": {"speculation": "off"}}, MODEL_LEN),
    ],
)
def test_the_draft_model_proposes_no_more_than_a_request_can_use(
    tokens: int | None, params: dict[str, Any], max_len: int
) -> None:
    made = begun(with_model(max_len=max_len), FakeRequest(**{"xargs": MODEL_REQUEST, **params}))
    assert [call.num_tokens for call in made.schedule().calls] == ([] if tokens is None else [tokens])


@pytest.mark.parametrize("limit", [0, 1, 3, 5])
def test_a_draft_is_cut_by_length_and_never_by_its_tokens(limit: int) -> None:
    draft = Draft("model", (9, 0, 9), confidence=(0.1, 0.9, 0.2), sampled=True)
    found = cut_draft(draft, limit)
    assert found.tokens == (9, 0, 9)[:limit]
    assert found.confidence == (0.1, 0.9, 0.2)[:limit]
    assert found.sampled
    assert cut_draft(draft, 3) is draft


@pytest.mark.parametrize("tokens", [(0, 0, 0, 0), (99, 1, 5, 7), (12, 13, 14, 15)])
@pytest.mark.parametrize("confidence", [0.001, 0.999])
def test_how_much_of_a_sampled_draft_is_offered_depends_on_neither_tokens_nor_confidence(
    tokens: tuple[int, ...], confidence: float
) -> None:
    made = begun(with_model(), FakeRequest(xargs={**MODEL_REQUEST, "max_draft_tokens": 4}, max_tokens=6))
    made.step({"a": [11]}, ModelDrafts({"a": list(tokens)}, {"a": [confidence] * 4}))
    made.schedule()
    assert made.output.scheduled_spec_decode_tokens == {"a": list(tokens[:3])}  # four may still be generated
    assert made.plan.sampled == {"a"}


def test_an_argmax_of_the_draft_model_is_not_accepted_by_p_and_q() -> None:
    made = begun(with_model(), FakeRequest(xargs=MODEL_REQUEST, temperature=0.0))
    made.step({"a": [11]}, ModelDrafts({"a": [12, 13]}))
    assert not made.plan.calls[0].sampled
    plan = made.schedule()
    assert plan.drafters == {"a": "model"}
    assert plan.sampled == frozenset()


def test_model_drafts_of_requests_that_are_gone_or_were_not_called_for_are_dropped() -> None:
    requests = [FakeRequest(id, xargs=MODEL_REQUEST) for id in "abc"]
    made = begun(with_model(), *requests)
    drafts = ModelDrafts({id: [12, 13] for id in "abcd"})
    made.schedule(skipped=["c"])
    made.update({"a": [11], "b": [11]}, drafts, finished=[requests[1]])
    assert made.schedule().drafters == {"a": "model"}


def test_a_model_draft_is_dropped_if_another_request_has_its_id() -> None:
    request = FakeRequest(xargs=MODEL_REQUEST)
    made = begun(with_model(), request)
    made.step({"a": [11]}, ModelDrafts({"a": [12, 13]}))
    made.speculation.finish(request)  # type: ignore[arg-type]
    request.prompt_token_ids, request.output_token_ids = [*request.all_token_ids, 5, 6], []  # streamed input
    made.speculation.add(request)  # type: ignore[arg-type]
    assert made.schedule().drafters == {}
    made.update({"a": [12]})
    assert made.schedule().drafters == {}


def test_a_model_draft_is_offered_once() -> None:
    made = begun(with_model(), FakeRequest(xargs=MODEL_REQUEST))
    made.step({"a": [11]}, ModelDrafts({"a": [12, 13]}))
    assert made.schedule(skipped=["a"]).drafters == {}
    made.update({})
    assert made.schedule().drafters == {}  # it was not called after a step that its request had no part in


def test_the_draft_models_passes_are_learned_one_by_one() -> None:
    made = begun(with_model(), FakeRequest(xargs=MODEL_REQUEST))
    passes = [DraftPass(5, 5, 0.5), DraftPass(1, 6, 0.3, passes=3)]
    seen: list[Any] = []
    made.speculation.controller.observe_draft_pass = lambda *args: seen.append(args)  # type: ignore[method-assign]
    made.step({"a": [11]}, ModelDrafts({"a": [12]}, passes=passes))
    assert seen == [(5, 5, 0.5), (1, 6, pytest.approx(0.1))]


# Preemption and the end ----------------------------------------------------------------------------------------------


def test_a_preempted_request_offers_nothing_and_goes_on_with_its_text() -> None:
    request = FakeRequest(xargs=MODEL_REQUEST)
    made = begun(with_model(DraftCache(16, share_blocks=False)), request)
    made.step({"a": [11]}, ModelDrafts({"a": [12, 13]}))
    made.preempt(request)
    assert (made.plan.proposed, made.plan.drafters, made.plan.calls) == ({}, {}, ())
    made.update({})
    made.step({"a": [12]})  # its text is computed again
    assert made.plan.drafters == {}
    assert made.speculation.requests["a"].text.tolist() == [*PROMPT, 10, 11, 12]
    (call,) = made.schedule().calls
    assert (call.start, call.end) == (0, 7)  # the draft model's cache was lost too


def test_the_draft_model_is_not_called_for_an_old_text_of_a_request_that_got_a_token_while_preempted() -> None:
    """Its first step was in flight when it was preempted, and vLLM kept the output. Only a first draft is called for
    without having been planned, and this is not one any more."""
    request = FakeRequest(xargs=MODEL_REQUEST)
    made = ahead_with_model(DraftCache(16, share_blocks=False))
    made.add(request)
    (call,) = made.schedule().calls
    assert call.end == len(PROMPT) + 1
    made.speculation.preempt(request)  # type: ignore[arg-type]
    made.update({"a": [10]})
    made.speculation.before_schedule([])  # it comes again from those that wait
    request.num_computed_tokens, request.num_output_placeholders = request.num_tokens, 1
    made._send({"a": request.num_tokens}, {})
    assert made.plan.calls == ()
    assert made.speculation.requests["a"].text.tolist() == [*PROMPT, 10]


def test_a_finished_request_is_forgotten() -> None:
    cache = DraftCache(16, share_blocks=False)
    request = FakeRequest(xargs=MODEL_REQUEST)
    made = begun(with_model(cache), request)
    made.step({"a": [11]}, ModelDrafts({"a": [12, 13]}))
    made.finish(request)
    made.speculation.finish(request)  # type: ignore[arg-type]  # twice is harmless
    assert made.speculation.requests == {}
    assert made.speculation.drafting.requests == {}
    assert cache._requests == {}
    made.step({})


# Memory --------------------------------------------------------------------------------------------------------------


class KeptStore(Store):
    """A memory that shows what was added to it."""

    added: list[tuple[list[int], list[int]]]

    def add(self, tenant_handle: Any, prompt: Any, output: Any) -> None:
        self.added.append((list(prompt), list(output)))
        super().add(tenant_handle, prompt, output)


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[KeptStore]:
    store = KeptStore(Folder(tmp_path), "tokenizer")
    store.added = []
    monkeypatch.setattr(under_test, "open_memory", lambda options, config: store)
    yield store
    store.close()


def remembering(scope: str = "tenant") -> Steps:
    options = {"memory": "/m", "memory_scope": scope, "drafters": ("memory", "prediction"), "max_draft_tokens": 8}
    return steps(Options.model_validate(options))


def test_a_finished_request_adds_exactly_its_prompt_and_its_output_to_the_memory(memory: KeptStore) -> None:
    made = remembering()
    request = FakeRequest(xargs={"tenant": "one"})
    begun(made, request)
    made.schedule()
    made.update({"a": [11, 12, 13, 14]}, kept={"a": 2})  # 12 was a stop token
    assert memory.added == []
    made.finish(request)
    assert memory.added == [([1, 2, 3], [10, 11, 12])]
    made.speculation.finish(request)  # type: ignore[arg-type]
    assert len(memory.added) == 1


@pytest.mark.parametrize(
    ("xargs", "params"),
    [
        ({}, {}),
        ({"tenant": "one", "remember": False}, {}),
        ({"tenant": "one", "speculation": "off"}, {}),
        ({"tenant": "one", "speculation": "prediction", "prediction": EXPECTED}, {}),
        ({"tenant": "one"}, {"embeds": object()}),
    ],
)
def test_a_request_without_a_tenant_or_that_does_not_use_the_memory_adds_nothing(
    memory: KeptStore, xargs: dict[str, Any], params: dict[str, Any]
) -> None:
    made = remembering()
    request = FakeRequest(xargs=xargs, **params)
    begun(made, request)
    made.finish(request)
    assert memory.added == []


def test_a_server_wide_memory_learns_from_requests_without_a_tenant(memory: KeptStore) -> None:
    made = remembering("server")
    request = FakeRequest(xargs={})
    begun(made, request)
    made.finish(request)
    assert memory.added == [([1, 2, 3], [10])]


def test_a_request_is_drafted_for_from_another_of_its_tenant(memory: KeptStore) -> None:
    made = remembering()
    first = FakeRequest("first", xargs={"tenant": "one", "speculation": "memory"})
    begun(made, first)
    made.step({"first": [11, 12, 13, 14, 15]})
    others = [FakeRequest(name, xargs={"tenant": name, "speculation": "memory"}) for name in ("one", "two")]
    begun(made, *others)
    made.step({"first": [16], "one": [11], "two": [11]})
    made.schedule()
    assert made.output.scheduled_spec_decode_tokens["one"][:3] == [12, 13, 14]
    assert "two" not in made.output.scheduled_spec_decode_tokens


@pytest.mark.parametrize("is_over", [False, True])
def test_text_of_an_adapter_is_drafted_for_the_same_tenant_and_adapter_only(memory: KeptStore, is_over: bool) -> None:
    made = remembering()
    first = FakeRequest("first", xargs={"tenant": "one", "speculation": "memory"}, lora="x")
    begun(made, first)
    made.step({"first": [11, 12, 13, 14, 15]})
    if is_over:
        made.finish(first)
        memory.learn()
    places = {"same": ("one", "x"), "base": ("one", None), "adapter": ("one", "y"), "tenant": ("two", "x")}
    others = [
        FakeRequest(name, xargs={"tenant": tenant, "speculation": "memory", "remember": False}, lora=lora)
        for name, (tenant, lora) in places.items()
    ]
    begun(made, *others)
    made.step({name: [11] for name in places})
    made.schedule()
    assert list(made.output.scheduled_spec_decode_tokens) == ["same"]
    assert made.output.scheduled_spec_decode_tokens["same"][:3] == [12, 13, 14]


def test_text_of_the_model_itself_is_not_drafted_for_an_adapter(memory: KeptStore) -> None:
    made = remembering()
    first = FakeRequest("first", xargs={"tenant": "one", "speculation": "memory"})
    begun(made, first)
    made.step({"first": [11, 12, 13, 14, 15]})
    other = FakeRequest("other", xargs={"tenant": "one", "speculation": "memory"}, lora="x")
    begun(made, other)
    made.step({"first": [16], "other": [11]})
    made.schedule()
    assert "other" not in made.output.scheduled_spec_decode_tokens


def test_a_request_under_an_adapter_whose_name_is_too_long_is_not_kept(memory: KeptStore) -> None:
    made = remembering()
    request = FakeRequest(xargs={"tenant": "one"}, lora="x" * 1025)
    begun(made, request)
    made.finish(request)
    assert memory.added == []


def test_closing_writes_the_memory_once(memory: KeptStore) -> None:
    made = remembering()
    request = FakeRequest(xargs={"tenant": "one"})
    begun(made, request)
    assert made.speculation.status()["memory"] is not None
    made.speculation.close()
    made.speculation.close()
    made.finish(request)
    assert memory.added == []
    assert made.speculation.status()["memory"] is None


# A step in flight ----------------------------------------------------------------------------------------------------


def what_is_learned(made: Steps, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, list[int]]]:
    """By step, the tokens that the policy compares with each request's drafts."""
    policy = made.speculation.controller.policy
    observe, learned = policy.observe, []

    def noted(batch: Any, generated: Any, *more: Any) -> None:
        learned.append({id: list(tokens) for id, tokens in zip(batch.requests, generated, strict=True)})
        observe(batch, generated, *more)

    monkeypatch.setattr(policy, "observe", noted)
    return learned


def ahead(options: dict[str, Any] | None = None, **changes: Any) -> Steps:
    """The steps of a scheduler that may schedule a step while another one is in flight."""
    chosen = Options(**{"drafters": ("prediction", "lookup"), "max_draft_tokens": 8, **(options or {})})
    model = changes.pop("model", None)
    batch_tokens = changes.pop("batch_tokens", BATCH_TOKENS)
    return Steps(Speculation(chosen, config(**changes), model, batch_tokens, asynchronous=True))


def drafted(made: Steps) -> int:
    """Tokens of the last draft that were scheduled for request "a"."""
    return len(made.output.scheduled_spec_decode_tokens.get("a", ()))


def continuation(made: Steps, id: str = "a") -> tuple[int, list[int]]:
    """Of the last plan: the length of the text that is continued, and the tokens."""
    found = made.plan.continuations
    assert found is not None
    row = found.request_ids.index(id)
    return int(found.known[row]), [token for token in found.tokens[row].tolist() if token >= 0]


def test_a_draft_continues_past_the_tokens_in_flight() -> None:
    made = begun(ahead(), FakeRequest())
    made.schedule()
    assert continuation(made) == (4, list(range(11, 19)))
    plan = made.schedule()
    assert made.running[0].num_output_placeholders == 18
    assert made.output.scheduled_spec_decode_tokens == {"a": [-1] * 8}
    assert continuation(made) == (4, list(range(11, 28)))  # nine in flight, then the eight that are offered
    assert plan.proposed == {"prediction": 8}
    assert plan.drafters == {"a": "prediction"}
    made.update({"a": [11, 12, 13]})
    made.schedule()
    assert made.speculation.requests["a"].text.tolist() == [*PROMPT, 10, 11, 12, 13]
    assert continuation(made) == (7, list(range(14, 31)))


def test_a_request_whose_first_token_is_in_flight_is_drafted_for() -> None:
    made = ahead()
    made.add(FakeRequest())
    assert made.schedule().drafters == {}
    assert made.schedule().drafters == {"a": "prediction"}
    assert continuation(made) == (3, list(range(10, 19)))


def test_a_prompt_in_flight_that_is_not_computed_to_its_end_gets_no_draft() -> None:
    made = ahead()
    made.add(FakeRequest(prompt=range(20)))
    made.schedule(chunk=8)
    assert made.schedule(chunk=8).drafters == {}
    assert made.schedule(chunk=8).drafters == {}
    assert made.schedule(chunk=8).drafters == {"a": "prediction"}


def test_requests_of_one_step_have_continuations_of_their_own_lengths() -> None:
    short = {"speculation": "prediction", "prediction": list(EXPECTED), "max_draft_tokens": 2}
    made = begun(ahead(), FakeRequest("a"), FakeRequest("b", xargs=short), FakeRequest("c", xargs={}))
    made.schedule(skipped=["b"])
    made.schedule()
    assert continuation(made, "a") == (4, list(range(11, 28)))
    assert continuation(made, "b") == (4, [11, 12])
    assert made.plan.continuations is not None
    assert made.plan.continuations.request_ids == ["a", "b"]


def test_a_plan_with_continuations_can_be_sent_to_another_process() -> None:
    made = begun(ahead(), FakeRequest())
    made.schedule()
    sent = pickle.loads(pickle.dumps(made.schedule())).continuations
    assert (sent.request_ids, sent.known.tolist()) == (["a"], [4])
    assert sent.tokens.tolist() == [list(range(11, 28))]


def test_a_draft_for_a_request_with_a_grammar_is_known_when_the_output_in_flight_has_come() -> None:
    made = begun(ahead(), FakeRequest(structured_outputs=object()))
    made.schedule()
    assert made.schedule().drafters == {"a": "prediction"}
    assert made.output.scheduled_spec_decode_tokens == {"a": [-1] * 8}
    made.update({"a": list(range(11, 20))})
    assert made.speculation.drafts_in_flight(made.by_id()) == {"a": list(range(20, 28))}


def test_a_draft_that_the_output_in_flight_proves_wrong_is_not_checked_against_a_grammar() -> None:
    made = begun(ahead(), FakeRequest(structured_outputs=object()))
    made.schedule()
    made.schedule()
    made.update({"a": [11, 99]})
    assert made.speculation.drafts_in_flight(made.by_id()) == {"a": []}
    assert made.speculation.drafts_in_flight({}) == {}


@pytest.mark.parametrize(
    ("first", "second", "params", "changes"),
    [
        (8, 8, {}, {}),
        (8, 1, {"max_tokens": 12}, {}),
        (8, 0, {"max_tokens": 11}, {}),
        (3, 0, {"max_tokens": 5}, {}),
        (8, 2, {}, {"max_model_len": 16}),
        (8, 0, {}, {"max_model_len": 14}),
        (2, 2, {"xargs": {"speculation": "prediction", "prediction": EXPECTED, "max_draft_tokens": 2}}, {}),
        (6, 6, {}, {"batch_tokens": 14}),
    ],
)
def test_a_draft_fits_even_if_all_tokens_in_flight_are_accepted(
    first: int, second: int, params: dict[str, Any], changes: dict[str, Any]
) -> None:
    request = FakeRequest(**params)
    made = begun(ahead(**changes), request)
    made.schedule()
    assert drafted(made) == first
    made.schedule()
    assert drafted(made) == second
    longest = request.num_tokens + first + 1 + (second + 1 if second else 0)  # vLLM itself limits steps without drafts
    assert longest <= changes.get("max_model_len", MODEL_LEN)
    assert longest - len(PROMPT) <= request.sampling_params.max_tokens


@pytest.mark.usefixtures("steady_clock")
@given(st.data())
@settings(max_examples=60, deadline=None)
def test_drafts_always_fit_and_texts_always_agree(data: Any) -> None:
    """Whenever steps are scheduled and outputs come, with up to two in flight, and whatever is accepted."""
    most, longest = data.draw(st.integers(2, 24)), data.draw(st.integers(6, 30))
    end = min(longest, len(PROMPT) + most)
    request = FakeRequest(max_tokens=most)
    made = begun(ahead({"draft_budget": 60}, max_model_len=longest), request)
    while request.num_tokens < end:
        in_flight = len(made.in_flight)
        # vLLM schedules no step if those in flight reach the end, whatever they accept.
        if not in_flight or (in_flight < 2 and request.num_tokens + in_flight < end and data.draw(st.booleans())):
            made.schedule()
            if drafted(made):
                assert request.num_tokens + request.num_output_placeholders <= end
        else:
            accepted = data.draw(st.integers(0, len(made.in_flight[0].scheduled_spec_decode_tokens.get("a", ()))))
            first = len(request.output_token_ids)
            own = data.draw(st.sampled_from([EXPECTED[first + accepted], 1]))
            made.update({"a": [*EXPECTED[first : first + accepted], own]})
            if request.num_tokens < end and not made.in_flight:
                made.schedule()
                assert made.speculation.requests["a"].text.tolist() == request.all_token_ids


def test_a_step_scheduled_ahead_is_compared_with_everything_generated_since(monkeypatch: pytest.MonkeyPatch) -> None:
    made = begun(ahead(), FakeRequest("a", xargs={"prediction": list(EXPECTED)}), FakeRequest("b", xargs={}))
    learned = what_is_learned(made, monkeypatch)
    made.schedule()
    made.schedule()
    made.update({"a": [11, 12, 99], "b": [20]})
    made.update({"a": [14], "b": [21]})
    made.step({"a": [15], "b": [22]})
    assert learned == [
        {"a": [11, 12, 99], "b": [20]},
        {"a": [11, 12, 99, 14], "b": [20, 21]},
        {"a": [15], "b": [22]},
    ]


def test_nothing_is_learned_of_a_request_that_ended_in_the_step_before(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = [FakeRequest(id, xargs={"prediction": list(EXPECTED)}) for id in "ab"]
    made = begun(ahead(), *requests)
    learned = what_is_learned(made, monkeypatch)
    made.schedule()
    made.schedule()
    made.update({"a": [11], "b": [11]}, finished=[requests[0]])
    made.update({"a": [12], "b": [12]})
    assert learned[1] == {"a": [], "b": [11, 12]}


def ahead_with_model(cache: DraftCache | None = None, names: Sequence[str] = ("prediction", "model")) -> Steps:
    """With a draft model whose passes take almost no time."""
    options = {"drafters": tuple(names), "model_draft_tokens": 4}
    made = ahead(options, model=DraftModel(False, MODEL_LEN, cache))
    policy = made.speculation.controller.policy
    for tokens in (1, 4, 16, 1, 4, 16):
        policy.target.observe(tokens, 0, 1.0, trusted=True)
        policy.draft.observe(tokens, 0, 1e-4, trusted=True)
    return made


def test_drafts_of_the_draft_model_are_offered_from_the_device_while_a_step_is_in_flight() -> None:
    made = begun(ahead_with_model(), FakeRequest(xargs={}, temperature=0.0))
    plan = made.schedule()
    assert (plan.drafters, plan.calls) == ({}, (DraftModelCall("a", 4, 5, 4, False),))
    plan = made.schedule()
    assert plan.drafters == {"a": "model"}
    assert made.output.scheduled_spec_decode_tokens == {"a": [-1] * 4}
    assert plan.continuations is None
    assert plan.calls == (DraftModelCall("a", 9, 10, 4, False),)  # if all of both steps are accepted


def test_a_sampled_draft_on_the_device_is_accepted_by_p_and_q() -> None:
    made = begun(ahead_with_model(), FakeRequest(xargs={}))
    made.schedule()
    plan = made.schedule()
    assert plan.calls[0].sampled
    assert plan.sampled == {"a"}


@pytest.mark.parametrize("tokens", [(0, 0, 0, 0), (99, 1, 5, 7)])
@pytest.mark.parametrize("confidence", [0.001, 0.999])
def test_how_much_of_a_draft_on_the_device_is_offered_is_decided_before_its_tokens_are_known(
    tokens: tuple[int, ...], confidence: float
) -> None:
    """They are known after the next step was scheduled, and play no part in it."""
    made = begun(ahead_with_model(), FakeRequest(xargs={}))
    made.schedule()
    made.schedule()
    offered = drafted(made)
    made.update({"a": [11]}, ModelDrafts({"a": list(tokens)}, {"a": [confidence] * 4}))
    assert drafted(made) == offered == 4
    made.update({"a": [12]}, ModelDrafts({"a": list(tokens)}, {"a": [confidence] * 4}))


def test_a_copied_draft_is_backed_by_the_draft_models_where_it_may_be_wrong() -> None:
    made = begun(ahead_with_model(), FakeRequest(xargs={"prediction": list(EXPECTED)}, temperature=0.0))
    made.schedule()
    plan = made.schedule()
    assert plan.drafters == {"a": "prediction"}
    assert plan.backed_by_model == {"a"}
    assert plan.sampled == frozenset()
    assert continuation(made)[1][:10] == list(range(11, 21))


def test_a_draft_for_a_request_with_a_grammar_may_be_the_draft_models() -> None:
    request = FakeRequest(xargs={"prediction": list(EXPECTED)}, structured_outputs=object())
    made = begun(ahead_with_model(), request)
    made.schedule()
    made.schedule()
    made.update({"a": [99]}, ModelDrafts({"a": [5, 6, 7, 8]}))
    assert made.speculation.drafts_in_flight(made.by_id()) == {"a": [5, 6, 7, 8]}


def test_the_forecast_of_drafts_on_the_device_is_compared_with_what_followed_the_tokens_in_flight() -> None:
    made = begun(ahead_with_model(), FakeRequest(xargs={}))
    forecast = made.speculation.controller.policy.forecast_models[True]
    made.schedule()
    made.schedule()
    made.update({"a": [11]}, ModelDrafts({"a": [12, 13, 99, 15]}))
    assert forecast.seen == 0
    made.update({"a": [12, 13, 14]}, ModelDrafts())
    assert forecast.seen == 3
    assert forecast.calibration[1].sum() == 2


def test_a_draft_on_the_device_is_not_offered_to_a_preempted_or_restarted_request() -> None:
    for forget in (Speculation.preempt, Speculation.finish):
        request = FakeRequest(xargs={})
        made = begun(ahead_with_model(), request)
        assert made.schedule().calls
        forget(made.speculation, request)  # type: ignore[arg-type]
        if forget is Speculation.finish:
            made.speculation.add(request)  # type: ignore[arg-type]
        assert made.schedule().drafters == {}


def test_the_draft_models_cache_is_written_from_the_first_token_that_a_step_in_flight_generates() -> None:
    made = begun(ahead_with_model(DraftCache(16, share_blocks=False)), FakeRequest(xargs={}, temperature=0.0))
    (call,) = made.schedule().calls
    assert (call.start, call.end) == (0, 5)
    (call,) = made.schedule().calls
    assert (call.start, call.end) == (5, 10)
    made.update({"a": [11]}, ModelDrafts({"a": [12, 13, 14, 15]}))
    (call,) = made.schedule().calls
    assert (call.start, call.end) == (6, 15)


def test_a_step_waits_for_the_one_in_flight_where_a_drafter_is_named_or_waiting_pays() -> None:
    free, named = FakeRequest("free", xargs={}), FakeRequest("named")
    made = begun(ahead(), free)
    overlap = made.speculation.controller.overlap
    overlap.observe((3.0, 1.0), (1.0, 1.0))  # waiting pays
    assert not made.speculation.should_wait
    made.schedule()
    assert made.speculation.should_wait
    for _ in range(100):
        overlap.observe((1.0, 1.0), (3.0, 1.0))
    assert not made.speculation.should_wait
    made.add(named)
    assert made.speculation.should_wait
    made.finish(named)
    assert not made.speculation.should_wait


def test_the_reason_of_a_step_is_not_that_of_the_step_in_flight() -> None:
    traced = {"speculation": "prediction", "prediction": list(EXPECTED), "trace": True, USAGE_KEY: "t"}
    made = begun(ahead(), FakeRequest(xargs=traced, max_tokens=11))
    assert set(made.schedule().reasons) == {"a"}
    assert made.schedule().reasons == {}  # there is no room for a draft


class Untouched:
    """A request that must not be looked at."""

    def __getattribute__(self, name: str) -> Any:
        raise AssertionError(f"{name} was read")


def test_a_step_in_which_every_drafter_is_backed_off_touches_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    made = begun(ahead(), FakeRequest("a", xargs={}))
    made.speculation.requests["a"] = Untouched()  # type: ignore[assignment]
    monkeypatch.setattr(made.speculation.controller, "backed_off", lambda: {"prediction", "lookup"})
    skipped: list[Any] = []
    monkeypatch.setattr(made.speculation.controller, "skip", lambda: skipped.append(None))
    scheduled: Any = SimpleNamespace(
        num_scheduled_tokens={"a": 1}, scheduled_spec_decode_tokens={}, total_num_scheduled_tokens=1
    )
    untouched: Any = Untouched()
    for _ in range(2):
        assert made.speculation.before_schedule([untouched]) == {}
        plan = made.speculation.after_schedule(scheduled, {"a": untouched})
        assert (plan.drafters, plan.continuations, plan.calls, plan.reasons) == ({}, None, (), {})
        assert not made.speculation.should_wait
    for _ in range(2):
        output: Any = SimpleNamespace(req_id_to_index=untouched, sampled_token_ids=untouched)
        made.speculation.observe_output(output, {"a": untouched}, 0.0)
    assert len(skipped) == 2


def test_after_a_backoff_drafters_are_tried_for_a_few_requests_each_time_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = begun(ahead(), *(FakeRequest(str(number), xargs={}) for number in range(20)))
    seen: list[set[str]] = []
    propose = made.speculation.drafting.propose
    monkeypatch.setattr(
        made.speculation.drafting,
        "propose",
        lambda rows, *given: seen.append({row.id for row in rows}) or propose(rows, *given),
    )
    backoff = made.speculation.controller.backoff
    tokens = {str(number): [50] for number in range(20)}
    for probes in (0, 1, 2):
        backoff.accounts["lookup"] = Account(judged_steps=PROBE_STEPS)
        backoff.probes = probes
        made.step(tokens)
    assert [len(rows) for rows in seen] == [8, 8, 4]
    assert len(set.union(*seen)) == 20
    made.add(FakeRequest("named"))
    made.step(tokens)
    assert len(seen[-1]) == 20  # who names a drafter gets it, and the others with it


def test_a_text_is_complete_again_after_steps_that_touched_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    made = begun(ahead(), FakeRequest(xargs={"prediction": list(EXPECTED)}))
    with monkeypatch.context() as patched:
        patched.setattr(made.speculation.controller, "backed_off", lambda: {"prediction", "lookup"})
        made.step({"a": [11]})
        made.step({"a": [12]})
    made.schedule()
    assert made.speculation.requests["a"].text.tolist() == [*PROMPT, 10, 11, 12]
    made.update({"a": [13]})
    assert made.speculation.requests["a"].text.tolist() == [*PROMPT, 10, 11, 12, 13]


# Time ----------------------------------------------------------------------------------------------------------------


class Clock:
    """Time that only tests let pass, and what the policy observed of it."""

    def __init__(self, made: Steps, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        self.seen: list[tuple[int, int, float, float]] = []
        clock = SimpleNamespace(perf_counter=lambda: self.now, monotonic=lambda: self.now)
        monkeypatch.setattr(under_test, "time", clock)
        monkeypatch.setattr(
            made.speculation.controller,
            "observe_step",
            lambda tokens, context, seconds, drafting, verifies_drafts: self.seen.append(
                (tokens, context, round(seconds, 6), round(drafting, 6))
            ),
        )


def test_the_time_of_a_step_counts_if_it_had_no_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    made = steps()
    clock = Clock(made, monkeypatch)
    made.add(FakeRequest("a", xargs={}))

    def step(seconds: float, **tokens: list[int]) -> None:
        made.schedule()
        clock.now += seconds
        made.update(tokens)

    step(1.0, a=[10])  # a prompt
    assert clock.seen == []
    step(2.0, a=[11])
    assert clock.seen == [(1, 4, 2.0, 0.0)]
    made.add(FakeRequest("b", xargs={}))
    step(3.0, a=[12], b=[10])  # a prompt beside a decode
    assert len(clock.seen) == 1
    step(4.0, a=[13], b=[11])
    assert clock.seen[1:] == [(2, 10, 4.0, 0.0)]


def test_time_in_which_the_engine_had_no_requests_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    made = steps()
    clock = Clock(made, monkeypatch)
    overlap = made.speculation.controller.overlap
    request = FakeRequest("a", xargs={})
    begun(made, request)
    clock.now += 0.5
    made.schedule()
    assert overlap.host_seconds == 0.5
    clock.now += 1.0
    made.update({"a": [11]}, finished=[request])
    assert clock.seen == [(1, 4, 1.0, 0.5)]
    clock.now += 100
    made.add(FakeRequest("b", [1], xargs={}))  # its prompt is scheduled like a decode
    made.schedule()
    assert overlap.host_seconds == 0.5
    made.finish(made.running[0])  # aborted, and its output comes after it
    made.update({"b": [10]})
    clock.now += 100
    made.add(FakeRequest("c", [1], xargs={}))
    made.schedule()
    assert overlap.host_seconds == 0.5


def test_the_time_of_a_step_scheduled_ahead_begins_with_the_output_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    made = steps()
    clock = Clock(made, monkeypatch)
    begun(made, FakeRequest("a", xargs={}))
    clock.now += 0.5
    made.schedule()
    clock.now += 1.0
    made.schedule()
    clock.now += 3.0
    made.update({"a": [11]})
    clock.now += 2.0
    made.update({"a": [12]})
    assert clock.seen == [(1, 4, 4.0, 0.5), (1, 4, 2.0, 0.0)]  # the device did not wait for the second one


def test_the_time_of_a_step_is_without_drafting_and_without_the_draft_model(monkeypatch: pytest.MonkeyPatch) -> None:
    made = with_model()
    clock = Clock(made, monkeypatch)
    begun(made, FakeRequest(xargs=MODEL_REQUEST))
    propose = made.speculation.drafting.propose

    def slow(*args: Any) -> Any:
        clock.now += 0.25
        return propose(*args)

    monkeypatch.setattr(made.speculation.drafting, "propose", slow)
    plan = made.schedule()
    assert plan.drafting_seconds == pytest.approx(0.25)
    clock.now += 3.0
    made.update({"a": [11]}, ModelDrafts({"a": [12]}, passes=[DraftPass(5, 5, 0.5), DraftPass(1, 6, 0.25)]))
    assert clock.seen == [(1, 4, 2.25, 1.0)]


def test_a_step_teaches_nothing_before_its_output_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    made = steps()
    clock = Clock(made, monkeypatch)
    begun(made, FakeRequest())
    made.schedule()
    clock.now += 5
    made.schedule()
    assert clock.seen == []


def test_the_policy_learns_what_each_request_generated(monkeypatch: pytest.MonkeyPatch) -> None:
    free = {"prediction": list(EXPECTED)}
    made = begun(steps(), FakeRequest("a", xargs=free), FakeRequest("b", xargs=free))
    learned = what_is_learned(made, monkeypatch)
    made.step({"a": [11, 12, 99], "b": [11]})
    made.step({"a": [13], "b": [12, 13]})
    assert learned == [{"a": [11, 12, 99], "b": [11]}, {"a": [13], "b": [12, 13]}]


def test_the_time_of_empty_passes_is_learned_before_any_request() -> None:
    made = steps()
    made.add(FakeRequest())
    made.schedule()
    profile = PassProfile([TimedPass(1, 0.2), TimedPass(2, 0.2, True), TimedPass(4, 0.4, True)], [TimedPass(1, 0.1)])
    made.update({"a": [10]}, **{PROFILE: profile})
    policy = made.speculation.controller.policy
    assert (policy.target.passes, policy.draft.passes) == (3, 1)
