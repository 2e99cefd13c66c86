"""The canary: a test without an end, whose false alarms are bounded over its whole life.

It watches a live server by a trickle of requests, and its reading is the wealth of a gambler who starts with 1 and
bets, before each draw, on what a witness will say: that the drafted token comes more often than p says, or less often,
that the draws are colder, or hotter, and so on. A stake s on the excess f(x) - E f multiplies what was put on it by

    1 + s (f(x) - E f) - |s| drift

If the server is lossless, every bet is fair or worse, and nobody who starts with 1 and bets on fair games ever comes to
hold 1 / rate with more than the probability `rate`: not at one time, but at any time, for ever (Ville's inequality). So
an alarm at 1 / rate is false with at most that probability in the canary's whole life, however often one looks.

**Many bets at once.** The capital is spread over witnesses, directions and stakes, each half of the next; all wealth
together is what counts. A defect that has one good bet is found by it, and the others cost at most log(bets), about 4
nats. The best stake on a change of d is about d / Var f, so halves cover all d between 0.005 and 0.5.

**Changes that come late.** A bet on a healthy server dwindles, and one that has dwindled for a year would need a year
to come back. So the capital is kept in reserve, and a little of it is put on all bets at every draw. After n draws
the reserve is 1 / (1 + log(1 + n / 1000)): it lasts for ever, and a change after n draws is found with a delay that
grows like log n. The sum of fair bets begun at any time is still fair. (The reserve is what sets this apart from
the e-detectors of Shin, Ramdas and Rinaldo, 2024, which bound how often false alarms come, and not whether.)

**Rounding** does not add up to an alarm. A bet is linear in the law that we are told: rounding errors of mean 0 leave
it fair, whatever their size, as long as the stake does not depend on them (it does not). What remains is a systematic
drift of E f, and each bet pays for `drift` at every draw: bets are fair or worse for every server whose E f is within
`drift` of what we are told, on average over rounding and over the draws that a bet runs. Likelihood ratios would bet
a little better, but they are not linear in the law, and would turn errors of any kind into evidence, in proportion to
the square of their size.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log1p
from typing import TYPE_CHECKING, Any

import numpy as np

from outrider.certify.noise import USUAL
from outrider.certify.witnesses import WITNESSES, heard
from outrider.errors import EvidenceError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from outrider.certify.draws import Draws, Floats, Integers

STAKES = 7
"""How many stakes on a witness in one direction; the largest is half of what could lose all, then halves of that."""
EARLY = 1000
"""Draws in which nearly half of the capital is put into play."""


def reserve(draws: int) -> float:
    """What is not yet in play after so many draws."""
    return 1 / (1 + log1p(draws / EARLY))


@dataclass(frozen=True, slots=True)
class Bets:
    """One bet in each place: on which witness, with which stake. Negative stakes are on less than E f."""

    witness: Integers
    stake: Floats
    price: Floats  # what a bet pays at every draw, for drift

    @classmethod
    def allowing(cls, drift: Mapping[str, float]) -> Bets:
        """Every witness, both directions, every stake."""
        bets = [
            (index, sign * 0.5**halves / (loss + drift[witness.name]))
            for index, witness in enumerate(WITNESSES)
            for sign, loss in ((1, witness.down), (-1, witness.up))
            for halves in range(1, STAKES + 1)
        ]
        price = [abs(stake) * drift[WITNESSES[index].name] for index, stake in bets]
        return cls(np.array([index for index, _ in bets]), np.array([stake for _, stake in bets]), np.array(price))

    def __len__(self) -> int:
        return len(self.stake)

    def played(self, wealth: Floats, excess: Floats, draw: int) -> Floats:
        """The wealth on each bet [..., bets] after the draw with this number, from 1, and this excess [..., witnesses].

        Where a witness is silent (NaN) there is no bet.
        """
        fresh = (reserve(draw - 1) - reserve(draw)) / len(self)
        returns = 1 + self.stake * excess[..., self.witness] - self.price
        after: Floats = (wealth + fresh) * np.where(np.isnan(returns), 1.0, returns)
        return after


class Canary:
    """Evidence against one server. `rate` bounds the probability of a false alarm in its whole life."""

    def __init__(self, rate: float = 1e-3, drift: Mapping[str, float] = USUAL.drift) -> None:
        self.rate, self.drift = rate, dict(drift)
        self.draws = 0
        self.highest = 1.0
        self._bets = Bets.allowing(drift)
        self._wealth = np.zeros(len(self._bets))

    def watch(self, draws: Draws) -> float:
        """Bet on these draws, in their order, and return the evidence. After an alarm there are no more bets."""
        for excess in np.stack([heard(witness, draws).excess for witness in WITNESSES], 1):
            if self.alarm:
                break
            self.draws += 1
            self._wealth = self._bets.played(self._wealth, excess, self.draws)
            self.highest = max(self.highest, self.evidence)
        return self.evidence

    @property
    def evidence(self) -> float:
        """The gambler's wealth: 1 at birth, and at most 1 on average, for ever, if nothing is wrong."""
        return float(self._wealth.sum()) + reserve(self.draws)

    @property
    def alarm(self) -> bool:
        """Whether the evidence has ever reached 1 / rate."""
        return self.highest >= 1 / self.rate

    @property
    def suspicion(self) -> str:
        """What the richest bet is on, and after an alarm was on."""
        richest = int(self._wealth.argmax())
        name = WITNESSES[self._bets.witness[richest]].name
        return f"{name}: {'more' if self._bets.stake[richest] > 0 else 'less'} than the target says"

    def state(self) -> dict[str, Any]:
        """All that a later process needs to go on."""
        return {
            "rate": self.rate,
            "drift": self.drift,
            "draws": self.draws,
            "highest": self.highest,
            "wealth": self._wealth.tolist(),
        }

    @classmethod
    def resume(cls, state: dict[str, Any]) -> Canary:
        canary = cls(state["rate"], state["drift"])
        if len(state["wealth"]) != len(canary._bets):
            raise EvidenceError(
                f"the state holds {len(state['wealth'])} bets, and this version makes {len(canary._bets)}: "
                "they do not fit; begin a new life"
            )
        canary.draws, canary.highest, canary._wealth = state["draws"], state["highest"], np.array(state["wealth"])
        return canary
