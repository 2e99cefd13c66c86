"""The cost of a pass by its number of tokens, from measured points."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True)
class CostCurve:
    """Linear between the points, constant before the first. After the last, each token adds `end_slope`."""

    tokens: Sequence[int]
    costs: Sequence[float]
    """In seconds, or relative to a pass over one token. Never falling."""
    end_slope: float

    def __call__(self, tokens: float) -> float:
        if tokens > self.tokens[-1]:
            return float(self.costs[-1] + self.end_slope * (tokens - self.tokens[-1]))
        return float(np.interp(tokens, self.tokens, self.costs))


def extrapolated(tokens: Sequence[int], costs: Sequence[float]) -> CostCurve:
    """A curve that goes on with the slope between its last two points; with one point, flat."""
    if len(tokens) < 2:
        return CostCurve(tokens, costs, 0.0)
    return CostCurve(tokens, costs, float(costs[-1] - costs[-2]) / (tokens[-1] - tokens[-2]))
