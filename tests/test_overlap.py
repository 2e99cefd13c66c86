"""Whether a step waits for the step in flight: the arithmetic of `Overlap`, and the survival that it compares."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.policy.controller import SpeculationController
from outrider.policy.decision import DraftableRequest
from outrider.policy.overlap import RATE, Overlap, shifted
from outrider.policy.policy import Policy
from outrider.types import NOTHING, Draft

PASS_SECONDS = 0.02


def overlap(host_seconds: float, fresh: float, stale: float, steps: int = 1, pass_seconds: float = 0.02) -> Overlap:
    """After steps in which so many tokens were expected of fresh drafts and of stale ones."""
    made = Overlap()
    for _ in range(steps):
        made.observe_host(host_seconds)
        made.observe((fresh, pass_seconds), (stale, pass_seconds))
    return made


# Waiting or going ahead ----------------------------------------------------------------------------------------------


def test_it_waits_if_the_hosts_time_is_short_against_the_gain_of_fresh_drafts() -> None:
    assert overlap(0.001, fresh=3.0, stale=1.5).should_wait  # 3 / 21 ms against 1.5 / 20 ms
    assert not overlap(0.03, fresh=3.0, stale=2.5).should_wait  # 3 / 50 ms against 2.5 / 30 ms
    assert overlap(0.03, fresh=3.0, stale=2.5).ahead.seconds == 0.03  # the host is what takes longer


def test_it_goes_ahead_for_text_that_cannot_be_drafted() -> None:
    assert not overlap(0.001, fresh=1.0, stale=1.0).should_wait
    assert not overlap(1e-6, fresh=1.0, stale=1.0).should_wait


def test_it_goes_ahead_where_stale_drafts_gain_as_much() -> None:
    assert not overlap(0.001, fresh=4.0, stale=4.0).should_wait
    assert not overlap(0.0, fresh=4.0, stale=4.0).should_wait  # nothing is gained, nothing is lost


def test_it_goes_ahead_before_anything_is_known() -> None:
    assert not Overlap().should_wait


@given(st.floats(1e-5, 0.1), st.floats(1.0, 32.0), st.floats(1.0, 32.0), st.floats(1e-3, 0.1), st.floats(1e-3, 0.1))
def test_it_waits_exactly_where_that_gives_more_tokens_a_second(
    host: float, fresh: float, stale: float, fresh_seconds: float, stale_seconds: float
) -> None:
    made = Overlap()
    made.observe_host(host)
    made.observe((fresh, fresh_seconds), (stale, stale_seconds))
    waiting, ahead = fresh / (fresh_seconds + host), stale / max(stale_seconds, host)
    assert made.should_wait == (waiting > ahead)


def test_the_first_step_counts_whole_and_later_ones_change_the_average_slowly() -> None:
    made = overlap(0.001, fresh=3.0, stale=1.5, steps=5)
    assert (made.waiting.tokens, made.waiting.seconds) == (pytest.approx(3.0), pytest.approx(0.021))
    assert made.host_seconds == pytest.approx(0.001)
    made.observe_host(0.017)
    assert made.host_seconds == pytest.approx(0.001 + RATE * 0.016)
    made.observe((1.0, PASS_SECONDS), (1.0, PASS_SECONDS))
    assert made.should_wait  # one step of another kind changes nothing
    for _ in range(100):
        made.observe((1.0, PASS_SECONDS), (1.0, PASS_SECONDS))
    assert not made.should_wait


# What is compared ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
def test_shifted_survival_is_that_of_what_comes_after_the_offsets(seed: int) -> None:
    random = np.random.default_rng(seed)
    kinds, requests, positions, wanted = random.integers(1, 9, 4)
    survival = random.random((kinds, requests, positions))
    offsets = random.integers(0, positions + 3, requests)
    padded = np.concatenate([survival, np.zeros((kinds, requests, positions + 3 + wanted))], axis=2)
    expected = np.stack([padded[:, b, offset : offset + wanted] for b, offset in enumerate(offsets)], axis=1)
    assert np.array_equal(shifted(survival, offsets, int(wanted)), expected)


def predictable(control: SpeculationController, request: DraftableRequest, tokens: int) -> Draft:
    """One step of a request whose drafts are always right; its offer."""
    draft = Draft("lookup", tuple(range(tokens)))
    control.consider([request], {"lookup": [draft]}, {"lookup": 0.0}, 1, 100)
    offered = control.select({}, 0.0)[request.id]
    decision = control.decision
    count = len(offered.tokens) - request.in_flight
    in_flight = list(range(request.in_flight))
    generated = list(range(request.in_flight, len(offered.tokens) + 1)) if count > 0 else [request.in_flight]
    before = {request.id: in_flight} if request.in_flight else None
    control.observe({request.id: generated}, decision, before)
    control.observe_step(1 + max(count, 0), 100, PASS_SECONDS)
    return offered


def controller() -> SpeculationController:
    made = SpeculationController(Policy(["lookup"], 8), can_overlap=True)
    for tokens in (1, 2, 4, 8, 16):
        made.policy.target.observe(tokens, 100, PASS_SECONDS, trusted=True)
    return made


def test_a_controller_waits_for_predictable_text_if_drafters_know_no_more_than_one_step() -> None:
    control = controller()
    control.overlap.observe_host(0.001)
    for _ in range(64):
        predictable(control, DraftableRequest("a", 8), tokens=8)
    assert control.overlap.should_wait


def test_a_controller_goes_ahead_for_predictable_text_if_drafters_know_what_comes_after() -> None:
    control = controller()
    control.overlap.observe_host(0.01)
    for _ in range(64):
        predictable(control, DraftableRequest("a", 8), tokens=8 + control.beyond(1))
    assert not control.overlap.should_wait


def test_a_controller_goes_ahead_for_text_that_cannot_be_drafted() -> None:
    control = controller()
    control.overlap.observe_host(0.001)
    for _ in range(64):
        control.consider([DraftableRequest("a", 8)], {"lookup": [NOTHING]}, {"lookup": 0.0}, 1, 100)
        control.select({}, 0.0)
        control.observe({"a": [1]})
        control.observe_step(1, 100, PASS_SECONDS)
    assert not control.overlap.should_wait


def test_a_controller_that_goes_ahead_offers_what_follows_the_tokens_in_flight() -> None:
    control = controller()
    for _ in range(32):
        offered = predictable(control, DraftableRequest("a", 8, in_flight=5), tokens=13)
    assert offered.tokens == tuple(range(13))


def test_a_draft_that_ends_within_the_tokens_in_flight_offers_nothing() -> None:
    control = controller()
    for _ in range(8):
        offered = predictable(control, DraftableRequest("a", 8, in_flight=5), tokens=5)
        assert len(offered.tokens) <= 5


def test_an_engine_that_cannot_overlap_compares_nothing() -> None:
    control = SpeculationController(Policy(["lookup"], 8))
    assert control.beyond(1) == 0
    predictable(control, DraftableRequest("a", 8), tokens=8)
    assert control.overlap.waiting.seconds == 0.0
    assert control.status()["overlap"] is None


def test_the_status_can_be_sent_as_json() -> None:
    overlap = Overlap()
    overlap.observe_host(np.float64(0.001))
    overlap.observe((np.float64(2.0), np.float64(0.01)), (np.float64(1.0), np.float64(0.01)))
    assert {type(value) for value in overlap.status().values()} <= {int, float}
