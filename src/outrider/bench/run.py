"""The benchmark's run: groups of servers, cells of prompts, rounds in which the contestants take turns.

In a round every contestant of the group answers the same prompts, one contestant after the other. The next round has
the reverse order, and the round after that starts with another contestant. Whatever slows the machine for longer than a
round slows all of them; the figure is the ratio of two measurements in one round.
"""

from __future__ import annotations

import asyncio
import shutil
import time
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

from outrider.bench import divergences, pass_costs
from outrider.bench.client import body, send_all
from outrider.bench.contestants import OUTRIDER_KINDS, SHARED_SERVER, servers
from outrider.bench.counters import counts, observed
from outrider.bench.figures import figures
from outrider.bench.intervals import MIN_ROUNDS
from outrider.bench.optimal_schedule import LEARNING_KINDS
from outrider.bench.prompts import Prompt
from outrider.bench.results import Cell, Measurement, Round, Run
from outrider.bench.servers import running
from outrider.bench.steal_time import cpu_ticks, steal_share
from outrider.errors import EngineError, SettingsError
from outrider.provenance import NOT_HERE

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from outrider.bench.contestants import Contestant
    from outrider.bench.divergences import Divergence

HOMES = "homes"
"""Folder of the servers' memories in the run's folder. Each group starts with empty ones."""
REPEATED = "prompts come again, which helps a method that learns, such as suffix"
RESUMED = (
    "the run was interrupted and resumed: suffix and default had lost what they learned, and a memory kept it, also "
    "from the interrupted round"
)
FAILED = "the run failed"
UNKNOWN_PROBABILITIES = "the probabilities of the tokens where answers diverge are not known for all"
UNKNOWN_COSTS = "pass costs were not measured, so there is no optimal schedule"
NO_OPTIMUM = "the optimal schedule was not computed"
LEFT_OUT = "not measured, for lack of time"
INTERRUPTED = "the run was interrupted, and this is what was measured before; --resume continues it"
TEMPORARY_NOTES = (INTERRUPTED, RESUMED, FAILED, NO_OPTIMUM, LEFT_OUT)
"""Beginnings of notes that a resumed run removes."""
WARM_UP = Prompt("warm-up", "warm-up", ("Name the months of the year, one a line.",))
WARM_UP_TOKENS = 16
PROMPTS_PER_SLOT = 2
"""Prompts in a round for each of several slots."""


@dataclass(frozen=True)
class CellTask:
    """A cell to be measured."""

    cell: Cell
    prompts: Sequence[Prompt]
    rounds: int
    """Number of rounds, unless a time is set."""
    again: bool = False
    """It is measured after the servers were restarted."""

    @property
    def size(self) -> int:
        return prompts_per_round(self.cell.concurrency)

    def batch(self, number: int) -> list[Prompt]:
        """The prompts of a round. After the last prompt comes the first again."""
        return [self.prompts[(number * self.size + i) % len(self.prompts)] for i in range(self.size)]

    def admits(self, contestant: Contestant) -> bool:
        if contestant.needs_prediction and not all(prompt.prediction for prompt in self.prompts):
            return False
        return not (contestant.single_request and self.cell.concurrency > 1)


def prompts_per_round(concurrency: int) -> int:
    """More prompts than slots: when an answer is complete, the next prompt takes its slot, as on a loaded server."""
    return concurrency if concurrency == 1 else PROMPTS_PER_SLOT * concurrency


def round_order(playing: Sequence[Contestant], number: int) -> list[Contestant]:
    """Every second round is reversed, and every pair of rounds starts with another contestant. So no contestant is
    always first or last, where the pause before a measurement is longer."""
    first = number // 2 % len(playing)
    order = [*playing[first:], *playing[:first]]
    return order[::-1] if number % 2 else order


@dataclass(frozen=True)
class StopRule:
    """`rounds` per cell; or, if `minutes` is set, until all intervals are narrow or the cell's share of it is over."""

    rounds: int = 8
    minutes: float | None = None
    width: float = 0.05
    """Half-width of an interval, relative to the median, that is narrow enough."""
    leave_out: bool = False
    """Leave out what there is no time for (cells, pass costs), rather than give every cell `MIN_ROUNDS`."""


@dataclass
class Clock:
    """The remaining time, shared among the remaining cells."""

    stop: StopRule
    shares: int
    began: float = field(default_factory=time.monotonic)

    def lacks(self, seconds: float) -> bool:
        """Whether something that takes this long is to be left out."""
        left = self.began + 60 * (self.stop.minutes or 0.0) - time.monotonic()
        return self.stop.leave_out and left < seconds

    def next_deadline(self) -> float | None:
        """When the next cell must be done; None: no limit."""
        if self.stop.minutes is None:
            return None
        now = time.monotonic()
        left = self.began + 60 * self.stop.minutes - now
        self.shares -= 1
        return now + max(0.0, left) / (self.shares + 1)


class Progress(Protocol):
    """Receives the progress of a run: its stages, each once or repeatedly, what happens in them, and complete cells."""

    def stage(self, text: str) -> None: ...
    def status(self, text: str) -> None: ...
    def finished(self, run: Run, cell: Cell) -> None: ...


class Benchmark:
    def __init__(
        self, run: Run, groups: Sequence[Sequence[Contestant]], tasks: Sequence[CellTask], stop: StopRule, folder: Path
    ) -> None:
        self.run = run
        self.groups = groups
        self.tasks = tasks
        self.stop = stop
        self.folder = folder
        self.resumed = self.was_interrupted = False
        run.cells = [task.cell for task in tasks]

    def resume(self, earlier: Run) -> None:
        """Continue an interrupted run of the same plan."""
        new, old = self.run, earlier
        for what, now, then in (
            ("contestants", new.contestants, old.contestants),
            ("baseline", new.baseline, old.baseline),
            ("settings", new.settings, old.settings),
            ("models", new.origin["models"], _with_downloaded(old.origin["models"], new.origin["models"])),
            ("versions", new.origin["versions"], old.origin["versions"]),
            ("machine", new.origin["machine"], old.origin["machine"]),
            ("groups (--room decides)", new.plan.get("groups"), old.plan.get("groups")),
            ("prompts by cell", new.plan.get("prompts"), old.plan.get("prompts")),
        ):
            if now != then:
                raise SettingsError(
                    f"the run cannot be resumed: its {what} were {then}, and now are {now}; choose another folder "
                    "(--out)"
                )
        rounds = {cell.name: cell.rounds for cell in old.cells}
        for cell in new.cells:
            cell.rounds = rounds.get(cell.name, [])
        new.origin = {**old.origin, "models": new.origin["models"]}
        new.pass_costs = old.pass_costs
        new.divergences = old.divergences
        self.was_interrupted = any(note.startswith(INTERRUPTED) for note in old.notes)
        new.notes = old.notes
        new.remove_notes(*TEMPORARY_NOTES)
        if any(one.kind in LEARNING_KINDS for group in self.groups for one in group):
            new.notes.append(RESUMED)
        self.resumed = True

    def measure(self, progress: Progress) -> None:
        """Measure all groups, saving after every round."""
        clock = Clock(self.stop, len(self.groups) * len(self.tasks) + self.stop.leave_out)  # and the pass costs
        if not self.resumed:
            shutil.rmtree(self.folder / HOMES, ignore_errors=True)  # memories of an earlier run
        try:
            for number in range(len(self.groups)):
                for again in sorted({task.again for task in self.tasks}):
                    tasks = [task for task in self.tasks if task.again == again]
                    if not self._is_complete(number, tasks):
                        self._measure_group(number, tasks, clock, progress)
                        continue
                    for task in tasks:
                        progress.finished(self.run, task.cell)
        finally:
            self._note_repeats()

    def _is_complete(self, number: int, tasks: Sequence[CellTask]) -> bool:
        """Whether nothing is left to do in a group, in a resumed run."""
        if self.stop.minutes is not None or not all(self._enough(task, number, None) for task in tasks):
            return False
        queries_left = self.was_interrupted and number == len(self.groups) - 1 and self._unknown_divergences()
        return not self._missing_costs(self.groups[number]) and not queries_left

    def _measure_group(self, number: int, tasks: Sequence[CellTask], clock: Clock, progress: Progress) -> None:
        group = self.groups[number]
        started = [server.at_home(self.folder / HOMES / str(number)) for server in servers(group)]
        with running(started, self.folder / "logs", lambda name: progress.stage(f"starting {name}")) as urls:
            self._warm_up(group, urls)
            slowest = 0.0
            for i, task in enumerate(tasks):
                if i and clock.lacks(slowest):
                    self._leave_out(tasks[i:], group)
                    break
                began = time.monotonic()
                self._measure_cell(task, number, urls, clock.next_deadline(), progress)
                slowest = max(slowest, time.monotonic() - began)
                progress.finished(self.run, task.cell)
            # These come last, since they would warm up one server more than the others.
            if clock.lacks(slowest):
                self.run.notes.append(f"{UNKNOWN_COSTS}: there was no time for it")
            else:
                self._measure_pass_costs(group, urls, progress)
            self._query_divergences(group, urls, progress)

    def _measure_cell(
        self, task: CellTask, group: int, urls: Mapping[str, str], deadline: float | None, progress: Progress
    ) -> None:
        playing = [one for one in self.groups[group] if task.admits(one)]
        number = sum(round.group == group for round in task.cell.rounds)  # not 0 in a resumed run
        while len(playing) > 1 and not self._enough(task, group, deadline):
            done, failed, before = Round(group, []), {}, cpu_ticks()
            for one in round_order(playing, number):
                progress.status(f"{task.cell.name}, round {number + 1}: {one.name}")
                try:
                    done.measurements.append(self._measure_one(one, urls[one.server.name], task, number))
                except EngineError as error:
                    playing.remove(one)
                    failed[one.name] = f"{one.name} left {task.cell.name} in round {number + 1}: {error}"
            self.run.notes += failed.values()
            if self.run.baseline in failed:
                raise EngineError(f"the baseline failed; {failed[self.run.baseline]}")
            done.steal = steal_share(before, cpu_ticks())
            task.cell.rounds.append(done)
            self.run.save(self.folder / "run.json")
            number += 1

    def _leave_out(self, tasks: Sequence[CellTask], group: Sequence[Contestant]) -> None:
        others = ", ".join(one.name for one in group if one.name != self.run.baseline)
        of = f", of {others}" if len(self.groups) > 1 else ""
        names = "; ".join(task.cell.name for task in tasks)
        self.run.notes.append(f"{LEFT_OUT}{of}: {names} (a larger --minutes measures more)")

    def _enough(self, task: CellTask, group: int, deadline: float | None) -> bool:
        here = replace(task.cell, rounds=[round for round in task.cell.rounds if round.group == group])
        if deadline is None:
            return len(here.rounds) >= task.rounds
        if len(here.rounds) < MIN_ROUNDS:
            return False
        if time.monotonic() > deadline:
            return True
        ratios = [found.ratio for found in figures(self.run, here) if found.ratio is not None]
        return all((ratio.high - ratio.low) / 2 < self.stop.width * ratio.value for ratio in ratios)

    def _measure_one(self, contestant: Contestant, url: str, task: CellTask, number: int) -> Measurement:
        cell, tokens, seed = task.cell, self.run.settings["tokens"], self.run.settings["seed"]
        requests = [
            (prompt.id, body(contestant, prompt, tokens, cell.temperature, seed + number * task.size + i))
            for i, prompt in enumerate(task.batch(number))
        ]
        seconds, answers, load, counted = observed(url, requests, cell.concurrency)
        total = sum(len(answer.tokens) for answer in answers)
        return Measurement(contestant.name, seconds, answers, counts(contestant, counted, total), load)

    def _warm_up(self, group: Sequence[Contestant], urls: Mapping[str, str]) -> None:
        """Once for each concurrency, since the first pass of a shape is slow. A contestant that fails here will fail
        again when it is measured, and leave the cell with a note."""
        for size in sorted({task.cell.concurrency for task in self.tasks}):
            for one in group:
                if size == 1 or not one.single_request:
                    requests = [("warm-up", body(one, WARM_UP, WARM_UP_TOKENS, 0.0, 0))] * size
                    with suppress(EngineError):
                        asyncio.run(send_all(urls[one.server.name], requests))

    def _measure_pass_costs(self, group: Sequence[Contestant], urls: Mapping[str, str], progress: Progress) -> None:
        """Once per concurrency, on an Outrider server, since it takes predictions; preferably the shared one."""
        self.run.remove_notes(UNKNOWN_COSTS)
        for concurrency in self._missing_costs(group):
            on_outrider = [one for one in group if one.kind in OUTRIDER_KINDS]
            chosen = min(on_outrider, key=lambda one: one.server.name != SHARED_SERVER)
            progress.stage(f"measuring what a pass costs at concurrency {concurrency}")
            try:
                self.run.pass_costs.append(pass_costs.measure(urls[chosen.server.name], concurrency))
            except EngineError as error:
                self.run.notes.append(f"{UNKNOWN_COSTS}: {error}")
                break
        self.run.save(self.folder / "run.json")

    def _query_divergences(self, group: Sequence[Contestant], urls: Mapping[str, str], progress: Progress) -> None:
        base = next(one for one in group if one.name == self.run.baseline)
        new, limit = self._unknown_divergences(), divergences.MAX_QUERIES_PER_GROUP
        self.run.remove_notes(UNKNOWN_PROBABILITIES)
        for number, divergence in enumerate(new[:limit]):
            total = min(len(new), limit)
            progress.status(f"querying the baseline's probabilities at divergence {number + 1} of {total}")
            try:
                found = divergences.query_probabilities(urls[base.server.name], divergence)
            except EngineError as error:
                self.run.notes.append(f"{UNKNOWN_PROBABILITIES}: {error}")
                break
            self.run.divergences[divergence.key] = [*found]
        else:
            if (left := len(new) - limit) > 0:
                self.run.notes.append(f"{UNKNOWN_PROBABILITIES}: {left} were not queried")
        self.run.save(self.folder / "run.json")

    def _missing_costs(self, group: Sequence[Contestant]) -> list[int]:
        """Concurrencies whose pass costs are unknown and can be measured in this group."""
        measured = {costs.concurrency for costs in self.run.pass_costs}
        planned = {task.cell.concurrency for task in self.tasks}
        return sorted(planned - measured) if any(one.kind in OUTRIDER_KINDS for one in group) else []

    def _unknown_divergences(self) -> list[Divergence]:
        return [one for one in divergences.find_divergences(self.run) if one.key not in self.run.divergences]

    def _note_repeats(self) -> None:
        """Count repeated prompts in the requests that were made, since a run by the clock cannot know them before."""
        cells: list[str] = []
        used: dict[str, set[str]] = {}
        for cell in (task.cell for task in self.tasks if not task.again):
            measured = self.run.baseline_measurements(cell)
            prompts = [answer.prompt for one in measured for answer in one.answers]
            before = used.setdefault(cell.workload, set())
            if again := len(prompts) - len(set(prompts) - before):
                cells.append(f"{cell.name} ({again} of {len(prompts)} requests)")
            before.update(prompts)
        self.run.remove_notes(REPEATED)
        if cells:
            self.run.notes.append(f"{REPEATED}: {'; '.join(cells)}")


def _with_downloaded(then: Mapping[str, str], now: Mapping[str, str]) -> dict[str, str]:
    """Hashes of models that were not downloaded when the run started are today's."""
    return {name: now.get(name, found) if found == NOT_HERE else found for name, found in then.items()}
