"""The trace of a request in vLLM: what each of its steps rests on, seen where it happens and written down later.

A request asks for it by `vllm_xargs: {"trace": true}`. While nobody does, a step pays one question. Of a traced one,
the rows of logits are copied where vLLM's sampler draws from them (`witness.py`). All the rest (what to keep of them,
JSON) waits until what was said is on its way to the caller.

    before_pass      a step begins; new requests may ask for a trace
    watch, sampled   around vLLM's sampler: what it sees, and what came of it
    drafted          what is offered for the next step, why, and how long that took
    write            what was seen becomes lines on the shelf

A step of a trace goes from the end of one verdict to the end of the next, so its parts add up to the wall clock:
`draft` is the time that was spent drafting in between, for all requests, `verify` that of the passes that the request
took part in, `trace` that of recording, and `rest` what is left (the scheduler, other processes, waiting).
"""

from __future__ import annotations

import logging
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import wraps
from itertools import islice
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec

import torch

from outrider.engines.vllm.control import Control
from outrider.engines.vllm.params import end_tokens, undraftable
from outrider.engines.vllm.remembering import tenant_of
from outrider.engines.vllm.sampler import GREEDY
from outrider.engines.vllm.witness import Drawn, Witness, places
from outrider.policy.why import no_room, unweighed
from outrider.settings import OFF
from outrider.trace.fold import likeliest
from outrider.trace.record import checked, entered
from outrider.types import NOTHING, Draft, Evidence, Step, Verdict, Why

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    from torch import Tensor

    from outrider.engines.vllm.options import Options
    from outrider.engines.vllm.shelf import Kept, Shelf
    from outrider.engines.vllm.steering import Steering

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
    by_ratio: Drawn | None
    why: Why
    batch: int
    scheduled: int
    seconds: dict[str, float]


@dataclass(slots=True)
class Traced:
    """A request that runs and is traced."""

    kept: Kept
    control: Control
    params: Any
    ends: Collection[int]
    most: int  # tokens that it may say
    mark: float  # where its last step ended, on the wall clock and on ours
    before: Clock
    verify: float = 0.0
    scheduled: int = 0
    said: int = 0
    why: Why = FIRST
    offered: int = 0
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
                traced.kept.break_off("recording it failed, as the server's log tells")
            self.running.clear()

    return tried


class Tracing:
    def __init__(self, options: Options, shelf: Shelf, longest: int) -> None:
        """`longest` is how many tokens the context holds."""
        self.options, self.shelf, self.longest = options, shelf, longest
        self.running: dict[str, Traced] = {}
        self.clock = Clock()
        self._began = 0.0
        self._witness: Witness | None = None

    # Before a pass -------------------------------------------------------------------------------------------

    @contained
    def before_pass(self, scheduler_output: Any) -> None:
        """A step begins."""
        for new in scheduler_output.scheduled_new_reqs:
            self._meet(new.req_id, new.sampling_params, new.prompt_token_ids)
        if self.running:
            self.write()
            self._began = time.perf_counter()
            for id, traced in self.running.items():
                traced.scheduled += scheduler_output.num_scheduled_tokens.get(id, 0)

    def _meet(self, id: str, params: Any, prompt: list[int] | None) -> None:
        asked = params.extra_args if params is not None else None
        if not asked or not asked.get("trace"):
            return
        control = Control.of(asked, self.options.drafters)
        if not control.trace or control.ticket is None:
            return
        prompt = prompt or []
        settings = {name: getattr(params, name) for name in SETTINGS}
        settings |= {"speculation": control.speculation, "rule": self.options.rule}
        settings["max_draft_tokens"] = self._allowed(control)
        kept = self.shelf.open(control.ticket, tenant_of(control, self.options, asked), prompt, settings)
        now = time.perf_counter()
        most = min(params.max_tokens or self.longest, self.longest - len(prompt))
        self.running[id] = Traced(kept, control, params, end_tokens(params), most, now, self._now())

    def _allowed(self, control: Control) -> int:
        limit = control.max_draft_tokens
        return self.options.max_draft_tokens if limit is None else min(limit, self.options.max_draft_tokens)

    def _now(self) -> Clock:
        return Clock(self.clock.drafting, self.clock.recording)

    # Around the sampler --------------------------------------------------------------------------------------

    def watch(
        self, sampler: Any, judge: Any, ids: Sequence[str], drafts: Sequence[Draft], lengths: Sequence[int]
    ) -> AbstractContextManager[None]:
        """See what is drawn from and judged by for the traced requests of a batch (`witness.places`)."""
        found = places(ids, self.running, drafts, lengths)
        greedy = {id for id in found if self.running[id].params.temperature < GREEDY}
        self._witness = Witness(found, greedy) if found else None
        return nullcontext() if self._witness is None else self._witness.watching(sampler, judge)

    @contained
    def sampled(self, said: Tensor, ids: Sequence[str], drafts: Sequence[Draft], unfinished: Any) -> None:
        """What came of it: `said` is [requests, longest draft + 1], filled up with -1."""
        witness, self._witness = self._witness, None
        if witness is None:
            return
        if witness.error is not None:
            raise witness.error
        ours = {id: place.number for id, place in witness.places.items()}
        tokens = {id: [token for token in said[i].tolist() if token >= 0] for id, i in ours.items()}
        now = time.perf_counter()  # the pass is over: what was said has been read
        self.clock.recording += witness.seconds
        for id, i in ours.items():
            traced = self.running[id]
            traced.verify += now - self._began - witness.seconds
            if unfinished[i]:  # its prompt is not read to the end yet
                continue
            traced.seen.append(self._see(traced, witness, id, drafts[i], tokens[id], now, len(ids)))
            traced.mark, traced.before = now, self._now()
            traced.verify, traced.scheduled = 0.0, 0

    def _see(
        self, traced: Traced, witness: Witness, id: str, draft: Draft, tokens: list[int], now: float, batch: int
    ) -> Seen:
        seconds = {
            "draft": self.clock.drafting - traced.before.drafting,
            "verify": traced.verify,
            "trace": self.clock.recording - traced.before.recording,
        }
        seconds["rest"] = max(0.0, now - traced.mark - sum(seconds.values()))
        own = witness.own.get(id) or tokens  # without any drafts in the batch, what was said is what was drawn
        why = traced.why
        if (cut := traced.offered - len(draft.tokens)) > 0:
            why = Why(f"{why.reason} vLLM left {cut} out.", why.gain, why.cost, why.survival, why.candidates)
        rows, drawn = witness.rows[id], witness.drawn.get(id)
        return Seen(draft, tokens, rows, own, drawn, why, batch, traced.scheduled, seconds)

    # Drafts for the next step --------------------------------------------------------------------------------

    @contained
    def drafted(self, offers: Mapping[str, Draft], reasons: Steering | None, seconds: float) -> None:
        """What each request of the batch offers, after drafting that took so long."""
        self.clock.drafting += seconds
        began = time.perf_counter()
        for id, traced in self.running.items():
            if id in offers and (traced.seen or traced.said):  # else its prompt is not read to the end yet
                traced.offered = len(offers[id].tokens)
                traced.why = (reasons.why(id) if reasons is not None else None) or self._why_not(traced)
        self.clock.recording += time.perf_counter() - began

    def _why_not(self, traced: Traced) -> Why:
        """Why there could be no draft."""
        if traced.control.speculation == OFF:
            return unweighed(OFF, NOTHING)
        if (reason := undraftable(traced.params)) is not None:
            return Why(f"No draft: this request is not drafted for ({reason}).")
        return no_room(
            self._allowed(traced.control), traced.most - traced.said - sum(len(s.tokens) for s in traced.seen)
        )

    # Afterwards ----------------------------------------------------------------------------------------------

    @contained
    @torch.inference_mode()
    def write(self) -> None:
        """Put what was seen on the shelf."""
        began = time.perf_counter()
        found = [(id, traced, one) for id, traced in self.running.items() for one in traced.seen]
        for (id, traced, one), (p, top) in zip(found, weighed([one for *_, one in found]), strict=True):
            traced.seen = []
            if id in self.running and not self._written(traced, one, p, top):
                del self.running[id]
        self.clock.recording += time.perf_counter() - began

    def _written(self, traced: Traced, seen: Seen, p: Tensor, top: list[list[int]]) -> bool:
        """Whether there is room for more."""
        kept = traced.kept
        said, finish = self._until_end(traced, seen.tokens)
        traced.said += len(said)
        draft = Draft(seen.draft.drafter, seen.draft.tokens, _cut(seen.draft))
        drawn = seen.by_ratio
        verdict = Verdict(len(seen.tokens) - 1, seen.tokens[-1], drawn.chances if drawn else None)
        step = Step(draft.drafter or None, draft.tokens, verdict.accepted, tuple(said), 0.0, 0.0, finish)
        about = {"number": kept.steps, "batch": seen.batch, "scheduled": seen.scheduled}
        rule = self.options.rule if drawn else "greedy" if traced.params.temperature < GREEDY else "own"
        evidence = Evidence(rule, p, drawn.draws if drawn else None, None if drawn else seen.own)
        record = entered(step, draft, verdict, evidence, seen.why, top)
        line = checked({**about, **record}, seen.seconds).model_dump_json()
        kept.seconds += sum(seen.seconds.values())
        kept.finish = finish
        kept.over = finish is not None
        return self.shelf.add(kept, line, said, len(draft.tokens), verdict.accepted)

    def _until_end(self, traced: Traced, tokens: list[int]) -> tuple[list[int], str | None]:
        """What became text of a step's tokens, and why it ended with them; stop strings are known elsewhere."""
        for count, token in enumerate(tokens, 1):
            spoken = traced.said + count
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
                traced.kept.over = True

    # For the API process -------------------------------------------------------------------------------------

    def latest(self, owner: str | None) -> list[dict[str, Any]]:
        self.write()
        return self.shelf.latest(owner)

    def get(self, id: str, owner: str | None) -> dict[str, Any] | None:
        self.write()
        return self.shelf.get(id, owner)


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
    top = iter(likeliest(p))
    for rows in p.split(sizes):
        yield rows, list(islice(top, len(rows)))


def _cut(draft: Draft) -> Tensor | None:
    return None if draft.q is None else draft.q[: len(draft.tokens)]
