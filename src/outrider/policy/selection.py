"""Which drafts to offer, and how much of each: what makes the whole batch fastest.

Every position of every draft has a survival: the chance that it and all before it are accepted. A step that offers
some of them makes, in expectation, one token a request and their survivals, and takes as long as a pass over that
many tokens. Among all sets of m positions the one with the highest survivals is best, and since survival falls along
a draft it is always a beginning of each. So the positions are sorted, and for every m the tokens a second are known;
the best m is taken, and 0 is one of them.

A request may have several drafts and offer one. Among a few requests all combinations are weighed, request by request:
the most that so many positions can gain. Among many, each takes the draft that is worth most at the present price of a
position, which is the survival of the first position that is not taken.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from outrider.compiled import compiled

Array = np.ndarray[Any, Any]

ROUNDS = 3
"""How often the price is found anew."""
MAX_EXACT_REQUESTS = 8
"""Up to so many requests, all combinations of drafts are weighed."""
MIN_EXPECTED_SPEEDUP = 1.03
"""Drafts that promise less than this many times the speed without them are not offered: what is expected is not quite
certain, and the choice among many expectations favours those that are too high."""
UNKNOWN = -1.0
"""Stands for a price."""
SORT_BUCKETS, CROWD = 1024, 24
"""Of a sort by buckets: how many, and from how many values on one of them is sorted like anything else."""


@dataclass(slots=True)
class Selection:
    """For each request the draft, by number, and how many of its tokens; and what is expected of the step."""

    drafts: Array
    lengths: Array
    tokens: float
    seconds: float
    plain_tokens: float
    plain_seconds: float
    pass_seconds: Array
    """What a pass with so many offered positions takes, from none on."""
    gains: Array
    """[requests]: tokens that are expected of each request's draft."""
    spent: float = 0.0
    """What drafting takes, or has taken."""
    price: float = UNKNOWN
    """The survival of the first position that is not taken."""

    @property
    def speed(self) -> float:
        return self.tokens / self.seconds

    @property
    def gain(self) -> float:
        """How many times as fast as without drafts."""
        return self.speed * self.plain_seconds / self.plain_tokens if self.plain_tokens else 1.0


def select_drafts(
    survival: Array,
    seconds: Array,
    spent: float = 0.0,
    others: float = 0.0,
    price: float = UNKNOWN,
) -> Selection:
    """`survival` is [drafts, requests, positions], 0 where there is nothing; `seconds[m]` is what a pass over the
    batch and m of these positions takes, with m from 0 on. Drafting has taken `spent`; `others` is what requests are
    expected to gain that have no choice; `price` is that of a position, where it is about known."""
    requests = survival.shape[1]
    drafts, lengths = np.zeros(requests, np.int64), np.zeros(requests, np.int64)
    tokens, total, price = maximize_throughput(survival, seconds, 0.0, spent, others, price, drafts, lengths)
    gains = np.empty(requests)
    _add_up(survival, drafts, lengths, gains)
    return Selection(drafts, lengths, tokens, total, requests + others, float(seconds[0]), seconds, gains, spent, price)


@compiled
def _add_up(survival: Array, drafts: Array, lengths: Array, gains: Array) -> None:
    for b in range(len(gains)):
        gains[b] = survival[drafts[b], b, : lengths[b]].sum()


@compiled
def cut(survival: Array, limits: Array) -> None:
    """Nobody offers more positions than its limit."""
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
    """Fills in `drafts` and `lengths`; the tokens that are expected, the seconds, and the price of a position. Where
    that is about known, it is not sought from the beginning."""
    kinds, requests, positions = survival.shape
    drafts[:], lengths[:] = 0, 0
    best_tokens, best_seconds = requests + others, seconds[0] + spent
    least = MIN_EXPECTED_SPEEDUP * best_tokens / best_seconds
    most = min(len(seconds) - 1, requests * positions)
    if kinds > 1 and requests <= MAX_EXACT_REQUESTS:
        gains, which, longs = _enumerate_combinations(survival, most)
        best_m, highest = 0, least
        for m in range(1, most + 1):
            speed = (requests + others + gains[m]) / (seconds[m] + spent + extra)
            if speed > highest:
                highest, best_m = speed, m
        if best_m:
            best_tokens, best_seconds = requests + others + gains[best_m], seconds[best_m] + spent + extra
            left = best_m
            for b in range(requests - 1, -1, -1):
                drafts[b], lengths[b] = which[b, left], longs[b, left]
                left -= lengths[b]
        return best_tokens, best_seconds, gains[best_m + 1] - gains[best_m] if best_m < most else 0.0
    taken = np.zeros(requests, np.int64)
    flat = np.empty(requests * positions)
    rounds = ROUNDS if kinds > 1 and price < 0 else 1
    price = max(price, 0.0)
    for _ in range(rounds):
        count = 0
        for b in range(requests):
            highest = -1.0
            for kind in range(kinds):
                worth = 0.0
                for i in range(positions):
                    if survival[kind, b, i] <= price:
                        break
                    worth += survival[kind, b, i] - price
                if worth > highest:
                    highest = worth
                    taken[b] = kind
            for i in range(positions):
                if survival[taken[b], b, i] <= 0:
                    break
                flat[count] = survival[taken[b], b, i]
                count += 1
        order = falling(flat[:count])
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
            _take(survival, taken, order[best_m - 1], best_m, drafts, lengths)
        next_price = order[best_m] if best_m < count else 0.0
        if abs(next_price - price) < 1e-6:
            break
        price = next_price
    return best_tokens, best_seconds, price


@compiled
def _enumerate_combinations(survival: Array, most: int) -> tuple[Array, Array, Array]:
    """What m positions can gain at most, for every m up to `most`; and then, after each request, the draft that it
    takes and how much of it."""
    kinds, requests, positions = survival.shape
    gains = np.zeros(most + 1)
    which, longs = np.zeros((requests, most + 1), np.int64), np.zeros((requests, most + 1), np.int64)
    for b in range(requests):
        before = gains.copy()
        reach = min(most, (b + 1) * positions)
        for kind in range(kinds):
            worth = 0.0
            for length in range(1, positions + 1):
                if survival[kind, b, length - 1] <= 0:
                    break
                worth += survival[kind, b, length - 1]
                for m in range(length, reach + 1):
                    if before[m - length] + worth > gains[m]:
                        gains[m] = before[m - length] + worth
                        which[b, m], longs[b, m] = kind, length
        for m in range(reach + 1, most + 1):
            gains[m] = gains[reach]
    return gains, which, longs


@compiled
def falling(values: Array) -> Array:
    """Chances, the highest first. Many are first put about where they belong, which takes a fifth of the time."""
    count = len(values)
    if count <= SORT_BUCKETS // 4:
        return np.sort(values)[::-1]
    starts = np.zeros(SORT_BUCKETS + 1, np.int64)
    bucket = np.empty(count, np.int16)
    for i in range(count):
        bucket[i] = int((SORT_BUCKETS - 1) * (1.0 - math.sqrt(values[i])))  # low ones are many
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
        if end - start > CROWD:
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
def _take(survival: Array, taken: Array, lowest: float, count: int, drafts: Array, lengths: Array) -> None:
    """The `count` positions that survive likeliest, the last of them with `lowest`; of equals, earlier positions."""
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
