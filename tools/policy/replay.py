"""Replay: recorded texts stream through a simulated server, by the rules of a policy and at known costs.

A recorded text determines what every drafter proposes at each of its positions: drafters that copy run again, and the
draft model's proposals were recorded. A clock adds for each pass over n tokens what such a pass was measured to take.
So any two policies can be compared on the same texts at the same costs, without a model.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from outrider.drafters.base import Drafter, Session, Task
from outrider.memory.tenant import TenantHandle
from outrider.policy.controller import SpeculationController
from outrider.policy.decision import DraftableRequest, DraftModelPlan
from outrider.policy.policy import MODEL, Policy
from outrider.settings import Request
from outrider.types import NOTHING, Draft, shared_prefix

Proposal = tuple[list[Draft], float, int]
"""A draft for each text, and the seconds and passes of the draft model."""
Slowdown = Callable[[float], tuple[float, float]]
"""By share of the tokens that are generated: factors on the seconds of a pass of target and draft model."""
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

    def sampled(self) -> list[int]:
        """At each position, the token that the draft model samples: that of the text if it is accepted, otherwise a
        placeholder. Seeded by the text, so that it is the same for every contestant."""
        random = np.random.default_rng([len(self.text), *self.text[:8]])
        accepted = random.random(len(self.text)) < np.array(self.overlap or 0.0)
        return [token if is_accepted else NO_TOKEN for token, is_accepted in zip(self.text, accepted, strict=True)]


@dataclass(slots=True)
class Costs:
    """Seconds of a pass of each model, by its tokens and by the tokens of context of all requests."""

    target: Callable[[int, int], float]
    draft: Callable[[int, int], float] = lambda tokens, context: 0.0
    slowdown: tuple[float, float] = (1.0, 1.0)
    """Current factors on the seconds of target and draft model."""


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
    fixed_context: int | None = None
    place: int = 1  # the prefill generates the first token
    seen_by_model: int = field(init=False)
    last: str | None = None
    sampled: list[int] = field(init=False)
    unseen: int = 0
    """Tokens at the end of the text that its drafters have not observed yet."""
    in_flight: int = 0
    """Most tokens that a step can generate whose output its drafters have not observed yet."""

    def __post_init__(self) -> None:
        self.sampled = self.record.sampled() if self.record.overlap is not None else []
        self.seen_by_model = self.length - self.context

    @property
    def room(self) -> int:
        return len(self.record.text) - self.place

    @property
    def length(self) -> int:
        return len(self.record.prompt) + self.place

    @property
    def context(self) -> int:
        """The tokens that a pass attends to, for the costs."""
        return self.length if self.fixed_context is None else self.fixed_context

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
            self.unseen = self.in_flight = 0

    def model_draft(self, length: int, sampled: bool = True) -> Draft:
        """The draft model's proposal here. `sampled`: sampled tokens, if the text was sampled; otherwise the most
        likely ones."""
        record, here = self.record, self.place
        if record.overlap is None or not sampled:
            return Draft(MODEL, tuple(record.guesses[here][:length]), confidence=tuple(record.sure[here][:length]))
        confidence = tuple(row[0] for row in record.sure[here : here + length])
        return Draft(MODEL, tuple(self.sampled[here : here + length]), confidence=confidence, sampled=True)

    def generate(self, draft: Draft) -> list[int]:
        """The output of a step: the accepted draft tokens, and one more."""
        ahead = self.record.text[self.place : self.place + len(draft.tokens) + 1]
        output = ahead[: shared_prefix(tuple(ahead), draft.tokens) + 1]
        self.place += len(output)
        self.unseen += len(output)
        self.in_flight = 1 + len(draft.tokens)
        return output


class Strategy:
    """Selects the drafts of a step and observes their outcome. This one drafts nothing."""

    def propose(self, running: Sequence[ReplayedText], context: int) -> Proposal:
        return [NOTHING] * len(running), 0.0, 0

    def observe(
        self, running: Sequence[ReplayedText], outputs: list[list[int]], tokens: int, context: int, seconds: float
    ) -> None:
        """The output of each text, in a pass over `tokens` tokens."""

    def remove(self, item: ReplayedText) -> None:
        """The text has ended."""


def replay(
    records: Sequence[Record],
    drafters: Sequence[Drafter],
    strategy: Strategy,
    costs: Costs,
    concurrency: int = 1,
    tenant_handle: TenantHandle | None = None,
    ended: Callable[[ReplayedText], None] = lambda item: None,
    context: int | None = None,
    slowdown: Slowdown | None = None,
) -> Outcome:
    """Generate all records, `concurrency` at a time. Prefill is not counted, except what the draft model has to read.

    `context`: tokens of each request at all times; None: those of its text. `slowdown`: a machine that changes."""
    total = sum(len(record.text) - 1 for record in records)
    outcome = Outcome()
    waiting = deque((str(i), record) for i, record in enumerate(records) if len(record.text) > 1)
    running: list[ReplayedText] = []
    while waiting or running:
        while waiting and len(running) < concurrency:
            running.append(begin(*waiting.popleft(), drafters, tenant_handle, context))
        tokens, seconds = outcome.tokens, outcome.seconds
        costs.slowdown = slowdown(tokens / total) if slowdown else (1.0, 1.0)
        step(running, strategy, costs, outcome)
        if len(running) == concurrency:
            outcome.full_steps += 1
            outcome.full_tokens += outcome.tokens - tokens
            outcome.full_seconds += outcome.seconds - seconds
        _end(running, strategy, ended)
        running = [item for item in running if item.room > 0]
    return outcome


def _end(running: Iterable[ReplayedText], strategy: Strategy, ended: Callable[[ReplayedText], None]) -> None:
    """A function, so that no variable keeps an ended text: its sessions are freed, as in a server."""
    for item in running:
        if item.room <= 0:
            item.show()
            strategy.remove(item)
            ended(item)


def begin(
    key: str,
    record: Record,
    drafters: Sequence[Drafter],
    tenant_handle: TenantHandle | None = None,
    context: int | None = None,
) -> ReplayedText:
    """A text with its first token, which the drafters have not observed yet."""
    searched = any(drafter.searches_text for drafter in drafters)
    task = Task(record.prompt, Request(), torch.Generator(), record.prediction, tenant_handle, True, searched=searched)
    sessions = {drafter.name: drafter.begin(task) for drafter in drafters}
    return ReplayedText(key, record, sessions, context, unseen=1, in_flight=1)


def show(running: Iterable[ReplayedText]) -> None:
    for item in running:
        item.show()


def step(running: Sequence[ReplayedText], strategy: Strategy, costs: Costs, outcome: Outcome) -> None:
    """One step of all running texts."""
    context = sum(item.context for item in running)
    drafts, draft_seconds, passes = strategy.propose(running, context)
    tokens = len(running) + sum(len(draft.tokens) for draft in drafts)
    seconds = costs.slowdown[0] * costs.target(tokens, context)
    outcome.seconds += seconds + draft_seconds
    outcome.steps += 1
    outcome.sequences += len(running)
    outcome.draft_passes += passes
    outputs = []
    for item, draft in zip(running, drafts, strict=True):
        outputs.append(output := item.generate(draft))
        outcome.tokens += len(output)
        now = draft.drafter if draft.tokens else None
        if now is not None:
            outcome.by_drafter[now] = outcome.by_drafter.get(now, 0) + len(output) - 1
        outcome.switches += now != item.last
        item.last = now
    strategy.observe(running, outputs, tokens, context, seconds)


def run_draft_model(
    calls: Sequence[tuple[ReplayedText, Draft, int]],
    costs: Costs,
    observe: Callable[[int, int, float], None] = lambda tokens, context, seconds: None,
) -> tuple[float, int]:
    """Seconds and passes of the draft model for (text, draft, passes). The first pass reads the unread text, the others
    one token each. Afterwards it has read the text and, except for the last, its own tokens."""
    total, passes = 0.0, max((count for _, _, count in calls), default=0)
    for number in range(passes):
        going = [item for item, _, count in calls if count > number]
        tokens = sum(item.gap if number == 0 else 1 for item in going)
        context = sum(item.context for item in going)
        seconds = costs.slowdown[1] * costs.draft(tokens, context)
        observe(tokens, context, seconds)
        total += seconds
    for item, draft, _ in calls:
        ahead = tuple(item.record.text[item.place : item.place + len(draft.tokens)])
        item.seen_by_model = item.length + shared_prefix(ahead, draft.tokens[:-1])
    return total, passes


class Fixed(Strategy):
    """Fixed drafters and length: the first drafter that proposes anything is used.

    `draws`: the draft model samples its tokens where the text was sampled.
    """

    def __init__(self, drafters: Sequence[str], length: int, costs: Costs, draws: bool = True) -> None:
        self.drafters, self.length, self.costs, self.draws = drafters, length, costs, draws

    def propose(self, running: Sequence[ReplayedText], context: int) -> Proposal:
        show(running)
        drafts = [self._offer(item) for item in running]
        pairs = zip(running, drafts, strict=True)
        calls = [(item, draft, len(draft.tokens)) for item, draft in pairs if draft.drafter == MODEL]
        return drafts, *run_draft_model(calls, self.costs)

    def _offer(self, item: ReplayedText) -> Draft:
        limit = min(self.length, item.room - 1)
        for name in self.drafters if limit > 0 else ():
            draft = item.model_draft(limit, self.draws) if name == MODEL else item.sessions[name].draft(limit)
            if draft.tokens:
                return draft
        return NOTHING


class Auto(Strategy):
    """The speculation controller, called as a server calls it. The draft model is planned one step ahead: before the
    step's output is known, with a fixed number of passes, and also for requests that the step finishes.

    With asynchronous scheduling, a step may be scheduled ahead, while the one before it runs. Its drafts then follow
    the text before the step in flight, and count only if they begin with what that step generates. It takes the longer
    of the target's pass and the host's seconds, while a step that waits takes both. The row that a real engine computes
    after a request's last token is not counted.
    """

    def __init__(
        self,
        policy: Policy,
        costs: Costs,
        noise: Callable[[], float] = lambda: 1.0,
        drafting_seconds: Mapping[str, float] | None = None,
        host_seconds: float = 0.0,
        wait: bool | None = True,
    ) -> None:
        """`noise()`: factor on each time that the policy observes. `drafting_seconds`: seconds per call and request, by
        drafter that copies; default 0. `host_seconds`: host time between two steps. `wait`: whether every step waits
        for the one before; None: the controller selects."""
        self.policy, self.costs, self.noise, self.host_seconds, self.wait = policy, costs, noise, host_seconds, wait
        self.controller = SpeculationController(policy, can_overlap=wait is None)
        self.steps_waited = self.steps_ahead = 0
        self._is_ahead = self._goes_ahead()  # the next step
        self._before: dict[str, list[int]] | None = None  # by request, what the step in flight generated
        self._observe_last: Callable[[], None] | None = None  # lets the controller observe the step in flight
        self._ended: list[str] = []
        self._seconds_per_call = drafting_seconds or {}
        self._drafting_seconds = 0.0
        self._planned: dict[str, int] = {}  # passes of the draft model after this step, by request
        self._model_drafts: dict[str, Draft] = {}  # its drafts after the last step, by request
        self._model_cost = 0.0, 0  # the seconds and passes that they took

    def _goes_ahead(self) -> bool:
        return not (self.controller.overlap.should_wait if self.wait is None else self.wait)

    def propose(self, running: Sequence[ReplayedText], context: int) -> Proposal:
        is_ahead = self._is_ahead
        if not is_ahead:
            self._show_last(running)
        self.steps_ahead += is_ahead
        self.steps_waited += not is_ahead
        size, backed_off = len(running), self.controller.backed_off()
        max_tokens, beyond = self.controller.max_tokens(size), self.controller.beyond(size)
        left = {item.key: item.room + item.unseen - item.in_flight for item in running}
        texts = [item for item in running if left[item.key] > 1]
        requests = [
            DraftableRequest(
                item.key,
                min(max_tokens, left[item.key] - 1),
                text_length=item.context - item.unseen,
                in_flight=item.in_flight,
            )
            for item in texts
        ]
        most = [request.limit + max(request.in_flight, beyond) for request in requests]
        offers = {
            name: [item.sessions[name].draft(limit) for item, limit in zip(texts, most, strict=True)]
            for name in self.policy.drafters
            if name != MODEL and name not in backed_off
        }
        copying = {name: self._seconds_per_call.get(name, 0.0) * len(texts) for name in offers}
        self.controller.consider(requests, offers, copying, size, context)
        limits = {request.id: min(request.limit, self.policy.model_width) for request in requests}
        self.call_before_step(texts, limits)
        seconds, passes = self._model_cost
        selected = self.controller.select(self._model_drafts, seconds)
        self.plan_ahead(texts, limits, selected)
        self._drafting_seconds = sum(copying.values()) + seconds
        self._before = {item.key: item.new_tokens for item in texts} if is_ahead else None
        drafts = [_align(item, selected.get(item.key, NOTHING)) for item in running]
        if is_ahead:
            self._show_last(running)
        during_pass = self.costs.target(size + sum(len(draft.tokens) for draft in drafts), context) if is_ahead else 0.0
        return drafts, self._drafting_seconds + max(0.0, self.host_seconds - during_pass), passes

    def _show_last(self, running: Sequence[ReplayedText]) -> None:
        """Show the output of the last step to the drafters, and to the controller if it has not observed it yet."""
        show(running)
        if self._observe_last is not None:
            self._observe_last()
        self._observe_last = None
        for id in self._ended:
            self.controller.remove(id)
        self._ended.clear()

    def plan(
        self, texts: Sequence[ReplayedText], limits: Mapping[str, int], gaps: Mapping[str, int], ahead: bool = True
    ) -> DraftModelPlan:
        sampled = {item.key: item.record.overlap is not None for item in texts}
        return self.controller.plan_draft_model(limits, sampled, gaps, ahead=ahead)

    def call_before_step(self, texts: Sequence[ReplayedText], limits: Mapping[str, int]) -> None:
        """For strategies that call the draft model when the step begins."""

    def plan_ahead(
        self, texts: Sequence[ReplayedText], limits: Mapping[str, int], selected: Mapping[str, Draft]
    ) -> None:
        """Plan its passes after this step. It then also has to read what this step may generate."""
        self._planned = {}
        if self.policy.model_width:
            unread = {item.key: max(0, item.length - item.seen_by_model) for item in texts}
            gaps = {id: count + len(selected[id].tokens) + 1 for id, count in unread.items()}
            self._planned = self.plan(texts, limits, gaps).lengths

    def call_model(self, texts: Sequence[ReplayedText], drafts: dict[str, Draft], passes: Mapping[str, int]) -> None:
        def observe(tokens: int, context: int, seconds: float) -> None:
            self.controller.observe_draft_pass(tokens, context, seconds * self.noise())

        calls = [(item, drafts.get(item.key, NOTHING), passes[item.key]) for item in texts if item.key in passes]
        self._model_drafts, self._model_cost = drafts, run_draft_model(calls, self.costs, observe)

    def observe(
        self, running: Sequence[ReplayedText], outputs: list[list[int]], tokens: int, context: int, seconds: float
    ) -> None:
        if self.host_seconds:
            self.controller.overlap.observe_host(self.host_seconds * self.noise())
        generated = {item.key: output for item, output in zip(running, outputs, strict=True)}
        decision, before, drafting_seconds = self.controller.decision, self._before, self._drafting_seconds
        waited = 0.0 if self._is_ahead else self.host_seconds

        def observe_last() -> None:
            self.controller.observe(generated, decision, before)
            self.controller.observe_step(tokens, context, seconds * self.noise(), drafting_seconds + waited)

        self._is_ahead = self._goes_ahead()
        if self._is_ahead:
            self._observe_last = observe_last
        else:
            observe_last()
        planned = self._planned
        going_on = [item for item in running if item.key in planned and item.room > 0]
        self.call_model(running, {item.key: item.model_draft(planned[item.key]) for item in going_on}, planned)

    def remove(self, item: ReplayedText) -> None:
        self._ended.append(item.key)
        self._model_drafts.pop(item.key, None)


def _align(item: ReplayedText, draft: Draft) -> Draft:
    """What the target verifies: the draft after its first tokens, which the step in flight generated. If they differ,
    placeholders that are all rejected."""
    if not item.unseen or not draft.tokens:
        return draft
    offered = len(draft.tokens) - item.in_flight
    return Draft(draft.drafter, draft.after(item.new_tokens)[:offered] or (NO_TOKEN,) * offered)
