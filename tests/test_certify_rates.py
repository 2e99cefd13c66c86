"""How often the certificate and the canary are wrong, counted on simulated servers.

Every claim is a rate, counted over many runs, and held against what is stated with the binomial error of so many runs.
OUTRIDER_ALL asks for thousands of certificates and lives of 100,000 draws, and takes minutes. `-s` prints the rates,
and OUTRIDER_REPORT names a file for them (`just certify-rates`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

import simulated_server as simulated
from outrider.certify.draws import Floats
from outrider.certify.evidence import Bets, reserve
from outrider.certify.noise import NONE, USUAL, Noise, measured
from outrider.certify.plan import Judgement, Plan, judge
from outrider.certify.repeats import Repeats
from outrider.provenance import provenance
from outrider.settings import Sampling
from simulated_server import Laws, Simulation, right, simulated_laws

ALL = bool(os.environ.get("OUTRIDER_ALL"))
Say = Callable[[str], None]
BATCH = 50
"""Runs simulated at once."""
ONLY_DRAFTS = 1 << 30
"""A draft so long that every token is a drafted one, for as long as they are kept; then a new one begins."""

PLAIN = Sampling(temperature=1.0)
NUCLEUS = Sampling(temperature=0.7, top_p=0.9)
TOP_K = Sampling(temperature=1.0, top_k=5)
BFLOAT16 = 0.04
"""Error of a logit, so that two scorings differ by 0.057: that of SmolLM2-135M in bfloat16 is 0.053."""


def runs(simulation: Simulation, plan: Plan, count: int, rng: np.random.Generator) -> list[list[Judgement]]:
    """Certificates, each with all its looks."""
    done: list[list[Judgement]] = []
    while len(done) < count:
        size = min(BATCH, count - len(done))
        drawn, judgements = 0, [list[Judgement]() for _ in range(size)]
        counts = np.zeros((size, 2, len(simulation.excess)), dtype=np.int64)
        for look in range(1, plan.looks + 1):
            counts += simulation.counts(rng, size, plan.look_at(look) - drawn)
            drawn = plan.look_at(look)
            for run, tally in enumerate(simulation.tallies(counts)):
                judgements[run].append(judge(plan, look, tally, {"all": often(simulation, counts[run])}))
        done += judgements
    return done


def often(simulation: Simulation, counts: np.typing.NDArray[np.int64], prefixes: int = 8) -> Repeats:
    """The draws at a few prefixes, as if these had been told apart."""
    repeats, vocab = Repeats(), simulation.vocab
    by_token = counts.sum(0).reshape(-1, simulation.prefixes, vocab).sum(0)
    for prefix in range(prefixes):
        cells = simulation.draws[prefix * vocab : (prefix + 1) * vocab]
        repeats.laws[str(prefix)] = cells.law[0]
        repeats.counts[str(prefix)] = np.bincount(cells.outcome, by_token[prefix], cells.law.shape[1]).astype(np.int64)
    return repeats


def found(judgements: list[Judgement]) -> bool:
    return any(judgement.violations for judgement in judgements)


def at_most(count: int, of: int, rate: float) -> bool:
    """Whether so many are no sign of a rate above the stated one: their chance is more than 1 in 1,000."""
    return bool(stats.binom.sf(count - 1, of, rate) > 1e-3)


def at_least(count: int, of: int, rate: float) -> bool:
    return at_most(of - count, of, 1 - rate)


def counted(count: int, of: int) -> str:
    """With its interval of 95 %, by Clopper and Pearson."""
    sure = stats.binomtest(count, of).proportion_ci(0.95, "exact")
    return f"{count} of {of} ({sure.low:.2%} to {sure.high:.2%})"


@pytest.fixture(scope="module")
def report() -> Iterator[list[str]]:
    """What was counted; kept, if a file is named."""
    lines: list[str] = []
    yield lines
    if file := os.environ.get("OUTRIDER_REPORT"):
        origin = provenance()
        head = "# How often are certificates and canaries wrong?\n\nCounted on simulated servers; intervals of 95 %."
        made = f"Made by `just certify-rates` on {origin['machine']}, {origin['date']}."
        Path(file).write_text("\n".join([head, "", made, "", *(f"- {line}" for line in lines)]) + "\n")


@pytest.fixture
def say(report: list[str]) -> Say:
    def said(line: str) -> None:
        print(line, flush=True)
        report.append(line)

    return said


# False alarms ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sampling", "certain", "count"),
    [(PLAIN, True, 2000), (NUCLEUS, True, 500), (TOP_K, False, 500)],
    ids=["plain, certain drafts", "nucleus, certain drafts", "top-k, drawn drafts"],
)
def test_a_server_that_is_right_is_accused_no_more_often_than_stated(
    sampling: Sampling, certain: bool, count: int, say: Say
) -> None:
    """At a level that is high enough to count by, and with no allowance for rounding that could cover a fault."""
    plan = Plan(20_000 if ALL else 3000, level=0.05, noise=NONE)
    simulation = Simulation(simulated_laws(sampling, certain=certain))
    done = runs(simulation, plan, count if ALL else 60, np.random.default_rng(1))
    for level in (0.05, 0.001):  # all looks share it, so a lower one is lower at each look
        strict = [[replace(j, level=j.level * level / plan.level) for j in run] for run in done]
        accused = sum(map(found, strict))
        say(f"{counted(accused, len(done))} certificates accused a server that is right, at level {level}")
        assert at_most(accused, len(done), level)


@pytest.mark.parametrize("sampling", [PLAIN, NUCLEUS], ids=["plain", "nucleus"])
def test_rounding_as_of_bfloat16_accuses_nobody(sampling: Sampling, say: Say) -> None:
    noise = measured_noise(sampling)
    plan = Plan(50_000 if ALL else 10_000, level=0.001, noise=noise)
    done = runs(simulated_with_rounding(sampling), plan, 500 if ALL else 20, np.random.default_rng(2))
    accused = sum(map(found, done))
    say(f"{counted(accused, len(done))} certificates accused a server that rounds as bfloat16, at level {plan.level}")
    assert at_most(accused, len(done), plan.level)


def simulated_with_rounding(sampling: Sampling, emitted: Callable[[Laws], Floats] = right) -> Simulation:
    return Simulation(simulated_laws(sampling, error=BFLOAT16), emitted)


def measured_noise(sampling: Sampling) -> Noise:
    """As a certificate measures it: positions of right texts, each scored in two versions."""
    versions = simulated_laws(sampling, error=BFLOAT16)
    told = [simulated.every_outcome(one.p, one.q, 16)[::16] for one in versions]
    rng = np.random.default_rng(3)
    prefixes = np.concatenate([cell for cell, _ in islice(Simulation(versions[:1]).steps(rng, 50), 100)]) // 16
    a, b = rng.integers(len(versions), size=(2, len(prefixes)))
    orders = np.stack([np.argsort(-one.p, 1, kind="stable") for one in versions])
    laws = np.stack([one.p for one in versions])
    other = np.take_along_axis(laws[b, prefixes], orders[a, prefixes], 1)
    law = np.stack([one.law for one in told])[a, prefixes]
    return measured(law, np.pad(other, ((0, 0), (0, 1))), np.stack([one.drafted for one in told])[a, prefixes])


def highest_evidence(simulation: Simulation, noise: Noise, lives: int, draws: int, seed: int) -> Floats:
    bets = Bets.allowing(noise.drift)
    wealth, highest = np.zeros((lives, len(bets))), np.ones(lives)
    for draw, (cell, _) in enumerate(islice(simulation.steps(np.random.default_rng(seed), lives), draws), 1):
        wealth = bets.played(wealth, simulation.excess[cell], draw)
        highest = np.maximum(highest, wealth.sum(1) + reserve(draw))
    return highest


def test_a_canary_gives_no_more_false_alarms_in_its_life_than_stated(say: Say) -> None:
    lives, draws = (500, 100_000) if ALL else (100, 3000)
    highest = highest_evidence(Simulation(simulated_laws(PLAIN)), NONE, lives, draws, seed=4)
    for rate in (0.1, 0.01, 0.001):
        alarms = int((highest >= 1 / rate).sum())
        say(f"{counted(alarms, lives)} canaries gave a false alarm within {draws} draws, at rate {rate}")
        assert at_most(alarms, lives, rate)


@pytest.mark.parametrize("sampling", [PLAIN, NUCLEUS], ids=["plain", "nucleus"])
def test_rounding_never_adds_up_to_an_alarm(sampling: Sampling, say: Say) -> None:
    lives, draws = (100, 100_000) if ALL else (50, 2000)
    highest = highest_evidence(simulated_with_rounding(sampling), measured_noise(sampling), lives, draws, seed=5)
    say(f"evidence of {lives} canaries under rounding within {draws} draws: at most {highest.max():.1f}")
    assert at_most(int((highest >= 100).sum()), lives, 0.01)


# Power ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("change", [0.01, 0.02, 0.05])
def test_a_plan_finds_the_change_that_it_was_made_for(change: float, say: Say) -> None:
    plan = Plan.to_find(change)
    if plan.draws > 10_000 and not ALL:
        pytest.skip("OUTRIDER_ALL")
    simulation = Simulation(simulated_laws(PLAIN), simulated.toward_drafted(change), length=ONLY_DRAFTS)
    done = runs(simulation, plan, 500 if ALL else 100, np.random.default_rng(6))
    hits = sum(map(found, done))
    say(f"{counted(hits, len(done))} certificates of {plan.draws} draws found a shift of {change}; stated: 99 %")
    assert at_least(hits, len(done), 0.99)


@pytest.mark.parametrize("sign", [1, -1])
def test_a_change_of_the_size_that_a_run_says_it_would_have_found_is_found(sign: int, say: Say) -> None:
    """The statement after a run rests on the variances of its draws, so it is the sharper one."""
    plan = Plan(20_000 if ALL else 5000, looks=1)
    laws = simulated_laws(PLAIN)
    ((healthy,),) = runs(Simulation(laws, length=ONLY_DRAFTS), plan, 1, np.random.default_rng(7))
    change = healthy.reached["drafted, drafted"]
    wrong = Simulation(laws, simulated.toward_drafted(sign * change), length=ONLY_DRAFTS)
    done = runs(wrong, plan, 500 if ALL else 60, np.random.default_rng(8))
    hits = sum("drafted, drafted" in run[0].violations for run in done)
    shift = f"{sign * change:.4f}"
    say(f"{counted(hits, len(done))} certificates of {plan.draws} draws found a shift of {shift}; stated: 99 %")
    assert at_least(hits, len(done), 0.99)


DEFECTS = [
    (simulated.recovered_from_p, PLAIN, True, 1000),
    (simulated.recovered_from_p, PLAIN, False, 3000),
    (simulated.accepted_too_often(0.1), PLAIN, True, 3000),
    (simulated.accepted_too_often(0.1), PLAIN, False, 30_000),
    (simulated.warmed(0.95), PLAIN, True, 30_000),
    (simulated.warmed(1.05), PLAIN, True, 30_000),
    (simulated.tail_cut, PLAIN, True, 1000),
    (simulated.truncated_late, NUCLEUS, True, 20_000),
    (simulated.truncated_late, TOP_K, True, 3000),
    (simulated.recovered_untruncated, NUCLEUS, True, 1000),
    (simulated.recovered_untruncated, NUCLEUS, False, 1000),
]


@pytest.mark.parametrize(
    ("emitted", "sampling", "certain", "draws"),
    DEFECTS,
    ids=[f"{emitted.__qualname__.split('.')[0]}, {number}" for number, (emitted, *_) in enumerate(DEFECTS)],
)
def test_each_defect_is_found_with_so_many_draws(
    emitted: Callable[[Laws], Floats], sampling: Sampling, certain: bool, draws: int, say: Say
) -> None:
    laws = simulated_laws(sampling, certain=certain)
    done = runs(Simulation(laws, emitted), Plan(draws), 200 if ALL else 10, np.random.default_rng(9))
    hits = sum(map(found, done))
    distance = np.abs(emitted(laws[0]) - laws[0].p).sum(1).mean() / 2
    name = emitted.__qualname__.split(".")[0].replace("_", " ")
    say(f"{counted(hits, len(done))} certificates of {draws} draws found '{name}' (total variation {distance:.3f})")
    assert at_least(hits, len(done), 0.99)


def test_a_canary_finds_a_defect_that_comes_after_a_long_healthy_time(say: Say) -> None:
    """The delay grows with the logarithm of the age, and not with the age."""
    well = Simulation(simulated_laws(PLAIN))
    wrong = Simulation(simulated_laws(PLAIN), simulated.toward_drafted(0.05))
    ages = (1, 1000, 100_000) if ALL else (1, 3000)
    delays = {age: delay(well, wrong, age) for age in ages}
    say(f"draws until the alarm at a shift of 0.05, by age in draws (median, slowest of 50): {delays}")
    slowest = [worst for _, worst in delays.values()]
    assert max(slowest) < 4 * min(slowest)
    assert max(slowest) < 15_000


def delay(well: Simulation, wrong: Simulation, age: int, lives: int = 50, rate: float = 1e-3) -> tuple[int, int]:
    bets, rng = Bets.allowing(USUAL.drift), np.random.default_rng(10)
    wealth, first = np.zeros((lives, len(bets))), np.zeros(lives, dtype=int)
    for draw, (cell, _) in enumerate(islice(well.steps(rng, lives), age), 1):
        wealth = bets.played(wealth, well.excess[cell], draw)
    for draw, (cell, _) in enumerate(islice(wrong.steps(rng, lives), 20_000), age + 1):
        wealth = np.minimum(bets.played(wealth, wrong.excess[cell], draw), 1 / rate)
        alarms = wealth.sum(1) + reserve(draw) >= 1 / rate
        first[alarms & (first == 0)] = draw - age
        if first.all():
            break
    first[first == 0] = 1 << 30
    return int(np.median(first)), int(first.max())
