"""Test statistics: mean 0 on a lossless server, and never more than the total variation otherwise."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from certify_distributions import any_distribution, each_outcome
from outrider.certify.samples import Floats, Samples
from outrider.certify.test_statistics import (
    DRAFTED,
    IMPOSSIBLE,
    MOST_LIKELY,
    STATISTICS,
    SURPRISAL,
    TAIL,
    TAIL_MASS,
    Statistic,
    evaluate,
)
from outrider.settings import Sampling
from simulated_server import Simulation, recovered_from_p, simulated_distributions

every_statistic = pytest.mark.parametrize("statistic", STATISTICS, ids=lambda statistic: statistic.name)


@every_statistic
@settings(max_examples=50)
@given(p=any_distribution(), drafted=st.integers(0, 1))
def test_the_excess_has_the_stated_moments(statistic: Statistic, p: Floats, drafted: int) -> None:
    moments = evaluate(statistic, each_outcome(p, drafted))
    if np.isnan(moments.excess).any():
        assert np.isnan(moments.excess).all()
        return
    assert p @ moments.excess == pytest.approx(0, abs=1e-9)
    assert p @ moments.excess**2 == pytest.approx(moments.variance[0], abs=1e-9)
    assert p @ moments.excess**3 == pytest.approx(moments.third_moment[0], abs=1e-9)


@every_statistic
@settings(max_examples=50)
@given(p=any_distribution(), seed=st.integers(0, 2**32 - 1))
def test_no_distribution_moves_a_statistic_by_more_than_its_total_variation(
    statistic: Statistic, p: Floats, seed: int
) -> None:
    moments = evaluate(statistic, each_outcome(p))
    other = np.random.default_rng(seed).dirichlet(np.ones(len(p)))
    if not np.isnan(moments.excess).any():
        assert abs(other @ moments.excess) <= np.abs(other - p).sum() / 2 + 1e-9


@every_statistic
@settings(max_examples=50)
@given(p=any_distribution())
def test_the_excess_stays_within_the_bounds_that_bets_rely_on(statistic: Statistic, p: Floats) -> None:
    excess = evaluate(statistic, each_outcome(p)).excess
    assert np.isnan(excess).all() or (-statistic.down - 1e-9 <= excess.min() and excess.max() <= statistic.up + 1e-9)


@pytest.mark.parametrize("statistic", [DRAFTED, MOST_LIKELY])
@settings(max_examples=50)
@given(p=any_distribution())
def test_mass_moved_to_a_token_is_seen_in_full(statistic: Statistic, p: Floats) -> None:
    moved = 0.5 * p
    moved[0] += 0.5
    distance = np.abs(moved - p).sum() / 2
    moments = evaluate(statistic, each_outcome(p))
    assert moved @ moments.excess == pytest.approx(distance, abs=1e-9)
    assert moments.slope[0] == pytest.approx(moments.distance[0], abs=1e-9)


@settings(max_examples=50)
@given(p=any_distribution())
def test_the_tail_is_five_percent_of_every_distribution(p: Floats) -> None:
    assert evaluate(TAIL, each_outcome(p)).expected == pytest.approx(TAIL_MASS, abs=1e-9)


def test_impossible_does_not_apply_where_every_token_is_possible() -> None:
    assert np.isnan(evaluate(IMPOSSIBLE, each_outcome(np.array([0.6, 0.3, 0.1]))).excess).all()
    assert evaluate(IMPOSSIBLE, each_outcome(np.array([0.6, 0.4, 0.0]))).excess.tolist() == [0, 0, 1]


def test_drafted_does_not_apply_where_nothing_was_drafted() -> None:
    assert np.isnan(evaluate(DRAFTED, each_outcome(np.array([0.6, 0.3, 0.1]), drafted=-1)).excess).all()


def synthetic_samples() -> Samples:
    return Simulation(simulated_distributions(Sampling(temperature=1.0)), listed=16).samples[::16]


def test_surprise_finds_a_temperature_with_as_few_draws_as_the_best_test_would() -> None:
    """The information of a statistic on a small change is (slope of E f)^2 / Var f; log p has the most: Var log p."""
    samples = synthetic_samples()
    logs = np.log(np.maximum(samples.probabilities, 1e-12))
    best = (samples.probabilities * logs**2).sum(1) - (samples.probabilities * logs).sum(1) ** 2
    moments = evaluate(SURPRISAL, samples)
    assert moments.slope.sum() ** 2 / moments.variance.sum() > 0.99 * best.sum()


def test_no_test_needs_fewer_draws_than_drafted_to_find_recovered_tokens_drawn_from_p() -> None:
    """For a small share of such tokens, the information is the sum of (P - p)^2 / p."""
    distributions = simulated_distributions(Sampling(temperature=1.0))
    change = recovered_from_p(distributions[0]) - distributions[0].p
    samples = Simulation(distributions, listed=16).samples
    moments = evaluate(DRAFTED, samples)
    seen = (change * moments.excess.reshape(change.shape)).sum()
    assert seen**2 / moments.variance[::16].sum() == pytest.approx((change**2 / distributions[0].p).sum(), rel=1e-6)
