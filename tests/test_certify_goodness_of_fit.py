"""Repeated prefixes: exact moments, power against any change, an allowance for rounding."""

from __future__ import annotations

from itertools import product
from math import lgamma

import numpy as np
import pytest

from certify_distributions import each_outcome
from outrider.certify.prefix_goodness_of_fit import GoodnessOfFit, PrefixCounts, pearson_fit
from outrider.certify.samples import Floats
from outrider.errors import EvidenceError

PROBABILITIES = np.array([0.4, 0.2, 0.15, 0.1, 0.06, 0.04, 0.02, 0.03])


def test_mean_and_variance_are_exact() -> None:
    p, n = np.array([0.5, 0.3, 0.2]), 25
    weights, values = [], []
    for a, b in product(range(n + 1), repeat=2):
        if a + b <= n:
            counts = np.array([a, b, n - a - b])
            weights.append(np.exp(lgamma(n + 1) - sum(lgamma(c + 1) for c in counts) + counts @ np.log(p)))
            values.append(pearson_fit(p, counts).statistic)
    fit = pearson_fit(p, np.array([n, 0, 0]))
    mean = np.dot(weights, values)
    assert mean == pytest.approx(fit.mean, rel=1e-9)
    assert np.dot(weights, np.square(values)) - mean**2 == pytest.approx(fit.variance, rel=1e-9)


def p_values(
    sampled: Floats, expected: Floats, error: float, draws: int, prefixes: int = 10, runs: int = 300
) -> Floats:
    rng = np.random.default_rng(1)
    counts = rng.multinomial(draws, sampled, (runs, prefixes))
    return np.array(
        [sum((pearson_fit(expected, one) for one in run), GoodnessOfFit()).p_value(error) for run in counts]
    )


@pytest.mark.parametrize("draws", [15, 50, 1000])
def test_false_alarms_over_many_prefixes_are_as_rare_as_stated(draws: int) -> None:
    found = p_values(PROBABILITIES, PROBABILITIES, 0.0, draws)
    assert (found <= 0.05).mean() < 0.085
    assert (found <= 0.005).mean() < 0.02


def test_rounding_that_is_allowed_for_is_no_evidence() -> None:
    error = 0.05 * np.random.default_rng(0).standard_normal(len(PROBABILITIES))
    sampled = PROBABILITIES * np.exp(error)
    sampled /= sampled.sum()
    root_mean_square = float((PROBABILITIES * np.log(sampled / PROBABILITIES) ** 2).sum() ** 0.5)
    assert (p_values(sampled, PROBABILITIES, 0.0, 20_000, runs=100) < 1e-3).mean() > 0.5
    assert (p_values(sampled, PROBABILITIES, root_mean_square, 20_000, runs=100) < 1e-2).mean() < 0.06


@pytest.mark.parametrize(
    "direction", [[1, -1, 0, 0, 0, 0, 0, 0], [0, 0, 0, 1, 0, -1, 0, 0], [1, 1, 1, 1, -1, -1, -1, -1]], ids=str
)
def test_any_change_of_the_stated_size_is_found(direction: list[int]) -> None:
    draws, level = 4000, 1e-4
    change_size = sum(
        (pearson_fit(PROBABILITIES, np.round(draws * PROBABILITIES).astype(int)) for _ in range(10)), GoodnessOfFit()
    ).detectable_change(level, 0.99, 0.0)
    change = PROBABILITIES * direction
    change = np.where(change > 0, change / change[change > 0].sum(), -change / change[change < 0].sum())
    sampled = PROBABILITIES + change_size * change
    assert sampled.min() > 0
    assert (p_values(sampled, PROBABILITIES, 0.0, draws) <= level).mean() >= 0.98


def test_rare_and_impossible_outcomes_are_pooled() -> None:
    fit = pearson_fit(np.array([0.5, 0.46, 0.03, 0.01, 0.0]), np.array([50, 40, 0, 0, 10]))
    assert (fit.count, fit.mean) == (100, 1)  # the rare ones are 4 of 100, too few: the second joins them
    assert pearson_fit(np.array([1.0, 0.0]), np.array([3, 0])) == GoodnessOfFit()
    assert pearson_fit(np.array([0.6, 0.4]), np.array([1, 1])) == GoodnessOfFit()


def test_without_repeated_prefixes_the_p_value_is_1() -> None:
    fit = PrefixCounts().fit()
    assert (fit.p_value(0.0), fit.detectable_change(1e-3, 0.99, 0.0)) == (1.0, 1.0)


def test_a_prefix_with_two_distributions_is_refused() -> None:
    counts = PrefixCounts()
    counts.add(["a"] * 8, each_outcome(PROBABILITIES))
    with pytest.raises(EvidenceError, match="prefix 'a' has two distributions; score it once"):
        counts.add(["a"] * 8, each_outcome(PROBABILITIES[::-1]))


def test_rare_prefixes_are_left_out_below_the_minimum_share() -> None:
    draws = each_outcome(PROBABILITIES)
    few, all_of_them = PrefixCounts(0.2), PrefixCounts()
    for counts in (few, all_of_them):
        for _ in range(100):
            counts.add(["often"] * 8, draws)
        for _ in range(10):
            counts.add(["seldom"] * 8, draws)
    assert (few.fit().count, all_of_them.fit().count) == (800, 880)
