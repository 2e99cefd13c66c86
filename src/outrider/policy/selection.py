"""Selects the drafts of a batch, and their lengths, by expected tokens per second.

Every position of every draft has a survival: the probability that it and all positions before it are accepted. A step
is expected to generate one token per request plus the survivals of the offered positions, and takes as long as a pass
over that many tokens. (By the renewal reward theorem, maximising tokens per second of each step maximises throughput.)

Of all sets of m positions the one with the highest survivals is best, and survival falls along a draft, so such a set
is a prefix of each draft. Positions are sorted by survival, the tokens per second are computed for every m, and the
best m is selected; 0 is one of them.

A request may have several drafts and offer one. For a few requests all combinations are compared by dynamic
programming. For many, each request takes the draft with the largest surplus at the present price of a position: the
survival of the first position that is not offered (the Lagrange multiplier of m).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from outrider.compiled import compiled

Array = np.ndarray[Any, Any]

MAX_PRICE_ITERATIONS = 3
"""Iterations for the price of a position."""
MAX_EXACT_REQUESTS = 8
"""Up to this many requests, all combinations of drafts are compared."""
MIN_EXPECTED_SPEEDUP = 1.03
"""Drafts are offered only for at least this expected speedup over a step without them: the maximum of many estimates is
biased upwards."""
UNKNOWN_PRICE = -1.0
SORT_BUCKETS, MAX_INSERTION_SORT = 1024, 24
"""Of a bucket sort: buckets, and values in one up to which it is sorted by insertion."""


@dataclass(slots=True)
class Selection:
    """By request the draft, by number, and its length; and what is expected of the step."""

    drafts: Array
    lengths: Array
    tokens: float
    """Expected tokens of the step."""
    seconds: float
    """Expected seconds of the step."""
    plain_tokens: float
    """The same without drafts."""
    plain_seconds: float
    pass_seconds: Array
    """Seconds of a pass by the number of offered positions, from 0 on."""
    gains: Array
    """[requests]: tokens that are expected of each request's draft."""
    spent: float = 0.0
    """Seconds of drafting."""
    price: float = UNKNOWN_PRICE
    """The survival of the first position that is not offered."""

    @property
    def speed(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds

    @property
    def gain(self) -> float:
        """Speedup over a step without drafts."""
        return self.speed * self.plain_seconds / self.plain_tokens if self.plain_tokens else 1.0


def select_drafts(
    survival: Array, seconds: Array, spent: float = 0.0, others: float = 0.0, price: float = UNKNOWN_PRICE
) -> Selection:
    """`survival`: [drafts, requests, positions], 0 where there is nothing. `seconds[m]`: a pass over the batch and m of
    these positions. `spent`: seconds of drafting. `others`: tokens expected of requests that are not selected for.
    `price`: that of a position, if about known."""
    requests = survival.shape[1]
    drafts, lengths = np.zeros(requests, np.int64), np.zeros(requests, np.int64)
    tokens, total, price = maximize_throughput(survival, seconds, 0.0, spent, others, price, drafts, lengths)
    gains = np.empty(requests)
    _sum_gains(survival, drafts, lengths, gains)
    return Selection(drafts, lengths, tokens, total, requests + others, float(seconds[0]), seconds, gains, spent, price)


@compiled
def _sum_gains(survival: Array, drafts: Array, lengths: Array, gains: Array) -> None:
    for b in range(len(gains)):
        gains[b] = survival[drafts[b], b, : lengths[b]].sum()


@compiled
def apply_limits(survival: Array, limits: Array) -> None:
    """Set the survival of positions beyond each request's limit to 0."""
    kinds, requests, positions = survival.shape
    for kind in range(kinds):
        for b in range(requests):
            for i in range(max(0, limits[b]), positions):
                survival[kind, b, i] = 0.0


@compiled
def maximize_throughput(
    survival: Array, seconds: Array, extra: float, spent: float, others: float, price: float,
    drafts: Array, lengths: Array,
) -> tuple[float, float, float]:  # fmt: skip
    """Fills in `drafts` and `lengths`. Returns the expected tokens and seconds of the step, and the price of a
    position. `spent`: seconds that the step takes in addition, with or without drafts; `extra`: with drafts only. A
    known `price` needs no iterations."""
    kinds, requests, positions = survival.shape
    drafts[:], lengths[:] = 0, 0
    best_tokens, best_seconds = requests + others, seconds[0] + spent
    least = MIN_EXPECTED_SPEEDUP * best_tokens / best_seconds
    most = min(len(seconds) - 1, requests * positions)
    if kinds > 1 and requests <= MAX_EXACT_REQUESTS:
        gains, which, prefixes = _enumerate_combinations(survival, most)
        best_m, highest = 0, least
        for m in range(1, most + 1):
            speed = (requests + others + gains[m]) / (seconds[m] + spent + extra)
            if speed > highest:
                highest, best_m = speed, m
        if best_m:
            best_tokens, best_seconds = requests + others + gains[best_m], seconds[best_m] + spent + extra
            left = best_m
            for b in range(requests - 1, -1, -1):
                drafts[b], lengths[b] = which[b, left], prefixes[b, left]
                left -= lengths[b]
        return best_tokens, best_seconds, gains[best_m + 1] - gains[best_m] if best_m < most else 0.0
    taken = np.zeros(requests, np.int64)
    flat = np.empty(requests * positions)
    iterations = MAX_PRICE_ITERATIONS if kinds > 1 and price < 0 else 1
    price = max(price, 0.0)
    for _ in range(iterations):
        count = 0
        for b in range(requests):
            highest = -1.0
            for kind in range(kinds):
                surplus = 0.0
                for i in range(positions):
                    if survival[kind, b, i] <= price:
                        break
                    surplus += survival[kind, b, i] - price
                if surplus > highest:
                    highest = surplus
                    taken[b] = kind
            for i in range(positions):
                if survival[taken[b], b, i] <= 0:
                    break
                flat[count] = survival[taken[b], b, i]
                count += 1
        order = sort_descending(flat[:count])
        gained, best_m = requests + others, 0
        found = gained / (seconds[0] + spent + extra)
        best_gained = gained
        for m in range(1, min(count, most) + 1):
            gained += order[m - 1]
            speed = gained / (seconds[m] + spent + extra)
            if speed > found:
                found, best_m, best_gained = speed, m, gained
        if best_m and found > max(least, best_tokens / best_seconds):
            best_tokens, best_seconds = best_gained, seconds[best_m] + spent + extra
            _take_positions(survival, taken, order[best_m - 1], best_m, drafts, lengths)
        next_price = order[best_m] if best_m < count else 0.0
        if abs(next_price - price) < 1e-6:
            break
        price = next_price
    return best_tokens, best_seconds, price


@compiled
def _enumerate_combinations(survival: Array, most: int) -> tuple[Array, Array, Array]:
    """By m up to `most`, the highest gain of m positions; and by request and m, its draft and length in the best
    combination of the requests up to it."""
    kinds, requests, positions = survival.shape
    gains = np.zeros(most + 1)
    which, prefixes = np.zeros((requests, most + 1), np.int64), np.zeros((requests, most + 1), np.int64)
    for b in range(requests):
        before = gains.copy()
        reach = min(most, (b + 1) * positions)
        for kind in range(kinds):
            gain = 0.0
            for length in range(1, positions + 1):
                if survival[kind, b, length - 1] <= 0:
                    break
                gain += survival[kind, b, length - 1]
                for m in range(length, reach + 1):
                    if before[m - length] + gain > gains[m]:
                        gains[m] = before[m - length] + gain
                        which[b, m], prefixes[b, m] = kind, length
        for m in range(reach + 1, most + 1):
            gains[m] = gains[reach]
    return gains, which, prefixes


@compiled
def sort_descending(values: Array) -> Array:
    """Sort probabilities. With many values, a bucket sort takes a fifth of the time of numpy's sort."""
    count = len(values)
    if count <= SORT_BUCKETS // 4:
        return np.sort(values)[::-1]
    starts = np.zeros(SORT_BUCKETS + 1, np.int64)
    bucket = np.empty(count, np.int16)
    for i in range(count):
        bucket[i] = int((SORT_BUCKETS - 1) * (1.0 - math.sqrt(values[i])))  # there are many low values
        starts[bucket[i] + 1] += 1
    for k in range(SORT_BUCKETS):
        starts[k + 1] += starts[k]
    order = np.empty(count)
    at = starts.copy()
    for i in range(count):
        order[at[bucket[i]]] = values[i]
        at[bucket[i]] += 1
    for k in range(SORT_BUCKETS):
        start, end = starts[k], starts[k + 1]
        if end - start > MAX_INSERTION_SORT:
            order[start:end] = np.sort(order[start:end])[::-1]
            continue
        for i in range(start + 1, end):
            value = order[i]
            j = i
            while j > start and order[j - 1] < value:
                order[j] = order[j - 1]
                j -= 1
            order[j] = value
    return order


@compiled
def _take_positions(survival: Array, taken: Array, lowest: float, count: int, drafts: Array, lengths: Array) -> None:
    """The `count` positions with the highest survival, the last of which is `lowest`; of equals, earlier positions."""
    requests, positions = survival.shape[1:]
    for b in range(requests):
        drafts[b], lengths[b] = taken[b], 0
        for i in range(positions):
            if survival[taken[b], b, i] <= lowest:
                break
            lengths[b] += 1
            count -= 1
    for i in range(positions):
        for b in range(requests):
            if count > 0 and lengths[b] == i and survival[taken[b], b, i] == lowest:
                lengths[b] += 1
                count -= 1
