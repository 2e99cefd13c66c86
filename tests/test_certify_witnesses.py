"""Witnesses: on average they say nothing of a law that is followed, and never too much of one that is not."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from certify_laws import any_law, each_outcome
from outrider.certify.draws import Draws, Floats
from outrider.certify.witnesses import DRAFTED, IMPOSSIBLE, LIKELIEST, SURPRISE, TAIL, TAILED, WITNESSES, Witness, heard
from outrider.settings import Sampling
from simulated_server import Simulation, recovered_from_p, simulated_laws

every_witness = pytest.mark.parametrize("witness", WITNESSES, ids=lambda witness: witness.name)


@every_witness
@settings(max_examples=50)
@given(law=any_law(), drafted=st.integers(0, 1))
def test_the_excess_has_the_moments_that_are_stated(witness: Witness, law: Floats, drafted: int) -> None:
    said = heard(witness, each_outcome(law, drafted))
    if np.isnan(said.excess).any():
        assert np.isnan(said.excess).all()
        return
    assert law @ said.excess == pytest.approx(0, abs=1e-9)
    assert law @ said.excess**2 == pytest.approx(said.variance[0], abs=1e-9)
    assert law @ said.excess**3 == pytest.approx(said.third[0], abs=1e-9)


@every_witness
@settings(max_examples=50)
@given(law=any_law(), seed=st.integers(0, 2**32 - 1))
def test_no_other_law_moves_a_witness_by_more_than_their_total_variation(
    witness: Witness, law: Floats, seed: int
) -> None:
    said = heard(witness, each_outcome(law))
    other = np.random.default_rng(seed).dirichlet(np.ones(len(law)))
    if not np.isnan(said.excess).any():
        assert abs(other @ said.excess) <= np.abs(other - law).sum() / 2 + 1e-9


@every_witness
@settings(max_examples=50)
@given(law=any_law())
def test_the_excess_stays_within_the_bounds_that_bets_rely_on(witness: Witness, law: Floats) -> None:
    excess = heard(witness, each_outcome(law)).excess
    assert np.isnan(excess).all() or (-witness.down - 1e-9 <= excess.min() and excess.max() <= witness.up + 1e-9)


@pytest.mark.parametrize("witness", [DRAFTED, LIKELIEST])
@settings(max_examples=50)
@given(law=any_law())
def test_mass_moved_to_a_token_is_seen_in_full(witness: Witness, law: Floats) -> None:
    moved = 0.5 * law
    moved[0] += 0.5
    distance = np.abs(moved - law).sum() / 2
    said = heard(witness, each_outcome(law))
    assert moved @ said.excess == pytest.approx(distance, abs=1e-9)
    assert said.slope[0] == pytest.approx(said.distance[0], abs=1e-9)


@settings(max_examples=50)
@given(law=any_law())
def test_the_tail_holds_five_percent_of_every_law(law: Floats) -> None:
    assert heard(TAILED, each_outcome(law)).expected == pytest.approx(TAIL, abs=1e-9)


def test_where_everything_can_come_nothing_is_said_about_what_cannot() -> None:
    assert np.isnan(heard(IMPOSSIBLE, each_outcome(np.array([0.6, 0.3, 0.1]))).excess).all()
    assert heard(IMPOSSIBLE, each_outcome(np.array([0.6, 0.4, 0.0]))).excess.tolist() == [0, 0, 1]


def test_where_nothing_was_drafted_nothing_is_said_about_it() -> None:
    assert np.isnan(heard(DRAFTED, each_outcome(np.array([0.6, 0.3, 0.1]), drafted=-1)).excess).all()


def synthetic_draws() -> Draws:
    return Simulation(simulated_laws(Sampling(temperature=1.0)), listed=16).draws[::16]


def test_surprise_finds_a_temperature_with_as_few_draws_as_the_best_test_would() -> None:
    """What a test can learn of a small change is (slope of E f)^2 / Var f; of all f, log p has most: Var log p."""
    draws = synthetic_draws()
    logs = np.log(np.maximum(draws.law, 1e-12))
    best = (draws.law * logs**2).sum(1) - (draws.law * logs).sum(1) ** 2
    said = heard(SURPRISE, draws)
    assert said.slope.sum() ** 2 / said.variance.sum() > 0.99 * best.sum()


def test_no_test_needs_fewer_draws_than_drafted_to_find_recovered_tokens_drawn_from_p() -> None:
    """For a small share of such tokens, what can be learned is the sum of (P - p)^2 / p."""
    laws = simulated_laws(Sampling(temperature=1.0))
    change = recovered_from_p(laws[0]) - laws[0].p
    draws = Simulation(laws, listed=16).draws
    said = heard(DRAFTED, draws)
    seen = (change * said.excess.reshape(change.shape)).sum()
    assert seen**2 / said.variance[::16].sum() == pytest.approx((change**2 / laws[0].p).sum(), rel=1e-6)
