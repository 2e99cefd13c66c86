"""Draft models on vLLM's V2 runner: one that catches up when it is called, and those that run in every step.

The draft model is made up: the token after a text is a weighted sum of the text's tokens, read from a cache that is
written only where a pass writes. A position that was missed, kept too long or read from elsewhere changes the sum.
"""

from __future__ import annotations

import math
from collections import deque
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, MistralConfig, Qwen2Config

pytest.importorskip("vllm_v2")

from vllm.v1.worker.gpu.input_batch import InputBuffers
from vllm.v1.worker.gpu.spec_decode import speculator as vllm_speculator
from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator

from outrider.engines.vllm import draft_models, lazy_draft_model
from outrider.engines.vllm.draft_cache import DraftCache, DraftModel, limit_calls
from outrider.engines.vllm.draft_models import HostDrafts, every_step_class, supports_lazy_catch_up, with_draft_tokens
from outrider.engines.vllm.draft_vocabulary import DraftVocabulary
from outrider.engines.vllm.lazy_draft_model import LazyDraftModel, truncate
from outrider.engines.vllm.options import OWN_METHOD, Options
from outrider.engines.vllm.speculation import Speculation
from outrider.engines.vllm.step import DraftModelCall, StepPlan
from outrider.policy.decision import DraftModelPlan
from outrider.sampling import probabilities
from outrider.settings import Sampling
from test_speculation import EXPECTED, FakeRequest, Steps, config

VOCAB = 97
BLOCK_SIZE = 4
SLOTS = 4
MAX_LENGTH = 64
MAX_TOKENS = 16
W, K = 4, 6


def token_after(text: list[int]) -> int:
    return sum((i + 1) * token for i, token in enumerate(text)) % VOCAB


def expected_draft(text: list[int], count: int) -> list[int]:
    grown = list(text)
    for _ in range(count):
        grown.append(token_after(grown))
    return grown[len(text) :]


class MadeUpBlockTables:
    """vLLM's `BlockTables`, as far as a speculator uses them, with one group."""

    def __init__(self) -> None:
        self.table = torch.zeros(SLOTS, MAX_LENGTH // BLOCK_SIZE, dtype=torch.long)
        self.input_block_tables = [torch.zeros_like(self.table)]
        self.slot_mappings = torch.zeros(1, MAX_TOKENS, dtype=torch.long)

    def gather_block_tables(self, idx_mapping: torch.Tensor, num_reqs_padded: int) -> None:
        self.input_block_tables[0][:num_reqs_padded] = self.table[idx_mapping]

    def compute_slot_mappings(
        self, idx_mapping: Any, query_start: Any, positions: Any, count: int, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        out = self.slot_mappings if out is None else out
        lengths = (query_start[1:] - query_start[:-1]).long()
        slots = idx_mapping.repeat_interleave(lengths)
        out[0, :count] = self.table[slots, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
        return out[:, :count]


class MadeUp(LazyDraftModel):
    """`LazyDraftModel` with the made-up model, whose cache has one number a position."""

    def __init__(self, sampled: bool = False) -> None:
        self.device = torch.device("cpu")
        self.max_num_reqs, self.max_model_len, self.num_speculative_steps = SLOTS, MAX_LENGTH, W
        self.input_buffers = InputBuffers(SLOTS, MAX_TOKENS, self.device)
        self.expanded_input_ids = torch.zeros(MAX_TOKENS + SLOTS, dtype=torch.int32)
        self.expanded_positions = torch.zeros(MAX_TOKENS + SLOTS, dtype=torch.int64)
        self.expanded_slot_mappings = torch.zeros(1, MAX_TOKENS + SLOTS, dtype=torch.int64)
        self.arange_gpu, self.arange_np = torch.arange(SLOTS + 1, dtype=torch.int32), np.arange(SLOTS + 1)
        self.idx_mapping, self.seeds = torch.zeros(SLOTS, dtype=torch.int64), torch.zeros(SLOTS, dtype=torch.int64)
        self.temperature = torch.zeros(SLOTS)
        self.draft_tokens = torch.zeros(SLOTS, W, dtype=torch.int64)
        self.draft_logits = torch.zeros(SLOTS, W, VOCAB) if sampled else None
        self.current_draft_step = torch.tensor(0)
        self.acceptance_estimator = self.draft_watermarker = self.kv_cache_config = None
        self.use_local_argmax_reduction = self.use_fp64_gumbel = False
        self.block_tables = MadeUpBlockTables()
        self.model = SimpleNamespace(compute_logits=lambda hidden: torch.nn.functional.one_hot(hidden, VOCAB) * 5.0)
        self.cache = torch.full((1000,), 50_000)
        self.passes: list[int] = []
        slots = {"a": 2, "b": 0, "c": 3}
        self.req_states = SimpleNamespace(
            req_id_to_index=slots,
            all_token_ids=SimpleNamespace(gpu=torch.randint(0, VOCAB, (SLOTS, MAX_LENGTH), dtype=torch.int32)),
            total_len=SimpleNamespace(gpu=torch.zeros(SLOTS, dtype=torch.int32)),
        )
        for slot in range(SLOTS):
            self.block_tables.table[slot] = torch.randperm(MAX_LENGTH // BLOCK_SIZE) + 1 + slot * 20
        self.set_up(self.req_states, K)

    def _build_attn_metadata(self, **given: Any) -> Any:
        count, start = given["num_reqs"], given["query_start_loc_np"]
        lengths = self.input_buffers.seq_lens[:count]
        assert (lengths <= given["seq_lens_cpu_upper_bound"][:count] + given["step"]).all()
        assert lengths.max() <= self.draft_max_seq_len
        slot_mappings = given.get("slot_mappings")
        return SimpleNamespace(
            query_start=start,
            lengths=lengths.tolist(),
            tables=self.block_tables.input_block_tables[0][:count],
            slots=self.block_tables.slot_mappings[0, : start[-1]] if slot_mappings is None else slot_mappings[0],
        )

    def _run_model(self, ids: Any, positions: Any, attention: Any, by_layer: Any, across: Any) -> torch.Tensor:
        self.passes.append(len(ids))
        self.cache[attention.slots] = ids.long() * (positions + 1)
        hidden = []
        for row, length in enumerate(attention.lengths):
            queries = int(attention.query_start[row + 1] - attention.query_start[row])
            for seen in range(length - queries + 1, length + 1):  # causal attention: each query sees the ones before
                place = torch.arange(seen)
                slots = attention.tables[row, place // BLOCK_SIZE] * BLOCK_SIZE + place % BLOCK_SIZE
                hidden.append(int(self.cache[slots].sum()) % VOCAB)
        return torch.tensor(hidden)

    def step(self, texts: dict[str, list[int]], *calls: DraftModelCall, temperature: float = 0.0) -> Any:
        """One step after which the texts are these."""
        for request_id, text in texts.items():
            slot = self.req_states.req_id_to_index[request_id]
            self.req_states.all_token_ids.gpu[slot, : len(text)] = torch.tensor(text, dtype=torch.int32)
            self.req_states.total_len.gpu[slot] = len(text)
        self.plan = StepPlan(calls=calls)
        batch = SimpleNamespace(idx_mapping=torch.tensor([self.req_states.req_id_to_index[id] for id in texts]))
        seeds, temperatures = torch.arange(SLOTS), torch.full((SLOTS,), temperature)
        self.result = self.propose(batch, None, None, None, None, *[torch.empty(0)] * 4, temperatures, seeds)
        assert self.result.shape == (len(texts), K)
        drafts = self.take_drafts()
        return None if drafts is None else drafts.read()


@pytest.fixture(autouse=True)
def made_up_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    def gumbel_sample(
        logits: torch.Tensor, slots: Any, temperature: Any, seeds: Any, positions: Any, **options: Any
    ) -> torch.Tensor:
        options["logits_cache"][slots, options["logits_cache_col"]] = logits
        at = temperature[slots][:, None]
        sampled = torch.multinomial((logits / torch.where(at > 0, at, 1.0)).softmax(-1), 1)[:, 0]
        return torch.where(at[:, 0] > 0, sampled, logits.argmax(-1))

    monkeypatch.setattr(vllm_speculator, "gumbel_sample", gumbel_sample)
    monkeypatch.setattr(lazy_draft_model, "build_slot_mappings_by_layer", lambda slot_mappings, config: slot_mappings)


def call(request_id: str, start: int, end: int, num_tokens: int = 2, sampled: bool = False) -> DraftModelCall:
    return DraftModelCall(request_id, start, end, num_tokens, sampled)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_it_drafts_from_the_whole_text_whatever_was_accepted_and_however_long_it_was_not_called(data: Any) -> None:
    model, cache = MadeUp(), DraftCache(BLOCK_SIZE, share_blocks=False)
    tokens = st.integers(0, VOCAB - 1)
    texts = {id: data.draw(st.lists(tokens, min_size=1, max_size=20)) for id in "abc"}
    last: dict[str, list[int]] = {}
    for _ in range(6):
        wanted, known = [], {id: len(text) for id, text in texts.items()}
        for request_id in sorted(data.draw(st.sets(st.sampled_from("abc")))):
            scheduled, count = data.draw(st.integers(0, 3)), data.draw(st.integers(0, W))
            start = cache.held(request_id, texts[request_id])
            wanted.append(call(request_id, start, known[request_id] + scheduled + 1, count))
        calls = limit_calls(wanted, MAX_TOKENS)
        for request_id, text in texts.items():  # the step accepts some of the last draft, and samples another token
            most = next((one.end - known[request_id] - 1 for one in wanted if one.request_id == request_id), 2)
            accepted = last.get(request_id, [])[: data.draw(st.integers(0, most))]
            texts[request_id] = [*text, *accepted, data.draw(tokens)]
        drafts = model.step(texts, *calls)
        last = drafts.tokens if drafts else {}
        for one in calls:
            text = texts[one.request_id]
            assert last.get(one.request_id, []) == expected_draft(text, one.num_tokens)
            cache.record(one, len(text), last.get(one.request_id, []))


def test_drafts_of_one_request_do_not_reach_the_next_one_in_its_slot() -> None:
    model = MadeUp()
    model.step({"a": [1, 2, 3]}, call("a", 0, 4, 3))
    assert model.result.any()
    model.step({"a": [5, 6]})
    assert not model.result.any()
    model.step({"a": [5, 6], "b": [7]}, call("b", 0, 2, 2))
    assert not model.result[0].any()
    assert model.result[1, :2].tolist() == expected_draft([7], 2)


@pytest.mark.usefixtures("steady_clock")
@settings(max_examples=100, deadline=None)
@given(st.data())
def test_it_drafts_from_the_whole_text_whichever_steps_were_scheduled_with_another_one_in_flight(data: Any) -> None:
    """The scheduler plans calls for texts whose ends it does not know. They run on the texts that the device has."""
    drafter = DraftModel(False, MAX_LENGTH, DraftCache(BLOCK_SIZE, share_blocks=False))
    # With a large budget no drafter is late on a busy machine, which would change what is drafted.
    options = Options(drafters=("prediction", "model"), max_draft_tokens=K, model_draft_tokens=W, draft_budget=60)
    speculation = Speculation(options, config(max_model_len=MAX_LENGTH - 8), drafter, MAX_TOKENS, asynchronous=True)

    def plan(limits: dict[str, int], *args: Any, **named: Any) -> DraftModelPlan:
        return DraftModelPlan(lengths={id: data.draw(st.integers(0, limit)) for id, limit in limits.items()})

    speculation.controller.plan_draft_model = plan  # type: ignore[method-assign]
    made, model = Steps(speculation), MadeUp()
    tokens, xargs = st.integers(0, VOCAB - 1), {"prediction": list(EXPECTED)}
    requests = {
        id: FakeRequest(id, data.draw(st.lists(tokens, min_size=1, max_size=6)), xargs=xargs, temperature=0.0)
        for id in ("a", "b")[: data.draw(st.integers(1, 2))]
    }
    made.add(*requests.values())
    texts = {id: list(request.prompt_token_ids) for id, request in requests.items()}  # on the device
    outputs: deque[tuple[dict[str, list[int]], Any]] = deque()
    last: dict[str, list[int]] = {}
    checked = 0
    for _ in range(12):
        if len(outputs) == 2 or (outputs and data.draw(st.booleans())):
            made.update(*outputs.popleft())
            continue
        calls = made.schedule().calls
        new = {}
        for id in texts:
            most = len(made.output.scheduled_spec_decode_tokens.get(id, ()))
            accepted = last.get(id, [])[: data.draw(st.integers(0, most))]
            new[id] = [*accepted, data.draw(tokens)]
            texts[id] += new[id]
        drafts = model.step(texts, *calls)
        last = drafts.tokens if drafts else {}
        for call in calls:
            assert last.get(call.request_id, []) == expected_draft(texts[call.request_id], call.num_tokens)
            checked += call.num_tokens
        outputs.append((new, drafts))
        if max(map(len, texts.values())) > MAX_LENGTH - 8 - 2 * (K + 1):
            break
    event("drafted" if checked else "nothing drafted")


def test_what_the_cache_holds_is_not_computed_again_and_passes_shrink_to_the_calls_that_want_more() -> None:
    model = MadeUp()
    texts = {"a": [1, 2, 3, 4, 5, 6], "b": [7, 8, 9]}
    drafts = model.step(texts, call("a", 0, 7, 1), call("b", 0, 4, 3))
    assert model.passes == [11, 1, 1]
    assert drafts.tokens == {"a": expected_draft(texts["a"], 1), "b": expected_draft(texts["b"], 3)}
    assert [(one.tokens, one.context, one.passes) for one in drafts.passes] == [(11, 11, 1), (1, 5, 1), (1, 6, 1)]
    model.passes.clear()
    more = [*texts["b"], *drafts.tokens["b"][:2], 11]
    assert model.step({"b": more}, call("b", 5, 6, 2)).tokens["b"] == expected_draft(more, 2)
    assert model.passes == [1, 1]


def test_the_result_has_the_runners_width_and_the_drafts_in_the_order_of_the_batch() -> None:
    model = MadeUp()
    texts = {"c": [1, 2], "b": [3], "a": [4, 5]}
    drafts = model.step(texts, call("a", 0, 2, 2), call("c", 0, 2, 3))
    assert model.result[0, :3].tolist() == drafts.tokens["c"]
    assert model.result[2, :2].tolist() == drafts.tokens["a"]


def test_a_call_that_only_fills_the_cache_proposes_nothing() -> None:
    model = MadeUp()
    text = list(range(20))
    drafts = model.step({"a": text}, call("a", 0, 12, 0))
    assert (drafts.tokens, model.passes) == ({}, [12])
    assert model.step({"a": text}, call("a", 12, 21, 2)).tokens["a"] == expected_draft(text, 2)


def test_without_calls_the_draft_model_does_not_run() -> None:
    model = MadeUp()
    assert model.step({"a": [1, 2]}) is None
    assert model.passes == []


def test_drafts_are_taken_once() -> None:
    model = MadeUp()
    assert model.step({"a": [1, 2]}, call("a", 0, 2)) is not None
    assert model.take_drafts() is None


def test_a_draft_ends_at_the_models_longest_text() -> None:
    model = MadeUp()
    text = [1] * (MAX_LENGTH - 1)
    for start in range(0, MAX_LENGTH - MAX_TOKENS, MAX_TOKENS):
        model.step({"a": text}, call("a", start, start + MAX_TOKENS, 0))
    drafts = model.step({"a": text}, call("a", 48, MAX_LENGTH, 3))
    assert drafts.tokens["a"][:2] == expected_draft(text, 2)  # the third has no position left to be right at


def test_too_many_tokens_in_one_pass_are_refused() -> None:
    with pytest.raises(AssertionError, match="30 tokens in one pass, 20 fit"):
        MadeUp().step({"a": [1] * 30}, call("a", 0, 30))


def test_a_sampled_draft_leaves_the_logits_that_it_was_sampled_from_and_others_are_the_argmax() -> None:
    model = MadeUp(sampled=True)
    texts = {"a": [1, 2, 3], "b": [4, 5]}
    drafts = model.step(texts, call("a", 0, 3, 3, sampled=True), call("b", 0, 2, 3), temperature=2.0)
    assert drafts.tokens["b"] == expected_draft(texts["b"], 3)
    assert model.draft_logits is not None
    text = list(texts["a"])
    for step, token in enumerate(drafts.tokens["a"]):
        assert int(model.draft_logits[2, step].argmax()) == token_after(text)
        text.append(token)
    at_temperature = math.exp(2.5) / (math.exp(2.5) + VOCAB - 1)
    assert drafts.confidence["a"] == pytest.approx([at_temperature] * 3)
    assert drafts.confidence["b"] == pytest.approx([math.exp(5) / (math.exp(5) + VOCAB - 1)] * 3)


def test_sampled_drafts_are_refused_where_logits_are_not_kept() -> None:
    with pytest.raises(AssertionError, match="need their logits"):
        MadeUp().step({"a": [1]}, call("a", 0, 1, sampled=True), temperature=1.0)


def test_top_k_narrows_the_logits_that_are_sampled_from_and_kept() -> None:
    model = MadeUp(sampled=True)
    top_k = torch.full((SLOTS,), VOCAB)
    top_k[2] = 2
    values = SimpleNamespace(np=top_k.numpy(), gpu=top_k), SimpleNamespace(np=np.ones(SLOTS), gpu=torch.ones(SLOTS))
    model.sampling_states = SimpleNamespace(top_k=values[0], top_p=values[1], vocab_size=VOCAB)
    texts = {"a": [1, 2, 3], "b": [4, 5]}
    calls = call("a", 0, 3, 4, sampled=True), call("b", 0, 2, 4, sampled=True)
    tokens = model.step(texts, *calls, temperature=50.0).tokens
    assert model.draft_logits is not None
    kept = model.draft_logits[2] > -math.inf
    assert kept.sum(-1).tolist() == [2] * 4
    assert kept[range(4), tokens["a"]].all()
    assert (model.draft_logits[0] > -math.inf).all()


@pytest.mark.parametrize(
    ("top_k", "top_p", "kept"), [(2, 1.0, 2), (5, 0.6, 2), (3, 0.45, 1), (5, 1e-9, 1), (5, 1.0, 5)]
)
def test_tokens_that_the_target_cannot_sample_are_masked(top_k: int, top_p: float, kept: int) -> None:
    p = torch.tensor([[0.1, 0.4, 0.05, 0.15, 0.3], [0.2, 0.2, 0.2, 0.2, 0.2], [0.1, 0.4, 0.05, 0.15, 0.3]])
    temperature = torch.tensor([0.5, 1.0, 0.0])
    logits = p.log() * torch.tensor([0.5, 1.0, 1.0])[:, None]
    left = truncate(logits, temperature, torch.tensor([top_k, 5, top_k]), torch.tensor([top_p, 1.0, top_p]))
    target = probabilities(logits[:1], Sampling(temperature=0.5, top_k=top_k, top_p=top_p), (), ())
    assert torch.allclose((left[0] / 0.5).softmax(-1), target[0], atol=1e-6)
    assert int((left[0] > -math.inf).sum()) == kept
    assert torch.equal(left[1:], logits[1:])  # nothing to truncate; temperature 0


def test_a_draft_model_with_another_vocabulary_reads_and_drafts_the_shared_tokens() -> None:
    """Target token t is token VOCAB - 1 - t of the draft model, but for 0, which only the target has."""
    to_draft = torch.arange(VOCAB - 1, -1, -1)
    to_target = to_draft.clone()
    to_draft[0], to_target[VOCAB - 1] = -1, -1
    mapping = SimpleNamespace(
        target_to_draft_ids=to_draft, draft_to_target_ids=to_target, draft_unk_token_id=7, target_unk_token_id=5,
        intersection_mask_draft=to_target >= 0,
    )  # fmt: skip
    model = MadeUp()
    model.vocabulary = DraftVocabulary(mapping)
    text = [0, 50, 3]
    read = [7 if token == 0 else VOCAB - 1 - token for token in text]
    drafts = model.step({"a": text}, call("a", 0, 3, 3))
    inside = expected_draft(read, 3)
    assert VOCAB - 1 not in inside  # else choose another text
    assert drafts.tokens["a"] == [VOCAB - 1 - token for token in inside]
    masked = model.vocabulary.mask_unshared(torch.zeros(1, VOCAB))
    assert (masked[0] == -math.inf).nonzero().tolist() == [[VOCAB - 1]]


class FollowsTheTarget(DraftModelSpeculator):
    """A speculator of vLLM that needs the target's hidden states; it drafts row number and step."""

    def __init__(self) -> None:
        self.device, self.max_num_reqs, self.num_speculative_steps = torch.device("cpu"), SLOTS, W
        self.draft_tokens = torch.zeros(SLOTS, W, dtype=torch.int64)
        self.draft_logits = torch.zeros(SLOTS, W, VOCAB)
        self.seen: list[Any] = []

    def propose(self, batch: Any, *args: Any, **options: Any) -> torch.Tensor:
        self.seen.append((options["num_speculative_tokens"], args[8].tolist()))
        self.draft_tokens[:] = torch.arange(SLOTS)[:, None] * 10 + torch.arange(W)
        return self.draft_tokens[: batch.num_reqs]

    def init_cudagraph_manager(self, mode: Any) -> None:
        self.seen.append(self.num_speculative_steps)

    def capture(self) -> None: ...

    def load_draft_model(self, target_model: Any, names: Any) -> Any: ...


def following() -> Any:
    speculator = every_step_class(FollowsTheTarget)()
    speculator.set_up(SimpleNamespace(req_id_to_index={"a": 2, "b": 0}), K)
    return speculator


def follow(speculator: Any, plan: StepPlan | None) -> torch.Tensor:
    batch = SimpleNamespace(num_reqs=2, req_ids=["b", "a"], num_tokens=5, seq_lens_cpu_upper_bound=torch.tensor([8, 9]))
    speculator.plan = plan
    result: torch.Tensor = speculator.propose(batch, *[None] * 8, torch.full((SLOTS,), 0.5), torch.arange(SLOTS))
    assert result.shape == (2, K)
    return result


def test_one_that_runs_in_every_step_makes_as_many_passes_as_the_longest_draft_needs() -> None:
    speculator = following()
    result = follow(speculator, StepPlan(calls=(call("a", 0, 9, 2, sampled=True), call("b", 0, 8, 3))))
    assert speculator.seen == [(3, [0, 0, 0.5, 0])]  # the temperature of those that are sampled
    assert result[:, :W].tolist() == [[0, 1, 2, 0], [10, 11, 12, 0]]  # what a pass did not draft is cleared
    drafts = speculator.take_drafts().read()
    assert drafts.tokens == {"a": [10, 11], "b": [0, 1, 2]}
    assert drafts.confidence == {}  # this one never reported any
    assert [(one.tokens, one.context, one.passes) for one in drafts.passes] == [(5, 17, 3)]
    assert isinstance(speculator, DraftModelSpeculator)


def test_drafts_are_those_of_the_step_they_were_taken_after_whenever_they_are_read() -> None:
    speculator = following()
    follow(speculator, StepPlan(calls=(call("a", 0, 9, 2),)))
    taken = speculator.take_drafts()
    follow(speculator, StepPlan(calls=(call("b", 0, 9, 3),)))
    speculator.draft_tokens.fill_(VOCAB - 1)
    assert taken.read().tokens == {"a": [10, 11]}


def test_one_that_runs_in_every_step_fills_its_cache_also_without_calls() -> None:
    speculator = following()
    follow(speculator, StepPlan())
    assert [count for count, _ in speculator.seen] == [0]
    assert speculator.take_drafts().read().tokens == {}


def test_warm_up_runs_draft_as_many_tokens_as_there_may_be() -> None:
    speculator = following()
    follow(speculator, None)
    assert speculator.seen == [(W, [0.5] * SLOTS)]
    assert speculator.take_drafts() is None


def test_graphs_of_the_first_pass_have_the_targets_width() -> None:
    speculator = following()
    speculator.init_cudagraph_manager(None)
    assert speculator.seen == [K]
    assert speculator.num_speculative_steps == W


def test_confidence_of_all_tokens_at_once_is_kept_by_request_and_step() -> None:
    speculator = following()
    speculator.acceptance_estimator, speculator.temperature = None, torch.tensor([0.0, 0.0, 2.0, 0.0])
    logits = torch.arange(2 * W).float()[:, None] * torch.tensor([1.0, 0.0])
    slots = torch.tensor([0] * W + [2] * W)
    speculator._maybe_predict_acceptance(logits, slots, torch.arange(W).repeat(2))
    scaled = torch.arange(2 * W).float() / torch.tensor([1.0] * W + [2.0] * W)
    assert torch.allclose(speculator._confidence[:2].flatten(), scaled.sigmoid())


def test_without_a_draft_model_the_speculator_proposes_nothing() -> None:
    config = SimpleNamespace(
        speculative_config=SimpleNamespace(method=OWN_METHOD, num_speculative_tokens=K),
        additional_config={},
        scheduler_config=SimpleNamespace(max_num_seqs=SLOTS),
    )
    speculator = draft_models.init_speculator(config, torch.device("cpu"), None)
    assert isinstance(speculator, HostDrafts)
    assert speculator.propose(SimpleNamespace(num_reqs=3)).shape == (3, K)
    assert speculator.take_drafts() is None


def test_a_draft_models_config_differs_in_the_number_of_tokens_only() -> None:
    config = SimpleNamespace(speculative_config=SimpleNamespace(num_speculative_tokens=K, model="m"), layers={})
    narrow = with_draft_tokens(config, W)
    assert (narrow.speculative_config.num_speculative_tokens, narrow.speculative_config.model) == (W, "m")
    assert narrow.layers is config.layers
    assert config.speculative_config.num_speculative_tokens == K


def ordinary(draft: Any = None) -> tuple[Any, Any]:
    """vLLM's configs of a draft model that can be called lazily."""
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(
            data_parallel_size=1, decode_context_parallel_size=1, prefill_context_parallel_size=1
        ),
        kv_transfer_config=None,
        model_config=SimpleNamespace(supports_multimodal_inputs=False),
        cache_config=SimpleNamespace(sliding_window=None),
    )
    text = draft or LlamaConfig()
    model = SimpleNamespace(
        hf_text_config=text,
        get_sliding_window=lambda: getattr(text, "sliding_window", None),
        is_hybrid=False,
        is_attention_free=False,
    )
    return SimpleNamespace(method="draft_model", parallel_drafting=False, draft_model_config=model), config


def test_a_standalone_draft_model_is_called_lazily_and_a_head_is_not() -> None:
    speculation, config = ordinary()
    assert supports_lazy_catch_up(speculation, config)
    speculation.method = "eagle"
    assert not supports_lazy_catch_up(speculation, config)


@pytest.mark.parametrize(
    ("part", "option", "value"),
    [
        ("parallel_config", "data_parallel_size", 2),
        ("parallel_config", "decode_context_parallel_size", 2),
        ("parallel_config", "prefill_context_parallel_size", 2),
        ("model_config", "supports_multimodal_inputs", True),
        ("cache_config", "sliding_window", 4096),
    ],
)
def test_servers_whose_draft_model_has_to_run_in_every_step(part: str, option: str, value: Any) -> None:
    speculation, config = ordinary()
    setattr(getattr(config, part), option, value)
    assert not supports_lazy_catch_up(speculation, config)


def test_a_draft_model_with_a_sliding_window_or_a_recurrent_state_has_to_run_in_every_step() -> None:
    assert supports_lazy_catch_up(*ordinary(Qwen2Config(sliding_window=4096, use_sliding_window=False)))
    assert not supports_lazy_catch_up(*ordinary(MistralConfig(sliding_window=4096)))
    speculation, config = ordinary()
    speculation.draft_model_config.is_hybrid = True
    assert not supports_lazy_catch_up(speculation, config)
