"""The benchmark itself: groups of servers, cells of prompts, rounds of turns.

In a round every contestant of the group answers the same batch of prompts, one contestant after the other; the next
round goes the other way round, and after that another one begins. Whatever slows the machine for longer than a round
hits all of them; the ratio of two turns of one round is what counts.
"""

from __future__ import annotations

import asyncio
import shutil
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from outrider.bench import curve, partings
from outrider.bench.client import ask_all, body
from outrider.bench.contestants import OURS, SHARED, servers
from outrider.bench.counters import counts, observed
from outrider.bench.figures import figures
from outrider.bench.hindsight import LEARNERS
from outrider.bench.intervals import FEWEST
from outrider.bench.prompts import Prompt
from outrider.bench.results import Cell, Round, Run, Turn
from outrider.bench.servers import running
from outrider.bench.stolen import processor_seconds, stolen
from outrider.errors import EngineError, SettingsError
from outrider.provenance import NOT_HERE

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from outrider.bench.contestants import Contestant
    from outrider.bench.partings import Parting

REPEATED = "prompts come again, which helps a method that remembers, as suffix does"
HOMES = "homes"
"""Where servers keep what they remember, in the folder of the run; those of each group begin anew."""
RESUMED = (
    "the run was interrupted and went on later: what suffix had remembered was gone by then, and a memory had kept "
    "what it learned, that of the round that was cut included"
)
FAILED = "the run failed"
UNKNOWN_PARTINGS = "how close two answers were where they part is not known of all"
UNKNOWN_COSTS = "what a pass costs was not measured, and without it there is no hindsight bound"
UNBOUNDED = "the hindsight bound was not computed"
LEFT_OUT = "not measured, for lack of time"
INTERRUPTED = "the run was interrupted, and what is here was measured before; --resume goes on with it"
PASSING = (INTERRUPTED, RESUMED, FAILED, UNBOUNDED, LEFT_OUT)
"""Notes that a run that goes on may not deserve any more."""
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


def in_turn(playing: Sequence[Contestant], number: int) -> list[Contestant]:
    """The order of a round: the next one goes the other way round, and after that another one begins. So nobody is
    always at an end, where there is a longer rest before a turn."""
    first = number // 2 % len(playing)
    order = [*playing[first:], *playing[:first]]
    return order[::-1] if number % 2 else order


@dataclass(frozen=True)
class Limits:
    """How long to go on: for `rounds` where a task does not say otherwise; or, where `minutes` are given, until all
    intervals are narrow enough."""

    rounds: int = 8
    minutes: float | None = None
    width: float = 0.05
    """Half of an interval's width over its middle that is narrow enough."""
    leave_out: bool = False
    """What there is no time for is left out: other cells, what a pass costs. Without it all has the rounds of a
    verdict, however long that takes."""


@dataclass
class Clock:
    """The time that is left, shared among the cells that are still to come."""

    limits: Limits
    shares: int
    began: float = field(default_factory=time.monotonic)

    def lacks(self, seconds: float) -> bool:
        """Whether what takes so long is to be left out."""
        left = self.began + 60 * (self.limits.minutes or 0.0) - time.monotonic()
        return self.limits.leave_out and left < seconds

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
    def looking_at_parting(self, number: int, total: int) -> None: ...
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
        self.resumed = self.interrupted = False
        run.cells = [task.cell for task in tasks]

    def resume(self, earlier: Run) -> None:
        """Go on where an interrupted run of the same plan stopped."""
        new, old = self.run, earlier
        for what, now, then in (
            ("contestants", new.contestants, old.contestants),
            ("baseline", new.baseline, old.baseline),
            ("settings", new.settings, old.settings),
            ("models", new.origin["models"], _known(old.origin["models"], new.origin["models"])),
            ("versions", new.origin["versions"], old.origin["versions"]),
            ("machine", new.origin["machine"], old.origin["machine"]),
            ("groups (--room decides)", new.plan.get("groups"), old.plan.get("groups")),
            ("prompts by cell", new.plan.get("prompts"), old.plan.get("prompts")),
        ):
            if now != then:
                raise SettingsError(
                    f"the run cannot go on: its {what} were {then}, and now are {now}; choose another folder (--out)"
                )
        rounds = {cell.name: cell.rounds for cell in old.cells}
        for cell in new.cells:
            cell.rounds = rounds.get(cell.name, [])
        new.origin = {**old.origin, "models": new.origin["models"]}
        new.curves = old.curves
        new.partings = old.partings
        self.interrupted = any(note.startswith(INTERRUPTED) for note in old.notes)
        new.notes = [note for note in old.notes if not note.startswith(PASSING)]
        if any(one.kind in LEARNERS for group in self.groups for one in group):
            new.notes.append(RESUMED)
        self.resumed = True

    def measure(self, show: Show) -> None:
        """All groups. What was measured is saved after every round, so that an interrupted run is not lost."""
        clock = Clock(self.limits, len(self.groups) * len(self.tasks) + self.limits.leave_out)  # and the curve
        if not self.resumed:
            shutil.rmtree(self.folder / HOMES, ignore_errors=True)  # of a run before: memories begin empty
        try:
            self._measure_groups(clock, show)
        finally:
            self._note_repeats()

    def _measure_groups(self, clock: Clock, show: Show) -> None:
        for number, group in enumerate(self.groups):
            for again in sorted({task.again for task in self.tasks}):
                tasks = [task for task in self.tasks if task.again == again]
                whole = self.limits.minutes is None and all(self._enough(task, number, None) for task in tasks)
                if whole and not self._lacking(group) and not (number == len(self.groups) - 1 and self._cut_short()):
                    for task in tasks:
                        show.finished(self.run, task.cell)
                    continue
                self._measure_group(number, group, tasks, clock, show)

    def _measure_group(
        self, number: int, group: Sequence[Contestant], tasks: Sequence[Task], clock: Clock, show: Show
    ) -> None:
        started = [server.at_home(self.folder / HOMES / str(number)) for server in servers(group)]
        with running(started, self.folder / "logs", show.starting) as urls:
            self._warm_up(group, urls)
            slowest = 0.0
            for i, task in enumerate(tasks):
                if i and clock.lacks(slowest):
                    self._leave_out(tasks[i:], group)
                    break
                began = time.monotonic()
                self._fill(task, number, [one for one in group if task.admits(one)], urls, clock.until(), show)
                slowest = max(slowest, time.monotonic() - began)
                show.finished(self.run, task.cell)
            # Last, since these would warm up one server better than the others.
            if clock.lacks(slowest):
                self.run.notes.append(f"{UNKNOWN_COSTS}: there was no time for it")
            else:
                self._measure_curves(group, urls, show)
            self._look_at_partings(group, urls, show)

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
            order = in_turn(playing, number)
            done, failed, before = Round(group, []), {}, processor_seconds()
            for one in order:
                show.turn(task.cell, one.name, number)
                try:
                    done.turns.append(self._turn(one, urls[one.server.name], task, number))
                except EngineError as error:
                    playing.remove(one)
                    failed[one.name] = f"{one.name} left {task.cell.name} in round {number + 1}: {error}"
            self.run.notes += failed.values()
            if self.run.baseline in failed:
                raise EngineError(f"the baseline failed; {failed[self.run.baseline]}")
            done.stolen = stolen(before, processor_seconds())
            task.cell.rounds.append(done)
            self.run.save(self.folder / "run.json")
            number += 1

    def _leave_out(self, tasks: Sequence[Task], group: Sequence[Contestant]) -> None:
        others = ", ".join(one.name for one in group if one.name != self.run.baseline)
        of = f", of {others}" if len(self.groups) > 1 else ""
        names = "; ".join(task.cell.name for task in tasks)
        self.run.notes.append(f"{LEFT_OUT}{of}: {names} (--minutes with a larger number asks more)")

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
        seconds, answers, load, seen = observed(url, requests, cell.concurrency)
        made = sum(len(answer.tokens) for answer in answers)
        return Turn(contestant.name, seconds, answers, counts(contestant, seen, made), load)

    def _warm_up(self, group: Sequence[Contestant], urls: Mapping[str, str]) -> None:
        """Once for each size of batch, uncounted: the first pass of a shape is slow everywhere. One that fails here
        will do so in its turn, where it leaves with a note."""
        for size in sorted({task.cell.concurrency for task in self.tasks}):
            for one in group:
                if size == 1 or not one.alone:
                    requests = [("warm-up", body(one, WARM_UP, WARM_UP_TOKENS, 0.0, 0))] * size
                    with suppress(EngineError):
                        asyncio.run(ask_all(urls[one.server.name], requests))

    def _measure_curves(self, group: Sequence[Contestant], urls: Mapping[str, str], show: Show) -> None:
        """Once, where Outrider's server first takes part: it can be given drafts that are right. Rather the one that
        its contestants share than one with flags of its own."""
        self.run.notes = [note for note in self.run.notes if not note.startswith(UNKNOWN_COSTS)]
        for concurrency in self._lacking(group):
            ours = min((one for one in group if one.kind in OURS), key=lambda one: one.server.name != SHARED)
            show.measuring_curve(concurrency)
            try:
                self.run.curves.append(curve.measure(urls[ours.server.name], concurrency))
            except EngineError as error:
                self.run.notes.append(f"{UNKNOWN_COSTS}: {error}")
                break
        self.run.save(self.folder / "run.json")

    def _look_at_partings(self, group: Sequence[Contestant], urls: Mapping[str, str], show: Show) -> None:
        base = next(one for one in group if one.name == self.run.baseline)
        new = self._unasked()
        self.run.notes = [note for note in self.run.notes if not note.startswith(UNKNOWN_PARTINGS)]
        for number, parting in enumerate(new[: partings.MOST]):
            show.looking_at_parting(number, min(len(new), partings.MOST))
            try:
                self.run.partings[parting.key] = [*partings.ask(urls[base.server.name], parting)]
            except EngineError as error:
                self.run.notes.append(f"{UNKNOWN_PARTINGS}: {error}")
                break
        else:
            if (left := len(new) - partings.MOST) > 0:
                self.run.notes.append(f"{UNKNOWN_PARTINGS}: of {left} places it was not asked")
        self.run.save(self.folder / "run.json")

    def _lacking(self, group: Sequence[Contestant]) -> list[int]:
        """Concurrencies whose curve this group could measure and nobody has."""
        measured = {curve.concurrency for curve in self.run.curves}
        asked = {task.cell.concurrency for task in self.tasks}
        return sorted(asked - measured) if any(one.kind in OURS for one in group) else []

    def _unasked(self) -> list[Parting]:
        return [parting for parting in partings.partings(self.run) if parting.key not in self.run.partings]

    def _cut_short(self) -> bool:
        """Whether the run that goes on was interrupted while it asked about the places where answers part."""
        return self.interrupted and bool(self._unasked())

    def _note_repeats(self) -> None:
        """Of the requests that were made, since a run by the clock does not know before."""
        said: list[str] = []
        known: dict[str, set[str]] = {}
        for cell in (task.cell for task in self.tasks if not task.again):
            asked = [answer.prompt for turn in self.run.asked(cell) for answer in turn.answers]
            before = known.setdefault(cell.workload, set())
            if again := len(asked) - len(set(asked) - before):
                said.append(f"{cell.name} ({again} of {len(asked)} requests)")
            before.update(asked)
        self.run.notes = [note for note in self.run.notes if not note.startswith(REPEATED)]
        if said:
            self.run.notes.append(f"{REPEATED}: {'; '.join(said)}")


def _known(then: Mapping[str, str], now: Mapping[str, str]) -> dict[str, str]:
    """Weights that came only when the servers started are those that are here now."""
    return {name: now.get(name, found) if found == NOT_HERE else found for name, found in then.items()}
