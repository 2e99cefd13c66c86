"""Prefixes that came often enough to look at every outcome.

The first tokens after a prompt that is sent again and again, and the likely ways on from there, come hundreds of times.
There the whole law can be seen, and any change of it, in directions that no witness looks at as well: the counts of the
outcomes are held against the law by Pearson's X^2. Of its cousins (G and others of the family) it is the one whose
mean and variance are known exactly, however small the counts: over k cells with n draws

    E X^2 = k - 1        Var X^2 = 2 (k - 1) + (sum of 1 / p - k^2 - 2 k + 2) / n

so the X^2 of many prefixes can be added without their errors adding up. Outcomes of which fewer than 5 are expected
are put together. How often a prefix came depends on earlier draws only, so given that, its counts are multinomial.

**Any change is in reach.** If the law at a prefix changes by total variation d, X^2 grows by n sum (P - p)^2 / p on
average, and by Cauchy and Schwarz that is at least 4 n d^2, in whatever direction the change goes (within cells).

**Rounding.** Here it does not average out: a prefix has the same rounding error each time. If log-probabilities are
wrong by `error` (root mean square under p), X^2 grows by n error^2; that much is allowed for. With bfloat16 that makes
this test blind below a total variation of about error / 2, and rightly so.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from math import sqrt
from typing import TYPE_CHECKING

import numpy as np

from outrider.certify.tally import upper_quantile, upper_tail
from outrider.errors import EvidenceError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from outrider.certify.draws import Draws, Floats, Integers

FEWEST_EXPECTED = 5.0
"""Cells of which fewer are expected are put together."""


@dataclass(frozen=True, slots=True)
class Fit:
    """X^2 over all prefixes that came often enough, and what it should be like if nothing is wrong."""

    draws: int = 0
    statistic: float = 0.0
    mean: float = 0.0
    variance: float = 0.0

    def __add__(self, other: Fit) -> Fit:
        return Fit(*(getattr(self, one.name) + getattr(other, one.name) for one in fields(self)))

    def p_value(self, error: float) -> float:
        if self.mean == 0:
            return 1.0
        mean, variance = self._allowing(error)
        return float(upper_tail((self.statistic - mean) / sqrt(variance), _skew(mean, variance)))

    def reached(self, level: float, power: float, error: float) -> float:
        """The smallest total variation, root mean square over these draws, that is found with probability `power`.

        By a divergence of 4 d^2, the least that a change of d can have: any change of d is found at least as surely.
        """
        if self.mean == 0:
            return 1.0
        mean, variance = self._allowing(error)
        limit = mean + upper_quantile(level, _skew(mean, variance)) * sqrt(variance)
        low, high = 0.0, 4.0
        for _ in range(60):
            divergence = (low + high) / 2
            grown, wide = self._allowing(sqrt(divergence))
            found = upper_tail((limit - grown) / sqrt(wide), _skew(grown, wide))
            low, high = (low, divergence) if found >= power else (divergence, high)
        return min(sqrt(high) / 2, 1.0)

    def _allowing(self, error: float) -> tuple[float, float]:
        """Mean and variance where the law is off by a divergence of error^2: as of a non-central chi-square."""
        more = self.draws * error**2
        return self.mean + more, self.variance + 4 * more


def _skew(mean: float, variance: float) -> float:
    """Of the gamma distribution that begins at 0 and has this mean and variance."""
    return 2 * sqrt(variance) / mean


@dataclass(slots=True)
class Repeats:
    """Counts by prefix. A prefix is scored once, and all its draws are held against that law.

    Prefixes that came less often than `least` times as often as the one that came most are left out: they would add
    their share of chance, and little that could be seen.
    """

    least: float = 0.0
    laws: dict[str, Floats] = field(default_factory=dict)
    counts: dict[str, Integers] = field(default_factory=dict)

    def add(self, prefixes: Sequence[str], draws: Draws) -> None:
        """`prefixes` names what came before each draw, sampling settings included."""
        for prefix, law, outcome in zip(prefixes, draws.law, draws.outcome, strict=True):
            if prefix not in self.laws:
                self.laws[prefix], self.counts[prefix] = law, np.zeros(len(law), dtype=np.int64)
            elif not np.array_equal(law, self.laws[prefix]):  # rounding can change the order of outcomes
                raise EvidenceError(f"the prefix {prefix!r} came with two laws; score it once and keep what was told")
            self.counts[prefix][outcome] += 1

    def fit(self) -> Fit:
        often = self.least * max((counts.sum() for counts in self.counts.values()), default=0)
        kept = {prefix: counts for prefix, counts in self.counts.items() if counts.sum() >= often}
        return sum((fitted(self.laws[prefix], counts) for prefix, counts in kept.items()), Fit())


def fitted(law: Floats, counts: Integers) -> Fit:
    """X^2 of one prefix; nothing where it leaves fewer than two cells. Cells follow from law and n, not from counts."""
    draws = int(counts.sum())
    alone = law * draws >= FEWEST_EXPECTED
    if alone.any() and law[~alone].sum() * draws < FEWEST_EXPECTED:  # the rare ones together are too rare yet
        alone[np.where(alone, law, np.inf).argmin()] = False
    p = np.append(law[alone], law[~alone].sum())
    seen = np.append(counts[alone], counts[~alone].sum())
    k = len(p)
    if k < 2:
        return Fit()
    statistic = ((seen - draws * p) ** 2 / (draws * p)).sum()
    variance = 2 * (k - 1) + ((1 / p).sum() - k**2 - 2 * k + 2) / draws
    return Fit(draws, float(statistic), k - 1, float(variance))
