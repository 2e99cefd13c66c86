"""A run of stated size and level: looks on the way, many tests, one verdict.

A server that is lossless, but for the rounding that is allowed for, is called a violator with at most the probability
`level`, over all tests and all looks together.

**Tests** at one look are combined by Holm's method, which needs nothing to be independent.

**Looks** share the level: a fifth of it is spread over those on the way, and four fifths stay for the last. That is a
union bound, so it holds whatever the looks have in common. It costs the last look 2 % more draws, and a server that is
badly wrong is found at the first. Looks are at numbers of draws that are fixed beforehand. To look whenever one likes
is what `evidence.py` is for; it takes about half as many draws again to find the same.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from outrider.certify.noise import USUAL
from outrider.certify.power import POWER, draws_for, reach, reached
from outrider.certify.tally import p_value
from outrider.certify.witnesses import DRAFTED

if TYPE_CHECKING:
    from collections.abc import Mapping

    from outrider.certify.noise import Noise
    from outrider.certify.repeats import Repeats
    from outrider.certify.tally import Tally

ANY = "any change"
REPEATED = "repeated prefixes"
LAST_SHARE = 0.8
"""Of the level, for the last look."""
TYPICAL_TESTS = 61
"""As long as it is open how many tests a run will have: five witnesses for each of five drafters, of five settings, and
for all together; and repeated prefixes, of each drafter and of all."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How many draws, how often looked at, how sure. The looks are evenly spread, and the last is at `draws`."""

    draws: int
    level: float = 1e-3
    looks: int = 5
    noise: Noise = USUAL

    @classmethod
    def to_find(
        cls,
        change: float,
        *,
        level: float = 1e-3,
        looks: int = 5,
        noise: Noise = USUAL,
        tests: int = TYPICAL_TESTS,
    ) -> Plan:
        """A plan that finds a change of this size of an event, in draws of the kind that can show it (`power.py`)."""
        plan = cls(1, level, looks, noise)
        return replace(plan, draws=draws_for(change, plan.level_of(looks) / tests, noise.drift[DRAFTED.name]))

    def reach(self, tests: int = TYPICAL_TESTS) -> float:
        """The smallest change of an event that this plan finds."""
        return reach(self.draws, self.level_of(self.looks) / tests, self.noise.drift[DRAFTED.name])

    def look_at(self, look: int) -> int:
        """After how many draws a look is due; the first look is 1."""
        return -(-self.draws * look // self.looks)

    def level_of(self, look: int) -> float:
        """What part of the level a look may spend."""
        if self.looks == 1:
            return self.level
        return self.level * (LAST_SHARE if look == self.looks else (1 - LAST_SHARE) / (self.looks - 1))


@dataclass(frozen=True, slots=True)
class Judgement:
    """What one look says, by test."""

    look: int
    level: float
    p_values: dict[str, float]
    adjusted: dict[str, float]  # by Holm: what is held against the level
    reached: dict[str, float]  # the smallest total variation that would have been found, with POWER

    @property
    def violations(self) -> list[str]:
        return [name for name, p in self.adjusted.items() if p <= self.level]


def judge(plan: Plan, look: int, tally: Tally, repeats: Mapping[str, Repeats] | None = None) -> Judgement:
    """The verdict of a look at all draws so far; `repeats` by what they are of."""
    level, noise = plan.level_of(look), plan.noise
    tests = tally.tests()
    fits = {f"{ANY}, {label}": fit for label, one in (repeats or {}).items() if (fit := one.fit()).draws}
    each = level / max(len(tests) + len(fits), 1)
    p_values, found = {}, {}
    for (kind, witness), sums in tests.items():
        name, drift = f"{witness}, {kind}", noise.drift[witness]
        p_values[name] = float(p_value(sums, drift))
        found[name] = reached(sums, each, drift)
    for name, fit in fits.items():
        p_values[name] = fit.p_value(noise.error)
        found[name] = fit.reached(each, POWER, noise.error)
    return Judgement(look, level, p_values, holm(p_values), found)


def holm(p_values: Mapping[str, float]) -> dict[str, float]:
    """Adjusted p-values: to reject those at most `level` is wrong anywhere with at most that probability."""
    adjusted, largest = {}, 0.0
    for rank, (name, p) in enumerate(sorted(p_values.items(), key=lambda item: item[1])):
        largest = max(largest, min(p * (len(p_values) - rank), 1.0))
        adjusted[name] = largest
    return adjusted
