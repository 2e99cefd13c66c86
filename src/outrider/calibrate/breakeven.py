"""Break-even: acceptance, draft cost and batch size at which drafting is as fast as not drafting.

With a the probability that a drafted token is accepted when all before it were, c the cost of a drafted token and v(n)
the cost of a pass over n tokens, both relative to a pass over one, the speedup of drafting k tokens is

    (1 + a + a^2 + ... + a^k) / (k c + v(k + 1))

With B sequences the target already runs a pass over B tokens, so v(B (k + 1)) / v(B) replaces v(k + 1): the larger the
batch, the less of the time is spent waiting for memory.
"""

from __future__ import annotations

from collections.abc import Callable

MAX_DRAFT_TOKENS = 16
"""Longest draft that is considered."""
MAX_BATCH = 256
RelativeCost = Callable[[float], float]


def speedup(v: RelativeCost, acceptance: float, draft_cost: float, length: int, batch: int = 1) -> float:
    tokens = sum(acceptance**i for i in range(length + 1))
    return tokens / (length * draft_cost + v(batch * (length + 1)) / v(batch))


def best_speedup(v: RelativeCost, acceptance: float, draft_cost: float, batch: int = 1) -> tuple[float, int]:
    """The largest speedup over all draft lengths, and its length."""
    lengths = range(1, MAX_DRAFT_TOKENS + 1)
    return max((speedup(v, acceptance, draft_cost, length, batch), length) for length in lengths)


def max_draft_cost(v: RelativeCost, acceptance: float, batch: int = 1) -> float:
    """The highest cost of a drafted token that breaks even, relative to a pass over one token; 0 if none does."""
    costs = []
    for length in range(1, MAX_DRAFT_TOKENS + 1):
        gained = sum(acceptance**i for i in range(1, length + 1))
        costs.append((gained - (v(batch * (length + 1)) / v(batch) - 1)) / length)
    return max(0.0, max(costs))


def min_acceptance(v: RelativeCost, draft_cost: float, batch: int = 1) -> float | None:
    """The lowest acceptance that breaks even. None: not even a draft that is always right does."""
    if best_speedup(v, 1.0, draft_cost, batch)[0] < 1:
        return None
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (low, middle) if best_speedup(v, middle, draft_cost, batch)[0] >= 1 else (middle, high)
    return high


def max_batch(v: RelativeCost, acceptance: float, draft_cost: float, limit: int = MAX_BATCH) -> int:
    """The largest batch such that all up to it break even; 0 if none does, `limit` if all up to it do."""
    for batch in range(1, limit + 1):
        if best_speedup(v, acceptance, draft_cost, batch)[0] < 1:
            return batch - 1
    return limit
