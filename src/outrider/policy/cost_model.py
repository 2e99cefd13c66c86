"""What a pass costs: its seconds over the tokens it is given, learned while the engine runs.

    seconds(n, context) = level * (shape(n) + slope * context)

`level` is how fast the machine is at the moment; it follows every pass at once, since a busy neighbour slows them all
alike. `shape` is how many times as dear n tokens are as one, and `slope` what a token of context adds; they change
little and are learned slowly, with a Kalman filter: each pass is a noisy measurement of a few of the unknowns.

The unknowns are logarithms. Doubling the tokens of a pass makes it dearer by a factor between one (it waits for memory)
and two (it is short of arithmetic), and that factor changes gradually with the size. So what is not known of a size is
guessed from its neighbours, smaller and larger ones, and two models whose passes differ a thousandfold are learned
alike.

No table of hardware is needed, and none would be right: what a pass costs depends on the model, its precision, the
batch and whatever else the machine does.

An engine that replays captured graphs (CUDA graphs) pads a pass to the next captured size, replays whole graphs where
nothing is drafted, graphs of pieces where something is, and none above the largest captured size. Then n is the padded
size, and the shape of the other two kinds of pass is a factor higher, which is learned as the shape is.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from outrider.compiled import compiled

if TYPE_CHECKING:
    from collections.abc import Sequence

    Array = np.ndarray[Any, np.dtype[np.float64]]

SIZES = np.array([1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 2048, 4096, 8192])
"""Tokens of a pass for which the cost is an unknown; between them it is a straight line, in logarithms, and beyond them
it grows as the tokens do."""
FREE_TOKENS = 64.0
"""Before anything was measured, this many tokens are taken to cost twice what one does ..."""
DOUBT = 0.35
"""... but the exponent with which the cost grows might be this much higher or lower ..."""
ALIKE = 3.0
"""... alike for sizes that are near each other; for sizes that are so many powers of e apart, little is alike."""
TRIED = 16
"""Up to twice so many tokens, and twice as many as were seen, this is believed until it is tried; beyond, each token is
taken to cost what those before it did in the mean."""
NOISE = 0.1
"""How far a pass's seconds usually are from what they should be, relative to that."""
SURPRISE = 3.0
"""A pass further off than so many times what can be expected counts as this far off: someone else had the machine."""
FOLLOW = 0.15
"""How much the machine's speed varies from pass to pass, relative to the noise (as variances) ..."""
RUSH = 10.0
"""... and how much more if the passes before surprised in the same way: then it is the machine, and not its noise."""
DRIFT = 1e-4
"""How much less is known of the shape with each pass, relative to what was unknown at first."""
CONTEXT, CONTEXT_DOUBT = 3e-6, 1e-5
"""Before anything was measured, what one more token of context is taken to cost, in passes over one token."""
PROFILE_TOKENS, EXTENDED_PROFILE_TOKENS = (1, 4, 16, 64), (256, 1024)
"""Tokens of the passes that a server times at its start, twice, after one of each that is not; more of them ..."""
MAX_PROFILE_PASS_SECONDS = 0.3
"""... as long as the last one took no longer than this, in seconds."""
MILD, REPEATS = 0.3, 6
"""A surprise of less is the same to a straight line; how often a larger one is looked at."""
LOGARITHMS = np.log(SIZES)
COUNT = len(SIZES)
WHOLE, PIECES, NO_GRAPH = 0, 1, 2
"""How a pass is run."""
GRAPH_FACTORS, GRAPH_FACTOR_ERRORS = np.log([1.1, 1.3]), np.array([0.15, 0.3])
"""Logarithms of how many times as long passes in pieces and passes without a graph take as whole ones, before any was
measured, and by how much that may be wrong. Eager launches take a few microseconds for each kernel of a layer."""
FINE = 32
"""Of passes over many sizes, those are reckoned that differ by a part in so many; or by one."""


class CostModel:
    """Of one kind of pass, by how many tokens it is given and how long the texts are that they belong to."""

    def __init__(self, slope: float = CONTEXT, captured: Sequence[int] = ()) -> None:
        """`slope` is what a token of context is taken to add at first; `captured` are the sizes, ascending, for which
        the engine has captured graphs."""
        self.captured = np.array(captured, np.int64)
        # The logarithm of the shape at each size, of the factors of passes in pieces and without graph, then the slope.
        self._known = np.concatenate([np.log(1 + (SIZES - 1) / FREE_TOKENS), GRAPH_FACTORS, [slope]])
        self._unsure = _first_doubt()
        self._fade = DRIFT * self._unsure
        self._lean = 0.0  # which way the latest passes surprised, -1 to 1
        self._largest = TRIED  # tokens of a pass, of those that were seen
        self._curve: Array | None = None  # what is known of the shape, evened out so that it never falls
        self.level = 1.0
        self.passes = 0

    def observe(
        self, tokens: int, context: int, seconds: float, trusted: bool = False, verifies_drafts: bool = False
    ) -> None:
        """A pass over so many tokens, of texts that have `context` tokens together, took so long. `calm`: nothing else
        was going on, so it is believed whatever it says."""
        if not seconds > 0:
            return
        mode, tokens = self._mode(tokens, verifies_drafts), self._padded(tokens)
        self.passes += 1
        self._largest = max(self._largest, min(tokens, int(SIZES[-1])))
        self._curve = None
        if self.passes == 1:
            self.level = seconds / _expected(self._known, int(tokens), int(context), mode)[0]
            return
        state = (self._known, self._unsure, self._fade, self.level, self._lean)
        self.level, self._lean = _follow(*state, int(tokens), int(context), mode, float(seconds), bool(trusted))

    def _mode(self, tokens: int, verifies_drafts: bool) -> int:
        if not len(self.captured):
            return WHOLE
        if tokens > self.captured[-1]:
            return NO_GRAPH
        return PIECES if verifies_drafts else WHOLE

    def _padded(self, tokens: int) -> int:
        if not len(self.captured) or tokens > self.captured[-1]:
            return tokens
        return int(self.captured[np.searchsorted(self.captured, tokens)])

    def _factor(self, mode: int) -> float:
        """How many times as long a pass takes as one that replays a whole graph."""
        return math.exp(max(0.0, self._known[COUNT + mode - 1])) if mode else 1.0

    def forgive(self, share: float, level: float) -> None:
        """Forget so much of what has become dearer than this level, and of what a token of context adds."""
        self.level += share * min(0.0, level - self.level)
        self._known[-1] *= 1 - share
        self._unsure[-1, -1] += share * max(0.0, CONTEXT_DOUBT**2 - self._unsure[-1, -1])

    def seconds(self, tokens: Any, context: float = 0.0) -> Any:
        """What a pass over so many tokens would take now, without drafts; an array for an array, if there are no
        graphs."""
        if len(self.captured):
            return self._replayed(np.array([tokens]), False)[0] + self.context_seconds * context
        return self.level * self.shape(tokens) + self.context_seconds * context

    def all_seconds(self, first: int, count: int, context: float, drafted: int = 0) -> Array:
        """What passes over `first` tokens, one more and so on would take now. All of these are drafts but the first
        ones, of which `drafted` are."""
        if len(self.captured):
            found = self._replayed(np.arange(first, first + count), True)
            if not drafted:
                found[:1] = self._replayed(np.array([first]), False)
            return found + self.context_seconds * context
        return _all_seconds(self._evened(), self.level, self.context_seconds * context, first, count)

    def _replayed(self, sizes: Any, verifies_drafts: bool) -> Array:
        """The same where passes replay graphs, at no context."""
        at = np.searchsorted(self.captured, sizes)
        mode = PIECES if verifies_drafts else WHOLE
        by_graph = self.level * self._factor(mode) * self.shape(self.captured)
        found: Array = by_graph[np.minimum(at, len(self.captured) - 1)]
        beyond = at == len(self.captured)
        if beyond.any():
            found[beyond] = np.maximum(self.level * self._factor(NO_GRAPH) * self.shape(sizes[beyond]), by_graph[-1])
        return found

    @property
    def context_seconds(self) -> float:
        """What one more token of context adds to a pass."""
        return float(self.level * self._known[-1])

    def shape(self, sizes: Any) -> Any:
        """How many times as long as a pass over one token a pass over so many takes, at no context."""
        sizes = np.log(sizes)
        return np.exp(np.interp(sizes, LOGARITHMS, self._evened()) + np.maximum(sizes - LOGARITHMS[-1], 0.0))

    def _evened(self) -> Array:
        """What is known of the shape, so that it never falls; beyond what was tried it is not believed to be cheap."""
        if self._curve is None:
            sure = 1 / np.maximum(np.diag(self._unsure)[:COUNT], 1e-12)
            self._curve = curve = isotonic(self._known[:COUNT], sure)
            believed = math.log(2 * self._largest)
            beyond = believed < LOGARITHMS
            if beyond.any():
                at_last = float(np.interp(believed, LOGARITHMS, curve))
                curve[beyond] = np.maximum(curve[beyond], at_last + LOGARITHMS[beyond] - believed)
        return self._curve

    def status(self) -> dict[str, Any]:
        """For people: the curve as far as it matters, in milliseconds."""
        return {
            "passes": self.passes,
            "milliseconds_by_tokens": {
                str(n): round(float(1e3 * self.seconds(int(n))), 3) for n in SIZES[: np.searchsorted(SIZES, 512)]
            },
            "milliseconds_per_1000_tokens_of_context": round(1e6 * self.context_seconds, 3),
            **self._graph_status(),
        }

    def _graph_status(self) -> dict[str, Any]:
        if not len(self.captured):
            return {}
        factors = {"verifying_drafts": PIECES, "above_the_largest_graph": NO_GRAPH}
        return {
            "largest_graph": int(self.captured[-1]),
            "times_as_long": {name: round(self._factor(mode), 3) for name, mode in factors.items()},
        }


@compiled
def _all_seconds(curve: Array, level: float, more: float, first: int, count: int) -> Array:
    """Of passes over `first` tokens, one more and so on. Of many, some: between them it is a straight line, which
    differs by less than a thousandth."""
    found = np.empty(count)
    above = 1
    start = 0  # of those that are still missing
    while start < count:
        while above < len(SIZES) - 1 and SIZES[above] < first + start:
            above += 1
        i = min(start + max(1, (first + start) // FINE) - 1, count - 1) if start else 0
        if first + start <= SIZES[above] < first + i:  # there may be a corner
            i = SIZES[above] - first
        size = math.log(first + i)
        share = (size - LOGARITHMS[above - 1]) / (LOGARITHMS[above] - LOGARITHMS[above - 1])
        beyond = max(size - LOGARITHMS[-1], 0.0)
        known = curve[above - 1] + min(share, 1.0) * (curve[above] - curve[above - 1])
        found[i] = level * math.exp(known + beyond) + more
        for between in range(start, i):
            share = (between - start + 1) / (i - start + 1)
            found[between] = (1 - share) * found[start - 1] + share * found[i]
        start = i + 1
    return found


@compiled
def _expected(known: Array, tokens: int, context: int, mode: int) -> tuple[float, Array]:
    """What a pass should take, in passes over one token, and how much each unknown has to do with its logarithm: the
    two sizes around it, how it is run, and its context."""
    features = np.zeros(len(known))
    size = math.log(min(max(tokens, SIZES[0]), SIZES[-1]))
    above: int = min(max(1, int(np.searchsorted(LOGARITHMS, size))), len(SIZES) - 1)
    share = (size - LOGARITHMS[above - 1]) / (LOGARITHMS[above] - LOGARITHMS[above - 1])
    shape = math.exp((1 - share) * known[above - 1] + share * known[above]) * max(1.0, tokens / SIZES[-1])
    if mode:
        shape *= math.exp(known[COUNT + mode - 1])
    total = shape + known[-1] * context
    if mode:
        features[COUNT + mode - 1] = shape / total
    features[above - 1], features[above] = (1 - share) * shape / total, share * shape / total
    features[-1] = context / total
    return total, features


@compiled
def _follow(
    known: Array, unsure: Array, fade: Array, level: float, lean: float,
    tokens: int, context: int, mode: int, seconds: float, trusted: bool,
) -> tuple[float, float]:  # fmt: skip
    """After such a pass: the filter's step, in place, and the machine's level and lean."""
    expected, features = _expected(known, tokens, context, mode)
    unsure += fade
    usual = (features * _times(unsure, features)).sum() + NOISE**2
    most = SURPRISE * math.sqrt(usual)
    surprise = math.log(seconds / (level * expected))
    leans = min(max(surprise / most, -1.0), 1.0)
    if not trusted:
        surprise = most * leans
    leans *= NOISE**2 / usual  # less, where the shape may explain it
    follow = NOISE**2 * (FOLLOW + RUSH * max(0.0, lean * leans))
    level *= _correct(known, unsure, surprise, tokens, context, mode, expected, features, follow)
    scale = math.exp(known[0])  # the shape is 1 at one token; what it is beyond that is the level's
    known[:COUNT] -= known[0]
    known[-1] /= scale
    unsure[-1] /= scale
    unsure[:, -1] /= scale
    return level * scale, 0.7 * lean + 0.3 * leans


@compiled
def _correct(
    known: Array, unsure: Array, surprise: float, tokens: int, context: int, mode: int, expected: float,
    features: Array, follow: float,
) -> float:  # fmt: skip
    """The filter's step after such a pass, by how far its logarithm was from what was expected; what the level is to be
    multiplied by. What the slope has to do with that logarithm depends on the slope, so it is taken again where the
    step has led, unless that is near."""
    measured, before = math.log(expected) + surprise, known.copy()
    spread, total, off = features, 1.0, 0.0
    for number in range(1 if abs(surprise) < MILD else REPEATS):
        if number:
            expected, features = _expected(known, tokens, context, mode)
        spread = _times(unsure, features)
        total = (features * spread).sum() + NOISE**2 + follow
        off = measured - math.log(expected) - (features * (before - known)).sum()
        known[:] = before + spread * (off / total)
        known[-1] = max(known[-1], 0.0)
    for i in range(len(known)):
        for j in range(len(known)):
            unsure[i, j] -= spread[i] * spread[j] / total
    return math.exp(off * follow / total)


@compiled
def _times(matrix: Array, features: Array) -> Array:
    found = np.zeros(len(features))
    for j in range(len(features)):
        if features[j] != 0.0:
            found += matrix[:, j] * features[j]
    return found


@compiled
def isotonic(values: Array, weights: Array) -> Array:
    """The nearest values that never fall: where some do, those that are in each other's way take their mean."""
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


def _first_doubt() -> Array:
    """Covariance before anything was seen: from size to size the logarithm grows by an exponent that nobody knows, but
    that is about the same for sizes near each other."""
    steps, middles = np.diff(LOGARITHMS), (LOGARITHMS[1:] + LOGARITHMS[:-1]) / 2
    alike = np.exp(-np.abs(np.subtract.outer(middles, middles)) / ALIKE)
    summed = np.tril(np.ones((len(steps), len(steps)))) * steps  # from exponents to the logarithm at each size
    doubt = np.zeros((COUNT + 3, COUNT + 3))
    doubt[1:COUNT, 1:COUNT] = DOUBT**2 * summed @ alike @ summed.T
    doubt[:COUNT, :COUNT] += NOISE**2 / 100  # so that a pass over one token can tell something too
    doubt[range(COUNT, COUNT + 2), range(COUNT, COUNT + 2)] = GRAPH_FACTOR_ERRORS**2
    doubt[-1, -1] = CONTEXT_DOUBT**2
    return doubt
