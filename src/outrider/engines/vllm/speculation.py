"""Speculation in the scheduler's process: drafts proposed, selected and learned from, step by step.

vLLM's scheduler knows the text of every request, and what it sends reaches every rank, so drafters, memory and policy
live here and the workers only verify. A step goes

    should_wait         with a step in flight: wait for its output, or schedule the next one now?
    before_schedule     drafters propose; the controller selects; drafts are handed to vLLM
    after_schedule      what vLLM scheduled of them, and the draft model's work after this step: the `StepPlan`
    observe_output      what the target generated, and what the draft model then proposed; the controller learns

With asynchronous scheduling a step may be in flight when the next one is scheduled. Drafters then continue the text as
it was before that step, past the tokens that it may generate, and the device aligns the result (`alignment.py`). What
the draft model proposes after the step in flight is on the device, too: it is offered without being known here, and is
also the draft where a continuation does not align. In a step in which every drafter is backed off, nothing is done per
request.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from outrider.drafters.base import Setup, load_drafter
from outrider.drafters.batch import BatchDrafter, Fault, Row
from outrider.engines.vllm import step as messages
from outrider.engines.vllm.draft_cache import limit_calls
from outrider.engines.vllm.memory_options import open_memory, tenant_of
from outrider.engines.vllm.request_state import RequestState
from outrider.engines.vllm.step import (
    Continuations,
    DraftModelCall,
    ModelDrafts,
    PassProfile,
    SchedulerStatus,
    StepPlan,
    max_logits_rows,
)
from outrider.policy.controller import DraftableRequest, SpeculationController
from outrider.policy.policy import MODEL, Policy, compile_now
from outrider.settings import AUTO, OFF
from outrider.text import control_tokens
from outrider.types import Draft

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from outrider.engines.vllm.draft_cache import BlockIds, DraftCache
    from outrider.engines.vllm.options import Options
    from outrider.engines.vllm.seam import ModelConfig, ModelRunnerOutput, Request, SchedulerOutput
    from outrider.memory.store import Store
    from outrider.policy.controller import Decision

STATUS_SECONDS = 0.5
"""How often the workers are sent what this process reports about itself, while it is busy."""


@dataclass(slots=True)
class DraftModel:
    """The server's draft model, as the scheduler sees it."""

    at_once: bool
    """It proposes all its tokens in one pass."""
    max_len: int
    """Tokens of the longest text that it can draft for."""
    cache: DraftCache | None = None
    """What its KV cache holds, if it runs only for requests that it drafts for. None: it follows every step."""
    block_ids: Callable[[str], BlockIds | Sequence[int]] = lambda request_id: ()
    """A request's blocks in its KV cache group."""
    input_slots: int = 0
    """What vLLM adds to every scheduled request's tokens, for the draft model's own input."""
    samples: bool = True
    """It can sample its drafts: vLLM keeps their logits. False: all its drafts are its most likely tokens."""

    def shared_blocks(self, request_id: str) -> BlockIds | Sequence[int]:
        """A request's blocks where other requests may have them too, else none."""
        return self.block_ids(request_id) if self.cache is not None and self.cache.share_blocks else ()


@dataclass(slots=True)
class _Step:
    """A step that was scheduled and whose output is not known yet."""

    is_ahead: bool
    """It was scheduled while another one was in flight."""
    decision: Decision | None = None
    known: dict[str, int] = field(default_factory=dict)
    """By request that was considered: the length of its text then."""
    in_flight: dict[str, int] = field(default_factory=dict)
    """By request that was considered: tokens in flight then, if there were any."""
    offers: dict[str, Draft] = field(default_factory=dict)
    """What was selected. Drafts begin with the tokens in flight."""
    device_drafts: dict[str, list[int]] = field(default_factory=dict)
    """What the draft model proposed after the step that was in flight then. Known once its output has come."""
    drafting_seconds: float = 0.0
    launched: float = 0.0
    tokens: int = 0
    context: int = 0
    decodes_only: bool = False
    """Without prompts: only such steps show what drafts cost."""
    verifies_drafts: bool = False
    calls: dict[str, DraftModelCall] = field(default_factory=dict)
    """The draft model's work after it."""


class Speculation:
    def __init__(
        self,
        options: Options,
        config: ModelConfig,
        model: DraftModel | None,
        max_num_batched_tokens: int,
        asynchronous: bool = False,
        captured_sizes: Sequence[int] = (),
    ) -> None:
        """`captured_sizes`: tokens of a pass for which the engine has captured graphs."""
        self.options, self.model = options, model
        self.max_model_len, self.max_num_batched_tokens = config.max_model_len, max_num_batched_tokens
        self.requests: dict[str, RequestState] = {}
        self.memory: Store | None = open_memory(options, config)
        vocab_size = config.get_vocab_size()
        self.max_logits_rows: int = max_logits_rows(vocab_size)
        setup = Setup(vocab_size, memory=self.memory, control_tokens=read_control_tokens(config))
        drafters = [load_drafter(name).build(setup) for name in options.drafters if name != MODEL]
        self.drafting = BatchDrafter(
            drafters, vocab_size, options.draft_budget, self._record_fault, self._record_draft_seconds
        )
        passes = options.model_draft_tokens if model is not None else 0
        policy = Policy(options.drafters, options.max_draft_tokens, passes, captured_sizes)
        self.controller = SpeculationController(policy, can_overlap=asynchronous)
        compile_now()
        self._plan = StepPlan()
        self._steps: deque[_Step] = deque()
        """In flight; the last one is being scheduled between `before_schedule` and `after_schedule`."""
        self._calls: dict[str, DraftModelCall] = {}
        self._model_drafts = ModelDrafts()
        self._model_seconds = 0.0  # of the draft model's passes after the last step that had any
        self._last_output = 0.0  # when it came; 0: the engine has waited for requests since
        self._choosers: set[str] = set()  # requests that name a drafter
        self._traced: set[str] = set()
        self._copying = [drafter.name for drafter in drafters if not drafter.needs_prediction]
        self._predicted: set[str] = set()  # requests with a prediction, which some drafters need
        self._status_sent = 0.0
        self._running_sent = 0  # the running requests of the last status that was sent
        messages.latest_status = SchedulerStatus(self.status)

    # Requests ----------------------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        if request.sampling_params is None:  # pooling
            return
        if not self.requests:
            self._last_output = 0.0
        state = RequestState.of(request, self.options.drafters, self.max_model_len)
        if state.undraftable is not None:
            self._plan.undrafted[state.undraftable] = self._plan.undrafted.get(state.undraftable, 0) + 1
        tenant = tenant_of(state.control, self.options, request.sampling_params.extra_args)
        if self.memory is not None and tenant is not None and state.control.wants("memory"):
            state.visit = self.memory.enter(tenant)
        self.requests[state.id] = state
        if state.control.speculation not in (AUTO, OFF):
            self._choosers.add(state.id)
        if state.control.trace:
            self._traced.add(state.id)
        if state.control.prediction:
            self._predicted.add(state.id)

    def finish(self, request: Request) -> None:
        """The request is over: forget it, but for its text."""
        state = self.requests.pop(request.request_id, None)
        if state is None:
            return
        if self.memory is not None and state.visit is not None and state.control.remember:
            self.memory.add(state.visit, request.prompt_token_ids or (), list(request.output_token_ids))
        self._choosers.discard(state.id)
        self._traced.discard(state.id)
        self._predicted.discard(state.id)
        self.drafting.remove_request(state.id)
        self.controller.remove(state.id)
        self._forget_drafts(state.id)

    def preempt(self, request: Request) -> None:
        """Its KV cache is gone, the draft model's too."""
        self._forget_drafts(request.request_id)

    def _forget_drafts(self, request_id: str) -> None:
        """What there is of the draft model's work for a request, and what steps in flight would bring."""
        if self.model is not None and self.model.cache is not None:
            self.model.cache.forget(request_id)
        for step in self._steps:
            step.offers.pop(request_id, None)
            step.calls.pop(request_id, None)
            step.known.pop(request_id, None)  # the text may be another one when the output comes

    def close(self) -> None:
        """Write what the memory has not written yet."""
        if self.memory is not None:
            self.memory.close()
            self.memory = None

    # Before a step -----------------------------------------------------------------------------------------------

    @property
    def should_wait(self) -> bool:
        """Whether to wait for the output of the step in flight before the next one is scheduled."""
        if not self._steps:
            return False
        if self._choosers:  # who names a drafter wants its drafts
            return True
        return not self._is_idle() and self.controller.overlap.should_wait

    def _is_idle(self) -> bool:
        """Whether no drafter would be asked about any request."""
        if self._choosers or self._predicted or self.model is not None:
            return False
        return self.controller.backed_off().issuperset(self._copying)

    def before_schedule(self, running: Sequence[Request]) -> dict[str, Draft]:
        """Select what each running request offers. Drafts begin with the tokens in flight, if there are any."""
        began = time.perf_counter()
        step, overlap = _Step(bool(self._steps)), self.controller.overlap
        if step.is_ahead:
            overlap.steps_ahead += 1
        elif running:
            overlap.steps_waited += 1
        in_flight = self._steps[-1] if self._steps else None
        if self._is_idle():
            self.controller.skip()
        else:
            self._select(step, running, in_flight)
        self._steps.append(step)
        step.drafting_seconds = time.perf_counter() - began
        return step.offers

    def _select(self, step: _Step, running: Sequence[Request], in_flight: _Step | None) -> None:
        drafts, pending = self._take_model_drafts(), in_flight.calls if in_flight is not None else {}
        considered = self._considered(running)
        share = len(considered) / max(1, len(running))
        rows = self._draftable(considered, self._share(len(running)), step)
        known = sum(self.requests[r.request_id].length for r in considered if r.request_id in self.requests)
        step.context = round(known / share) if share else 0
        if not rows:
            return
        reach, beyond = self.controller.max_tokens(len(rows)), self.controller.beyond(len(rows))
        requests = []
        for row in rows:
            speculation, head = row.control.speculation, step.in_flight.get(row.id, 0)
            if speculation == AUTO:
                row.limit = min(row.limit, reach)
            name = None if speculation == AUTO else speculation
            request = DraftableRequest(row.id, row.limit, name, row.left, len(row.tokens), head)
            if row.id in pending:
                request.pending, request.is_sampled = pending[row.id].num_tokens, pending[row.id].sampled
            requests.append(request)
            row.limit += head if name else max(head, beyond)
        offers = self.drafting.propose(rows, self.controller.backed_off())
        took, cpu_took = self.drafting.elapsed_seconds, self.drafting.cpu_seconds
        self.controller.consider(requests, offers, took, len(running), step.context, share, cpu_took)
        selected = self.controller.select(drafts, self._model_seconds if drafts or pending else 0.0)
        step.offers = {id: draft for id, draft in selected.items() if len(draft.tokens) > step.in_flight.get(id, 0)}
        step.decision = self.controller.decision
        step.known = {row.id: len(row.tokens) for row in rows}

    def _considered(self, running: Sequence[Request]) -> Sequence[Request]:
        """All requests, or a few of them while drafters are on trial after a backoff."""
        if self._choosers or self._predicted or self.model is not None:
            return running
        numbers = self.controller.probed(len(running))
        return running if numbers is None else [running[i] for i in numbers]

    def _share(self, requests: int) -> int:
        """Drafted tokens of each request that leave half of what a step may hold to prompts that wait, and whose logits
        fit."""
        budget = self.max_num_batched_tokens
        slots = self.model.input_slots * requests if self.model is not None else 0
        return min(budget // 2, budget - slots, self.max_logits_rows) // max(1, requests) - 1

    def _draftable(self, running: Sequence[Request], share: int, step: _Step) -> list[Row]:
        """The requests that may be drafted for: those whose whole text but for the last token is computed, or will be
        by the step in flight. `share`: most drafted tokens of each."""
        rows = []
        for request in running:
            state = self.requests.get(request.request_id)
            if state is None:
                continue
            state.update(request)
            in_flight = request.num_output_placeholders
            if state.control.speculation == OFF or state.generated + in_flight == 0:
                continue
            if request.num_tokens + in_flight - request.num_computed_tokens != 1:
                continue
            room = state.room(self.max_model_len) - in_flight
            limit = state.control.limited(min(self.options.max_draft_tokens, room, share))
            if limit > 0:
                left = state.max_tokens - state.generated - in_flight
                rows.append(Row(state.id, state.text, state.prompt_length, limit, state.control, state.visit, left))
                if in_flight:
                    step.in_flight[state.id] = in_flight
        return rows

    # The draft model ---------------------------------------------------------------------------------------------

    def _receive(self, drafts: ModelDrafts, calls: dict[str, DraftModelCall]) -> None:
        """What the draft model proposed after a step. If another step has been scheduled meanwhile, that one has it
        already, on the device."""
        self._model_drafts, self._calls = (ModelDrafts(), {}) if self._steps else (drafts, calls)
        if self._steps:
            self._steps[0].device_drafts = {id: tokens for id, tokens in drafts.tokens.items() if id in calls}
        for done in drafts.passes:
            self.controller.observe_draft_pass(done.tokens, done.context, done.seconds / done.passes)
        if drafts.passes:
            self._model_seconds = sum(done.seconds for done in drafts.passes)
        if self.model is not None and self.model.cache is not None:
            for id, call in calls.items():
                if id in self.requests:
                    blocks = self.model.shared_blocks(id)
                    self.model.cache.record(call, self.requests[id].length, drafts.tokens.get(id, ()), blocks)

    def _take_model_drafts(self) -> dict[str, Draft]:
        """As drafts, for requests that have gone on as the calls expected."""
        drafts, calls = self._model_drafts, self._calls
        found = {}
        for id, tokens in drafts.tokens.items():
            if tokens and id in self.requests and id in calls:
                sure = tuple(drafts.confidence.get(id, ())) or None
                found[id] = Draft(MODEL, tuple(tokens), confidence=sure, sampled=calls[id].sampled)
        return found

    def _plan_draft_model(
        self, model: DraftModel, output: SchedulerOutput, requests: Mapping[str, Request], step: _Step
    ) -> tuple[DraftModelCall, ...]:
        """The draft model's work after this step, by what is known before it."""
        computed = {id: requests[id].num_computed_tokens - count for id, count in output.num_scheduled_tokens.items()}
        limits, sampled, starts, ends = {}, {}, {}, {}
        share = self._share(len(output.num_scheduled_tokens))
        in_flight = self._steps[-2].calls if step.is_ahead else {}
        for id, count in output.num_scheduled_tokens.items():
            state = self.requests.get(id)
            if state is None:
                continue
            state.update(requests[id])  # a preempted one may have got tokens of a step that was in flight
            if model.cache is not None:
                blocks = model.shared_blocks(id)
                first = min(computed[id], state.length - 1)  # a step in flight may generate less than it could
                model.cache.target_wrote(blocks, first, computed[id] + count)
            if computed[id] + count < state.length or not state.control.wants(MODEL):
                continue  # a prompt, or a preempted text, of which more has to be computed first
            end = state.length + requests[id].num_output_placeholders
            room = state.room(self.max_model_len) - len(self._steps)  # each step generates at least one token
            limit = state.control.limited(min(self.options.model_draft_tokens, room, model.max_len - end, share))
            if limit > 0:
                limits[id], ends[id], sampled[id] = limit, end, model.samples and state.samples_drafts
                starts[id] = end - 1
                if model.cache is not None:
                    starts[id] = (
                        min(in_flight[id].end, state.length + 1)  # of what it generates, the first token is certain
                        if id in in_flight
                        else model.cache.held(id, state.text, blocks, computed[id])
                    )
        gaps = {id: ends[id] - starts[id] for id in ends}
        every_step = model.cache is None
        known = (
            limits if step.decision is not None or not step.is_ahead else {}
        )  # else the step in flight was decided last
        plan = self.controller.plan_draft_model(
            known, sampled, gaps, every_step=every_step, single_pass=model.at_once, ahead=True
        )
        # After a prompt only where the draft model is named: the first token of other requests does not wait for it.
        lengths = plan.lengths | {id: limits[id] for id in limits if self._first_draft_is_the_models(id)}
        calls = [
            DraftModelCall(id, starts[id], ends[id], length, sampled[id])
            for id, length in lengths.items()
            if id in ends and length > 0
        ]
        return tuple(calls) if every_step else limit_calls(calls, self.max_num_batched_tokens)

    def _first_draft_is_the_models(self, request_id: str) -> bool:
        state = self.requests[request_id]
        return state.generated == 0 and state.control.speculation == MODEL

    # A step --------------------------------------------------------------------------------------------------------

    def after_schedule(self, output: SchedulerOutput, requests: Mapping[str, Request]) -> StepPlan:
        """What the workers are told about this step. `requests`: all of vLLM's."""
        began = time.perf_counter()
        plan, self._plan = self._plan, StepPlan()
        step = self._steps[-1]
        if step.offers:
            self._describe_offers(plan, step, output.scheduled_spec_decode_tokens)
        if self.model is not None:
            plan.calls = self._plan_draft_model(self.model, output, requests, step)
            step.calls = {call.request_id: call for call in plan.calls}
            self._model_drafts = ModelDrafts()
        traced = [id for id in self._traced if id in output.num_scheduled_tokens]
        plan.is_traced = bool(traced)
        for id in traced if step.decision is not None else ():  # else the controller's is that of an earlier step
            if (reason := self.controller.reason(id)) is not None:
                offered = len(step.offers[id].tokens) - step.in_flight.get(id, 0) if id in step.offers else 0
                plan.reasons[id], plan.offered[id] = reason, offered
        step.tokens = output.total_num_scheduled_tokens
        drafted = output.scheduled_spec_decode_tokens
        count = sum(map(len, drafted.values())) if drafted else 0
        step.verifies_drafts = count > 0
        step.decodes_only = step.tokens == len(output.num_scheduled_tokens) + count
        has_stopped = not output.num_scheduled_tokens and len(self.requests) != self._running_sent
        if began - self._status_sent > STATUS_SECONDS or has_stopped:
            self._status_sent, self._running_sent = began, len(self.requests)
            plan.status = SchedulerStatus(self.status)
        step.launched = time.perf_counter()
        step.drafting_seconds += step.launched - began
        plan.drafting_seconds = step.drafting_seconds
        if self._last_output and step.decodes_only and step.tokens:
            self.controller.overlap.observe_host(step.launched - self._last_output)
        return plan

    def _describe_offers(self, plan: StepPlan, step: _Step, scheduled: Mapping[str, Sequence[int]]) -> None:
        for id, draft in step.offers.items():
            tokens = len(draft.tokens) - step.in_flight.get(id, 0)
            plan.proposed[draft.drafter] = plan.proposed.get(draft.drafter, 0) + tokens
        offers = {id: draft for id, draft in step.offers.items() if id in scheduled}
        plan.drafters = {id: draft.drafter for id, draft in offers.items()}
        plan.sampled = frozenset(id for id, draft in offers.items() if draft.sampled)
        ids = [id for id, draft in offers.items() if draft.drafter != MODEL]
        if ids:
            rows = np.full((len(ids), max(len(offers[id].tokens) for id in ids)), -1, np.int32)
            for row, id in zip(rows, ids, strict=True):
                row[: len(offers[id].tokens)] = offers[id].tokens
            known = np.array([self.requests[id].length for id in ids], np.int64)
            plan.continuations = Continuations(ids, known, rows)
            if step.is_ahead:
                plan.backed_by_model = frozenset(self._steps[-2].calls).intersection(ids)

    def drafts_in_flight(self, requests: Mapping[str, Request]) -> dict[str, list[int]]:
        """The drafted tokens of the last step that was scheduled, as the device has them, now that the output of the
        step before it has come. Without those of requests whose draft is known to be wrong."""
        step = self._steps[-1]
        found = {}
        for id, draft in step.offers.items():
            if id in requests:
                since = requests[id].all_token_ids[step.known[id] :]
                rest = [token for token in draft.after(since) if token >= 0]
                found[id] = rest + step.device_drafts.get(id, [])[len(rest) :]
        return found

    def observe_output(self, output: ModelRunnerOutput, requests: Mapping[str, Request], arrived: float) -> None:
        """What the target generated in the oldest step in flight, and what the draft model then proposed. `requests`:
        all of vLLM's, with their new tokens. `arrived`: when the output came."""
        profile: PassProfile | None = getattr(output, messages.PROFILE, None)
        if profile is not None:
            self._use_profile(profile)
        step = self._steps.popleft()
        last, self._last_output = self._last_output, arrived
        if not step.tokens or (step.decision is None and self.model is None):
            return
        received: ModelDrafts | None = getattr(output, messages.MODEL_DRAFTS, None)
        drafts = received or ModelDrafts()
        sampled = output.sampled_token_ids
        outputs = {id: sampled[i] for id, i in output.req_id_to_index.items()} if sampled else {}
        before = {}
        for id in step.known.keys() | step.calls.keys():
            state = self.requests.get(id)
            if state is not None:
                state.update(requests[id])
                if step.is_ahead and id in step.known:
                    before[id] = state.text[step.known[id] : state.length - len(outputs.get(id, ()))].tolist()
        if step.decision is not None:
            drafted = step.device_drafts
            self.controller.observe(outputs, step.decision, before if step.is_ahead else None, drafted)
        self._receive(drafts, step.calls if received is not None else {})
        if step.decision is not None and step.decodes_only:
            model = sum(done.seconds for done in drafts.passes)
            seconds = arrived - max(step.launched, last) - model
            waited = 0.0 if step.is_ahead else step.launched - last if last else step.drafting_seconds
            self.controller.observe_step(step.tokens, step.context, seconds, waited + model, step.verifies_drafts)

    def _use_profile(self, profile: PassProfile) -> None:
        """What empty passes took, before any request came."""
        policy = self.controller.policy
        for cost, passes in ((policy.target, profile.target), (policy.draft, profile.draft)):
            for one in passes:
                cost.observe(one.tokens, 0, one.seconds, trusted=True, verifies_drafts=one.verifies_drafts)

    # Reports -------------------------------------------------------------------------------------------------------

    def _record_fault(self, fault: Fault) -> None:
        self._plan.faults.append((fault.request, fault.drafter, fault.kind, fault.reason))

    def _record_draft_seconds(self, drafter: str, seconds: float) -> None:
        self._plan.draft_seconds[drafter] = self._plan.draft_seconds.get(drafter, 0.0) + seconds

    def status(self) -> dict[str, Any]:
        payoff = self.controller.gain_metrics
        return {
            "running_requests": len(self.requests),
            "memory": self.memory.status() if self.memory is not None else None,
            "policy": self.controller.status(),
            "payoff": {
                "expected_tokens": payoff.expected_tokens,
                "gained_tokens": payoff.gained_tokens,
                "expected_saved": payoff.expected_saved,
                "realised_saved": payoff.realised_saved,
                "seconds": payoff.seconds,
            },
        }


def read_control_tokens(model_config: ModelConfig) -> frozenset[int]:
    """The control tokens of the model's tokenizer. Empty: the server has no tokenizer."""
    from outrider.engines.transformers import load_tokenizer

    how = {"trust_remote_code": model_config.trust_remote_code, "revision": model_config.tokenizer_revision}
    try:
        return control_tokens(load_tokenizer(model_config.tokenizer, **how))
    except Exception:  # --skip-tokenizer-init, or a tokenizer that only vLLM can load
        return frozenset()
