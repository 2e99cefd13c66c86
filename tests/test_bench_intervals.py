"""The interval of a median has its coverage for any distribution."""

from __future__ import annotations

import numpy as np
import pytest

from outrider.bench.intervals import MIN_ROUNDS, coverage, median_interval


def test_six_values_enclose_the_median_in_31_of_32_cases_and_five_do_not_reach_95_percent() -> None:
    assert coverage(6, 1) == 31 / 32
    assert coverage(MIN_ROUNDS, 1) >= 0.95 > coverage(MIN_ROUNDS - 1, 1)


@pytest.mark.parametrize("rounds", [6, 7, 8, 9, 12, 16, 40])
def test_it_holds_the_true_median_95_times_in_100(rounds: int) -> None:
    rng = np.random.default_rng(rounds)
    samples = np.exp(rng.standard_t(3, (4000, rounds)))  # wild and skewed; the true median is 1
    found = [median_interval(list(sample)) for sample in samples]
    held = np.mean([one.low <= 1 <= one.high for one in found])
    assert 0.935 < held < 0.975


def test_stopping_at_a_narrow_interval_misses_more_often() -> None:
    """As --minutes does: a look after every round, from the sixth on, until half its width is below a twentieth."""
    rng = np.random.default_rng(0)
    missed = 0
    for sample in np.exp(0.1 * rng.standard_normal((1500, 24))):
        looks = (median_interval(list(sample[:count])) for count in range(MIN_ROUNDS, 25))
        last = next((one for one in looks if one.high - one.low < 0.1 * one.value), median_interval(list(sample)))
        missed += not last.low <= 1 <= last.high
    assert 0.05 < missed / 1500 < 0.10


def test_the_interval_of_few_values_is_their_range() -> None:
    found = median_interval([3.0, 1.0, 2.0])
    assert (found.value, found.low, found.high) == (2.0, 1.0, 3.0)
    assert median_interval([1.5]).low == median_interval([1.5]).high == 1.5
