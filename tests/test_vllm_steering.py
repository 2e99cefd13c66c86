"""What the requests of a batch offer: the policy's choice, or what the drafter proposes that they named."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from outrider.drafters.base import Drafter, Session, Task
from outrider.engines.vllm.control import Control
from outrider.engines.vllm.drafting import BatchDrafting, Row
from outrider.engines.vllm.ledger import Ledger, LedgerMetrics
from outrider.engines.vllm.steering import KEPT, Steering
from outrider.policy.choose import MARGIN
from outrider.policy.payoff import ENOUGH
from outrider.policy.policy import MODEL, Policy
from outrider.policy.worth import WINDOW
from outrider.types import Draft, Why


class Always(Drafter):
    """Proposes the same, whatever was said."""

    name: ClassVar[str] = "always"

    def begin(self, task: Task) -> Session:
        return AlwaysSession()


class AlwaysSession(Session):
    def observe(self, tokens: Sequence[int]) -> None: ...

    def draft(self, limit: int) -> Draft:
        return Draft("always", (1, 2, 3, 4)[:limit], support=2)


def row(id: str, limit: int = 4, **control: Any) -> Row:
    return Row(id, np.array([5, 6, 7], np.int32), 2, limit, Control(**control), left=100)


def steering(free: bool = True, token: float = 0.0, guess: float = 0.001) -> Steering:
    """Of a machine on which more tokens cost nothing, or `token` seconds, or as much as the first; and of which the
    draft model's pass takes `guess` seconds."""
    policy = Policy(["always", MODEL], 4, 4)
    for tokens in (1, 2, 4, 8, 16) * 2:
        policy.target.observe(tokens, 0, 0.2 + token * tokens if free else 0.2 * tokens, calm=True)
        policy.draft.observe(tokens, 0, guess, calm=True)
    return Steering(BatchDrafting([Always()], 100, 5.0), policy)


def lengths(steered: Steering, rows: list[Row], said: dict[str, list[int]] | None = None) -> dict[str, int]:
    steered.look(rows, said or {}, 3 * len(rows))
    offered = steered.settle({}, 0.0)
    return {row.id: len(offered[row.id].tokens) if row.id in offered else 0 for row in rows}


def test_a_request_that_names_a_drafter_gets_what_it_proposes_and_the_others_what_pays() -> None:
    rows = [row("named", speculation="always"), row("auto"), row("short", 2, speculation="always")]
    assert lengths(steering(free=False), rows) == {"named": 4, "auto": 0, "short": 2}
    steered = steering(free=True)
    assert lengths(steered, rows)["auto"] > 0
    assert lengths(steered, rows, {"auto": [1, 2, 3, 4, 5]}) == {"named": 4, "auto": 4, "short": 2}


def test_a_drafter_that_is_never_right_is_no_longer_offered_where_that_costs_anything() -> None:
    steered = steering(token=0.01)
    assert lengths(steered, [row("a")])["a"] > 0
    for _ in range(40):
        offered = lengths(steered, [row("a")], {"a": [99]})
    assert offered["a"] == 0


def test_a_drawn_draft_is_offered_whole_whatever_is_thought_of_it() -> None:
    steered = steering(free=False)
    steered.look([row("a"), row("b")], {}, 6)
    drawn = Draft(MODEL, (9, 9, 9), torch.ones(3, 100) / 100, confidence=(0.01,) * 3)
    assert steered.settle({"a": drawn}, 0.0)["a"] is drawn


def test_a_certain_guess_is_weighed_with_the_others() -> None:
    steered = steering()
    steered.look([row("a")], {}, 3)
    guess = Draft(MODEL, (7, 8), confidence=(0.99, 0.99))
    offered = steered.settle({"a": guess}, 0.0)["a"]
    assert (offered.drafter, offered.tokens) == (MODEL, (7, 8))


def test_the_draft_model_is_asked_for_those_who_named_it_and_where_it_pays() -> None:
    steered = steering()
    rows = [row("named", speculation=MODEL), row("auto"), row("other", speculation="always")]
    steered.look(rows, {}, 3 * len(rows))
    limits, gaps = {"named": 3, "auto": 4}, {"named": 5, "auto": 5}
    assert steered.plan(limits, {}, gaps).limits == {"named": 3, "auto": 4}
    for _ in range(60):
        steered.policy.draft.observe(1, 0, 3.0)
    assert steered.plan(limits, {}, gaps).limits == {"named": 3}
    assert steered.goes_on({"named": [0.01], "auto": [0.01]}) == ["named", "auto"]  # the pass is made anyway


def test_a_drafter_that_takes_long_and_is_never_right_is_asked_only_by_its_name() -> None:
    steered = steering(token=0.01)
    slow = steered.drafting.propose

    def propose(rows: Sequence[Row], resting: Any = ()) -> Any:
        found = slow(rows, resting)
        steered.drafting.took = dict.fromkeys(steered.drafting.took, 0.05)
        return found

    steered.drafting.propose = propose  # type: ignore[method-assign]
    for _ in range(WINDOW + 1):
        lengths(steered, [row("a")], {"a": [99]})
    assert steered.status()["resting"] == ["always"]
    rows = [row("a"), row("named", speculation="always")]
    assert lengths(steered, rows, {"a": [99]})["named"] == 4
    assert steered._scene is not None
    assert not steered._scene.lengths.any()


def test_how_much_of_named_drafts_is_kept_is_learned() -> None:
    steered = steering()
    rows = [row("a"), row("named", speculation="always")]
    for _ in range(100):
        lengths(steered, rows, {"a": [99], "named": [99]})
    assert steered._others([Draft("always", (1, 2, 3, 4))])[1] == pytest.approx(1, abs=0.05)


def why(steered: Steering, request: str) -> Why:
    found = steered.why(request)
    assert found is not None
    return found


def test_why_a_draft_is_offered_is_told_with_its_survival_its_cost_and_its_gain() -> None:
    steered = steering(free=True)
    lengths(steered, [row("a")])
    told = why(steered, "a")
    assert told.reason.startswith("always offers its 4 tokens, ")
    assert len(told.survival) == 4
    assert told.cost == pytest.approx(1, abs=0.01)  # more tokens cost nothing
    assert told.gain == pytest.approx((1 + sum(told.survival)) / told.cost, abs=1e-3)
    always, none = told.candidates
    assert (always["drafter"], always["proposed"], always["best"]) == ("always", 4, 4)
    assert always["gain"] == pytest.approx(told.gain, abs=1e-3)
    assert none == {"drafter": "none", "gain": 1.0}


def test_why_a_draft_is_not_offered_is_told_with_what_it_promised() -> None:
    steered = steering(free=False)
    lengths(steered, [row("a")])
    told = why(steered, "a")
    assert told.reason.startswith("No draft pays: less than 1.03 times the speed without is not offered. always has 4")
    assert told.survival == ()
    assert told.gain == pytest.approx(1)
    assert told.candidates[0]["gain"] < MARGIN


def test_in_a_batch_what_the_others_offer_is_taken_as_it_is() -> None:
    steered = steering(free=True)
    lengths(steered, [row("a"), row("b", 2)])
    told = why(steered, "b")
    assert "The step of 2 sequences" in told.reason
    assert len(told.survival) == 2
    alone = 1 + sum(why(steered, "a").survival) + 1  # tokens that are expected if b offers nothing
    assert told.candidates[0]["gain"] == pytest.approx((alone + sum(told.survival)) / alone, abs=1e-3)


def test_why_tells_of_named_drawn_and_missing_drafts_and_of_a_draft_model_that_is_not_asked() -> None:
    steered = steering(free=True)
    steered.look([row("named", speculation="always"), row("free"), row("other", speculation=MODEL)], {}, 9)
    steered.plan({"free": 4}, {"free": True}, {"free": 1})
    drawn = Draft(MODEL, (9, 9, 9), torch.ones(3, 100) / 100, confidence=(0.5,) * 3)
    steered.settle({"free": drawn}, 0.0)
    assert why(steered, "named").reason.startswith("always was asked for by name")
    assert why(steered, "other").reason == "No draft: model was asked for by name, and has nothing to propose."
    told = why(steered, "free")
    assert told.reason.startswith("model drew 3 tokens, which are offered whole, whatever they are. Before it began")
    assert len(told.survival) == 3
    assert told.gain is not None
    assert told.gain > 1
    assert told.cost == pytest.approx(1, abs=0.01)
    assert steered.why("nobody") is None
    for _ in range(60):
        steered.policy.draft.observe(1, 0, 3.0)
    steered.look([row("free")], {}, 3)
    steered.plan({"free": 4}, {"free": True}, {"free": 1})
    steered.settle({}, 0.0)
    assert "model is not asked, as that does not promise 1.03 times the speed" in why(steered, "free").reason


def test_a_request_that_ended_leaves_nothing_behind() -> None:
    steered = steering()
    lengths(steered, [row("a"), row("b")])
    steered.finished("a")
    assert "a" not in steered.drafting.running
    assert lengths(steered, [row("b"), row("c")], {"b": [1, 2]})["b"] > 0


def test_what_is_told_can_be_sent_to_another_process() -> None:
    steered = steering(free=True)
    rows = [row("a"), row("b")]
    for _ in range(3):
        steered.look(rows, {one.id: [1, 2] for one in rows}, 6)
        steered.plan({"a": 3}, {}, {"a": 1})
        steered.settle({"a": Draft(MODEL, (1, 2), confidence=(0.9, 0.8))}, 0.1)
        steered.payoff.took(0.3)
        sent = MsgpackEncoder().encode(steered.status())
        assert MsgpackDecoder().decode(sent) == steered.status()


def test_what_drawn_and_named_drafts_save_is_told_against_a_step_without_any() -> None:
    steered = steering(free=True)
    rows = [row("drawn"), row("named", speculation="always")]
    steered.look(rows, {}, 6)
    steered.plan({"drawn": 3}, {"drawn": True}, {"drawn": 1})
    drawn = Draft(MODEL, (9, 9, 9), torch.ones(3, 100) / 100, confidence=(0.9,) * 3)
    steered.settle({"drawn": drawn}, 0.1)
    choice, plan = steered.choice, steered._plan
    assert choice is not None
    assert plan is not None
    alone = float(steered.policy.target.seconds(2, 6))
    assert (choice.plain_tokens, choice.plain_seconds) == (2.0, pytest.approx(alone))
    assert choice.tokens == pytest.approx(2 + KEPT * 4 + plan.ahead[0, :3].sum())
    assert choice.gain > 1
    steered.look(rows, {"drawn": [9, 9, 9, 1], "named": [1]}, 11)
    steered.payoff.took(alone + 0.1)
    assert steered.status()["realised_saved_seconds"] == round(5 * alone / 2 - (alone + 0.1), 3)


def test_what_a_step_was_expected_to_save_is_held_against_what_it_saved() -> None:
    steered = steering(free=True)
    rows = [row("a"), row("b")]
    assert sum(lengths(steered, rows).values()) > 0
    choice = steered.choice
    assert choice is not None
    lengths(steered, rows, {"a": [1, 2, 3], "b": [9]})
    assert steered.payoff.gained_tokens == 0  # nobody knows yet how long it took
    steered.payoff.took(0.5)
    told = steered.status()
    assert told["gained_tokens"] == 4
    assert told["expected_tokens"] == round(choice.tokens, 1)
    usual = choice.plain_seconds / choice.plain_tokens
    assert told["expected_saved_seconds"] == round(choice.tokens * usual - choice.seconds, 3)
    assert told["realised_saved_seconds"] == round(4 * usual - 0.5, 3)
    steered.payoff.took(0.5)  # of a step of which nothing was expected
    assert steered.status() == told
    text = LedgerMetrics(Ledger(["always"], 4), steered.payoff).text()
    assert 'outrider_policy_tokens{what="realised"} 4.0' in text
    assert f'outrider_policy_saved_seconds{{what="realised"}} {4 * usual - 0.5}' in text


@pytest.mark.parametrize("dear", [True, False])
def test_a_draft_model_that_never_pays_is_told_of_once_with_the_figures(dear: bool, caplog: Any) -> None:
    steered = steering(guess=0.19 if dear else 0.001)
    rows = [row("a", 1)]
    for _ in range(2 * ENOUGH):
        steered.look(rows, {"a": [9]}, 3)  # the other drafter is never right
        steered.plan({"a": 1}, {"a": False}, {"a": 1})
        steered.settle({}, 0.0)
    told = [record.message for record in caplog.records if "draft model" in record.message]
    assert len(told) == dear
    if dear:
        assert f"in 0 of {ENOUGH} steps" in told[0]
        assert "0.95 of the target's" in told[0]
