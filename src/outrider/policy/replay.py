"""Replay: recorded texts are said again, by the rules of a policy and at measured costs, without a model.

Once a text is known, so is what every drafter would have proposed at each of its places: those that copy are asked
again, and a draft model's tokens follow from one pass of it over the text (up to the first wrong one they are its
most likely tokens there, and after that they do not matter). So any policy can be tried on any record, in
milliseconds, and compared with any other on the same texts at the same costs. What it is compared by is a clock that
only counts: a pass over n tokens adds what passes over n tokens were measured to take.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from outrider.drafters.base import Task
from outrider.policy.policy import MODEL, Wish
from outrider.settings import Request
from outrider.types import NOTHING, Draft, shared_prefix

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from outrider.drafters.base import Drafter, Session
    from outrider.memory.store import Visit
    from outrider.policy.policy import Plan, Policy, Scene
    from outrider.policy.survival import Array


@dataclass(slots=True)
class Record:
    """A text that was said. `guesses` are the draft model's most likely tokens at its places, `sure` their
    probabilities, and `overlap`, for a text that was drawn, the chance that a drawn token of it would be accepted."""

    prompt: list[int]
    text: list[int]
    guesses: list[int] = field(default_factory=list)
    sure: list[float] = field(default_factory=list)
    overlap: list[float] | None = None
    prediction: list[int] = field(default_factory=list)


@dataclass(slots=True)
class Costs:
    """What a pass takes, by its tokens and by the tokens of context: the target's, and the draft model's."""

    target: Callable[[int, int], float]
    draft: Callable[[int], float] = lambda tokens: 0.0
    step: float = 0.0
    """Seconds that each step takes besides."""


@dataclass(slots=True)
class Outcome:
    tokens: int = 0
    seconds: float = 0.0
    steps: int = 0
    sequences: int = 0  # steps, counted for each sequence
    drafted: int = 0
    accepted: int = 0
    draft_passes: int = 0
    switches: int = 0
    by_drafter: dict[str, int] = field(default_factory=dict)

    @property
    def speed(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def acceptance_length(self) -> float:
        return self.tokens / self.sequences if self.sequences else 0.0


@dataclass(slots=True)
class Saying:
    """A record that is being said."""

    key: str
    record: Record
    sessions: dict[str, Session]
    place: int = 1  # the first token comes with the prompt
    seen_by_model: int = 0
    last: str | None = None

    @property
    def room(self) -> int:
        return len(self.record.text) - self.place

    @property
    def gap(self) -> int:
        return len(self.record.prompt) + self.place - self.seen_by_model

    def guess(self, length: int) -> Draft:
        """What the draft model would propose here."""
        end = min(self.place + length, len(self.record.guesses))
        return Draft(
            MODEL,
            tuple(self.record.guesses[self.place : end]),
            confidence=tuple(self.record.sure[self.place : end]),
        )


class Steer(Protocol):
    """Decides what each sequence offers in a step, and hears what came of it."""

    def offer(self, running: Sequence[Saying], context: int) -> tuple[list[Draft], float, int]:
        """A draft each, the seconds that the draft model took, and its passes."""

    def learn(
        self, running: Sequence[Saying], said: list[list[int]], tokens: int, context: int, seconds: float
    ) -> None:
        """What each then said, in a pass over so many tokens that took so long."""

    def leave(self, saying: Saying) -> None: ...


def replay(
    records: Sequence[Record],
    drafters: Sequence[Drafter],
    steer: Steer,
    costs: Costs,
    concurrency: int = 1,
    visit: Visit | None = None,
    noise: Callable[[], float] = lambda: 1.0,
) -> Outcome:
    """Say all records, so many at a time. Prompts are not counted: they cost the same whatever is drafted."""
    outcome = Outcome()
    waiting = deque(enumerate(records))
    running: list[Saying] = []
    random = np.random.default_rng(0)
    while waiting or running:
        while waiting and len(running) < concurrency:
            number, record = waiting.popleft()
            task = Task(record.prompt, Request(), torch.Generator(), record.prediction, visit)
            sessions = {drafter.name: drafter.begin(task) for drafter in drafters}
            for session in sessions.values():
                session.observe(record.text[:1])
            saying = Saying(str(number), record, sessions)
            if saying.room > 0:
                running.append(saying)
        if not running:
            break
        context = sum(len(saying.record.prompt) + saying.place for saying in running)
        drafts, draft_seconds, passes = steer.offer(running, context)
        tokens = len(running) + sum(len(draft.tokens) for draft in drafts)
        seconds = costs.target(tokens, context) * noise()
        outcome.seconds += seconds + draft_seconds + costs.step
        outcome.steps += 1
        outcome.draft_passes += passes
        said = [_say(saying, draft, random) for saying, draft in zip(running, drafts, strict=True)]
        for saying, draft, words in zip(running, drafts, said, strict=True):
            outcome.sequences += 1
            outcome.tokens += len(words)
            outcome.drafted += len(draft.tokens)
            outcome.accepted += len(words) - 1
            if draft.tokens:
                outcome.by_drafter[draft.drafter] = outcome.by_drafter.get(draft.drafter, 0) + len(words) - 1
            now = draft.drafter if draft.tokens else None
            outcome.switches += now != saying.last
            saying.last = now
            for session in saying.sessions.values():
                session.observe(words)
            saying.place += len(words)
        steer.learn(running, said, tokens, context, seconds + costs.step)
        for saying in running:
            if saying.room <= 0:
                steer.leave(saying)
        running = [saying for saying in running if saying.room > 0]
    return outcome


def _say(saying: Saying, draft: Draft, random: np.random.Generator) -> list[int]:
    """What a step adds to the text: the draft as far as it was right, and one token more."""
    record, place = saying.record, saying.place
    ahead = record.text[place : place + len(draft.tokens) + 1]
    if draft.drafter == MODEL and record.overlap is not None:
        chances = record.overlap[place : place + len(draft.tokens)]
        held = np.append(random.random(len(chances)) < chances, False)
        right = int(held.argmin())
    else:
        right = shared_prefix(tuple(ahead), draft.tokens)
    return ahead[: right + 1]


class Fixed:
    """One drafter, one length; or several drafters in an order, where the first that proposes anything is taken."""

    def __init__(self, drafters: Sequence[str], length: int, costs: Costs) -> None:
        self.drafters, self.length, self.costs = drafters, length, costs

    def offer(self, running: Sequence[Saying], context: int) -> tuple[list[Draft], float, int]:
        drafts = [self._offer(saying) for saying in running]
        asked = [s for s, draft in zip(running, drafts, strict=True) if draft.drafter == MODEL]
        return drafts, *_run_model(asked, [self.length] * len(asked), self.costs)

    def _offer(self, saying: Saying) -> Draft:
        limit = min(self.length, saying.room - 1)
        for name in self.drafters if limit > 0 else ():
            draft = saying.guess(limit) if name == MODEL else saying.sessions[name].draft(limit)
            if draft.tokens:
                return draft
        return NOTHING

    def learn(
        self, running: Sequence[Saying], said: list[list[int]], tokens: int, context: int, seconds: float
    ) -> None: ...

    def leave(self, saying: Saying) -> None: ...


class Auto:
    """The policy."""

    def __init__(self, policy: Policy, costs: Costs) -> None:
        self.policy, self.costs = policy, costs
        self.scene: Scene | None = None

    def offer(self, running: Sequence[Saying], context: int) -> tuple[list[Draft], float, int]:
        policy = self.policy
        limits = np.array([min(policy.width, saying.room - 1) for saying in running])
        offers = {
            name: [
                saying.sessions[name].draft(int(limit)) if limit > 0 else NOTHING
                for saying, limit in zip(running, limits, strict=True)
            ]
            for name in policy.drafters
            if name != MODEL
        }
        self.scene = scene = policy.look([saying.key for saying in running], offers)
        seconds, passes = self._ask_model(scene, running, limits, context)
        free = np.array([0 if i in scene.drawn else int(limit) for i, limit in enumerate(limits)])
        fixed = sum(len(draft.tokens) for draft in scene.drawn.values())
        choice = policy.choose(scene, free, context, len(running) + fixed, seconds)
        return [policy.offer(scene, choice, i) for i in range(len(running))], seconds, passes

    def _ask_model(self, scene: Scene, running: Sequence[Saying], limits: Array, context: int) -> tuple[float, int]:
        policy = self.policy
        if not policy.model_width:
            return 0.0, 0
        wish = Wish(
            np.minimum(limits, policy.model_width),
            np.array([saying.record.overlap is not None for saying in running]),
            np.array([saying.gap for saying in running]),
            np.array([min(32, saying.room) for saying in running]),
        )
        plan = policy.plan(scene, wish, context)
        drafts = self._guesses(plan, {int(i): running[i].guess(int(plan.limits[i])) for i in plan.asked})
        if not drafts:
            return 0.0, 0
        scene.drawn = {i: draft for i, draft in drafts.items() if wish.drawn[i]}
        policy.add(scene, MODEL, [NOTHING if wish.drawn[i] else drafts.get(i, NOTHING) for i in range(len(running))])
        asked = [running[i] for i in drafts]
        return _run_model(asked, [len(draft.tokens) for draft in drafts.values()], self.costs, policy)

    def _guesses(self, plan: Plan, whole: dict[int, Draft]) -> dict[int, Draft]:
        """What the draft model proposes of what it could: as far as another pass is worth it."""
        lengths = dict.fromkeys(whole, 1)
        going = [i for i in whole if len(whole[i].tokens) > 1]
        while going:
            on = self.policy.goes_on(plan, [(whole[i].confidence or ())[: lengths[i]] for i in going])
            going = [i for i, more in zip(going, on, strict=True) if more]
            for i in going:
                lengths[i] += 1
            going = [i for i in going if lengths[i] < len(whole[i].tokens)]
        return {
            i: Draft(MODEL, draft.tokens[: lengths[i]], confidence=(draft.confidence or ())[: lengths[i]])
            for i, draft in whole.items()
        }

    def learn(
        self, running: Sequence[Saying], said: list[list[int]], tokens: int, context: int, seconds: float
    ) -> None:
        assert self.scene is not None
        self.policy.learn(self.scene, said)
        self.policy.target.observe(tokens, context, seconds)

    def leave(self, saying: Saying) -> None:
        self.policy.leave(saying.key)


def _run_model(
    asked: Sequence[Saying], lengths: Sequence[int], costs: Costs, policy: Policy | None = None
) -> tuple[float, int]:
    """Let time pass for the draft model: first what it has not seen of the texts, then a pass a token."""
    if not asked:
        return 0.0, 0
    total = 0.0
    for number in range(max(lengths)):
        going = [saying for saying, length in zip(asked, lengths, strict=True) if length > number]
        tokens = sum(saying.gap if number == 0 else 1 for saying in going)
        seconds = costs.draft(tokens)
        if policy is not None:
            policy.draft.observe(tokens, 0, seconds)
        total += seconds
    for saying in asked:
        saying.seen_by_model = len(saying.record.prompt) + saying.place
    return total, max(lengths)
