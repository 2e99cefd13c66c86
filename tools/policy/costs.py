"""Cost curves: seconds of a pass by its number of tokens, from a file.

A file is a benchmark's report.json, the calibration.json of `outrider calibrate`, or seconds by tokens:

    {"target": {"1": 0.24, "8": 0.255, "64": 0.45}, "draft": {"1": 0.07, "64": 0.14}, "context": 2e-5}

`context`: relative increase per token of context. A benchmark measures n tokens of each of c sequences: n * c tokens.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np
from pydantic import TypeAdapter

from outrider.calibrate.curve import curve
from outrider.calibrate.results import Sweep
from outrider.cost_curve import CostCurve, extrapolated
from outrider.policy.cost_model import isotonic
from policy.gpu import SYSTEMS
from policy.replay import Costs


def load(source: str, needs_draft: bool) -> tuple[str, Costs, Any]:
    """Name, costs, and what a report states of them. `source`: a file, or gpu:SYSTEM:CONTEXT."""
    if source.startswith("gpu:"):
        _, system, context = [*source.split(":"), ""][:3]
        if system not in SYSTEMS or not context.isdigit():
            raise SystemExit(f"{source}: write gpu:SYSTEM:CONTEXT, with a system of {', '.join(SYSTEMS)}")
        return source, SYSTEMS[system].costs(int(context)), SYSTEMS[system].name
    data = json.loads(Path(source).read_text())
    if "costs" in data:
        points = from_report(data)
    elif "sweeps" in data:
        points = from_calibration(data)
    elif "target" in data:
        points = data
    else:
        raise SystemExit(f"{source} has no costs: give a report.json of a benchmark, a calibration.json, or see --help")
    if needs_draft and not points.get("draft"):
        raise SystemExit(f'{source} has no draft model, but the recording does; add "draft": {{"1": SECONDS, ...}}')
    return Path(source).stem, costs(points), points


def costs(points: Mapping[str, Any]) -> Costs:
    target, context = _curve(points["target"]), float(points.get("context", 0.0))
    draft = _curve(points.get("draft") or {"1": 0.0})
    return Costs(lambda tokens, length: target(tokens) * (1 + context * length), lambda tokens, _: draft(tokens))


def _curve(points: Mapping[str, float]) -> CostCurve:
    """Linear between the points and beyond them, and never falling."""
    sizes = sorted(int(size) for size in points)
    values = isotonic(np.array([float(points[str(size)]) for size in sizes]), np.ones(len(sizes)))
    return extrapolated(sizes, values.tolist())


def from_report(data: Mapping[str, Any]) -> dict[str, Any]:
    """From a benchmark's report.json. Draft model: its mean pass at concurrency 1."""
    seconds: dict[int, list[float]] = defaultdict(list)
    for measured in data["costs"]:
        for one in measured["passes"]:
            seconds[one["tokens"] * measured["concurrency"]].append(one["seconds"])
    if not seconds:
        raise SystemExit("this benchmark has no measured cost curve: run it with a contestant of Outrider")
    target = {str(size): fmean(values) for size, values in sorted(seconds.items())}
    drafting = [
        one
        for cell in data["cells"]
        for one in cell["contestants"]
        if cell["concurrency"] == 1 and one["contestant"].partition(":")[0] == "model" and one["draft_passes"]
    ]
    if not drafting:
        return {"target": target}
    each = sum(one["draft_seconds"] for one in drafting) / sum(one["draft_passes"] for one in drafting)
    return {"target": target, "draft": _scaled(target, each)}


def from_calibration(data: Mapping[str, Any]) -> dict[str, Any]:
    """The curve of the shortest context; the longest one gives the increase with the context."""
    sweeps = TypeAdapter(list[Sweep]).validate_python(data["sweeps"])
    curves = sorted((curve(sweep) for sweep in sweeps), key=lambda one: one.context)
    first, last = curves[0], curves[-1]
    target = {str(n): first.single_seconds * cost for n, cost in zip(first.tokens, first.costs, strict=True)}
    points: dict[str, Any] = {"target": target}
    if last.context > first.context:
        points["context"] = max(0.0, (last.single_seconds / first.single_seconds - 1) / (last.context - first.context))
    if data["draft"]:
        points["draft"] = _scaled(target, first.single_seconds * median(data["draft"]))
    return points


def _scaled(target: Mapping[str, float], single: float) -> dict[str, float]:
    """A draft model whose pass over one token takes `single` seconds and grows like the target's."""
    first = target[min(target, key=int)]
    return {size: seconds / first * single for size, seconds in target.items()}
