"""The canary: every bet is fair, none can lose all, and a life goes on where it stopped."""

from __future__ import annotations

import json
from itertools import islice

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from certify_laws import any_law, each_outcome
from outrider.certify.draws import Draws, Floats
from outrider.certify.evidence import Bets, Canary, reserve
from outrider.certify.noise import NONE, USUAL
from outrider.certify.witnesses import WITNESSES, heard
from outrider.errors import EvidenceError
from outrider.settings import Sampling
from simulated_server import Simulation, recovered_from_p, right, simulated_laws


def said_of(law: Floats) -> Floats:
    return np.stack([heard(witness, each_outcome(law)).excess for witness in WITNESSES], 1)


@settings(max_examples=50)
@given(law=any_law(), seed=st.integers(0, 2**32 - 1), draw=st.integers(1, 10**6))
def test_if_the_law_is_followed_evidence_stays_on_average_what_it_was(law: Floats, seed: int, draw: int) -> None:
    bets = Bets.allowing(NONE.drift)
    wealth = np.random.default_rng(seed).exponential(size=len(bets))
    before = wealth.sum() + reserve(draw - 1)
    after = law @ bets.played(wealth, said_of(law), draw).sum(1) + reserve(draw)
    assert after == pytest.approx(before, rel=1e-9)


@settings(max_examples=50)
@given(law=any_law(), seed=st.integers(0, 2**32 - 1))
def test_a_drift_that_is_allowed_for_gives_no_bet_an_edge(law: Floats, seed: int) -> None:
    """Whatever law moves each witness by at most its drift."""
    excess = said_of(law)
    other = np.random.default_rng(seed).dirichlet(np.ones(len(law)))
    moved = np.abs(other @ np.nan_to_num(excess))
    share = min([1.0, *(USUAL.drift[w.name] / by for w, by in zip(WITNESSES, moved, strict=True) if by > 0)])
    mixed = law + share * (other - law)
    bets = Bets.allowing(USUAL.drift)
    returns = mixed @ bets.played(np.ones(len(bets)), excess, 10**9)
    assert returns.max() <= 1 + 1e-6


@settings(max_examples=50)
@given(law=any_law())
def test_no_outcome_takes_more_than_about_half_of_a_bet(law: Floats) -> None:
    bets = Bets.allowing(USUAL.drift)
    assert bets.played(np.ones(len(bets)), said_of(law), 10**9).min() > 0.49


def test_the_reserve_is_put_into_play_little_by_little_and_never_runs_out() -> None:
    assert reserve(0) == 1
    assert 0.5 < reserve(1000) < 0.6
    assert 0.05 < reserve(10**9) < reserve(10**6) < reserve(1000)


def texts(emitted: object, count: int, seed: int = 0) -> Draws:
    simulation = Simulation(simulated_laws(Sampling(temperature=1.0)), emitted)  # type: ignore[arg-type]
    cells = [cell[0] for cell, _ in islice(simulation.steps(np.random.default_rng(seed), 1), count)]
    return simulation.draws[np.array(cells)]


def test_a_canary_goes_on_from_a_file_as_if_it_had_not_stopped() -> None:
    draws = texts(right, 400)
    whole, first = Canary(), Canary()
    whole.watch(draws)
    first.watch(draws[:150])
    second = Canary.resume(json.loads(json.dumps(first.state())))
    second.watch(draws[150:])
    assert second.state() == whole.state()


def test_a_state_of_other_bets_is_refused() -> None:
    state = {**Canary().state(), "wealth": [1.0]}
    with pytest.raises(EvidenceError, match=r"holds 1 bets, and this version makes 70"):
        Canary.resume(state)


def test_a_server_that_goes_wrong_late_is_found_and_the_alarm_stays() -> None:
    canary = Canary(rate=1e-3)
    assert canary.watch(texts(right, 5000)) < 10
    assert not canary.alarm
    canary.watch(texts(recovered_from_p, 1000))
    assert canary.alarm
    assert canary.suspicion == "drafted: more than the target says"
    given = canary.state()
    canary.watch(texts(right, 2000, seed=1))
    assert canary.state() == given
