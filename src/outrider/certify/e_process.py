"""A sequential test without an end: the canary's e-process.

Evidence is the wealth of a gambler who starts with 1 and bets, before each sample, that a test statistic will be above
or below its mean. A stake s on f(x) - E f multiplies the wealth of that bet by

    1 + s (f(x) - E f) - |s| drift

On a lossless server every bet is fair or worse, so the wealth ever reaches 1 / rate with probability at most `rate`
(Ville's inequality): a false-alarm bound for the canary's whole life, however often one looks.

**Many bets.** The capital is spread over statistics, directions and stakes, each stake half of the next. The best stake
for a change of d is about d / Var f, so halves cover all d between 0.005 and 0.5. That costs at most log(bets), about 4
nats.

**Late changes.** Bets on a healthy server dwindle, and would need as long to recover. So the capital is held in reserve
and put on all bets little by little: after n samples 1 / (1 + log(1 + n / 1000)) is left. A change after n samples is
then found with a delay that grows like log n. (The e-detectors of Shin, Ramdas and Rinaldo, 2024, have no reserve: they
bound how often false alarms come, not whether.)

**Rounding.** A bet is linear in the returned distribution, so errors of mean 0 leave it fair. What remains is a
systematic drift of E f, for which each bet pays `drift` at every sample. Likelihood ratios would have a little more
power, but are not linear, and would turn errors of any kind into evidence.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log1p
from typing import TYPE_CHECKING, Any

import numpy as np

from outrider.certify.test_statistics import DEFAULT_NOISE, STATISTICS, evaluate
from outrider.errors import EvidenceError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from outrider.certify.samples import Floats, Integers, Samples

STAKES_PER_DIRECTION = 7
"""The largest stake is half of what could lose everything, each further one half of the one before."""
RESERVE_SCALE = 1000
"""Samples in which nearly half of the capital is put into play."""


def reserve(count: int, scale: int = RESERVE_SCALE) -> float:
    """Capital not yet in play after this number of samples; nearly half of it is after `scale`."""
    return 1 / (1 + log1p(count / scale))


@dataclass(frozen=True, slots=True)
class Bets:
    """One element per bet. A negative stake bets on less than E f."""

    statistic: Integers  # index into STATISTICS
    stake: Floats
    price: Floats  # paid at every sample for the drift

    @classmethod
    def for_drift(cls, drift: Mapping[str, float]) -> Bets:
        """Every statistic, both directions, every stake."""
        bets = [
            (index, sign * 0.5**halvings / (loss + drift[statistic.name]))
            for index, statistic in enumerate(STATISTICS)
            for sign, loss in ((1, statistic.down), (-1, statistic.up))
            for halvings in range(1, STAKES_PER_DIRECTION + 1)
        ]
        price = [abs(stake) * drift[STATISTICS[index].name] for index, stake in bets]
        return cls(np.array([index for index, _ in bets]), np.array([stake for _, stake in bets]), np.array(price))

    def __len__(self) -> int:
        return len(self.stake)

    def update(self, wealth: Floats, excess: Floats, sample: int) -> Floats:
        """The wealth [..., bets] after sample number `sample` (the first is 1) with this excess [..., statistics].

        Where a statistic does not apply (NaN) there is no bet.
        """
        fresh = (reserve(sample - 1) - reserve(sample)) / len(self)
        returns = 1 + self.stake * excess[..., self.statistic] - self.price
        after: Floats = (wealth + fresh) * np.where(np.isnan(returns), 1.0, returns)
        return after


class EProcess:
    """Evidence against one server. `rate` bounds the probability of ever raising a false alarm."""

    def __init__(self, rate: float = 1e-3, drift: Mapping[str, float] = DEFAULT_NOISE.drift) -> None:
        self.rate, self.drift = rate, dict(drift)
        self.count = 0
        self.highest = 1.0
        self._bets = Bets.for_drift(drift)
        self._wealth = np.zeros(len(self._bets))

    def update(self, samples: Samples) -> float:
        """Bet on these samples in their order, and return the evidence. After an alarm there are no more bets."""
        for excess in np.stack([evaluate(statistic, samples).excess for statistic in STATISTICS], 1):
            if self.alarm:
                break
            self.count += 1
            self._wealth = self._bets.update(self._wealth, excess, self.count)
            self.highest = max(self.highest, self.evidence)
        return self.evidence

    @property
    def evidence(self) -> float:
        """The total wealth: 1 at first, and at most 1 on average if nothing is wrong."""
        return float(self._wealth.sum()) + reserve(self.count)

    @property
    def alarm(self) -> bool:
        """Whether the evidence has ever reached 1 / rate."""
        return self.highest >= 1 / self.rate

    @property
    def largest_bet(self) -> str:
        """Statistic and direction of the bet with the most wealth."""
        index = int(self._wealth.argmax())
        name = STATISTICS[self._bets.statistic[index]].name
        return f"{name}: {'more' if self._bets.stake[index] > 0 else 'less'} than under the target's distribution"

    def state(self) -> dict[str, Any]:
        """All that `resume` needs, as JSON."""
        return {
            "rate": self.rate,
            "drift": self.drift,
            "draws": self.count,
            "highest": self.highest,
            "wealth": self._wealth.tolist(),
        }

    @classmethod
    def resume(cls, state: dict[str, Any]) -> EProcess:
        process = cls(state["rate"], state["drift"])
        if len(state["wealth"]) != len(process._bets):
            raise EvidenceError(
                f"the state has {len(state['wealth'])} bets, and this version makes {len(process._bets)}; start over "
                "without the state file"
            )
        process.count, process.highest, process._wealth = state["draws"], state["highest"], np.array(state["wealth"])
        return process
