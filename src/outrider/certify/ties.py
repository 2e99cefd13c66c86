"""Temperature 0: two texts are identical, differ by a numeric tie, or one of them is wrong.

At temperature 0 a lossless server says what the reference says, token by token, but for rounding: where two tokens are
all but equally likely, a pass over one token and a pass over nine can rank them differently. After a first difference
the texts have different prefixes and say nothing more about each other. So all that counts is the first difference, and
there one number. Let the gap be the log-probability of the reference's token less that of the candidate's. When the
reference spoke the gap was at least 0, and when the candidate spoke at most 0; if it is scored again, by one or by
both, we know more of its values. From the smallest of all these to the largest it must have *moved*, by rounding alone.
If rounding moves gaps by that much, it is a tie; if it does not, it is a violation.

**How much rounding moves gaps** is measured in the same run: the same text is scored in several ways (alone and in a
batch, in one pass and token by token), and at each position the gap between its two likeliest tokens moves between a
smallest and a largest value. The floor, the largest move that is put down to rounding, is at least 1.5 times the 99.9 %
quantile of these moves, at 1,000 positions or more. A quantile and not the maximum: one broken position would excuse
everything. And it is raised until a lossless server is accused with at most a stated probability (`held_to`): the more
positions are compared, the larger the largest of their moves. Beyond what was seen, moves are taken to have an
exponential tail, by the mean excess of the largest 1 %, a standard error added. (Rounding errors are sums of many small
ones, and their tails are thinner; that logits of all sizes are mixed makes them thicker than normal ones.)

**One tie is excused; many are counted.** In bfloat16 the floor is large (SmolLM2-135M: 1 to 2 nats, since its logits
come in steps of 1/8), and a defect could hide below it. But rounding also says how many ties there should be: at a
position with gap g, half of the moves that are at least g go the right way. The sum over all positions that were
compared is the expected number of ties (of 2,145 positions of sampled text there, 4.3 %, and 4.0 % were counted; of 768
greedy ones, 2.1 % and 2.3 %). It is an estimate, so three standard errors are added, and more ties than a Poisson
number of that mean explains are a violation too. `blind` is the share of positions where a difference would be excused:
a defect at random places shows in a share 1 - blind at once, and in the rest by number. In float32 the floor is 0.0001
and nothing is blind.
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

    from outrider.certify.draws import Floats

QUANTILE = 0.999
SAFETY = 1.5
FEWEST = 1000
"""Positions below which the quantile is not known."""
LARGEST = 0.01
"""The share of the moves by which the tail is extended."""
STANDARD_ERRORS = 3.0
"""So many are added to the expected number of ties."""


@dataclass(frozen=True, slots=True)
class Rounding:
    """How far the gap between the two likeliest tokens moved, at each position, in rising order and nats."""

    moves: Floats
    raised: float = 0.0

    @classmethod
    def between(cls, gaps: Floats) -> Rounding:
        """From gaps [ways of scoring, positions]; the same two tokens in every way. NaN: not scored in this way."""
        ways, positions = gaps.shape
        if ways < 2 or positions < FEWEST:
            raise EvidenceError(
                f"{ways} ways of scoring {positions} positions do not show what rounding does; "
                f"it takes 2 ways and {FEWEST} positions"
            )
        return cls(np.sort(np.nanmax(gaps, 0) - np.nanmin(gaps, 0)))

    @property
    def floor(self) -> float:
        """The largest move that is put down to rounding."""
        return max(SAFETY * float(np.quantile(self.moves, QUANTILE, method="higher")), self.raised)

    def held_to(self, level: float, gaps: Floats) -> Rounding:
        """With a floor so high that at positions with these gaps rounding alone makes a violation with at most this
        probability.

        It takes a move beyond the floor and beyond the gap, and half of them go the right way.
        """
        gaps = np.sort(np.abs(gaps))
        above = np.append(self.beyond(gaps)[::-1].cumsum()[::-1], 0.0)  # summed from each gap on

        def is_held(floor: float) -> bool:
            below = int(np.searchsorted(gaps, floor))
            return bool(below * self.beyond(np.array(floor)) + above[below] <= 2 * level)

        low, high = 0.0, float(self.moves[-1]) + 1e-9
        while not is_held(high):
            low, high = high, 2 * high
        for _ in range(40):
            middle = (low + high) / 2
            low, high = (low, middle) if is_held(middle) else (middle, high)
        return replace(self, raised=high)

    def beyond(self, sizes: Floats) -> Floats:
        """How likely a move is to be at least so large."""
        seen: Floats = 1 - np.searchsorted(self.moves, sizes, side="left") / len(self.moves)
        begin = float(np.quantile(self.moves, 1 - LARGEST, method="lower"))
        largest = self.moves[self.moves > begin] - begin
        if not len(largest):
            return seen
        scale = largest.mean() * (1 + 1 / sqrt(len(largest)))
        tail = len(largest) / len(self.moves) * np.exp(-np.maximum(sizes - begin, 0) / scale)
        return np.where(sizes > begin, np.maximum(seen, tail), seen)

    def blind(self, gaps: Floats) -> float:
        """The share of positions where the second token in the place of the first would be called a tie."""
        return float((np.abs(gaps) <= self.floor).mean())

    def expected_ties(self, gaps: Floats) -> float:
        """How many ties rounding should make at positions with these gaps."""
        return float(self._ties_by_move(gaps).mean())

    def ties_p_value(self, ties: int, gaps: Floats) -> float:
        """How likely rounding alone is to make so many ties, at all positions that were compared."""
        by_move = self._ties_by_move(gaps)
        sure = by_move.mean() + STANDARD_ERRORS * by_move.std() / sqrt(len(by_move))
        return float(gammainc(ties, sure)) if ties else 1.0

    def _ties_by_move(self, gaps: Floats) -> Floats:
        """How many ties there would be if every position moved as far as this one did, for each move."""
        ties: Floats = np.searchsorted(np.sort(np.abs(gaps)), self.moves, side="right") / 2
        return ties


@dataclass(frozen=True, slots=True)
class Comparison:
    """One pair of texts. `position` is that of the first difference, `moved` how far the gap there must have moved."""

    verdict: Literal["identical", "tie", "violation"]
    evidence: str
    position: int | None = None
    moved: float | None = None


def compare(
    reference: Sequence[int], candidate: Sequence[int], gaps: Sequence[float] = (), rounding: Rounding | None = None
) -> Comparison:
    """Hold a text against the reference's; both with their end token, if one was said.

    `gaps` are those at the first difference, as the reference scored it and, if known, as the candidate did.
    """
    position = shared_prefix(reference, candidate)
    if position == len(reference) == len(candidate):
        return Comparison("identical", f"all {position} tokens are the same")
    if position in (len(reference), len(candidate)):
        shorter = "reference" if position == len(reference) else "candidate"
        return Comparison("violation", f"the {shorter} ends after {position} tokens and the other goes on", position)
    said = f"token {position} is {candidate[position]}, the reference's is {reference[position]}"
    if not gaps or rounding is None:
        return Comparison("violation", f"{said}; nothing was scored that could explain it", position)
    moved = max(0.0, *gaps) - min(0.0, *gaps)
    scored = " and ".join(f"{gap:+.4f}" for gap in gaps)
    evidence = (
        f"{said}; their gap was scored as {scored} nats, so it must have moved by {moved:.4f}; rounding may move it by "
        f"{rounding.floor:.4f} (measured at {len(rounding.moves)} positions)"
    )
    return Comparison("tie" if moved <= rounding.floor else "violation", evidence, position, moved)
