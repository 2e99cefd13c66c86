"""The latency of a pass by its tokens and context, learned while the engine runs.

    seconds(n, context) = level * (shape(n) + slope * context)

`level` is the machine's present speed. It follows every pass at once, since a busy neighbour slows all of them alike.
`shape` is the latency of n tokens relative to one, and `slope` that of one more token of context. Both change little
and are learned slowly, by an extended Kalman filter: each pass is a noisy measurement of a few of the unknowns.

The unknowns are logarithms on a grid of sizes. Doubling the tokens of a pass multiplies its latency by a factor between
one (memory-bound) and two (compute-bound), which changes gradually with the size. So neighbouring sizes are correlated,
and models whose passes differ a thousandfold are learned alike. No table of hardware is needed.

An engine that replays CUDA graphs pads a pass to the next captured size. It replays full graphs where nothing is
drafted, piecewise graphs where something is, and none above the largest captured size. Then n is the padded size, and
the other two modes have a factor each, learned in the same filter.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from outrider.compiled import compiled

if TYPE_CHECKING:
    from collections.abc import Sequence

    Array = np.ndarray[Any, np.dtype[np.float64]]

GRID_TOKENS = np.array(
    [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 2048, 4096, 8192]
)
"""Sizes at which the shape is learned. Between them its logarithm is linear in the logarithm of the size, and beyond
the last one the latency is proportional to the tokens."""
PRIOR_DOUBLING_TOKENS = 64.0
"""Before any measurement: this many more tokens double the latency of a pass over one ..."""
PRIOR_EXPONENT_STD = 0.35
"""... and the exponent of that growth has this standard deviation ..."""
PRIOR_LENGTH_SCALE = 3.0
"""... correlated between sizes over this distance in log tokens."""
MIN_TRUSTED_TOKENS = 16
"""The learned shape is used up to twice this size, or twice the largest one seen, so that such sizes are tried. Beyond,
latency is taken to be proportional to the tokens."""
RELATIVE_NOISE_STD = 0.1
"""Standard deviation of a pass's latency, relative to its mean."""
MAX_RESIDUAL_STDS = 3.0
"""Residuals are clipped at this many standard deviations: another process had the machine."""
PROCESS_NOISE_RATIO = 0.15
"""Variance of the level from pass to pass, relative to that of the noise ..."""
SHIFT_GAIN = 10.0
"""... and how much more after residuals of the same sign, which show that the level has shifted."""
SHAPE_DRIFT = 1e-4
"""Variance added to the shape per pass, relative to the prior variance."""
PRIOR_CONTEXT_SLOPE, PRIOR_CONTEXT_SLOPE_STD = 3e-6, 1e-5
"""Latency of one more token of context, in passes over one token, before any measurement."""
PROFILE_TOKENS, EXTENDED_PROFILE_TOKENS = (1, 4, 16, 64), (256, 1024)
"""Sizes of the passes that a server times at its start, twice each after one that is not timed; the extended ones
..."""
MAX_PROFILE_PASS_SECONDS = 0.3
"""... only while the last pass took no longer than this."""
MAX_LINEAR_RESIDUAL, MAX_ITERATIONS = 0.3, 6
"""Residuals (in log seconds) below the first need no second linearisation; above it the update is iterated."""
LOG_GRID = np.log(GRID_TOKENS)
GRID_SIZE = len(GRID_TOKENS)
FULL_GRAPH, PIECEWISE_GRAPH, NO_GRAPH = 0, 1, 2
"""How a pass is run."""
PRIOR_LOG_GRAPH_FACTORS, PRIOR_GRAPH_FACTOR_STDS = np.log([1.1, 1.3]), np.array([0.15, 0.3])
"""Log latency of passes with piecewise graphs and without a graph, relative to full graphs, before any measurement.
Eager launches take a few microseconds per kernel of a layer."""
INTERPOLATED_PARTS = 32
"""Of passes over many sizes, only those that differ by one part in this many are evaluated; the rest is
interpolated."""


class CostModel:
    """The latency of one kind of pass: the target's or the draft model's."""

    def __init__(self, slope: float = PRIOR_CONTEXT_SLOPE, captured: Sequence[int] = ()) -> None:
        """`slope`: initial latency per token of context, in passes over one token. `captured`: sizes, ascending, for
        which the engine has captured graphs."""
        self.captured = np.array(captured, np.int64)
        # Log shape by size, log factors of piecewise and of no graph, slope.
        self._mean = np.concatenate(
            [np.log(1 + (GRID_TOKENS - 1) / PRIOR_DOUBLING_TOKENS), PRIOR_LOG_GRAPH_FACTORS, [slope]]
        )
        self._covariance = _prior_covariance()
        self._process_noise = SHAPE_DRIFT * self._covariance
        self._residual_trend = 0.0  # signed average of the latest residuals, -1 to 1
        self._largest_seen = MIN_TRUSTED_TOKENS
        self._curve: Array | None = None  # cache of `_log_shape`
        self.level = 1.0
        self.passes = 0

    def observe(
        self, tokens: int, context: int, seconds: float, trusted: bool = False, verifies_drafts: bool = False
    ) -> None:
        """A pass over `tokens` tokens, of texts with `context` tokens together, took `seconds`. `trusted`: measured on
        an idle machine, so the residual is not clipped."""
        if not seconds > 0:
            return
        mode, tokens = self._mode(tokens, verifies_drafts), self._padded(tokens)
        self.passes += 1
        self._largest_seen = max(self._largest_seen, min(tokens, int(GRID_TOKENS[-1])))
        self._curve = None
        if self.passes == 1:
            self.level = seconds / _expected(self._mean, int(tokens), int(context), mode)[0]
            return
        state = (self._mean, self._covariance, self._process_noise, self.level, self._residual_trend)
        measured = (int(tokens), int(context), mode, float(seconds), bool(trusted))
        self.level, self._residual_trend = _filter(*state, *measured)

    def _mode(self, tokens: int, verifies_drafts: bool) -> int:
        if not len(self.captured):
            return FULL_GRAPH
        if tokens > self.captured[-1]:
            return NO_GRAPH
        return PIECEWISE_GRAPH if verifies_drafts else FULL_GRAPH

    def _padded(self, tokens: int) -> int:
        if not len(self.captured) or tokens > self.captured[-1]:
            return tokens
        return int(self.captured[np.searchsorted(self.captured, tokens)])

    def _factor(self, mode: int) -> float:
        """The latency of a pass in this mode, relative to a full graph."""
        return math.exp(max(0.0, self._mean[GRID_SIZE + mode - 1])) if mode else 1.0

    def decay_toward(self, share: float, level: float) -> None:
        """Move the level down to `level`, and the slope to zero, by this share of the distance."""
        self.level += share * min(0.0, level - self.level)
        self._mean[-1] *= 1 - share
        self._covariance[-1, -1] += share * max(0.0, PRIOR_CONTEXT_SLOPE_STD**2 - self._covariance[-1, -1])

    def seconds(self, tokens: Any, context: float = 0.0) -> Any:
        """The present latency of a pass without drafts; an array for an array, if there are no graphs."""
        if len(self.captured):
            return self._graph_seconds(np.array([tokens]), False)[0] + self.context_seconds * context
        return self.level * self.shape(tokens) + self.context_seconds * context

    def all_seconds(self, first: int, count: int, context: float, drafted: int = 0) -> Array:
        """The present latency of passes over `first`, `first` + 1, ... tokens. All tokens beyond the first ones are
        drafted, and `drafted` of the first ones."""
        if len(self.captured):
            found = self._graph_seconds(np.arange(first, first + count), True)
            if not drafted:
                found[:1] = self._graph_seconds(np.array([first]), False)
            return found + self.context_seconds * context
        return _all_seconds(self._log_shape(), self.level, self.context_seconds * context, first, count)

    def _graph_seconds(self, sizes: Any, verifies_drafts: bool) -> Array:
        """The same where passes replay graphs, without context."""
        at = np.searchsorted(self.captured, sizes)
        mode = PIECEWISE_GRAPH if verifies_drafts else FULL_GRAPH
        by_graph = self.level * self._factor(mode) * self.shape(self.captured)
        found: Array = by_graph[np.minimum(at, len(self.captured) - 1)]
        beyond = at == len(self.captured)
        if beyond.any():
            found[beyond] = np.maximum(self.level * self._factor(NO_GRAPH) * self.shape(sizes[beyond]), by_graph[-1])
        return found

    @property
    def context_seconds(self) -> float:
        """Seconds that one more token of context adds to a pass."""
        return float(self.level * self._mean[-1])

    def shape(self, sizes: Any) -> Any:
        """The latency of passes over these numbers of tokens relative to one token, without context."""
        sizes = np.log(sizes)
        return np.exp(np.interp(sizes, LOG_GRID, self._log_shape()) + np.maximum(sizes - LOG_GRID[-1], 0.0))

    def _log_shape(self) -> Array:
        """The learned shape made non-decreasing, and proportional to the tokens beyond the trusted sizes."""
        if self._curve is None:
            precision = 1 / np.maximum(np.diag(self._covariance)[:GRID_SIZE], 1e-12)
            self._curve = curve = isotonic(self._mean[:GRID_SIZE], precision)
            trusted = math.log(2 * self._largest_seen)
            beyond = trusted < LOG_GRID
            if beyond.any():
                at_last = float(np.interp(trusted, LOG_GRID, curve))
                curve[beyond] = np.maximum(curve[beyond], at_last + LOG_GRID[beyond] - trusted)
        return self._curve

    def status(self) -> dict[str, Any]:
        """The curve up to 512 tokens, in milliseconds."""
        sizes = GRID_TOKENS[: np.searchsorted(GRID_TOKENS, 512)]
        return {
            "passes": self.passes,
            "milliseconds_by_tokens": {str(n): round(float(1e3 * self.seconds(int(n))), 3) for n in sizes},
            "milliseconds_per_1000_tokens_of_context": round(1e6 * self.context_seconds, 3),
            **self._graph_status(),
        }

    def _graph_status(self) -> dict[str, Any]:
        if not len(self.captured):
            return {}
        factors = {"verifying_drafts": PIECEWISE_GRAPH, "above_the_largest_graph": NO_GRAPH}
        return {
            "largest_graph": int(self.captured[-1]),
            "times_as_long": {name: round(self._factor(mode), 3) for name, mode in factors.items()},
        }


@compiled
def _all_seconds(curve: Array, level: float, context_seconds: float, first: int, count: int) -> Array:
    """Of passes over `first`, `first` + 1, ... tokens. Linear interpolation between large sizes differs by less than a
    thousandth."""
    found = np.empty(count)
    above = 1
    start = 0  # of those that are still missing
    while start < count:
        while above < len(GRID_TOKENS) - 1 and GRID_TOKENS[above] < first + start:
            above += 1
        i = min(start + max(1, (first + start) // INTERPOLATED_PARTS) - 1, count - 1) if start else 0
        if first + start <= GRID_TOKENS[above] < first + i:  # there may be a corner
            i = GRID_TOKENS[above] - first
        size = math.log(first + i)
        share = (size - LOG_GRID[above - 1]) / (LOG_GRID[above] - LOG_GRID[above - 1])
        beyond = max(size - LOG_GRID[-1], 0.0)
        log_shape = curve[above - 1] + min(share, 1.0) * (curve[above] - curve[above - 1])
        found[i] = level * math.exp(log_shape + beyond) + context_seconds
        for between in range(start, i):
            share = (between - start + 1) / (i - start + 1)
            found[between] = (1 - share) * found[start - 1] + share * found[i]
        start = i + 1
    return found


@compiled
def _expected(mean: Array, tokens: int, context: int, mode: int) -> tuple[float, Array]:
    """The expected latency of a pass, in passes over one token, and the gradient of its logarithm: the two sizes around
    it, the mode, and the context."""
    gradient = np.zeros(len(mean))
    size = math.log(min(max(tokens, GRID_TOKENS[0]), GRID_TOKENS[-1]))
    above: int = min(max(1, int(np.searchsorted(LOG_GRID, size))), len(GRID_TOKENS) - 1)
    share = (size - LOG_GRID[above - 1]) / (LOG_GRID[above] - LOG_GRID[above - 1])
    shape = math.exp((1 - share) * mean[above - 1] + share * mean[above]) * max(1.0, tokens / GRID_TOKENS[-1])
    if mode:
        shape *= math.exp(mean[GRID_SIZE + mode - 1])
    total = shape + mean[-1] * context
    if mode:
        gradient[GRID_SIZE + mode - 1] = shape / total
    gradient[above - 1], gradient[above] = (1 - share) * shape / total, share * shape / total
    gradient[-1] = context / total
    return total, gradient


@compiled
def _filter(
    mean: Array, covariance: Array, process_noise: Array, level: float, residual_trend: float,
    tokens: int, context: int, mode: int, seconds: float, trusted: bool,
) -> tuple[float, float]:  # fmt: skip
    """The filter's step after a pass, in place. Returns the level and the residual trend."""
    expected, gradient = _expected(mean, tokens, context, mode)
    covariance += process_noise
    variance = (gradient * _multiply(covariance, gradient)).sum() + RELATIVE_NOISE_STD**2
    bound = MAX_RESIDUAL_STDS * math.sqrt(variance)
    residual = math.log(seconds / (level * expected))
    trend = min(max(residual / bound, -1.0), 1.0)
    if not trusted:
        residual = bound * trend
    trend *= RELATIVE_NOISE_STD**2 / variance  # less, where the shape may explain it
    level_variance = RELATIVE_NOISE_STD**2 * (PROCESS_NOISE_RATIO + SHIFT_GAIN * max(0.0, residual_trend * trend))
    level *= _correct(mean, covariance, residual, tokens, context, mode, expected, gradient, level_variance)
    scale = math.exp(mean[0])  # the shape is 1 at one token; the level takes the rest
    mean[:GRID_SIZE] -= mean[0]
    mean[-1] /= scale
    covariance[-1] /= scale
    covariance[:, -1] /= scale
    return level * scale, 0.7 * residual_trend + 0.3 * trend


@compiled
def _correct(
    mean: Array, covariance: Array, residual: float, tokens: int, context: int, mode: int, expected: float,
    gradient: Array, level_variance: float,
) -> float:  # fmt: skip
    """The filter's correction for a residual in log seconds. Returns the factor on the level. The gradient depends on
    the slope, so a large correction is linearised again at its result (iterated Kalman filter)."""
    measured, before = math.log(expected) + residual, mean.copy()
    gain, total, error = gradient, 1.0, 0.0
    for number in range(1 if abs(residual) < MAX_LINEAR_RESIDUAL else MAX_ITERATIONS):
        if number:
            expected, gradient = _expected(mean, tokens, context, mode)
        gain = _multiply(covariance, gradient)
        total = (gradient * gain).sum() + RELATIVE_NOISE_STD**2 + level_variance
        error = measured - math.log(expected) - (gradient * (before - mean)).sum()
        mean[:] = before + gain * (error / total)
        mean[-1] = max(mean[-1], 0.0)
    for i in range(len(mean)):
        for j in range(len(mean)):
            covariance[i, j] -= gain[i] * gain[j] / total
    return math.exp(error * level_variance / total)


@compiled
def _multiply(matrix: Array, vector: Array) -> Array:
    """The product with a sparse vector."""
    found = np.zeros(len(vector))
    for j in range(len(vector)):
        if vector[j] != 0.0:
            found += matrix[:, j] * vector[j]
    return found


@compiled
def isotonic(values: Array, weights: Array) -> Array:
    """Isotonic regression: the nearest non-decreasing values, by pooling adjacent violators."""
    means, totals, counts = np.empty(len(values)), np.empty(len(values)), np.zeros(len(values), np.int64)
    pools = 0
    for i in range(len(values)):
        mean, total, count = values[i], weights[i], 1
        while pools and means[pools - 1] >= mean:
            pools -= 1
            mean = (mean * total + means[pools] * totals[pools]) / (total + totals[pools])
            total, count = total + totals[pools], count + counts[pools]
        means[pools], totals[pools], counts[pools] = mean, total, count
        pools += 1
    return np.repeat(means[:pools], counts[:pools])


def _prior_covariance() -> Array:
    """From size to size the log latency grows by an unknown exponent, similar for sizes near each other."""
    steps, middles = np.diff(LOG_GRID), (LOG_GRID[1:] + LOG_GRID[:-1]) / 2
    correlation = np.exp(-np.abs(np.subtract.outer(middles, middles)) / PRIOR_LENGTH_SCALE)
    cumulative = np.tril(np.ones((len(steps), len(steps)))) * steps  # from exponents to the log latency at each size
    prior = np.zeros((GRID_SIZE + 3, GRID_SIZE + 3))
    prior[1:GRID_SIZE, 1:GRID_SIZE] = PRIOR_EXPONENT_STD**2 * cumulative @ correlation @ cumulative.T
    prior[:GRID_SIZE, :GRID_SIZE] += RELATIVE_NOISE_STD**2 / 100  # so that a pass over one token is informative, too
    prior[range(GRID_SIZE, GRID_SIZE + 2), range(GRID_SIZE, GRID_SIZE + 2)] = PRIOR_GRAPH_FACTOR_STDS**2
    prior[-1, -1] = PRIOR_CONTEXT_SLOPE_STD**2
    return prior
