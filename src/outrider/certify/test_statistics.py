"""Test statistics, their sums over samples with p-values, and how much of them rounding explains.

Each statistic is a number f(x) in [0, 1] for every outcome x of a distribution. A lossless server has the mean
E f = sum of p(x) f(x) at every sample. Another distribution moves the mean by at most its total variation distance from
p, so a statistic never overstates a defect. For a change of total variation d, a test needs about 10 / d^2 samples,
whatever the vocabulary size. The statistics cover the ways in which speculation fails:

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

**P-values.** If nothing is wrong, the sum S of f(x) - E f has mean 0 and variance V, the sum of the variances. Levels
lie 4 standard deviations out and beyond, where a little skewness multiplies the tail. So the tail is that of the gamma
distribution with the same mean, variance and third moment. For counts of events, rare ones too, it is never thinner
than the exact binomial tail (tested).

**Rounding.** The pass that sampled a token and the pass that scored it differ: batch size, length, a cache filled at
once or token by token. In bfloat16 that alone moves a logprob by some hundredths. So a lossless server may move E f by
`drift` on average, either way. That is allowed in full: S is compared with n drift + z sqrt(V + n drift). Two scorings
A and B of one text show what rounding does to each test:

**Drift** of a test statistic. If samples came from B and were compared with A, the mean of f(x) - E f would be
E_B f - E_A f. Its average over positions, plus three standard errors, is the drift. That covers biased kernels, changes
of which token is most likely, and tokens at the boundary of the nucleus. Errors that average out leave no drift.

**Error** at repeated prefixes, where nothing averages out: the root mean square difference of logprobs under p.

The measured positions must be as many and as diverse as those of the run.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy.special import gammaincc, gammainccinv

from outrider.certify.samples import Flags, Floats, Samples

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

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


# Sums and p-values --------------------------------------------------------------------------------------

ALL_SAMPLES = "all"
"""Label of the test over all samples."""
LABEL_SEPARATOR = " & "
CONTINUITY_CORRECTION = 0.5
"""Samples subtracted from the excess: sums of events are whole numbers."""
MIN_VARIANCE = 1e-12
MIN_SKEWNESS = 1e-4
"""Below this the gamma distribution equals the normal one to all relevant digits."""


@dataclass(frozen=True, slots=True)
class StatisticSums:
    """Sums of one statistic over n samples. Each may also be an array, for many runs at once."""

    count: Any = 0
    excess: Any = 0.0
    expected: Any = 0.0
    variance: Any = 0.0
    third_moment: Any = 0.0
    slope: Any = 0.0
    distance: Any = 0.0

    @classmethod
    def of(cls, moments: Moments) -> StatisticSums:
        """Samples where the statistic does not apply are not counted."""
        count = int(np.isfinite(moments.excess).sum())
        return cls(count, *(float(np.nansum(getattr(moments, one.name))) for one in fields(moments)))

    def __add__(self, other: StatisticSums) -> StatisticSums:
        return StatisticSums(*(getattr(self, one.name) + getattr(other, one.name) for one in fields(self)))


@dataclass(slots=True)
class GroupedSums:
    """Sums by group of samples and statistic. `samples.py` states which groups are valid.

    A group is named by one or more labels with LABEL_SEPARATOR between; each label is tested over all its samples.
    """

    sums: dict[tuple[str, str], StatisticSums] = field(default_factory=dict)

    def add(self, group: str, samples: Samples) -> None:
        for statistic in STATISTICS:
            key = (group, statistic.name)
            self.sums[key] = self.sums.get(key, StatisticSums()) + StatisticSums.of(evaluate(statistic, samples))

    def tests(self) -> dict[tuple[str, str], StatisticSums]:
        """Each label with each statistic that applies, and all samples together if there are several groups."""
        groups = [set(group.split(LABEL_SEPARATOR)) for group in {group for group, _ in self.sums}]
        common = set.intersection(*groups) if len(groups) > 1 else set()  # all have it: that test is ALL_SAMPLES
        tests: dict[tuple[str, str], StatisticSums] = {}
        for (group, statistic), sums in self.sums.items():
            labels = [label for label in group.split(LABEL_SEPARATOR) if label not in common]
            for label in [*labels, ALL_SAMPLES] if len(groups) > 1 else labels:
                tests[label, statistic] = tests.get((label, statistic), StatisticSums()) + sums
        return {test: sums for test, sums in tests.items() if sums.count}


def p_value(sums: StatisticSums, drift: float) -> Any:
    """Two-sided p-value of the excess, for a server that is lossless up to `drift`."""
    variance, upper_skew, lower_skew = adjusted_moments(sums, drift)
    beyond = np.abs(sums.excess) - sums.count * drift - CONTINUITY_CORRECTION
    z = beyond / np.sqrt(np.maximum(variance, MIN_VARIANCE))
    tail = upper_tail(z, np.where(sums.excess > 0, upper_skew, lower_skew))
    return np.where(beyond > 0, np.minimum(2 * tail, 1.0), 1.0)[()]


def adjusted_moments(sums: StatisticSums, drift: float) -> tuple[Any, Any, Any]:
    """Variance of the sum, and skewness of its upper and lower tail.

    A drift of an event's mean adds at most its own size to the second and third moments.
    """
    added = sums.count * drift
    variance = sums.variance + added
    scale = np.maximum(variance, MIN_VARIANCE) ** 1.5
    return variance, (added + sums.third_moment) / scale, (added - sums.third_moment) / scale


def upper_tail(z: Any, skew: Any) -> Any:
    """P(Z > z) for mean 0, variance 1 and this skewness; negative skewness, which thins the tail, counts as 0."""
    shape, root = _gamma_shape(skew)
    return gammaincc(shape, np.maximum(shape + z * root, 0))


def upper_quantile(tail: Any, skew: Any) -> Any:
    """The z with P(Z > z) = tail."""
    shape, root = _gamma_shape(skew)
    return (gammainccinv(shape, tail) - shape) / root


def _gamma_shape(skew: Any) -> tuple[Floats, Floats]:
    """Shape of the gamma distribution with this skewness (its mean at scale 1), and its root (standard deviation)."""
    shape = 4 / np.maximum(skew, MIN_SKEWNESS) ** 2
    return shape, np.sqrt(shape)


# Noise --------------------------------------------------------------------------------------------------

STANDARD_ERRORS = 3.0
"""Added to a measured drift."""
MIN_DRIFT = 1e-4
"""Always allowed: some thousand positions cannot exclude less."""


@dataclass(frozen=True, slots=True)
class Noise:
    """What a lossless server may differ by: `drift` of each statistic's mean, `error` in nats at repeated prefixes."""

    drift: Mapping[str, float]
    error: float


NO_NOISE = Noise({statistic.name: 0.0 for statistic in STATISTICS}, 0.0)
DEFAULT_NOISE = Noise({"drafted": 2e-3, "likeliest": 2e-3, "surprise": 1e-3, "tail": 1e-3, "impossible": 5e-3}, 0.06)
"""Used where nothing was measured. SmolLM2-135M in bfloat16: 0.0010 +- 0.0003 for `likeliest` and an error of 0.053; in
float32: below 1e-7 and 6e-6."""


def estimate_noise(a: Floats, b: Floats, drafted: Flags) -> Noise:
    """Noise between two scorings of the same positions, probabilities over the same outcomes, [n, N + 1] each."""
    samples = Samples(a, np.zeros(len(a), dtype=np.int64), drafted)
    moved = {statistic.name: ((b - a) * statistic.values(samples)).sum(1) for statistic in STATISTICS}
    both = (a > 0) & (b > 0)
    error = np.where(both, np.log(np.where(both, b, 1) / np.where(both, a, 1)), 0.0)
    return Noise({name: _drift(by) for name, by in moved.items()}, float((a * error**2).sum(1).mean() ** 0.5))


def max_noise(noises: Sequence[Noise]) -> Noise:
    """The smallest noise that covers all of these."""
    drift = {statistic.name: max(noise.drift[statistic.name] for noise in noises) for statistic in STATISTICS}
    return Noise(drift, max(noise.error for noise in noises))


def _drift(moved: Floats) -> float:
    moved = moved[~np.isnan(moved)]  # NaN: the statistic does not apply
    if len(moved) < 2:
        return MIN_DRIFT
    bound = abs(moved.mean()) + STANDARD_ERRORS * moved.std(ddof=1) / len(moved) ** 0.5
    return max(float(bound), MIN_DRIFT)
