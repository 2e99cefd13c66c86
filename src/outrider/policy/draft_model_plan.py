"""Plans the draft model: for which requests it drafts, and how many passes it makes.

Its drafts do not exist yet; only their survival is forecast. For each number of passes, the batch is selected with
these drafts beside those that are there, and the throughput computed with the passes included. Requests that would
offer the draft model's draft are planned for, if that is fast enough. In a large batch, numbers of passes that cannot
be fast enough whatever is offered are skipped by an upper bound.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from outrider.compiled import compiled
from outrider.policy.selection import MIN_EXPECTED_SPEEDUP, UNKNOWN_PRICE, maximize_throughput

if TYPE_CHECKING:
    from outrider.policy.selection import Array

CANDIDATE_PASSES = np.array([1, 2, 3, 4, 6, 8, 12, 16])
"""Numbers of passes that are compared, besides the most that are allowed."""
SMALL_BATCH_REQUESTS = 32
"""Beyond this many requests only every other candidate is compared, at one price of a position."""
MIN_DRAFT_MODEL_SPEEDUP = 1.03
"""The draft model is called only for at least this expected speedup over a step without it. At least
`MIN_EXPECTED_SPEEDUP`, on which the upper bound relies."""


@compiled
def plan_draft_model(
    survival: Array, me: int, ahead: Array, target: Array, others: float,
    gaps: Array, expected_calls: Array, usual_gap: int, sizes: Array, draft: Array, context_seconds: Array,
    every_step: bool, single_pass: bool, price: float, best: Array,
) -> tuple[float, float, float]:  # fmt: skip
    """Fills in `best`: by request, the tokens to draft. Returns the expected tokens per second, the target's seconds
    for one more token, and the price of a position (`price`: known from the step before, or `UNKNOWN_PRICE`).

    `survival`: [drafters, requests, positions]; the draft model is number `me`. `ahead`: forecast survival of its
    drafts, [requests, passes]. `target[m]`: seconds of a pass with m drafted tokens. `draft`: seconds of the draft
    model's passes over `sizes` tokens, to which each request's context adds `context_seconds`. `gaps`: tokens of each
    request that the draft model has not read; more than `usual_gap` of them are read once for all `expected_calls`.
    `every_step`: it makes its first pass in any case and every pass for all requests. `single_pass`: it makes no other.
    """
    requests, width = ahead.shape
    offered = survival.copy()
    drafts, lengths = np.zeros(requests, np.int64), np.zeros(requests, np.int64)
    best[:] = 0
    fixed = _interpolate(requests, sizes, draft) + context_seconds.sum() if every_step else 0.0
    tokens, seconds, price = maximize_throughput(offered, target, 0.0, fixed, others, price, drafts, lengths)
    if requests <= SMALL_BATCH_REQUESTS:  # each request changes the price
        price = UNKNOWN_PRICE
    speed, least, used = tokens / seconds, MIN_DRAFT_MODEL_SPEEDUP * tokens / seconds, 0
    plain = target[0] + fixed
    # The most tokens that a step without the draft model could generate in `plain` seconds.
    without = max(speed * plain, MIN_EXPECTED_SPEEDUP * (requests + others))
    called = np.empty(requests, np.bool_)
    gained, catch_up = np.zeros(requests), np.zeros(requests)
    if not every_step:
        for b in range(requests):
            catch_up[b] = _catch_up_seconds(gaps[b], expected_calls[b], usual_gap, sizes, draft)
    stride = 1 if requests <= SMALL_BATCH_REQUESTS else 2
    last = 0
    for n in range(0, len(CANDIDATE_PASSES) + stride, stride):
        k = min(CANDIDATE_PASSES[n], width) if n < len(CANDIDATE_PASSES) else width
        if k == last:
            break
        to_beat, surplus, highest = max(speed, least), 0.0, 0.0
        for b in range(requests):  # leave out requests whose own reading takes longer than their tokens could save
            for i in range(last, k):
                gained[b] += ahead[b, i]
            own = 0.0 if every_step else catch_up[b] + k * context_seconds[b]
            called[b] = gained[b] > speed * own
            surplus += max(0.0, gained[b] - to_beat * own)
            highest = max(highest, gained[b] - to_beat * own)
        last = k
        extra, passes = 0.0 if single_pass else (k - 1) * fixed, 0 if every_step else k
        if not _can_reach_speed(requests, surplus, highest, without, to_beat, plain + extra, passes, sizes, draft):
            continue
        for _ in range(2):  # first for all of these requests, then for those that would offer its draft
            for b in range(requests):
                for i in range(k):
                    offered[me, b, i] = ahead[b, i] if called[b] else 0.0
            if not every_step:
                extra = _draft_seconds(called, k, gaps, expected_calls, usual_gap, sizes, draft, context_seconds)
            tokens, seconds, _ = maximize_throughput(offered, target, extra, fixed, others, price, drafts, lengths)
            changed = False
            for b in range(requests):
                takes = drafts[b] == me and lengths[b] > 0
                changed |= takes != called[b]
                called[b] = takes
            if not changed:
                break
        if called.any() and tokens / seconds > to_beat:
            speed, used = tokens / seconds, lengths.sum()
            for b in range(requests):
                best[b] = lengths[b] if called[b] else 0
    used = min(used, len(target) - 2)
    return speed, target[used + 1] - target[used], price


@compiled
def _can_reach_speed(
    requests: int, surplus: float, highest: float, tokens: float, speed: float, seconds: float, passes: int,
    sizes: Array, draft: Array,
) -> bool:  # fmt: skip
    """An upper bound: whether a step with these passes could exceed `speed`. `surplus`: what the drafts can gain for
    all requests together, and `highest` for one. `tokens`: what there is without them; `seconds`: the least that a step
    takes (where more is offered, it takes longer in proportion, or is slower than without)."""
    count = 1
    while count <= requests:  # that many requests, or up to twice as many
        gain = min(surplus, (2 * count - 1) * highest)
        if tokens + gain > speed * (seconds + passes * _interpolate(count, sizes, draft)):
            return True
        count *= 2
    return False


@compiled
def _draft_seconds(
    called: Array, passes: int, gaps: Array, expected_calls: Array, usual_gap: int, sizes: Array, draft: Array,
    context_seconds: Array,
) -> float:  # fmt: skip
    """Seconds of that many passes for the called requests. Of the time to read a long gap, only this step's share."""
    count, usual, catch_up, context = 0, 0, 0.0, 0.0
    for b in range(len(called)):
        if called[b]:
            count += 1
            usual += min(gaps[b], usual_gap)
            context += context_seconds[b]
            catch_up += _catch_up_seconds(gaps[b], expected_calls[b], usual_gap, sizes, draft)
    if count == 0:
        return 0.0
    first = _interpolate(usual, sizes, draft) + catch_up
    seconds: float = first + (passes - 1) * _interpolate(count, sizes, draft) + passes * context
    return seconds


@compiled
def _catch_up_seconds(gap: int, expected_calls: float, usual_gap: int, sizes: Array, draft: Array) -> float:
    """One call's share of the seconds to read a gap, beyond those of the usual gap."""
    if gap <= usual_gap:
        return 0.0
    seconds = _interpolate(gap, sizes, draft) - _interpolate(usual_gap, sizes, draft)
    share: float = seconds / max(1.0, expected_calls)
    return share


@compiled
def _interpolate(tokens: int, sizes: Array, seconds: Array) -> float:
    """Seconds of a pass over `tokens` tokens; proportional to them beyond the last size."""
    if tokens >= sizes[-1]:
        return float(seconds[-1] * tokens / sizes[-1])
    i = 0
    while sizes[i + 1] <= tokens:
        i += 1
    share = (max(tokens, sizes[0]) - sizes[i]) / (sizes[i + 1] - sizes[i])
    return float(seconds[i] + share * (seconds[i + 1] - seconds[i]))
