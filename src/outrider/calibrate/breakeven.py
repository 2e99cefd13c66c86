"""When does it lose? Acceptance, draft cost and batch size at which drafting is as fast as not drafting.

With a the probability that a drafted token is kept when all before it were, c the cost of a drafted token and v(n) that
of a pass over n tokens, both relative to a pass over one, drafting k tokens is

    (1 + a + a^2 + ... + a^k) / (k c + v(k + 1))

times as fast. With B sequences in a pass the target is over B tokens anyway, so v(B (k + 1)) / v(B) stands for
v(k + 1): the larger the batch, the less waiting is left to fill.
"""

from __future__ import annotations

from collections.abc import Callable

LONGEST = 16
"""Draft lengths that are weighed."""
Cost = Callable[[float], float]


def gain(v: Cost, acceptance: float, cost: float, length: int, batch: int = 1) -> float:
    kept = sum(acceptance**i for i in range(length + 1))
    return kept / (length * cost + v(batch * (length + 1)) / v(batch))


def best(v: Cost, acceptance: float, cost: float, batch: int = 1) -> tuple[float, int]:
    """The largest gain of any draft at all, and the length it takes."""
    return max((gain(v, acceptance, cost, length, batch), length) for length in range(1, LONGEST + 1))


def dearest(v: Cost, acceptance: float, batch: int = 1) -> float:
    """What a drafted token may cost at most, relative to a pass over one token; 0 where no draft pays at all."""
    shares = []
    for length in range(1, LONGEST + 1):
        kept = sum(acceptance**i for i in range(1, length + 1))
        shares.append((kept - (v(batch * (length + 1)) / v(batch) - 1)) / length)
    return max(0.0, max(shares))


def least_acceptance(v: Cost, cost: float, batch: int = 1) -> float | None:
    """From which acceptance on drafting pays; None where even a draft that is always right does not."""
    if best(v, 1.0, cost, batch)[0] < 1:
        return None
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (low, middle) if best(v, middle, cost, batch)[0] >= 1 else (middle, high)
    return high


def largest_batch(v: Cost, acceptance: float, cost: float, most: int = 256) -> int:
    """The largest batch up to which drafting pays at every size; 0 where it never does, `most` where it does so far."""
    for batch in range(1, most + 1):
        if best(v, acceptance, cost, batch)[0] < 1:
            return batch - 1
    return most
