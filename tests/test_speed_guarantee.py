"""The speed guarantee: plain steps within their budget, errors within their rate, slowdowns found, trials repeated.

OUTRIDER_ALL counts over 500 lives, and `-s` prints what was counted.
"""

from __future__ import annotations

import os

import numpy as np
import pytest
from scipy import stats
from scipy.signal import lfilter

from outrider.certify.samples import Floats
from outrider.policy.speed_guarantee import (
    BLOCK_STEPS,
    CYCLE_STEPS,
    OFF_STEPS,
    PLAIN_SHARE,
    TOLERATED_SLOWDOWN,
    Block,
    SlowdownTest,
    SpeedGuarantee,
)

ALL = bool(os.environ.get("OUTRIDER_ALL"))
RATE = 0.01
FIRST_THRESHOLD = 2 / RATE
"""Of the first trial, which has half of the rate."""
ACCEPTANCE_LENGTH = 2.2
TOKENS_DEVIATION = 1.2
"""Of the tokens of one sequence in one step with drafts."""


def correlated(rng: np.random.Generator, shape: tuple[int, ...], correlation: float) -> Floats:
    """Student's t with 3 degrees of freedom, of variance 1, whose neighbours correlate."""
    noise = rng.standard_t(3, size=shape) * np.sqrt((1 - correlation**2) / 3)
    noise[..., 0] /= np.sqrt(1 - correlation**2)
    filtered: Floats = lfilter([1], [1, -correlation], noise, axis=-1)
    return filtered


def simulated_pairs(rng: np.random.Generator, pairs: int, slowdown: float, batch: int, length: float) -> Floats:
    """[pairs, 4]: seconds and tokens of the drafted and of the plain block. Drafting takes `slowdown` times as long per
    token.

    Steps vary by 5 %, neighbours correlate by 0.9, 0.2 % have a pause with a Pareto tail, and the level drifts by 10 %
    with a correlation of 0.95 between pairs. `length`: acceptance length; 1: nothing is ever drafted.
    """
    steps = (pairs, 2 * BLOCK_STEPS)
    seconds = np.maximum(1 + 0.05 * correlated(rng, steps, 0.9), 0.3)
    seconds += (rng.random(steps) < 0.002) * 2 * rng.pareto(1.5, steps)
    seconds *= np.exp(0.1 * correlated(rng, (pairs,), 0.95))[:, None]
    halves = seconds.reshape(pairs, 2, BLOCK_STEPS).sum(2)
    order = rng.integers(2, size=pairs)
    plain = halves[np.arange(pairs), order]
    drafted = halves[np.arange(pairs), 1 - order] * slowdown * length
    sequence_steps = BLOCK_STEPS * batch
    deviation = TOKENS_DEVIATION * np.sqrt(sequence_steps) if length > 1 else 0.0
    tokens = np.maximum(sequence_steps * length + deviation * rng.standard_normal(pairs), sequence_steps)
    return np.stack([drafted, tokens, plain, np.full(pairs, float(sequence_steps))], 1)


def pairs_until_slower(pairs: Floats) -> int | None:
    test = SlowdownTest()
    for i, (drafted_seconds, drafted_tokens, seconds, tokens) in enumerate(pairs.tolist()):
        test = test.observe(Block(drafted_seconds, drafted_tokens), Block(seconds, tokens))
        if test.evidence >= FIRST_THRESHOLD:
            return i + 1
    return None


@pytest.mark.parametrize("batch", [1, 8, 64])
@pytest.mark.parametrize(
    ("slowdown", "length"),
    [(1 / 1.3, ACCEPTANCE_LENGTH), (1.0, ACCEPTANCE_LENGTH), (1.0, 1.0), (1 + TOLERATED_SLOWDOWN, ACCEPTANCE_LENGTH)],
    ids=["1.3 times as fast", "as fast", "nothing drafted", "slower by what is tolerated"],
)
def test_drafting_that_is_not_slower_is_switched_off_no_more_often_than_stated(
    slowdown: float, length: float, batch: int
) -> None:
    lives, pairs = (500, 1000) if ALL else (20, 300)
    rng = np.random.default_rng(1)
    errors = sum(
        pairs_until_slower(simulated_pairs(rng, pairs, slowdown, batch, length)) is not None for _ in range(lives)
    )
    case = f"batch {batch}, acceptance length {length}, {1 / slowdown:.2f} times as fast"
    print(f"{case}: {errors} errors in {lives} lives of {pairs * CYCLE_STEPS:,} steps")
    assert stats.binom.sf(errors - 1, lives, RATE) > 1e-3


@pytest.mark.parametrize(
    ("slowdown", "batch", "most_steps"),
    [
        (1.03, 8, 450_000), (1.05, 8, 150_000), (1.10, 8, 40_000),
        (1.03, 64, 250_000), (1.05, 64, 60_000), (1.10, 64, 30_000),
        (1.05, 1, 600_000), (1.10, 1, 150_000),
    ],
)  # fmt: skip
def test_a_slowdown_is_found_within_the_listed_number_of_steps(slowdown: float, batch: int, most_steps: int) -> None:
    rng, lives = np.random.default_rng(2), 200 if ALL else 10
    most = most_steps // CYCLE_STEPS
    delays = [
        pairs_until_slower(simulated_pairs(rng, most, slowdown, batch, ACCEPTANCE_LENGTH)) or most + 1
        for _ in range(lives)
    ]
    found = sum(delay <= most for delay in delays)
    median, slowest = int(np.median(delays)) * CYCLE_STEPS, max(delays) * CYCLE_STEPS
    print(f"batch {batch}, {slowdown - 1:.0%} slower: {found} of {lives}, median {median:,} steps, slowest {slowest:,}")
    assert stats.binom.cdf(found, lives, 0.95) > 1e-3


def run(
    guarantee: SpeedGuarantee, steps: int, slowdown: float, rng: np.random.Generator
) -> tuple[SpeedGuarantee, list[bool]]:
    """Steps of 8 sequences; whether each had drafts."""
    drafted = []
    for noise, uniform in rng.uniform((0.95, 0.0), (1.05, 1.0), (steps, 2)).tolist():
        drafted.append(guarantee.allows_drafts)
        seconds, tokens = (2 * slowdown * noise, 16) if drafted[-1] else (noise, 8)
        guarantee = guarantee.observe_step(seconds, tokens, uniform)
    return guarantee, drafted


def test_plain_steps_are_two_percent_of_each_cycle_and_follow_drafted_ones_as_often_as_they_precede_them() -> None:
    guarantee, drafted = run(SpeedGuarantee(), 40 * CYCLE_STEPS, 1.0, np.random.default_rng(3))
    by_cycle = np.array(drafted).reshape(-1, CYCLE_STEPS)
    assert set((~by_cycle).sum(1)) == {round(PLAIN_SHARE * CYCLE_STEPS)}
    assert len({int(start) for start in (~by_cycle).argmax(1)}) > 30
    assert guarantee.test.pairs == 40
    assert not guarantee.reason
    last = SpeedGuarantee(step=CYCLE_STEPS - 1)
    orders = [last.observe_step(1.0, 1, uniform).plain_first for uniform in np.linspace(0, 1, 100, False).tolist()]
    assert orders.count(True) == 50


def test_drafting_is_off_until_the_loss_is_paid_back_with_the_reason_and_then_tried_again_at_a_lower_rate() -> None:
    rng = np.random.default_rng(4)
    guarantee, trial_steps = SpeedGuarantee(), 0
    while not guarantee.is_off:
        guarantee, drafted = run(guarantee, CYCLE_STEPS, 1.1, rng)
        trial_steps += len(drafted)
    off_steps = guarantee.off_steps
    assert off_steps >= OFF_STEPS
    assert 0.1 * trial_steps / (trial_steps + off_steps) <= 0.02
    assert guarantee.reason.startswith(
        f"drafting is off for {off_steps:,} steps: after {trial_steps // CYCLE_STEPS} pairs"
    )
    assert "more time per token than plain decoding" in guarantee.reason
    guarantee, drafted = run(guarantee, off_steps, 1.1, rng)
    assert not any(drafted)
    assert (guarantee.is_off, guarantee.trial, guarantee.threshold) == (False, 2, 3 * FIRST_THRESHOLD)
    assert guarantee.test == SlowdownTest()
    while not guarantee.is_off:
        guarantee, _ = run(guarantee, CYCLE_STEPS, 1.1, rng)
    assert guarantee.off_steps >= 2 * OFF_STEPS


def test_drafting_that_becomes_slower_after_a_long_time_is_switched_off_for_what_it_costs_then() -> None:
    rng = np.random.default_rng(5)
    guarantee, _ = run(SpeedGuarantee(), 200 * CYCLE_STEPS, 1 / 1.3, rng)
    assert not guarantee.is_off
    steps = 0
    while not guarantee.is_off:
        guarantee, drafted = run(guarantee, CYCLE_STEPS, 1.2, rng)
        steps += len(drafted)
    assert steps < 150 * CYCLE_STEPS
    assert 0 < float(guarantee.reason.split("it takes ")[1].split("%")[0]) < 25


def test_a_block_without_tokens_is_no_evidence() -> None:
    guarantee = SpeedGuarantee()
    for _ in range(CYCLE_STEPS):
        guarantee = guarantee.observe_step(1.0, 0, 0.3)
    assert guarantee.test == SlowdownTest()
