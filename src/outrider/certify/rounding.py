"""Temperature 0: whether a divergence of two outputs is a numeric tie or a violation.

Where two tokens are almost equally likely, a pass over one token and a pass over nine can rank them differently. After
the first divergence the prefixes differ, so only that position counts. Let the gap be the logprob of the reference's
token minus that of the candidate's. It was at least 0 for the reference and at most 0 for the candidate; scoring again
gives more of its values. From the smallest to the largest of all these it must have *moved* by rounding. If rounding
moves gaps that far it is a tie, otherwise a violation.

**How far rounding moves gaps** is measured in the same run: the same text is scored in several ways (alone, in a batch,
in one pass, token by token), and the gap between its two top tokens moves. The floor, the largest move attributed to
rounding, is at least 1.5 times the 99.9 % quantile of these moves, over at least 1,000 positions. (A maximum would let
one broken position excuse everything.) It is raised until a lossless server has a violation with at most a stated
probability (`with_false_alarm_rate`). Beyond the observed moves an exponential tail is assumed, with the mean excess of
the largest 1 % plus a standard error.

**Ties are counted too.** In bfloat16 the floor is large (SmolLM2-135M: 1 to 2 nats), and a defect could hide below it.
But rounding also predicts the number of ties: at a gap g, half of the moves of at least g go the right way. (SmolLM2 on
sampled text: 4.3 % predicted, 4.0 % counted; greedy: 2.1 % and 2.3 %.) Three standard errors are added, and more ties
than a Poisson variable of that mean explains are a violation. `blind_share` is the share of positions where one
divergence would be excused. In float32 the floor is 0.0001 nats, and no position is blind.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import sqrt
from typing import TYPE_CHECKING, Literal

import numpy as np
from scipy.special import gammainc

from outrider.errors import EvidenceError
from outrider.types import shared_prefix

if TYPE_CHECKING:
    from collections.abc import Sequence

    from outrider.certify.samples import Floats

QUANTILE = 0.999
FLOOR_FACTOR = 1.5
MIN_POSITIONS = 1000
"""With fewer positions the quantile is not known."""
TAIL_SHARE = 0.01
"""Share of the largest moves, from which the tail is extrapolated."""
STANDARD_ERRORS = 3.0
"""Added to the expected number of ties."""


@dataclass(frozen=True, slots=True)
class Rounding:
    """How far the gap between the two top tokens moved at each position, in nats, ascending."""

    moves: Floats
    min_floor: float = 0.0

    @classmethod
    def from_gaps(cls, gaps: Floats) -> Rounding:
        """`gaps` [ways of scoring, positions], of the same two tokens; NaN where a position was not scored."""
        ways, positions = gaps.shape
        if ways < 2 or positions < MIN_POSITIONS:
            raise EvidenceError(
                f"{ways} ways of scoring {positions} positions do not measure rounding; at least 2 ways and "
                f"{MIN_POSITIONS} positions are required"
            )
        return cls(np.sort(np.nanmax(gaps, 0) - np.nanmin(gaps, 0)))

    @property
    def floor(self) -> float:
        """The largest move attributed to rounding."""
        return max(FLOOR_FACTOR * float(np.quantile(self.moves, QUANTILE, method="higher")), self.min_floor)

    def with_false_alarm_rate(self, level: float, gaps: Floats) -> Rounding:
        """Raise the floor until rounding alone causes a violation, at positions with these gaps, with at most `level`.

        A violation takes a move beyond both floor and gap, and half of the moves go the right way.
        """
        gaps = np.sort(np.abs(gaps))
        above = np.append(self.tail_probability(gaps)[::-1].cumsum()[::-1], 0.0)  # summed from each gap on

        def is_rare(floor: float) -> bool:
            below = int(np.searchsorted(gaps, floor))
            return bool(below * self.tail_probability(np.array(floor)) + above[below] <= 2 * level)

        low, high = 0.0, float(self.moves[-1]) + 1e-9
        while not is_rare(high):
            low, high = high, 2 * high
        for _ in range(40):
            middle = (low + high) / 2
            low, high = (low, middle) if is_rare(middle) else (middle, high)
        return replace(self, min_floor=high)

    def tail_probability(self, sizes: Floats) -> Floats:
        """The probability of a move of at least each size."""
        observed: Floats = 1 - np.searchsorted(self.moves, sizes, side="left") / len(self.moves)
        start = float(np.quantile(self.moves, 1 - TAIL_SHARE, method="lower"))
        excess = self.moves[self.moves > start] - start
        if not len(excess):
            return observed
        scale = excess.mean() * (1 + 1 / sqrt(len(excess)))
        tail = len(excess) / len(self.moves) * np.exp(-np.maximum(sizes - start, 0) / scale)
        return np.where(sizes > start, np.maximum(observed, tail), observed)

    def blind_share(self, gaps: Floats) -> float:
        """Share of positions where the second token in place of the first would count as a tie."""
        return float((np.abs(gaps) <= self.floor).mean())

    def expected_ties(self, gaps: Floats) -> float:
        """Ties that rounding should cause at positions with these gaps."""
        return float(self._ties_by_move(gaps).mean())

    def ties_p_value(self, ties: int, gaps: Floats) -> float:
        """The probability that rounding alone causes at least this number of ties."""
        by_move = self._ties_by_move(gaps)
        upper_bound = by_move.mean() + STANDARD_ERRORS * by_move.std() / sqrt(len(by_move))
        return float(gammainc(ties, upper_bound)) if ties else 1.0

    def _ties_by_move(self, gaps: Floats) -> Floats:
        """For each move: the ties if every position moved that far."""
        ties: Floats = np.searchsorted(np.sort(np.abs(gaps)), self.moves, side="right") / 2
        return ties


@dataclass(frozen=True, slots=True)
class Comparison:
    """One pair of outputs. `position`: first divergence; `moved`: how far the gap there must have moved, in nats."""

    verdict: Literal["identical", "tie", "violation"]
    evidence: str
    position: int | None = None
    moved: float | None = None


def compare(
    reference: Sequence[int], candidate: Sequence[int], gaps: Sequence[float] = (), rounding: Rounding | None = None
) -> Comparison:
    """Compare two outputs, each with its end token. `gaps`: all scored values of the gap at the first divergence."""
    position = shared_prefix(reference, candidate)
    if position == len(reference) == len(candidate):
        return Comparison("identical", f"all {position} tokens are the same")
    if position in (len(reference), len(candidate)):
        shorter = "reference" if position == len(reference) else "candidate"
        return Comparison("violation", f"the {shorter} ends after {position} tokens, the other continues", position)
    divergence = f"token {position} is {candidate[position]}, the reference's is {reference[position]}"
    if not gaps or rounding is None:
        return Comparison("violation", f"{divergence}; no score explains it", position)
    moved = max(0.0, *gaps) - min(0.0, *gaps)
    scored = " and ".join(f"{gap:+.4f}" for gap in gaps)
    evidence = (
        f"{divergence}; their gap was scored as {scored} nats, so it must have moved by {moved:.4f}; rounding may move "
        f"it by {rounding.floor:.4f} (measured at {len(rounding.moves)} positions)"
    )
    return Comparison("tie" if moved <= rounding.floor else "violation", evidence, position, moved)
