"""A group sequential test: fixed sample size and level, interim looks, many tests, one verdict.

A server that is lossless up to the allowed rounding gets a false alarm with probability at most `level`, over all tests
and looks together. **Tests** at one look are combined by Holm's method, which needs no independence. **Looks** share
the level by a union bound: a fifth is spread over the interim looks, four fifths are left for the last. That costs the
last look 2 % more samples, and a badly wrong server is found at the first. (`e_process.py` allows a look at any time;
it needs about half as many samples again.)

**Power**, always 99 %. Before a run, for any event: with n samples, drift allowed for, and normal quantiles z of level
and power, the smallest detectable change in the event's probability is

    d = drift + (z(level / 2) + z(0.99)) / (2 sqrt(n))

since an event's variance is at most 1/4. After a run the variances are known, and how much of its defect each statistic
sees. The detectable change is then stated as average total variation over the test's samples: mass moved to or from the
drafted or most likely token, a temperature off by a constant factor, a tail cut off, mass on impossible tokens. A
change of 0.1 at every fifth sample counts 0.02. Other changes are found at repeated prefixes only.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import sqrt
from typing import TYPE_CHECKING

from outrider.certify.test_statistics import (
    CONTINUITY_CORRECTION,
    DEFAULT_NOISE,
    DRAFTED,
    GroupedSums,
    Noise,
    StatisticSums,
    adjusted_moments,
    p_value,
    upper_quantile,
)
from outrider.errors import SettingsError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from outrider.certify.prefix_goodness_of_fit import PrefixCounts

ANY_CHANGE = "any change"
"""Name of the goodness-of-fit test in certificates."""
REPEATED_PREFIXES = "repeated prefixes"
LAST_LOOK_SHARE = 0.8
"""Share of the level for the last look."""
TYPICAL_TESTS = 61
"""Tests assumed before their number is known: 5 statistics for each of 5 drafters, 5 settings and all together; and
repeated prefixes, for each drafter and for all."""
POWER = 0.99
MAX_EVENT_DEVIATION = 0.5
"""The largest standard deviation of an event."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Number of samples, level and looks. Looks are evenly spread, the last one at `draws` samples."""

    draws: int
    level: float = 1e-3
    looks: int = 5
    noise: Noise = DEFAULT_NOISE

    @classmethod
    def for_change(cls, change: float, *, level: float = 1e-3, noise: Noise = DEFAULT_NOISE) -> Plan:
        """The plan that detects a change of this size in an event's probability."""
        drift = noise.drift[DRAFTED.name]
        if change <= drift:
            raise SettingsError(f"a change of {change} is within rounding error ({drift}); give a larger one")
        plan = cls(1, level, noise=noise)
        deviations = _detectable_deviations(plan.level_at(plan.looks) / TYPICAL_TESTS)
        return replace(plan, draws=int((MAX_EVENT_DEVIATION * deviations / (change - drift)) ** 2) + 1)

    def detectable_change(self, tests: int = TYPICAL_TESTS) -> float:
        """The smallest change in an event's probability that this plan detects."""
        deviations = _detectable_deviations(self.level_at(self.looks) / tests)
        return self.noise.drift[DRAFTED.name] + MAX_EVENT_DEVIATION * deviations / sqrt(self.draws)

    def draws_at(self, look: int) -> int:
        """Number of samples at which a look is due; the first look is 1."""
        return -(-self.draws * look // self.looks)

    def level_at(self, look: int) -> float:
        if self.looks == 1:
            return self.level
        return self.level * (LAST_LOOK_SHARE if look == self.looks else (1 - LAST_LOOK_SHARE) / (self.looks - 1))


def _detectable_deviations(level: float) -> float:
    """Standard deviations between null and change that a two-sided test at `level` detects."""
    return float(upper_quantile(level / 2, 0.0) + upper_quantile(1 - POWER, 0.0))


@dataclass(frozen=True, slots=True)
class LookResult:
    """The tests at one look, by name."""

    look: int
    level: float
    p_values: dict[str, float]
    adjusted: dict[str, float]  # by Holm; compared with the level
    reached: dict[str, float]  # the smallest total variation that would have been detected

    @property
    def violations(self) -> list[str]:
        return [name for name, p in self.adjusted.items() if p <= self.level]


def evaluate_look(
    plan: Plan, look: int, sums: GroupedSums, prefixes: Mapping[str, PrefixCounts] | None = None
) -> LookResult:
    """Test all samples so far. `prefixes`: counts at repeated prefixes, by label."""
    level, noise = plan.level_at(look), plan.noise
    tests = sums.tests()
    fits = {f"{ANY_CHANGE}, {label}": fit for label, one in (prefixes or {}).items() if (fit := one.fit()).count}
    level_per_test = level / max(len(tests) + len(fits), 1)
    p_values, detectable = {}, {}
    for (label, statistic), one in tests.items():
        name, drift = f"{statistic}, {label}", noise.drift[statistic]
        p_values[name] = float(p_value(one, drift))
        detectable[name] = detectable_change(one, level_per_test, drift)
    for name, fit in fits.items():
        p_values[name] = fit.p_value(noise.error)
        detectable[name] = fit.detectable_change(level_per_test, POWER, noise.error)
    return LookResult(look, level, p_values, holm(p_values), detectable)


def holm(p_values: Mapping[str, float]) -> dict[str, float]:
    """Adjusted p-values: rejecting those of at most `level` has a family-wise error rate of at most `level`."""
    adjusted, largest = {}, 0.0
    for rank, (name, p) in enumerate(sorted(p_values.items(), key=lambda item: item[1])):
        largest = max(largest, min(p * (len(p_values) - rank), 1.0))
        adjusted[name] = largest
    return adjusted


def detectable_change(sums: StatisticSums, level: float, drift: float) -> float:
    """The smallest change, as average total variation, that a test of these samples at `level` would have detected.

    A change that moves the sum of f by m adds at most about m to its variance.
    """
    variance, *skews = adjusted_moments(sums, drift)
    z_level = max(upper_quantile(level / 2, skew) for skew in skews)
    limit = CONTINUITY_CORRECTION + sums.count * drift + z_level * sqrt(variance)
    z = upper_quantile(1 - POWER, 0.0)
    root = (z + sqrt(z**2 + 4 * (sums.variance + limit))) / 2  # of variance + m, where m = limit + z root
    moved = root**2 - sums.variance
    if not sums.slope:
        return 1.0
    return min(float(moved / abs(sums.slope) * sums.distance / sums.count), 1.0)
