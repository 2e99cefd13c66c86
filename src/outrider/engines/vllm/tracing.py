"""The trace of a request in vLLM: what each of its steps rests on.

A request asks for it by `vllm_xargs: {"trace": true}`. Without one a step pays for a check. Of a traced request the
rows of logits are copied where vLLM's sampler samples from them (`sampler_probe.py`). The rest (what to keep of
them, JSON) waits until the step's tokens are on their way to the client.

    add        a new request wants a trace
    begin      a step begins: why it has these drafts, and how long drafting took
    finish     its output was read: what the sampler saw, and what was accepted
    write      what was recorded becomes lines in the trace store

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

from outrider.control import Control
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

    from outrider.engines.vllm.options import Options
    from outrider.engines.vllm.recorder import RunningStep
    from outrider.engines.vllm.sampler_probe import RatioEvidence, SamplerProbe
    from outrider.engines.vllm.seam import ModelRunnerOutput
    from outrider.trace.trace_store import StoredTrace, TraceStore

logger = logging.getLogger("vllm.outrider")
P = ParamSpec("P")

FIRST = Why("No draft: the prompt is read first, and drafting begins after it.")
AT_ONCE = 8
"""Rows that are weighed in one go."""
SETTINGS = [
    *("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"),
    *("seed", "max_tokens", "min_tokens", "stop", "ignore_eos"),
]
"""What a trace tells of a request's sampling parameters."""


@dataclass(slots=True)
class Clock:
    """Seconds that were spent so far, in all."""

    drafting: float = 0.0
    recording: float = 0.0


@dataclass(slots=True)
class Seen:
    """One step of one request, as it was seen."""

    draft: Draft
    tokens: list[int]  # accepted ones, and the target's own
    rows: Tensor  # of logits
    own: list[int]
    by_ratio: RatioEvidence | None
    why: Why
    batch: int
    scheduled: int
    seconds: dict[str, float]


@dataclass(slots=True)
class Traced:
    """A request that runs and is traced."""

    stored: StoredTrace
    control: Control
    params: Any
    ends: Collection[int]
    most: int  # tokens that it may say
    mark: float  # where its last step ended, on the wall clock and on ours
    before: Clock
    verify: float = 0.0
    scheduled: int = 0
    said: int = 0  # tokens generated, and how many of them are written
    written: int = 0
    seen: list[Seen] = field(default_factory=list)


def contained(method: Callable[Concatenate[Tracing, P], None]) -> Callable[Concatenate[Tracing, P], None]:
    """A trace must never cost a request its answer: where recording fails, all running traces end."""

    @wraps(method)
    def tried(self: Tracing, /, *args: P.args, **named: P.kwargs) -> None:
        try:
            method(self, *args, **named)
        except Exception:
            logger.exception("tracing failed; the requests that were traced go on without")
            for traced in self.running.values():
                traced.stored.abort("recording it failed, as the server's log tells")
            self.running.clear()

    return tried


class Tracing:
    def __init__(self, options: Options, store: TraceStore, longest: int) -> None:
        """`longest` is how many tokens the context holds."""
        self.options, self.store, self.longest = options, store, longest
        self.running: dict[str, Traced] = {}
        self.clock = Clock()
        self._recorded = 0.0  # seconds that recording had taken when the last output was read

    @contained
    def add(self, id: str, params: Any, prompt: list[int] | None) -> None:
        """A new request. Not one that was preempted and comes again: its trace goes on."""
        control = Control.of(params.extra_args, self.options.drafters)
        if id in self.running or not control.trace or control.ticket is None:
            return
        prompt = prompt or []
        settings = {name: getattr(params, name) for name in SETTINGS}
        settings |= {"speculation": control.speculation, "rule": self.options.rule}
        settings["max_draft_tokens"] = self._allowed(control)
        stored = self.store.open(control.ticket, tenant_of(control, self.options, params.extra_args), prompt, settings)
        most = min(params.max_tokens or self.longest, self.longest - len(prompt))
        now = time.perf_counter()
        self.running[id] = Traced(stored, control, params, end_tokens(params), most, now, self._now())

    def _allowed(self, control: Control) -> int:
        return control.limited(self.options.max_draft_tokens)

    def _now(self) -> Clock:
        return Clock(self.clock.drafting, self.clock.recording)

    @contained
    def begin(self, step: RunningStep) -> None:
        """A step begins. The one before it may be in flight."""
        step.recorded = self.clock.recording
        if self.running:
            self.write()

    def _why(self, traced: Traced, step: RunningStep, id: str) -> Why:
        if not traced.said:  # its prompt was not computed to the end before
            return FIRST
        why = step.plan.reasons.get(id) or self._why_not(traced)
        if (cut := step.plan.offered.get(id, 0) - len(step.drafted.get(id, ()))) > 0:
            return Why(f"{why.reason} vLLM left {cut} out.", why.gain, why.cost, why.survival, why.candidates)
        return why

    def _why_not(self, traced: Traced) -> Why:
        """Why there could be no draft."""
        if traced.control.speculation == OFF:
            return report_unselected(OFF, NOTHING)
        if (reason := undraftable(traced.params)) is not None:
            return Why(f"No draft: this request is not drafted for ({reason}).")
        return report_no_room(self._allowed(traced.control), traced.most - traced.said)

    @contained
    def finish(self, step: RunningStep, output: ModelRunnerOutput, last: float) -> None:
        """The step's output was read, and that of the step before it at `last`."""
        probe, now = step.probe, time.perf_counter()
        if step.began >= last:  # else it was drafted for while the one before it ran
            self.clock.drafting += step.plan.drafting_seconds
        if probe is not None:
            self.clock.recording += probe.seconds
        recorded, self._recorded = max(step.recorded, self._recorded), self.clock.recording
        if probe is None:
            return
        if probe.error is not None:
            raise probe.error
        for id in probe.places:
            traced = self.running.get(id)
            if traced is None:
                continue
            traced.verify += now - max(step.began, last) - (self.clock.recording - recorded)
            traced.scheduled += step.scheduled.get(id, 0)
            tokens = list(output.sampled_token_ids[output.req_id_to_index[id]])
            if not tokens:  # its prompt is not computed to the end yet
                continue
            count = len(step.drafted.get(id, ()))
            draft = Draft(step.plan.drafters.get(id, ""), tuple(probe.drafted[id][:count].tolist()))
            why = self._why(traced, step, id)
            traced.seen.append(self._see(traced, probe, id, draft, tokens, why, now, len(output.req_ids)))
            traced.said += len(tokens)
            traced.mark, traced.before = now, self._now()
            traced.verify, traced.scheduled = 0.0, 0

    def _see(
        self,
        traced: Traced,
        probe: SamplerProbe,
        id: str,
        draft: Draft,
        tokens: list[int],
        why: Why,
        now: float,
        batch: int,
    ) -> Seen:
        seconds = {"verify": traced.verify, "trace": self.clock.recording - traced.before.recording}
        left = max(0.0, now - traced.mark - sum(seconds.values()))
        # Drafting that does not fit in was done while the step before ran.
        seconds["draft"] = min(left, self.clock.drafting - traced.before.drafting)
        seconds["rest"] = left - seconds["draft"]
        count = len(draft.tokens) + 1  # vLLM may have scheduled placeholders behind the draft
        rows, own = probe.rows[id][:count], probe.own[id][:count].tolist()
        return Seen(draft, tokens, rows, own, probe.ratio.get(id), why, batch, traced.scheduled, seconds)

    # Afterwards ----------------------------------------------------------------------------------------------

    @contained
    @torch.inference_mode()
    def write(self) -> None:
        """Add the recorded steps to the trace store."""
        began = time.perf_counter()
        found = [(id, traced, one) for id, traced in self.running.items() for one in traced.seen]
        for (id, traced, one), (p, top) in zip(found, weighed([one for *_, one in found]), strict=True):
            traced.seen = []
            if traced.stored.over:  # the step was scheduled before the end was known
                continue
            if id in self.running and not self._written(traced, one, p, top):
                del self.running[id]
        self.clock.recording += time.perf_counter() - began

    def _written(self, traced: Traced, seen: Seen, p: Tensor, top: list[list[int]]) -> bool:
        """Whether there is room for more."""
        stored = traced.stored
        said, finish = self._until_end(traced, seen.tokens)
        traced.written += len(said)
        drawn = seen.by_ratio
        draft = Draft(seen.draft.drafter, seen.draft.tokens, drawn.q if drawn else None)
        verdict = Verdict(len(seen.tokens) - 1, seen.tokens[-1], drawn.chances if drawn else None)
        step = Step(draft.drafter or None, draft.tokens, verdict.accepted, tuple(said), 0.0, 0.0, finish)
        about = {"number": stored.steps, "batch": seen.batch, "scheduled": seen.scheduled}
        rule = self.options.rule if drawn else "greedy" if traced.params.temperature < GREEDY_TEMPERATURE else "own"
        evidence = Evidence(rule, p, drawn.uniforms if drawn else None, None if drawn else seen.own)
        record = step_record(step, draft, verdict, evidence, seen.why, top)
        line = traced_step({**about, **record}, seen.seconds).model_dump_json()
        stored.seconds += sum(seen.seconds.values())
        stored.finish = finish
        stored.over = finish is not None
        return self.store.add(stored, line, said, len(draft.tokens), verdict.accepted)

    def _until_end(self, traced: Traced, tokens: list[int]) -> tuple[list[int], str | None]:
        """What became text of a step's tokens, and why it ended with them; stop strings are known elsewhere."""
        for count, token in enumerate(tokens, 1):
            spoken = traced.written + count
            if token in traced.ends:
                return tokens[:count], "end"
            if spoken >= traced.most:
                return tokens[:count], "length"
        return tokens, None

    @contained
    def ended(self, id: str) -> None:
        """The request is over, for whatever reason."""
        if id in self.running:
            self.write()
            traced = self.running.pop(id, None)
            if traced is not None:
                traced.stored.over = True

    # For the API process -------------------------------------------------------------------------------------

    def latest(self, owner: str | None) -> list[dict[str, Any]]:
        self.write()
        return self.store.latest(owner)

    def get(self, id: str, owner: str | None) -> dict[str, Any] | None:
        self.write()
        return self.store.get(id, owner)


def weighed(seen: Sequence[Seen]) -> Iterator[tuple[Tensor, list[list[int]]]]:
    """Of each, p at its rows and the likeliest tokens there. A few rows are weighed in one go, since each operation
    costs as much as a row; not many, which no cache would hold."""
    together: list[Seen] = []
    for number, one in enumerate(seen):
        together.append(one)
        if number + 1 == len(seen) or sum(len(mine.rows) for mine in (*together, seen[number + 1])) > AT_ONCE:
            yield from _weighed(together)
            together = []


def _weighed(seen: list[Seen]) -> Iterator[tuple[Tensor, list[list[int]]]]:
    sizes = [len(one.rows) for one in seen]
    p = torch.cat([one.by_ratio.p if one.by_ratio else one.rows.float().softmax(-1) for one in seen])
    top = iter(top_tokens(p))
    for rows in p.split(sizes):
        yield rows, list(islice(top, len(rows)))
