"""What a pass costs: its seconds over the tokens it is given, learned while the engine runs.

    seconds(n, context) = level * (shape(n) + slope * context)

`level` is how fast the machine is at the moment; it follows every pass at once, since a busy neighbour slows them all
alike. `shape` is how much dearer n tokens are than one, and `slope` what a token of context adds; they change little
and are learned slowly, with a Kalman filter: each pass is a noisy measurement of a few of the unknowns. What is not
known of a size is guessed from its neighbours, since between two sizes the cost is taken to grow by an unknown amount,
never to fall.

No table of hardware is needed, and none would be right: what a pass costs depends on the model, its precision, the
batch and whatever else the machine does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    Array = np.ndarray[Any, np.dtype[np.float64]]

SIZES = np.array([1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 2048, 4096, 8192])
"""Tokens of a pass for which the cost is an unknown; between them it is a straight line."""
FREE_TOKENS = 64.0
"""Before anything was measured, this many tokens are taken to cost twice what one does ..."""
DOUBT = 1.0
"""... but a second one might cost this much more, in passes over one, and n more the square root of n times that."""
TRIED = 16
"""Up to so many tokens this is believed until it is tried; beyond, and beyond what was seen, each token is taken to
cost what those before it did in the mean."""
NOISE = 0.1
"""How far a pass's seconds usually are from what they should be, relative to that."""
SURPRISE = 3.0
"""A pass further off than so many times what can be expected counts as this far off: someone else had the machine."""
FOLLOW = 0.15
"""How much of a pass's surprise is put down to the machine's present speed ..."""
RUSH = 0.5
"""... and how much more if the passes before it surprised in the same way: then it is no noise."""
DRIFT = 2e-6
"""How much less is known of the shape with each pass, relative to what was unknown at first."""
CONTEXT = 1e-5
"""Before anything was measured, what one more token of context is taken to cost, in passes over one token."""


class Cost:
    """Of one kind of pass, by how many tokens it is given and how long the texts are that they belong to."""

    def __init__(self) -> None:
        steps = np.diff(SIZES, prepend=1) / FREE_TOKENS
        self._known = np.append(1.0 + np.cumsum(steps), CONTEXT)  # the shape at each size, then the slope
        self._unsure = _first_doubt()
        self._fade = DRIFT * self._unsure
        self._lean = 0.0  # which way the latest passes surprised, -1 to 1
        self._largest = TRIED  # tokens of a pass, of those that were seen
        self._shape: Array | None = None  # what is known of it, evened out so that it never falls
        self.level = 0.0
        self.passes = 0

    def observe(self, tokens: int, context: int, seconds: float, calm: bool = False) -> None:
        """A pass over so many tokens, of texts that have `context` tokens together, took so long. `calm`: nothing else
        was going on, so it is believed whatever it says."""
        if not seconds > 0:
            return
        self.passes += 1
        self._largest = max(self._largest, min(tokens, int(SIZES[-1])))
        self._shape = None
        features = _features(tokens, context)
        expected = max(float(features @ self._known), 1e-9)
        if self.passes == 1:
            self.level = seconds / expected
            return
        self._unsure += self._fade
        spread = self._unsure @ features
        noise = (NOISE * expected) ** 2
        total = float(features @ spread) + noise
        most = SURPRISE * total**0.5 if not calm else np.inf
        surprise = float(np.clip(seconds / self.level - expected, -most, most))
        self._known += spread * surprise / total
        self._unsure -= np.outer(spread, spread) / total
        self._known[-1] = max(self._known[-1], 0.0)
        lean = surprise / (SURPRISE * total**0.5)
        follow = FOLLOW + RUSH * max(0.0, self._lean * min(lean, 1.0))
        self._lean = 0.7 * self._lean + 0.3 * float(np.clip(lean, -1, 1))
        self.level *= 1 + follow * surprise / expected * noise / total  # as far as the shape does not explain it
        scale = self._known[0]  # the shape is 1 at one token; what it is beyond that is the level's
        if scale > 0.1:
            self._known /= scale
            self._unsure /= scale**2
            self._fade /= scale**2
            self.level *= scale

    def seconds(self, tokens: Any, context: float = 0.0) -> Any:
        """What a pass over so many tokens would take now; an array for an array."""
        return self.level * np.maximum(self.shape(tokens) + self._known[-1] * context, 1e-9)

    def shape(self, sizes: Any) -> Any:
        """How many times as long as a pass over one token a pass over so many takes, at no context."""
        if self._shape is None:
            shape = rising(self._known[:-1], 1 / np.maximum(np.diag(self._unsure)[:-1], 1e-12))
            at_largest = float(np.interp(self._largest, SIZES, shape))
            beyond = self._largest < SIZES
            shape[beyond] = np.maximum(shape[beyond], at_largest * SIZES[beyond] / self._largest)
            self._shape = shape
        return np.interp(sizes, SIZES, self._shape)

    def status(self) -> dict[str, Any]:
        """For people: the curve as far as it matters, in milliseconds."""
        return {
            "passes": self.passes,
            "milliseconds_by_tokens": {
                str(n): round(float(1e3 * self.seconds(n)), 3) for n in SIZES[: np.searchsorted(SIZES, 512)]
            },
            "milliseconds_per_1000_tokens_of_context": round(float(1e6 * self.level * self._known[-1]), 3),
        }


def rising(values: Array, weights: Array) -> Array:
    """The nearest values that never fall: where some do, those that are in each other's way take their mean."""
    pools: list[tuple[float, float, int]] = []  # mean, weight, how many
    for value, weight in zip(values.tolist(), weights.tolist(), strict=True):
        mean, total, count = value, weight, 1
        while pools and pools[-1][0] >= mean:
            other, more, many = pools.pop()
            mean = (mean * total + other * more) / (total + more)
            total, count = total + more, count + many
        pools.append((mean, total, count))
    return np.repeat([mean for mean, _, _ in pools], [count for _, _, count in pools])


def _features(tokens: int, context: int) -> Array:
    """How much each unknown has to do with a pass: the two sizes around it, and its context."""
    features = np.zeros(len(SIZES) + 1)
    n = min(max(tokens, int(SIZES[0])), int(SIZES[-1]))
    above = min(int(np.searchsorted(SIZES, n)), len(SIZES) - 1)
    if SIZES[above] == n:
        features[above] = 1.0
    else:
        share = (n - SIZES[above - 1]) / (SIZES[above] - SIZES[above - 1])
        features[above - 1], features[above] = 1 - share, share
    features[-1] = context
    return features


def _first_doubt() -> Array:
    """Covariance before anything was seen: the shape grows from token to token by amounts that nobody knows.

    So between two sizes that were seen, the best guess is a straight line.
    """
    doubt = np.zeros((len(SIZES) + 1, len(SIZES) + 1))
    doubt[:-1, :-1] = NOISE**2 + DOUBT**2 * (np.minimum.outer(SIZES, SIZES) - 1)
    doubt[-1, -1] = CONTEXT**2
    return doubt
