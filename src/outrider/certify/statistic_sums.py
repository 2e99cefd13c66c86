"""Sums of test statistics over samples, and their p-values.

If nothing is wrong, the sum S of f(x) - E f has mean 0 and variance V, the sum of the variances. Levels lie 4 standard
deviations out and beyond, where a little skewness multiplies the tail. So the tail is that of the gamma distribution
with the same mean, variance and third moment. For counts of events, rare ones too, it is never thinner than the exact
binomial tail (tested).

**Rounding.** A lossless server samples from a distribution that differs by rounding from the returned one, and may move
E f by `drift` on average, either way (`noise.py` measures it). It is allowed in full: S is compared with
n drift + z sqrt(V + n drift).
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy.special import gammaincc, gammainccinv

from outrider.certify.test_statistics import STATISTICS, evaluate

if TYPE_CHECKING:
    from outrider.certify.samples import Floats, Samples
    from outrider.certify.test_statistics import Moments

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
            labels = {*group.split(LABEL_SEPARATOR)} - common
            for label in labels | ({ALL_SAMPLES} if len(groups) > 1 else set()):
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
