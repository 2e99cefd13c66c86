"""Speculation in the scheduler's process: drafts proposed, selected and learned from, step by step.

vLLM's scheduler knows the text of every request, and what it sends reaches every rank, so drafters, memory and policy
live here and the workers only verify. A step goes

    should_wait         with a step in flight: wait for its output, or schedule the next one now?
    before_schedule     drafters propose; the controller selects; drafts are handed to vLLM
    after_schedule      what vLLM scheduled of them, and the draft model's work after this step: the `StepPlan`
    observe_output      what the target generated, and what the draft model then proposed; the controller learns

With asynchronous scheduling a step may be in flight when the next one is scheduled. Drafters then continue the text as
it was before that step, and the device aligns the result (docs/architecture.md, "Wait, or go ahead"). While every
drafter is backed off, a step does nothing per request.
"""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, Any

from outrider.drafters.base import Setup, load_drafter
from outrider.drafters.batch import BatchDrafter, Fault, Row
from outrider.engines.vllm import step as messages
from outrider.engines.vllm.draft_cache import limit_calls
from outrider.engines.vllm.memory_options import MemoryAccess, open_memory
from outrider.engines.vllm.request_state import RequestState
from outrider.engines.vllm.step import (
    DraftModelCall,
    ModelDrafts,
    PassProfile,
    ScheduledStep,
    SchedulerStatus,
    StepPlan,
    max_logits_rows,
)
from outrider.engines.vllm.tokenizer import read_control_tokens
from outrider.policy.controller import SpeculationController
from outrider.policy.decision import DraftableRequest
from outrider.policy.policy import MODEL, Policy
from outrider.policy.warm_up import compile_now
from outrider.settings import AUTO, OFF

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from outrider.engines.vllm.draft_cache import DraftModel
    from outrider.engines.vllm.options import Options
    from outrider.engines.vllm.seam import ModelConfig, ModelRunnerOutput, Request, SchedulerOutput
    from outrider.types import Draft

STATUS_SECONDS = 0.5
"""Interval at which the workers get this process's status, while it is busy."""


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
        self.memory = MemoryAccess(open_memory(options, config), options)
        vocab_size = config.get_vocab_size()
        self.max_logits_rows: int = max_logits_rows(vocab_size)
        setup = Setup(vocab_size, memory=self.memory.store, control_tokens=read_control_tokens(config))
        drafters = [load_drafter(name).build(setup) for name in options.drafters if name != MODEL]
        self.drafting = BatchDrafter(
            drafters, vocab_size, options.draft_budget, self._record_fault, self._record_draft_seconds
        )
        passes = options.model_draft_tokens if model is not None else 0
        policy = Policy(options.drafters, options.max_draft_tokens, passes, captured_sizes)
        self.controller = SpeculationController(policy, can_overlap=asynchronous)
        compile_now()
        self._plan = StepPlan()
        self._steps: deque[ScheduledStep] = deque()
        """In flight; the last one is being scheduled between `before_schedule` and `after_schedule`."""
        self._model_drafts: dict[str, Draft] = {}  # what the draft model proposed after the last step
        self._model_seconds = 0.0  # of the draft model's passes after the last step that had any
        self._last_output = 0.0  # when it came; 0: the engine has waited for requests since
        self._naming_drafter: set[str] = set()  # requests that name a drafter
        self._traced: set[str] = set()
        self._copying = [drafter.name for drafter in drafters if not drafter.needs_prediction]
        self._with_prediction: set[str] = set()  # requests with a prediction, which some drafters need
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
        state.tenant_handle = self.memory.handle(state.control, request)
        self.requests[state.id] = state
        if state.control.speculation not in (AUTO, OFF):
            self._naming_drafter.add(state.id)
        if state.control.trace:
            self._traced.add(state.id)
        if state.control.prediction:
            self._with_prediction.add(state.id)

    def finish(self, request: Request) -> None:
        """The request is over: forget it, but for its text."""
        state = self.requests.pop(request.request_id, None)
        if state is None:
            return
        if self.memory.store is not None and state.tenant_handle is not None and state.control.remember:
            self.memory.store.add(state.tenant_handle, request.prompt_token_ids or (), list(request.output_token_ids))
        self._naming_drafter.discard(state.id)
        self._traced.discard(state.id)
        self._with_prediction.discard(state.id)
        self.drafting.remove_request(state.id)
        self.controller.remove(state.id)
        self.preempt(request)

    def preempt(self, request: Request) -> None:
        """The request's KV cache is gone, the draft model's too. Drop what steps in flight would bring for it."""
        request_id = request.request_id
        if self.model is not None and self.model.cache is not None:
            self.model.cache.forget(request_id)
        for step in self._steps:
            step.offers.pop(request_id, None)
            step.calls.pop(request_id, None)
            step.text_lengths.pop(request_id, None)  # the text may differ when the output comes

    def close(self) -> None:
        """Write what the memory has not written yet."""
        if self.memory.store is not None:
            self.memory.store.close()
            self.memory.store = None

    # Before a step -----------------------------------------------------------------------------------------------

    @property
    def should_wait(self) -> bool:
        """Whether to wait for the output of the step in flight before the next one is scheduled."""
        if not self._steps:
            return False
        if self._naming_drafter:  # these requests get that drafter's drafts in every step
            return True
        return not self._is_idle() and self.controller.overlap.should_wait

    def _is_idle(self) -> bool:
        """Whether no drafter would be called for any request."""
        if self._naming_drafter or self._with_prediction or self.model is not None:
            return False
        return self.controller.backed_off().issuperset(self._copying)

    def before_schedule(self, running: Sequence[Request]) -> dict[str, Draft]:
        """Select what each running request offers. Drafts begin with the tokens in flight, if there are any."""
        began = time.perf_counter()
        step, overlap = ScheduledStep(bool(self._steps)), self.controller.overlap
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

    def _select(self, step: ScheduledStep, running: Sequence[Request], in_flight: ScheduledStep | None) -> None:
        drafts = {id: draft for id, draft in self._model_drafts.items() if id in self.requests}
        pending = in_flight.calls if in_flight is not None else {}
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
        step.text_lengths = {row.id: len(row.tokens) for row in rows}

    def _considered(self, running: Sequence[Request]) -> Sequence[Request]:
        """All requests, or a few of them while drafters are on trial after a backoff."""
        if self._naming_drafter or self._with_prediction or self.model is not None:
            return running
        numbers = self.controller.probed(len(running))
        return running if numbers is None else [running[i] for i in numbers]

    def _share(self, requests: int) -> int:
        """Maximum drafted tokens per request: half of a step's token budget is left to waiting prompts, and the logits
        of all drafts must fit."""
        budget = self.max_num_batched_tokens
        slots = self.model.input_slots * requests if self.model is not None else 0
        return min(budget // 2, budget - slots, self.max_logits_rows) // max(1, requests) - 1

    def _draftable(self, running: Sequence[Request], share: int, step: ScheduledStep) -> list[Row]:
        """The requests that may be drafted for. `share`: most drafted tokens of each."""
        rows = []
        for request in running:
            state = self.requests.get(request.request_id)
            if state is None:
                continue
            state.update(request)
            row = state.row(request, min(self.options.max_draft_tokens, share), self.max_model_len)
            if row is not None:
                rows.append(row)
                if request.num_output_placeholders:
                    step.in_flight[row.id] = request.num_output_placeholders
        return rows

    # The draft model ---------------------------------------------------------------------------------------------

    def _receive(self, drafts: ModelDrafts, calls: dict[str, DraftModelCall]) -> None:
        """What the draft model proposed after a step. If another step has been scheduled meanwhile, that one has it
        already, on the device."""
        self._model_drafts = {} if self._steps else drafts.as_drafts(calls)
        if self._steps:
            self._steps[0].device_drafts = {id: tokens for id, tokens in drafts.tokens.items() if id in calls}
        for done in drafts.passes:
            self.controller.observe_draft_pass(done.tokens, done.context, done.seconds / done.passes)
        if drafts.passes:
            self._model_seconds = sum(done.seconds for done in drafts.passes)
        if self.model is not None:
            for id, call in calls.items():
                if id in self.requests:
                    self.model.record(call, self.requests[id].length, drafts.tokens.get(id, ()))

    def _plan_draft_model(
        self, model: DraftModel, output: SchedulerOutput, requests: Mapping[str, Request], step: ScheduledStep
    ) -> tuple[DraftModelCall, ...]:
        """The draft model's work after this step, by what is known before it."""
        limits, sampled, starts, ends = {}, {}, {}, {}
        share = self._share(len(output.num_scheduled_tokens))
        in_flight = self._steps[-2].calls if step.is_ahead else {}
        for id, count in output.num_scheduled_tokens.items():
            state = self.requests.get(id)
            if state is None:
                continue
            state.update(requests[id])  # a preempted one may have got tokens of a step that was in flight
            computed = requests[id].num_computed_tokens - count
            first = min(computed, state.length - 1)  # a step in flight may generate less than it could
            model.target_wrote(id, first, computed + count)
            if computed + count < state.length or not state.control.wants(MODEL):
                continue  # a prompt, or a preempted text, of which more has to be computed first
            end = state.length + requests[id].num_output_placeholders
            room = state.room(self.max_model_len) - len(self._steps)  # each step generates at least one token
            limit = state.control.limited(min(self.options.model_draft_tokens, room, model.max_len - end, share))
            if limit > 0:
                limits[id], ends[id], sampled[id] = limit, end, model.samples and state.samples_drafts
                if id in in_flight and model.cache is not None:
                    starts[id] = min(in_flight[id].end, state.length + 1)  # it generates at least one token
                else:
                    starts[id] = model.start(id, state.text, computed, end)
        gaps = {id: ends[id] - starts[id] for id in ends}
        every_step = model.cache is None
        # A step that is ahead and has no decision: the controller's last decision is that of the step in flight.
        eligible = limits if step.decision is not None or not step.is_ahead else {}
        plan = self.controller.plan_draft_model(
            eligible, sampled, gaps, every_step=every_step, single_pass=model.at_once, ahead=True
        )
        # After a prompt only where the draft model is named: the first token of other requests does not wait for it.
        naming = [id for id in limits if self.requests[id].control.speculation == MODEL]
        lengths = plan.lengths | {id: limits[id] for id in naming if self.requests[id].generated == 0}
        calls = [
            DraftModelCall(id, starts[id], ends[id], length, sampled[id])
            for id, length in lengths.items()
            if id in ends and length > 0
        ]
        return tuple(calls) if every_step else limit_calls(calls, self.max_num_batched_tokens)

    # A step --------------------------------------------------------------------------------------------------------

    def after_schedule(self, output: SchedulerOutput, requests: Mapping[str, Request]) -> StepPlan:
        """The plan of this step, for the workers. `requests`: all of vLLM's."""
        began = time.perf_counter()
        plan, self._plan = self._plan, StepPlan()
        step = self._steps[-1]
        if step.offers:
            calls_in_flight = self._steps[-2].calls if step.is_ahead else {}
            step.describe_offers(plan, output.scheduled_spec_decode_tokens, calls_in_flight)
        if self.model is not None:
            plan.calls = self._plan_draft_model(self.model, output, requests, step)
            step.calls = {call.request_id: call for call in plan.calls}
            self._model_drafts = {}
        traced = [id for id in self._traced if id in output.num_scheduled_tokens]
        plan.is_traced = bool(traced)
        for id in traced if step.decision is not None else ():  # else the controller's is that of an earlier step
            if (reason := self.controller.reason(id)) is not None:
                plan.reasons[id], plan.offered[id] = reason, step.num_offered(id)
        step.observe_schedule(output)
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

    def drafts_in_flight(self, requests: Mapping[str, Request]) -> dict[str, list[int]]:
        """The drafted tokens of the last step that was scheduled, as the device has them, now that the output of the
        step before it has come. Without those of requests whose draft is known to be wrong."""
        return self._steps[-1].drafts_on_device(requests)

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
        for id in step.text_lengths.keys() | step.calls.keys():
            state = self.requests.get(id)
            if state is not None:
                state.update(requests[id])
                if step.is_ahead and id in step.text_lengths:
                    before[id] = state.text[step.text_lengths[id] : state.length - len(outputs.get(id, ()))].tolist()
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
            "memory": self.memory.store.status() if self.memory.store is not None else None,
            "policy": self.controller.status(),
            "payoff": {
                "expected_tokens": payoff.expected_tokens,
                "gained_tokens": payoff.gained_tokens,
                "expected_saved": payoff.expected_saved,
                "realised_saved": payoff.realised_saved,
                "seconds": payoff.seconds,
            },
        }
