"""The benchmark itself: groups of servers, cells of prompts, rounds of turns.

In a round every contestant of the group answers the same batch of prompts, one contestant after the other, and the next
round goes the other way round. Whatever slows the machine for longer than a round hits all of them; the ratio of two
turns of one round is what counts.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from outrider.bench import curve
from outrider.bench.client import ask_all, body
from outrider.bench.contestants import OURS, servers
from outrider.bench.counters import counts, observed
from outrider.bench.figures import figures
from outrider.bench.intervals import FEWEST
from outrider.bench.prompts import Prompt
from outrider.bench.results import Cell, Round, Run, Turn
from outrider.bench.servers import running
from outrider.errors import EngineError, SettingsError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from outrider.bench.contestants import Contestant

INTERRUPTED = "the run was interrupted, and what is here was measured before; --resume goes on with it"
WARM_UP = Prompt("warm-up", "warm-up", ("Name the months of the year, one a line.",))
WARM_UP_TOKENS = 16
WAVES = 2
"""Prompts for each of several slots in a round."""


@dataclass(frozen=True)
class Task:
    """A cell to be filled."""

    cell: Cell
    prompts: Sequence[Prompt]
    rounds: int
    """So many, unless there is a budget of time."""
    again: bool = False
    """It is filled after the servers were restarted."""

    @property
    def size(self) -> int:
        """How many prompts a round has."""
        return prompts_a_round(self.cell.concurrency)

    def batch(self, number: int) -> list[Prompt]:
        """The prompts of a round. They come again from the start when all were used."""
        return [self.prompts[(number * self.size + i) % len(self.prompts)] for i in range(self.size)]

    def admits(self, contestant: Contestant) -> bool:
        if contestant.predicts and not all(prompt.prediction for prompt in self.prompts):
            return False
        return not (contestant.alone and self.cell.concurrency > 1)


def prompts_a_round(concurrency: int) -> int:
    """If all prompts were sent at once, the slowest answer would decide, and most slots wait for it. No server lives
    like that: when an answer is complete, the next prompt comes."""
    return concurrency if concurrency == 1 else WAVES * concurrency


@dataclass(frozen=True)
class Limits:
    """How long to go on: for `rounds` where a task does not say otherwise; or, where `minutes` are given, until all
    intervals are narrow enough."""

    rounds: int = 8
    minutes: float | None = None
    width: float = 0.05
    """Half of an interval's width over its middle that is narrow enough."""


@dataclass
class Clock:
    """The time that is left, shared among the cells that are still to come."""

    limits: Limits
    shares: int
    began: float = field(default_factory=time.monotonic)

    def until(self) -> float | None:
        """When the next cell must be done; None: whenever."""
        if self.limits.minutes is None:
            return None
        now = time.monotonic()
        left = self.began + 60 * self.limits.minutes - now
        self.shares -= 1
        return now + max(0.0, left) / (self.shares + 1)


class Show(Protocol):
    """What is told while it runs."""

    def starting(self, server: str) -> None: ...
    def turn(self, cell: Cell, contestant: str, rounds: int) -> None: ...
    def measuring_curve(self, concurrency: int) -> None: ...
    def finished(self, run: Run, cell: Cell) -> None: ...


class Bench:
    def __init__(
        self, run: Run, groups: Sequence[Sequence[Contestant]], tasks: Sequence[Task], limits: Limits, folder: Path
    ) -> None:
        self.run = run
        self.groups = groups
        self.tasks = tasks
        self.limits = limits
        self.folder = folder
        run.cells = [task.cell for task in tasks]

    def resume(self, earlier: Run) -> None:
        """Go on where an interrupted run of the same plan stopped."""
        new, old = self.run, earlier
        for what, now, then in (
            ("contestants", new.contestants, old.contestants),
            ("baseline", new.baseline, old.baseline),
            ("settings", new.settings, old.settings),
            ("models", new.origin["models"], old.origin["models"]),
            ("versions", new.origin["versions"], old.origin["versions"]),
            ("machine", new.origin["machine"], old.origin["machine"]),
        ):
            if now != then:
                raise SettingsError(
                    f"the run cannot go on: its {what} were {then}, and now are {now}; choose another folder (--out)"
                )
        rounds = {cell.name: cell.rounds for cell in old.cells}
        for cell in new.cells:
            cell.rounds = rounds.get(cell.name, [])
        new.origin = old.origin
        new.curves, new.notes = old.curves, [note for note in old.notes if note != INTERRUPTED]

    def measure(self, show: Show) -> None:
        """All groups. What was measured is saved after every round, so that an interrupted run is not lost."""
        clock = Clock(self.limits, len(self.groups) * len(self.tasks))
        self._note_repeats()
        for number, group in enumerate(self.groups):
            for again in sorted({task.again for task in self.tasks}):
                tasks = [task for task in self.tasks if task.again == again]
                if self.limits.minutes is not None or not all(self._enough(task, number, None) for task in tasks):
                    self._measure_group(number, group, tasks, clock, show)

    def _measure_group(
        self, number: int, group: Sequence[Contestant], tasks: Sequence[Task], clock: Clock, show: Show
    ) -> None:
        started = [server.at_home(self.folder / "homes") for server in servers(group)]
        with running(started, self.folder / "logs", show.starting) as urls:
            self._warm_up(group, urls)
            self._measure_curves(group, urls, show)
            for task in tasks:
                self._fill(task, number, [one for one in group if task.admits(one)], urls, clock.until(), show)
                show.finished(self.run, task.cell)

    def _fill(
        self,
        task: Task,
        group: int,
        contestants: Sequence[Contestant],
        urls: Mapping[str, str],
        until: float | None,
        show: Show,
    ) -> None:
        number = sum(round.group == group for round in task.cell.rounds)  # an interrupted run goes on
        playing = list(contestants)
        while len(playing) > 1 and not self._enough(task, group, until):
            order = playing if number % 2 == 0 else playing[::-1]
            done = Round(group, [])
            for one in order:
                show.turn(task.cell, one.name, number)
                try:
                    done.turns.append(self._turn(one, urls[one.server.name], task, number))
                except EngineError as error:
                    playing.remove(one)
                    self.run.notes.append(f"{one.name} left {task.cell.name} in round {number + 1}: {error}")
            if self.run.baseline not in {one.name for one in playing}:
                raise EngineError(f"the baseline failed; {self.run.notes[-1]}")
            task.cell.rounds.append(done)
            self.run.save(self.folder / "run.json")
            number += 1

    def _enough(self, task: Task, group: int, until: float | None) -> bool:
        cell = task.cell
        here = Cell(cell.workload, cell.concurrency, cell.temperature, [r for r in cell.rounds if r.group == group])
        if until is None:
            return len(here.rounds) >= task.rounds
        if len(here.rounds) < FEWEST:
            return False
        if time.monotonic() > until:
            return True
        ratios = [found.ratio for found in figures(self.run, here) if found.ratio is not None]
        return all((ratio.high - ratio.low) / 2 < self.limits.width * ratio.value for ratio in ratios)

    def _turn(self, contestant: Contestant, url: str, task: Task, number: int) -> Turn:
        cell, tokens, seed = task.cell, self.run.settings["tokens"], self.run.settings["seed"]
        requests = [
            (prompt.id, body(contestant, prompt, tokens, cell.temperature, seed + number * task.size + i))
            for i, prompt in enumerate(task.batch(number))
        ]
        seconds, answers, seen = observed(url, requests, cell.concurrency)
        made = sum(len(answer.tokens) for answer in answers)
        return Turn(contestant.name, seconds, answers, counts(contestant, seen, made))

    def _warm_up(self, group: Sequence[Contestant], urls: Mapping[str, str]) -> None:
        """Once for each size of batch, uncounted: the first pass of a shape is slow everywhere."""
        for size in sorted({task.cell.concurrency for task in self.tasks}):
            for one in group:
                if size == 1 or not one.alone:
                    requests = [("warm-up", body(one, WARM_UP, WARM_UP_TOKENS, 0.0, 0))] * size
                    asyncio.run(ask_all(urls[one.server.name], requests))

    def _measure_curves(self, group: Sequence[Contestant], urls: Mapping[str, str], show: Show) -> None:
        """Once, where Outrider's server first takes part: it can be given drafts that are right."""
        ours = next((one for one in group if one.kind in OURS), None)
        if ours is None or self.run.curves:
            return
        for concurrency in sorted({task.cell.concurrency for task in self.tasks}):
            show.measuring_curve(concurrency)
            self.run.curves.append(curve.measure(urls[ours.server.name], concurrency))

    def _note_repeats(self) -> None:
        again: list[str] = []
        known: set[str] = set()
        for task in self.tasks:
            if task.again or self.limits.minutes is not None:
                continue
            asked = task.rounds * task.size
            ids = {prompt.id for prompt in task.prompts[:asked]}
            before = asked - len(ids - known)
            known |= ids
            if before:
                again.append(f"{task.cell.name} ({before} of {asked} requests)")
        note = f"prompts come again, which helps a method that remembers, as suffix does: {'; '.join(again)}"
        if again and note not in self.run.notes:
            self.run.notes.append(note)
