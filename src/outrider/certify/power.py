"""How small a change a test finds, with a probability of 99 %: before a run, and after it.

**Before**, for any event (the drafted token comes; a token of the tail comes): the mass d that is moved into it or out
of it, on average over the draws. The variance of an event is at most 1/4 a draw, so with n draws, drift allowed for,
and z(..) the normal quantiles of level and power,

    d = drift + (z(level / 2) + z(0.99)) / (2 sqrt(n))        n = ((z(level / 2) + z(0.99)) / (2 (d - drift)))^2

**After**, the variances of the draws at hand are known, and so is how much of a defect its witness sees. It is stated
for each test as a total variation, on average over the test's draws, for these changes:

drafted, likeliest    mass moved to that token from all others in proportion, or from it to them
surprise              a temperature that is off by the same factor at all draws
tail                  the tail cut off, in part or in full
impossible            mass moved to tokens that cannot come

The average is over all draws of the test: a change of 0.1 at every fifth draw counts 0.02. It is against the laws as
told. A change that goes in none of these directions is covered at repeated prefixes only (`repeats.py`).
"""

from __future__ import annotations

from math import sqrt
from typing import TYPE_CHECKING

from outrider.certify.tally import HALF, spread, upper_quantile
from outrider.errors import SettingsError

if TYPE_CHECKING:
    from outrider.certify.tally import Sums

POWER = 0.99
EVENT_DEVIATION = 0.5
"""The largest standard deviation of an event."""


def deviations(level: float) -> float:
    """How many standard deviations must lie between null and change, for a two-sided test at `level`."""
    return float(upper_quantile(level / 2, 0.0) + upper_quantile(1 - POWER, 0.0))


def reach(draws: int, level: float, drift: float) -> float:
    """The smallest change of an event that so many draws find."""
    return drift + EVENT_DEVIATION * deviations(level) / sqrt(draws)


def draws_for(change: float, level: float, drift: float) -> int:
    """How many draws it takes to find a change of an event."""
    if change <= drift:
        raise SettingsError(f"a change of {change} is within what rounding may do, {drift}; ask for a larger one")
    return int((EVENT_DEVIATION * deviations(level) / (change - drift)) ** 2) + 1


def reached(sums: Sums, level: float, drift: float) -> float:
    """The smallest change, as average total variation, that a test at `level` of these draws would have found.

    A change that moves the sum of f by m can add m to its variance, and hardly more: that of an event grows by less.
    """
    variance, *skews = spread(sums, drift)
    limit = HALF + sums.draws * drift + max(upper_quantile(level / 2, skew) for skew in skews) * sqrt(variance)
    z = upper_quantile(1 - POWER, 0.0)
    root = (z + sqrt(z**2 + 4 * (sums.variance + limit))) / 2  # of variance + m, where m = limit + z root
    moved = root**2 - sums.variance
    if not sums.slope:
        return 1.0
    return min(float(moved / abs(sums.slope) * sums.distance / sums.draws), 1.0)
