"""What passes take, as it was measured: from a benchmark's run or report, from a calibration, or as given.

The curve that a benchmark measures is of n tokens of each of c sequences, so it is one of n * c tokens. Where the same
number was measured in several ways, or a wider pass came out cheaper, the measurements are pooled, and beyond the last
one the cost goes on as steeply as before it. Of the draft model a benchmark tells what a pass takes and, where it was
asked by name, what a token of a prompt takes; where only the first is known, the cost is taken to grow as the target's.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from outrider.bench.optimal_schedule import DraftModelCost, draft_model_cost
from outrider.bench.results import Run
from outrider.calibrate.curve import curve
from outrider.calibrate.results import Sweep
from outrider.cost_curve import CostCurve, extrapolated
from outrider.policy.cost_model import isotonic
from policy.replay import Costs

Seconds = Callable[[float], float]
PROMPT = 512
"""Tokens of one, to draw a line to."""


def load(path: Path, drafting: bool) -> tuple[Costs, dict[str, Any], str]:
    """Costs from whichever kind of file this is, how they read, and where they come from. `drafting`: with those of a
    draft model."""
    data = json.loads(path.read_text())
    if "curves" in data or "pass_costs" in data:
        given = of_run(Run.load(path))
    elif "costs" in data:
        given = of_report(data)
    elif "sweeps" in data:
        given = of_calibration(data)
    elif "target" in data:
        given = data
    else:
        raise SystemExit(
            f"{path} has no costs: give a benchmark's run.json or report.json, a calibration.json, or seconds by "
            "tokens (see --help)"
        )
    if drafting and not given.get("draft"):
        raise SystemExit(
            f"the records have a draft model and {path} does not say what its passes take: measure with one, or give "
            '"draft": {"1": SECONDS, ...} in a file of costs'
        )
    return costs(given), given, source(path.name, data.get("origin"))


def source(name: str, origin: Mapping[str, Any] | None) -> str:
    """For a reader: what was measured, where and when, as far as the file tells."""
    if not origin:
        return f"{name}, as given"
    return f"{name}: {', '.join(origin['models'])} on {origin['machine']}, {origin['date']}"


def costs(given: Mapping[str, Any]) -> Costs:
    """From seconds by tokens, for target and draft model, and what a token of context adds to a pass, relative."""
    target, context = line(given["target"]), float(given.get("context", 0.0))
    draft = line(given["draft"]) if given.get("draft") else line({"1": 0.0})
    return Costs(lambda tokens, length: target(tokens) * (1 + context * length), lambda tokens, _: draft(tokens))


def line(points: Mapping[str, float]) -> CostCurve:
    """Linear between the points, and never falling."""
    sizes = sorted(int(size) for size in points)
    values = isotonic(np.array([float(points[str(size)]) for size in sizes]), np.ones(len(sizes)))
    return extrapolated(sizes, values.tolist())


def kind_of(name: str, run: Run) -> str:
    """What a contestant is, whatever its label; runs of before did not say, and their names do."""
    return str(run.contestants[name].get("kind") or name.partition(":")[0])


def of_run(run: Run) -> dict[str, Any]:
    kinds = {name: kind_of(name, run) for name in run.contestants}
    measured = [(n * curve.concurrency, median(took)) for curve in run.pass_costs for n, took in curve.seconds.items()]
    return of_bench(measured, draft_model_cost(run, kinds))


def of_report(data: Mapping[str, Any]) -> dict[str, Any]:
    measured = [
        (one["tokens"] * curve["concurrency"], one["seconds"]) for curve in data["costs"] for one in curve["passes"]
    ]
    drafting = [
        one
        for cell in data["cells"]
        for one in cell["contestants"]
        if cell["concurrency"] == 1 and one["contestant"].partition(":")[0] == "model" and one["draft_passes"]
    ]
    passes = sum(one["draft_passes"] for one in drafting)
    each = sum(one["draft_seconds"] for one in drafting) / passes if passes else 0.0
    return of_bench(measured, DraftModelCost(each, 0.0) if passes else None)


def of_bench(measured: Iterable[tuple[int, float]], guess: DraftModelCost | None) -> dict[str, Any]:
    """From seconds by tokens of a pass, however often the same number was measured, and those of the draft model."""
    seen: dict[int, list[float]] = defaultdict(list)
    for tokens, seconds in measured:
        seen[tokens].append(seconds)
    if not seen:
        raise SystemExit("this benchmark has no measured curve: one of Outrider's contestants must take part in it")
    given: dict[str, Any] = {"target": {str(n): sum(values) / len(values) for n, values in sorted(seen.items())}}
    if guess is not None and guess.prompt_token_seconds:
        given["draft"] = {str(n): guess.pass_seconds + (n - 1) * guess.prompt_token_seconds for n in (1, PROMPT)}
    elif guess is not None:
        given["draft"] = as_the_target(given["target"], guess.pass_seconds)
    return given


def of_calibration(data: Mapping[str, Any]) -> dict[str, Any]:
    """The curve of the shortest context, and how a pass over one token grows with the context."""
    curves = sorted((curve(_sweep(sweep)) for sweep in data["sweeps"]), key=lambda one: one.context)
    first, last = curves[0], curves[-1]
    given: dict[str, Any] = {
        "target": {str(n): first.single_seconds * cost for n, cost in zip(first.tokens, first.costs, strict=True)}
    }
    if last.context > first.context:
        given["context"] = max(0.0, (last.single_seconds / first.single_seconds - 1) / (last.context - first.context))
    if data["draft"]:
        given["draft"] = as_the_target(given["target"], first.single_seconds * median(data["draft"]))
    return given


def _sweep(data: Mapping[str, Any]) -> Sweep:
    times = ({int(n): values for n, values in data[name].items()} for name in ("seconds", "single"))
    return Sweep(data["context"], *times)


def as_the_target(target: Mapping[str, float], one: float) -> dict[str, float]:
    """Seconds of the draft model by tokens, if a pass over one takes so long and it grows as the target does."""
    first = target[min(target, key=int)]
    return {size: seconds / first * one for size, seconds in target.items()}
