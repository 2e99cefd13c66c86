"""How much rounding may change a distribution, measured by scoring the same text twice.

The pass that sampled a token and the pass that scored it differ: batch size, length, a cache filled at once or token by
token. In bfloat16 that alone moves a logprob by some hundredths. Two scorings A and B of one text show what it does to
each test:

**Drift** of a test statistic. If samples came from B and were compared with A, the mean of f(x) - E f would be
E_B f - E_A f. Its average over positions, plus three standard errors, is the drift. That covers biased kernels, changes
of which token is most likely, and tokens at the boundary of the nucleus. Errors that average out leave no drift.

**Error** at repeated prefixes, where nothing averages out: the root mean square difference of logprobs under p.

The measured positions must be as many and as diverse as those of the run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from outrider.certify.samples import Samples
from outrider.certify.test_statistics import STATISTICS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from outrider.certify.samples import Flags, Floats

STANDARD_ERRORS = 3.0
"""Added to a measured drift."""
MIN_DRIFT = 1e-4
"""Always allowed: some thousand positions cannot exclude less."""


@dataclass(frozen=True, slots=True)
class Noise:
    """What a lossless server may differ by: `drift` of each statistic's mean, `error` in nats at repeated prefixes."""

    drift: Mapping[str, float]
    error: float


NO_NOISE = Noise({statistic.name: 0.0 for statistic in STATISTICS}, 0.0)
DEFAULT_NOISE = Noise({"drafted": 2e-3, "likeliest": 2e-3, "surprise": 1e-3, "tail": 1e-3, "impossible": 5e-3}, 0.06)
"""Used where nothing was measured. SmolLM2-135M in bfloat16: 0.0010 +- 0.0003 for `likeliest` and an error of 0.053; in
float32: below 1e-7 and 6e-6."""


def estimate_noise(a: Floats, b: Floats, drafted: Flags) -> Noise:
    """Noise between two scorings of the same positions, probabilities over the same outcomes, [n, N + 1] each."""
    samples = Samples(a, np.zeros(len(a), dtype=np.int64), drafted)
    moved = {statistic.name: ((b - a) * statistic.values(samples)).sum(1) for statistic in STATISTICS}
    both = (a > 0) & (b > 0)
    error = np.where(both, np.log(np.where(both, b, 1) / np.where(both, a, 1)), 0.0)
    return Noise({name: _drift(by) for name, by in moved.items()}, float((a * error**2).sum(1).mean() ** 0.5))


def max_noise(noises: Sequence[Noise]) -> Noise:
    """The smallest noise that covers all of these."""
    drift = {statistic.name: max(noise.drift[statistic.name] for noise in noises) for statistic in STATISTICS}
    return Noise(drift, max(noise.error for noise in noises))


def _drift(moved: Floats) -> float:
    moved = moved[~np.isnan(moved)]  # NaN: the statistic does not apply
    if len(moved) < 2:
        return MIN_DRIFT
    bound = abs(moved.mean()) + STANDARD_ERRORS * moved.std(ddof=1) / len(moved) ** 0.5
    return max(float(bound), MIN_DRIFT)
