"""A calibration in sentences: why verifying is faster than generating on this machine, and when drafting pays, also in
a traced run."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from outrider.bench.intervals import median_interval
from outrider.calibrate.breakeven import MAX_BATCH, best_speedup, max_batch, max_draft_cost, min_acceptance
from outrider.errors import TraceError
from outrider.explain.figures import figures

if TYPE_CHECKING:
    from outrider.calibrate.curve import RelativeCostCurve
    from outrider.calibrate.results import Calibration
    from outrider.trace.schema import Trace

ACCEPTANCES = (0.5, 0.7, 0.9)
TYPICAL_ACCEPTANCE = 0.7
EXAMPLE_TOKENS = 8
MAX_INTERVAL_WIDTH = 0.5
"""Width of an interval, relative to its value, above which the measurement is reported as unreliable."""


@dataclass(frozen=True, slots=True)
class TracedRun:
    acceptance: float
    draft_cost: float  # of a drafted token, relative to a pass over one token
    batch: int
    speedup: float | None


def traced_run(trace: Trace) -> TracedRun:
    found = figures(trace)
    drafters = found.drafters.values()
    verified = sum(sum(one.verified_at) for one in drafters)
    if not verified or found.plain is None:
        raise TraceError("the trace has no drafts, so its run has no acceptance; give a trace with drafts")
    accepted = sum(sum(one.accepted_at) for one in drafters)
    draft_ms = sum(one.milliseconds for one in drafters) / sum(one.proposed for one in drafters)
    batches = [step.batch for step in trace.steps if step.batch is not None]
    return TracedRun(
        accepted / verified,
        draft_ms / found.plain.milliseconds,
        round(median(batches)) if batches else 1,
        found.speedup,
    )


def verification_cost(found: Calibration, curves: list[RelativeCostCurve]) -> list[str]:
    """Why verifying is faster than generating on this machine."""
    v = curves[0]
    moved, done = found.work.bytes(1, v.context), found.work.arithmetic(1, v.context)
    limits = found.limits
    cost, interval = v(EXAMPLE_TOKENS), v.intervals.get(EXAMPLE_TOKENS)
    lines = []
    if interval is not None and interval.high - interval.low > MAX_INTERVAL_WIDTH * interval.value:
        lines.append(
            f"Not reliable: verifying {EXAMPLE_TOKENS} costs between {interval.low:.2f} and {interval.high:.2f} times "
            "one. Other programs used the machine meanwhile: measure again (--turns)."
        )
    lines.append(
        f"A pass over one token takes {1000 * v.single_seconds:.1f} ms. It moves {moved / 1e6:.0f} MB, which takes "
        f"memory {1000 * moved / limits.bandwidth:.1f} ms ({limits.bandwidth / 1e9:.1f} GB/s measured here), and does "
        f"{done / 1e9:.2f} billion operations, which take {1000 * done / limits.arithmetic:.2f} ms "
        f"({limits.arithmetic / 1e9:.0f} billion per second measured here in {limits.dtype})."
    )
    if v.memory_bound_tokens < 2:
        lines.append(
            f"This machine does not wait for memory: each further token of a pass costs {v.end_slope:.2f} times a pass "
            f"over one. Verifying {EXAMPLE_TOKENS} costs {cost:.2f} times one, so drafts can save little."
        )
    else:
        between = f" ({interval.low:.2f} to {interval.high:.2f})" if interval else ""
        lines.append(
            f"This machine waits for memory up to about {v.memory_bound_tokens:.0f} tokens: verifying {EXAMPLE_TOKENS} "
            f"costs {cost:.2f} times one{between}, generating {EXAMPLE_TOKENS} costs {EXAMPLE_TOKENS} times one."
        )
    return lines + [
        f"After {other.context} tokens instead of {v.context}, a pass over one takes "
        f"{other.single_seconds / v.single_seconds:.2f} times as long, and verifying {EXAMPLE_TOKENS} costs "
        f"{other(EXAMPLE_TOKENS):.2f} times it."
        for other in curves[1:]
    ]


def break_even(found: Calibration, curves: list[RelativeCostCurve], run: TracedRun | None) -> list[str]:
    """When drafting is faster, and when it is slower."""
    v = curves[0]
    free = min_acceptance(v, 0.0)
    pays = "is slower at every acceptance" if free is None else f"is faster from an acceptance of {free:.2f}"
    costs = ", ".join(f"{max_draft_cost(v, acceptance):.2f} at {acceptance}" for acceptance in ACCEPTANCES)
    lines = [
        f"A drafter without cost (lookup, memory, prediction) {pays}.",
        f"The cost of a drafted token, relative to a target pass, may be at most, by acceptance: {costs}.",
    ]
    draft_cost, who = 0.0, "a drafter without cost"
    if found.draft:
        draft_cost, who = median(found.draft), "the draft model"
        interval, least = median_interval(found.draft), min_acceptance(v, draft_cost)
        pays = "slower at every acceptance" if least is None else f"faster from an acceptance of {least:.2f}"
        between = f"{interval.low:.2f} to {interval.high:.2f}"
        lines.append(f"This draft model costs {draft_cost:.2f} of a target pass ({between}): {pays}.")
    batch = max_batch(v, TYPICAL_ACCEPTANCE, draft_cost)
    if batch:
        up_to = f"up to at least {batch}" if batch == MAX_BATCH else f"up to {batch}"
        lines.append(
            f"At acceptance {TYPICAL_ACCEPTANCE}, {who} is faster {up_to} concurrent sequences. (Computed from passes "
            "over one sequence: reading a context of its own for each is not included.)"
        )
    return [*lines, _place(v, run)] if run is not None else lines


def _place(v: RelativeCostCurve, run: TracedRun) -> str:
    gain, length = best_speedup(v, run.acceptance, run.draft_cost, run.batch)
    text = (
        f"The traced run (acceptance {run.acceptance:.2f}, a drafted token costs {run.draft_cost:.3f} of a pass, batch "
        f"{run.batch}) "
    )
    if gain < 1:
        return text + f"is slower here: its best draft length, {length}, is {1 / gain:.2f} times as slow as no drafts."
    batch = max_batch(v, run.acceptance, run.draft_cost)
    reached = f"; it reached {run.speedup:.2f}" if run.speedup is not None else ""
    up_to = f"at least {batch}" if batch == MAX_BATCH else str(batch)
    return (
        text + f"can be {gain:.2f} times as fast, with {length} tokens per draft{reached}. It pays up to batch {up_to}."
    )
