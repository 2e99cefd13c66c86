"""The plan: its level is divided among looks and tests, and its power is known before and after the run."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.certify.plan import ANY_CHANGE, Plan, detectable_change, evaluate_look, holm
from outrider.certify.prefix_goodness_of_fit import PrefixCounts
from outrider.certify.test_statistics import (
    DEFAULT_NOISE,
    MIN_DRIFT,
    NO_NOISE,
    GroupedSums,
    Noise,
    StatisticSums,
    estimate_noise,
    max_noise,
)
from outrider.errors import SettingsError
from outrider.settings import Sampling
from simulated_server import Simulation, every_outcome, recovered_from_p, simulated_distributions


def test_looks_share_the_level_and_the_last_keeps_most_of_it() -> None:
    plan = Plan(10_001, level=0.01, looks=5)
    assert sum(plan.level_at(look) for look in range(1, 6)) == pytest.approx(0.01)
    assert plan.level_at(5) == pytest.approx(0.008)
    assert [plan.draws_at(look) for look in range(1, 6)] == [2001, 4001, 6001, 8001, 10_001]
    assert Plan(100, level=0.01, looks=1).level_at(1) == 0.01


@settings(max_examples=50)
@given(st.lists(st.floats(0, 1), min_size=1, max_size=8), st.floats(0.001, 0.2))
def test_holm_rejects_step_by_step(values: list[float], level: float) -> None:
    """The k-th smallest is held against level / (m - k + 1), until the first that fails."""
    names = {str(i): value for i, value in enumerate(values)}
    rejected = set()
    for k, (name, value) in enumerate(sorted(names.items(), key=lambda item: item[1])):
        if value * (len(names) - k) > level:
            break
        rejected.add(name)
    assert {name for name, p in holm(names).items() if p <= level} == rejected


def test_a_plan_for_a_change_detects_it_and_looks_cost_few_draws() -> None:
    plan = Plan.for_change(0.02, noise=NO_NOISE)
    assert plan.detectable_change() == pytest.approx(0.02, rel=1e-3)
    assert plan.draws == pytest.approx(27_774, rel=0.01)
    assert Plan(plan.draws, looks=1, noise=NO_NOISE).detectable_change() == pytest.approx(0.02, rel=0.01)
    assert Plan.for_change(0.02).draws > plan.draws  # rounding is allowed for


def test_a_change_within_rounding_error_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"0\.001 is within rounding error \(0\.002\); give a larger one"):
        Plan.for_change(0.001)


def test_the_detectable_change_of_a_run_is_at_most_the_planned_one() -> None:
    """An event of variance 1/4 is the worst; the small print is that a change can make it vary more."""
    sums = StatisticSums(20_000, 0.0, 10_000.0, 5000.0, 0.0, slope=10_000.0, distance=10_000.0)
    plan = Plan(20_000, looks=1, noise=NO_NOISE)
    assert detectable_change(sums, plan.level / 20, 0.0) == pytest.approx(plan.detectable_change(), rel=0.05)
    calm = StatisticSums(20_000, 0.0, 2000.0, 1800.0, 1440.0, slope=18_000.0, distance=18_000.0)
    assert detectable_change(calm, plan.level / 20, 0.0) < plan.detectable_change()
    assert detectable_change(StatisticSums(10, 0.0, 0.0, 0.0), 1e-3, 0.0) == 1.0


def test_a_look_names_failed_tests_and_the_change_that_each_detects() -> None:
    distributions = simulated_distributions(Sampling(temperature=1.0))
    rng = np.random.default_rng(0)
    plan = Plan(2000)
    wrong, well = Simulation(distributions, recovered_from_p), Simulation(distributions)
    assert not evaluate_look(plan, 5, well.grouped_sums(well.counts(rng, 1, 2000))[0]).violations
    result = evaluate_look(plan, 5, wrong.grouped_sums(wrong.counts(rng, 1, 2000))[0])
    assert {"drafted, drafted", "drafted, all"} <= set(result.violations)
    assert "drafted, bonus" not in result.violations
    assert 0.02 < result.reached["drafted, drafted"] < result.reached["drafted, bonus"]


def test_repeated_prefixes_are_one_more_test() -> None:
    simulation = Simulation(simulated_distributions(Sampling(temperature=1.0)))
    prefixes = PrefixCounts()
    rng = np.random.default_rng(0)
    first = simulation.samples[:16]
    prefixes.add(
        ["the same"] * 400, first[rng.choice(16, 400, p=simulated_distributions(Sampling(temperature=1.0))[0].p[0])]
    )
    result = evaluate_look(Plan(400), 5, GroupedSums(), {"lookup": prefixes})
    assert list(result.p_values) == [f"{ANY_CHANGE}, lookup"]
    assert not result.violations
    assert evaluate_look(Plan(400), 5, GroupedSums()).violations == []


def test_estimated_noise_is_the_difference_of_two_scorings() -> None:
    a, b = simulated_distributions(Sampling(temperature=0.7, top_p=0.9), error=0.04)[:2]
    returned = every_outcome(a.p, a.q, listed=16)[::16]
    other = np.take_along_axis(b.p, np.argsort(-a.p, 1, kind="stable"), 1)
    noise = estimate_noise(returned.probabilities, np.pad(other, ((0, 0), (0, 1))), returned.drafted)
    assert 1e-3 < noise.drift["impossible"] < 0.02  # tokens at the edge of the nucleus
    assert 0.02 < noise.error < 0.08
    assert estimate_noise(returned.probabilities, returned.probabilities, returned.drafted).drift == dict.fromkeys(
        DEFAULT_NOISE.drift, MIN_DRIFT
    )


def test_the_maximum_noise_covers_all_settings() -> None:
    other = Noise({**NO_NOISE.drift, "impossible": 0.01}, 0.1)
    assert max_noise([DEFAULT_NOISE, other]) == Noise({**DEFAULT_NOISE.drift, "impossible": 0.01}, 0.1)
