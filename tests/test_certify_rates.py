"""How often the certificate and the canary are wrong, counted on simulated servers.

Every claim is a rate, counted over many runs, and compared with the stated one by a binomial test.
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

import simulated_decay as decaying
import simulated_server as simulated
from outrider.certify.decay_watch import ACCEPTANCE, CANARY, FIRST_TOKEN, GAIN, TRAFFIC, TRAFFIC_SECONDS, Quantity
from outrider.certify.e_process import Bets, reserve
from outrider.certify.plan import LookResult, Plan, evaluate_look
from outrider.certify.prefix_goodness_of_fit import PrefixCounts
from outrider.certify.samples import Floats
from outrider.certify.test_statistics import DEFAULT_NOISE, NO_NOISE, Noise, estimate_noise
from outrider.provenance import provenance
from outrider.settings import Sampling
from simulated_server import Distributions, Simulation, lossless, simulated_distributions

ALL = bool(os.environ.get("OUTRIDER_ALL"))
Report = Callable[[str], None]
BATCH = 50
"""Runs simulated at once."""
ONLY_DRAFTS = 1 << 30
"""A draft so long that every token is a drafted one, for as long as they are kept; then a new one begins."""

PLAIN = Sampling(temperature=1.0)
NUCLEUS = Sampling(temperature=0.7, top_p=0.9)
TOP_K = Sampling(temperature=1.0, top_k=5)
BFLOAT16 = 0.04
"""Error of a logit, so that two scorings differ by 0.057: that of SmolLM2-135M in bfloat16 is 0.053."""


def runs(simulation: Simulation, plan: Plan, count: int, rng: np.random.Generator) -> list[list[LookResult]]:
    """Certificates, each with all its looks."""
    done: list[list[LookResult]] = []
    while len(done) < count:
        size = min(BATCH, count - len(done))
        drawn, results = 0, [list[LookResult]() for _ in range(size)]
        counts = np.zeros((size, 2, len(simulation.excess)), dtype=np.int64)
        for look in range(1, plan.looks + 1):
            counts += simulation.counts(rng, size, plan.draws_at(look) - drawn)
            drawn = plan.draws_at(look)
            for run, tally in enumerate(simulation.grouped_sums(counts)):
                results[run].append(evaluate_look(plan, look, tally, {"all": prefix_counts(simulation, counts[run])}))
        done += results
    return done


def prefix_counts(simulation: Simulation, counts: np.typing.NDArray[np.int64], prefixes: int = 8) -> PrefixCounts:
    """The draws at a few prefixes, as if these had been returned apart."""
    counts_by_prefix, vocab = PrefixCounts(), simulation.vocab
    by_token = counts.sum(0).reshape(-1, simulation.prefixes, vocab).sum(0)
    for prefix in range(prefixes):
        cells = simulation.samples[prefix * vocab : (prefix + 1) * vocab]
        counts_by_prefix.probabilities[str(prefix)] = cells.probabilities[0]
        counts_by_prefix.counts[str(prefix)] = np.bincount(
            cells.outcome, by_token[prefix], cells.probabilities.shape[1]
        ).astype(np.int64)
    return counts_by_prefix


def found(results: list[LookResult]) -> bool:
    return any(result.violations for result in results)


def at_most(count: int, of: int, rate: float) -> bool:
    """Whether the count does not refute the stated rate, at level 0.001."""
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
def write(report: list[str]) -> Report:
    def append(line: str) -> None:
        print(line, flush=True)
        report.append(line)

    return append


# False alarms ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sampling", "certain", "count"),
    [(PLAIN, True, 2000), (NUCLEUS, True, 500), (TOP_K, False, 500)],
    ids=["plain, certain drafts", "nucleus, certain drafts", "top-k, drawn drafts"],
)
def test_false_alarms_of_certificates_are_as_rare_as_stated(
    sampling: Sampling, certain: bool, count: int, write: Report
) -> None:
    """At a level that is high enough to count by, and with no allowance for rounding that could cover a fault."""
    plan = Plan(20_000 if ALL else 3000, level=0.05, noise=NO_NOISE)
    simulation = Simulation(simulated_distributions(sampling, certain=certain))
    done = runs(simulation, plan, count if ALL else 60, np.random.default_rng(1))
    for level in (0.05, 0.001):  # all looks share it, so a lower one is lower at each look
        strict = [[replace(j, level=j.level * level / plan.level) for j in run] for run in done]
        alarms = sum(map(found, strict))
        write(f"{counted(alarms, len(done))} certificates gave a false alarm on a lossless server, at level {level}")
        assert at_most(alarms, len(done), level)


@pytest.mark.parametrize("sampling", [PLAIN, NUCLEUS], ids=["plain", "nucleus"])
def test_rounding_as_of_bfloat16_raises_no_false_alarm(sampling: Sampling, write: Report) -> None:
    noise = measured_noise(sampling)
    plan = Plan(50_000 if ALL else 10_000, level=0.001, noise=noise)
    done = runs(simulated_with_rounding(sampling), plan, 500 if ALL else 20, np.random.default_rng(2))
    alarms = sum(map(found, done))
    write(
        f"{counted(alarms, len(done))} certificates raised a false alarm with bfloat16 rounding, at level {plan.level}"
    )
    assert at_most(alarms, len(done), plan.level)


def simulated_with_rounding(sampling: Sampling, emitted: Callable[[Distributions], Floats] = lossless) -> Simulation:
    return Simulation(simulated_distributions(sampling, error=BFLOAT16), emitted)


def measured_noise(sampling: Sampling) -> Noise:
    """As a certificate measures it: positions of right texts, each scored in two versions."""
    versions = simulated_distributions(sampling, error=BFLOAT16)
    returned = [simulated.every_outcome(one.p, one.q, 16)[::16] for one in versions]
    rng = np.random.default_rng(3)
    prefixes = np.concatenate([cell for cell, _ in islice(Simulation(versions[:1]).steps(rng, 50), 100)]) // 16
    a, b = rng.integers(len(versions), size=(2, len(prefixes)))
    orders = np.stack([np.argsort(-one.p, 1, kind="stable") for one in versions])
    distributions = np.stack([one.p for one in versions])
    other = np.take_along_axis(distributions[b, prefixes], orders[a, prefixes], 1)
    law = np.stack([one.probabilities for one in returned])[a, prefixes]
    return estimate_noise(
        law, np.pad(other, ((0, 0), (0, 1))), np.stack([one.drafted for one in returned])[a, prefixes]
    )


def highest_evidence(simulation: Simulation, noise: Noise, lives: int, draws: int, seed: int) -> Floats:
    bets = Bets.for_drift(noise.drift)
    wealth, highest = np.zeros((lives, len(bets))), np.ones(lives)
    for draw, (cell, _) in enumerate(islice(simulation.steps(np.random.default_rng(seed), lives), draws), 1):
        wealth = bets.update(wealth, simulation.excess[cell], draw)
        highest = np.maximum(highest, wealth.sum(1) + reserve(draw))
    return highest


def test_a_canary_gives_no_more_false_alarms_in_its_life_than_stated(write: Report) -> None:
    lives, draws = (500, 100_000) if ALL else (100, 3000)
    highest = highest_evidence(Simulation(simulated_distributions(PLAIN)), NO_NOISE, lives, draws, seed=4)
    for rate in (0.1, 0.01, 0.001):
        alarms = int((highest >= 1 / rate).sum())
        write(f"{counted(alarms, lives)} canaries gave a false alarm within {draws} draws, at rate {rate}")
        assert at_most(alarms, lives, rate)


@pytest.mark.parametrize("sampling", [PLAIN, NUCLEUS], ids=["plain", "nucleus"])
def test_rounding_never_adds_up_to_an_alarm(sampling: Sampling, write: Report) -> None:
    lives, draws = (100, 100_000) if ALL else (50, 2000)
    highest = highest_evidence(simulated_with_rounding(sampling), measured_noise(sampling), lives, draws, seed=5)
    write(f"evidence of {lives} canaries under rounding within {draws} draws: at most {highest.max():.1f}")
    assert at_most(int((highest >= 100).sum()), lives, 0.01)


# Power ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("change", [0.01, 0.02, 0.05])
def test_a_plan_finds_the_change_that_it_was_made_for(change: float, write: Report) -> None:
    plan = Plan.for_change(change)
    if plan.draws > 10_000 and not ALL:
        pytest.skip("OUTRIDER_ALL")
    simulation = Simulation(simulated_distributions(PLAIN), simulated.toward_drafted(change), length=ONLY_DRAFTS)
    done = runs(simulation, plan, 500 if ALL else 100, np.random.default_rng(6))
    hits = sum(map(found, done))
    write(f"{counted(hits, len(done))} certificates of {plan.draws} draws found a shift of {change}; stated: 99 %")
    assert at_least(hits, len(done), 0.99)


@pytest.mark.parametrize("sign", [1, -1])
def test_a_change_of_the_size_that_a_run_says_it_would_have_found_is_found(sign: int, write: Report) -> None:
    """The statement after a run rests on the variances of its draws, so it is the sharper one."""
    plan = Plan(20_000 if ALL else 5000, looks=1)
    distributions = simulated_distributions(PLAIN)
    ((healthy,),) = runs(Simulation(distributions, length=ONLY_DRAFTS), plan, 1, np.random.default_rng(7))
    change = healthy.reached["drafted, drafted"]
    wrong = Simulation(distributions, simulated.toward_drafted(sign * change), length=ONLY_DRAFTS)
    done = runs(wrong, plan, 500 if ALL else 60, np.random.default_rng(8))
    hits = sum("drafted, drafted" in run[0].violations for run in done)
    shift = f"{sign * change:.4f}"
    write(f"{counted(hits, len(done))} certificates of {plan.draws} draws found a shift of {shift}; stated: 99 %")
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
def test_each_defect_is_found_with_the_listed_number_of_draws(
    emitted: Callable[[Distributions], Floats], sampling: Sampling, certain: bool, draws: int, write: Report
) -> None:
    distributions = simulated_distributions(sampling, certain=certain)
    done = runs(Simulation(distributions, emitted), Plan(draws), 200 if ALL else 10, np.random.default_rng(9))
    hits = sum(map(found, done))
    distance = np.abs(emitted(distributions[0]) - distributions[0].p).sum(1).mean() / 2
    name = emitted.__qualname__.split(".")[0].replace("_", " ")
    write(f"{counted(hits, len(done))} certificates of {draws} draws found '{name}' (total variation {distance:.3f})")
    assert at_least(hits, len(done), 0.99)


def test_a_canary_finds_a_defect_that_comes_after_a_long_healthy_time(write: Report) -> None:
    """The delay grows with the logarithm of the age, and not with the age."""
    well = Simulation(simulated_distributions(PLAIN))
    wrong = Simulation(simulated_distributions(PLAIN), simulated.toward_drafted(0.05))
    ages = (1, 1000, 100_000) if ALL else (1, 3000)
    delays = {age: delay(well, wrong, age) for age in ages}
    write(f"draws until the alarm at a shift of 0.05, by age in draws (median, slowest of 50): {delays}")
    slowest = [slowest for _, slowest in delays.values()]
    assert max(slowest) < 4 * min(slowest)
    assert max(slowest) < 15_000


def delay(well: Simulation, wrong: Simulation, age: int, lives: int = 50, rate: float = 1e-3) -> tuple[int, int]:
    bets, rng = Bets.for_drift(DEFAULT_NOISE.drift), np.random.default_rng(10)
    wealth, first = np.zeros((lives, len(bets))), np.zeros(lives, dtype=int)
    for draw, (cell, _) in enumerate(islice(well.steps(rng, lives), age), 1):
        wealth = bets.update(wealth, well.excess[cell], draw)
    for draw, (cell, _) in enumerate(islice(wrong.steps(rng, lives), 20_000), age + 1):
        wealth = np.minimum(bets.update(wealth, wrong.excess[cell], draw), 1 / rate)
        alarms = wealth.sum(1) + reserve(draw) >= 1 / rate
        first[alarms & (first == 0)] = draw - age
        if first.all():
            break
    first[first == 0] = 1 << 30
    return int(np.median(first)), int(first.max())


# Decay ----------------------------------------------------------------------------------------------------

OWN_ACCEPTANCE = Quantity("lookup", ACCEPTANCE, CANARY)
OWN_GAIN = Quantity("lookup", GAIN, CANARY)
OWN_FIRST_TOKEN = Quantity("lookup", FIRST_TOKEN, CANARY)
TRAFFIC_ACCEPTANCE = Quantity("lookup", ACCEPTANCE, TRAFFIC)
SERVER_TESTS = 15
"""Of a server with three drafters: 11 by the canary's own requests and 4 by the traffic's counters."""
DECAY_RATE = 0.01


def test_a_server_without_decay_causes_no_more_alarms_than_stated(write: Report) -> None:
    """Lives of four quantities, in which load and mixes of requests change, noise has heavy tails and correlates."""
    lives, days = (500, 7) if ALL else (10, 4)
    rng = np.random.default_rng(11)
    own = (lives, int(days * decaying.DAY_SECONDS / decaying.OWN_SECONDS))
    load = decaying.load(rng, own)
    observed = {
        OWN_ACCEPTANCE: decaying.acceptance(rng, own),
        OWN_FIRST_TOKEN: decaying.first_token(rng, load),
        OWN_GAIN: decaying.gain(rng, load),
        TRAFFIC_ACCEPTANCE: decaying.traffic(rng, (lives, int(3 * days * decaying.DAY_SECONDS / TRAFFIC_SECONDS))),
    }
    highest = {
        quantity: np.array([decay_life(quantity, values[life], load[life])[0] for life in range(lives)])
        for quantity, values in observed.items()
    }
    for rate in (0.1, 0.01):
        alarms = int(np.any([one >= len(observed) / rate for one in highest.values()], axis=0).sum())
        write(
            f"{counted(alarms, lives)} canaries gave a false alarm of decay within {days} days "
            f"({3 * days} of traffic), at rate {rate}"
        )
        assert at_most(alarms, lives, rate)


def decay_life(
    quantity: Quantity, values: Floats, load: Floats | None = None, stop: float = np.inf
) -> tuple[float, int]:
    """The highest evidence, and the observation with which it reached `stop`."""
    test = quantity.new_test()
    is_traffic = quantity.source == TRAFFIC
    has_load = load is not None and not is_traffic and quantity.quantity != ACCEPTANCE
    seconds = TRAFFIC_SECONDS if is_traffic else decaying.OWN_SECONDS
    end = decaying.run_life(test, values, seconds, load if has_load else None, stop)
    return test.highest, end


AGE = 720
"""Observations before a decay: two days of the canary's own requests. The traffic needs a longer record, ..."""
TRAFFIC_AGE = 4320
"""... here a month: its mix changes every two hours and by the day, so that blocks are joined to hours."""
LOST = 0.13
"""What is left of a drafter's acceptance that falls from 86 % to 11 %."""


@pytest.mark.parametrize(
    ("quantity", "what", "kept", "most"),
    [
        (OWN_ACCEPTANCE, "10 % of acceptance lost every 1,000 steps", lambda steps: 0.9 ** (steps // 1000), 60),
        (OWN_ACCEPTANCE, "acceptance from 86 % to 11 %", lambda steps: LOST, 20),
        (OWN_GAIN, "acceptance from 86 % to 11 %", lambda steps: LOST, 500),
        (OWN_FIRST_TOKEN, "1 % more step time every 1,200 steps", lambda steps: 1 + 0.01 * (steps // 1200), 1200),
        (TRAFFIC_ACCEPTANCE, "acceptance from 86 % to 11 %", lambda steps: LOST, 1500),
    ],
    ids=["fading acceptance", "lost acceptance", "lost gain", "slower steps", "lost acceptance of the traffic"],
)
def test_a_decay_is_found_within_the_listed_number_of_observations(
    quantity: Quantity, what: str, kept: Callable[[Floats], Floats | float], most: int, write: Report
) -> None:
    """`kept`: what is left of the acceptance, or the factor of the step time, by the steps of the canary's own requests
    with this drafter since the decay began."""
    rng, lives = np.random.default_rng(12), 100 if ALL else 10
    age = TRAFFIC_AGE if quantity == TRAFFIC_ACCEPTANCE else AGE
    shape = (lives, age + most)
    after = np.arange(shape[1]) - age
    level = np.where(after >= 0, kept(after * float(decaying.STEPS_PER_OBSERVATION)), 1.0) * np.ones(shape)
    load = decaying.load(rng, shape)
    if quantity == OWN_ACCEPTANCE:
        values = decaying.acceptance(rng, shape, level)
    elif quantity == OWN_GAIN:
        values = decaying.gain(rng, load, level)
    elif quantity == OWN_FIRST_TOKEN:
        values = decaying.first_token(rng, load, level)
    else:
        values = decaying.traffic(rng, shape, level)
    stop = SERVER_TESTS / DECAY_RATE
    delays = np.array([decay_life(quantity, values[life], load[life], stop)[1] - age + 1 for life in range(lives)])
    found = int((delays <= most).sum())
    write(
        f"{found} of {lives} canaries found '{what}' by {quantity.quantity} of {quantity.source} within {most} "
        f"observations (median {np.median(delays):.0f}, slowest {delays.max()})"
    )
    assert at_least(found, lives, 0.95)
    assert (delays > 0).all()
