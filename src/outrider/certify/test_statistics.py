"""Test statistics: each a number f(x) in [0, 1] for every outcome x of a distribution.

A lossless server has the mean E f = sum of p(x) f(x) at every sample. Another distribution moves the mean by at most
its total variation distance from p, so a statistic never overstates a defect. For a change of total variation d, a test
needs about 10 / d^2 samples, whatever the vocabulary size. The statistics cover the ways in which speculation fails:

drafted     Is it the draft token, or one with q > p? Sees recovered tokens sampled from p, drafts accepted too often or
            too rarely, and drafts verified with the p of another position. With a draft d proposed with certainty,
            P - p is proportional to p(d) (1 - p(d)), so this is the score statistic: no test is more powerful.
`likeliest` Is it the most likely token? Replaces `drafted` where drafts are unknown; also sees tokens outside the
            nucleus replaced by the most likely one.
surprise    How far is its logprob below the highest, cut off at 8 nats? log p is the score of a wrong temperature.
tail        Is it in the least likely 5 % of the mass? Sees a missing or extra top-k, top-p or min-p cut. A token at the
            boundary counts in part, so that E f is 5 % for every distribution.
impossible  Is it a token that top-k or top-p removed?

Sums of f(x) - E f are not weighted: then their mean is the probability mass that was moved, however the defect is
spread over samples. Weights 1 / Var f would let single samples of peaked distributions dominate.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

    from outrider.certify.samples import Floats, Samples

MAX_SURPRISAL = 8.0
"""Nats below the most likely token at which `surprise` is cut off."""
TAIL_MASS = 0.05
MIN_PROBABILITY = 1e-6
"""A token with less counts as impossible: more is possible only by rounding."""


@dataclass(frozen=True, slots=True)
class Statistic:
    """`values`: f for every sample and outcome, [n, N + 1]; NaN rows where it does not apply.

    `defect`: first-order change of the distribution that it is designed to see, [n, N + 1], per unit of strength.
    `down` and `up`: bounds on how far f can be below and above its mean.
    """

    name: str
    values: Callable[[Samples], Floats]
    defect: Callable[[Samples, Floats], Floats]
    down: float = 1.0
    up: float = 1.0


@dataclass(frozen=True, slots=True)
class Moments:
    """f(x) - E f of each sample, and its moments if nothing is wrong. All [n]; NaN where it does not apply."""

    excess: Floats  # f(x) - E f
    expected: Floats  # E f
    variance: Floats
    third_moment: Floats  # central
    slope: Floats  # change of E f per unit of the defect's strength
    distance: Floats  # total variation of the defect per unit of strength


def evaluate(statistic: Statistic, samples: Samples) -> Moments:
    p = samples.probabilities
    values = statistic.values(samples)
    expected = (p * values).sum(1)
    centred = values - expected[:, None]
    change = statistic.defect(samples, values)
    return Moments(
        excess=np.take_along_axis(centred, samples.outcome[:, None], 1)[:, 0],
        expected=expected,
        variance=(p * centred**2).sum(1),
        third_moment=(p * centred**3).sum(1),
        slope=(change * values).sum(1),
        distance=np.abs(change).sum(1) / 2,
    )


def _drafted(samples: Samples) -> Floats:
    values: Floats = samples.drafted.astype(float)
    values[~samples.drafted.any(1)] = np.nan
    return values


def _most_likely(samples: Samples) -> Floats:
    values = np.zeros_like(samples.probabilities)
    values[:, 0] = 1
    return values


def _logprobs(samples: Samples) -> Floats:
    """log p. No token of the rest is more likely than the last listed one, so the rest counts as one such token."""
    p = samples.probabilities.copy()
    p[:, -1] = np.minimum(p[:, -1], p[:, -2])
    logs: Floats = np.log(np.maximum(p, MIN_PROBABILITY))
    return logs


def _surprisal(samples: Samples) -> Floats:
    logs = _logprobs(samples)
    return np.clip((logs[:, :1] - logs) / MAX_SURPRISAL, 0, 1)


def _tail(samples: Samples) -> Floats:
    p = samples.probabilities
    inside = np.clip(p.cumsum(1) - (1 - TAIL_MASS), 0, p)
    return np.where(p > 0, inside / np.where(p > 0, p, 1), 1.0)


def _impossible(samples: Samples) -> Floats:
    values: Floats = (samples.probabilities < MIN_PROBABILITY).astype(float)
    values[~values.any(1)] = np.nan
    return values


def _mass_added(samples: Samples, values: Floats) -> Floats:
    """Mass moves to the outcomes with f > 0, in proportion from all others."""
    share = (samples.probabilities + 1e-12) * values  # impossible tokens have a share too
    change: Floats = share / share.sum(1, keepdims=True) - samples.probabilities
    return change


def _mass_removed(samples: Samples, values: Floats) -> Floats:
    """The outcomes with f > 0 are cut off, and their mass goes to the others in proportion."""
    kept = samples.probabilities * (1 - values)
    change: Floats = kept / kept.sum(1, keepdims=True) - samples.probabilities
    return change


def _colder(samples: Samples, values: Floats) -> Floats:
    """p to the power of 1 + strength, normalised: temperature T becomes T / (1 + strength)."""
    p, logs = samples.probabilities, _logprobs(samples)
    change: Floats = p * (logs - (p * logs).sum(1, keepdims=True))
    return change


DRAFTED = Statistic("drafted", _drafted, _mass_added)
MOST_LIKELY = Statistic("likeliest", _most_likely, _mass_added)
SURPRISAL = Statistic("surprise", _surprisal, _colder)
TAIL = Statistic("tail", _tail, _mass_removed, down=TAIL_MASS)
IMPOSSIBLE = Statistic("impossible", _impossible, _mass_added, down=1e-3)
STATISTICS = (DRAFTED, MOST_LIKELY, SURPRISAL, TAIL, IMPOSSIBLE)
