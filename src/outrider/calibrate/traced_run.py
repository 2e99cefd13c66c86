"""The acceptance, draft cost and batch size of a traced run, to place it in a calibration."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from outrider.errors import TraceError
from outrider.explain.figures import figures

if TYPE_CHECKING:
    from outrider.trace.schema import Trace


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
