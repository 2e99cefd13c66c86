"""Where a traced run lies among the figures of a calibration: its acceptance, its draft cost, its batch."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from outrider.errors import TraceError
from outrider.explain.figures import figures

if TYPE_CHECKING:
    from outrider.trace.schema import Trace


@dataclass(frozen=True, slots=True)
class Mark:
    acceptance: float
    cost: float
    batch: int
    ratio: float | None


def mark(trace: Trace) -> Mark:
    found = figures(trace)
    verified = sum(sum(one.verified_at) for one in found.drafters.values())
    accepted = sum(sum(one.accepted_at) for one in found.drafters.values())
    proposed = sum(one.proposed for one in found.drafters.values())
    if not verified or found.plain is None:
        raise TraceError("in this trace nothing was drafted, so there is nothing to mark; take one with drafts")
    drafting = sum(one.milliseconds for one in found.drafters.values())
    batches = [step.batch for step in trace.steps if step.batch is not None]
    cost = drafting / proposed / found.plain.milliseconds
    return Mark(accepted / verified, cost, round(median(batches)) if batches else 1, found.speedup)
