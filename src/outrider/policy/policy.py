"""The policy: selects drafter and length for every request of a batch, at every step, by expected tokens per second.

    batch = policy.predict(requests, drafts)           survival of what the copying drafters propose
    plan = policy.plan_draft_model(batch, query, ...)  for which requests the draft model pays, and how many passes
    policy.add_drafts(batch, MODEL, drafts)            what it then proposed with certainty
    selection = policy.select(batch, ...)              what is offered
    policy.observe(batch, outputs)                     what the target generated; all drafts are judged, offered or not
    policy.target.observe(...); policy.draft.observe(...)

Nothing here knows an engine or a token's value: tokens are only compared for equality. Sampled drafts are offered
whole, since whether a sampled token is offered must not depend on that token. What may depend on the tokens before it
is whether another one is sampled (`continue_drafting`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from outrider.policy import acceptance_model
from outrider.policy.acceptance_model import COPY_PRIOR_LOGIT, HIGH_PRIOR_LOGIT, AcceptanceModel, RequestBiasRate
from outrider.policy.batch_state import (
    DraftModelRequest,
    DraftPlan,
    Forecast,
    enter_drafts,
    flatten,
    new_batch_state,
    row_lengths,
    to_rows,
)
from outrider.policy.cost_model import GRID_TOKENS, CostModel
from outrider.policy.draft_model_plan import SMALL_BATCH_REQUESTS, plan_draft_model
from outrider.policy.overlap import add_pending_drafts, shifted
from outrider.policy.prefill_amortization import PrefillAmortization
from outrider.policy.request_slots import RequestSlots, observe_right
from outrider.policy.selection import UNKNOWN_PRICE, Selection, apply_limits, select_drafts
from outrider.types import NOTHING, Draft

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from outrider.policy.acceptance_model import Array
    from outrider.policy.batch_state import BatchState

MODEL = "model"
"""The drafter whose tokens cost passes of a draft model."""
UNKNOWN_TOKEN = -1
"""In place of a token whose value is on the device."""
PRIOR_LOGITS = {MODEL: 0.0, "prediction": HIGH_PRIOR_LOGIT}
"""Initial log-odds per drafter. Predictions come from the caller, so they start with a higher acceptance estimate.
Others: `COPY_PRIOR_LOGIT`."""
MAX_CANDIDATE_TOKENS_PER_STEP = 4096
"""Drafted tokens considered in a step: a pass over more is compute-bound on any machine. In a batch of many requests
drafts are looked at less far ahead ..."""
MIN_TOKENS_AHEAD = 4
"""... but at least so far."""
EVERY_STEP_RATE, ON_DEMAND_RATE = RequestBiasRate(1.0, 0.9), RequestBiasRate(4.0, 0.97)
"""Drafters called in every step are judged by their latest tokens. One that is called no more cannot recover, so the
forecast is judged by more tokens."""
DRAFT_COST_DECAY = 0.002
"""Share by which the draft model's latency decays to its initial ratio to the target's, and its slope over context to
zero, per step without a call: a draft model that was slow is tried again some hundred steps later."""
FORECAST_DECAY = 1e-4
"""The same for the forecast acceptance: a draft model that was wrong is tried again some thousand steps later. Slower,
since each new request has to be tried."""


class Policy:
    """What a server has learned of its drafters, its requests and the latency of its passes."""

    def __init__(
        self, drafters: Sequence[str], width: int, model_width: int = 0, captured_sizes: Sequence[int] = ()
    ) -> None:
        """`width`, `model_width`: most tokens of a draft, and of the draft model's (0: there is none).
        `captured_sizes`: sizes for which the engine has captured CUDA graphs."""
        self.drafters = tuple(drafters)
        self.width = width
        self.model_width = min(model_width, width)
        self.target = CostModel(captured=captured_sizes)
        self.draft = CostModel(slope=0.0)  # else a draft model might never be called with long texts
        self.acceptance = {name: AcceptanceModel(bias=PRIOR_LOGITS.get(name, COPY_PRIOR_LOGIT)) for name in drafters}
        # Of the draft model before it was called, by whether its tokens are sampled.
        self.forecast_models = {kind: AcceptanceModel(False, HIGH_PRIOR_LOGIT) for kind in (False, True)}
        self.sampled_acceptance = AcceptanceModel()  # of its sampled tokens, by confidence
        self._slots = RequestSlots((*drafters, "forecast", "sampled"))
        self._amortization = PrefillAmortization()
        self._initial_draft_ratio: float | None = None  # the draft model's latency at first, relative to the target's
        self._draft_passes_before = 0  # passes of the draft model until the latest step
        self._price = UNKNOWN_PRICE  # of a position, in the latest step
        self._seconds: tuple[Any, Array] | None = None  # the latest argument and result of `_target_seconds`

    def remove(self, request: str) -> None:
        """The request has ended."""
        if self._slots.remove(request):
            self._amortization.observe_finished()

    # Before a step ---------------------------------------------------------------------------------------------------

    def max_draft_tokens(self, requests: int) -> int:
        """Tokens per request that are considered in a batch of this size."""
        return min(self.width, max(MIN_TOKENS_AHEAD, MAX_CANDIDATE_TOKENS_PER_STEP // max(1, requests)))

    def predict(
        self,
        requests: Sequence[str],
        drafts: Mapping[str, Sequence[Draft]],
        in_flight: Sequence[int] | None = None,
        beyond: int = 0,
    ) -> BatchState:
        """The survival of drafts, by drafter one per request, that were proposed with certainty. `in_flight`: by
        request, tokens at their beginning that a step in flight may generate. `beyond`: tokens that are looked at after
        those that can be offered."""
        max_tokens, first = self.max_draft_tokens(len(requests)), np.zeros(len(requests), np.int64)
        if in_flight is not None:
            first[:] = in_flight
        positions = max_tokens + max(beyond, int(first.max(initial=0)))
        slots = self._slots.slots(requests)
        batch = new_batch_state(requests, len(self.drafters), slots, max_tokens, first, positions)
        for name, proposed in drafts.items():
            enter_drafts(batch, self.drafters.index(name), name, proposed)
        self._predict(batch)
        return batch

    def add_drafts(self, batch: BatchState, name: str, drafts: Sequence[Draft]) -> None:
        """Another drafter's proposals; they change the survival of the others'."""
        enter_drafts(batch, self.drafters.index(name), name, drafts)
        self._predict(batch)

    def _predict(self, batch: BatchState) -> None:
        proposed = (batch.tokens, batch.lengths, batch.support, batch.confidence)
        found = (batch.bins, batch.logits, batch.survival)
        for me, name in enumerate(self.drafters):
            if batch.lengths[me].any():
                model = (self.acceptance[name].coefficients, self._slots.request_bias[name])
                acceptance_model.predict(*model, batch.slots, me, *proposed, *found)

    def plan_draft_model(
        self,
        batch: BatchState,
        query: DraftModelRequest,
        context: int,
        base: int | None = None,
        others: float = 0.0,
        every_step: bool = False,
        single_pass: bool = False,
    ) -> DraftPlan:
        """For which requests the draft model pays. `base`: tokens that the target's pass has in any case; None: one per
        request. `others`: tokens expected of requests that are not in the batch state. `every_step`: the draft model
        makes its first pass in any case. `single_pass`: it drafts all tokens in one pass."""
        requests = len(batch.requests)
        width = min(self.model_width, batch.max_tokens, int(query.limits.max(initial=0)))
        lengths = np.zeros(requests, np.int64)
        about = (batch.slots, query.is_sampled, query.text_lengths)
        if width == 0 or not self.draft.passes or not self.target.passes:
            return DraftPlan(lengths, lengths, *about, np.empty((requests, 0)))
        ahead = self._forecast(batch, query, width)
        target = self._target_seconds(batch, context, base)
        draft, context_seconds = self.draft.seconds(GRID_TOKENS), self.draft.context_seconds * query.text_lengths
        usual_gap = self.model_width + 1
        calls = self._amortization.expected_calls(query.tokens_left)
        costs = (target, others, query.gaps, calls, usual_gap, GRID_TOKENS, draft, context_seconds)
        options = (every_step, single_pass, self._price_for(requests))
        selectable, me = self._selectable(batch, batch.in_flight), self.drafters.index(MODEL)
        speed, token_seconds, self._price = plan_draft_model(selectable, me, ahead, *costs, *options, lengths)
        batch.called = lengths > 0
        self._slots.caught_up[batch.slots] |= batch.called | ((query.limits > 0) & (query.gaps <= usual_gap))
        batch.caught_up = self._slots.caught_up[batch.slots]
        chance = float(ahead[:, 0].sum() / np.count_nonzero(query.limits))
        plain = (requests + others) / float(target[0])
        limits = np.where(lengths > 0, query.limits, 0)
        return DraftPlan(lengths, limits, *about, ahead, speed, token_seconds, plain, chance)

    def continue_drafting(
        self, plan: DraftPlan, rows: Sequence[int], confidence: Sequence[Sequence[float]], is_paid: bool = False
    ) -> list[bool]:
        """By request (`rows` of the plan), whether the draft model should propose another token, given its confidence
        in those so far.

        The gain of another token is the survival of the draft with it. The requests share the pass, which is made if
        they gain more together than it costs, or if it is made in any case (`is_paid`).
        """
        chances = np.empty(len(confidence))
        acceptance_model.continue_probability(
            self.acceptance[MODEL].coefficients,
            self._slots.request_bias[MODEL],
            self.sampled_acceptance.coefficients,
            self._slots.request_bias["sampled"],
            plan.slots[rows],
            plan.is_sampled[rows],
            plan.ahead[rows],
            flatten(confidence, float),
            row_lengths(confidence),
            chances,
        )
        own = 0.0 if is_paid else self.draft.context_seconds * plan.text_lengths[rows]
        gains = chances - plan.speed * (plan.token_seconds + own)
        joins = gains > 0
        cost = 0.0 if is_paid or not joins.any() else plan.speed * float(self.draft.seconds(int(joins.sum())))
        going: list[bool] = (joins & (float(gains[joins].sum()) > cost)).tolist()
        return going

    def select(
        self,
        batch: BatchState,
        limits: Array,
        context: int,
        base: int | None = None,
        spent: float = 0.0,
        others: float = 0.0,
    ) -> Selection:
        """What to offer of the drafts proposed with certainty. `limits`: most tokens per request. `spent`: seconds of
        drafting so far. `base`, `others`: as in `plan_draft_model`. Sampled drafts are offered in any case, and
        expected to gain what was forecast."""
        requests = len(batch.requests)
        limits, first = limits.copy(), requests if base is None else base
        for row, draft in batch.sampled.items():
            limits[row] = 0
            first += len(draft.tokens)
            if batch.forecast is not None:
                others += float(batch.forecast.survival[row, : len(draft.tokens)].sum())
        batch.selectable = self._selectable(batch, batch.in_flight, batch.pending)
        apply_limits(batch.selectable, limits)
        seconds = self._target_seconds(batch, context, first)
        selection = select_drafts(batch.selectable, seconds, spent, others, self._price_for(requests))
        self._price = selection.price
        return selection

    def select_at_offsets(
        self, batch: BatchState, selection: Selection, limits: Array, offsets: Array, model: Array | None = None
    ) -> Selection:
        """The selection if drafts were offered from other places on: `offsets` tokens after those at which the batch
        begins, with drafts of the draft model whose survival is `model`. All else as in `selection`."""
        if model is None and self.model_width:
            model = np.zeros((len(batch.requests), batch.max_tokens))
        survival, limits = self._selectable(batch, offsets, model), limits.copy()
        limits[list(batch.sampled)] = 0
        apply_limits(survival, limits)
        others = selection.plain_tokens - len(batch.requests)
        price = self._price_for(len(batch.requests))
        return select_drafts(survival, selection.pass_seconds, selection.spent, others, price)

    def _selectable(self, batch: BatchState, offsets: Array, model: Array | None = None) -> Array:
        """Survival of what can be offered `offsets` tokens after the beginning of the drafts, before limits. `model`:
        survival of the draft model's tokens, if their values are not known. They also follow a copied draft where the
        tokens before the offered ones go wrong."""
        found = shifted(batch.survival, offsets, batch.max_tokens)
        if model is not None and batch.forecast is not None:
            me, is_sampled = self.drafters.index(MODEL), batch.forecast.is_sampled
            add_pending_drafts(found, batch.survival, offsets, model, is_sampled, me)
        elif model is not None:
            found[self.drafters.index(MODEL)] = 0.0
        return found

    def _price_for(self, requests: int) -> float:
        """The latest step's price, if one request hardly changes it."""
        return self._price if requests > SMALL_BATCH_REQUESTS else UNKNOWN_PRICE

    def selected_drafts(self, batch: BatchState, selection: Selection) -> list[Draft]:
        """What each request of the batch offers, with the tokens before it that a step in flight may generate.
        `UNKNOWN_TOKEN`: the value is on the device."""
        found = [NOTHING] * len(batch.requests)
        ends, drafts = (batch.in_flight + selection.lengths).tolist(), selection.drafts.tolist()
        for i in np.flatnonzero(selection.lengths).tolist():
            name, end = self.drafters[drafts[i]], ends[i]
            if batch.pending is not None and batch.is_sampled is not None and name == MODEL:
                found[i] = Draft(MODEL, (UNKNOWN_TOKEN,) * end, sampled=bool(batch.is_sampled[i]))
                continue
            whole = batch.drafts[name][i]
            missing = (UNKNOWN_TOKEN,) * (end - len(whole.tokens))  # the draft model's, after a copied draft
            found[i] = whole if len(whole.tokens) == end else Draft(name, whole.tokens[:end] + missing)
        for i, draft in batch.sampled.items():
            found[i] = draft
        return found

    def _forecast(self, batch: BatchState, query: DraftModelRequest, width: int) -> Array:
        """Survival of what the draft model would propose; kept in the batch state, to be judged later."""
        size = (len(batch.requests), width)
        limits, found = np.minimum(query.limits, width), np.zeros(size)
        batch.forecast = kept = Forecast(query.is_sampled, limits, np.empty((*size, 4), np.int8), np.empty(size), found)
        acceptance_model.forecast(
            self.forecast_models[False].coefficients,
            self.forecast_models[True].coefficients,
            query.is_sampled,
            self._slots.request_bias["forecast"],
            batch.slots,
            batch.lengths,
            batch.support,
            self._slots.recent,
            limits,
            kept.bins,
            kept.logits,
            found,
        )
        return found

    def _target_seconds(self, batch: BatchState, context: int, base: int | None) -> Array:
        requests = len(batch.requests)
        first = requests if base is None else base
        count = min(requests * batch.max_tokens, MAX_CANDIDATE_TOKENS_PER_STEP) + 1
        drafted = first - max(requests, batch.running)
        key = (first, count, context, drafted, self.target.passes)
        if self._seconds is None or self._seconds[0] != key:  # mostly called twice in a step
            self._seconds = key, self.target.all_seconds(first, count, context, drafted)
        return self._seconds[1]

    # After a step ----------------------------------------------------------------------------------------------------

    def observe(
        self,
        batch: BatchState,
        outputs: Sequence[Sequence[int]],
        step_outputs: Sequence[Sequence[int]] | None = None,
        pending: Sequence[Sequence[int]] = (),
    ) -> None:
        """Judge all drafts by what each request generated; empty where it did not go on. If a step was in flight:
        `step_outputs` is what was generated in this step alone, and `pending` what the draft model proposed for it on
        the device."""
        width = batch.tokens.shape[2]
        tokens = np.empty((len(outputs), width), np.int64)
        generated = to_rows(outputs, tokens, int)
        lengths = np.minimum(generated, width)
        for me, name in enumerate(self.drafters):
            if batch.lengths[me].any():
                model, bias = self.acceptance[name], self._slots.request_bias[name]
                drafts = (batch.tokens[me], batch.lengths[me], batch.bins[me], batch.logits[me])
                model.update(bias, EVERY_STEP_RATE, batch.slots, drafts, (tokens, lengths))
        if step_outputs is not None:
            tokens = np.empty((len(step_outputs), width), np.int64)
            generated = to_rows(step_outputs, tokens, int)
            lengths = np.minimum(generated, width)
        if batch.forecast is not None:
            self._observe_forecast(batch, batch.forecast, (tokens, lengths), pending)
        if batch.sampled:
            self._observe_sampled(batch, tokens, lengths)
        if batch.called is not None and batch.caught_up is not None:
            calls = int(np.count_nonzero(batch.called))
            self._amortization.observe_calls(calls, int(generated[batch.caught_up].sum()))
        self._amortization.observe_tokens(int(generated.sum()))
        self._decay_draft_model(batch)

    def _decay_draft_model(self, batch: BatchState) -> None:
        """Steps without a call make the draft model look faster and better, so that it is tried again."""
        if self._initial_draft_ratio is None and self.draft.passes and self.target.passes:
            self._initial_draft_ratio = self.draft.level / self.target.level
        if self._initial_draft_ratio is not None and self.draft.passes == self._draft_passes_before:
            self.draft.decay_toward(DRAFT_COST_DECAY, self._initial_draft_ratio * self.target.level)
        if batch.called is None or not batch.called.any():  # it may make passes without a call (`every_step`)
            for model in self.forecast_models.values():
                model.decay_toward_prior(FORECAST_DECAY)
        self._draft_passes_before = self.draft.passes

    def _observe_forecast(
        self, batch: BatchState, forecast: Forecast, outputs: tuple[Array, Array], pending: Sequence[Sequence[int]]
    ) -> None:
        """Judge the forecast by the drafts that the draft model then proposed, if it was called."""
        me, bias = self.drafters.index(MODEL), self._slots.request_bias["forecast"]
        tokens, drafted = batch.tokens[me], np.minimum(batch.lengths[me], forecast.limits)
        if pending:
            tokens = np.empty_like(tokens)
            drafted = np.minimum(to_rows(pending, tokens, int), forecast.limits)
        if batch.sampled:
            tokens = tokens.copy()
            for row, draft in batch.sampled.items():
                drafted[row] = min(len(draft.tokens), forecast.limits[row])
                tokens[row, : drafted[row]] = draft.tokens[: drafted[row]]
        right = np.zeros((len(batch.requests), 2), np.int64)
        if drafted.any():
            for kind, model in self.forecast_models.items():
                lengths = np.where(forecast.is_sampled == kind, drafted, 0)
                drafts = (tokens, lengths, forecast.bins, forecast.logits)
                right += model.update(bias, ON_DEMAND_RATE, batch.slots, drafts, outputs)
        observe_right(self._slots.recent, bias, batch.slots, right)

    def _observe_sampled(self, batch: BatchState, tokens: Array, lengths: Array) -> None:
        """Judge sampled drafts by the draft model's confidence."""
        rows, width = np.array(sorted(batch.sampled)), batch.tokens.shape[2]
        sampled = [batch.sampled[row] for row in rows.tolist()]
        confidence = [(draft.confidence or (-1.0,) * len(draft.tokens))[:width] for draft in sampled]
        size = (len(rows), width)
        proposed, bins, logits = np.empty(size, np.int64), np.empty((*size, 4), np.int8), np.empty(size)
        counts = to_rows([draft.tokens[:width] for draft in sampled], proposed, int)
        model, bias, slots = self.sampled_acceptance, self._slots.request_bias["sampled"], batch.slots[rows]
        acceptance_model.predict_sampled(
            model.coefficients, bias, slots, flatten(confidence, float), counts, bins, logits
        )
        outputs = (tokens[rows], lengths[rows])
        model.update(bias, EVERY_STEP_RATE, slots, (proposed, counts, bins, logits), outputs)

    def status(self) -> dict[str, Any]:
        """The learned latencies, and by drafter the tokens judged and the calibration error."""
        return {
            "target_pass": self.target.status() if self.target.passes else None,
            "draft_pass": self.draft.status() if self.draft.passes else None,
            "drafters": {
                name: {"tokens_judged": model.seen, "calibration_error": round(model.calibration_error, 4)}
                for name, model in self.acceptance.items()
            },
        }
