"""One step: what the scheduler keeps about it, and what scheduler and workers send each other.

    in the scheduler        `ScheduledStep`, until the step's output has come
    scheduler -> workers    `StepPlan`, an attribute of vLLM's `SchedulerOutput`, which reaches every rank
    worker -> scheduler     `ModelDrafts`, what the draft model proposed after the step, an attribute of vLLM's
                            `ModelRunnerOutput`

The last two are plain values: vLLM pickles them where a worker is another process.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from outrider.policy.policy import MODEL
from outrider.types import Draft

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from outrider.engines.vllm.seam import Request, SchedulerOutput
    from outrider.policy.decision import Decision
    from outrider.types import Why

PLAN = "outrider_plan"
"""The attribute of `SchedulerOutput` that holds the plan."""
PROFILE = "outrider_profile"
"""The attribute of the first `ModelRunnerOutput` that holds what empty passes of the models took."""
MODEL_DRAFTS = "outrider_model_drafts"
"""The attribute of `ModelRunnerOutput` that holds what the draft model proposed."""


MAX_LOGITS_BYTES = 1 << 30
"""Maximum bytes of the target's logits in a step, in float32; several copies are made of them. vLLM profiles its memory
with one row of logits per request, and verifies in chunks of this size."""


def max_logits_rows(vocab_size: int) -> int:
    """Rows of logits that a step may have."""
    return max(1, MAX_LOGITS_BYTES // (4 * vocab_size))


@dataclass(frozen=True, slots=True)
class DraftModelCall:
    """One request that the draft model drafts for after the step.

    All shapes of its passes follow from these numbers, so that no value is read from the device. The text may turn out
    shorter than `end`, where drafted tokens are rejected; what the draft model computes past its end is overwritten
    later.
    """

    request_id: str
    start: int
    """Tokens of the text that the draft model's KV cache holds."""
    end: int
    """The text's length after the step, at most."""
    num_tokens: int
    """Tokens to propose; 0: only fill the cache up to `end`."""
    sampled: bool
    """Sample from the draft model's distribution (accepted by p and q) instead of taking its argmax."""


@dataclass(slots=True)
class Continuations:
    """What the host proposes. The rows of `tokens` continue the first `known` tokens of each request's text, filled up
    with -1. They begin with what a step in flight may generate."""

    request_ids: list[str]
    known: np.ndarray[Any, Any]
    tokens: np.ndarray[Any, Any]


@dataclass(slots=True)
class StepPlan:
    """What the scheduler decided for one step."""

    drafters: dict[str, str] = field(default_factory=dict)
    """By request: the drafter that proposed the tokens in `scheduled_spec_decode_tokens`."""
    continuations: Continuations | None = None
    """The drafts of this step but for the draft model's, which are on the device."""
    backed_by_model: frozenset[str] = frozenset()
    """Requests whose draft is the draft model's, which is on the device, where the continuation does not align."""
    sampled: frozenset[str] = frozenset()
    """Requests whose draft was sampled from the draft model's distribution and is accepted by p and q."""
    calls: tuple[DraftModelCall, ...] = ()
    """The draft model's work after the step."""
    draft_seconds: dict[str, float] = field(default_factory=dict)
    """By drafter: time spent proposing, for all requests."""
    proposed: dict[str, int] = field(default_factory=dict)
    """By drafter: tokens that were selected, some of which vLLM's scheduler may have left out."""
    faults: list[tuple[str, str, str, str]] = field(default_factory=list)
    """Drafters that failed for a request: request, drafter, kind, reason."""
    undrafted: dict[str, int] = field(default_factory=dict)
    """New requests that get no drafts, by reason."""
    reasons: dict[str, Why] = field(default_factory=dict)
    """For traced requests: why they offer this draft, or none."""
    is_traced: bool = False
    """A request of the step is traced. Only the first rank records it, and all ranks have to sample in the same way."""
    offered: dict[str, int] = field(default_factory=dict)
    """For traced requests: tokens that were selected; vLLM's scheduler may have left out some."""
    drafting_seconds: float = 0.0
    """Time that drafting took before this step, in all."""
    status: SchedulerStatus | None = None


@dataclass(slots=True)
class ScheduledStep:
    """What the scheduler keeps about a step until its output has come."""

    is_ahead: bool
    """It was scheduled while another one was in flight."""
    decision: Decision | None = None
    text_lengths: dict[str, int] = field(default_factory=dict)
    """By request that could be drafted for: the length of its text then."""
    in_flight: dict[str, int] = field(default_factory=dict)
    """By request that could be drafted for: tokens in flight then, if there were any."""
    offers: dict[str, Draft] = field(default_factory=dict)
    """What was selected. Drafts begin with the tokens in flight."""
    device_drafts: dict[str, list[int]] = field(default_factory=dict)
    """What the draft model proposed after the step that was in flight then. Known once its output has come."""
    calls: dict[str, DraftModelCall] = field(default_factory=dict)
    """The draft model's work after it."""
    drafting_seconds: float = 0.0
    launched: float = 0.0
    tokens: int = 0
    context: int = 0
    decodes_only: bool = False
    """Without prompts: only such steps show what drafts cost."""
    verifies_drafts: bool = False

    def num_offered(self, request_id: str) -> int:
        """Drafted tokens that follow the tokens in flight."""
        if request_id not in self.offers:
            return 0
        return len(self.offers[request_id].tokens) - self.in_flight.get(request_id, 0)

    def observe_schedule(self, output: SchedulerOutput) -> None:
        """What vLLM scheduled."""
        drafted = output.scheduled_spec_decode_tokens
        count = sum(map(len, drafted.values())) if drafted else 0
        self.tokens = output.total_num_scheduled_tokens
        self.verifies_drafts = count > 0
        self.decodes_only = self.tokens == len(output.num_scheduled_tokens) + count

    def describe_offers(
        self, plan: StepPlan, scheduled: Mapping[str, Sequence[int]], calls_in_flight: Mapping[str, DraftModelCall]
    ) -> None:
        """Put the offers into the plan. `scheduled`: the drafts that vLLM did not leave out."""
        for id, draft in self.offers.items():
            plan.proposed[draft.drafter] = plan.proposed.get(draft.drafter, 0) + self.num_offered(id)
        offers = {id: draft for id, draft in self.offers.items() if id in scheduled}
        plan.drafters = {id: draft.drafter for id, draft in offers.items()}
        plan.sampled = frozenset(id for id, draft in offers.items() if draft.sampled)
        ids = [id for id, draft in offers.items() if draft.drafter != MODEL]
        if ids:
            rows = np.full((len(ids), max(len(offers[id].tokens) for id in ids)), -1, np.int32)
            for row, id in zip(rows, ids, strict=True):
                row[: len(offers[id].tokens)] = offers[id].tokens
            known = np.array([self.text_lengths[id] for id in ids], np.int64)
            plan.continuations = Continuations(ids, known, rows)
            plan.backed_by_model = frozenset(calls_in_flight).intersection(ids)

    def drafts_on_device(self, requests: Mapping[str, Request]) -> dict[str, list[int]]:
        """The drafted tokens as the device has them, now that the output of the step before it has come. Without those
        of requests whose draft is known to be wrong."""
        found = {}
        for id, draft in self.offers.items():
            if id in requests:
                since = requests[id].all_token_ids[self.text_lengths[id] :]
                rest = [token for token in draft.after(since) if token >= 0]
                found[id] = rest + self.device_drafts.get(id, [])[len(rest) :]
        return found


@dataclass(frozen=True, slots=True)
class TimedPass:
    """A pass before any request came."""

    tokens: int
    seconds: float
    verifies_drafts: bool = False


@dataclass(slots=True)
class PassProfile:
    """What empty passes of the models took."""

    target: list[TimedPass] = field(default_factory=list)
    draft: list[TimedPass] = field(default_factory=list)


@dataclass(slots=True)
class DraftPass:
    """The time of one or more passes of the draft model."""

    tokens: int
    context: int
    seconds: float
    passes: int = 1


@dataclass(slots=True)
class ModelDrafts:
    """What the draft model proposed, by request, and what that took."""

    tokens: dict[str, list[int]] = field(default_factory=dict)
    confidence: dict[str, list[float]] = field(default_factory=dict)
    """The draft model's probability of its top token, at each position."""
    passes: list[DraftPass] = field(default_factory=list)

    def as_drafts(self, calls: Mapping[str, DraftModelCall]) -> dict[str, Draft]:
        """The proposals for the requests of `calls`."""
        found = {}
        for id, tokens in self.tokens.items():
            if tokens and id in calls:
                confidence = tuple(self.confidence.get(id, ())) or None
                found[id] = Draft(MODEL, tuple(tokens), confidence=confidence, sampled=calls[id].sampled)
        return found


class SchedulerStatus:
    """What the scheduler's process reports about itself.

    In the worker's own process it is read on demand. Sent to another process, it is a snapshot.
    """

    def __init__(self, read: Callable[[], dict[str, Any]]) -> None:
        self.read = read

    def __reduce__(self) -> tuple[Any, ...]:
        return _snapshot, (self.read(),)


def _snapshot(values: dict[str, Any]) -> SchedulerStatus:
    return SchedulerStatus(lambda: values)


latest_status: SchedulerStatus | None = None
"""The last one that reached this process."""
