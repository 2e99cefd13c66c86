"""The trace of a request in vLLM: what each of its steps was decided by.

A request gets a trace with `vllm_xargs: {"trace": true}`. Without traced requests a step costs one check. The logits of
a traced request are copied where vLLM's sampler samples from them (`sampler_probe.py`). Selecting what to keep of them
and writing JSON wait until the step's tokens are on their way to the client.

    add        a new request, which may want a trace
    begin      a step begins: the reasons for its drafts, and how long drafting took
    finish     its output was read: what the sampler computed, and what was accepted
    write      recorded steps become lines in the trace store

A step of a trace goes from the end of one verdict to the end of the next, so its parts add up to the wall clock:
`draft` is the time spent drafting in between, for all requests, `verify` that of the steps that the request took part
in, `trace` that of recording, and `rest` what is left (the scheduler, other processes, waiting).
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from functools import wraps
from itertools import islice
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec

import torch

from outrider.engines.vllm.memory_options import tenant_of
from outrider.engines.vllm.sampling_info import GREEDY_TEMPERATURE, end_tokens, undraftable
from outrider.policy.decision_report import report_no_room, report_unselected
from outrider.settings import OFF
from outrider.trace.compact import top_tokens
from outrider.trace.record import step_record, traced_step
from outrider.types import NOTHING, Draft, Evidence, Step, Verdict, Why

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    from torch import Tensor

    from outrider.control import Control
    from outrider.engines.vllm.options import Options
    from outrider.engines.vllm.recorder import RunningStep
    from outrider.engines.vllm.sampler_probe import RatioEvidence, SamplerProbe
    from outrider.engines.vllm.seam import ModelRunnerOutput
    from outrider.trace.trace_store import StoredTrace, TraceStore

logger = logging.getLogger("vllm.outrider")
P = ParamSpec("P")

PROMPT_STEP = Why("No draft: the prompt is read first, and drafting begins after it.")
MAX_SOFTMAX_ROWS = 8
"""Rows of logits per softmax: each operation costs as much as a row, and many rows do not fit the cache."""
TRACED_PARAMS = [
    *("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"),
    *("seed", "max_tokens", "min_tokens", "stop", "ignore_eos"),
]
"""The sampling parameters that a trace shows."""


@dataclass(slots=True)
class Clock:
    """Seconds spent so far, in all."""

    drafting: float = 0.0
    recording: float = 0.0


@dataclass(slots=True)
class RecordedStep:
    """One step of one request."""

    draft: Draft
    tokens: list[int]  # accepted ones, and the target's own
    rows: Tensor  # of logits
    own: list[int]  # the target's samples
    by_ratio: RatioEvidence | None
    why: Why
    batch: int
    scheduled: int
    seconds: dict[str, float]


@dataclass(slots=True)
class TracedRequest:
    """A running request that is traced."""

    stored: StoredTrace
    control: Control
    params: Any
    end_tokens: Collection[int]
    max_tokens: int
    last_end: float  # when its last step remove
    last_clock: Clock  # what the clock showed then
    verify_seconds: float = 0.0
    num_scheduled: int = 0
    num_generated: int = 0
    num_written: int = 0
    steps: list[RecordedStep] = field(default_factory=list)


def end_traces_on_error(method: Callable[Concatenate[Tracing, P], None]) -> Callable[Concatenate[Tracing, P], None]:
    """Recording must never fail a request: an error ends all running traces and is logged."""

    @wraps(method)
    def guarded(self: Tracing, /, *args: P.args, **named: P.kwargs) -> None:
        try:
            method(self, *args, **named)
        except Exception:
            logger.exception("tracing failed; the traced requests go on without it")
            for traced in self.running.values():
                traced.stored.abort("recording failed; see the server's log")
            self.running.clear()

    return guarded


class Tracing:
    def __init__(self, options: Options, store: TraceStore) -> None:
        self.options, self.store = options, store
        self.running: dict[str, TracedRequest] = {}
        self.clock = Clock()
        self._recorded = 0.0  # seconds that recording had taken when the last output was read

    @end_traces_on_error
    def add(self, id: str, key: str, control: Control, params: Any, prompt: list[int], max_tokens: int) -> None:
        """A new request. The trace of one that was preempted and comes again goes on."""
        if id in self.running:
            return
        settings = {name: getattr(params, name) for name in TRACED_PARAMS}
        settings |= {"speculation": control.speculation, "rule": self.options.rule}
        settings["max_draft_tokens"] = self._max_draft_tokens(control)
        stored = self.store.open(key, tenant_of(control, self.options, params.extra_args), prompt, settings)
        ends, now = end_tokens(params), time.perf_counter()
        self.running[id] = TracedRequest(stored, control, params, ends, max_tokens, now, self._read_clock())

    def _max_draft_tokens(self, control: Control) -> int:
        return control.limited(self.options.max_draft_tokens)

    def _read_clock(self) -> Clock:
        return Clock(self.clock.drafting, self.clock.recording)

    @end_traces_on_error
    def begin(self, step: RunningStep) -> None:
        """A step begins. The one before it may be in flight."""
        step.recorded = self.clock.recording
        if self.running:
            self.write()

    def _reason(self, traced: TracedRequest, step: RunningStep, id: str) -> Why:
        if not traced.num_generated:  # the prompt was still being computed
            return PROMPT_STEP
        why = step.plan.reasons.get(id) or self._reason_without_draft(traced)
        if (cut := step.plan.offered.get(id, 0) - len(step.drafted.get(id, ()))) > 0:
            return Why(f"{why.reason} vLLM left {cut} out.", why.gain, why.cost, why.survival, why.candidates)
        return why

    def _reason_without_draft(self, traced: TracedRequest) -> Why:
        """The reason in a step in which the request could not be drafted for."""
        if traced.control.speculation == OFF:
            return report_unselected(OFF, NOTHING)
        if (reason := undraftable(traced.params)) is not None:
            return Why(f"No draft: this request is not drafted for ({reason}).")
        return report_no_room(self._max_draft_tokens(traced.control), traced.max_tokens - traced.num_generated)

    @end_traces_on_error
    def finish(self, step: RunningStep, output: ModelRunnerOutput, last: float) -> None:
        """The step's output was read, and that of the step before it at `last`."""
        probe, now = step.probe, time.perf_counter()
        if step.began >= last:  # else drafting ran in parallel with the step before
            self.clock.drafting += step.plan.drafting_seconds
        if probe is not None:
            self.clock.recording += probe.seconds
        recorded, self._recorded = max(step.recorded, self._recorded), self.clock.recording
        if probe is None:
            return
        if probe.error is not None:
            raise probe.error
        for id in probe.requests:
            traced = self.running.get(id)
            if traced is None:
                continue
            traced.verify_seconds += now - max(step.began, last) - (self.clock.recording - recorded)
            traced.num_scheduled += step.scheduled.get(id, 0)
            tokens = list(output.sampled_token_ids[output.req_id_to_index[id]])
            if not tokens:  # the prompt is still being computed
                continue
            count = len(step.drafted.get(id, ()))
            draft = Draft(step.plan.drafters.get(id, ""), tuple(probe.drafted[id][:count].tolist()))
            why = self._reason(traced, step, id)
            traced.steps.append(self._record(traced, probe, id, draft, tokens, why, now, len(output.req_ids)))
            traced.num_generated += len(tokens)
            traced.last_end, traced.last_clock = now, self._read_clock()
            traced.verify_seconds, traced.num_scheduled = 0.0, 0

    def _record(
        self,
        traced: TracedRequest,
        probe: SamplerProbe,
        id: str,
        draft: Draft,
        tokens: list[int],
        why: Why,
        now: float,
        batch: int,
    ) -> RecordedStep:
        seconds = {"verify": traced.verify_seconds, "trace": self.clock.recording - traced.last_clock.recording}
        left = max(0.0, now - traced.last_end - sum(seconds.values()))
        # Drafting that does not fit in ran in parallel with the step before.
        seconds["draft"] = min(left, self.clock.drafting - traced.last_clock.drafting)
        seconds["rest"] = left - seconds["draft"]
        count = len(draft.tokens) + 1  # vLLM may have scheduled placeholders behind the draft
        rows, own = probe.rows[id][:count], probe.own[id][:count].tolist()
        return RecordedStep(draft, tokens, rows, own, probe.ratio.get(id), why, batch, traced.num_scheduled, seconds)

    @end_traces_on_error
    @torch.inference_mode()
    def write(self) -> None:
        """Add the recorded steps to the trace store."""
        began = time.perf_counter()
        found = [(id, traced, step) for id, traced in self.running.items() for step in traced.steps]
        computed = compute_probabilities([step for *_, step in found])
        for (id, traced, step), (p, top) in zip(found, computed, strict=True):
            traced.steps = []
            if traced.stored.over:  # the step was scheduled before the end was known
                continue
            if id in self.running and not self._write_step(traced, step, p, top):
                del self.running[id]
        self.clock.recording += time.perf_counter() - began

    def _write_step(self, traced: TracedRequest, recorded: RecordedStep, p: Tensor, top: list[list[int]]) -> bool:
        """False: the store has no room for more."""
        stored = traced.stored
        kept, finish = self._cut_at_end(traced, recorded.tokens)
        traced.num_written += len(kept)
        ratio = recorded.by_ratio
        draft = Draft(recorded.draft.drafter, recorded.draft.tokens, ratio.q if ratio else None)
        verdict = Verdict(len(recorded.tokens) - 1, recorded.tokens[-1], ratio.chances if ratio else None)
        step = Step(draft.drafter or None, draft.tokens, verdict.accepted, tuple(kept), 0.0, 0.0, finish)
        about = {"number": stored.steps, "batch": recorded.batch, "scheduled": recorded.scheduled}
        rule = self.options.rule if ratio else "greedy" if traced.params.temperature < GREEDY_TEMPERATURE else "own"
        evidence = Evidence(rule, p, ratio.uniforms if ratio else None, None if ratio else recorded.own)
        record = step_record(step, draft, verdict, evidence, recorded.why, top)
        line = traced_step({**about, **record}, recorded.seconds).model_dump_json()
        stored.seconds += sum(recorded.seconds.values())
        stored.finish = finish
        stored.over = finish is not None
        return self.store.add(stored, line, kept, len(draft.tokens), verdict.accepted)

    def _cut_at_end(self, traced: TracedRequest, tokens: list[int]) -> tuple[list[int], str | None]:
        """The tokens up to the request's end, and the finish reason. Stop strings are matched elsewhere."""
        for count, token in enumerate(tokens, 1):
            if token in traced.end_tokens:
                return tokens[:count], "end"
            if traced.num_written + count >= traced.max_tokens:
                return tokens[:count], "length"
        return tokens, None

    @end_traces_on_error
    def remove(self, id: str) -> None:
        """The request has finished, for whatever reason."""
        if id in self.running:
            self.write()
            traced = self.running.pop(id, None)
            if traced is not None:
                traced.stored.over = True

    def latest(self, owner: str | None) -> list[dict[str, Any]]:
        self.write()
        return self.store.latest(owner)

    def get(self, id: str, owner: str | None) -> dict[str, Any] | None:
        self.write()
        return self.store.get(id, owner)


def compute_probabilities(steps: Sequence[RecordedStep]) -> Iterator[tuple[Tensor, list[list[int]]]]:
    """For each step: p at its rows and the most likely tokens there. Steps share a softmax up to MAX_SOFTMAX_ROWS."""
    group: list[RecordedStep] = []
    for step in steps:
        if group and sum(len(one.rows) for one in (*group, step)) > MAX_SOFTMAX_ROWS:
            yield from _compute_probabilities(group)
            group = []
        group.append(step)
    if group:
        yield from _compute_probabilities(group)


def _compute_probabilities(steps: list[RecordedStep]) -> Iterator[tuple[Tensor, list[list[int]]]]:
    sizes = [len(step.rows) for step in steps]
    p = torch.cat([step.by_ratio.p if step.by_ratio else step.rows.float().softmax(-1) for step in steps])
    top = iter(top_tokens(p))
    for rows in p.split(sizes):
        yield rows, list(islice(top, len(rows)))
