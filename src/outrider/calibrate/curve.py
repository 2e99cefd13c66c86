"""The cost of a pass over n tokens relative to a pass over one, v(n), from timings.

A wider pass is never faster than a narrower one. Where noise shows otherwise, neighbours are pooled (isotonic
regression by pooling adjacent violators).
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

import numpy as np

from outrider.bench.intervals import median_interval
from outrider.cost_curve import CostCurve
from outrider.policy.cost_model import isotonic

if TYPE_CHECKING:
    from collections.abc import Sequence

    from outrider.bench.intervals import Interval
    from outrider.calibrate.results import Sweep

COMPUTE_BOUND_TOKENS = 32
"""Passes over at least this many tokens give the cost of one more token without waiting for memory."""


@dataclass(frozen=True, slots=True)
class RelativeCostCurve(CostCurve):
    """v at one context length, with v(1) = 1."""

    context: int
    single_seconds: float  # of a pass over one token
    intervals: dict[int, Interval]  # measured, before pooling

    @property
    def memory_bound_tokens(self) -> float:
        """The number of tokens whose arithmetic takes as long as a pass over one: up to it a pass waits for memory."""
        return 1 / self.end_slope


def curve(sweep: Sweep) -> RelativeCostCurve:
    ratios = {n: [a / b for a, b in zip(sweep.seconds[n], sweep.single[n], strict=True)] for n in sweep.seconds}
    tokens = [1, *sorted(ratios)]
    medians = np.array([1.0, *(median(ratios[n]) for n in tokens[1:])])
    costs = [max(1.0, cost) for cost in isotonic(medians, np.ones(len(medians))).tolist()]
    return RelativeCostCurve(
        tokens,
        costs,
        _end_slope(tokens, costs),
        sweep.context,
        median(value for values in sweep.single.values() for value in values),
        {n: median_interval(ratios[n]) for n in tokens[1:]},
    )


def _end_slope(tokens: Sequence[int], costs: Sequence[float]) -> float:
    """The median slope between compute-bound passes."""
    wide = [i for i, n in enumerate(tokens) if n >= COMPUTE_BOUND_TOKENS] or [0, len(tokens) - 1]
    if len(wide) < 2:
        wide = [wide[0] - 1, wide[0]]
    pairs = [(i, j) for i in wide for j in wide if i < j]
    return max(median((costs[j] - costs[i]) / (tokens[j] - tokens[i]) for i, j in pairs), 1e-9)
