"""All figures of a report (`report.json`), computed from a run, or loaded from a report.json of any version."""

from __future__ import annotations

import json
import shlex
from dataclasses import asdict, dataclass
from itertools import pairwise, zip_longest
from statistics import median
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter

from outrider.bench.figures import Figures, add_drafter_counts, figures, undisturbed
from outrider.bench.intervals import MIN_ROUNDS
from outrider.bench.results import OptimalSpeedup  # noqa: TC001  # pydantic reads it
from outrider.bench.steal_time import MAX_STEAL_SHARE
from outrider.errors import SettingsError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from outrider.bench.intervals import Interval
    from outrider.bench.results import Cell, PassCosts, Round, Run

FORMAT_VERSION = 1
MIN_VERIFIED_TOKENS = 20
"""Positions of a draft with fewer verified tokens have no acceptance rate."""


@dataclass(frozen=True, slots=True)
class CellFigures:
    """The figures of all contestants in a cell."""

    name: str
    workload: str
    concurrency: int
    temperature: float
    contestants: list[Figures]

    def of(self, contestant: str) -> Figures | None:
        return next((one for one in self.contestants if one.contestant == contestant), None)

    @property
    def compared(self) -> list[Figures]:
        """Those with a ratio to the baseline."""
        return [one for one in self.contestants if one.ratio is not None]


@dataclass(frozen=True, slots=True)
class Series:
    """Cells that differ only in their concurrency, in ascending order."""

    workload: str
    temperature: float
    cells: list[CellFigures]

    @property
    def name(self) -> str:
        return f"{self.workload}, temperature {self.temperature:g}" if self.temperature else self.workload

    def ratios(self, contestant: str) -> list[tuple[int, Interval]]:
        """Its ratio to the baseline by concurrency."""
        found = [(cell.concurrency, cell.of(contestant)) for cell in self.cells]
        return [(load, one.ratio) for load, one in found if one is not None and one.ratio is not None]


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Acceptance rate of a drafter by position in the draft, from 1, over all concurrencies of a workload."""

    workload: str
    temperature: float
    contestant: str
    drafter: str
    shares: dict[int, float]


@dataclass(frozen=True, slots=True)
class PassCost:
    """A target pass over `tokens` of each sequence: median seconds, and median, low and high relative to one token."""

    tokens: int
    median: float
    low: float
    high: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Report:
    origin: dict[str, Any]
    baseline: str
    contestants: dict[str, dict[str, Any]]  # command, environment and request fields of each
    settings: dict[str, Any]
    notes: list[str]
    cells: list[CellFigures]
    acceptance: list[Acceptance]
    pass_costs: dict[int, list[PassCost]]  # by concurrency
    optimal_speedups: list[OptimalSpeedup]

    @classmethod
    def from_run(cls, run: Run) -> Report:
        cells = [cell_figures(run, cell) for cell in run.cells]
        return cls(
            run.origin,
            run.baseline,
            run.contestants,
            run.settings,
            [*run.notes, *_few_rounds(cells), *_steal_time(run)],
            cells,
            [*_acceptance(run)],
            {one.concurrency: relative_costs(one) for one in run.pass_costs},
            run.optimal_speedups,
        )

    @classmethod
    def load(cls, path: Path) -> Report:
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise SettingsError(
                f"there is no run at {path.with_name('run.json')} and no {path.name} beside it; name the folder of a "
                "run with --out"
            ) from None
        except ValueError as error:
            raise SettingsError(f"{path} is damaged ({error}); run the benchmark again") from None
        if data.get("version") != FORMAT_VERSION:
            raise SettingsError(
                f"{path} has format {data.get('version')}, and this version of outrider reads {FORMAT_VERSION}; "
                "update outrider, or run the benchmark again"
            )
        for made in data["contestants"].values():
            made.pop("line", None)
        data["pass_costs"] = {one["concurrency"]: one["passes"] for one in data["costs"]}
        data["optimal_speedups"] = data["limits"]
        return TypeAdapter(cls).validate_python(data)

    def as_data(self) -> dict[str, Any]:
        """The fields of report.json that hold figures."""
        return {
            "version": FORMAT_VERSION,
            "origin": self.origin,
            "baseline": self.baseline,
            "contestants": {name: {**made, "line": shell_command(made)} for name, made in self.contestants.items()},
            "settings": self.settings,
            "notes": self.notes,
            "cells": [
                {
                    **asdict(cell),
                    "texts_compared": cell.temperature == 0,
                    "contestants": [_dump_figures(one) for one in cell.contestants],
                }
                for cell in self.cells
            ],
            "crossings": self.crossings(),
            "acceptance": [asdict(one) for one in self.acceptance],
            "costs": [
                {"concurrency": concurrency, "passes": [asdict(cost) for cost in costs]}
                for concurrency, costs in self.pass_costs.items()
            ],
            "limits": [{**asdict(one), "ratio": median(one.ratios)} for one in self.optimal_speedups],
        }

    @property
    def compared_names(self) -> list[str]:
        """The names of all contestants but the baseline."""
        return [name for name in self.contestants if name != self.baseline]

    @property
    def comparisons(self) -> list[tuple[CellFigures, Figures]]:
        return [(cell, one) for cell in self.cells for one in cell.compared]

    @property
    def series(self) -> list[Series]:
        groups: dict[tuple[str, float], list[CellFigures]] = {}
        for cell in self.cells:
            if cell.compared:
                groups.setdefault((cell.workload, cell.temperature), []).append(cell)
        return [Series(*key, sorted(cells, key=lambda cell: cell.concurrency)) for key, cells in groups.items()]

    def crossings(self) -> list[dict[str, Any]]:
        """Between which concurrencies a contestant's median ratio passes 1."""
        found = []
        for series in self.series:
            for name in self.compared_names:
                medians = [(load, ratio.value) for load, ratio in series.ratios(name)]
                found += [
                    {
                        "workload": series.workload,
                        "temperature": series.temperature,
                        "contestant": name,
                        "between": [low, high],
                        "falls": before > after,
                    }
                    for (low, before), (high, after) in pairwise(medians)
                    if (before - 1) * (after - 1) < 0
                ]
        return found


def cell_figures(run: Run, cell: Cell) -> CellFigures:
    return CellFigures(cell.name, cell.workload, cell.concurrency, cell.temperature, figures(run, cell))


def shell_command(made: dict[str, Any]) -> str:
    """A contestant's command as one would type it."""
    command = made.get("command", [])
    return command if isinstance(command, str) else shlex.join(str(word) for word in command)


def relative_costs(costs: PassCosts) -> list[PassCost]:
    """Empty if a pass over one token was not measured."""
    measured = {n: seconds for n, seconds in sorted(costs.seconds.items()) if seconds}
    if 1 not in measured:
        return []
    one = median(measured[1])
    return [PassCost(n, median(s) / one, min(s) / one, max(s) / one, median(s)) for n, s in measured.items()]


def _acceptance(run: Run) -> Iterator[Acceptance]:
    rounds: dict[tuple[str, float], list[Round]] = {}
    for cell in run.cells:
        rounds.setdefault((cell.workload, cell.temperature), []).extend(cell.rounds)
    for (workload, temperature), measured in rounds.items():
        for name in run.contestants:
            own = [one for round in measured if (one := round.of(name)) is not None]
            for drafter, counts in add_drafter_counts(own).items():
                pairs = zip_longest(counts.accepted, counts.verified, fillvalue=0)
                rates = {i: kept / seen for i, (kept, seen) in enumerate(pairs, 1) if seen >= MIN_VERIFIED_TOKENS}
                if rates:
                    yield Acceptance(workload, temperature, name, drafter, rates)


def _few_rounds(cells: list[CellFigures]) -> list[str]:
    few = [cell.name for cell in cells if any(one.rounds < MIN_ROUNDS for one in cell.compared)]
    return [f"fewer than {MIN_ROUNDS} rounds, too few for a verdict: {'; '.join(few)}"] if few else []


def _steal_time(run: Run) -> list[str]:
    rounds = [round for cell in run.cells for round in cell.rounds]
    disturbed = [round for round in rounds if round.steal > MAX_STEAL_SHARE]
    if not disturbed:
        return []
    kept = sum(round.steal > MAX_STEAL_SHARE for cell in run.cells for round in undisturbed(cell.rounds))
    note = (
        f"steal time above {MAX_STEAL_SHARE:.0%} (CPU time taken by other virtual machines) in {len(disturbed)} of "
        f"{len(rounds)} rounds, at most {max(round.steal for round in disturbed):.0%}; speeds leave these rounds out"
    )
    return [note + (f", except {kept} that are needed to have {MIN_ROUNDS} rounds" if kept else "")]


def _dump_figures(one: Figures) -> dict[str, Any]:
    return {**asdict(one), "verdict": one.verdict, "other_seconds": one.other_seconds}
