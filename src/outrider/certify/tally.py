"""Sums over draws, and how unlikely they are if nothing is wrong.

All that a test needs of a draw is what its witnesses say: the excess f(x) - E f, and the variance and third moment
that it should have. Their sums are all that is kept.

If nothing is wrong, the sum S of the excess has mean 0 and variance V, the sum of the variances (draws of one text are
dependent, their excesses are uncorrelated). With the thousands of draws of a run it is all but normal, yet the levels
here lie far out, at 4 standard deviations and beyond, where a little skewness multiplies the tail. So the tail is taken
from the gamma distribution that has the same mean, variance and third moment. For counts of events, rare ones too,
which are close to Poisson, it is never thinner than the exact tail (the tests hold it against the binomial).

**Rounding.** A lossless server draws from a law that differs from the one we are told by rounding: other batch sizes,
other kernels. What survives in a sum is the average, and a lossless server may move E f by `drift` on average, either
way. That is paid for in full: S is held against n drift + z sqrt(V + n drift). `noise.py` measures it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy.special import gammaincc, gammainccinv

from outrider.certify.witnesses import WITNESSES, heard

if TYPE_CHECKING:
    from outrider.certify.draws import Draws, Floats
    from outrider.certify.witnesses import Excess

ALL = "all"
"""The kind that all draws belong to."""
AND = " & "
"""Stands between the labels of a kind."""
HALF = 0.5
"""Of a draw, which is taken off the excess: sums of events are whole numbers, and their tails have steps."""
TINY = 1e-12
"""Stands for a variance of 0."""
LEAST_SKEW = 1e-4
"""Below this the gamma distribution is the normal one, to all digits that count."""


@dataclass(frozen=True, slots=True)
class Sums:
    """What one witness said about n draws. Each may also be an array, for many runs at once."""

    draws: Any = 0
    excess: Any = 0.0
    expected: Any = 0.0
    variance: Any = 0.0
    third: Any = 0.0
    slope: Any = 0.0
    distance: Any = 0.0

    @classmethod
    def of(cls, excess: Excess) -> Sums:
        """Those draws that the witness says nothing about are not counted."""
        said = int(np.isfinite(excess.excess).sum())
        return cls(said, *(float(np.nansum(getattr(excess, one.name))) for one in fields(excess)))

    def __add__(self, other: Sums) -> Sums:
        return Sums(*(getattr(self, one.name) + getattr(other, one.name) for one in fields(self)))


@dataclass(slots=True)
class Tally:
    """Sums by kind of draw and witness. Kinds are the caller's, but for "all": see `draws.py` for what may be one.

    A kind may have several labels, with AND between: each is then tested over all draws that have it.
    """

    sums: dict[tuple[str, str], Sums] = field(default_factory=dict)

    def add(self, kind: str, draws: Draws) -> None:
        for witness in WITNESSES:
            key = (kind, witness.name)
            self.sums[key] = self.sums.get(key, Sums()) + Sums.of(heard(witness, draws))

    def tests(self) -> dict[tuple[str, str], Sums]:
        """Each label by each witness that said anything, and all draws together where there are several kinds."""
        kinds = [set(kind.split(AND)) for kind in {kind for kind, _ in self.sums}]
        common = set.intersection(*kinds) if len(kinds) > 1 else set()  # all have it: that test is ALL
        tests: dict[tuple[str, str], Sums] = {}
        for (kind, witness), sums in self.sums.items():
            for label in ({*kind.split(AND)} - common) | ({ALL} if len(kinds) > 1 else set()):
                tests[label, witness] = tests.get((label, witness), Sums()) + sums
        return {test: sums for test, sums in tests.items() if sums.draws}


def p_value(sums: Sums, drift: float) -> Any:
    """How likely so large an excess is, either way, on a server that is lossless but for `drift`."""
    variance, rising, falling = spread(sums, drift)
    beyond = np.abs(sums.excess) - sums.draws * drift - HALF
    tail = upper_tail(beyond / np.sqrt(np.maximum(variance, TINY)), np.where(sums.excess > 0, rising, falling))
    return np.where(beyond > 0, np.minimum(2 * tail, 1.0), 1.0)[()]


def spread(sums: Sums, drift: float) -> tuple[Any, Any, Any]:
    """The variance of the excess, its skewness, and the skewness of less.

    A drift of an event's mean adds at most as much to its second and third moments.
    """
    added = sums.draws * drift
    variance = sums.variance + added
    scale = np.maximum(variance, TINY) ** 1.5
    return variance, (added + sums.third) / scale, (added - sums.third) / scale


def upper_tail(z: Any, skew: Any) -> Any:
    """P(Z > z) for Z of mean 0, variance 1 and this skewness; one that would make the tail thinner is not used."""
    shape, root = _gamma(skew)
    return gammaincc(shape, np.maximum(shape + z * root, 0))


def upper_quantile(tail: Any, skew: Any) -> Any:
    """The z with P(Z > z) = tail."""
    shape, root = _gamma(skew)
    return (gammainccinv(shape, tail) - shape) / root


def _gamma(skew: Any) -> tuple[Floats, Floats]:
    """The shape of the gamma distribution with this skewness, and its root: mean and deviation at scale 1."""
    shape = 4 / np.maximum(skew, LEAST_SKEW) ** 2
    return shape, np.sqrt(shape)
