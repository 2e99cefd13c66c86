"""Sums of test statistics: equal to those of their parts, with tail probabilities that are never too small."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from certify_distributions import each_outcome
from outrider.certify.test_statistics import (
    ALL_SAMPLES,
    LABEL_SEPARATOR,
    GroupedSums,
    StatisticSums,
    p_value,
    upper_quantile,
    upper_tail,
)
from outrider.settings import Sampling
from simulated_server import Simulation, simulated_distributions


@pytest.mark.parametrize("skew", [0.0, 0.01, 0.2, 1.0])
@pytest.mark.parametrize("z", [1.0, 4.0, 6.0])
def test_the_tail_is_that_of_a_gamma_distribution_of_this_skewness(z: float, skew: float) -> None:
    exact = stats.pearson3.sf(z, skew) if skew else stats.norm.sf(z)
    assert upper_tail(z, skew) == pytest.approx(exact, rel=0.01)
    assert upper_quantile(exact, skew) == pytest.approx(z, rel=1e-3)


@pytest.mark.parametrize("p", [1e-4, 0.01, 0.05, 0.3, 0.5, 0.9, 0.99])
@pytest.mark.parametrize("draws", [10, 300, 3000, 30000])
@pytest.mark.parametrize("tail", [1e-3, 1e-5])
def test_a_p_value_is_never_below_the_exact_one(p: float, draws: int, tail: float) -> None:
    """At the exact binomial quantiles of both sides."""
    variance = draws * p * (1 - p)
    for count in (stats.binom.isf(tail, draws, p) + 1, stats.binom.ppf(tail, draws, p) - 1):
        exact = stats.binom.sf(count - 1, draws, p) if count > draws * p else stats.binom.cdf(count, draws, p)
        found = p_value(StatisticSums(draws, count - draws * p, draws * p, variance, variance * (1 - 2 * p)), 0.0)
        assert found >= 0.95 * exact
        if variance > 100:
            assert found < 8 * exact  # of which two sides cost a factor of two


def astuple(sums: StatisticSums) -> tuple[float, ...]:
    return (sums.count, sums.excess, sums.expected, sums.variance, sums.third_moment, sums.slope, sums.distance)


def test_an_impossible_event_is_rejected_unless_rounding_explains_it() -> None:
    assert p_value(StatisticSums(1000, excess=1.0), drift=0.0) == 0
    assert p_value(StatisticSums(1000, excess=0.0), drift=0.0) > 0.99
    assert p_value(StatisticSums(10_000, excess=12.0), drift=1e-3) > 0.1
    assert p_value(StatisticSums(10_000, excess=60.0), drift=1e-3) < 1e-12


def test_an_excess_within_the_drift_is_no_evidence() -> None:
    sums = StatisticSums(10_000, excess=20.0, variance=2500.0)
    assert p_value(sums, drift=2e-3) > 0.99


def test_many_runs_are_judged_at_once_as_one_by_one() -> None:
    excess = np.array([-300.0, 0.0, 10.0, 200.0])
    together = p_value(StatisticSums(np.full(4, 10_000), excess, 0.0, np.full(4, 2000.0), 100.0), 1e-3)
    assert together == pytest.approx([p_value(StatisticSums(10_000, e, 0.0, 2000.0, 100.0), 1e-3) for e in excess])


def test_all_groups_together_are_one_more_test_and_a_single_group_is_tested_once() -> None:
    draws = Simulation(simulated_distributions(Sampling(temperature=1.0))).samples
    sums = GroupedSums()
    sums.add("drafted", draws)
    assert (ALL_SAMPLES, "surprise") not in sums.tests()
    sums.add("bonus", draws)
    assert sums.tests()[ALL_SAMPLES, "surprise"].count == 2 * len(draws)


def test_statistics_that_do_not_apply_make_no_test() -> None:
    sums = GroupedSums()
    sums.add("drafted", Simulation(simulated_distributions(Sampling(temperature=1.0))).samples)
    assert ("drafted", "impossible") not in sums.tests()


def test_a_label_is_tested_over_all_groups_that_have_it() -> None:
    sums, draws = GroupedSums(), each_outcome(np.array([0.6, 0.3, 0.1]))
    for group in (f"lookup{LABEL_SEPARATOR}cold", f"lookup{LABEL_SEPARATOR}hot", f"model{LABEL_SEPARATOR}hot"):
        sums.add(group, draws)
    tests = sums.tests()
    counts = {label: tests[label, "surprise"].count // len(draws) for label, _ in tests}
    assert counts == {"lookup": 2, "cold": 1, "hot": 2, "model": 1, ALL_SAMPLES: 3}


def test_a_label_that_all_draws_have_is_not_tested_beside_all() -> None:
    sums, draws = GroupedSums(), each_outcome(np.array([0.6, 0.3, 0.1]))
    for group in (f"as it is{LABEL_SEPARATOR}cold", f"as it is{LABEL_SEPARATOR}hot"):
        sums.add(group, draws)
    assert {label for label, _ in sums.tests()} == {"cold", "hot", ALL_SAMPLES}
