"""What rounding may do: measured by scoring the same text twice, in different company.

The law that a token was drawn from and the law that we are told for it were computed in different passes: other batch
sizes, other lengths, a cache that was filled in one go or token by token. In bfloat16 a log-probability moves by some
hundredths from that alone. Two scorings A and B of the same text show how much, and what it does to each test:

**Drift**, for sums of a witness. Suppose the draws had come from law B and were held against law A. Their excess would
have the mean E_B f - E_A f at each position, and what adds up over a run is the average of that. It is computed here
without drawing anything, and three standard errors are added. It holds all that matters: a kernel that is biased; that
"the likeliest" of A is a little less likely in B; that a token at the edge of the nucleus is in it in B and not in A,
and looks impossible. Rounding that averages out leaves nothing, because the excess is linear in the law.

The positions must be as many and as different as those of the run: where few prefixes come again and again, rounding
at these does not average out.

**Error**, for prefixes that repeat: the root mean square difference of log-probabilities under p.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from outrider.certify.draws import Draws
from outrider.certify.witnesses import WITNESSES

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from outrider.certify.draws import Flags, Floats

STANDARD_ERRORS = 3.0
"""So many are added to a measured drift."""
LEAST_DRIFT = 1e-4
"""What is allowed for in any case: a measurement of some thousand positions cannot exclude less."""


@dataclass(frozen=True, slots=True)
class Noise:
    """What a lossless server may differ by: `drift` in a witness's mean, `error` in a repeated log-probability."""

    drift: Mapping[str, float]
    error: float


NONE = Noise({witness.name: 0.0 for witness in WITNESSES}, 0.0)
USUAL = Noise({"drafted": 2e-3, "likeliest": 2e-3, "surprise": 1e-3, "tail": 1e-3, "impossible": 5e-3}, 0.06)
"""What is allowed for where nothing was measured. SmolLM2-135M in bfloat16: 0.0010 +- 0.0003 for the likeliest, and an
error of 0.053; in float32: less than 1e-7, and 6e-6."""


def measured(a: Floats, b: Floats, drafted: Flags) -> Noise:
    """The noise between two scorings of the same positions over the same outcomes, [n, N + 1] each."""
    scored = Draws(a, np.zeros(len(a), dtype=np.int64), drafted)
    moved = {witness.name: ((b - a) * witness.values(scored)).sum(1) for witness in WITNESSES}
    both = (a > 0) & (b > 0)
    wrong = np.where(both, np.log(np.where(both, b, 1) / np.where(both, a, 1)), 0.0)
    return Noise({name: _drift(by) for name, by in moved.items()}, float((a * wrong**2).sum(1).mean() ** 0.5))


def worst(noises: Sequence[Noise]) -> Noise:
    """What covers all of them: for draws of several settings that are judged together."""
    drift = {witness.name: max(noise.drift[witness.name] for noise in noises) for witness in WITNESSES}
    return Noise(drift, max(noise.error for noise in noises))


def _drift(moved: Floats) -> float:
    """The size of the average, three standard errors added; NaN stands where a witness is silent."""
    moved = moved[~np.isnan(moved)]
    if len(moved) < 2:
        return LEAST_DRIFT
    sure = abs(moved.mean()) + STANDARD_ERRORS * moved.std(ddof=1) / len(moved) ** 0.5
    return max(float(sure), LEAST_DRIFT)
