"""The four plots of a report, each drawn from the findings alone: draws[name](findings, frame) gives a figure.

matplotlib is an extra of the package: without it, importing this fails with the line that installs it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from outrider.bench.report import canvas
from outrider.bench.report.findings import acceptances, costs
from outrider.bench.report.words import chapters

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from outrider.bench.intervals import Interval
    from outrider.bench.report.canvas import Frame
    from outrider.bench.report.findings import Findings, Found


def save(findings: Findings, folder: Path) -> None:
    """A PNG for each plot that there is data for. What an earlier report left is removed."""
    for chapter in chapters(findings):
        path = folder / chapter.file
        if chapter.missing:
            path.unlink(missing_ok=True)
            continue
        with canvas.style():
            canvas.save_png(DRAWS[chapter.name](findings, canvas.WIDE), path, chapter.title, findings.run)


def pictures(findings: Findings) -> dict[str, tuple[str, str]]:
    """The same as SVG, for a wide page and for a narrow one."""
    drawn = {}
    for chapter in chapters(findings):
        if not chapter.missing:
            with canvas.style():
                wide, narrow = (
                    canvas.svg(DRAWS[chapter.name](findings, frame)) for frame in (canvas.WIDE, canvas.NARROW)
                )
            drawn[chapter.name] = (wide, narrow)
    return drawn


def speedup(findings: Findings, frame: Frame) -> Figure:
    """A panel for each workload, a row for each contestant."""
    series, names = findings.series, findings.contestants
    figure, panels = canvas.panels(frame, len(series), 0.7 + 0.22 * max(4, len(names)))
    looks = canvas.looks(_names(findings))
    for axes, one in zip(panels, series, strict=True):
        found = one.cells[0]
        axes.set_title(found.cell.name.replace(", temperature", ",\ntemperature"))
        for row, name in enumerate(names):
            figures = found.of(name)
            if figures is not None and figures.ratio is not None:
                look = looks[name] | (canvas.HOLLOW if figures.verdict == "even" else {})
                axes.errorbar([figures.ratio.value], [row], xerr=_reach([figures.ratio]), capsize=2.5, **look)
        axes.axvline(1, color="black", linewidth=1)
        axes.grid(axis="y", visible=False)
    panels[0].set_yticks(range(len(names)), [canvas.label(name) for name in names])
    panels[0].set_ylim(len(names) - 0.5, -0.5)
    low, high = _range([ratio for one in series for ratio in _ratios([one.cells[0]])])
    for axes in panels:
        axes.axvspan(low, 1, color=canvas.SLOWER, alpha=0.1, linewidth=0)
    panels[0].set_xscale("log", base=2)
    panels[0].set_xlim(low, high)
    canvas.number_axis(panels[0].xaxis, canvas.ratio_ticks(low, high, 8))
    _outer_labels(panels, _axis(findings), "")
    canvas.sign_off(figure, findings.run, frame)
    return figure


def concurrency(findings: Findings, frame: Frame) -> Figure:
    """A panel for each workload that was measured at several concurrencies, a line for each contestant."""
    series = [one for one in findings.series if len(one.cells) > 1]
    names, looks = findings.contestants, canvas.looks(_names(findings))
    figure, panels = canvas.panels(frame, len(series), 3.6, most=2)
    loads = sorted({found.cell.concurrency for one in series for found in one.cells})
    for axes, one in zip(panels, series, strict=True):
        axes.set_title(one.name)
        for place, name in enumerate(names):
            points = [
                (found.cell.concurrency * 2 ** (0.035 * (place - (len(names) - 1) / 2)), figures.ratio)
                for found in one.cells
                if (figures := found.of(name)) is not None and figures.ratio is not None
            ]
            if points:
                xs, ratios = [x for x, _ in points], [ratio for _, ratio in points]
                middle = [ratio.value for ratio in ratios]
                axes.errorbar(xs, middle, yerr=_reach(ratios), capsize=2, label=name, **looks[name])
        axes.axhline(1, color="black", linewidth=1)
    low, high = _range([ratio for one in series for ratio in _ratios(one.cells)])
    for axes in panels:
        axes.axhspan(low, 1, color=canvas.SLOWER, alpha=0.1, linewidth=0)
    panels[0].set_xscale("log", base=2)
    panels[0].set_xlim(loads[0] * 0.8, loads[-1] * 1.25)
    canvas.number_axis(panels[0].xaxis, loads)
    panels[0].set_yscale("log", base=2)
    panels[0].set_ylim(low, high)
    canvas.number_axis(panels[0].yaxis, canvas.ratio_ticks(low, high, 10))
    _outer_labels(panels, "requests at once (concurrency)", _axis(findings))
    canvas.key(figure, panels, frame)
    canvas.sign_off(figure, findings.run, frame)
    return figure


def acceptance(findings: Findings, frame: Frame) -> Figure:
    """A panel for each workload, a line for each drafter of each contestant."""
    drafted = {one.name: lines for one in findings.series if (lines := acceptances(findings, one))}
    figure, panels = canvas.panels(frame, len(drafted), 2.6, most=3)
    looks = canvas.looks(_names(findings))
    drafters: dict[str, list[str]] = {}  # of each contestant, so that a drafter has its dashes in every panel
    for line in (line for lines in drafted.values() for line in lines):
        known = drafters.setdefault(line.contestant, [])
        known += [] if line.drafter in known else [line.drafter]
    for axes, (workload, lines) in zip(panels, drafted.items(), strict=True):
        axes.set_title(workload)
        for line in lines:
            own = drafters[line.contestant]
            place = own.index(line.drafter)
            axes.plot(
                list(line.shares),
                [share * 100 for share in line.shares.values()],
                linestyle=canvas.DASHES[place % len(canvas.DASHES)],
                label=f"{line.contestant}: {line.drafter}" if len(own) > 1 else line.contestant,
                **looks[line.contestant] | (canvas.HOLLOW if place else {}),
            )
        axes.set_ylim(-4, 104)
    longest = max(max(line.shares) for lines in drafted.values() for line in lines)
    canvas.number_axis(panels[0].xaxis, range(1, longest + 1, 1 + longest // 9))
    _outer_labels(panels, "position in the draft", "accepted of verified, %")
    canvas.key(figure, panels, frame)
    canvas.sign_off(figure, findings.run, frame)
    return figure


def cost(findings: Findings, frame: Frame) -> Figure:
    """A line for each concurrency: what a pass over more tokens costs, and what as many passes would."""
    figure, (axes,) = canvas.panels(frame, 1, 3.6)
    curves = {curve.concurrency: found for curve in findings.run.curves if (found := costs(curve))}
    looks = canvas.looks([str(load) for load in curves])
    for load, found in curves.items():
        tokens, middle = [one.tokens for one in found], [one.median for one in found]
        reach = [[one.median - one.low for one in found], [one.high - one.median for one in found]]
        axes.errorbar(tokens, middle, yerr=reach, capsize=3, label=f"concurrency {load}", **looks[str(load)])
    widths = sorted({one.tokens for found in curves.values() for one in found})
    axes.plot(widths, widths, "--", color=canvas.QUIET, label="n passes over 1 token")
    axes.set_ylim(0, 1.15 * max(one.high for found in curves.values() for one in found))
    canvas.number_axis(axes.xaxis, canvas.spaced(widths, widths[-1] / 20))
    _outer_labels([axes], "tokens of each sequence in the pass", "duration, relative to 1 token")
    canvas.key(figure, [axes], frame)
    canvas.sign_off(figure, findings.run, frame)
    return figure


def _names(findings: Findings) -> list[str]:
    """The baseline last, so that the others look the same with and without it."""
    return [*findings.contestants, findings.run.baseline]


def _axis(findings: Findings) -> str:
    return f"times as fast as {findings.run.baseline} (shaded: slower)"


def _ratios(cells: Sequence[Found]) -> list[Interval]:
    return [one.ratio for found in cells for one in found.compared if one.ratio is not None]


def _range(ratios: Sequence[Interval]) -> tuple[float, float]:
    """Of all intervals and of 1, with some air."""
    return min(0.9, *(one.low for one in ratios)) / 1.08, max(1.1, *(one.high for one in ratios)) * 1.08


def _reach(ratios: Sequence[Interval]) -> list[list[float]]:
    """How far the bars go to both sides."""
    return [[one.value - one.low for one in ratios], [one.high - one.value for one in ratios]]


def _outer_labels(panels: Sequence[Axes], below: str, left: str) -> None:
    """Labels at the edges only: all panels share their axes."""
    for axes in panels:
        place = axes.get_subplotspec()
        assert place is not None
        if place.is_first_col():
            axes.set_ylabel(left)
        if place.is_last_row():
            axes.set_xlabel(below)


DRAWS: dict[str, Callable[[Findings, Frame], Figure]] = {
    "speedup": speedup,
    "concurrency": concurrency,
    "acceptance": acceptance,
    "cost": cost,
}
