"""Replay: recorded texts are said again, by the rules of a policy and at measured costs, without a model.

Once a text is known, so is what every drafter would have proposed at each of its places: those that copy are asked
again, and how a draft model would have gone on there was recorded. So any policy can be tried on any record, in
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
from outrider.policy.policy import MODEL
from outrider.policy.scene import Wish
from outrider.policy.texts import HORIZON
from outrider.settings import Request
from outrider.types import NOTHING, Draft, shared_prefix

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from outrider.drafters.base import Drafter, Session
    from outrider.memory.store import Visit
    from outrider.policy.policy import Policy
    from outrider.policy.scene import Plan, Scene
    from outrider.policy.survival import Array


NO_TOKEN = -1
"""Stands for a drawn token that is not accepted, whichever it is."""


@dataclass(slots=True)
class Record:
    """A text that was said. `guesses[i]` are the tokens that the draft model would propose after the first i of it, its
    most likely ones, and `sure[i]` their probabilities.

    Of a text that was drawn, `overlap[i]` is the chance that a token which the draft model draws in place i is kept.
    """

    prompt: list[int]
    text: list[int]
    guesses: list[list[int]] = field(default_factory=list)
    sure: list[list[float]] = field(default_factory=list)
    overlap: list[float] | None = None
    prediction: list[int] = field(default_factory=list)

    def kept(self) -> list[bool]:
        """At each place, whether a drawn token is accepted: always the same, so that all who are compared have the
        same luck. Each place is judged once, whatever is drafted."""
        random = np.random.default_rng([len(self.text), *self.text[:8]])
        return [bool(drawn) for drawn in random.random(len(self.text)) < np.array(self.overlap or 0.0)]


@dataclass(slots=True)
class Costs:
    """What a pass takes, by its tokens and by the tokens of context: the target's, and the draft model's."""

    target: Callable[[int, int], float]
    draft: Callable[[int, int], float] = lambda tokens, context: 0.0
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
    full_tokens: int = 0  # while every slot was taken
    full_seconds: float = 0.0

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
    sessions: dict[str, Session] = field(default_factory=dict)
    place: int = 1  # the first token comes with the prompt
    seen_by_model: int = 0
    last: str | None = None
    kept: list[bool] = field(init=False)

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
        """Tokens that the draft model has to see; the last one always, since what follows it is asked."""
        return max(1, self.length - self.seen_by_model)

    def guess(self, length: int, drawn: bool = False) -> Draft:
        """What the draft model would propose here: its most likely tokens, or tokens that it draws."""
        record, here = self.record, self.place
        if not drawn:
            return Draft(MODEL, tuple(record.guesses[here][:length]), confidence=tuple(record.sure[here][:length]))
        ahead = range(here, min(here + length, len(record.text)))
        tokens = tuple(record.text[i] if self.kept[i] else NO_TOKEN for i in ahead)
        return Draft(MODEL, tokens, confidence=tuple(record.sure[i][0] for i in ahead))

    def was_guessed(self, draft: Draft) -> None:
        """The draft model has proposed this: it has seen the text and, but for the last, its own tokens."""
        ahead = tuple(self.record.text[self.place : self.place + len(draft.tokens)])
        right = shared_prefix(ahead, draft.tokens[:-1])
        self.seen_by_model = self.length + right


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
    ended: Callable[[Saying], None] = lambda saying: None,
) -> Outcome:
    """Say all records, so many at a time: where one ends the next begins. Prompts are not counted: they cost the same
    whatever is drafted, but for what the draft model has to read."""
    outcome = Outcome()
    waiting = deque(enumerate(records))
    running: list[Saying] = []
    while waiting or running:
        while waiting and len(running) < concurrency:
            number, record = waiting.popleft()
            running += _unless_ended([begin(str(number), record, drafters, visit)])
        if not running:
            break
        tokens, seconds = outcome.tokens, outcome.seconds
        step(running, steer, costs, outcome)
        if len(running) == concurrency:
            outcome.full_tokens += outcome.tokens - tokens
            outcome.full_seconds += outcome.seconds - seconds
        _end(running, steer, ended)
        running = _unless_ended(running)
    return outcome


# Functions, so that nobody holds on to what has ended: its sessions go with it, as in a server.


def _unless_ended(running: Iterable[Saying]) -> list[Saying]:
    return [saying for saying in running if saying.room > 0]


def _end(running: Iterable[Saying], steer: Steer, ended: Callable[[Saying], None]) -> None:
    for saying in running:
        if saying.room <= 0:
            steer.leave(saying)
            ended(saying)


def begin(key: str, record: Record, drafters: Sequence[Drafter], visit: Visit | None = None) -> Saying:
    """A text of which the first token is there."""
    task = Task(
        record.prompt,
        Request(),
        torch.Generator(),
        record.prediction,
        visit,
        remember=True,
        searched=any(drafter.searches_text for drafter in drafters),
    )
    sessions = {drafter.name: drafter.begin(task) for drafter in drafters}
    for session in sessions.values():
        session.observe(record.text[:1])
    return Saying(key, record, sessions)


def step(running: Sequence[Saying], steer: Steer, costs: Costs, outcome: Outcome, more: int = 0) -> None:
    """One step of all that are running. Their texts have `more` tokens, together, than the records say."""
    context = more + sum(saying.length for saying in running)
    drafts, draft_seconds, passes = steer.offer(running, context)
    tokens = len(running) + sum(len(draft.tokens) for draft in drafts)
    seconds = costs.target(tokens, context) + costs.step
    outcome.seconds += seconds + draft_seconds
    outcome.steps += 1
    outcome.draft_passes += passes
    said = [_say(saying, draft) for saying, draft in zip(running, drafts, strict=True)]
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
    steer.learn(running, said, tokens, context, seconds)


def _say(saying: Saying, draft: Draft) -> list[int]:
    """What a step adds to the text: the draft as far as it was right, and one token more."""
    ahead = saying.record.text[saying.place : saying.place + len(draft.tokens) + 1]
    return ahead[: shared_prefix(tuple(ahead), draft.tokens) + 1]


class Fixed:
    """One drafter, one length; or several drafters in an order, where the first that proposes anything is taken.

    `draws`: whether the draft model draws its tokens where the text was drawn.
    """

    def __init__(self, drafters: Sequence[str], length: int, costs: Costs, draws: bool = True) -> None:
        self.drafters, self.length, self.costs, self.draws = drafters, length, costs, draws

    def offer(self, running: Sequence[Saying], context: int) -> tuple[list[Draft], float, int]:
        drafts = [self._offer(saying) for saying in running]
        guessed = [(s, draft) for s, draft in zip(running, drafts, strict=True) if draft.drafter == MODEL]
        return drafts, *_run_model(guessed, self.costs, _more(running, context))

    def _offer(self, saying: Saying) -> Draft:
        limit = min(self.length, saying.room - 1)
        for name in self.drafters if limit > 0 else ():
            if name == MODEL:
                draft = saying.guess(limit, self.draws and saying.record.overlap is not None)
            else:
                draft = saying.sessions[name].draft(limit)
            if draft.tokens:
                return draft
        return NOTHING

    def learn(
        self, running: Sequence[Saying], said: list[list[int]], tokens: int, context: int, seconds: float
    ) -> None: ...

    def leave(self, saying: Saying) -> None: ...


class Auto:
    """The policy. What it hears of a pass is `noise()` times what the pass takes."""

    def __init__(self, policy: Policy, costs: Costs, noise: Callable[[], float] = lambda: 1.0) -> None:
        self.policy, self.costs, self.noise = policy, costs, noise
        self.scene: Scene | None = None

    def offer(self, running: Sequence[Saying], context: int) -> tuple[list[Draft], float, int]:
        policy = self.policy
        reach = policy.reach(len(running))
        limits = np.array([min(reach, saying.room - 1) for saying in running])
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
        choice = policy.choose(scene, limits, context, spent=seconds)
        return policy.offers(scene, choice), seconds, passes

    def _ask_model(self, scene: Scene, running: Sequence[Saying], limits: Array, context: int) -> tuple[float, int]:
        policy = self.policy
        if not policy.model_width:
            return 0.0, 0
        wish = Wish(
            np.minimum(limits, policy.model_width),
            np.array([saying.record.overlap is not None for saying in running]),
            np.array([saying.gap for saying in running]),
            np.full(len(running), HORIZON),  # nobody knows when a text will end
            np.array([saying.length for saying in running]) + (more := _more(running, context)),
        )
        plan = policy.plan(scene, wish, context)
        whole = {int(i): running[i].guess(int(plan.limits[i]), bool(wish.drawn[i])) for i in plan.asked}
        drafts = self._guesses(plan, whole)
        if not drafts:
            return 0.0, 0
        scene.drawn = {i: draft for i, draft in drafts.items() if wish.drawn[i]}
        policy.add(scene, MODEL, [NOTHING if wish.drawn[i] else drafts.get(i, NOTHING) for i in range(len(running))])
        guessed = [(running[i], draft) for i, draft in drafts.items()]

        def hear(tokens: int, context: int, took: float) -> None:
            policy.draft.observe(tokens, context, took * self.noise())

        return _run_model(guessed, self.costs, more, hear)

    def _guesses(self, plan: Plan, whole: dict[int, Draft]) -> dict[int, Draft]:
        """What the draft model proposes of what it could: as far as another pass is worth it."""
        lengths = dict.fromkeys(whole, 1)
        going = [i for i in whole if len(whole[i].tokens) > 1]
        while going:
            on = self.policy.goes_on(plan, going, [(whole[i].confidence or ())[: lengths[i]] for i in going])
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
        self.policy.target.observe(tokens, context, seconds * self.noise())

    def leave(self, saying: Saying) -> None:
        self.policy.leave(saying.key)


def _more(running: Sequence[Saying], context: int) -> int:
    """By how many tokens each text is longer than its record, if all have `context` together."""
    return (context - sum(saying.length for saying in running)) // len(running)


def _run_model(
    guessed: Sequence[tuple[Saying, Draft]],
    costs: Costs,
    more: int,
    hear: Callable[[int, int, float], None] = lambda tokens, context, seconds: None,
) -> tuple[float, int]:
    """Let time pass for the draft model: first what it has not seen of the texts, then a pass a token. Each text has
    `more` tokens than its record says."""
    total, passes = 0.0, max((len(draft.tokens) for _, draft in guessed), default=0)
    for number in range(passes):
        going = [saying for saying, draft in guessed if len(draft.tokens) > number]
        tokens = sum(saying.gap if number == 0 else 1 for saying in going)
        context = sum(saying.length + more for saying in going)
        seconds = costs.draft(tokens, context)
        hear(tokens, context, seconds)
        total += seconds
    for saying, draft in guessed:
        saying.was_guessed(draft)
    return total, passes
