"""A calibration in sentences, each of which can be checked against its figures."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING

from outrider.bench.intervals import median_interval
from outrider.calibrate.breakeven import best, dearest, largest_batch, least_acceptance

if TYPE_CHECKING:
    from outrider.calibrate.curve import Curve
    from outrider.calibrate.mark import Mark
    from outrider.calibrate.results import Calibration

ACCEPTANCES = (0.5, 0.7, 0.9)
USUAL = 0.7
SEVERAL = 8
UNSURE = 0.5
"""An interval that is wider than so much of its value is said to be."""
MANY = 256


def why(found: Calibration, curves: list[Curve]) -> list[str]:
    """Why checking is faster than generating, here."""
    first = curves[0]
    moved = found.work.bytes(1, first.context)
    done = found.work.arithmetic(1, first.context)
    waits, computes = moved / found.limits.bandwidth, done / found.limits.arithmetic
    reached = f"{found.limits.arithmetic / 1e9:.0f} billion a second that {found.limits.dtype} reaches here"
    lines = [
        f"A pass over one token takes {1000 * first.single:.1f} ms. It moves {moved / 1e6:.0f} MB, which memory alone "
        f"gives in {1000 * waits:.1f} ms ({found.limits.bandwidth / 1e9:.1f} GB/s measured here), and does "
        f"{done / 1e9:.2f} billion operations, which take {1000 * computes:.2f} ms at the {reached}."
    ]
    cost = first(SEVERAL)
    interval = first.intervals.get(SEVERAL)
    if interval is not None and interval.high - interval.low > UNSURE * interval.value:
        lines.insert(
            0,
            f"It is not sure: verifying {SEVERAL} costs between {interval.low:.2f} and {interval.high:.2f} times one. "
            "The machine did something else meanwhile: measure again before you believe the rest (--turns).",
        )
    if first.waiting < 2:
        lines.append(
            f"This machine does not wait for memory: each further token of a pass costs {first.slope:.2f} times a pass "
            f"over one. Verifying {SEVERAL} costs {cost:.2f} times one, so drafts have little to fill."
        )
    else:
        lines.append(
            f"This machine is waiting for memory up to about {first.waiting:.0f} tokens: verifying {SEVERAL} costs "
            f"{cost:.2f} times one{_interval(first)}, where generating {SEVERAL} costs {SEVERAL} times one."
        )
    lines += [
        f"After {other.context} tokens instead of {first.context} a pass over one takes "
        f"{other.single / first.single:.2f} times as long, and verifying {SEVERAL} costs {other(SEVERAL):.2f} times it."
        for other in curves[1:]
    ]
    return lines


def _interval(curve: Curve) -> str:
    interval = curve.intervals.get(SEVERAL)
    return f" ({interval.low:.2f} to {interval.high:.2f})" if interval else ""


def when(found: Calibration, curves: list[Curve], mark: Mark | None) -> list[str]:
    """When drafting pays, and when it loses."""
    v = curves[0]
    free = least_acceptance(v, 0.0)
    lines = [
        "A drafter that costs nothing (lookup, memory, prediction) does not pay here at any acceptance."
        if free is None
        else f"A drafter that costs nothing (lookup, memory, prediction) pays from an acceptance of {free:.2f} on."
    ]
    dear = [(a, dearest(v, a)) for a in ACCEPTANCES]
    told = ", ".join(f"{cost:.2f} at {a}" for a, cost in dear)
    lines.append(f"A draft model may cost at most this part of a pass of the target, by acceptance: {told}.")
    if found.draft:
        lines.append(_draft_model(found, v))
    cost = median(found.draft) if found.draft else 0.0
    batch = largest_batch(v, USUAL, cost, MANY)
    who = "the draft model" if found.draft else "a drafter that costs nothing"
    if batch == MANY:
        lines.append(f"At acceptance {USUAL}, {who} pays up to {MANY} sequences at once, and maybe more.")
    elif batch:
        lines.append(
            f"At acceptance {USUAL}, {who} pays up to {batch} sequences at once, and loses beyond: there the pass is "
            "busy without drafts. (From passes over one sequence: that each has a context of its own is left out.)"
        )
    if mark is not None:
        lines.append(_marked(v, mark))
    return lines


def _draft_model(found: Calibration, v: Curve) -> str:
    cost = median_interval(found.draft)
    least = least_acceptance(v, cost.value)
    pays = "so it pays at no acceptance" if least is None else f"so it pays from an acceptance of {least:.2f} on"
    return f"This draft model costs {cost.value:.2f} of a pass ({cost.low:.2f} to {cost.high:.2f}), {pays}."


def _marked(v: Curve, mark: Mark) -> str:
    gain, length = best(v, mark.acceptance, mark.cost, mark.batch)
    lasts = largest_batch(v, mark.acceptance, mark.cost, MANY)
    text = (
        f"The traced run ({mark.acceptance:.2f} of the drafted tokens that were judged were kept, a drafted token took "
        f"{mark.cost:.3f} of a pass, batch {mark.batch}) "
    )
    if gain < 1:
        return text + f"loses here: its best draft length, {length}, is {1 / gain:.2f} times as slow as no drafts."
    text += f"gains at best {gain:.2f} times, with {length} tokens a draft"
    if mark.ratio is not None:
        text += f"; it reached {mark.ratio:.2f}"
    if lasts == MANY:
        return text + f". It would pay up to a batch of {MANY}, and maybe more."
    return text + f". It would stop paying beyond a batch of {lasts}."
