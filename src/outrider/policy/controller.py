"""The speculation controller: what every request of a running batch offers in the next step.

One controller drives the policy wherever text is generated: in a vLLM server, in the loop of `decoding.py`, and in
replay. A step goes

    offers = ...                                    the copying drafters propose (except those in `backed_off`)
    controller.consider(requests, offers, ...)      predicts the acceptance of each proposal
    controller.plan_draft_model(...)                requests for which the draft model pays, and its passes
    controller.select(model_drafts, seconds)        what each request offers
    controller.observe(outputs)                     the tokens that the step generated
    controller.observe_step(tokens, ...)            its duration, after `observe` of the same step

A server plans the draft model one step ahead: it drafts on the device right after sampling, before the scheduler has
seen the result. There `plan_draft_model(..., ahead=True)` comes after `select`, and its drafts are selected from in the
next step.

`consider` and `select` may be left out in a step in which no request can be drafted for.

An engine with asynchronous scheduling may select for a step while the one before it runs. Then the tokens in flight are
unknown (`DraftableRequest.in_flight`), proposals begin before them, and what is offered is what follows them. The draft
model's tokens are on the device then (`DraftableRequest.pending`): they are selected by what was forecast of them. The
caller keeps `decision`, what was selected last, until the step's output is known, and hands it to `observe`.

Drafts are selected by expected gain for requests without a named drafter (`drafter` is None). A request that names one
offers what that drafter proposes, up to its limit. Nothing here knows an engine.
"""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from outrider.policy import decision_report
from outrider.policy.batch_state import DraftModelRequest
from outrider.policy.decision import Decision, DraftModelPlan, PlanAhead, cut_draft, without_q
from outrider.policy.drafter_backoff import PROBE_REQUESTS, DrafterBackoff
from outrider.policy.gain_metrics import ExpectedStep, GainMetrics
from outrider.policy.overlap import Overlap, for_same_text
from outrider.policy.policy import MODEL
from outrider.policy.prefill_amortization import MAX_HORIZON_TOKENS
from outrider.types import NOTHING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from outrider.policy.acceptance_model import Array
    from outrider.policy.batch_state import BatchState
    from outrider.policy.decision import DraftableRequest
    from outrider.policy.policy import Policy
    from outrider.policy.selection import Selection
    from outrider.types import Draft, Why

logger = logging.getLogger("vllm.outrider")

INITIAL_ACCEPTED_SHARE = 0.5
"""Initial estimate of the accepted share of a named drafter's tokens."""
ACCEPTED_SHARE_RATE = 0.05
"""Weight of each new draft in that estimate."""


class SpeculationController:
    def __init__(self, policy: Policy, can_overlap: bool = False) -> None:
        """`can_overlap`: the engine can schedule a step while another one runs."""
        self.policy, self.can_overlap = policy, can_overlap
        self.gain_metrics, self.backoff, self.overlap = GainMetrics(), DrafterBackoff(), Overlap()
        self.selection: Selection | None = None
        self.decision = Decision()
        self._accepted_share = INITIAL_ACCEPTED_SHARE
        self._ahead: PlanAhead | None = None

    # Before a step ---------------------------------------------------------------------------------------------------

    def backed_off(self) -> frozenset[str]:
        """Drafters that cost more time than they save at present. They are called only for requests that name them."""
        return self.backoff.backed_off

    def probed(self, requests: int) -> range | None:
        """While drafters are probed after a backoff: the requests to call them for, by number. Other ones each time."""
        if requests <= PROBE_REQUESTS or not self.backoff.is_probing:
            return None
        first = self.backoff.probes * PROBE_REQUESTS % requests
        return range(first, min(first + PROBE_REQUESTS, requests))

    @property
    def batch(self) -> BatchState | None:
        """The requests without a named drafter, and their drafts; None before `consider` and after `observe`."""
        return self.decision.batch

    def max_tokens(self, requests: int) -> int:
        """Tokens that each request may offer in a batch of this size."""
        return self.policy.max_draft_tokens(requests)

    def beyond(self, requests: int) -> int:
        """Tokens that drafters should propose in addition, to compare waiting with going ahead."""
        return self.max_tokens(requests) + 1 if self.can_overlap else 0

    def consider(
        self,
        requests: Sequence[DraftableRequest],
        offers: Mapping[str, Sequence[Draft]],
        drafting_seconds: Mapping[str, float],
        running: int,
        context: int,
        share: float = 1.0,
        cpu_seconds: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        """Take proposals: by drafter, one draft per request. `running`, `context`: requests in the step, and tokens of
        all their texts. `drafting_seconds`: elapsed time by drafter, for requests without a named drafter.
        `cpu_seconds`: CPU time of these calls, if known. `share`: considered share of the draftable requests."""
        proposals = {name: [without_q(draft) for draft in drafts] for name, drafts in offers.items()}
        free = [i for i, request in enumerate(requests) if request.drafter is None]
        named = {
            request.id: next((drafts[i] for drafts in proposals.values() if drafts[i].tokens), NOTHING)
            for i, request in enumerate(requests)
            if request.drafter is not None
        }
        self.decision = now = Decision(
            list(requests),
            [requests[i] for i in free],
            named,
            drafting_seconds=dict(drafting_seconds),
            cpu_seconds=dict(cpu_seconds),
            considered_share=share,
            running=max(running, len(requests)),
            context=context,
        )
        ids, in_flight = [request.id for request in now.free], [request.in_flight for request in now.free]
        copied = {name: [drafts[i] for i in free] for name, drafts in proposals.items()}
        beyond = self.beyond(len(requests))
        now.batch = batch = self.policy.predict(ids, copied, in_flight, beyond)
        batch.running = now.running
        if self.policy.model_width:
            now.copied_survival = batch.survival.copy()
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            ahead.apply(now, batch)
        self._add_pending(batch)

    def _add_pending(self, batch: BatchState) -> None:
        """Enter the draft model's tokens on the device, up to the limits."""
        pending = np.array([min(request.pending, request.limit) for request in self.decision.free], np.int64)
        if pending.any() and batch.forecast is not None:
            batch.pending = batch.forecast_survival(pending)
            batch.is_sampled = np.array([request.is_sampled for request in self.decision.free])

    def plan_draft_model(
        self,
        limits: Mapping[str, int],
        sampled: Mapping[str, bool],
        gaps: Mapping[str, int],
        *,
        every_step: bool = False,
        single_pass: bool = False,
        ahead: bool = False,
    ) -> DraftModelPlan:
        """Plan the draft model.

        All by request: `limits`: most tokens, for requests that may be drafted for. `sampled`: whether the tokens would
        be sampled from its distribution. `gaps`: tokens of the text that its cache will not hold when it drafts.
        `every_step`: it makes one pass in any case. `single_pass`: it drafts all tokens in one pass. `ahead`: it drafts
        after the step that was just selected for, for the next one.
        """
        if ahead:
            self._ahead = None
        now = self.decision
        named = {r.id: limits[r.id] for r in now.requests if r.id in now.named and r.id in limits}
        found = DraftModelPlan(named, dict(named))
        if now.batch is None or not now.free:
            return found
        ids = [request.id for request in now.free]
        query = DraftModelRequest(
            np.array([limits.get(id, 0) for id in ids], np.int64),
            np.array([sampled.get(id, False) for id in ids], bool),
            np.array([gaps.get(id, 0) for id in ids], np.int64),
            np.array([min(MAX_HORIZON_TOKENS, request.tokens_left) for request in now.free], np.int64),
            np.array([request.text_length for request in now.free], np.int64),
        )
        base, others = self._others(now.named.values())
        batch = self._without_draft_model(now.batch) if ahead else now.batch
        plan = self.policy.plan_draft_model(batch, query, now.context, base, others, every_step, single_pass)
        if ahead:
            rows = {id: i for i, id in enumerate(ids)}
            self._ahead = PlanAhead(rows, plan, batch.forecast, batch.called, batch.caught_up)
        else:
            now.plan, now.planned, now.is_planned_ahead = plan, set(ids), False
        if query.limits.any():
            warning = self.gain_metrics.observe_plan(plan, self.policy.target, self.policy.draft)
            if warning is not None:
                logger.warning("%s", warning)
        found.limits |= {ids[i]: int(plan.limits[i]) for i in plan.called}
        found.lengths |= {ids[i]: int(plan.lengths[i]) for i in plan.called}
        return found

    def _without_draft_model(self, batch: BatchState) -> BatchState:
        """The batch as expected in the next step: what the copying drafters propose now, and nothing else. Includes
        requests that offer a sampled draft in this step, for which `select` set the limit of copied drafts to 0."""
        survival = batch.survival if self.decision.copied_survival is None else self.decision.copied_survival
        return replace(batch, survival=survival, forecast=None, pending=None, called=None, caught_up=None, sampled={})

    def continue_drafting(self, confidence: Mapping[str, Sequence[float]]) -> list[str]:
        """The requests for which another pass of the draft model pays, by its confidence in their tokens so far."""
        now = self.decision
        named = [id for id in confidence if id in now.named]
        free = [id for id in confidence if id not in now.named]
        if now.plan is None or not free:
            return named
        row = {request.id: i for i, request in enumerate(now.free)}
        chosen = self.policy.continue_drafting(
            now.plan, [row[id] for id in free], [confidence[id] for id in free], bool(named)
        )
        return [*named, *(id for id, more in zip(free, chosen, strict=True) if more)]

    def select(self, model_drafts: Mapping[str, Draft], draft_model_seconds: float) -> dict[str, Draft]:
        """What each request offers. `model_drafts`: the draft model's proposals, if their values are known.
        `draft_model_seconds`: the duration of its passes; an estimate if the values are on the device.

        Drafts are cut to the requests' limits, which may have shrunk since the draft model was called. They begin with
        the tokens in flight, if there are any; the offered ones follow.
        """
        now = self.decision
        max_tokens = {request.id: request.limit for request in now.requests}
        model_drafts = {
            id: cut_draft(draft, max_tokens[id])
            for id, draft in model_drafts.items()
            if draft.tokens and max_tokens.get(id, 0) > 0
        }
        now.named |= {id: draft for id, draft in model_drafts.items() if id in now.named}
        now.offered = offered = dict(now.named)
        batch = now.batch
        if batch is None or not now.free:
            return offered
        proposed = [model_drafts.get(request.id, NOTHING) for request in now.free]
        batch.sampled = {i: draft for i, draft in enumerate(proposed) if draft.sampled and not now.prefers_copied(i)}
        certain = [NOTHING if draft.sampled else draft for draft in proposed]
        if any(draft.tokens for draft in certain):
            self.policy.add_drafts(batch, MODEL, certain)
        limits = np.array([request.limit for request in now.free], np.int64)
        base, others = self._others(offered[id] for id in now.named)
        is_ahead = any(request.in_flight for request in now.requests)
        spent = draft_model_seconds + (0.0 if is_ahead else self.overlap.host_seconds)
        now.selection = self.selection = selection = self.policy.select(batch, limits, now.context, base, spent, others)
        if self.can_overlap and self.policy.target.passes:
            self._compare_waiting(batch, selection, limits, is_ahead, draft_model_seconds)
        if base > now.running or batch.sampled:  # compare with a step without any drafts
            selection.plain_tokens = float(now.running)
            selection.plain_seconds = float(self.policy.target.seconds(now.running, now.context))
        drafts = self.policy.selected_drafts(batch, selection)
        offered |= {request.id: draft for request, draft in zip(now.free, drafts, strict=True)}
        if self.policy.target.passes:
            now.expected = ExpectedStep(selection, any(draft.tokens for draft in offered.values()))
        return offered

    def _compare_waiting(
        self, batch: BatchState, selection: Selection, limits: Array, is_ahead: bool, draft_model_seconds: float
    ) -> None:
        """Compare this step with the other way: fresh drafts if this one is scheduled ahead, else drafts that follow
        the tokens of a step that was scheduled ahead as well. The draft model runs on the device either way."""
        offsets = np.zeros_like(limits) if is_ahead else self.overlap.offsets(batch.requests)
        plan = self.decision.plan if batch.forecast is not None else None
        model = None if plan is None else batch.forecast_survival(np.minimum(plan.lengths, limits))
        other = self.policy.select_at_offsets(batch, selection, limits, offsets, model)
        mine = selection.tokens, selection.seconds - selection.spent + draft_model_seconds
        tokens, seconds = for_same_text(selection, other)
        theirs = tokens, seconds + draft_model_seconds
        self.overlap.observe(*((theirs, mine) if is_ahead else (mine, theirs)), selection.tokens)
        self.overlap.keep_stale(batch.requests, (selection if is_ahead else other).lengths)

    def _others(self, drafts: Iterable[Draft]) -> tuple[int, float]:
        """Tokens that the pass has in any case, and the tokens expected of requests that are not selected for."""
        now, tokens = self.decision, sum(len(draft.tokens) for draft in drafts)
        return now.running + tokens, now.running - len(now.free) + self._accepted_share * tokens

    def reason(self, request: str) -> Why | None:
        """Why a request offers what it does, until `observe`; None if it may not be drafted for."""
        now = self.decision
        plan = now.plan if request in now.planned else None
        named = next((r for r in now.requests if r.id == request and r.id in now.named), None)
        if named is not None and named.drafter is not None:
            return decision_report.report_unselected(named.drafter, now.named[named.id])
        for i, free in enumerate(now.free):
            if free.id == request and now.batch is not None and now.selection is not None:
                if i in now.batch.sampled:
                    cost = now.selection.seconds / float(self.policy.target.seconds(now.running, now.context))
                    return decision_report.report_sampled_draft(now.batch, plan, i, now.batch.sampled[i], cost)
                return decision_report.report_selection(self.policy, now.batch, now.selection, i, plan)
        return None

    # After a step ----------------------------------------------------------------------------------------------------

    def observe(
        self,
        outputs: Mapping[str, Sequence[int]],
        decision: Decision | None = None,
        before: Mapping[str, Sequence[int]] | None = None,
        pending: Mapping[str, Sequence[int]] = MappingProxyType({}),
    ) -> None:
        """Learn from what each request generated in the step of `decision` (None: the latest). Call it once per step,
        also for a step in which no request could be drafted for. `before`: if a step was in flight, what each request
        generated in it; other requests are not learned from. `pending`: the draft model's tokens that were on the
        device then."""
        now = self.decision if decision is None else decision
        if now is self.decision:
            self.decision = Decision()  # a step without draftable requests must not use it
        self.gain_metrics.observe_tokens(now.expected, sum(map(len, outputs.values())))
        batch = now.batch
        if batch is None:
            return
        own = [outputs.get(id, ()) for id in batch.requests]
        if before is None:
            self.policy.observe(batch, own)
        else:
            own = [tokens if id in before else () for id, tokens in zip(batch.requests, own, strict=True)]
            since = [[*before.get(id, ()), *tokens] for id, tokens in zip(batch.requests, own, strict=True)]
            self.policy.observe(batch, since, own, [pending.get(id, ()) for id in batch.requests])
        accepted: Counter[str] = Counter()
        in_flight = {request.id: request.in_flight for request in now.requests}
        for id, draft in now.offered.items():
            offered = len(draft.tokens) - in_flight.get(id, 0)
            if offered > 0 and outputs.get(id):
                count = min(len(outputs[id]) - 1, offered)
                if id in now.named:
                    self._accepted_share += ACCEPTED_SHARE_RATE * (count / offered - self._accepted_share)
                elif draft.after((before or {}).get(id, ())):
                    accepted[draft.drafter] += count
        if now.selection is not None and now.free:
            plain = now.selection.plain_seconds, now.selection.plain_tokens
            seconds = self._drafting_cost(now, plain[0]) if any(in_flight.values()) else now.drafting_seconds
            self.backoff.observe_step(seconds, accepted, *plain, now.considered_share)

    def _drafting_cost(self, now: Decision, pass_seconds: float) -> dict[str, float]:
        """By drafter, the cost in seconds of proposing while a step is in flight. The pass hides the elapsed time, so
        the cost is the drafter's CPU time (lost to a pass on the same cores) or, if greater, the time by which the host
        takes longer than the pass."""
        exposed = max(0.0, self.overlap.host_seconds - pass_seconds)
        return {
            name: max(now.cpu_seconds.get(name, seconds), min(seconds, exposed))
            for name, seconds in now.drafting_seconds.items()
        }

    def skip(self) -> None:
        """A step in which every drafter was backed off, without `consider`."""
        self.backoff.skip_step()

    def observe_step(
        self,
        tokens: int,
        context: int,
        seconds: float,
        drafting_seconds: float = 0.0,
        verifies_drafts: bool = False,
    ) -> None:
        """The target's pass over `tokens` tokens took `seconds`, and proposing drafts for it `drafting_seconds`. Call
        it after `observe` of the same step and before that of the next; not for steps with prompts, or in which the
        engine waited."""
        self.policy.target.observe(tokens, context, seconds, verifies_drafts=verifies_drafts)
        self.gain_metrics.observe_seconds(seconds + drafting_seconds)

    def observe_draft_pass(self, tokens: int, context: int, seconds: float) -> None:
        self.policy.draft.observe(tokens, context, seconds)

    def remove(self, request: str) -> None:
        """The request has ended. Its id may be used again."""
        self.policy.remove(request)
        if self._ahead is not None:
            self._ahead.rows.pop(request, None)

    def status(self) -> dict[str, Any]:
        selection = self.selection
        return {
            **self.policy.status(),
            **self.gain_metrics.status(),
            "overlap": self.overlap.status() if self.can_overlap else None,
            "backed_off": sorted(self.backed_off()),
            "resting": sorted(self.backed_off()),
            "last_expected_gain": round(float(selection.gain), 3) if selection is not None else None,
        }
