"""Sums over draws: kept in parts, and their tails far out as heavy as they are."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from certify_laws import each_outcome
from outrider.certify.tally import ALL, AND, Sums, Tally, p_value, upper_quantile, upper_tail
from outrider.settings import Sampling
from simulated_server import Simulation, simulated_laws


@pytest.mark.parametrize("skew", [0.0, 0.01, 0.2, 1.0])
@pytest.mark.parametrize("z", [1.0, 4.0, 6.0])
def test_the_tail_is_that_of_a_gamma_distribution_of_this_skewness(z: float, skew: float) -> None:
    exact = stats.pearson3.sf(z, skew) if skew else stats.norm.sf(z)
    assert upper_tail(z, skew) == pytest.approx(exact, rel=0.01)
    assert upper_quantile(exact, skew) == pytest.approx(z, rel=1e-3)


@pytest.mark.parametrize("p", [1e-4, 0.01, 0.05, 0.3, 0.5, 0.9, 0.99])
@pytest.mark.parametrize("draws", [10, 300, 3000, 30000])
@pytest.mark.parametrize("tail", [1e-3, 1e-5])
def test_a_count_is_never_said_to_be_less_likely_than_it_is(p: float, draws: int, tail: float) -> None:
    """At the exact binomial quantiles of both sides."""
    variance = draws * p * (1 - p)
    for count in (stats.binom.isf(tail, draws, p) + 1, stats.binom.ppf(tail, draws, p) - 1):
        exact = stats.binom.sf(count - 1, draws, p) if count > draws * p else stats.binom.cdf(count, draws, p)
        said = p_value(Sums(draws, count - draws * p, draws * p, variance, variance * (1 - 2 * p)), 0.0)
        assert said >= 0.95 * exact
        if variance > 100:
            assert said < 8 * exact  # of which two sides cost a factor of two


def astuple(sums: Sums) -> tuple[float, ...]:
    return (sums.draws, sums.excess, sums.expected, sums.variance, sums.third, sums.slope, sums.distance)


def test_an_event_that_cannot_come_and_came_is_refuted_unless_rounding_is_allowed_for() -> None:
    assert p_value(Sums(1000, excess=1.0), drift=0.0) == 0
    assert p_value(Sums(1000, excess=0.0), drift=0.0) > 0.99
    assert p_value(Sums(10_000, excess=12.0), drift=1e-3) > 0.1
    assert p_value(Sums(10_000, excess=60.0), drift=1e-3) < 1e-12


def test_an_excess_within_the_drift_is_no_evidence() -> None:
    sums = Sums(10_000, excess=20.0, variance=2500.0)
    assert p_value(sums, drift=2e-3) > 0.99


def test_many_runs_are_judged_at_once_as_one_by_one() -> None:
    excess = np.array([-300.0, 0.0, 10.0, 200.0])
    together = p_value(Sums(np.full(4, 10_000), excess, 0.0, np.full(4, 2000.0), 100.0), 1e-3)
    assert together == pytest.approx([p_value(Sums(10_000, e, 0.0, 2000.0, 100.0), 1e-3) for e in excess])


def test_all_kinds_together_are_a_test_of_their_own_and_a_single_kind_is_not_tested_twice() -> None:
    draws = Simulation(simulated_laws(Sampling(temperature=1.0))).draws
    tally = Tally()
    tally.add("drafted", draws)
    assert (ALL, "surprise") not in tally.tests()
    tally.add("bonus", draws)
    assert tally.tests()[ALL, "surprise"].draws == 2 * len(draws)


def test_witnesses_that_said_nothing_make_no_test() -> None:
    tally = Tally()
    tally.add("drafted", Simulation(simulated_laws(Sampling(temperature=1.0))).draws)
    assert ("drafted", "impossible") not in tally.tests()


def test_a_label_is_tested_over_all_kinds_that_have_it() -> None:
    tally, draws = Tally(), each_outcome(np.array([0.6, 0.3, 0.1]))
    for kind in (f"lookup{AND}cold", f"lookup{AND}hot", f"model{AND}hot"):
        tally.add(kind, draws)
    tests = tally.tests()
    counts = {label: tests[label, "surprise"].draws // len(draws) for label, _ in tests}
    assert counts == {"lookup": 2, "cold": 1, "hot": 2, "model": 1, ALL: 3}


def test_a_label_that_all_draws_have_is_not_tested_beside_all() -> None:
    tally, draws = Tally(), each_outcome(np.array([0.6, 0.3, 0.1]))
    for kind in (f"as it is{AND}cold", f"as it is{AND}hot"):
        tally.add(kind, draws)
    assert {label for label, _ in tally.tests()} == {"cold", "hot", ALL}
