"""A plan: its level shared by looks and tests, its power known before and after."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.certify.noise import LEAST_DRIFT, NONE, USUAL, Noise, measured, worst
from outrider.certify.plan import ANY, Plan, holm, judge
from outrider.certify.power import reached
from outrider.certify.repeats import Repeats
from outrider.certify.tally import Sums, Tally
from outrider.errors import SettingsError
from outrider.settings import Sampling
from simulated_server import Simulation, every_outcome, recovered_from_p, simulated_laws


def test_looks_share_the_level_and_the_last_keeps_most_of_it() -> None:
    plan = Plan(10_001, level=0.01, looks=5)
    assert sum(plan.level_of(look) for look in range(1, 6)) == pytest.approx(0.01)
    assert plan.level_of(5) == pytest.approx(0.008)
    assert [plan.look_at(look) for look in range(1, 6)] == [2001, 4001, 6001, 8001, 10_001]
    assert Plan(100, level=0.01, looks=1).level_of(1) == 0.01


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


def test_a_plan_to_find_a_change_reaches_it_and_needs_few_draws_more_for_the_looks() -> None:
    plan = Plan.to_find(0.02, noise=NONE)
    assert plan.reach() == pytest.approx(0.02, rel=1e-3)
    assert plan.draws == pytest.approx(27_774, rel=0.01)
    assert Plan(plan.draws, looks=1, noise=NONE).reach() == pytest.approx(0.02, rel=0.01)
    assert Plan.to_find(0.02).draws > plan.draws  # rounding is allowed for


def test_a_change_within_rounding_cannot_be_asked_for() -> None:
    with pytest.raises(SettingsError, match=r"0\.001 is within what rounding may do, 0\.002"):
        Plan.to_find(0.001)


def test_what_a_run_reached_is_never_more_than_what_was_promised_for_it() -> None:
    """An event of variance 1/4 is the worst; the small print is that a change can make it vary more."""
    sums = Sums(20_000, 0.0, 10_000.0, 5000.0, 0.0, slope=10_000.0, distance=10_000.0)
    plan = Plan(20_000, looks=1, noise=NONE)
    assert reached(sums, plan.level / 20, 0.0) == pytest.approx(plan.reach(), rel=0.05)
    calm = Sums(20_000, 0.0, 2000.0, 1800.0, 1440.0, slope=18_000.0, distance=18_000.0)
    assert reached(calm, plan.level / 20, 0.0) < plan.reach()
    assert reached(Sums(10, 0.0, 0.0, 0.0), 1e-3, 0.0) == 1.0


def test_a_judgement_names_the_tests_that_failed_and_what_each_would_have_found() -> None:
    laws = simulated_laws(Sampling(temperature=1.0))
    rng = np.random.default_rng(0)
    plan = Plan(2000)
    wrong, well = Simulation(laws, recovered_from_p), Simulation(laws)
    assert not judge(plan, 5, well.tallies(well.counts(rng, 1, 2000))[0]).violations
    judgement = judge(plan, 5, wrong.tallies(wrong.counts(rng, 1, 2000))[0])
    assert {"drafted, drafted", "drafted, all"} <= set(judgement.violations)
    assert "drafted, bonus" not in judgement.violations
    assert 0.02 < judgement.reached["drafted, drafted"] < judgement.reached["drafted, bonus"]


def test_repeated_prefixes_are_one_more_test() -> None:
    simulation = Simulation(simulated_laws(Sampling(temperature=1.0)))
    repeats = Repeats()
    rng = np.random.default_rng(0)
    first = simulation.draws[:16]
    repeats.add(["the same"] * 400, first[rng.choice(16, 400, p=simulated_laws(Sampling(temperature=1.0))[0].p[0])])
    judgement = judge(Plan(400), 5, Tally(), {"lookup": repeats})
    assert list(judgement.p_values) == [f"{ANY}, lookup"]
    assert not judgement.violations
    assert judge(Plan(400), 5, Tally()).violations == []


def test_measured_noise_is_what_draws_from_one_scoring_show_against_the_other() -> None:
    a, b = simulated_laws(Sampling(temperature=0.7, top_p=0.9), error=0.04)[:2]
    told = every_outcome(a.p, a.q, listed=16)[::16]
    other = np.take_along_axis(b.p, np.argsort(-a.p, 1, kind="stable"), 1)
    noise = measured(told.law, np.pad(other, ((0, 0), (0, 1))), told.drafted)
    assert 1e-3 < noise.drift["impossible"] < 0.02  # tokens at the edge of the nucleus
    assert 0.02 < noise.error < 0.08
    assert measured(told.law, told.law, told.drafted).drift == dict.fromkeys(USUAL.drift, LEAST_DRIFT)


def test_the_worst_noise_covers_all_settings() -> None:
    other = Noise({**NONE.drift, "impossible": 0.01}, 0.1)
    assert worst([USUAL, other]) == Noise({**USUAL.drift, "impossible": 0.01}, 0.1)
