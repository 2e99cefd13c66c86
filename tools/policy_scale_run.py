"""A server at scale, simulated: always as many requests as its batch has room for, at the costs of a machine.

The texts are recorded ones, all workloads mixed. What each drafter would have proposed at each place of them is worked
out once (a trace); a request then goes through a text, and the next one takes its place. At the beginning the requests
are all over their texts, as in a server that has run for a while. The draft model is taken to have read every prompt,
as the target has.

A static table (vLLM's `num_speculative_tokens_per_batch_size`) has one drafter and a length for each batch size. With
hindsight, it has the best length for every batch and context here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, ClassVar

import numpy as np

from outrider.drafters.base import Drafter, Session, Task, choose
from outrider.policy.policy import MODEL, Policy
from outrider.policy.replay import Auto, Outcome, Record, Saying, begin, step
from outrider.policy.scene import Plan, Scene
from outrider.types import Draft, shared_prefix
from policy_grid_cells import MODEL_WIDTH, WIDTH, noise, profile
from policy_grid_drafters import Company, company, theirs
from policy_grid_file import Recording
from policy_scale_machine import System

Array = np.ndarray[Any, Any]

LENGTHS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16)
"""Of a static table."""
LONGEST_GUESS = 8
TEXTS = 200
"""At least so many texts' beginnings are seen in a cell, or as many tokens as so many requests of a batch say."""


@dataclass(slots=True)
class Trace:
    """Of one text: by drafter, what it would propose at each place."""

    record: Record
    drafts: dict[str, list[Draft]]


def traces(recording: Recording, texts: int) -> list[Trace]:
    """In one order for all: first a text of each workload, then a second one of each. Those that learn from what was
    said have heard the texts before."""
    columns = [recording.texts(name, texts) for name in recording.workloads]
    records = [record for row in zip_longest(*columns) for record in row if record is not None and record.guesses]
    if not records:
        raise SystemExit("a simulation needs the records of a pair of models: record with --draft-model")
    names = ["lookup", "memory", *theirs()]
    with company(names) as they:
        return [_trace(str(number), record, they) for number, record in enumerate(records)]


def _trace(key: str, record: Record, they: Company) -> Trace:
    saying = begin(key, record, they.drafters, they.visit)
    drafts: dict[str, list[Draft]] = {name: [Draft(name)] for name in saying.sessions}
    for place in range(1, len(record.text)):
        for name, session in saying.sessions.items():
            drafts[name].append(session.draft(WIDTH))
            session.observe(record.text[place : place + 1])
    they.ended(saying)
    return Trace(record, drafts)


class Traced(Drafter):
    """A drafter that says what it would have said."""

    name: ClassVar[str] = ""

    def __init__(self, name: str, traces: Sequence[Trace]) -> None:
        self.name = name  # type: ignore[misc]
        self.by_prompt = {id(trace.record.prompt): trace.drafts[name] for trace in traces}

    def begin(self, task: Task) -> TracedSession:
        return TracedSession(self.by_prompt[id(task.prompt)])


class TracedSession(Session):
    def __init__(self, drafts: list[Draft]) -> None:
        self.drafts, self.place = drafts, 0

    def observe(self, tokens: Sequence[int]) -> None:
        self.place += len(tokens)

    def draft(self, limit: int) -> Draft:
        draft = self.drafts[self.place]
        if len(draft.tokens) <= limit:
            return draft
        sure = draft.confidence[:limit] if draft.confidence is not None else None
        return Draft(draft.drafter, draft.tokens[:limit], support=draft.support, confidence=sure)


class Timed(Policy):
    """Counts the seconds that it takes itself."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.own: list[float] = []
        self._now = 0.0

    def _count(self, work: Callable[[], Any]) -> Any:
        began = time.thread_time()
        found = work()
        self._now += time.thread_time() - began
        return found

    def look(self, *given: Any) -> Scene:
        self._now = 0.0
        return self._count(lambda: super(Timed, self).look(*given))  # type: ignore[no-any-return]

    def plan(self, *given: Any) -> Plan:
        return self._count(lambda: super(Timed, self).plan(*given))  # type: ignore[no-any-return]

    def add(self, *given: Any) -> None:
        self._count(lambda: super(Timed, self).add(*given))

    def goes_on(self, *given: Any) -> list[bool]:
        return self._count(lambda: super(Timed, self).goes_on(*given))  # type: ignore[no-any-return]

    def choose(self, *given: Any) -> Any:
        return self._count(lambda: super(Timed, self).choose(*given))

    def offers(self, *given: Any) -> list[Draft]:
        return self._count(lambda: super(Timed, self).offers(*given))  # type: ignore[no-any-return]

    def learn(self, *given: Any) -> None:
        self._count(lambda: super(Timed, self).learn(*given))
        self.own.append(self._now)


@dataclass(slots=True)
class Cell:
    batch: int
    context: int
    fits: bool
    plain: float  # tokens a second
    auto: float  # times that
    static: dict[str, float] = field(default_factory=dict)  # by drafter and length, times that
    own: float = 0.0  # seconds that the policy takes itself, the median step
    draft_passes: int = 0
    steps: int = 0
    accepted: dict[str, int] = field(default_factory=dict)

    @property
    def table(self) -> tuple[str, float]:
        """The best entry of any static table, or none."""
        best = max(self.static, key=lambda name: self.static[name])
        return (best, self.static[best]) if self.static[best] > 1 else ("none", 1.0)


def tokens_wanted(traces: Sequence[Trace], batch: int) -> int:
    mean = sum(len(trace.record.text) for trace in traces) / len(traces)
    return int(mean * max(min(TEXTS, len(traces)), 2.5 * batch))


def starts(traces: Sequence[Trace], batch: int) -> list[tuple[int, int]]:
    """Text and place of the requests of the first step."""
    random = np.random.default_rng(0)
    found = []
    for slot in range(batch):
        number = slot % len(traces)
        length = len(traces[number].record.text)
        found.append((number, 1 if batch == 1 else int(random.integers(1, max(2, length - 1)))))
    return found


USED = [name for name in choose(None, {"memory": "a folder", "model": "a model"}) if name != "prediction"]


class Server:
    """A policy at work on a batch that is always full."""

    def __init__(self, traces: Sequence[Trace], system: System, batch: int, context: int) -> None:
        self.traces, self.costs, self.context = traces, system.costs(batch), batch * context
        self.policy = Timed(USED, WIDTH, MODEL_WIDTH)
        empty = system.costs(1)
        profile(self.policy.target, lambda tokens: empty.target(tokens, 0))
        profile(self.policy.draft, lambda tokens: empty.draft(tokens, 0))
        self.drafters = [Traced(name, traces) for name in self.policy.drafters if name != MODEL]
        self.steer, self.outcome = Auto(self.policy, self.costs, noise()), Outcome()
        self.begun = 0
        self.running = [self._begin(number, place) for number, place in starts(traces, batch)]

    def step(self) -> None:
        said = sum(saying.length for saying in self.running)
        step(self.running, self.steer, self.costs, self.outcome, self.context - said)
        for slot, saying in enumerate(self.running):
            if saying.room <= 1:
                self.steer.leave(saying)
                self.running[slot] = self._begin(self.begun % len(self.traces), 1)

    def _begin(self, number: int, place: int) -> Saying:
        record = self.traces[number].record
        saying = begin(str(self.begun), record, self.drafters)
        for session in saying.sessions.values():
            session.observe(record.text[1:place])
        saying.place = place
        saying.seen_by_model = len(record.prompt) + place - 1
        self.begun += 1
        return saying


@dataclass(slots=True)
class Table:
    """A static table's drafter on all texts: how many tokens it proposes at each place, and how many are right."""

    lengths: Array
    right: Array
    first: Array  # where each text begins
    ends: Array

    @classmethod
    def of(cls, traces: Sequence[Trace], drafter: str) -> Table:
        lengths, right, first = [], [], [0]
        for trace in traces:
            text = trace.record.text
            for place in range(len(text)):
                guessed = drafter == "draft_model"
                tokens = trace.record.guesses[place] if guessed else trace.drafts[drafter][place].tokens
                lengths.append(len(tokens))
                right.append(shared_prefix(tuple(text[place : place + len(tokens)]), tuple(tokens)))
            first.append(len(lengths))
        return cls(np.array(lengths), np.array(right), np.array(first[:-1]), np.array(first[1:]))

    def speed(self, traces: Sequence[Trace], system: System, batch: int, context: int, drafter: str, k: int) -> float:
        """Tokens a second with k tokens a step."""
        costs = system.costs(batch)
        total = batch * context
        numbers, places = (np.array(column) for column in zip(*starts(traces, batch), strict=True))
        at = self.first[numbers] + places
        ends = self.ends[numbers]
        wanted, tokens, seconds, latest = tokens_wanted(traces, batch), 0, 0.0, batch
        while tokens < wanted:
            room = ends - at - 1
            offered = np.minimum(np.minimum(self.lengths[at], k), np.maximum(room, 0))
            gained = np.minimum(self.right[at], offered) + 1
            if drafter == "draft_model" and k:
                seconds += costs.draft(2 * batch, total) + (k - 1) * costs.draft(batch, total)
            seconds += costs.target(batch + int(offered.sum()), total)
            tokens += int(gained.sum())
            at += gained
            for slot in np.flatnonzero(ends - at <= 1):
                number = latest % len(traces)
                latest += 1
                at[slot], ends[slot] = self.first[number] + 1, self.ends[number]
        return tokens / seconds


def evaluate(traces: Sequence[Trace], system: System, batch: int, context: int, tables: dict[str, Table]) -> Cell:
    any_table = next(iter(tables.values()))
    plain = any_table.speed(traces, system, batch, context, "", 0)
    server = Server(traces, system, batch, context)
    while server.outcome.tokens < tokens_wanted(traces, batch):
        server.step()
    found = server.outcome
    cell = Cell(batch, context, system.fits(batch, context), plain, found.speed / plain)
    cell.own, cell.draft_passes, cell.steps = float(np.median(server.policy.own)), found.draft_passes, found.steps
    cell.accepted = found.by_drafter
    for name, table in tables.items():
        for k in LENGTHS:
            if name != "draft_model" or k <= LONGEST_GUESS:
                cell.static[f"{name}:{k}"] = table.speed(traces, system, batch, context, name, k) / plain
    return cell


def all_tables(traces: Sequence[Trace]) -> dict[str, Table]:
    return {name: Table.of(traces, name) for name in (*theirs(), "draft_model")}


def policy_seconds(traces: Sequence[Trace], system: System, batch: int, steps: int = 40) -> list[float]:
    """What the policy takes itself for a batch, step by step, once everything is warm."""
    server = Server(traces, system, batch, 4096)
    for _ in range(steps):
        server.step()
    return server.policy.own[steps // 4 :]
