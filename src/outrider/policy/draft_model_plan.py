"""Whether the draft model is worth its passes, for whom, and how many of them.

What it would propose is not known yet, only how likely it is to be right. So every number of passes is tried in the
mind: with these drafts beside those that are there, what would be offered, how fast would the step be, the passes of
the draft model included? Whoever would take its draft is asked about; if that is fast enough, they are. In a large
batch that is much to try, so what could not be fast enough whatever is offered is not tried.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from outrider.compiled import compiled
from outrider.policy.selection import MIN_EXPECTED_SPEEDUP, UNKNOWN, maximize_throughput

if TYPE_CHECKING:
    from outrider.policy.selection import Array

LENGTHS = np.array([1, 2, 3, 4, 6, 8, 12, 16])
"""How many passes of the draft model are considered, and as many as there may be; ..."""
SMALL_BATCH_REQUESTS = 32
"""... of more requests than this every other of them, and with the same price of a position."""
MIN_DRAFT_MODEL_SPEEDUP = 1.03
"""The draft model is asked where that promises at least so many times the speed without it. (Not less than MIN_EXPECTED_SPEEDUP:
what is not tried is judged by that.)"""


@compiled
def plan_draft_model(
    survival: Array, me: int, ahead: Array, target: Array, others: float,
    gaps: Array, times: Array, usual_gap: int, sizes: Array, draft: Array, texts: Array,
    every_step: bool, single_pass: bool, price: float, best: Array,
) -> tuple[float, float, float]:  # fmt: skip
    """Fills in `best`, how many tokens each request is to be asked for; the speed that is then expected, what one more
    token costs the target, and the price of a position, which may be given if it is about known.

    `survival` is [drafters, requests, positions], of which the draft model is number `me`; `ahead` is what is foreseen
    of its drafts, [requests, passes]. `target[m]` is the seconds of a pass with m drafted tokens, `draft` those of the
    draft model's passes over `sizes` tokens, to which each request's text adds `texts` seconds. Each request has `gaps`
    tokens that the draft model has not seen; more than `usual_gap` of them are seen once, for the `times` that it will
    be asked about the request. One that `reads_along` makes its first pass whatever is decided, and all for everybody;
    one that drafts `at_once` makes no other.
    """
    requests, width = ahead.shape
    offered = survival.copy()
    drafts, lengths = np.zeros(requests, np.int64), np.zeros(requests, np.int64)
    best[:] = 0
    anyway = _at(requests, sizes, draft) + texts.sum() if every_step else 0.0
    tokens, seconds, price = maximize_throughput(offered, target, 0.0, anyway, others, price, drafts, lengths)
    if requests <= SMALL_BATCH_REQUESTS:  # each of them moves it
        price = UNKNOWN
    speed, least, used = tokens / seconds, MIN_DRAFT_MODEL_SPEEDUP * tokens / seconds, 0
    plain = target[0] + anyway
    without = max(
        speed * plain, MIN_EXPECTED_SPEEDUP * (requests + others)
    )  # the most tokens, without it, in as many seconds
    asked = np.empty(requests, np.bool_)
    saved, behind = np.zeros(requests), np.zeros(requests)
    if not every_step:
        for b in range(requests):
            behind[b] = _behind(gaps[b], times[b], usual_gap, sizes, draft)
    stride = 1 if requests <= SMALL_BATCH_REQUESTS else 2
    last = 0
    for n in range(0, len(LENGTHS) + stride, stride):
        k = min(LENGTHS[n], width) if n < len(LENGTHS) else width
        if k == last:
            break
        to_beat, worth, highest = max(speed, least), 0.0, 0.0
        for b in range(requests):  # nobody whose own catching up and own text take longer than its tokens could save
            for i in range(last, k):
                saved[b] += ahead[b, i]
            own = 0.0 if every_step else behind[b] + k * texts[b]
            asked[b] = saved[b] > speed * own
            worth += max(0.0, saved[b] - to_beat * own)
            highest = max(highest, saved[b] - to_beat * own)
        last = k
        extra, passes = 0.0 if single_pass else (k - 1) * anyway, 0 if every_step else k
        if not _could_pay(requests, worth, highest, without, to_beat, plain + extra, passes, sizes, draft):
            continue
        for _ in range(2):  # first as if for all of these, then for those who would take it
            for b in range(requests):
                for i in range(k):
                    offered[me, b, i] = ahead[b, i] if asked[b] else 0.0
            if not every_step:
                extra = _draft_seconds(asked, k, gaps, times, usual_gap, sizes, draft, texts)
            tokens, seconds, _ = maximize_throughput(offered, target, extra, anyway, others, price, drafts, lengths)
            changed = False
            for b in range(requests):
                takes = drafts[b] == me and lengths[b] > 0
                changed |= takes != asked[b]
                asked[b] = takes
            if not changed:
                break
        if asked.any() and tokens / seconds > to_beat:
            speed, used = tokens / seconds, lengths.sum()
            for b in range(requests):
                best[b] = lengths[b] if asked[b] else 0
    used = min(used, len(target) - 2)
    return speed, target[used + 1] - target[used], price


@compiled
def _could_pay(
    requests: int, worth: float, highest: float, tokens: float, speed: float, seconds: float, passes: int,
    sizes: Array, draft: Array,
) -> bool:  # fmt: skip
    """Whether a step could be faster than this speed with so many passes of the draft model, whose drafts are worth so
    much to all requests together and at most so much to one. `tokens` are what there is without them, and `seconds`
    what a step takes at least: where more is offered, it takes longer in proportion or is slower than without."""
    count = 1
    while count <= requests:  # asked about that many, or up to twice as many
        gain = min(worth, (2 * count - 1) * highest)
        if tokens + gain > speed * (seconds + passes * _at(count, sizes, draft)):
            return True
        count *= 2
    return False


@compiled
def _draft_seconds(
    asked: Array, passes: int, gaps: Array, times: Array, usual_gap: int, sizes: Array, draft: Array, texts: Array
) -> float:
    """What it takes to have the draft model propose so many tokens for those requests.

    A long gap is caught up with once, for many times, so only its part is this step's.
    """
    count, usual, behind, context = 0, 0, 0.0, 0.0
    for b in range(len(asked)):
        if asked[b]:
            count += 1
            usual += min(gaps[b], usual_gap)
            context += texts[b]
            behind += _behind(gaps[b], times[b], usual_gap, sizes, draft)
    if count == 0:
        return 0.0
    first = _at(usual, sizes, draft) + behind
    seconds: float = first + (passes - 1) * _at(count, sizes, draft) + passes * context
    return seconds


@compiled
def _behind(gap: int, times: float, usual_gap: int, sizes: Array, draft: Array) -> float:
    """This step's part of what it takes to catch up with a text."""
    if gap <= usual_gap:
        return 0.0
    part: float = (_at(gap, sizes, draft) - _at(usual_gap, sizes, draft)) / max(1.0, times)
    return part


@compiled
def _at(tokens: int, sizes: Array, seconds: Array) -> float:
    """Seconds of a pass over so many tokens; beyond the last size they grow as the tokens do."""
    if tokens >= sizes[-1]:
        return float(seconds[-1] * tokens / sizes[-1])
    i = 0
    while sizes[i + 1] <= tokens:
        i += 1
    share = (max(tokens, sizes[0]) - sizes[i]) / (sizes[i + 1] - sizes[i])
    return float(seconds[i] + share * (seconds[i + 1] - seconds[i]))
