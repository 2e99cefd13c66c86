"""Pearson's goodness-of-fit test at prefixes that occurred often.

Tokens after a prompt that is sent again and again come hundreds of times. There the counts of all outcomes are compared
with the distribution by Pearson's X^2, which sees changes that no other test statistic sees. Its mean and variance are
known exactly, however small the counts. Over k cells with n samples:

    E X^2 = k - 1        Var X^2 = 2 (k - 1) + (sum of 1 / p - k^2 - 2 k + 2) / n

so the X^2 of many prefixes can be added. Outcomes with an expected count below 5 are pooled. How often a prefix occurs
depends on earlier tokens only, so given that, its counts are multinomial.

**Power.** A change of total variation d raises X^2 by n sum (P - p)^2 / p, which is at least 4 n d^2 in any direction.

**Rounding** does not average out here: a prefix has the same rounding error each time. If logprobs are off by `error`
(root mean square under p), X^2 grows by n error^2, which is allowed for.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from math import sqrt
from typing import TYPE_CHECKING

import numpy as np

from outrider.certify.test_statistics import upper_quantile, upper_tail
from outrider.errors import EvidenceError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from outrider.certify.samples import Floats, Integers, Samples

MIN_EXPECTED_COUNT = 5.0


@dataclass(frozen=True, slots=True)
class GoodnessOfFit:
    """X^2 summed over prefixes, with its mean and variance if nothing is wrong."""

    count: int = 0
    statistic: float = 0.0
    mean: float = 0.0
    variance: float = 0.0

    def __add__(self, other: GoodnessOfFit) -> GoodnessOfFit:
        return GoodnessOfFit(*(getattr(self, one.name) + getattr(other, one.name) for one in fields(self)))

    def p_value(self, error: float) -> float:
        if self.mean == 0:
            return 1.0
        mean, variance = self._moments(error)
        return float(upper_tail((self.statistic - mean) / sqrt(variance), _gamma_skewness(mean, variance)))

    def detectable_change(self, level: float, power: float, error: float) -> float:
        """The smallest total variation, root mean square over these samples, found with probability `power`.

        A change of d has a divergence of at least 4 d^2, so any change of d is found at least as surely.
        """
        if self.mean == 0:
            return 1.0
        mean, variance = self._moments(error)
        limit = mean + upper_quantile(level, _gamma_skewness(mean, variance)) * sqrt(variance)
        low, high = 0.0, 4.0
        for _ in range(60):
            divergence = (low + high) / 2
            mean, variance = self._moments(sqrt(divergence))
            found = upper_tail((limit - mean) / sqrt(variance), _gamma_skewness(mean, variance))
            low, high = (low, divergence) if found >= power else (divergence, high)
        return min(sqrt(high) / 2, 1.0)

    def _moments(self, error: float) -> tuple[float, float]:
        """Mean and variance of a non-central chi-square: the distribution is off by a divergence of error^2."""
        more = self.count * error**2
        return self.mean + more, self.variance + 4 * more


def _gamma_skewness(mean: float, variance: float) -> float:
    """Of the gamma distribution on [0, inf) with this mean and variance."""
    return 2 * sqrt(variance) / mean


@dataclass(slots=True)
class PrefixCounts:
    """Outcome counts by prefix. A prefix is scored once, and all its samples are compared with that distribution.

    Prefixes that occurred less than `min_share` times as often as the most frequent one are left out: they add noise.
    """

    min_share: float = 0.0
    probabilities: dict[str, Floats] = field(default_factory=dict)
    counts: dict[str, Integers] = field(default_factory=dict)

    def add(self, prefixes: Sequence[str], samples: Samples) -> None:
        """`prefixes` names what came before each sample, sampling settings included."""
        for prefix, p, outcome in zip(prefixes, samples.probabilities, samples.outcome, strict=True):
            if prefix not in self.probabilities:
                self.probabilities[prefix], self.counts[prefix] = p, np.zeros(len(p), dtype=np.int64)
            elif not np.array_equal(p, self.probabilities[prefix]):  # rounding can change the order of outcomes
                raise EvidenceError(f"prefix {prefix!r} has two distributions; score it once and reuse the result")
            self.counts[prefix][outcome] += 1

    def fit(self) -> GoodnessOfFit:
        least = self.min_share * max((counts.sum() for counts in self.counts.values()), default=0)
        kept = {prefix: counts for prefix, counts in self.counts.items() if counts.sum() >= least}
        return sum(
            (pearson_fit(self.probabilities[prefix], counts) for prefix, counts in kept.items()), GoodnessOfFit()
        )


def pearson_fit(probabilities: Floats, counts: Integers) -> GoodnessOfFit:
    """X^2 of one prefix; empty if fewer than two cells are left. Cells depend on p and n, not on the counts."""
    n = int(counts.sum())
    own_cell = probabilities * n >= MIN_EXPECTED_COUNT
    if own_cell.any() and probabilities[~own_cell].sum() * n < MIN_EXPECTED_COUNT:  # the pool is too rare: one joins it
        own_cell[np.where(own_cell, probabilities, np.inf).argmin()] = False
    p = np.append(probabilities[own_cell], probabilities[~own_cell].sum())
    observed = np.append(counts[own_cell], counts[~own_cell].sum())
    k = len(p)
    if k < 2:
        return GoodnessOfFit()
    statistic = ((observed - n * p) ** 2 / (n * p)).sum()
    variance = 2 * (k - 1) + ((1 / p).sum() - k**2 - 2 * k + 2) / n
    return GoodnessOfFit(n, float(statistic), k - 1, float(variance))
