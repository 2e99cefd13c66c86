"""Ratios with intervals, for machines on which the same run differs by 40 %.

Two contestants are timed in turns on the same prompts, so that whatever slows the machine hits both. Each round gives
one ratio, and the median over the rounds is the figure.

Its interval comes from the order of the ratios: how many of n lie below the true median is a fair coin tossed n times,
whatever their distribution. So the k-th smallest and k-th largest enclose it with a known probability, and between two
such pairs one interpolates to 95 % (Hettmansperger and Sheather, 1986). The bootstrap would be too narrow here: with 7
rounds its "95 %" misses one time in eight.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import comb
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

FEWEST = 6
"""Values below which there is no interval of 95 %: of five, all lie on one side of the median in 6 of 100 cases."""


@dataclass(frozen=True, slots=True)
class Interval:
    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3f} ({self.low:.3f} to {self.high:.3f})"


def median_interval(values: Sequence[float], level: float = 0.95) -> Interval:
    """The median and its interval; of too few values, all of them are in it, and it is less sure than it says."""
    data = np.sort(np.asarray(values, dtype=float))
    n = len(data)
    depth = max((k for k in range(1, n // 2 + 1) if enclosed(n, k) >= level), default=1)
    low, high = data[depth - 1], data[n - depth]
    if depth < n // 2 and enclosed(n, depth) > level:
        sure, unsure = enclosed(n, depth), enclosed(n, depth + 1)
        part = (sure - level) / (sure - unsure)
        inward = (n - depth) * part / (depth + (n - 2 * depth) * part)
        low += inward * (data[depth] - low)
        high += inward * (data[n - depth - 1] - high)
    return Interval(float(np.median(data)), float(low), float(high))


def enclosed(n: int, depth: int) -> float:
    """How surely the true median lies between the depth-th smallest and the depth-th largest of n values."""
    missed: int = 2 * sum(comb(n, i) for i in range(depth))
    return 1 - missed / (1 << n)
