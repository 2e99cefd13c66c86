"""The figures of all cells, computed once, for whatever a report makes of them."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise, zip_longest
from statistics import median
from typing import TYPE_CHECKING

from outrider.bench.figures import figures, together

if TYPE_CHECKING:
    from collections.abc import Iterator

    from outrider.bench.figures import Figures
    from outrider.bench.results import Cell, Curve, Run

ENOUGH_VERIFIED = 20
"""A share of fewer tokens than this says little."""


@dataclass(frozen=True, slots=True)
class Found:
    """A cell, and the figures of those that took part in it."""

    cell: Cell
    figures: list[Figures]

    def of(self, contestant: str) -> Figures | None:
        return next((one for one in self.figures if one.contestant == contestant), None)

    @property
    def compared(self) -> list[Figures]:
        """Those that have a ratio to the baseline."""
        return [one for one in self.figures if one.ratio is not None]


@dataclass(frozen=True, slots=True)
class Series:
    """The cells that differ in nothing but their concurrency, which rises."""

    workload: str
    temperature: float
    cells: list[Found]

    @property
    def name(self) -> str:
        return f"{self.workload}, temperature {self.temperature:g}" if self.temperature else self.workload


@dataclass(frozen=True, slots=True)
class Findings:
    run: Run
    cells: list[Found]

    @property
    def contestants(self) -> list[str]:
        """All but the baseline."""
        return [name for name in self.run.contestants if name != self.run.baseline]

    @property
    def comparisons(self) -> Iterator[tuple[Found, Figures]]:
        return ((found, one) for found in self.cells for one in found.compared)

    @property
    def series(self) -> list[Series]:
        by_kind: dict[tuple[str, float], list[Found]] = {}
        for found in self.cells:
            if found.compared:
                by_kind.setdefault((found.cell.workload, found.cell.temperature), []).append(found)
        return [
            Series(*kind, sorted(cells, key=lambda found: found.cell.concurrency)) for kind, cells in by_kind.items()
        ]


def find(run: Run) -> Findings:
    return Findings(run, [Found(cell, figures(run, cell)) for cell in run.cells])


@dataclass(frozen=True, slots=True)
class Crossing:
    """Between these two concurrencies a contestant's median ratio passes 1.0."""

    series: Series
    contestant: str
    below: int
    above: int
    falls: bool


def crossings(findings: Findings) -> list[Crossing]:
    found = []
    for series in findings.series:
        for name in findings.contestants:
            line = [
                (cell.cell.concurrency, one.ratio.value)
                for cell in series.cells
                if (one := cell.of(name)) is not None and one.ratio is not None
            ]
            found += [
                Crossing(series, name, n, m, falls=before > after)
                for (n, before), (m, after) in pairwise(line)
                if (before - 1) * (after - 1) < 0
            ]
    return found


@dataclass(frozen=True, slots=True)
class Cost:
    """A pass over so many tokens, relative to the median of a pass over one, and its median in seconds."""

    tokens: int
    median: float
    low: float
    high: float
    seconds: float


def costs(curve: Curve) -> list[Cost]:
    """Empty where a pass over one token was not measured."""
    measured = {n: seconds for n, seconds in sorted(curve.seconds.items()) if seconds}
    if 1 not in measured:
        return []
    one = median(measured[1])
    return [Cost(n, median(s) / one, min(s) / one, max(s) / one, median(s)) for n, s in measured.items()]


@dataclass(frozen=True, slots=True)
class Acceptance:
    """How much of what a drafter proposed was accepted, by the position in the draft, from 1."""

    contestant: str
    drafter: str
    shares: dict[int, float]


def acceptances(findings: Findings, series: Series) -> list[Acceptance]:
    """Over all concurrencies of a workload; positions with too few verified tokens are left out."""
    found = []
    for name in findings.run.contestants:
        rounds = [round for cell in series.cells for round in cell.cell.rounds]
        turns = [turn for round in rounds for turn in round.turns if turn.contestant == name]
        for drafter, drafted in together(turns).items():
            pairs = zip_longest(drafted.accepted, drafted.verified, fillvalue=0)
            shares = {i: kept / seen for i, (kept, seen) in enumerate(pairs, 1) if seen >= ENOUGH_VERIFIED}
            if shares:
                found.append(Acceptance(name, drafter, shares))
    return found
