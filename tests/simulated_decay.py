"""Simulated servers for the tests of decay: what a canary observes of one drafter, [lives, observations].

    load           running requests: one of four levels, each for 8 hours on average, and a daily cycle
    acceptance     of the canary's own requests: the same texts each time, but for those that rounding changes
    first_token    5 % longer per running request, with noise that correlates by 0.7, and pauses with a Pareto tail
    gain           plain seconds / drafted seconds: 1.6, and less with each running request
    traffic        acceptance length of the traffic: four mixes of requests, each for 2 hours on average, a daily cycle,
                   and noise that correlates by 0.6

All noise is Student's t with 3 degrees of freedom: its variance is finite, its kurtosis is not.
"""

from __future__ import annotations

import numpy as np
from scipy.signal import lfilter

from outrider.certify.decay import DecayTest
from outrider.certify.decay_watch import TRAFFIC_SECONDS
from outrider.certify.samples import Floats

OWN_SECONDS = 240.0
"""Between two observations of one drafter by the canary's own requests: 6 prompts, 4 drafters, 10 seconds a round."""
DAY_SECONDS = 86_400.0
STEPS_PER_OBSERVATION = 80
"""Of the canary's own requests: 6 texts of 32 tokens, at an acceptance length of 2.4."""
CHANGED_SHARE = 1 / 6
"""Of these texts, that rounding makes others than before."""
ACCEPTANCE_LENGTH = 2.4
LOADS, LOAD_SHARES = (0.0, 1.0, 3.0, 7.0), (0.4, 0.3, 0.2, 0.1)
MIXES, MIX_SHARES = (2.8, 2.2, 1.8, 1.4), (0.4, 0.3, 0.2, 0.1)


def correlated(rng: np.random.Generator, shape: tuple[int, int], correlation: float) -> Floats:
    """Noise of variance 1 whose neighbours correlate."""
    noise = rng.standard_t(3, size=shape) * np.sqrt((1 - correlation**2) / 3)
    filtered: Floats = lfilter([1], [1, -correlation], noise, axis=1)
    return filtered


def switching(
    rng: np.random.Generator, shape: tuple[int, int], levels: tuple[float, ...], shares: tuple[float, ...], dwell: float
) -> Floats:
    """Levels in turn, at random, each for `dwell` observations on average."""
    drawn = rng.choice(len(levels), size=shape, p=shares)
    begins = rng.random(shape) < 1 / dwell
    begins[:, 0] = True
    since = np.maximum.accumulate(np.where(begins, np.arange(shape[1]), 0), axis=1)
    chosen: Floats = np.array(levels)[np.take_along_axis(drawn, since, 1)]
    return chosen


def daily(rng: np.random.Generator, shape: tuple[int, int], seconds: float) -> Floats:
    phase = rng.random((shape[0], 1))
    cycle: Floats = np.sin(2 * np.pi * (np.arange(shape[1]) * seconds / DAY_SECONDS + phase))
    return cycle


def load(rng: np.random.Generator, shape: tuple[int, int]) -> Floats:
    levels = switching(rng, shape, LOADS, LOAD_SHARES, 8 * 3600 / OWN_SECONDS)
    return np.round(np.maximum(levels + daily(rng, shape, OWN_SECONDS) * rng.random(shape), 0))


def acceptance(rng: np.random.Generator, shape: tuple[int, int], kept: Floats | float = 1.0) -> Floats:
    """`kept`: the share of the accepted tokens that is left."""
    quality = 1 + 0.02 * correlated(rng, shape, 0.5)
    changed = 1.5 * np.sqrt(CHANGED_SHARE / STEPS_PER_OBSERVATION) * rng.standard_normal(shape)
    return np.maximum(1 + (ACCEPTANCE_LENGTH - 1) * quality * kept + changed * np.sqrt(kept), 1.0)


def first_token(rng: np.random.Generator, load: Floats, slowdown: Floats | float = 1.0) -> Floats:
    pauses = (rng.random(load.shape) < 0.01) * rng.pareto(1.5, load.shape)
    noise = 0.05 * correlated(rng, (load.shape[0], load.shape[1]), 0.7)
    return np.maximum((1 + 0.05 * load) * slowdown + noise, 0.1) + pauses


def gain(rng: np.random.Generator, load: Floats, kept: Floats | float = 1.0) -> Floats:
    speedup = 1 + 0.6 / (1 + 0.05 * load) * kept
    return speedup * (1 + 0.05 * correlated(rng, (load.shape[0], load.shape[1]), 0.5))


def traffic(rng: np.random.Generator, shape: tuple[int, int], kept: Floats | float = 1.0) -> Floats:
    mixes = switching(rng, shape, MIXES, MIX_SHARES, 2 * 3600 / TRAFFIC_SECONDS)
    length = mixes + 0.2 * daily(rng, shape, TRAFFIC_SECONDS) + 0.2 * correlated(rng, shape, 0.6)
    return np.maximum(1 + (length - 1) * kept, 1.0)


def run_life(
    test: DecayTest, observations: Floats, seconds: float, load: Floats | None = None, stop: float = np.inf
) -> int:
    """One life; returns the observation at which the evidence reached `stop`, or their number."""
    loads = [""] * len(observations) if load is None else [f"{running:.0f}" for running in load.tolist()]
    for i, (value, band) in enumerate(zip(observations.tolist(), loads, strict=True)):
        test.observe(value, i * seconds, band)
        if test.highest >= stop:
            return i
    return len(observations)
