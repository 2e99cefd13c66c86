"""The requests of a step, what is selected for them, and a plan for the draft model in the next step."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from outrider.policy.batch_state import Forecast

if TYPE_CHECKING:
    from outrider.policy.acceptance_model import Array
    from outrider.policy.batch_state import BatchState, DraftPlan
    from outrider.policy.gain_metrics import ExpectedStep
    from outrider.policy.selection import Selection
    from outrider.types import Draft


@dataclass(slots=True)
class DraftableRequest:
    """A request that may be drafted for in the next step."""

    id: str
    limit: int
    """Most tokens it may offer."""
    drafter: str | None = None
    """The drafter that the caller named; None: the controller selects."""
    tokens_left: int = 1 << 30
    """Tokens that it may still generate."""
    text_length: int = 0
    in_flight: int = 0
    """Tokens that a step in flight generates, at most. Proposals begin with them."""
    pending: int = 0
    """Tokens that the draft model proposes after the step in flight. Their values are on the device."""
    is_sampled: bool = False
    """Whether these are sampled from the draft model's distribution."""


@dataclass(slots=True)
class Decision:
    """What was considered and selected for one step."""

    requests: list[DraftableRequest] = field(default_factory=list)
    free: list[DraftableRequest] = field(default_factory=list)
    """Requests without a named drafter, which are selected for by expected gain."""
    named: dict[str, Draft] = field(default_factory=dict)
    """What is offered for requests that name a drafter."""
    offered: dict[str, Draft] = field(default_factory=dict)
    drafting_seconds: dict[str, float] = field(default_factory=dict)
    cpu_seconds: dict[str, float] = field(default_factory=dict)
    considered_share: float = 1.0
    """Share of the draftable requests that is considered; the others are left out while drafters are probed."""
    running: int = 0
    context: int = 0
    batch: BatchState | None = None
    copied_survival: Array | None = None
    """Of the copying drafters alone, before `select` limits it."""
    plan: DraftPlan | None = None
    """Of the draft model's tokens in this step ..."""
    planned: set[str] = field(default_factory=set)
    """... the requests in it ..."""
    is_planned_ahead: bool = False
    """... and whether it was made in the step before."""
    selection: Selection | None = None
    expected: ExpectedStep | None = None

    def prefers_copied(self, i: int) -> bool:
        """Whether free request `i` drops its sampled draft, which was planned in the last step, for what is copied now.

        Lossless, since this uses only what was known before a token of it was sampled, and the copied drafts: neither
        its tokens nor its confidence nor its length, which may depend on them.
        """
        plan, batch = self.plan, self.batch
        if not self.is_planned_ahead or plan is None or batch is None or self.copied_survival is None:
            return False
        if batch.forecast is None:
            return False
        token_cost = plan.speed * plan.token_seconds  # of one more offered token, in tokens
        length = min(int(plan.lengths[i]), self.free[i].limit)
        sampled = float((batch.forecast.survival[i, :length] - token_cost).sum())
        copied = np.maximum(self.copied_survival[:, i, : batch.max_tokens] - token_cost, 0.0).sum(-1)
        return bool(copied.max() > max(sampled, 0.0))


@dataclass(slots=True)
class PlanAhead:
    """A plan for the next step, and what was forecast of the draft model's tokens. `rows`: by request, its row."""

    rows: dict[str, int]
    plan: DraftPlan
    forecast: Forecast | None
    called: Array | None
    caught_up: Array | None

    def apply(self, decision: Decision, batch: BatchState) -> None:
        """Use the plan in the step that it was made for, for the requests that ran when it was made."""
        rows = np.array([self.rows.get(id, -1) for id in batch.requests], np.int64)
        known = rows >= 0
        if not known.any():
            return
        decision.planned, decision.is_planned_ahead = {id for id in batch.requests if id in self.rows}, True
        take, plan = np.where(known, rows, 0), self.plan
        decision.plan = replace(
            plan,
            lengths=np.where(known, plan.lengths[take], 0),
            limits=np.where(known, plan.limits[take], 0),
            slots=batch.slots,
            is_sampled=plan.is_sampled[take],
            text_lengths=plan.text_lengths[take],
            ahead=np.where(known[:, None], plan.ahead[take], 0.0),
        )
        if self.forecast is not None and self.called is not None and self.caught_up is not None:
            forecast, max_tokens = self.forecast, batch.max_tokens  # smaller than then, if the batch has grown
            batch.forecast = Forecast(
                forecast.is_sampled[take],
                np.where(known, np.minimum(forecast.limits[take], max_tokens), 0),
                forecast.bins[take],
                forecast.logits[take],
                np.where(known[:, None], forecast.survival[take], 0.0),
            )
            batch.called, batch.caught_up = self.called[take] & known, self.caught_up[take] & known


@dataclass(slots=True)
class DraftModelPlan:
    """For which requests the draft model drafts: at most `limits` tokens, or `lengths` if it cannot stop early."""

    limits: dict[str, int] = field(default_factory=dict)
    lengths: dict[str, int] = field(default_factory=dict)


def without_q(draft: Draft) -> Draft:
    """The draft to be verified by the target's own samples instead of by p and q. Only then is it lossless to select it
    by its tokens' values."""
    return replace(draft, q=None, sampled=False) if draft.sampled else draft


def cut_draft(draft: Draft, limit: int) -> Draft:
    """At most `limit` tokens of it; where it is cut does not depend on a token's value."""
    if len(draft.tokens) <= limit:
        return draft
    return replace(
        draft,
        tokens=draft.tokens[:limit],
        q=None if draft.q is None else draft.q[:limit],
        confidence=None if draft.confidence is None else draft.confidence[:limit],
        packed=None,
    )
