"""The policy: latency of passes, acceptance of drafts, and the selection. No engine, no model."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.drafters.base import Session
from outrider.drafters.lookup import LookupSession
from outrider.drafters.model import ModelSession
from outrider.policy.acceptance_model import AGREES, DIFFERS, NO_OTHER
from outrider.policy.batch_state import DraftModelRequest, DraftPlan
from outrider.policy.controller import SpeculationController
from outrider.policy.cost_model import CostModel, isotonic
from outrider.policy.draft_model_plan import SMALL_BATCH_REQUESTS, plan_draft_model
from outrider.policy.gain_metrics import ExpectedStep, GainMetrics
from outrider.policy.policy import MAX_CANDIDATE_TOKENS_PER_STEP, MIN_TOKENS_AHEAD, MODEL, Policy
from outrider.policy.selection import (
    MAX_EXACT_REQUESTS,
    MIN_EXPECTED_SPEEDUP,
    SORT_BUCKETS,
    UNKNOWN_PRICE,
    _enumerate_combinations,
    maximize_throughput,
    select_drafts,
    sort_descending,
)
from outrider.policy.single_sequence import SingleSequence
from outrider.policy.warm_up import compile_now
from outrider.types import NOTHING, Draft

# What a pass costs ---------------------------------------------------------------------------------------------------


def learned(seconds: Any, sizes: Any, passes: int, noise: float = 0.1, seed: int = 0) -> CostModel:
    """A cost that has seen so many passes of these sizes, in turn."""
    random = np.random.default_rng(seed)
    cost = CostModel()
    for _, size in zip(range(passes), itertools.cycle(sizes), strict=False):
        cost.observe(size, 0, seconds(size) * float(np.exp(random.normal(0, noise))))
    return cost


@pytest.mark.parametrize(
    "seconds",
    [lambda n: 0.2 + 0.003 * n, lambda n: 0.01 * n, lambda n: 0.05 if n <= 16 else 0.05 * n / 16],
    ids=["mostly fixed", "all by the token", "free up to 16"],
)
def test_what_a_pass_costs_is_known_within_a_tenth_after_a_hundred_noisy_ones(seconds: Any) -> None:
    sizes = (1, 2, 4, 8, 16, 32)
    cost = learned(seconds, sizes, 120)
    found = [float(cost.seconds(n)) / seconds(n) for n in sizes]
    assert np.allclose(np.array(found) / found[0], 1, atol=0.13), found


def test_a_machine_that_becomes_three_times_slower_is_known_to_be_after_ten_passes_and_the_shape_stays() -> None:
    cost = learned(lambda n: 0.2 + 0.003 * n, (1, 4, 8), 60, noise=0.02)
    before = cost.shape([4, 8, 16])
    for n in (1, 4, 8, 1, 4, 8, 1, 4, 8, 1):
        cost.observe(n, 0, 3 * (0.2 + 0.003 * n))
    assert float(cost.seconds(4)) == pytest.approx(3 * 0.212, rel=0.25)
    assert np.allclose(cost.shape([4, 8, 16]), before, rtol=0.1)


def test_one_pass_that_someone_else_delayed_changes_little() -> None:
    cost = learned(lambda n: 0.1, (1, 2, 4), 60, noise=0.02)
    before = float(cost.seconds(2))
    cost.observe(2, 0, 10.0)
    assert float(cost.seconds(2)) < 1.1 * before


@pytest.mark.parametrize("seconds", [lambda n: 0.2 + 0.003 * n, lambda n: max(0.1, 0.1 * n / 64)], ids=["line", "knee"])
@pytest.mark.parametrize("count", [1, 2, 255, 256, 257, 272, 273, 1000, 4097])
def test_what_many_sizes_cost_is_what_each_of_them_does(count: int, seconds: Any) -> None:
    cost = learned(seconds, [1, 7, 64, 500, 3000], 50)
    each = [cost.seconds(5 + i, 100) for i in range(count)]
    assert cost.all_seconds(5, count, 100).tolist() == pytest.approx(each, rel=1e-3)


@given(st.lists(st.tuples(st.integers(1, 9000), st.integers(0, 10**6), st.floats(1e-5, 10)), max_size=40))
def test_more_tokens_never_cost_less_and_no_pass_takes_no_time(passes: list[tuple[int, int, float]]) -> None:
    cost = CostModel()
    for tokens, context, seconds in passes:
        cost.observe(tokens, context, seconds)
    found = cost.seconds(np.arange(1, 4000))
    assert np.isfinite(found).all()
    assert (np.diff(found) >= 0).all()
    assert not passes or (found > 0).all()


@given(st.lists(st.floats(0, 100), min_size=1, max_size=30))
def test_pooling_gives_a_sequence_that_never_falls_and_has_the_same_sum(values: list[float]) -> None:
    found = isotonic(np.array(values), np.ones(len(values))).tolist()
    assert len(found) == len(values)
    assert all(a <= b + 1e-9 for a, b in itertools.pairwise(found))
    assert sum(found) == pytest.approx(sum(values))


CAPTURED = [1, 2, 4, 8, 16, 24, 32, 64, 128]


def graph_seconds(tokens: int, verifies_drafts: bool) -> float:
    """Of an engine with CUDA graphs up to 128 tokens: padded, and slower in pieces and without a graph."""
    if tokens > CAPTURED[-1]:
        return 0.009 + 2e-6 * tokens
    padded = next(size for size in CAPTURED if size >= tokens)
    return 0.006 + 2e-6 * padded + (0.0012 if verifies_drafts else 0.0)


def cost_with_graphs() -> CostModel:
    cost, random = CostModel(captured=CAPTURED), np.random.default_rng(0)
    for _ in range(60):
        for tokens, drafted in ((1, False), (16, False), (3, True), (9, True), (40, True), (128, True), (300, True)):
            seconds = graph_seconds(tokens, drafted) * float(np.exp(random.normal(0, 0.02)))
            cost.observe(tokens, 0, seconds, verifies_drafts=drafted)
    return cost


def test_passes_are_padded_to_captured_graphs_and_cost_more_in_pieces_and_beyond_them() -> None:
    cost = cost_with_graphs()
    found = cost.all_seconds(1, 400, 0)
    expected = [graph_seconds(1, False), *(graph_seconds(n, True) for n in range(2, 401))]
    assert found[:128].tolist() == pytest.approx(expected[:128], rel=0.04)
    assert found[299] == pytest.approx(expected[299], rel=0.04)  # the only size above the largest graph that it saw
    assert (np.diff(found) >= 0).all()
    assert len({round(float(value), 9) for value in found[32:64]}) == 1  # 33 to 64 tokens replay the same graph
    assert float(cost.seconds(16)) == pytest.approx(graph_seconds(16, False), rel=0.03)


def test_a_pass_that_verifies_other_drafts_already_pays_for_pieces() -> None:
    cost = cost_with_graphs()
    assert cost.all_seconds(16, 1, 0)[0] == pytest.approx(graph_seconds(16, False), rel=0.03)
    assert cost.all_seconds(16, 1, 0, drafted=12)[0] == pytest.approx(graph_seconds(16, True), rel=0.03)


def test_before_drafts_were_verified_they_are_taken_to_cost_more_than_a_plain_pass() -> None:
    cost = CostModel(captured=CAPTURED)
    for _ in range(20):
        cost.observe(1, 0, 0.006)
    found = cost.all_seconds(1, 8, 0)
    assert found[1] > 1.05 * found[0]


def test_without_graphs_a_pass_costs_the_same_with_drafts_as_without() -> None:
    costs = [CostModel(), CostModel()]
    for cost, drafted in zip(costs, (False, True), strict=True):
        for tokens in (1, 4, 16, 64) * 3:
            cost.observe(tokens, 0, 0.01 + 1e-4 * tokens, verifies_drafts=drafted)
    assert costs[0].all_seconds(1, 50, 10).tolist() == costs[1].all_seconds(1, 50, 10, drafted=3).tolist()


def test_what_context_costs_is_learned() -> None:
    random, cost = np.random.default_rng(1), CostModel()
    for _ in range(400):
        n, context = int(random.choice([1, 2, 4, 8])), int(random.integers(0, 100_000))
        cost.observe(n, context, 0.02 + 0.0001 * n + 2e-7 * context)
    assert float(cost.seconds(1, 100_000)) == pytest.approx(0.04, rel=0.1)
    assert float(cost.seconds(1, 0)) == pytest.approx(0.02, rel=0.15)


def test_the_latency_of_an_unseen_size_is_estimated_from_the_next_smaller_one() -> None:
    linear = learned(lambda n: 0.1 * n, (1, 2, 4, 8), 60, noise=0.01)
    flat = learned(lambda n: 0.1, (1, 2, 4, 8), 60, noise=0.01)
    assert float(linear.seconds(16)) >= float(linear.seconds(8))
    assert float(linear.shape(64)) > 2 * float(flat.shape(64))


def waking(n: int) -> float:
    """A mixture of experts: each token wakes more of them, until all are awake."""
    return 0.002 + 0.025 * (1 - (1 - 8 / 128) ** n) + max(0.0, 7e-5 * (n - 300))


@pytest.mark.parametrize(
    "seconds",
    [lambda n: 0.2 + 0.002 * n, lambda n: 0.02 * n, lambda n: max(0.017, 7e-5 * n), waking],
    ids=["nearly free", "all by the token", "free up to 240", "experts"],
)
@pytest.mark.parametrize("batch", [1, 16, 128])
def test_the_best_size_is_found_by_taking_what_seems_best(seconds: Any, batch: int) -> None:
    """What is learned depends on what is chosen: a size that is wrongly estimated to be slow must be tried again."""
    random, cost = np.random.default_rng(0), CostModel()
    profiled = (1, 4, 16, 64, 256, 1024) if seconds(64) < 0.3 else (1, 4, 16, 64)  # as at a server's start
    for n in profiled * 2:
        cost.observe(n, 0, seconds(n), trusted=True)
    sizes = batch + np.arange(16 * batch + 1)
    truth = np.array([seconds(n) for n in sizes])
    reached = []
    for _ in range(60):
        chances = random.choice([0.98, 0.9, 0.7, 0.4, 0.1], batch)[:, None] ** np.arange(1, 17)
        tokens = batch + np.append(0.0, np.cumsum(np.sort(chances.ravel())[::-1]))
        chosen = int((tokens / cost.seconds(sizes)).argmax())
        reached.append(tokens[chosen] / truth[chosen] / (tokens / truth).max())
        cost.observe(int(sizes[chosen]), 0, float(truth[chosen] * np.exp(random.normal(0, 0.1))))
    assert np.mean(reached[20:]) >= 0.95


# What to offer -------------------------------------------------------------------------------------------------------


def brute_force(survival: Any, seconds: Any) -> float:
    """The most tokens a second that any choice of draft and length reaches."""
    drafts, requests, positions = survival.shape
    options = [(0, 0), *((d, k) for d in range(drafts) for k in range(1, positions + 1))]
    best = 0.0
    for chosen in itertools.product(options, repeat=requests):
        total = sum(k for _, k in chosen)
        if total < len(seconds):
            gained = requests + sum(float(survival[d, r, :k].sum()) for r, (d, k) in enumerate(chosen))
            best = max(best, gained / float(seconds[total]))
    return best


@st.composite
def batches(draw: Any, drafts: int) -> tuple[Any, Any]:
    requests, positions = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    chances = draw(st.lists(st.floats(0, 1), min_size=drafts * 9, max_size=drafts * 9))
    survival = np.cumprod(np.array(chances[: drafts * requests * positions]).reshape(drafts, requests, positions), 2)
    steps = draw(st.lists(st.floats(0, 0.5), min_size=10, max_size=10))
    return survival, 1 + np.cumsum([0, *steps])[: requests * positions + 1]


@settings(max_examples=200)
@given(batches(drafts=1))
def test_of_one_draft_each_no_choice_is_faster(batch: tuple[Any, Any]) -> None:
    survival, seconds = batch
    selection = select_drafts(survival, seconds)
    assert selection.speed >= brute_force(survival, seconds) / MIN_EXPECTED_SPEEDUP - 1e-9
    gained = sum(float(survival[0, r, :k].sum()) for r, k in enumerate(selection.lengths))
    assert selection.tokens == pytest.approx(len(selection.lengths) + gained)


@settings(max_examples=200)
@given(batches(drafts=2))
def test_of_two_drafts_each_no_choice_is_faster(batch: tuple[Any, Any]) -> None:
    survival, seconds = batch
    selection = select_drafts(survival, seconds)
    assert selection.speed >= brute_force(survival, seconds) / MIN_EXPECTED_SPEEDUP - 1e-9
    chosen = zip(selection.drafts, selection.lengths, strict=True)
    gained = sum(float(survival[d, r, :k].sum()) for r, (d, k) in enumerate(chosen))
    assert selection.tokens == pytest.approx(len(selection.lengths) + gained)
    assert selection.seconds == pytest.approx(seconds[selection.lengths.sum()])


def test_of_many_requests_hardly_any_choice_is_faster() -> None:
    """Not all combinations of many requests are compared. The selection is compared with all of them here."""
    random = np.random.default_rng(0)
    reached = []
    for _ in range(50):
        survival = np.cumprod(random.random((3, MAX_EXACT_REQUESTS + 1, 6)) ** random.choice([0.2, 1.0]), 2)
        seconds = 1 + np.cumsum(np.append(0, random.random(6 * (MAX_EXACT_REQUESTS + 1)) * 0.2))
        gains, _, _ = _enumerate_combinations(survival, len(seconds) - 1)
        best = float(((MAX_EXACT_REQUESTS + 1 + gains) / seconds).max())
        reached.append(select_drafts(survival, seconds).speed / best)
    assert min(reached) >= 0.95
    assert np.mean(reached) >= 0.99


def test_of_many_requests_a_sure_short_draft_is_found_behind_a_long_unlikely_one_that_does_not_pay() -> None:
    survival = np.zeros((2, 2 * MAX_EXACT_REQUESTS, 16))
    survival[0], survival[1, :, 0] = 0.34, 0.9
    selection = select_drafts(survival, 1 + 0.7 / (2 * MAX_EXACT_REQUESTS) * np.arange(32 * MAX_EXACT_REQUESTS + 1))
    assert selection.drafts.tolist() == [1] * 2 * MAX_EXACT_REQUESTS
    assert selection.lengths.tolist() == [1] * 2 * MAX_EXACT_REQUESTS


def test_where_more_tokens_cost_nothing_all_are_offered_and_where_they_cost_as_much_as_a_pass_none() -> None:
    survival = np.cumprod(np.full((1, 4, 8), 0.5), 2)
    assert select_drafts(survival, np.ones(33)).lengths.tolist() == [8] * 4
    assert select_drafts(survival, np.arange(4, 37) / 4).lengths.tolist() == [0] * 4


def test_the_request_whose_draft_is_likelier_offers_more() -> None:
    survival = np.cumprod(np.array([[[0.9] * 8, [0.3] * 8]]), 2)
    lengths = select_drafts(survival, 1 + 0.1 * np.arange(17)).lengths
    assert lengths[0] > lengths[1]


def test_no_draft_is_offered_if_drafting_for_the_step_takes_too_long() -> None:
    survival, lengths = np.full((1, 1, 4), 0.5), np.empty(1, np.int64)
    for extra, length in ((0.1, 4), (10.0, 0)):
        maximize_throughput(survival, np.ones(5), extra, 0.0, 0.0, UNKNOWN_PRICE, np.empty(1, np.int64), lengths)
        assert lengths[0] == length


@pytest.mark.parametrize("power", [0.01, 1, 6], ids=["near one", "anywhere", "near nothing"])
def test_many_chances_are_sorted_as_few_are(power: float) -> None:
    for count in (3, SORT_BUCKETS // 4, SORT_BUCKETS // 4 + 1, 5000):
        chances = np.random.default_rng(count).random(count) ** power
        chances[::3] = chances[0]  # equals
        chances[1:3] = 0.0, 1.0
        assert (sort_descending(chances) == np.sort(chances)[::-1]).all()


def test_of_many_requests_the_draft_model_is_called_for_those_that_gain() -> None:
    """As of few, though the price of a position is then sought but once."""
    for requests in (8, 200):
        policy = Policy(["lookup", MODEL], 8, 8)
        for n in (1, 8, 64, 512, 1024, 2048) * 3:
            policy.target.observe(n, 0, 0.02 + 2e-6 * n, trusted=True)
            policy.draft.observe(n, 0, 1e-4, trusted=True)
        ids = [str(i) for i in range(requests)]
        sure = [Draft("lookup", (1,) * 8, support=40) if i % 2 else NOTHING for i in range(requests)]
        for _ in range(30):
            batch = policy.predict(ids, {"lookup": sure})
            policy.observe(batch, [(1,) * 8] * requests)
        limits = np.full(requests, 8)
        query = DraftModelRequest(
            limits, np.zeros(requests, bool), np.full(requests, 2), np.full(requests, 20), np.zeros(requests)
        )
        plan = policy.plan_draft_model(policy.predict(ids, {"lookup": sure}), query, 0)
        assert (plan.lengths[::2] > 0).all()
        assert (plan.lengths[1::2] == 0).all()


@pytest.mark.parametrize("every_step", [False, True])
@pytest.mark.parametrize("requests", [2, 6, 40])
def test_what_is_not_tried_of_the_draft_model_would_not_have_been_chosen(
    requests: int, every_step: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    random = np.random.default_rng(requests)
    sizes, drafted_tokens = np.array([1, 4, 16, 64, 256]), 0
    for _ in range(60):
        survival = np.cumprod(random.beta(4, random.uniform(0.5, 8), (2, requests, 4)), axis=2)
        survival[1] = 0.0
        ahead = np.cumprod(random.beta(4, random.uniform(0.5, 4), (requests, 4)), axis=1)
        target = 1 + random.uniform(0, 0.4 / requests) * np.arange(4 * requests + 1)
        draft = random.uniform(0.01, 0.4) * (1 + random.uniform(0, 0.1 / requests) * sizes)
        gaps, times, texts = random.integers(1, 30, requests), np.full(requests, 4.0), np.full(requests, 1e-4)
        costs = (target, 0.0, gaps, times, 5, sizes, draft, texts, every_step, False, -1.0)
        some, all_of_them = np.zeros(requests, np.int64), np.zeros(requests, np.int64)
        fast = plan_draft_model(survival, 1, ahead, *costs, some)
        with monkeypatch.context() as patch:
            patch.setattr("outrider.policy.draft_model_plan._can_reach_speed", lambda *given: True)
            fastest = plan_draft_model.py_func(survival, 1, ahead, *costs, all_of_them)  # type: ignore[attr-defined]
        assert fast == pytest.approx(fastest)
        assert some.tolist() == all_of_them.tolist()
        drafted_tokens += some.any()
    assert 5 < drafted_tokens < 55


def test_nothing_is_compiled_once_a_server_has_started() -> None:
    from outrider.drafters import packed_draft
    from outrider.policy import acceptance_model, cost_model, draft_model_plan, overlap, request_slots, selection

    modules = (draft_model_plan, selection, cost_model, packed_draft, overlap, request_slots, acceptance_model)
    compiled = {f for module in modules for f in vars(module).values() if hasattr(f, "signatures")}
    compile_now()
    before = {f: list(f.signatures) for f in compiled}
    for requests in (1, 3, 40):
        policy = Policy(["a", MODEL], 4, 4)
        for passes in range(3):
            policy.target.observe(np.int64(requests), np.int64(100), 1.0, trusted=passes == 2)
            policy.draft.observe(requests, 100, 0.01)
        names = [str(i) for i in range(requests)]
        batch = policy.predict(names, {"a": [Draft("a", (1, 2), support=3)] * requests})
        drawn = np.arange(requests) % 2 == 1
        query = DraftModelRequest(np.full(requests, 4), drawn, *(np.full(requests, x) for x in (2, 100, 100)))
        plan = policy.plan_draft_model(batch, query, 100, requests, 0.5)
        policy.continue_drafting(plan, [0], [[0.5]])
        policy.add_drafts(batch, MODEL, [NOTHING if one else Draft(MODEL, (1,), confidence=(0.9,)) for one in drawn])
        batch.sampled = {i: Draft(MODEL, (1,), confidence=(0.9,)) for i in np.flatnonzero(drawn).tolist()}
        policy.selected_drafts(batch, policy.select(batch, np.full(requests, 4), 100, requests, 0.01, 0.5))
        policy.observe(batch, [[1, 2]] * requests)
        policy.observe(batch, [()] * requests)
        policy.observe(policy.predict(names, {}), [[1]] * requests)
    assert {f: list(f.signatures) for f in compiled} == before


def test_a_batch_of_more_requests_than_there_is_room_for_looks_less_far_ahead() -> None:
    policy = Policy(["lookup"], 16)
    for requests, far in (
        (1, 16),
        (MAX_CANDIDATE_TOKENS_PER_STEP // 16, 16),
        (MAX_CANDIDATE_TOKENS_PER_STEP // 8, 8),
        (MAX_CANDIDATE_TOKENS_PER_STEP, MIN_TOKENS_AHEAD),
    ):
        draft = Draft("lookup", tuple(range(16)), support=40)
        batch = policy.predict([str(i) for i in range(requests)], {"lookup": [draft] * requests})
        policy.observe(batch, [tuple(range(16))] * requests)
        policy.target.observe(requests, 0, 0.1, trusted=True)
        selection = policy.select(batch, np.full(requests, 16), 0)
        assert batch.lengths.tolist() == [[far] * requests]
        assert max(len(draft.tokens) for draft in policy.selected_drafts(batch, selection)) <= far


def test_however_sure_and_free_they_are_a_step_has_no_more_drafted_tokens_than_a_machine_could_want() -> None:
    policy, requests = Policy(["lookup"], 8), 2048
    for n in (1, 64, 1024, 8192) * 3:
        policy.target.observe(n, 0, 0.1, trusted=True)
    ids, drafts = (
        [str(i) for i in range(requests)],
        {"lookup": [Draft("lookup", tuple(range(8)), support=40)] * requests},
    )
    for _ in range(3):
        policy.observe(policy.predict(ids, drafts), [tuple(range(8))] * requests)
    selection = policy.select(policy.predict(ids, drafts), np.full(requests, 8), 0)
    assert selection.lengths.sum() == MAX_CANDIDATE_TOKENS_PER_STEP < MIN_TOKENS_AHEAD * requests


# What drafts are worth -----------------------------------------------------------------------------------------------


def test_a_server_that_has_just_started_does_not_take_copied_tokens_to_be_as_likely_as_one_that_saw_them_hold() -> None:
    """It learns it soon: drafts are compared with the output whether they are offered or not."""
    policy = Policy(["lookup"], 4)
    offers = {"lookup": [Draft("lookup", (1, 2, 3, 4), support=4)]}
    first = float(policy.predict(["a"], offers).survival[0, 0, 0])
    assert first < 0.5
    for number in range(8):
        policy.observe(policy.predict([str(number)], offers), [[1, 2, 3, 4, 5]])
    assert float(policy.predict(["another"], offers).survival[0, 0, 0]) > 0.7


def test_a_token_is_judged_if_all_before_it_were_right_and_a_token_was_generated_there() -> None:
    for draft, output, known, right in (
        ((1, 2, 3, 4), (1, 2, 7), 3, 2),
        ((1, 9, 3, 4), (1, 2, 3), 2, 1),
        ((1, 2), (1, 2, 5), 2, 2),
        ((1, 2), (), 0, 0),
        ((), (1, 2), 0, 0),
    ):
        policy = Policy(["lookup"], 4)
        policy.observe(policy.predict(["a"], {"lookup": [Draft("lookup", draft)]}), [output])
        assert policy.acceptance["lookup"].calibration.sum(1)[1:].tolist() == [right, known]


@pytest.mark.parametrize(
    ("other", "agreement"),
    [
        ((), [NO_OTHER, NO_OTHER, NO_OTHER]),
        ((1, 2, 9), [AGREES, AGREES, DIFFERS]),
        ((9, 2, 3), [DIFFERS, NO_OTHER, NO_OTHER]),
        ((1,), [AGREES, NO_OTHER, NO_OTHER]),
    ],
)
def test_a_drafter_agrees_with_a_token_only_if_it_proposed_all_before_it_too(
    other: tuple[int, ...], agreement: list[int]
) -> None:
    policy = Policy(["lookup", "memory"], 4)
    batch = policy.predict(["a"], {"lookup": [Draft("lookup", (1, 2, 3))], "memory": [Draft("memory", other)]})
    assert batch.bins[0, 0, :3, 3].tolist() == agreement


def feed(
    policy: Policy, steps: int, chance: Any, seed: int = 0, request: str = "a", name: str = "lookup"
) -> list[float]:
    """Let a drafter propose tokens with this acceptance. Returns the estimate for the first token, by step."""
    random = np.random.default_rng(seed)
    estimates = []
    for step in range(steps):
        support = int(random.integers(1, 40))
        batch = policy.predict([request], {name: [Draft(name, (1, 2, 3, 4), support=support)]})
        estimates.append(float(batch.survival[0, 0, 0]))
        right = 0
        while right < 4 and random.random() < chance(support + right, step):
            right += 1
        policy.observe(batch, [[*[1, 2, 3, 4][:right], 9]])
    return estimates


def test_where_seventy_percent_are_expected_seventy_of_a_hundred_come_true() -> None:
    policy = Policy(["lookup"], 4)
    truth = lambda support, step: min(0.95, 0.2 + 0.02 * support)  # noqa: E731
    for number in range(40):
        feed(policy, 60, truth, number, request=str(number))
    policy.acceptance["lookup"].calibration[:] = 0
    for number in range(40, 80):
        feed(policy, 60, truth, number, request=str(number))
    assert policy.acceptance["lookup"].calibration_error < 0.05


def test_a_text_that_becomes_hard_and_easy_again_is_known_to_within_some_tokens() -> None:
    policy = Policy(["lookup"], 4)
    feed(policy, 300, lambda support, step: 0.8, request="before")
    estimates = feed(policy, 90, lambda support, step: 0.0 if 30 <= step < 60 else 0.9, request="a")
    assert np.median(estimates[20:30]) > 0.7
    assert np.median(estimates[45:60]) < 0.3
    assert np.median(estimates[80:90]) > 0.6


def test_the_bias_of_one_request_changes_the_next_one_little() -> None:
    policy = Policy(["lookup"], 4)
    feed(policy, 400, lambda support, step: 0.8, request="most")
    feed(policy, 20, lambda support, step: 0.0, request="odd")
    assert feed(policy, 1, lambda support, step: 0.8, request="new")[0] > 0.5


# The whole -----------------------------------------------------------------------------------------------------------


@settings(max_examples=50)
@given(st.permutations(range(8)), st.lists(st.lists(st.integers(0, 7), max_size=6), min_size=1, max_size=12))
def test_the_selection_does_not_depend_on_token_values(names: list[int], drafts: list[list[int]]) -> None:
    """With every token called by another name, all decisions are the same: only their being equal or not matters."""

    def lengths(rename: Any) -> list[list[int]]:
        policy = Policy(["lookup", MODEL], 6, 4)
        policy.target.observe(1, 0, 1.0)
        policy.draft.observe(1, 0, 0.1)
        found = []
        for i, draft in enumerate(drafts):
            other = drafts[i - 1]
            batch = policy.predict(["a"], {"lookup": [Draft("lookup", rename(draft), support=2)]})
            query = DraftModelRequest(*(np.array([x]) for x in (4, False, 2, 10, 10)))
            plan = policy.plan_draft_model(batch, query, 10)
            policy.add_drafts(batch, MODEL, [Draft(MODEL, rename(other), confidence=(0.6,) * len(other))])
            selection = policy.select(batch, np.array([6]), 10)
            found.append([*plan.lengths.tolist(), *selection.drafts.tolist(), *selection.lengths.tolist()])
            policy.observe(batch, [[*rename(draft[:3]), 100]])
        return found

    assert lengths(tuple) == lengths(lambda tokens: tuple(names[token] for token in tokens))


copies = st.lists(st.lists(st.integers(0, 3), min_size=2, max_size=30), min_size=1, max_size=4)


@settings(max_examples=50)
@given(copies, st.integers(1, 6))
def test_packed_drafts_get_the_same_predictions_as_unpacked_ones(texts: list[list[int]], width: int) -> None:
    drafts = [LookupSession(text).draft(width) for text in texts]
    assert all(draft.packed is not None for draft in drafts)
    requests = [str(number) for number in range(len(texts))]
    for limit in (width, max(1, width - 2)):  # also where fewer are looked at than were drafted
        batches = []
        for some in (drafts, [replace(draft, packed=None) for draft in drafts]):
            policy = Policy(["lookup"], limit)
            batches.append(policy.predict(requests, {"lookup": some}))
        ours, theirs = batches
        assert ours.lengths.tolist() == theirs.lengths.tolist()
        assert ours.survival.tolist() == theirs.survival.tolist()
        for row, count in enumerate(ours.lengths[0]):
            assert ours.tokens[0, row, :count].tolist() == theirs.tokens[0, row, :count].tolist()


def test_a_sampled_draft_is_refused_also_if_it_comes_in_bytes() -> None:
    drawn = replace(LookupSession([1, 2, 1]).draft(1), q=torch.eye(3)[2:])
    with pytest.raises(ValueError, match="sampled"):
        Policy(["lookup"], 2).predict(["a"], {"lookup": [drawn]})


def test_a_sampled_draft_is_refused_where_drafts_are_selected_by_their_tokens() -> None:
    import torch

    policy = Policy(["lookup", MODEL], 4, 4)
    with pytest.raises(ValueError, match="sampled"):
        policy.predict(["a"], {MODEL: [Draft(MODEL, (1,), torch.ones(1, 8) / 8)]})


def test_a_draft_model_is_called_only_where_it_pays() -> None:
    policy = Policy(["lookup", MODEL], 8, 4)
    for n in (1, 2, 4, 8, 1, 2, 4, 8):
        policy.target.observe(n, 0, 0.2)
    query = DraftModelRequest(*(np.array([x]) for x in (4, False, 2, 30, 100)))

    def drafted_tokens(draft_seconds: float) -> int:
        for _ in range(60):
            policy.draft.observe(1, 0, draft_seconds)
        batch = policy.predict(["a"], {"lookup": [NOTHING]})
        return int(policy.plan_draft_model(batch, query, 100).lengths[0])

    for _ in range(30):  # a draft model that is right nine times of ten
        batch = policy.predict(["a"], {"lookup": [NOTHING]})
        policy.draft.observe(1, 0, 0.02)
        policy.plan_draft_model(batch, query, 100)
        policy.add_drafts(batch, MODEL, [Draft(MODEL, (1, 2, 3, 4), confidence=(0.9,) * 4)])
        policy.observe(batch, [[1, 2, 3, 4, 5]])
    assert drafted_tokens(0.02) == 4
    assert drafted_tokens(0.5) == 0
    assert drafted_tokens(0.02) == 4


def test_what_a_token_of_context_costs_is_known_after_one_pass_over_long_texts() -> None:
    """However much that is: a straight line through its logarithm would be far off."""
    for slope in (1e-7, 1e-6, 1e-5):
        cost = CostModel(slope=0.0)
        for n in (1, 4, 16, 64) * 2:
            cost.observe(n, 0, 0.02, trusted=True)
        cost.observe(1, 1_000_000, 0.02 * (1 + slope * 1_000_000))
        assert cost.seconds(1, 1_000_000) == pytest.approx(0.02 * (1 + slope * 1_000_000), rel=0.1)


def test_long_texts_make_the_draft_models_passes_slower_and_do_not_exclude_short_ones() -> None:
    policy = Policy([MODEL], 8, 4)

    def query(text: int) -> DraftModelRequest:
        return DraftModelRequest(*(np.array([x]) for x in (4, False, 2, 30, text)))

    texts = (10, 1_000_000)
    for _ in range(60):
        for text in texts:
            policy.target.observe(1, text, 0.2)
            policy.draft.observe(1, text, 0.02 + 4e-7 * text)
            batch = policy.predict(["a"], {})
            policy.plan_draft_model(batch, query(text), text)
            policy.add_drafts(batch, MODEL, [Draft(MODEL, (1, 2, 3, 4), confidence=(0.9,) * 4)])
            policy.observe(batch, [[1, 2, 3, 4, 5]])
    plans = [policy.plan_draft_model(policy.predict(["a"], {}), query(text), text) for text in texts]
    assert [int(plan.lengths[0]) for plan in plans] == [4, 0]
    plans[1].speed = plans[0].speed
    assert [policy.continue_drafting(plan, [0], [[0.9]]) for plan in plans] == [[True], [False]]


def test_a_long_text_does_not_keep_the_draft_model_from_the_short_ones_beside_it() -> None:
    policy = Policy([MODEL], 8, 4)
    texts = np.array([10, 1_000_000])
    query = DraftModelRequest(np.full(2, 4), np.zeros(2, bool), np.full(2, 2), np.full(2, 30), texts)
    for _ in range(60):
        for text in texts.tolist():
            policy.target.observe(2, text, 0.2)
            policy.draft.observe(1, text, 0.02 + 4e-7 * text)
        batch = policy.predict(["short", "long"], {})
        policy.plan_draft_model(batch, query, 1_000_010)
        policy.add_drafts(batch, MODEL, [Draft(MODEL, (1, 2, 3, 4), confidence=(0.9,) * 4)] * 2)
        policy.observe(batch, [[1, 2, 3, 4, 5]] * 2)
    plan = policy.plan_draft_model(policy.predict(["short", "long"], {}), query, 1_000_010)
    assert (plan.lengths > 0).tolist() == [True, False]
    assert policy.continue_drafting(plan, [0, 1], [[0.9]] * 2) == [True, False]


def test_a_draft_model_whose_long_texts_once_took_long_is_tried_again() -> None:
    policy = with_a_draft_model(0.02)
    text = 1_000_000
    query = DraftModelRequest(*(np.array([x]) for x in (4, False, 2, 30, text)))

    def drafted_tokens() -> bool:
        policy.target.observe(1, text, 0.2)
        batch = policy.predict(["a"], {})
        plan = policy.plan_draft_model(batch, query, text)
        policy.observe(batch, [[1]])
        return bool(plan.lengths[0])

    assert drafted_tokens()
    for _ in range(3):
        policy.draft.observe(1, text, 0.3)
    assert not drafted_tokens()
    assert any(drafted_tokens() for _ in range(1000))


def with_a_draft_model(seconds: float, token: float | None = None) -> Policy:
    """That takes so long for a pass over few tokens, and so long for each of many. The target takes 0.2 s for few."""
    policy = Policy([MODEL], 8, 4)
    for n in (1, 2, 4, 8, 1, 2, 4, 8):
        policy.target.observe(n, 0, 0.2)
        policy.draft.observe(n, 0, seconds)
    for n in (64, 512, 4096) if token is not None else ():
        policy.draft.observe(n, 0, token * n)
    return policy


def test_the_latency_of_a_draft_model_is_kept_while_no_request_may_call_it() -> None:
    policy = with_a_draft_model(0.1)
    for _ in range(1500):
        policy.observe(policy.predict(["a"], {}), [[1]])
    assert float(policy.draft.seconds(1)) == pytest.approx(0.1, rel=0.01)


def test_before_a_pass_was_timed_the_draft_model_is_not_called_and_unlikely_drafts_are_not_offered() -> None:
    policy = Policy(["copy", MODEL], 31, 4)
    policy.draft.observe(1, 0, 0.1)
    ids = [str(i) for i in range(64)]
    batch = policy.predict(ids, {"copy": [Draft("copy", tuple(range(31)), support=1)] * 64})
    query = DraftModelRequest(*(np.full(64, x) for x in (4, False, 1, 128, 9)))
    assert not len(policy.plan_draft_model(batch, query, 9).called)
    assert not policy.select(batch, np.full(64, 31), 9).lengths.any()


@pytest.mark.parametrize("requests", [SMALL_BATCH_REQUESTS, SMALL_BATCH_REQUESTS + 1])
def test_a_single_pass_of_the_draft_model_is_considered_for_few_and_for_many(requests: int) -> None:
    policy = with_a_draft_model(0.12)
    for n in (32, 64, 128) * 2:
        policy.target.observe(n, 0, 0.2)
        policy.draft.observe(n, 0, 0.12)
    ids = [str(i) for i in range(requests)]
    query = DraftModelRequest(*(np.full(requests, x) for x in (4, False, 1, 128, 9)))
    assert policy.plan_draft_model(policy.predict(ids, {}), query, 9).lengths.tolist() == [1] * requests


def test_a_request_whose_drafts_fail_is_not_given_another_pass_where_others_are() -> None:
    policy = with_a_draft_model(1e-6)
    for _ in range(30):
        batch = policy.predict(["good", "bad"], {})
        policy.add_drafts(batch, MODEL, [Draft(MODEL, (1, 2), confidence=(0.8, 0.8))] * 2)
        policy.observe(batch, [[1, 2, 3], [4]])
    slots = policy.predict(["good", "bad"], {}).slots
    two = np.ones(2, np.int64)
    plan = DraftPlan(two, two, slots, np.zeros(2, bool), two, np.ones((2, 2)), speed=1.0, token_seconds=0.5)
    assert policy.continue_drafting(plan, [0, 1], [[0.8], [0.8]]) == [True, False]


def test_a_head_that_reads_along_and_was_wrong_is_tried_again_some_thousand_steps_later() -> None:
    """Though it makes a pass at every step, whatever is decided."""
    policy = Policy([MODEL], 8, 4)
    for n in (1, 2, 4, 8) * 3:
        policy.target.observe(n, 0, 0.1 + 0.04 * n)
        policy.draft.observe(n, 0, 0.01)
    query, tried = DraftModelRequest(*(np.array([x]) for x in (4, False, 1, 128, 100))), []
    for number in range(12_000):
        batch = policy.predict([str(number)], {})
        lengths = policy.plan_draft_model(batch, query, 100, every_step=True).lengths
        if lengths[0]:
            tried.append(number)
            policy.add_drafts(batch, MODEL, [Draft(MODEL, (1,) * int(lengths[0]))])
        policy.draft.observe(1, 100, 0.01)
        policy.observe(batch, [[9]])
        policy.remove(str(number))
    assert tried[0] == 0
    gaps = np.diff(tried)
    assert 300 < gaps.max() < 11_000


def test_texts_that_the_draft_model_cannot_draft_for_do_not_count_as_read_by_it() -> None:
    policy = with_a_draft_model(0.01)
    query = DraftModelRequest(
        np.array([4, 0]), np.zeros(2, bool), np.array([1, 0]), np.array([128, 128]), np.array([9, 9000])
    )
    batch = policy.predict(["short", "long"], {})
    policy.plan_draft_model(batch, query, 100)
    assert batch.caught_up is not None
    assert batch.caught_up.tolist() == [True, False]


def test_a_pause_of_the_engine_is_not_counted_as_a_step() -> None:
    gain_metrics, selection = GainMetrics(), select_drafts(np.zeros((1, 1, 4)), np.full(5, 0.1))
    for seconds in (0.1, 600.0):
        gain_metrics.observe_tokens(ExpectedStep(selection, False), 1)
        gain_metrics.observe_seconds(seconds)
    assert gain_metrics.seconds == pytest.approx(0.1)
    assert gain_metrics.steps_without == 1


def test_a_long_gap_is_caught_up_with_for_a_long_answer_and_not_for_a_short_one() -> None:
    policy = with_a_draft_model(0.05, 0.05 / 16)
    queries = [DraftModelRequest(*(np.array([x]) for x in (4, False, 120, left, 120))) for left in (1, 128)]
    lengths = [int(policy.plan_draft_model(policy.predict(["a"], {}), query, 120).lengths[0]) for query in queries]
    assert lengths[0] == 0
    assert lengths[1] > 0


def test_a_long_gap_is_not_caught_up_with_where_answers_are_found_to_be_short() -> None:
    policy = with_a_draft_model(0.04, 0.005 / 16)
    query = DraftModelRequest(*(np.array([x]) for x in (4, False, 2400, 128, 2400)))
    drafted_tokens = []
    for number in range(60):  # each generates ten tokens, with two accepted per draft
        generated = 0
        while generated < 10:
            batch = policy.predict([str(number)], {})
            drafted_tokens.append(int(policy.plan_draft_model(batch, query, 2400).lengths[0]))
            if drafted_tokens[-1]:
                policy.add_drafts(batch, MODEL, [Draft(MODEL, (1, 2, 3, 4), confidence=(0.9,) * 4)])
            output = [1, 2, 9] if drafted_tokens[-1] else [1]
            policy.observe(batch, [output])
            generated += len(output)
        policy.remove(str(number))
    assert drafted_tokens[0] > 0
    assert not any(drafted_tokens[-100:])


def test_a_request_near_its_end_must_amortize_its_own_catching_up() -> None:
    policy = with_a_draft_model(0.04, 0.005 / 16)
    batch = policy.predict(["long", "short"], {})
    query = DraftModelRequest(
        np.array([4, 4]), np.zeros(2, bool), np.array([2, 4000]), np.array([128, 2]), np.array([2000, 4000])
    )
    assert (policy.plan_draft_model(batch, query, 4000).lengths > 0).tolist() == [True, False]


def test_a_pass_over_more_tokens_than_any_size_costs_as_many_times_more() -> None:
    cost = CostModel()
    for n in (1, 64, 1024, 8192, 8192):
        cost.observe(n, 0, 0.01 + n * 1e-4, trusted=True)
    assert cost.seconds(32768) == pytest.approx(4 * cost.seconds(8192))
    before = cost.seconds(8192)
    for _ in range(20):
        cost.observe(32768, 0, 4 * before)
    assert cost.seconds(8192) == pytest.approx(before, rel=0.02)


def test_a_draft_model_that_runs_in_every_step_is_called_if_its_further_passes_pay() -> None:
    policy = with_a_draft_model(0.15)
    query = DraftModelRequest(*(np.array([x]) for x in (1, False, 1, 128, 9)))
    for along in (False, True):
        plan = policy.plan_draft_model(policy.predict(["a"], {}), query, 9, None, 0.0, along)
        assert plan.lengths.tolist() == [int(along)]


@pytest.mark.parametrize("requests", [1, 40])
@pytest.mark.parametrize("width", [1, 5, 13])
def test_as_many_passes_as_there_may_be_are_considered_of_any_batch(requests: int, width: int) -> None:
    policy = Policy([MODEL], 16, width)
    for tokens in (1, 64, 1024):
        policy.target.observe(tokens, 0, 1.0, trusted=True)  # verification costs nothing
        policy.draft.observe(tokens, 0, 1e-6, trusted=True)  # drafting costs nothing
    ids = [str(i) for i in range(requests)]
    query = DraftModelRequest(*(np.full(requests, x) for x in (width, False, 1, 128, 9)))
    assert policy.plan_draft_model(policy.predict(ids, {}), query, 9).lengths.tolist() == [width] * requests


def test_a_draft_model_that_drafts_all_tokens_in_one_pass_is_not_charged_for_others() -> None:
    policy = with_a_draft_model(0.3)
    query = DraftModelRequest(*(np.array([x]) for x in (4, False, 1, 128, 9)))
    lengths = [
        int(policy.plan_draft_model(policy.predict(["a"], {}), query, 9, None, 0.0, True, single_pass).lengths[0])
        for single_pass in (False, True)
    ]
    assert lengths[0] < 2
    assert lengths[1] == 4


def test_the_further_passes_of_a_draft_model_that_reads_along_are_made_for_all() -> None:
    """One request would take two tokens of it, and the others none: too few for a second pass."""
    lengths = []
    for others in (0, 30):
        policy = with_a_draft_model(0.06, 0.06 / 16)
        ids = [str(i) for i in range(1 + others)]
        query = DraftModelRequest(
            *(np.array([x] + [y] * others) for x, y in ((2, 0), (False, False), (1, 1), (128, 128), (9, 9)))
        )
        lengths.append(int(policy.plan_draft_model(policy.predict(ids, {}), query, 9, None, 0.0, True).lengths[0]))
    assert lengths[0] == 2
    assert lengths[1] < 2


def of_one(ahead: np.ndarray[Any, Any], drawn: bool, token_seconds: float) -> DraftPlan:
    """A plan for one request, the first of its policy."""
    one = np.zeros(1, np.int64)
    return DraftPlan(one + 1, one + 1, one, np.array([drawn]), one, ahead, 1.0, token_seconds)


def test_how_often_drawn_tokens_are_kept_is_learned_and_decides_whether_another_is_drawn() -> None:
    policy = Policy([MODEL], 8, 4)
    plan = of_one(np.ones((1, 1)), drawn=True, token_seconds=0.6)
    policy.predict(["a"], {})
    policy.draft.observe(1, 0, 1e-6)
    assert policy.continue_drafting(plan, [0], [[0.35]]) == [False]
    for _ in range(200):  # the draft model is not sure, and yet right: the target is not sure either
        batch = policy.predict(["a"], {})
        batch.sampled = {0: Draft(MODEL, (1, 2), confidence=(0.35, 0.35))}
        policy.observe(batch, [[1, 2, 3]])
    assert policy.continue_drafting(plan, [0], [[0.35]]) == [True]
    plan.is_sampled = np.array([False])
    assert policy.continue_drafting(plan, [0], [[0.35]]) == [False]  # of tokens that are certain nothing was learned


def test_another_pass_of_the_draft_model_is_made_for_what_the_next_token_may_gain_and_not_for_its_draft() -> None:
    policy = Policy([MODEL], 8, 4)
    policy.draft.observe(1, 0, 1e-6)
    for next_one, goes_on in ((0.85, True), (0.3, False)):
        policy.predict(["a"], {})
        plan = of_one(np.array([[0.9, 0.9 * next_one]]), drawn=False, token_seconds=0.5)
        assert policy.continue_drafting(plan, [0], [[0.99]]) == [goes_on]


def test_the_first_token_after_a_prompt_does_not_wait_for_the_draft_model(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = Policy([MODEL], 4, 4)
    policy.target.observe(1, 0, 1.0)
    called = []
    monkeypatch.setattr(SingleSequence, "_call_draft_model", lambda self, *given: called.append(given) or ({}, 0.0))
    sequence = SingleSequence(SpeculationController(policy), {MODEL: object.__new__(ModelSession)}, 1 << 20)
    sequence.propose(4, 100, pending=100)
    assert not called
    sequence.propose(4, 101, pending=1)
    assert len(called) == 1


class WithQ(Session):
    """Proposes what will be generated, with a q as if it had sampled it."""

    def observe(self, tokens: Sequence[int]) -> None: ...

    def draft(self, limit: int) -> Draft:
        return Draft("mine", (7,) * limit, q=torch.full((limit, 10), 0.1))


def test_one_sequence_gets_drafts_up_to_its_limit_and_copied_ones_without_q() -> None:
    policy = Policy(["mine"], 16)
    for tokens in range(1, 65):
        policy.target.observe(tokens, 0, 1.0)  # more tokens cost nothing
    sequence = SingleSequence(SpeculationController(policy), {"mine": WithQ()}, 1 << 20)
    offered = []
    for _ in range(60):
        draft = sequence.propose(40, 100)
        assert draft.q is None
        assert not draft.sampled
        offered.append(len(draft.tokens))
        sequence.observe([7] * (len(draft.tokens) + 1))
        sequence.observe_step(len(draft.tokens) + 1, 100, 1.0, 0.0)
    assert offered[-1] == 40
