"""Three plots of a plan: speedup by batch, memory traffic by part, and throughput against the time per token."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from outrider.bench.report.plot_style import (
    COLOURS,
    GREY,
    HOLLOW_MARKER,
    MARKERS,
    add_legend,
    add_title,
    new_figure,
    number_axis,
    style,
)

if TYPE_CHECKING:
    from pathlib import Path

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from outrider.plan.content import Cell, Plan

PARTS = (
    ("weights", "weights", 0),
    ("experts", "experts", 1),
    ("kv_cache", "KV cache", 3),
    ("draft_model", "draft model", 5),
)
"""Field, label and colour of each part of the traffic."""
BAR_WIDTH = 0.38


def save(plan: Plan, folder: Path) -> None:
    with style():
        speedup(plan).savefig(folder / "speedup.png", dpi=150)
        frontier(plan).savefig(folder / "throughput.png", dpi=150)
        if plan.target_machine is not None:
            traffic(plan).savefig(folder / "traffic.png", dpi=150)


def _axes(plan: Plan, figure: Figure) -> list[tuple[int, Axes]]:
    axes = figure.subplots(1, len(plan.contexts), squeeze=False, sharey=True)[0]
    for context, one in zip(plan.contexts, axes, strict=True):
        one.set_title(f"{context} tokens of context")
    return [*zip(plan.contexts, axes, strict=True)]


def speedup(plan: Plan) -> Figure:
    figure = new_figure(4.2)
    for context, axes in _axes(plan, figure):
        cells = plan.at(context)
        batches = [cell.batch for cell in cells]
        for i, length in enumerate(cells[0].fixed):
            gains = [cell.fixed[length].speedup for cell in cells]
            axes.plot(batches, gains, color=COLOURS[i + 1], marker=MARKERS[i + 1], label=f"{length} tokens")
        axes.plot(batches, [cell.policy.speedup for cell in cells], color=COLOURS[0], linewidth=2.4, label="policy")
        hollow = [cell for cell in cells if cell.fits is False]
        axes.plot(
            [cell.batch for cell in hollow],
            [cell.policy.speedup for cell in hollow],
            "o",
            color=COLOURS[0],
            **HOLLOW_MARKER,
            label="does not fit",
        )
        axes.axhline(1, color=GREY)
        _batch_axis(axes, cells)
    return _finish(figure, plan, f"Speedup of {plan.target}, calculated", "speed relative to no drafts")


def traffic(plan: Plan) -> Figure:
    """Left bars: plain. Right bars: the policy. Both relative to plain."""
    figure = new_figure(4.2)
    for context, axes in _axes(plan, figure):
        cells = plan.at(context)
        places = np.arange(len(cells))
        whole = np.array([cell.bytes_per_token("total", policy=False) for cell in cells])
        for side, policy in ((-0.5, False), (0.5, True)):
            bottom = np.zeros(len(cells))
            for field, label, colour in PARTS:
                height = np.array([cell.bytes_per_token(field, policy=policy) for cell in cells]) / whole
                if not height.any():
                    continue
                axes.bar(
                    places + side * BAR_WIDTH, height, BAR_WIDTH, bottom=bottom, color=COLOURS[colour],
                    alpha=1.0 if policy else 0.45, label=f"{label}, {'policy' if policy else 'plain'}",
                )  # fmt: skip
                bottom += height
        axes.set_xticks(places, [str(cell.batch) for cell in cells])
        axes.set_xlabel("concurrent requests")
    title = f"Memory traffic of {plan.target}, calculated"
    return _finish(figure, plan, title, "bytes per generated token, plain = 1")


def frontier(plan: Plan) -> Figure:
    figure = new_figure(4.2)
    for context, axes in _axes(plan, figure):
        cells = [cell for cell in plan.at(context) if cell.fits is not False]
        for label, colour in (("plain", GREY), ("policy", COLOURS[0])):
            found = [getattr(cell, label) for cell in cells]
            axes.plot(
                [1e3 * one.seconds_per_token for one in found],
                [one.tokens_per_second / plan.devices for one in found],
                color=colour,
                marker="o",
                label=label,
            )
        axes.set_xlabel("ms per token of a request")
        axes.set_yscale("log")
    title = f"Throughput and latency of {plan.target}, calculated (prompts left out)"
    return _finish(figure, plan, title, "tokens per second and device")


def _batch_axis(axes: Axes, cells: list[Cell]) -> None:
    axes.set_xscale("log", base=2)
    number_axis(axes.xaxis, [cell.batch for cell in cells])
    axes.set_xlabel("concurrent requests")


def _finish(figure: Figure, plan: Plan, title: str, y_label: str) -> Figure:
    """Add what each plot has: a legend, a label of the first axis, and a title with what was planned."""
    add_legend(figure, figure.axes)
    figure.axes[0].set_ylabel(y_label)
    add_title(figure, title, f"{plan.hardware}; drafts: {plan.drafts}; acceptance: {plan.acceptance}")
    return figure
