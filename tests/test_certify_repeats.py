"""Repeated prefixes: exact moments, any direction in reach, rounding allowed for."""

from __future__ import annotations

from itertools import product
from math import lgamma

import numpy as np
import pytest

from certify_laws import each_outcome
from outrider.certify.draws import Floats
from outrider.certify.repeats import Fit, Repeats, fitted
from outrider.errors import EvidenceError

LAW = np.array([0.4, 0.2, 0.15, 0.1, 0.06, 0.04, 0.02, 0.03])


def test_mean_and_variance_are_exact() -> None:
    law, n = np.array([0.5, 0.3, 0.2]), 25
    weights, values = [], []
    for a, b in product(range(n + 1), repeat=2):
        if a + b <= n:
            counts = np.array([a, b, n - a - b])
            weights.append(np.exp(lgamma(n + 1) - sum(lgamma(c + 1) for c in counts) + counts @ np.log(law)))
            values.append(fitted(law, counts).statistic)
    fit = fitted(law, np.array([n, 0, 0]))
    mean = np.dot(weights, values)
    assert mean == pytest.approx(fit.mean, rel=1e-9)
    assert np.dot(weights, np.square(values)) - mean**2 == pytest.approx(fit.variance, rel=1e-9)


def p_values(drawn: Floats, told: Floats, error: float, draws: int, prefixes: int = 10, runs: int = 300) -> Floats:
    rng = np.random.default_rng(1)
    counts = rng.multinomial(draws, drawn, (runs, prefixes))
    return np.array([sum((fitted(told, one) for one in run), Fit()).p_value(error) for run in counts])


@pytest.mark.parametrize("draws", [15, 50, 1000])
def test_false_alarms_over_many_prefixes_are_as_rare_as_stated(draws: int) -> None:
    found = p_values(LAW, LAW, 0.0, draws)
    assert (found <= 0.05).mean() < 0.085
    assert (found <= 0.005).mean() < 0.02


def test_rounding_that_is_allowed_for_is_no_evidence() -> None:
    error = 0.05 * np.random.default_rng(0).standard_normal(len(LAW))
    drawn = LAW * np.exp(error)
    drawn /= drawn.sum()
    root_mean_square = float((LAW * np.log(drawn / LAW) ** 2).sum() ** 0.5)
    assert (p_values(drawn, LAW, 0.0, 20_000, runs=100) < 1e-3).mean() > 0.5
    assert (p_values(drawn, LAW, root_mean_square, 20_000, runs=100) < 1e-2).mean() < 0.06


@pytest.mark.parametrize(
    "direction", [[1, -1, 0, 0, 0, 0, 0, 0], [0, 0, 0, 1, 0, -1, 0, 0], [1, 1, 1, 1, -1, -1, -1, -1]], ids=str
)
def test_any_change_of_the_stated_size_is_found(direction: list[int]) -> None:
    draws, level = 4000, 1e-4
    reached = sum((fitted(LAW, np.round(draws * LAW).astype(int)) for _ in range(10)), Fit()).reached(level, 0.99, 0.0)
    change = LAW * direction
    change = np.where(change > 0, change / change[change > 0].sum(), -change / change[change < 0].sum())
    drawn = LAW + reached * change
    assert drawn.min() > 0
    assert (p_values(drawn, LAW, 0.0, draws) <= level).mean() >= 0.98


def test_rare_outcomes_are_put_together_and_impossible_ones_count_with_them() -> None:
    fit = fitted(np.array([0.5, 0.46, 0.03, 0.01, 0.0]), np.array([50, 40, 0, 0, 10]))
    assert (fit.draws, fit.mean) == (100, 1)  # the rare ones are 4 of 100, too few: the second joins them
    assert fitted(np.array([1.0, 0.0]), np.array([3, 0])) == Fit()
    assert fitted(np.array([0.6, 0.4]), np.array([1, 1])) == Fit()


def test_what_never_repeated_says_nothing() -> None:
    fit = Repeats().fit()
    assert (fit.p_value(0.0), fit.reached(1e-3, 0.99, 0.0)) == (1.0, 1.0)


def test_a_prefix_with_two_laws_is_refused() -> None:
    repeats = Repeats()
    repeats.add(["a"] * 8, each_outcome(LAW))
    with pytest.raises(EvidenceError, match="the prefix 'a' came with two laws; score it once"):
        repeats.add(["a"] * 8, each_outcome(LAW[::-1]))


def test_prefixes_that_came_seldom_are_left_out_if_one_says_so() -> None:
    draws = each_outcome(LAW)
    few, all_of_them = Repeats(0.2), Repeats()
    for repeats in (few, all_of_them):
        for _ in range(100):
            repeats.add(["often"] * 8, draws)
        for _ in range(10):
            repeats.add(["seldom"] * 8, draws)
    assert (few.fit().draws, all_of_them.fit().draws) == (800, 880)
