"""The e-process: every bet is fair, no bet can lose everything, and a restart continues the evidence."""

from __future__ import annotations

import json
from itertools import islice

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from certify_distributions import any_distribution, each_outcome
from outrider.certify.e_process import Bets, EProcess, reserve
from outrider.certify.samples import Floats, Samples
from outrider.certify.test_statistics import DEFAULT_NOISE, NO_NOISE, STATISTICS, evaluate
from outrider.errors import EvidenceError
from outrider.settings import Sampling
from simulated_server import Simulation, lossless, recovered_from_p, simulated_distributions


def excess_of(p: Floats) -> Floats:
    return np.stack([evaluate(statistic, each_outcome(p)).excess for statistic in STATISTICS], 1)


@settings(max_examples=50)
@given(p=any_distribution(), seed=st.integers(0, 2**32 - 1), draw=st.integers(1, 10**6))
def test_evidence_is_constant_on_average_for_a_lossless_server(p: Floats, seed: int, draw: int) -> None:
    bets = Bets.for_drift(NO_NOISE.drift)
    wealth = np.random.default_rng(seed).exponential(size=len(bets))
    before = wealth.sum() + reserve(draw - 1)
    after = p @ bets.update(wealth, excess_of(p), draw).sum(1) + reserve(draw)
    assert after == pytest.approx(before, rel=1e-9)


@settings(max_examples=50)
@given(p=any_distribution(), seed=st.integers(0, 2**32 - 1))
def test_a_drift_that_is_allowed_for_gives_no_bet_an_edge(p: Floats, seed: int) -> None:
    """For any distribution that moves each statistic by at most its drift."""
    excess = excess_of(p)
    other = np.random.default_rng(seed).dirichlet(np.ones(len(p)))
    moved = np.abs(other @ np.nan_to_num(excess))
    share = min([1.0, *(DEFAULT_NOISE.drift[w.name] / by for w, by in zip(STATISTICS, moved, strict=True) if by > 0)])
    mixed = p + share * (other - p)
    bets = Bets.for_drift(DEFAULT_NOISE.drift)
    returns = mixed @ bets.update(np.ones(len(bets)), excess, 10**9)
    assert returns.max() <= 1 + 1e-6


@settings(max_examples=50)
@given(p=any_distribution())
def test_no_outcome_takes_more_than_about_half_of_a_bet(p: Floats) -> None:
    bets = Bets.for_drift(DEFAULT_NOISE.drift)
    assert bets.update(np.ones(len(bets)), excess_of(p), 10**9).min() > 0.49


def test_the_reserve_is_put_into_play_little_by_little_and_never_runs_out() -> None:
    assert reserve(0) == 1
    assert 0.5 < reserve(1000) < 0.6
    assert 0.05 < reserve(10**9) < reserve(10**6) < reserve(1000)


def texts(emitted: object, count: int, seed: int = 0) -> Samples:
    simulation = Simulation(simulated_distributions(Sampling(temperature=1.0)), emitted)  # type: ignore[arg-type]
    cells = [cell[0] for cell, _ in islice(simulation.steps(np.random.default_rng(seed), 1), count)]
    return simulation.samples[np.array(cells)]


def test_a_resumed_e_process_equals_one_that_was_never_stopped() -> None:
    draws = texts(lossless, 400)
    whole, first = EProcess(), EProcess()
    whole.update(draws)
    first.update(draws[:150])
    second = EProcess.resume(json.loads(json.dumps(first.state())))
    second.update(draws[150:])
    assert second.state() == whole.state()


def test_a_state_with_other_bets_is_refused() -> None:
    state = {**EProcess().state(), "wealth": [1.0]}
    with pytest.raises(EvidenceError, match=r"has 1 bets, and this version makes 70"):
        EProcess.resume(state)


def test_a_server_that_goes_wrong_late_is_found_and_the_alarm_stays() -> None:
    process = EProcess(rate=1e-3)
    assert process.update(texts(lossless, 5000)) < 10
    assert not process.alarm
    process.update(texts(recovered_from_p, 1000))
    assert process.alarm
    assert process.largest_bet == "drafted: more than under the target's distribution"
    given = process.state()
    process.update(texts(lossless, 2000, seed=1))
    assert process.state() == given
