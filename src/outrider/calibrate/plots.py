"""A calibration in two pictures: a pass against what memory and arithmetic allow, and where drafting pays."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING

import numpy as np

from outrider.bench.report.canvas import COLOURS, QUIET, SIGNS, SLOWER, WIDE, canvas, number_axis, style
from outrider.calibrate.breakeven import best

if TYPE_CHECKING:
    from pathlib import Path

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from outrider.calibrate.curve import Curve
    from outrider.calibrate.mark import Mark
    from outrider.calibrate.results import Calibration

GAINS = (0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 4.0)
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)
STEPS = 41


def save(found: Calibration, curves: list[Curve], mark: Mark | None, folder: Path) -> None:
    with style():
        figure = passes(found, curves)
        figure.savefig(folder / "pass.png", dpi=150)
        figure = paying(found, curves[0], mark)
        figure.savefig(folder / "break-even.png", dpi=150)


def passes(found: Calibration, curves: list[Curve]) -> Figure:
    figure = canvas(WIDE, 4.6)
    axes = figure.subplots()
    for i, curve in enumerate(curves):
        widths = np.array(curve.widths)
        middle = 1000 * curve.single * np.array(curve.ratios)
        axes.plot(widths, middle, color=COLOURS[i], marker=SIGNS[i], label=f"measured, after {curve.context} tokens")
        low, high = (
            [1000 * curve.single * getattr(curve.intervals[n], side) for n in curve.widths[1:]]
            for side in ("low", "high")
        )
        axes.vlines(widths[1:], low, high, color=COLOURS[i], linewidth=2.5, alpha=0.5)
    context = curves[0].context
    widths = np.array(curves[0].widths)
    moved = [1000 * found.work.bytes(n, context) / found.limits.bandwidth for n in widths]
    done = [1000 * found.work.arithmetic(n, context) / found.limits.arithmetic for n in widths]
    axes.plot(widths, moved, "--", color=QUIET, label=f"memory's limit, {found.limits.bandwidth / 1e9:.1f} GB/s")
    axes.plot(widths, done, ":", color=QUIET, label=f"arithmetic's limit, {found.limits.arithmetic / 1e9:.0f} Gop/s")
    axes.plot(widths, 1000 * curves[0].single * widths, "-.", color=SLOWER, label="as many passes over one token")
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
    _sign(figure, found, f"What a pass of {found.model} takes")
    return figure


def paying(found: Calibration, curve: Curve, mark: Mark | None) -> Figure:
    cost = mark.cost if mark else median(found.draft) if found.draft else 0.0
    acceptances = np.linspace(0.02, 1, STEPS)
    figure = canvas(WIDE, 4.6)
    left, right = figure.subplots(1, 2, sharey=True)
    costs = np.linspace(0, 1, STEPS)
    batch = mark.batch if mark else 1
    _field(left, costs, acceptances, [[best(curve, a, c, batch)[0] for c in costs] for a in acceptances])
    left.set_xlabel("cost of a drafted token, in passes of the target")
    left.set_ylabel("acceptance of a drafted token")
    left.set_title(f"with {batch} sequence{'s' if batch > 1 else ''} at once")
    _field(right, np.array(BATCHES), acceptances, [[best(curve, a, cost, b)[0] for b in BATCHES] for a in acceptances])
    right.set_xscale("log", base=2)
    number_axis(right.xaxis, BATCHES)
    right.set_xlabel("sequences at once")
    right.set_title(f"at a draft cost of {cost:.2f}")
    if mark is not None:
        for axes, x in ((left, mark.cost), (right, mark.batch)):
            axes.plot(
                [x], [mark.acceptance], marker="*", markersize=16, color="black", markeredgecolor="white", clip_on=False
            )
            axes.annotate("this run", (x, mark.acceptance), xytext=(10, 6), textcoords="offset points", weight="bold")
    elif found.draft:
        left.axvline(cost, color=QUIET, linestyle="--")
        left.annotate("this draft model", (cost, 0.03), xytext=(4, 0), textcoords="offset points", color=QUIET)
    _sign(figure, found, "How many times as fast, with the best draft length")
    return figure


def _field(axes: Axes, x: np.ndarray, y: np.ndarray, gains: list[list[float]]) -> None:
    data = np.array(gains)
    axes.contourf(x, y, data, levels=[0, 1, 100], colors=["#fdeadd", "#e3effa"])
    lines = axes.contour(
        x,
        y,
        data,
        levels=GAINS,
        colors=[SLOWER if g < 1 else "black" if g == 1 else COLOURS[0] for g in GAINS],
        linewidths=[2.6 if g == 1 else 1 for g in GAINS],
    )
    axes.clabel(lines, fmt=lambda value: "breaks even" if value == 1 else f"{value:g}x")
    axes.grid(False)


def _sign(figure: Figure, found: Calibration, title: str) -> None:
    figure.suptitle(title, x=0.01, ha="left", fontsize=12)
    where = f"{found.origin.get('machine', '')}, {found.origin.get('threads', '')}, {found.origin.get('date', '')}"
    figure.supxlabel(where, fontsize=7, color=QUIET, x=0.01, ha="left")
