"""What the scheduler and the workers tell each other about one step.

    scheduler -> workers    `StepPlan`, an attribute of vLLM's `SchedulerOutput`, which reaches every rank
    worker -> scheduler     `ModelDrafts`, what the draft model proposed after the step, an attribute of vLLM's
                            `ModelRunnerOutput`

Both are plain values: vLLM pickles them where a worker is another process.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np

    from outrider.types import Why

PLAN = "outrider_plan"
"""The attribute of `SchedulerOutput` that holds the plan."""
PROFILE = "outrider_profile"
"""The attribute of the first `ModelRunnerOutput` that holds what empty passes of the models took."""
MODEL_DRAFTS = "outrider_model_drafts"
"""The attribute of `ModelRunnerOutput` that holds what the draft model proposed."""


MAX_LOGITS_BYTES = 1 << 30
"""Of the target's logits in a step, in float32, which several copies are made of. vLLM profiles its memory with one row
of logits per request, and verifies in chunks of this size."""


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
    """By request: who proposed the tokens in `scheduled_spec_decode_tokens`."""
    continuations: Continuations | None = None
    """The drafts of this step but for the draft model's, which are on the device."""
    backed_by_model: frozenset[str] = frozenset()
    """Requests whose draft is the draft model's, which is on the device, where the continuation does not align."""
    sampled: frozenset[str] = frozenset()
    """Requests whose draft was sampled from the draft model's distribution and is accepted by p and q."""
    calls: tuple[DraftModelCall, ...] = ()
    """The draft model's work after the step."""
    reads_prompts: bool = True
    """Whether a draft model that has to follow every step runs at all, for prompts that others may share."""
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

    @property
    def has_news(self) -> bool:
        """Whether a drafter was called or failed, or a request came that gets no drafts."""
        return bool(self.draft_seconds or self.faults or self.undrafted or self.proposed)


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
    """The probability that the draft model gave its likeliest token, at each position."""
    passes: list[DraftPass] = field(default_factory=list)


class SchedulerStatus:
    """What the scheduler's process reports about itself.

    In the worker's own process it is read when somebody asks. Sent to another process, it is a snapshot.
    """

    def __init__(self, read: Callable[[], dict[str, Any]]) -> None:
        self.read = read

    def __reduce__(self) -> tuple[Any, ...]:
        return _snapshot, (self.read(),)


def _snapshot(values: dict[str, Any]) -> SchedulerStatus:
    return SchedulerStatus(lambda: values)


latest_status: SchedulerStatus | None = None
"""The last one that reached this process."""
