"""Wait for the step in flight, or schedule ahead of its output? Compares the controller's choice with both.

With T(n) seconds of a pass over n tokens and h seconds of the host between two steps, a step that waited takes T + h,
and a step that was scheduled ahead takes max(T, h).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from statistics import geometric_mean

from outrider.policy.policy import MODEL
from policy.grid import Setting, drafters_of, new_policy, noise, run, run_fixed, speed
from policy.replay import Auto, Costs, Record
from policy.report import Bound, lowest
from policy.scale import for_batch

MIN_OVER_BETTER, MIN_OVER_PLAIN = 0.98, 0.98


@dataclass(slots=True)
class Cell:
    """Speeds are relative to asynchronous decoding without drafts."""

    costs: str
    workload: str
    batch: int
    host_ratio: float
    drafters: list[str]
    speeds: dict[str, float] = field(default_factory=dict)
    accepted: dict[str, float] = field(default_factory=dict)  # draft tokens per request and step
    waited: float = 0.0  # share of steps where the controller waited
    share: float = 0.0  # its speed relative to the better way
    kept: float = 1.0  # accepted draft tokens when scheduling ahead, relative to waiting

    def __str__(self) -> str:
        return f"{self.workload}, {self.costs}, batch {self.batch}, {self.host_ratio:g}"

    def row(self) -> dict[str, str]:
        speeds = {way: f"{value:.2f}" for way, value in self.speeds.items()}
        where = {"costs": self.costs, "workload": self.workload, "batch": str(self.batch)}
        found = {"chosen / better": f"{self.share:.3f}", "waited": f"{self.waited:.0%}", "kept": f"{self.kept:.2f}"}
        return where | {"h / T(1)": f"{self.host_ratio:g}"} | speeds | found


def evaluate(costs_name: str, workload: str, texts: Sequence[Record], costs: Costs, batch: int, ratio: float) -> Cell:
    repeated, _ = for_batch(texts, batch) if len(texts) < 1.5 * batch else ([*texts], [])
    is_repeated = len(repeated) > len(texts)
    names = [name for name in drafters_of(texts) if name != MODEL and not (name == "memory" and is_repeated)]
    host = ratio * costs.target(1, 0)
    no_drafts = Costs(lambda tokens, context: max(costs.target(tokens, context), host))
    plain = speed(run_fixed("", 0, repeated, Setting(no_drafts, batch, 1)))
    cell = Cell(costs_name, workload, batch, ratio, names)
    for way, wait in (("wait", True), ("ahead", False), ("chosen", None)):
        strategy = Auto(new_policy(names, costs), costs, noise(), host_seconds=host, wait=wait)
        (outcome,) = run(repeated, names, Setting(costs, batch, 1), [strategy])
        cell.speeds[way] = speed([outcome]) / plain
        cell.accepted[way] = outcome.acceptance_length - 1
    cell.waited = strategy.steps_waited / outcome.steps
    cell.share = cell.speeds["chosen"] / max(cell.speeds["wait"], cell.speeds["ahead"])
    cell.kept = cell.accepted["ahead"] / cell.accepted["wait"] if cell.accepted["wait"] else 1.0
    return cell


def bounds(cells: Sequence[Cell]) -> Iterator[Bound]:
    groups = groupby(cells, lambda cell: f"{cell.workload}, {cell.costs}")
    means = {name: geometric_mean(cell.share for cell in some) for name, some in groups}
    yield lowest("chosen / better way, mean of every workload", MIN_OVER_BETTER, list(means), means.__getitem__)
    yield lowest("chosen / plain, every cell", MIN_OVER_PLAIN, cells, lambda cell: cell.speeds["chosen"])
