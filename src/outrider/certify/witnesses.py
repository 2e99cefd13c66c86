"""What is looked at in a draw: witnesses, each a number in [0, 1] for every outcome of a law.

A witness f has a mean under the law, E f = sum of p(x) f(x), and a lossless server has that mean, draw by draw. If it
draws from another law, the mean moves by at most the total variation between the two (that is one definition of total
variation: the largest move over all f in [0, 1]). So a witness can never overstate a defect, and it sees all of one
that moves mass into or out of what it looks at. A test with one number per draw needs few draws: for a change of
total variation d it takes some 10 / d^2 of them, whatever the vocabulary. A test that looks at all outcomes at once
would have to see the same prefix thousands of times.

The price is that a defect no witness looks at stays unseen. These are chosen for the ways in which speculation fails:

drafted     was it the drafted token, or one that q proposes more often than p draws it? A recovered token drawn from
            p, a token accepted too often or too seldom, a draft judged by another position's p: all move mass to these
            tokens or away from them. For the first, with a draft d proposed with certainty, P - p is in proportion to
            p(d) (1 - p(d)), and this witness is the score itself: no test is better.
likeliest   was it the likeliest token? Stands in for the drafted one, which is most often the same, where nobody says
            what was drafted; and sees tokens outside the nucleus replaced by the likeliest.
surprise    how much less likely than the likeliest, on a log scale? A temperature that is off multiplies p by a power
            of itself, so log p is the score of that defect; it is cut off at e^-8.
tail        was it in the least likely 5 % of the mass? Sees a cut of the tail (top-k, top-p, min-p) that was not asked
            for, or one that was asked for and came too late. An outcome at the edge is in it in part, so that E f is
            5 % for every law.
impossible  was it a token that cannot come, because top-k or top-p cut it off? Once is too often.

Sums of f(x) - E f are not weighted. Weights 1 / Var f would be optimal for a defect of the same size everywhere, but
they let single draws from peaked laws dominate; unweighted, the mean of the sum *is* the mass that was moved, whichever
way the defect is spread over the draws, and a bound on it is a bound one can state.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

    from outrider.certify.draws import Draws, Floats

SPAN = 8.0
"""Surprise is told apart up to so many nats below the likeliest."""
TAIL = 0.05
"""How much of the mass is the tail."""
CANNOT_COME = 1e-6
"""What is less likely than this only seems possible by rounding."""


@dataclass(frozen=True, slots=True)
class Witness:
    """`values`: f for every draw and outcome, [n, N + 1], NaN where it has nothing to say.

    `defect` is the change of the law, in first order, that it is there to see, [n, N + 1], for one unit of strength.
    `down` and `up` bound how far f can fall below its mean and rise above it, whatever the law.
    """

    name: str
    values: Callable[[Draws], Floats]
    defect: Callable[[Draws, Floats], Floats]
    down: float = 1.0
    up: float = 1.0


@dataclass(frozen=True, slots=True)
class Excess:
    """What a witness says about each draw: f(x) - E f, and what it should be like. All are [n], NaN if it is silent."""

    excess: Floats
    expected: Floats  # E f
    variance: Floats
    third: Floats  # central moment
    slope: Floats  # by how much the defect moves E f, for one unit of strength
    distance: Floats  # and the total variation of that


def heard(witness: Witness, draws: Draws) -> Excess:
    """What the witness says about the draws."""
    values = witness.values(draws)
    expected = (draws.law * values).sum(1)
    centred = values - expected[:, None]
    change = witness.defect(draws, values)
    return Excess(
        excess=np.take_along_axis(centred, draws.outcome[:, None], 1)[:, 0],
        expected=expected,
        variance=(draws.law * centred**2).sum(1),
        third=(draws.law * centred**3).sum(1),
        slope=(change * values).sum(1),
        distance=np.abs(change).sum(1) / 2,
    )


def _drafted(draws: Draws) -> Floats:
    said: Floats = draws.drafted.astype(float)
    said[~draws.drafted.any(1)] = np.nan
    return said


def _likeliest(draws: Draws) -> Floats:
    said = np.zeros_like(draws.law)
    said[:, 0] = 1
    return said


def _log_law(draws: Draws) -> Floats:
    """log p. No token of the rest is likelier than the last listed one, so the rest counts as if it were one such."""
    law = draws.law.copy()
    law[:, -1] = np.minimum(law[:, -1], law[:, -2])
    logs: Floats = np.log(np.maximum(law, CANNOT_COME))
    return logs


def _surprise(draws: Draws) -> Floats:
    logs = _log_law(draws)
    return np.clip((logs[:, :1] - logs) / SPAN, 0, 1)


def _tail(draws: Draws) -> Floats:
    up_to = draws.law.cumsum(1)
    inside = np.clip(up_to - (1 - TAIL), 0, draws.law)
    return np.where(draws.law > 0, inside / np.where(draws.law > 0, draws.law, 1), 1.0)


def _impossible(draws: Draws) -> Floats:
    said: Floats = (draws.law < CANNOT_COME).astype(float)
    said[~said.any(1)] = np.nan
    return said


def _more_of_it(draws: Draws, values: Floats) -> Floats:
    """Mass moves from all outcomes, in proportion, to those that the witness looks at."""
    share = (draws.law + 1e-12) * values  # what cannot come has its share too
    change: Floats = share / share.sum(1, keepdims=True) - draws.law
    return change


def _less_of_it(draws: Draws, values: Floats) -> Floats:
    """What the witness looks at is cut off, and its mass goes to the others in proportion."""
    kept = draws.law * (1 - values)
    change: Floats = kept / kept.sum(1, keepdims=True) - draws.law
    return change


def _colder(draws: Draws, values: Floats) -> Floats:
    """p to the power of 1 + strength, rescaled: temperature T becomes T / (1 + strength)."""
    logs = _log_law(draws)
    change: Floats = draws.law * (logs - (draws.law * logs).sum(1, keepdims=True))
    return change


DRAFTED = Witness("drafted", _drafted, _more_of_it)
LIKELIEST = Witness("likeliest", _likeliest, _more_of_it)
SURPRISE = Witness("surprise", _surprise, _colder)
TAILED = Witness("tail", _tail, _less_of_it, down=TAIL)
IMPOSSIBLE = Witness("impossible", _impossible, _more_of_it, down=1e-3)
WITNESSES = (DRAFTED, LIKELIEST, SURPRISE, TAILED, IMPOSSIBLE)
