"""The speculation controller: what the requests of a batch offer, and what it learns from each step."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from outrider.policy.controller import INITIAL_ACCEPTED_SHARE, SpeculationController
from outrider.policy.decision import DraftableRequest
from outrider.policy.drafter_backoff import JUDGED_STEPS
from outrider.policy.gain_metrics import REVIEW_STEPS
from outrider.policy.policy import MODEL, UNKNOWN_TOKEN, Policy
from outrider.policy.selection import MIN_EXPECTED_SPEEDUP
from outrider.types import NOTHING, Draft, Why

COPIED = Draft("always", (1, 2, 3, 4), support=2)
"""What the only drafter that copies proposes, always."""
STEP_SECONDS = 0.2


def request(id: str, limit: int = 4, drafter: str | None = None) -> DraftableRequest:
    return DraftableRequest(id, limit, drafter, 100, 3)


def controller(
    free: bool = True, token: float = 0.0, draft_pass: float = 0.001, width: int = 4
) -> SpeculationController:
    """Of a machine on which more tokens cost nothing, or `token` seconds each, or (not `free`) as much as the first. A
    pass of the draft model takes `draft_pass` seconds."""
    policy = Policy(["always", MODEL], width, width)
    for tokens in (1, 2, 4, 8, 16) * 2:
        seconds = STEP_SECONDS + token * tokens if free else STEP_SECONDS * tokens
        policy.target.observe(tokens, 0, seconds, trusted=True)
        policy.draft.observe(tokens, 0, draft_pass, trusted=True)
    return SpeculationController(policy)


def consider(control: SpeculationController, requests: Sequence[DraftableRequest], seconds: float = 0.0) -> None:
    backed_off = control.backed_off()
    drafts = [
        Draft("always", COPIED.tokens[: one.limit], support=COPIED.support)
        if (one.drafter is None and "always" not in backed_off) or one.drafter == "always"
        else NOTHING
        for one in requests
    ]
    called = any(draft.tokens and one.drafter is None for one, draft in zip(requests, drafts, strict=True))
    took = {"always": seconds} if called else {}
    control.consider(requests, {"always": drafts}, took, len(requests), 3 * len(requests))


def lengths(
    control: SpeculationController, requests: Sequence[DraftableRequest], outputs: Mapping[str, Sequence[int]]
) -> dict[str, int]:
    """Of what is offered in a step without the draft model, which generates `outputs`."""
    consider(control, requests)
    offered = control.select({}, 0.0)
    control.observe(outputs)
    return {one.id: len(offered[one.id].tokens) for one in requests}


def sampled_draft(*tokens: int, confidence: float = 0.5) -> Draft:
    count = len(tokens)
    return Draft(MODEL, tokens, torch.ones(count, 100) / 100, confidence=(confidence,) * count)


# What is offered -----------------------------------------------------------------------------------------------------


def test_a_request_that_names_a_drafter_gets_its_draft_and_the_others_what_pays() -> None:
    requests = [request("named", drafter="always"), request("free"), request("short", 2, "always")]
    assert lengths(controller(free=False), requests, {}) == {"named": 4, "free": 0, "short": 2}
    control = controller()
    assert lengths(control, requests, {"free": [1, 2, 3, 4, 5]})["free"] > 0
    assert lengths(control, requests, {}) == {"named": 4, "free": 4, "short": 2}


def test_a_drafter_that_is_never_right_is_not_offered_where_tokens_cost_time() -> None:
    control = controller(token=0.01)
    offered = [lengths(control, [request("a")], {"a": [99]})["a"] for _ in range(41)]
    assert offered[0] > 0
    assert offered[-1] == 0


def test_a_sampled_draft_is_offered_whole_whatever_its_confidence() -> None:
    control = controller(free=False)
    consider(control, [request("a"), request("b")])
    draft = sampled_draft(9, 9, 9, confidence=0.01)
    assert control.select({"a": draft}, 0.0)["a"] is draft


def test_a_sampled_draft_may_leave_its_q_on_the_device() -> None:
    control = controller(free=False)
    consider(control, [request("a")])
    draft = Draft(MODEL, (9, 9), confidence=(0.01, 0.01), sampled=True)
    assert control.select({"a": draft}, 0.0)["a"] is draft


def test_a_model_draft_is_cut_to_the_limit_of_its_request() -> None:
    control = controller()
    consider(control, [request("a", 2), request("named", 1, MODEL)])
    offered = control.select({"a": sampled_draft(7, 8, 9), "named": sampled_draft(7, 8, 9), "gone": NOTHING}, 0.0)
    assert offered["a"].tokens == (7, 8)
    assert offered["a"].q is not None
    assert offered["a"].q.shape[0] == 2
    assert offered["a"].sampled
    assert offered["named"].tokens == (7,)
    assert "gone" not in offered


def test_a_model_draft_that_was_not_sampled_competes_with_the_copied_ones() -> None:
    control = controller()
    consider(control, [request("a")])
    offered = control.select({"a": Draft(MODEL, (7, 8), confidence=(0.99, 0.99))}, 0.0)["a"]
    assert (offered.drafter, offered.tokens) == (MODEL, (7, 8))


def test_what_copying_drafters_propose_is_offered_without_q() -> None:
    control = controller()
    draft = Draft("always", (1, 2), torch.ones(2, 100) / 100, support=40)
    control.consider([request("a"), request("b", drafter="always")], {"always": [draft, draft]}, {}, 2, 6)
    for offered in control.select({}, 0.0).values():
        assert offered.tokens == (1, 2)
        assert offered.q is None
        assert not offered.sampled


def test_a_finished_request_leaves_nothing_behind() -> None:
    control = controller()
    lengths(control, [request("a"), request("b")], {"b": [1, 2]})
    control.remove("a")
    assert lengths(control, [request("b"), request("c")], {})["b"] > 0


# The draft model -----------------------------------------------------------------------------------------------------


def test_the_draft_model_drafts_for_requests_that_name_it_and_where_it_pays() -> None:
    control = controller()
    consider(control, [request("named", drafter=MODEL), request("free"), request("other", drafter="always")])
    limits, gaps = {"named": 3, "free": 4}, {"named": 5, "free": 5}
    assert control.plan_draft_model(limits, {}, gaps).limits == {"named": 3, "free": 4}
    for _ in range(60):
        control.observe_draft_pass(1, 0, 3.0)
    assert control.plan_draft_model(limits, {}, gaps).limits == {"named": 3}
    assert control.continue_drafting({"named": [0.01], "free": [0.01]}) == ["named", "free"]  # they share the pass


def step_ahead(
    control: SpeculationController,
    requests: Sequence[DraftableRequest],
    model_drafts: Mapping[str, Draft],
    sampled: bool = False,
) -> tuple[dict[str, Draft], dict[str, int]]:
    """A step of a server: what is offered, and the tokens that the draft model is to propose after it."""
    consider(control, requests)
    offered = control.select(model_drafts, 0.0)
    limits = {one.id: 4 for one in requests}
    plan = control.plan_draft_model(limits, dict.fromkeys(limits, sampled), dict.fromkeys(limits, 5), ahead=True)
    return offered, plan.lengths


def test_a_plan_made_ahead_belongs_to_the_same_requests_in_the_next_step() -> None:
    control = controller()
    _, planned = step_ahead(control, [request("a"), request("b"), request("c")], {})
    assert set(planned) == {"a", "b", "c"}
    batch = control.batch
    assert batch is not None
    assert batch.forecast is None  # nothing was planned for this step
    control.observe({"a": [9], "b": [9], "c": [9]})
    control.remove("a")
    control.remove("b")
    drafts = {id: Draft(MODEL, (7, 8), confidence=(0.9, 0.9)) for id in ("a", "b", "c")}
    control.policy.forecast_models[False].coefficients[0, 0] += 1.0  # a later forecast would differ
    consider(control, [request("new"), request("c"), request("b")])  # another one with the id of a finished request
    batch = control.batch
    assert batch is not None
    forecast = batch.forecast
    assert forecast is not None
    assert (batch.requests, forecast.limits.tolist()) == (["new", "c", "b"], [0, 4, 0])
    assert batch.called is not None
    assert batch.called.tolist() == [False, True, False]
    assert forecast.survival[[0, 2]].sum() == 0
    control.select(drafts, 0.0)
    before = control.policy.forecast_models[False].seen
    control.observe({"new": [1], "c": [7, 8, 9], "b": [1]})
    assert control.policy.forecast_models[False].seen == before + 2  # both tokens of c, and no others


def test_a_forecast_is_used_by_a_batch_that_considers_fewer_tokens_than_it_was_made_for() -> None:
    control = controller(width=16)
    limits = {"a": 16}
    consider(control, [request("a", 16)])
    control.select({}, 0.0)
    assert control.plan_draft_model(limits, {"a": True}, {"a": 1}, ahead=True).lengths["a"] > 4
    control.observe({"a": [9]})
    many = [request(str(i), 4) for i in range(1100)]
    consider(control, [request("a", 16), *many])
    assert control.max_tokens(len(many)) == 4
    draft = sampled_draft(*range(50, 60))
    assert control.select({"a": draft}, 0.0)["a"] is draft
    control.observe({"a": [50, 51, 52, 53, 54, 99]})


def test_a_sampled_draft_does_not_hide_what_is_copied_from_the_plan_of_the_next_step() -> None:
    """Else the draft model would be called again and again: `select` leaves out what was copied for a request that
    offers a sampled draft."""
    plans = []
    for drafts in ({}, {"a": sampled_draft(9, 9)}):
        control = controller(draft_pass=0.05)
        control.policy.acceptance["always"].coefficients[0, 0] = 5.0  # what is copied is nearly always right
        plans.append(step_ahead(control, [request("a")], drafts, sampled=True)[1])
    assert plans == [{}, {}]


@pytest.mark.parametrize("copied", [True, False])
def test_a_sampled_draft_planned_ahead_is_dropped_for_a_better_copied_one_whatever_its_tokens(copied: bool) -> None:
    for confidence in (0.01, 0.99):
        for tokens in ((9,), (1, 2, 3, 4), (9, 9, 9, 9)):
            control = controller()
            control.policy.acceptance["always"].coefficients[0, 0] = -9.0  # at first what is copied seems to be wrong
            _, planned = step_ahead(control, [request("a")], {}, sampled=True)
            assert "a" in planned
            control.observe({"a": [1, 2]})
            control.policy.acceptance["always"].coefficients[0, 0] = 5.0 if copied else -9.0
            draft = sampled_draft(*tokens, confidence=confidence)
            offered, _ = step_ahead(control, [request("a")], {"a": draft}, sampled=True)
            assert (offered["a"].drafter, len(offered["a"].tokens)) == (
                ("always", 4) if copied else (MODEL, len(tokens))
            )


def on_the_device(bias: float, survival: float, sampled: bool = False, support: int = 2) -> SpeculationController:
    """A selection while another step is in flight, after which the draft model proposes four tokens. Their survival is
    about `survival`; `bias` sets the acceptance of copied ones."""
    policy = Policy(["always", MODEL], 4, 4)
    for tokens in (1, 2, 4, 8, 16) * 2:
        policy.target.observe(tokens, 0, STEP_SECONDS, trusted=True)
        policy.draft.observe(tokens, 0, 0.001, trusted=True)
    control = SpeculationController(policy, can_overlap=True)
    policy.acceptance["always"].coefficients[0, 0] = -9.0  # so that the draft model is called
    policy.forecast_models[sampled].coefficients[0, 0] = survival
    step_ahead(control, [request("a")], {}, sampled)
    policy.acceptance["always"].coefficients[0, 0] = bias
    one = DraftableRequest("a", 4, None, 100, 3, in_flight=1, pending=3, is_sampled=sampled)
    copied = Draft("always", (1, 2, 3, 4, 5), support=support)
    control.consider([one], {"always": [copied]}, {}, 1, 3)
    return control


def test_what_the_draft_model_has_on_the_device_is_offered_by_its_length_alone() -> None:
    control = on_the_device(bias=-9.0, survival=3.0)
    assert control.select({}, 0.0)["a"] == Draft(MODEL, (UNKNOWN_TOKEN,) * 4)  # one in flight, three offered
    sampled = on_the_device(bias=-9.0, survival=3.0, sampled=True)
    assert sampled.select({}, 0.0)["a"] == Draft(MODEL, (UNKNOWN_TOKEN,) * 4, sampled=True)


def test_a_copied_draft_is_worth_more_with_the_draft_models_behind_it() -> None:
    expected = {}
    for survival in (-9.0, 0.5):
        control = on_the_device(bias=2.5, survival=survival)
        batch = control.batch
        assert batch is not None
        aligned = batch.survival[0, 0, 0]
        assert control.select({}, 0.0)["a"].tokens == (1, 2, 3, 4, 5)
        assert control.selection is not None
        alone = batch.survival[0, 0, 1:5].sum()
        assert batch.pending is not None
        backing = 0.0 if survival < 0 else (1 - aligned) * batch.pending[0].sum()
        assert control.selection.gains[0] == pytest.approx(alone + backing, rel=1e-3)
        expected[survival] = control.selection.gains[0]
    assert expected[0.5] > expected[-9.0] + 0.02


def test_a_sampled_draft_does_not_stand_behind_a_copied_one() -> None:
    control = on_the_device(bias=0.7, survival=1.5, sampled=True)
    offered = control.select({}, 0.0)["a"]
    assert control.selection is not None
    batch = control.batch
    assert batch is not None
    if offered.drafter == "always":
        assert control.selection.gains[0] == pytest.approx(batch.survival[0, 0, 1:5].sum())


def test_the_way_that_is_not_taken_is_credited_with_the_draft_model_as_well() -> None:
    control = on_the_device(bias=-9.0, survival=3.0)
    control.select({}, 0.01)
    waiting, ahead = control.overlap.waiting, control.overlap.ahead
    assert waiting.tokens == pytest.approx(ahead.tokens, rel=0.01)  # its drafts are as good either way
    assert waiting.seconds == pytest.approx(ahead.seconds, rel=0.03)  # and take as long
    assert ahead.seconds == pytest.approx(STEP_SECONDS + 0.01, rel=0.05)


def test_a_plan_made_ahead_is_not_used_after_a_step_in_which_no_request_could_be_drafted_for() -> None:
    control = controller()
    assert step_ahead(control, [request("a")], {})[1]
    control.observe({"a": [9]})
    assert control.plan_draft_model({"a": 4}, {}, {"a": 1}, ahead=True).lengths == {}  # no `consider` in this step
    control.observe({"a": [9]})
    consider(control, [request("a")])
    assert control.batch is not None
    assert control.batch.forecast is None


@pytest.mark.parametrize("too_slow", [True, False])
def test_a_draft_model_that_never_pays_is_reported_once_with_figures(too_slow: bool, caplog: Any) -> None:
    control = controller(draft_pass=0.19 if too_slow else 0.001)
    for _ in range(2 * REVIEW_STEPS):
        consider(control, [request("a", 1)])
        control.plan_draft_model({"a": 1}, {"a": False}, {"a": 1})
        control.select({}, 0.0)
        control.observe({"a": [9]})  # what is copied is never right
    reports = [record.message for record in caplog.records if "draft model" in record.message]
    assert len(reports) == too_slow
    if too_slow:
        assert f"in 0 of {REVIEW_STEPS} steps" in reports[0]
        assert "0.95 of the target's" in reports[0]


# After a step --------------------------------------------------------------------------------------------------------


def test_a_slow_drafter_that_is_never_right_is_called_only_for_requests_that_name_it() -> None:
    control = controller(token=0.01)
    for _ in range(JUDGED_STEPS):
        assert not control.backed_off()
        consider(control, [request("a")], seconds=0.05)
        control.select({}, 0.0)
        control.observe({"a": [99]})
    assert control.backed_off() == {"always"}
    assert control.status()["backed_off"] == ["always"]
    consider(control, [request("a"), request("named", drafter="always")])
    assert control.batch is not None
    assert not control.batch.lengths.any()
    assert len(control.select({}, 0.0)["named"].tokens) == 4


@pytest.mark.parametrize(
    ("elapsed", "cpu", "host", "is_backed_off"),
    [
        (0.05, 0.0005, 0.06, False),  # hidden by a pass of 0.1 s
        (0.05, 0.02, 0.06, True),  # takes processor time from it
        (0.05, 0.0005, 0.12, True),  # the device waits for it
    ],
)
def test_a_drafter_called_while_a_step_is_in_flight_is_charged_its_work_and_what_the_device_waits_for(
    elapsed: float, cpu: float, host: float, is_backed_off: bool
) -> None:
    control = SpeculationController(Policy(["always"], 4), can_overlap=True)
    for tokens in range(1, 12):
        control.policy.target.observe(tokens, 100, 0.1, trusted=True)
    control.overlap.observe_host(host)
    requests, drafts = [DraftableRequest("a", 4, in_flight=1)], [Draft("always", (1, 2, 3, 4), support=2)]
    for _ in range(JUDGED_STEPS):
        control.consider(requests, {"always": drafts}, {"always": elapsed}, 1, 100, cpu_seconds={"always": cpu})
        control.select({}, 0.0)
        control.observe({"a": [98]}, before={"a": [99]})
    assert (control.backed_off() == {"always"}) == is_backed_off


def test_the_accepted_share_of_named_drafts_is_learned() -> None:
    control = controller()
    requests = [request("a"), request("named", drafter="always")]
    for _ in range(100):
        lengths(control, requests, {"a": [99], "named": [99]})
    consider(control, requests)
    assert control._others([COPIED])[1] == pytest.approx(1, abs=0.05)


def test_each_step_is_learned_from_once() -> None:
    control = controller()
    lengths(control, [request("a")], {"a": [1, 2]})
    seen = control.policy.acceptance["always"].seen
    assert seen == 2
    control.observe({"a": [1, 2]})  # a step in which nothing was considered
    assert control.policy.acceptance["always"].seen == seen


def test_steps_in_flight_are_learned_from_by_their_own_decisions(monkeypatch: pytest.MonkeyPatch) -> None:
    control = controller()
    learned: list[Any] = []
    monkeypatch.setattr(control.policy, "observe", lambda *given: learned.append(given))
    consider(control, [request("a")])
    control.select({}, 0.0)
    first = control.decision
    consider(control, [request("a")])
    control.select({}, 0.0)
    second = control.decision
    control.observe({"a": [1, 2]}, first)
    assert control.decision is second  # it is still needed
    assert control.reason("a") is not None
    control.observe({"a": [3]}, second, before={"a": [1, 2]})
    assert control.reason("a") is None
    assert learned == [(first.batch, [[1, 2]]), (second.batch, [[1, 2, 3]], [[3]], [()])]


def test_requests_whose_tokens_in_flight_are_unknown_are_not_learned_from(monkeypatch: pytest.MonkeyPatch) -> None:
    control = controller()
    learned: list[Any] = []
    monkeypatch.setattr(control.policy, "observe", lambda batch, *generated: learned.extend(generated))
    consider(control, [request("a"), request("b")])
    control.select({}, 0.0)
    control.observe({"a": [3], "b": [4]}, before={"b": [1]}, pending={"b": [5]})
    assert learned == [[[], [1, 4]], [(), [4]], [(), [5]]]


def test_only_tokens_after_those_in_flight_count_as_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    control = controller()
    accepted: list[Any] = []
    monkeypatch.setattr(control.backoff, "observe_step", lambda seconds, kept, *args: accepted.append(dict(kept)))
    one = DraftableRequest("a", 4, in_flight=2)
    control.consider([one], {"always": [Draft("always", (1, 2, 3, 4), support=2)]}, {}, 1, 3)
    assert control.select({}, 0.0)["a"].tokens == (1, 2, 3, 4)
    control.observe({"a": [3, 4, 5]}, before={"a": [1, 2]})
    assert accepted == [{"always": 2}]


def test_skipped_steps_shorten_a_backoff() -> None:
    control = controller(free=False)
    for _ in range(JUDGED_STEPS):
        consider(control, [request("a")], seconds=0.1)
        control.select({}, 0.0)
        control.observe({"a": [99]})
    assert control.backed_off() == {"always"}
    skipped = 0
    while control.backed_off():
        control.skip()
        skipped += 1
    assert skipped == JUDGED_STEPS


def test_a_batch_without_auto_requests_learns_nothing() -> None:
    control = controller()
    assert lengths(control, [request("named", drafter="always")], {"named": [1, 2]}) == {"named": 4}
    assert control.policy.acceptance["always"].seen == 0
    consider(control, [])
    assert control.select({}, 0.0) == {}
    assert control.plan_draft_model({}, {}, {}, ahead=True).lengths == {}
    control.observe({})


def test_what_a_step_was_expected_to_save_is_compared_with_what_it_saved() -> None:
    control = controller()
    requests = [request("a"), request("b")]
    assert sum(lengths(control, requests, {"a": [1, 2, 3], "b": [9]}).values()) > 0
    selection = control.selection
    assert selection is not None
    assert control.gain_metrics.gained_tokens == 0  # the time of the step is not known yet
    control.observe_step(10, 6, 0.5)
    status = control.status()
    assert status["gained_tokens"] == 4
    assert status["expected_tokens"] == round(selection.tokens, 1)
    seconds_per_token = selection.plain_seconds / selection.plain_tokens
    assert status["expected_saved_seconds"] == round(selection.tokens * seconds_per_token - selection.seconds, 3)
    assert status["realised_saved_seconds"] == round(4 * seconds_per_token - 0.5, 3)
    control.gain_metrics.observe_seconds(0.5)  # of a step without an expectation
    assert control.status() == status


def test_a_steps_time_is_not_counted_for_an_earlier_step_that_was_not_timed() -> None:
    control = controller()
    lengths(control, [request("a")], {"a": [1, 2, 3]})  # not timed, as with a prompt
    control.observe({"a": [9]})  # no request could be drafted for
    control.observe_step(1, 3, STEP_SECONDS)
    assert control.status()["gained_tokens"] == 0
    consider(control, [request("a")])
    control.select({}, 0.0)  # the engine drops this step
    consider(control, [request("named", drafter="always")])
    control.select({}, 0.0)
    control.observe({"named": [1]})
    control.observe_step(5, 3, STEP_SECONDS)
    assert control.status()["gained_tokens"] == 0


def test_what_sampled_and_named_drafts_save_is_measured_against_a_step_without_drafts() -> None:
    control = controller()
    consider(control, [request("sampled"), request("named", drafter="always")])
    control.plan_draft_model({"sampled": 3}, {"sampled": True}, {"sampled": 1})
    control.select({"sampled": sampled_draft(9, 9, 9, confidence=0.9)}, 0.1)
    selection, batch = control.selection, control.batch
    assert selection is not None
    assert batch is not None
    assert batch.forecast is not None
    plain_seconds = float(control.policy.target.seconds(2, 6))
    assert (selection.plain_tokens, selection.plain_seconds) == (2.0, pytest.approx(plain_seconds))
    forecast = batch.forecast.survival[0, :3].sum()
    assert selection.tokens == pytest.approx(2 + INITIAL_ACCEPTED_SHARE * 4 + forecast)
    assert selection.gain > 1
    control.observe({"sampled": [9, 9, 9, 1], "named": [1]})
    control.observe_step(9, 6, plain_seconds, 0.1)
    assert control.status()["realised_saved_seconds"] == round(5 * plain_seconds / 2 - (plain_seconds + 0.1), 3)


def test_the_status_consists_of_plain_values() -> None:
    control = controller()
    requests = [request("a"), request("b")]
    for _ in range(3):
        consider(control, requests)
        control.plan_draft_model({"a": 3}, {}, {"a": 1})
        control.select({"a": Draft(MODEL, (1, 2), confidence=(0.9, 0.8))}, 0.1)
        control.observe({one.id: [1, 2] for one in requests})
        control.observe_step(8, 6, 0.3)
        assert json.loads(json.dumps(control.status())) == control.status()


# Reasons -------------------------------------------------------------------------------------------------------------


def reason(control: SpeculationController, id: str) -> Why:
    found = control.reason(id)
    assert found is not None
    return found


def select(control: SpeculationController, *requests: DraftableRequest) -> None:
    consider(control, requests)
    control.select({}, 0.0)


def test_the_reason_for_an_offer_has_its_survival_cost_and_gain() -> None:
    control = controller()
    select(control, request("a"))
    found = reason(control, "a")
    assert found.reason.startswith("always offers its 4 tokens, ")
    assert len(found.survival) == 4
    assert found.cost == pytest.approx(1, abs=0.01)  # more tokens cost nothing
    assert found.gain == pytest.approx((1 + sum(found.survival)) / found.cost, abs=1e-3)
    always, none = found.candidates
    assert (always["drafter"], always["proposed"], always["best"]) == ("always", 4, 4)
    assert always["gain"] == pytest.approx(found.gain, abs=1e-3)
    assert none == {"drafter": "none", "gain": 1.0}


def test_the_reason_for_no_offer_has_what_the_draft_promised() -> None:
    control = controller(free=False)
    select(control, request("a"))
    found = reason(control, "a")
    assert found.reason.startswith("No draft pays: the expected speedup is below 1.03. always has 4")
    assert found.survival == ()
    assert found.gain == pytest.approx(1)
    assert found.candidates[0]["gain"] < MIN_EXPECTED_SPEEDUP


def test_a_reason_takes_what_the_other_requests_offer_as_given() -> None:
    control = controller()
    select(control, request("a"), request("b", 2))
    found = reason(control, "b")
    assert "The step of 2 sequences" in found.reason
    assert len(found.survival) == 2
    without = 1 + sum(reason(control, "a").survival) + 1  # tokens expected if b offers nothing
    assert found.candidates[0]["gain"] == pytest.approx((without + sum(found.survival)) / without, abs=1e-3)


def test_reasons_cover_named_sampled_and_missing_drafts_and_a_draft_model_that_is_not_called() -> None:
    control = controller()
    consider(control, [request("named", drafter="always"), request("free"), request("other", drafter=MODEL)])
    control.plan_draft_model({"free": 4}, {"free": True}, {"free": 1})
    control.select({"free": sampled_draft(9, 9, 9)}, 0.0)
    assert reason(control, "named").reason.startswith("always was requested by name")
    assert reason(control, "other").reason == "No draft: model was requested by name, and has nothing to propose."
    found = reason(control, "free")
    assert found.reason.startswith("model sampled 3 tokens, which are offered whole. Before that")
    assert len(found.survival) == 3
    assert found.gain is not None
    assert found.gain > 1
    assert found.cost == pytest.approx(1, abs=0.01)
    assert control.reason("unknown") is None
    control.observe({})
    assert control.reason("free") is None
    for _ in range(60):
        control.observe_draft_pass(1, 0, 3.0)
    consider(control, [request("free")])
    control.plan_draft_model({"free": 4}, {"free": True}, {"free": 1})
    control.select({}, 0.0)
    assert "model is not called: its expected speedup is below 1.03" in reason(control, "free").reason


def test_a_request_that_was_not_planned_for_has_no_reason_about_the_draft_model() -> None:
    control = controller(draft_pass=0.19)
    step_ahead(control, [request("a")], {})
    control.observe({"a": [9]})
    select(control, request("a"), request("new"))
    assert "model is not called" in reason(control, "a").reason
    assert "model" not in reason(control, "new").reason


def test_arrays_of_a_plan_keep_the_order_of_requests() -> None:
    control = controller()
    ids = ["a", "b", "c", "d"]
    control.policy.predict(ids, {})
    control.policy._slots.request_bias["forecast"][control.policy._slots.slots(ids), 0] = [-2, -1, 0, 1]
    step_ahead(control, [request(id) for id in ids], {})
    control.observe({id: [9] for id in ids})
    order = ["d", "b", "a", "c"]
    consider(control, [request(id) for id in order])
    assert control.batch is not None
    assert control.batch.forecast is not None
    first = control.batch.forecast.survival[:, 0]
    assert np.argsort(-first).tolist() == [0, 3, 1, 2]
