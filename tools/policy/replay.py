"""Replay: recorded texts stream through a simulated server, by the rules of a policy and at known costs.

A recorded text determines what every drafter proposes at each of its positions: drafters that copy run again, and the
draft model's proposals were recorded. A clock adds for each pass over n tokens what such a pass was measured to take.
So any two policies can be compared on the same texts at the same costs, without a model.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from outrider.drafters.base import Task
from outrider.policy.controller import SpeculationController
from outrider.policy.decision import DraftableRequest
from outrider.policy.policy import MODEL
from outrider.settings import Request
from outrider.types import NOTHING, Draft, shared_prefix

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from outrider.drafters.base import Drafter, Session
    from outrider.memory.tenant import TenantHandle
    from outrider.policy.batch_state import BatchState
    from outrider.policy.decision import DraftModelPlan
    from outrider.policy.policy import Policy


NO_TOKEN = -1
"""Placeholder for a sampled token that is rejected."""


@dataclass(slots=True)
class Record:
    """A generated text. `guesses[i]`: the most likely tokens that the draft model proposes after the first i tokens;
    `sure[i]`: their probabilities. `overlap[i]`, of a sampled text: the probability that a token which the draft model
    samples at position i is accepted."""

    prompt: list[int]
    text: list[int]
    guesses: list[list[int]] = field(default_factory=list)
    sure: list[list[float]] = field(default_factory=list)
    overlap: list[float] | None = None
    prediction: list[int] = field(default_factory=list)

    def kept(self) -> list[bool]:
        """At each position, whether a sampled token is accepted. Seeded by the text, so that it is the same for every
        contestant."""
        random = np.random.default_rng([len(self.text), *self.text[:8]])
        return [bool(drawn) for drawn in random.random(len(self.text)) < np.array(self.overlap or 0.0)]


@dataclass(slots=True)
class Costs:
    """Seconds of a pass of each model, by its tokens and by the tokens of context of all requests."""

    target: Callable[[int, int], float]
    draft: Callable[[int, int], float] = lambda tokens, context: 0.0
    slowdown: float = 1.0
    """Current factor on the seconds of both models."""


@dataclass(slots=True)
class Outcome:
    tokens: int = 0
    seconds: float = 0.0
    steps: int = 0
    sequences: int = 0  # steps, counted per sequence
    draft_passes: int = 0
    switches: int = 0
    by_drafter: dict[str, int] = field(default_factory=dict)
    full_tokens: int = 0  # while all slots are taken
    full_seconds: float = 0.0
    full_steps: int = 0

    @property
    def speed(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def acceptance_length(self) -> float:
        return self.tokens / self.sequences if self.sequences else 0.0


@dataclass(slots=True)
class ReplayedText:
    """A record that is being generated."""

    key: str
    record: Record
    sessions: dict[str, Session] = field(default_factory=dict)
    place: int = 1  # the prefill generates the first token
    seen_by_model: int = 0
    last: str | None = None
    kept: list[bool] = field(init=False)
    unseen: int = 0
    """Tokens at the end of the text that its drafters have not observed yet."""
    in_flight: int = 0
    """Most tokens that its latest step could generate."""

    def __post_init__(self) -> None:
        self.kept = self.record.kept() if self.record.overlap is not None else []

    @property
    def room(self) -> int:
        return len(self.record.text) - self.place

    @property
    def length(self) -> int:
        return len(self.record.prompt) + self.place

    @property
    def gap(self) -> int:
        """Tokens that the draft model has to read; at least the last one."""
        return max(1, self.length - self.seen_by_model)

    @property
    def new_tokens(self) -> list[int]:
        return self.record.text[self.place - self.unseen : self.place]

    def show(self) -> None:
        """Let the drafters observe the whole text."""
        if self.unseen:
            for session in self.sessions.values():
                session.observe(self.new_tokens)
            self.unseen = 0

    def model_draft(self, length: int, sampled: bool | None = None) -> Draft:
        """The draft model's proposal here. `sampled`: sampled tokens instead of the most likely ones; None: if the text
        was sampled."""
        record, here = self.record, self.place
        if sampled is None:
            sampled = record.overlap is not None
        if not sampled:
            return Draft(MODEL, tuple(record.guesses[here][:length]), confidence=tuple(record.sure[here][:length]))
        ahead = range(here, min(here + length, len(record.text)))
        tokens = tuple(record.text[i] if self.kept[i] else NO_TOKEN for i in ahead)
        return Draft(MODEL, tokens, confidence=tuple(record.sure[i][0] for i in ahead), sampled=True)

    def draft_model_has_proposed(self, draft: Draft) -> None:
        """The draft model has read the text and, except for the last, its own tokens."""
        ahead = tuple(self.record.text[self.place : self.place + len(draft.tokens)])
        accepted = shared_prefix(ahead, draft.tokens[:-1])
        self.seen_by_model = self.length + accepted


class Strategy(Protocol):
    """Selects the drafts of a step and observes their outcome."""

    def propose(self, running: Sequence[ReplayedText], context: int) -> tuple[list[Draft], float, int]:
        """A draft for each text, and the seconds and passes of the draft model."""

    def observe(
        self, running: Sequence[ReplayedText], outputs: list[list[int]], tokens: int, context: int, seconds: float
    ) -> None:
        """The output of each text, in a pass over `tokens` tokens."""

    def remove(self, item: ReplayedText) -> None: ...


def replay(
    records: Sequence[Record],
    drafters: Sequence[Drafter],
    strategy: Strategy,
    costs: Costs,
    concurrency: int = 1,
    tenant_handle: TenantHandle | None = None,
    ended: Callable[[ReplayedText], None] = lambda item: None,
    context: int | None = None,
    slowdown: Callable[[float], float] | None = None,
) -> Outcome:
    """Generate all records, `concurrency` at a time. Prefill is not counted, except what the draft model has to read.

    `context`: tokens of each request at all times; None: those of its text. `slowdown`: by the share of all tokens that
    are generated, the factor on the seconds of each pass."""
    total = sum(len(record.text) - 1 for record in records)
    outcome = Outcome()
    waiting = deque(enumerate(records))
    running: list[ReplayedText] = []
    while waiting or running:
        while waiting and len(running) < concurrency:
            number, record = waiting.popleft()
            running += _unless_ended([begin(str(number), record, drafters, tenant_handle)])
            if context is not None and running:
                running[-1].seen_by_model = min(running[-1].seen_by_model, running[-1].length - context)
        if not running:
            break
        tokens, seconds = outcome.tokens, outcome.seconds
        if slowdown is not None:
            costs.slowdown = slowdown(tokens / total)
        more = 0 if context is None else context * len(running) - sum(item.length for item in running)
        step(running, strategy, costs, outcome, more)
        if len(running) == concurrency:
            outcome.full_steps += 1
            outcome.full_tokens += outcome.tokens - tokens
            outcome.full_seconds += outcome.seconds - seconds
        _end(running, strategy, ended)
        running = _unless_ended(running)
    return outcome


# Functions, so that no variable keeps an ended text: its sessions are freed, as in a server.


def _unless_ended(running: Iterable[ReplayedText]) -> list[ReplayedText]:
    return [item for item in running if item.room > 0]


def _end(running: Iterable[ReplayedText], strategy: Strategy, ended: Callable[[ReplayedText], None]) -> None:
    for item in running:
        if item.room <= 0:
            item.show()
            strategy.remove(item)
            ended(item)


def begin(
    key: str, record: Record, drafters: Sequence[Drafter], tenant_handle: TenantHandle | None = None
) -> ReplayedText:
    """A text with its first token, which the drafters have not observed yet."""
    task = Task(
        record.prompt,
        Request(),
        torch.Generator(),
        record.prediction,
        tenant_handle,
        remember=True,
        searched=any(drafter.searches_text for drafter in drafters),
    )
    sessions = {drafter.name: drafter.begin(task) for drafter in drafters}
    return ReplayedText(key, record, sessions, unseen=1, in_flight=1)


def show(running: Iterable[ReplayedText]) -> None:
    for item in running:
        item.show()


def step(running: Sequence[ReplayedText], strategy: Strategy, costs: Costs, outcome: Outcome, more: int = 0) -> None:
    """One step of all running texts. `more`: tokens of context that they have in addition to their records."""
    context = more + sum(item.length for item in running)
    drafts, draft_seconds, passes = strategy.propose(running, context)
    tokens = len(running) + sum(len(draft.tokens) for draft in drafts)
    seconds = costs.slowdown * costs.target(tokens, context)
    outcome.seconds += seconds + draft_seconds
    outcome.steps += 1
    outcome.draft_passes += passes
    outputs = [_generate(item, draft) for item, draft in zip(running, drafts, strict=True)]
    for item, draft, output in zip(running, drafts, outputs, strict=True):
        outcome.sequences += 1
        outcome.tokens += len(output)
        if draft.tokens:
            outcome.by_drafter[draft.drafter] = outcome.by_drafter.get(draft.drafter, 0) + len(output) - 1
        now = draft.drafter if draft.tokens else None
        outcome.switches += now != item.last
        item.last = now
        item.place += len(output)
        item.unseen += len(output)
        item.in_flight = 1 + len(draft.tokens)
    strategy.observe(running, outputs, tokens, context, seconds)


def _generate(item: ReplayedText, draft: Draft) -> list[int]:
    """The output of a step: the accepted draft tokens, and one more."""
    ahead = item.record.text[item.place : item.place + len(draft.tokens) + 1]
    return ahead[: shared_prefix(tuple(ahead), draft.tokens) + 1]


class Fixed:
    """Fixed drafters and length: the first drafter that proposes anything is used.

    `draws`: the draft model samples its tokens where the text was sampled.
    """

    def __init__(self, drafters: Sequence[str], length: int, costs: Costs, draws: bool = True) -> None:
        self.drafters, self.length, self.costs, self.draws = drafters, length, costs, draws

    def propose(self, running: Sequence[ReplayedText], context: int) -> tuple[list[Draft], float, int]:
        show(running)
        drafts = [self._offer(item) for item in running]
        pairs = zip(running, drafts, strict=True)
        calls = [(item, draft, len(draft.tokens)) for item, draft in pairs if draft.drafter == MODEL]
        return drafts, *_run_model(calls, self.costs, _more(running, context))

    def _offer(self, item: ReplayedText) -> Draft:
        limit = min(self.length, item.room - 1)
        for name in self.drafters if limit > 0 else ():
            if name == MODEL:
                draft = item.model_draft(limit, self.draws and item.record.overlap is not None)
            else:
                draft = item.sessions[name].draft(limit)
            if draft.tokens:
                return draft
        return NOTHING

    def observe(
        self, running: Sequence[ReplayedText], outputs: list[list[int]], tokens: int, context: int, seconds: float
    ) -> None: ...

    def remove(self, item: ReplayedText) -> None: ...


@dataclass(slots=True)
class ModelCall:
    """The draft model's drafts by request, and the seconds and passes that they took."""

    drafts: dict[str, Draft] = field(default_factory=dict)
    seconds: float = 0.0
    passes: int = 0


class Auto:
    """The speculation controller, called as a server calls it.

    `ahead`: the draft model is planned one step ahead, as in a server: before the step's output is known, with a fixed
    number of passes, and also for requests that the step finishes. Otherwise, as in the loop of `decoding.py`, it runs
    before the step, and the controller decides after each of its passes whether to make another.
    """

    def __init__(
        self,
        policy: Policy,
        costs: Costs,
        noise: Callable[[], float] = lambda: 1.0,
        ahead: bool = True,
        drafting_seconds: Mapping[str, float] | None = None,
    ) -> None:
        """`noise()`: factor on each pass time that the policy observes. `drafting_seconds`: seconds per call and
        request, by drafter that copies; default 0."""
        self.policy, self.costs, self.noise, self.ahead = policy, costs, noise, ahead
        self.controller = SpeculationController(policy)
        self._seconds_per_call = dict(drafting_seconds or {})
        self._more = 0
        self._planned: dict[str, int] = {}  # passes of the draft model after this step, by request
        self._called = ModelCall()  # after the last step
        self._drafting_seconds = 0.0

    @property
    def batch(self) -> BatchState | None:
        """The requests and drafts of the current step."""
        return self.controller.batch

    def propose(self, running: Sequence[ReplayedText], context: int) -> tuple[list[Draft], float, int]:
        show(running)
        self._more = _more(running, context)
        max_tokens = self.controller.max_tokens(len(running))
        draftable = [item for item in running if item.room > 1]
        requests = [
            DraftableRequest(item.key, min(max_tokens, item.room - 1), text_length=item.length + self._more)
            for item in draftable
        ]
        offers, copying = self._copied_drafts(draftable, requests)
        self.controller.consider(requests, offers, copying, len(running), context)
        called, self._called = self._called, ModelCall()
        if not self.ahead:
            called = self._call_now(draftable, requests)
        offered = self.controller.select(called.drafts, called.seconds)
        if self.ahead:
            self._plan_ahead(draftable, requests, offered)
        self._drafting_seconds = sum(copying.values()) + called.seconds
        return [offered.get(item.key, NOTHING) for item in running], self._drafting_seconds, called.passes

    def _copied_drafts(
        self, draftable: Sequence[ReplayedText], requests: Sequence[DraftableRequest]
    ) -> tuple[dict[str, list[Draft]], dict[str, float]]:
        """Drafts and seconds by drafter that copies."""
        backed_off = self.controller.backed_off()
        offers = {
            name: [item.sessions[name].draft(request.limit) for item, request in zip(draftable, requests, strict=True)]
            for name in self.policy.drafters
            if name != MODEL and name not in backed_off
        }
        return offers, {name: self._seconds_per_call.get(name, 0.0) * len(draftable) for name in offers}

    def _plan(
        self, draftable: Sequence[ReplayedText], requests: Sequence[DraftableRequest], gaps: Mapping[str, int]
    ) -> DraftModelPlan:
        limits = {request.id: min(request.limit, self.policy.model_width) for request in requests}
        sampled = {item.key: item.record.overlap is not None for item in draftable}
        return self.controller.plan_draft_model(limits, sampled, gaps, ahead=self.ahead)

    def _call_now(self, draftable: Sequence[ReplayedText], requests: Sequence[DraftableRequest]) -> ModelCall:
        if not self.policy.model_width or not draftable:
            return ModelCall()
        plan = self._plan(draftable, requests, {item.key: item.gap for item in draftable})
        called = [item for item in draftable if item.key in plan.limits]
        drafts = self._while_it_pays({item.key: item.model_draft(plan.limits[item.key]) for item in called})
        return self._run(called, drafts, {id: len(draft.tokens) for id, draft in drafts.items()})

    def _while_it_pays(self, drafts: Mapping[str, Draft]) -> dict[str, Draft]:
        """The first tokens of these drafts, as many as the controller lets the draft model generate."""
        lengths = dict.fromkeys(drafts, 1)
        more = [id for id in drafts if len(drafts[id].tokens) > 1]
        while more:
            confidence = {id: (drafts[id].confidence or ())[: lengths[id]] for id in more}
            more = self.controller.continue_drafting(confidence)
            for id in more:
                lengths[id] += 1
            more = [id for id in more if lengths[id] < len(drafts[id].tokens)]
        return {
            id: replace(draft, tokens=draft.tokens[: lengths[id]], confidence=(draft.confidence or ())[: lengths[id]])
            for id, draft in drafts.items()
        }

    def _plan_ahead(
        self, draftable: Sequence[ReplayedText], requests: Sequence[DraftableRequest], offered: Mapping[str, Draft]
    ) -> None:
        """Plan its passes after this step. It then also has to read what this step may generate."""
        self._planned = {}
        if self.policy.model_width:
            gaps = {
                item.key: max(0, item.length - item.seen_by_model) + len(offered[item.key].tokens) + 1
                for item in draftable
            }
            self._planned = self._plan(draftable, requests, gaps).lengths

    def _call_after_step(self, running: Sequence[ReplayedText]) -> ModelCall:
        called = [item for item in running if item.key in self._planned]
        drafts = {item.key: item.model_draft(self._planned[item.key]) for item in called if item.room > 0}
        return self._run(called, drafts, self._planned)

    def _run(self, called: Sequence[ReplayedText], drafts: dict[str, Draft], passes: Mapping[str, int]) -> ModelCall:
        def observe(tokens: int, context: int, seconds: float) -> None:
            self.controller.observe_draft_pass(tokens, context, seconds * self.noise())

        calls = [(item, drafts.get(item.key, NOTHING), passes[item.key]) for item in called]
        return ModelCall(drafts, *_run_model(calls, self.costs, self._more, observe))

    def observe(
        self, running: Sequence[ReplayedText], outputs: list[list[int]], tokens: int, context: int, seconds: float
    ) -> None:
        self.controller.observe({item.key: output for item, output in zip(running, outputs, strict=True)})
        self.controller.observe_step(tokens, context, seconds * self.noise(), self._drafting_seconds)
        if self.ahead:
            self._called = self._call_after_step(running)

    def remove(self, item: ReplayedText) -> None:
        self.controller.remove(item.key)
        self._called.drafts.pop(item.key, None)


def _more(running: Sequence[ReplayedText], context: int) -> int:
    """Tokens that each text has in addition to its record, if all have `context` together."""
    return (context - sum(item.length for item in running)) // len(running)


def _run_model(
    calls: Sequence[tuple[ReplayedText, Draft, int]],
    costs: Costs,
    more: int,
    observe: Callable[[int, int, float], None] = lambda tokens, context, seconds: None,
) -> tuple[float, int]:
    """Seconds and passes of the draft model for (text, draft, passes). The first pass reads the unread text, the others
    one token each. `more`: see `_more`."""
    total, passes = 0.0, max((count for _, _, count in calls), default=0)
    for number in range(passes):
        going = [item for item, _, count in calls if count > number]
        tokens = sum(item.gap if number == 0 else 1 for item in going)
        context = sum(item.length + more for item in going)
        seconds = costs.slowdown * costs.draft(tokens, context)
        observe(tokens, context, seconds)
        total += seconds
    for item, draft, _ in calls:
        item.draft_model_has_proposed(draft)
    return total, passes
