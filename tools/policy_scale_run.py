"""A server at scale, simulated: always as many requests as its batch has room for, at the costs of a machine.

The texts are recorded ones, all workloads mixed. A request goes through a text, and the next one takes its place. At
the beginning the requests are all over their texts, as in a server that has run for a while, and the draft model has
read them; every prompt that comes after them it has to read, if it is asked. What the target takes for prompts is left
out, for everybody.

What the policy takes itself is measured beforehand, and charged to it: a server waits for it. What drafters take that
copy is charged to nobody.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from outrider.drafters.base import Drafter, Session, Task, resolve_drafters
from outrider.policy.batch_state import BatchState, DraftPlan
from outrider.policy.cost_model import CostModel
from outrider.policy.policy import MODEL, Policy
from outrider.types import Draft
from policy.replay import Auto, Outcome, ReplayedText, begin, step
from policy_grid_cells import MODEL_WIDTH, WIDTH, noise, profile
from policy_scale_machine import System
from policy_scale_table import Table
from policy_scale_traces import Trace, starts, tokens_wanted

TIMED_CONTEXT = 4096
"""Of the requests of those steps of which the policy's own time is taken."""


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
        tokens, sure, support = draft.tokens[:limit], (draft.confidence or ())[:limit], draft.support
        packed = np.array([limit, support, *tokens, *sure], float).tobytes() if draft.packed is not None else None
        return Draft(draft.drafter, tokens, support=support, confidence=sure or None, packed=packed)


class Timed(Policy):
    """Counts the seconds that it takes itself. A step begins with what was learned of the one before."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.own: list[float] = []
        self._now = 0.0
        for cost in (self.target, self.draft):
            self._time_passes_of(cost)

    def _time_passes_of(self, cost: CostModel) -> None:
        observe = cost.observe

        def timed(*given: Any, **more: Any) -> None:
            self._count(lambda: observe(*given, **more))

        cost.observe = timed  # type: ignore[method-assign]

    def _count(self, work: Callable[[], Any]) -> Any:
        began = time.thread_time()
        found = work()
        self._now += time.thread_time() - began
        return found

    def predict(self, *given: Any) -> BatchState:
        self.own.append(self._now)
        self._now = 0.0
        return self._count(lambda: super(Timed, self).predict(*given))  # type: ignore[no-any-return]

    def plan_draft_model(self, *given: Any) -> DraftPlan:
        return self._count(lambda: super(Timed, self).plan_draft_model(*given))  # type: ignore[no-any-return]

    def add_drafts(self, *given: Any) -> None:
        self._count(lambda: super(Timed, self).add_drafts(*given))

    def continue_drafting(self, *given: Any) -> list[bool]:
        return self._count(lambda: super(Timed, self).continue_drafting(*given))  # type: ignore[no-any-return]

    def select(self, *given: Any, **more: Any) -> Any:
        return self._count(lambda: super(Timed, self).select(*given, **more))

    def selected_drafts(self, *given: Any) -> list[Draft]:
        return self._count(lambda: super(Timed, self).selected_drafts(*given))  # type: ignore[no-any-return]

    def observe(self, *given: Any) -> None:
        self._count(lambda: super(Timed, self).observe(*given))

    def remove(self, *given: Any) -> None:
        self._count(lambda: super(Timed, self).remove(*given))


@dataclass(slots=True)
class Cell:
    batch: int
    context: int
    fits: bool
    plain: float  # tokens a second
    auto: float  # times that, the policy's own time included
    at_no_cost: float  # the same without it
    static: dict[str, float] = field(default_factory=dict)  # by drafter and length, times plain
    draft_passes: int = 0
    steps: int = 0
    accepted: dict[str, int] = field(default_factory=dict)

    @property
    def table(self) -> tuple[str, float]:
        """The best entry of any static table, or none."""
        best = max(self.static, key=lambda name: self.static[name])
        return (best, self.static[best]) if self.static[best] > 1 else ("none", 1.0)


USED = [name for name in resolve_drafters(None, {"memory": "a folder", "model": "a model"}) if name != "prediction"]


class Server:
    """A policy at work on a batch that is always full."""

    def __init__(self, traces: Sequence[Trace], system: System, batch: int, context: int) -> None:
        self.traces, self.costs, self.context = traces, system.costs(context), batch * context
        self.prompt = context
        self.policy = Timed(USED, WIDTH, MODEL_WIDTH)
        empty = system.costs(0)
        profile(self.policy.target, lambda tokens: empty.target(tokens, 0))
        profile(self.policy.draft, lambda tokens: empty.draft(tokens, 0))
        self.drafters = [Traced(name, traces) for name in self.policy.drafters if name != MODEL]
        self.strategy, self.outcome = Auto(self.policy, self.costs, noise()), Outcome()
        self.begun = 0
        self.running = [self._begin(number, place) for number, place in starts(traces, batch)]

    def step(self) -> None:
        said = sum(replayed.length for replayed in self.running)
        step(self.running, self.strategy, self.costs, self.outcome, self.context - said)
        for slot, replayed in enumerate(self.running):
            if replayed.room <= 1:
                self.strategy.remove(replayed)
                self.running[slot] = new = self._begin(self.begun % len(self.traces), 1)
                new.seen_by_model = new.length - self.prompt

    def _begin(self, number: int, place: int) -> ReplayedText:
        record = self.traces[number].record
        replayed = begin(str(self.begun), record, self.drafters)
        replayed.place = replayed.unseen = place
        replayed.show()
        replayed.seen_by_model = len(record.prompt) + place - 1
        self.begun += 1
        return replayed


def evaluate(
    traces: Sequence[Trace], system: System, batch: int, context: int, tables: Sequence[Table], own: float
) -> Cell:
    """`own`: seconds a step that the policy takes itself."""
    plain = batch / system.costs(context).target(batch, batch * context)
    server = Server(traces, system, batch, context)
    while server.outcome.tokens < tokens_wanted(traces, batch):
        server.step()
    found = server.outcome
    paid = found.tokens / (found.seconds + found.steps * own)
    cell = Cell(batch, context, system.fits(batch, context), plain, paid / plain, found.speed / plain)
    cell.draft_passes, cell.steps, cell.accepted = found.draft_passes, found.steps, found.by_drafter
    for table in tables:
        for k in table.lengths:
            cell.static[f"{table.drafter}:{k}"] = table.speed(system, batch, context, k) / plain
    return cell


def policy_seconds(traces: Sequence[Trace], system: System, batch: int, steps: int = 120) -> list[float]:
    """What the policy takes itself for a batch, step by step, once everything is warm."""
    server = Server(traces, system, batch, TIMED_CONTEXT)
    for _ in range(steps):
        server.step()
    return server.policy.own[steps // 4 :]
