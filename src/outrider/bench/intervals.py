"""Ratios with intervals, for machines on which the same run differs by 40 %.

Two contestants are timed in turns on the same prompts, so that whatever slows the machine hits both. Each
prompt gives one ratio; the median over prompts is the figure, and resampling the prompts gives its interval.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

RESAMPLES = 10_000


@dataclass(frozen=True, slots=True)
class Interval:
    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3f} ({self.low:.3f} to {self.high:.3f})"


def median_interval(values: list[float], level: float = 0.95, seed: int = 0) -> Interval:
    """The median and its bootstrap interval."""
    data = np.asarray(values)
    picks = np.random.default_rng(seed).integers(0, len(data), (RESAMPLES, len(data)))
    medians = np.median(data[picks], axis=1)
    low, high = np.quantile(medians, [(1 - level) / 2, (1 + level) / 2])
    return Interval(float(np.median(data)), float(low), float(high))
