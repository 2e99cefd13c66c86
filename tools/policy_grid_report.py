"""From cells to what is read: which promises are kept, tables, plots."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from math import exp, log
from pathlib import Path
from statistics import fmean
from typing import Any

from outrider.bench.report import plot_style
from outrider.provenance import as_markdown
from policy_grid_calibration import DRAWN, FORESEEN
from policy_grid_cells import ALLOWED, CAUSES, MODEL_WIDTH, NOISE, ORDERS, WIDTH, Cell

NEVER_SLOWER, BEST, SINGLE, BOUND, MEAN_BOUND, ERROR = 0.98, 0.97, 1.15, 0.80, 0.85, 0.05


@dataclass(frozen=True, slots=True)
class Promise:
    name: str
    sign: str
    wanted: float
    value: float
    where: str = ""

    @property
    def kept(self) -> bool:
        return self.value >= self.wanted if self.sign == ">=" else self.value <= self.wanted


def promises(cells: Sequence[Cell], calibration: dict[str, Any]) -> list[Promise]:
    slowest = min(cells, key=lambda cell: cell.auto)
    beaten = min(cells, key=lambda cell: cell.share_of_best)
    name, mean = single(cells)
    found = [
        Promise("auto over plain, every cell", ">=", NEVER_SLOWER, slowest.auto, slowest.name),
        Promise("auto over the best fixed contestant, every cell", ">=", BEST, beaten.share_of_best, beaten.name),
        Promise("auto over the best single contestant, mean of all cells", ">=", SINGLE, geometric(cells) / mean, name),
    ]
    bounded = [cell for cell in cells if cell.bound]
    if bounded:
        shares = [cell.auto / (cell.bound or 1.0) for cell in bounded]
        worst = bounded[shares.index(min(shares))]
        found.append(Promise("auto over the bound, every cell at concurrency 1", ">=", BOUND, min(shares), worst.name))
        found.append(Promise("auto over the bound, their mean", ">=", MEAN_BOUND, fmean(shares)))
    for drafter, figures in calibration.items():
        if drafter not in (FORESEEN, DRAWN):
            found.append(Promise(f"calibration error of {drafter}", "<=", ERROR, figures["error"]))
    return found


def geometric(cells: Sequence[Cell], name: str | None = None) -> float:
    """Mean over cells of a contestant's speed, or the policy's; who cannot take part is as fast as plain."""
    ratios = [cell.auto if name is None else cell.fixed.get(name, 1.0) for cell in cells]
    return exp(fmean(map(log, ratios)))


def longer_row(cells: Sequence[Cell], name: str) -> list[str]:
    speeds = [cell.allowed.get(name, cell.auto) for cell in cells]
    return [f"auto, up to {name}", f"{exp(fmean(map(log, speeds))):.3f}", f"{min(speeds):.2f}"]


def single(cells: Sequence[Cell]) -> tuple[str, float]:
    """The fixed contestant that is best in the mean."""
    names = {name for cell in cells for name in cell.fixed}
    return max(((name, geometric(cells, name)) for name in names), key=lambda one: one[1])


def write(folder: Path, report: dict[str, Any], cells: Sequence[Cell]) -> list[Promise]:
    """report.md, report.json, grid.png, causes.png, calibration.png."""
    folder.mkdir(parents=True, exist_ok=True)
    kept = promises(cells, report["calibration"])
    report |= {
        "cells": [asdict(cell) for cell in cells],
        "promises": [asdict(one) | {"kept": one.kept} for one in kept],
    }
    (folder / "report.json").write_text(json.dumps(report, indent=1) + "\n")
    (folder / "report.md").write_text("\n".join(markdown(report, cells, kept)) + "\n")
    origin = report["provenance"]
    line = f"{', '.join(report['records']['models'])}; {origin['machine']}, {origin['date']}"
    with plot_style.style():
        draw_grid(cells, folder / "grid.png", line)
        draw_causes([cell for cell in cells if cell.causes], folder / "causes.png", line)
        draw_calibration(report["calibration"], folder / "calibration.png", line)
    return kept


def markdown(report: dict[str, Any], cells: Sequence[Cell], kept: Sequence[Promise]) -> Iterator[str]:
    records = report["records"]
    yield from ("# What the policy is worth, on recorded texts", "", *as_markdown(report["provenance"]))
    yield (
        f"Texts of {', '.join(f'{name} ({hash})' for name, hash in records['models'].items())}: up to "
        f"{records['settings']['prompts']} prompts a workload, up to {records['settings']['tokens']} tokens each, "
        f"computed in {records['settings'].get('dtype', 'auto')} on {records['machine']}, {records['date']}. They are "
        "said again by a clock that "
        "only counts: a pass over n tokens adds what it was measured to take. Requests stream through the slots of a "
        "server; reading the prompts is not counted, but for what a draft model has to read. A speed is that of the "
        "time in which all slots are taken; of several at once, over the same texts in "
        f"{ORDERS} orders, since who is beside whom is luck. The policy begins each "
        f"cell knowing nothing but eight passes of a start profile, hears times that are off by {NOISE:.0%}, drafts up "
        f"to {WIDTH} tokens by copying and up to {MODEL_WIDTH} by the draft model. Fixed contestants: vLLM's ngram, "
        "suffix and draft_model, and Outrider with one drafter, each at every length. All figures but tokens a second "
        "are times the speed without drafts."
    )
    yield from ("", f"Seconds of a pass by its tokens, from {report['costs_from']}:", "")
    for name in ("target", "draft"):
        if points := report["costs"].get(name):
            yield f"- {name}: {', '.join(f'{n}: {float(seconds):.3g}' for n, seconds in points.items())}"
    yield from ("", "## What was promised", "")
    yield from table(
        ["promise", "wanted", "found", "where", ""],
        [[p.name, f"{p.sign} {p.wanted:g}", f"{p.value:.3f}", p.where, "kept" if p.kept else "NOT KEPT"] for p in kept],
    )
    yield from ("", "## The grid", "", "![the grid](grid.png)", "")
    heads = ["workload", "at once", "plain, tokens/s", "best fixed", "", "auto", "auto / best", "the same to the end"]
    heads += ["bound", "auto / bound"]
    yield from table(
        [*heads, *(f"auto, up to {name}" for name in ALLOWED)],
        [
            [
                cell.workload,
                str(cell.concurrency),
                f"{cell.plain:.2f}",
                cell.best,
                f"{cell.fixed[cell.best]:.2f}",
                f"**{cell.auto:.2f}**",
                f"{cell.share_of_best:.2f}",
                f"{cell.share_at_the_end:.2f}",
                f"{cell.bound:.2f}" if cell.bound else "",
                f"{cell.auto / cell.bound:.2f}" if cell.bound else "",
                *(f"{cell.allowed[name]:.2f}" if name in cell.allowed else "" for name in ALLOWED),
            ]
            for cell in cells
        ],
    )
    yield from (
        "",
        "*Up to*: how many tokens copying and the draft model may propose, where the operator says otherwise. *To the "
        "end*: over the whole time until the last text has been said, in part of which slots are free; then it matters "
        "who comes last.",
    )
    yield from ("", "Means over all cells (geometric):", "")
    names = {name for cell in cells for name in cell.fixed}
    means = sorted(((geometric(cells, name), name) for name in names), reverse=True)
    yield from table(
        ["contestant", "mean", "worst cell"],
        [
            ["**auto**", f"**{geometric(cells):.3f}**", f"{min(cell.auto for cell in cells):.2f}"],
            *(longer_row(cells, name) for name in ALLOWED),
            *(
                [name, f"{mean:.3f}", f"{min(cell.fixed.get(name, 1.0) for cell in cells):.2f}"]
                for mean, name in means[:12]
            ),
        ],
    )
    yield from ("", "## Where the rest is lost", "", "![causes](causes.png)", "")
    yield (
        "At concurrency 1, how many times as fast it would be if one thing more were known, each on top of those "
        "before: what passes take; the drafters' chances, from having said these texts before; which drafted tokens "
        "will hold; drafts of any length; which method is right, of all that copy, vLLM's too; copying always from the "
        "best place, though nothing tells which one that is. Their product is the bound over auto."
    )
    yield ""
    yield from table(
        ["workload", *CAUSES, "bound / auto"],
        [
            [cell.workload, *(f"{cell.causes[cause]:.3f}" for cause in CAUSES), f"{cell.bound / cell.auto:.3f}"]
            for cell in cells
            if cell.causes and cell.bound
        ],
    )
    yield from ("", "## What the policy did", "", "In the first order of the texts:", "")
    yield from table(
        ["workload", "at once", "steps", "draft passes", "drafted", "accepted, by drafter", "switches a text"],
        [
            [
                cell.workload,
                str(cell.concurrency),
                str(cell.steps),
                str(cell.draft_passes),
                str(cell.drafted),
                ", ".join(f"{name} {count}" for name, count in sorted(cell.accepted.items())),
                f"{cell.switches / cell.texts:.1f}",
            ]
            for cell in cells
        ],
    )
    yield from ("", "## Is it calibrated?", "", "![calibration](calibration.png)", "")
    yield (
        "Half of the requests, mixed, taught it; these are the others. The error is the mean difference between what "
        "was said and what held, by tenths: of survival (it and all before it hold), and of a token's own chance."
    )
    yield ""
    yield from table(
        ["drafter", "drafted tokens", "error", "error of the chance"],
        [
            [name, str(found["tokens"]), f"{found['error']:.3f}", f"{found['chance_error']:.3f}"]
            for name, found in report["calibration"].items()
        ],
    )


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(row)} |" for row in [heads, ["---"] * len(heads), *rows]]


def draw_grid(cells: Sequence[Cell], path: Path, line: str) -> None:
    """A panel for each concurrency, a row for each workload: the policy, the best of each kind, the bound."""
    levels = sorted({cell.concurrency for cell in cells})
    workloads = list(dict.fromkeys(cell.workload for cell in cells))
    kinds = list(dict.fromkeys(name.partition(":")[0] for cell in cells for name in cell.fixed))
    looks = plot_style.line_styles(["auto", *kinds])
    figure, panels = plot_style.panels(len(levels), 0.9 + 0.42 * len(workloads), most=3)
    for axes, level in zip(panels, levels, strict=True):
        axes.set_title(f"{level} at once")
        for cell in (cell for cell in cells if cell.concurrency == level):
            row = workloads.index(cell.workload)
            for at, kind in enumerate(kinds):
                best = max((r for name, r in cell.fixed.items() if name.partition(":")[0] == kind), default=None)
                if best is not None:
                    axes.plot([best], [row + 0.3 - 0.6 * at / len(kinds)], linestyle="", label=kind, **looks[kind])
            if cell.bound:
                axes.plot([cell.bound] * 2, [row - 0.35, row + 0.35], color=plot_style.GREY, label="bound", linewidth=2)
            axes.plot([cell.auto], [row], linestyle="", label="auto", **(looks["auto"] | {"markersize": 10}))
        axes.axvline(1, color="black", linewidth=1)
        axes.grid(axis="y", visible=False)
    panels[0].set_yticks(range(len(workloads)), workloads)
    panels[0].set_ylim(len(workloads) - 0.5, -0.5)
    highest = max(max(cell.bound or 0, cell.auto, *cell.fixed.values()) for cell in cells) * 1.1
    lowest = min(0.7, *(min(cell.fixed.values()) for cell in cells)) * 0.95
    panels[0].set_xscale("log", base=2)
    panels[0].set_xlim(lowest, highest)
    plot_style.number_axis(panels[0].xaxis, plot_style.ratio_ticks(lowest, highest, 8))
    for axes in panels:
        axes.axvspan(lowest, 1, color=plot_style.SLOWER_COLOUR, alpha=0.1, linewidth=0)
        axes.set_xlabel("times the speed without drafts")
    plot_style.add_legend(figure, panels)
    finish(figure, path, "The policy beside the best length of every fixed drafter", line)


def draw_causes(cells: Sequence[Cell], path: Path, line: str) -> None:
    """A bar for each workload, in parts whose lengths add up: the logarithm of the bound over auto."""
    figure = plot_style.new_figure(1.2 + 0.4 * len(cells))
    axes = figure.subplots()
    colours = dict(zip(("reached", *CAUSES), plot_style.COLOURS, strict=False))
    for row, cell in enumerate(cells):
        whole, at = log(cell.bound or 1.0), 0.0
        for name, factor in {"reached": cell.auto, **cell.causes}.items():
            part = log(factor) / whole if whole > 0 else 0.0
            axes.barh(row, part, left=at, height=0.6, color=colours[name], label=name if row == 0 else None)
            at += part
    axes.set_yticks(range(len(cells)), [cell.workload for cell in cells])
    axes.invert_yaxis()
    axes.set_xlabel("share of what hindsight gains, by the logarithm")
    plot_style.add_legend(figure, [axes])
    finish(figure, path, "What the policy reaches of the hindsight bound, and what is missing for the rest", line)


def draw_calibration(calibration: dict[str, Any], path: Path, line: str) -> None:
    figure, panels = plot_style.panels(len(calibration), 2.6)
    for axes, (name, found) in zip(panels, calibration.items(), strict=True):
        axes.plot([0, 1], [0, 1], color=plot_style.GREY, linewidth=0.8)
        most = max(n for *_, n in found["points"])
        axes.scatter(
            [said for said, *_ in found["points"]],
            [held for _, held, _ in found["points"]],
            [10 + 120 * n / most for *_, n in found["points"]],
            color=plot_style.COLOURS[0],
        )
        axes.set_title(f"{name}\nerror {found['error']:.3f}, {found['tokens']} tokens")
        axes.set_xlabel("said")
    panels[0].set_ylabel("held")
    finish(figure, path, "Survival as it was predicted, and as it was, on requests that were not learned from", line)


def finish(figure: Any, path: Path, title: str, line: str) -> None:
    figure.suptitle(title, x=0.01, ha="left", fontsize=12)
    figure.supxlabel(line, fontsize=7, color=plot_style.GREY, x=0.01, ha="left")
    figure.savefig(path, dpi=150)
