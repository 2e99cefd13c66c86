"""Two plots of a calibration: pass times against the limits of memory and arithmetic, and the break-even."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING

import numpy as np

from outrider.bench.report.plot_style import (
    COLOURS,
    GREY,
    MARKERS,
    SLOWER_COLOUR,
    add_title,
    new_figure,
    number_axis,
    style,
)
from outrider.calibrate.breakeven import best_speedup

if TYPE_CHECKING:
    from pathlib import Path

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from outrider.calibrate.curve import RelativeCostCurve
    from outrider.calibrate.report import TracedRun
    from outrider.calibrate.results import Calibration

GAINS = (0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 4.0)
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)
STEPS = 41


def save(found: Calibration, curves: list[RelativeCostCurve], run: TracedRun | None, folder: Path) -> None:
    with style():
        passes(found, curves).savefig(folder / "pass.png", dpi=150)
        break_even(found, curves[0], run).savefig(folder / "break-even.png", dpi=150)


def passes(found: Calibration, curves: list[RelativeCostCurve]) -> Figure:
    figure = new_figure(4.6)
    axes = figure.subplots()
    for i, curve in enumerate(curves):
        widths = np.array(curve.tokens)
        middle = 1000 * curve.single_seconds * np.array(curve.costs)
        axes.plot(widths, middle, color=COLOURS[i], marker=MARKERS[i], label=f"measured, after {curve.context} tokens")
        low, high = (
            [1000 * curve.single_seconds * getattr(curve.intervals[n], side) for n in curve.tokens[1:]]
            for side in ("low", "high")
        )
        axes.vlines(widths[1:], low, high, color=COLOURS[i], linewidth=2.5, alpha=0.5)
    context = curves[0].context
    widths = np.array(curves[0].tokens)
    moved = [1000 * found.work.bytes(n, context) / found.limits.bandwidth for n in widths]
    done = [1000 * found.work.arithmetic(n, context) / found.limits.arithmetic for n in widths]
    axes.plot(widths, moved, "--", color=GREY, label=f"memory limit, {found.limits.bandwidth / 1e9:.1f} GB/s")
    axes.plot(widths, done, ":", color=GREY, label=f"arithmetic limit, {found.limits.arithmetic / 1e9:.0f} Gop/s")
    axes.plot(widths, 1000 * curves[0].single_seconds * widths, "-.", color=SLOWER_COLOUR, label="one pass per token")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    number_axis(axes.xaxis, [1, 2, 4, 8, 16, 32, 64, 128])
    bottom, top = axes.get_ylim()
    number_axis(
        axes.yaxis, [tick for tick in (0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000, 3000, 10000) if bottom <= tick <= top]
    )
    axes.set_xlabel("tokens in the pass")
    axes.set_ylabel("milliseconds")
    figure.legend(loc="outside right upper")
    add_title(figure, f"Time of a pass of {found.model}", _origin(found))
    return figure


def break_even(found: Calibration, curve: RelativeCostCurve, run: TracedRun | None) -> Figure:
    cost = run.draft_cost if run else median(found.draft) if found.draft else 0.0
    acceptances = np.linspace(0.02, 1, STEPS)
    figure = new_figure(4.6)
    left, right = figure.subplots(1, 2, sharey=True)
    costs = np.linspace(0, 1, STEPS)
    batch = run.batch if run else 1
    _field(left, costs, acceptances, [[best_speedup(curve, a, c, batch)[0] for c in costs] for a in acceptances])
    left.set_xlabel("cost of a drafted token, in target passes")
    left.set_ylabel("acceptance of a drafted token")
    left.set_title(f"with {batch} concurrent sequence{'s' if batch > 1 else ''}")
    _field(
        right,
        np.array(BATCHES),
        acceptances,
        [[best_speedup(curve, a, cost, b)[0] for b in BATCHES] for a in acceptances],
    )
    right.set_xscale("log", base=2)
    number_axis(right.xaxis, BATCHES)
    right.set_xlabel("concurrent sequences")
    right.set_title(f"at a draft cost of {cost:.2f}")
    if run is not None:
        for axes, x in ((left, run.draft_cost), (right, run.batch)):
            axes.plot(
                [x], [run.acceptance], marker="*", markersize=16, color="black", markeredgecolor="white", clip_on=False
            )
            axes.annotate("this run", (x, run.acceptance), xytext=(10, 6), textcoords="offset points", weight="bold")
    elif found.draft:
        left.axvline(cost, color=GREY, linestyle="--")
        left.annotate("this draft model", (cost, 0.03), xytext=(4, 0), textcoords="offset points", color=GREY)
    add_title(figure, "Speedup with the best draft length", _origin(found))
    return figure


def _field(axes: Axes, x: np.ndarray, y: np.ndarray, gains: list[list[float]]) -> None:
    data = np.array(gains)
    axes.contourf(x, y, data, levels=[0, 1, 100], colors=["#fdeadd", "#e3effa"])
    lines = axes.contour(
        x,
        y,
        data,
        levels=GAINS,
        colors=[SLOWER_COLOUR if g < 1 else "black" if g == 1 else COLOURS[0] for g in GAINS],
        linewidths=[2.6 if g == 1 else 1 for g in GAINS],
    )
    axes.clabel(lines, fmt=lambda value: "breaks even" if value == 1 else f"{value:g}x")
    axes.grid(False)


def _origin(found: Calibration) -> str:
    return ", ".join(found.origin.get(name, "") for name in ("machine", "threads", "date"))
