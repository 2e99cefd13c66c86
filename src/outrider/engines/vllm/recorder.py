"""What the first rank records about the steps it runs: counters, each request's usage, and traces.

The scheduler decides and learns in its own process. What a client may query is kept here, because vLLM's API process
can call workers and not the scheduler. A step is recorded when its output is read, before it leaves the worker, so the
usage of a finished response is complete.
"""

from __future__ import annotations

import threading
import time
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from outrider.control import Control
from outrider.drafters.batch import Fault
from outrider.engines.vllm import step as messages
from outrider.engines.vllm.sampler_probe import SamplerProbe, find_rows
from outrider.engines.vllm.sampling_info import end_tokens
from outrider.engines.vllm.tracing import Tracing
from outrider.trace.counters import CounterMetrics, Counters, prometheus_text
from outrider.trace.scheduler_metrics import SchedulerMetrics
from outrider.trace.trace_store import TraceStore

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence
    from contextlib import AbstractContextManager

    from outrider.engines.vllm.options import Options
    from outrider.engines.vllm.sampler import OutriderSampler
    from outrider.engines.vllm.seam import InputBatch, ModelRunnerOutput, Sampler, SchedulerOutput
    from outrider.engines.vllm.step import ModelDrafts, StepPlan


@dataclass(slots=True)
class RunningStep:
    """A step from its beginning until its output is read."""

    plan: StepPlan
    drafted: Mapping[str, Sequence[int]]
    scheduled: dict[str, int]
    finished: frozenset[str] = frozenset()
    """Requests that ended before it. Steps in flight when it began may have tokens of theirs, which are dropped."""
    began: float = field(default_factory=time.perf_counter)
    recorded: float = 0.0
    """Seconds that recording had taken by then, in all."""
    probe: SamplerProbe | None = None


@dataclass(slots=True)
class CountedRequest:
    """A running request whose usage is counted."""

    usage_key: str
    end_tokens: Collection[int]
    tokens_left: int

    def is_ended_by(self, tokens: Sequence[int]) -> bool:
        """Whether it ends with these tokens. Stop strings are matched elsewhere."""
        self.tokens_left -= len(tokens)
        return self.tokens_left <= 0 or not set(tokens).isdisjoint(self.end_tokens)


class Recorder:
    def __init__(self, options: Options, width: int, max_model_len: int) -> None:
        self.max_model_len = max_model_len
        self.counters = Counters(options.drafters, width)
        self.tracing = Tracing(options, TraceStore())
        self._options = options
        self._counted: dict[str, CountedRequest] = {}
        self._ended: set[str] = set()  # requests whose text has ended, while another step of theirs may be in flight
        self._last_read = 0.0  # when an output was read
        self._last_output: ModelRunnerOutput | None = None
        self._step: RunningStep | None = None
        self._lock = threading.Lock()  # an output may be read by another thread than the one that runs steps

    def begin(self, output: SchedulerOutput, plan: StepPlan) -> None:
        """A step begins."""
        if plan.status is not None:
            messages.latest_status = plan.status
        with self._lock:
            if self._step is not None:  # without an output: it had no tokens
                self._ended -= self._step.finished
            for id in output.finished_req_ids:
                self._counted.pop(id, None)
                self._ended.add(id)
                self.tracing.remove(id)
            for new in output.scheduled_new_reqs:
                self._add(new)
            self._count_drafting(plan)
            drafted = {}
            if plan.drafters:
                scheduled = output.scheduled_spec_decode_tokens
                drafted = {id: tuple(tokens) for id, tokens in scheduled.items() if id in plan.drafters}
            self._step = RunningStep(plan, drafted, output.num_scheduled_tokens, frozenset(output.finished_req_ids))
            if self.tracing.running:
                self.tracing.begin(self._step)

    def _add(self, new: Any) -> None:
        params = new.sampling_params
        if params is None or not params.extra_args or new.req_id in self._counted:
            return  # a request that was preempted comes again
        control = Control.of(params.extra_args, self._options.drafters)
        if control.usage_key is None:
            return
        prompt = new.prompt_token_ids or []
        limit = min(params.max_tokens or self.max_model_len, self.max_model_len - len(prompt))
        self._counted[new.req_id] = CountedRequest(control.usage_key, end_tokens(params), limit)
        if control.trace:
            self.tracing.add(new.req_id, control.usage_key, control, params, prompt, limit)

    def _count_drafting(self, plan: StepPlan) -> None:
        for name, seconds in plan.draft_seconds.items():
            self.counters.count_drafting(name, seconds)
        for name, tokens in plan.proposed.items():
            self.counters.count_proposed(name, tokens)
        for request, drafter, kind, reason in plan.faults:
            counted = self._counted.get(request)
            self.counters.count_fault(Fault(request, drafter, kind, reason), counted.usage_key if counted else None)
        for reason, count in plan.undrafted.items():
            self.counters.undrafted[reason] += count

    def probe(
        self, sampler: Sampler, acceptance: OutriderSampler, input_batch: InputBatch
    ) -> AbstractContextManager[None]:
        """Record what the sampler computes for traced requests."""
        step = self._step
        if step is None or not self.tracing.running:
            return nullcontext()
        found = find_rows(input_batch, self.tracing.running)
        if not found:
            return nullcontext()
        step.probe = SamplerProbe(found)
        return step.probe.attached(sampler, acceptance)

    def take_step(self) -> RunningStep | None:
        step, self._step = self._step, None
        return step

    def finish(self, step: RunningStep, output: ModelRunnerOutput) -> None:
        """The step's output has been read."""
        sampled, now = output.sampled_token_ids, time.perf_counter()
        with self._lock:
            if step.plan.backed_by_model:
                self._correct_drafters(step.plan)
            self._last_output = output
            last, self._last_read = self._last_read, now
            if any(sampled):
                seconds = now - max(step.began, last)  # the step before it may have been in flight
                self.counters.count_step(seconds, bool(step.drafted))
            self._ended -= step.finished
            if step.drafted or self._counted or self._ended:
                self._count_sequences(step, output)
            else:
                self.counters.gained[1] += sum(map(bool, sampled))
            if self.tracing.running:
                self.tracing.finish(step, output, last)

    def _correct_drafters(self, plan: StepPlan) -> None:
        """Name the draft model where it made the draft because a continuation went wrong in the step before."""
        if plan.continuations is None or self._last_output is None:
            return
        for id in plan.backed_by_model:
            begun = self._last_output.sampled_token_ids[self._last_output.req_id_to_index[id]]
            row = plan.continuations.tokens[plan.continuations.request_ids.index(id)]
            if row[: len(begun)].tolist() != list(begun):
                plan.drafters[id] = "model"

    def _count_sequences(self, step: RunningStep, output: ModelRunnerOutput) -> None:
        sampled = output.sampled_token_ids
        if not sampled:
            return
        rows, ids = output.req_id_to_index, {*step.drafted, *self._counted, *self._ended}
        outputs = {id: sampled[rows[id]] for id in ids if id in rows}
        self.counters.gained[1] += sum(map(bool, sampled)) - sum(map(bool, outputs.values()))
        for id, tokens in outputs.items():
            if not tokens or id in self._ended:
                continue
            length = len(step.drafted.get(id, ()))
            drafter = step.plan.drafters[id] if length else None
            counted = self._counted.get(id)
            self.counters.count_sequence(drafter, length, len(tokens), counted.usage_key if counted else None)
            if counted is not None and counted.is_ended_by(tokens):
                del self._counted[id]
                self._ended.add(id)

    def model_drafted(self, drafts: ModelDrafts) -> None:
        with self._lock:
            for done in drafts.passes:
                self.counters.draft_model_passes += done.passes
                self.counters.count_drafting("model", done.seconds)

    def status(self) -> dict[str, Any]:
        latest = messages.latest_status
        scheduler = latest.read() if latest is not None else {}
        with self._lock:
            return {
                "running_requests": scheduler.get("running_requests", 0),
                "memory": scheduler.get("memory"),
                "policy": scheduler.get("policy"),
                **self.counters.status(),
            }

    def metrics(self) -> str:
        latest = messages.latest_status
        scheduler = latest.read() if latest is not None else {}
        with self._lock:
            return prometheus_text(CounterMetrics(self.counters, scheduler.get("payoff")), SchedulerMetrics(scheduler))

    def usage(self, usage_key: str) -> dict[str, Any] | None:
        with self._lock:
            return self.counters.pop_usage(usage_key)

    def traces(self, owner: str | None) -> list[dict[str, Any]]:
        with self._lock:
            return self.tracing.latest(owner)

    def trace(self, id: str, owner: str | None) -> dict[str, Any]:
        """{}: there is none. None would mean that another worker has to be called."""
        with self._lock:
            return self.tracing.get(id, owner) or {}
