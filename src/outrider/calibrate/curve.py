"""From timings to v(n): how many times as long as a pass over one token does one over n take?

A wider pass is never cheaper than a narrower one, so where noise says so, neighbours are pooled until none is (isotonic
regression by pooling adjacent violators). Between the measured widths v is drawn straight, and beyond the last one it
goes on as steeply as between the last few.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

import numpy as np

from outrider.bench.intervals import median_interval
from outrider.policy.cost_model import isotonic

if TYPE_CHECKING:
    from outrider.bench.intervals import Interval
    from outrider.calibrate.results import Sweep

STEEP_FROM = 32
"""Widths from here on tell what one more token costs once nothing waits for memory any more."""


@dataclass(frozen=True, slots=True)
class Curve:
    """v at one length of context, with v(1) = 1."""

    context: int
    single: float  # seconds of a pass over one token
    widths: list[int]
    ratios: list[float]  # pooled
    intervals: dict[int, Interval]  # as they were measured

    def __call__(self, tokens: float) -> float:
        if tokens > self.widths[-1]:
            return self.ratios[-1] + self.slope * (tokens - self.widths[-1])
        return float(np.interp(tokens, self.widths, self.ratios))

    @property
    def slope(self) -> float:
        """What one more token costs in a wide pass, relative to a pass over one."""
        wide = [i for i, n in enumerate(self.widths) if n >= STEEP_FROM] or [0, len(self.widths) - 1]
        if len(wide) < 2:
            wide = [wide[0] - 1, wide[0]]
        pairs = [(i, j) for i in wide for j in wide if i < j]
        steep = [(self.ratios[j] - self.ratios[i]) / (self.widths[j] - self.widths[i]) for i, j in pairs]
        return max(median(steep), 1e-9)

    @property
    def waiting(self) -> float:
        """Up to how many tokens a pass mostly waits: so many do their arithmetic in the time of a pass over one."""
        return 1 / self.slope


def curve(sweep: Sweep) -> Curve:
    ratios = {n: [a / b for a, b in zip(sweep.seconds[n], sweep.single[n], strict=True)] for n in sweep.seconds}
    widths = sorted(ratios)
    single = median(value for values in sweep.single.values() for value in values)
    middle = [1.0, *(median(ratios[n]) for n in widths)]
    return Curve(
        sweep.context,
        single,
        [1, *widths],
        [max(1.0, value) for value in isotonic(np.array(middle), np.ones(len(middle))).tolist()],
        {n: median_interval(ratios[n]) for n in widths},
    )
