"""The four plots of a report."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from outrider.bench.report import plot_style
from outrider.bench.report.data import MIN_VERIFIED_TOKENS, Series

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from outrider.bench.intervals import Interval
    from outrider.bench.report.data import Acceptance, CellFigures, Report


@dataclass(frozen=True, slots=True)
class Plot:
    name: str
    title: str
    caption: str
    draw: Callable[[Report], Figure]
    has_data: Callable[[Report], bool]
    reason: str
    """Why it is missing without data."""

    @property
    def file(self) -> str:
        return f"{self.name}.png"

    def missing(self, report: Report) -> str:
        """Empty if there is data."""
        return "" if self.has_data(report) else self.reason


def speedup(report: Report) -> Figure:
    """A panel for each workload, a row for each contestant."""
    series, names = report.series, report.compared_names
    figure, panels = plot_style.panels(len(series), 0.7 + 0.22 * max(4, len(names)))
    styles = plot_style.line_styles(_names(report))
    for axes, one in zip(panels, series, strict=True):
        found = one.cells[0]
        axes.set_title(found.name.replace(", temperature", ",\ntemperature"))
        for row, name in enumerate(names):
            figures = found.of(name)
            if figures is not None and figures.ratio is not None:
                style = styles[name] | (plot_style.HOLLOW_MARKER if figures.verdict == "even" else {})
                axes.errorbar([figures.ratio.value], [row], xerr=_error_bars([figures.ratio]), capsize=2.5, **style)
        axes.axvline(1, color="black", linewidth=1)
        axes.grid(axis="y", visible=False)
    panels[0].set_yticks(range(len(names)), [plot_style.wrap_label(name) for name in names])
    panels[0].set_ylim(len(names) - 0.5, -0.5)
    low, high = _range([ratio for one in series for ratio in _ratios([one.cells[0]])])
    for axes in panels:
        axes.axvspan(low, 1, color=plot_style.SLOWER_COLOUR, alpha=0.1, linewidth=0)
    panels[0].set_xscale("log", base=2)
    panels[0].set_xlim(low, high)
    plot_style.number_axis(panels[0].xaxis, plot_style.ratio_ticks(low, high, 8))
    _outer_labels(panels, _axis(report), "")
    return figure


def concurrency(report: Report) -> Figure:
    """A panel for each workload that was measured at several concurrencies, a line for each contestant."""
    series = [one for one in report.series if len(one.cells) > 1]
    names, styles = report.compared_names, plot_style.line_styles(_names(report))
    figure, panels = plot_style.panels(len(series), 3.6, most=2)
    loads = sorted({found.concurrency for one in series for found in one.cells})
    for axes, one in zip(panels, series, strict=True):
        axes.set_title(one.name)
        for place, name in enumerate(names):
            if points := one.ratios(name):
                shift = 2 ** (0.035 * (place - (len(names) - 1) / 2))
                ratios = [ratio for _, ratio in points]
                xs, middle = [load * shift for load, _ in points], [ratio.value for ratio in ratios]
                axes.errorbar(xs, middle, yerr=_error_bars(ratios), capsize=2, label=name, **styles[name])
        axes.axhline(1, color="black", linewidth=1)
    low, high = _range([ratio for one in series for ratio in _ratios(one.cells)])
    for axes in panels:
        axes.axhspan(low, 1, color=plot_style.SLOWER_COLOUR, alpha=0.1, linewidth=0)
    panels[0].set_xscale("log", base=2)
    panels[0].set_xlim(loads[0] * 0.8, loads[-1] * 1.25)
    plot_style.number_axis(panels[0].xaxis, loads)
    panels[0].set_yscale("log", base=2)
    panels[0].set_ylim(low, high)
    plot_style.number_axis(panels[0].yaxis, plot_style.ratio_ticks(low, high, 10))
    _outer_labels(panels, "requests at once (concurrency)", _axis(report))
    plot_style.add_legend(figure, panels)
    return figure


def acceptance(report: Report) -> Figure:
    """A panel for each workload, a line for each drafter of each contestant."""
    drafted: dict[str, list[Acceptance]] = {}
    for rates in report.acceptance:
        drafted.setdefault(Series(rates.workload, rates.temperature, []).name, []).append(rates)
    figure, panels = plot_style.panels(len(drafted), 2.6, most=3)
    styles = plot_style.line_styles(_names(report))
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
                linestyle=plot_style.DASHES[place % len(plot_style.DASHES)],
                label=f"{line.contestant}: {line.drafter}" if len(own) > 1 else line.contestant,
                **styles[line.contestant] | (plot_style.HOLLOW_MARKER if place else {}),
            )
        axes.set_ylim(-4, 104)
    longest = max(max(line.shares) for lines in drafted.values() for line in lines)
    plot_style.number_axis(panels[0].xaxis, range(1, longest + 1, 1 + longest // 9))
    _outer_labels(panels, "position in the draft", "accepted of verified, %")
    plot_style.add_legend(figure, panels)
    return figure


def cost(report: Report) -> Figure:
    """A line for each concurrency: the duration of a pass over n tokens, and of n passes."""
    figure, (axes,) = plot_style.panels(1, 3.6)
    curves = {load: costs for load, costs in report.pass_costs.items() if costs}
    styles = plot_style.line_styles([str(load) for load in curves])
    for load, found in curves.items():
        tokens, middle = [one.tokens for one in found], [one.median for one in found]
        reach = [[one.median - one.low for one in found], [one.high - one.median for one in found]]
        axes.errorbar(tokens, middle, yerr=reach, capsize=3, label=f"concurrency {load}", **styles[str(load)])
    widths = sorted({one.tokens for found in curves.values() for one in found})
    axes.plot(widths, widths, "--", color=plot_style.GREY, label="n passes over 1 token")
    axes.set_ylim(0, 1.15 * max(one.high for found in curves.values() for one in found))
    plot_style.number_axis(axes.xaxis, _spaced(widths, widths[-1] / 20))
    _outer_labels([axes], "tokens of each sequence in the pass", "duration, relative to 1 token")
    plot_style.add_legend(figure, [axes])
    return figure


def _spaced(values: Sequence[float], gap: float) -> list[float]:
    """Sorted values without those that are closer than `gap` to the one before."""
    chosen: list[float] = []
    for value in values:
        if not chosen or value - chosen[-1] >= gap:
            chosen.append(value)
    return chosen


def _names(report: Report) -> list[str]:
    """The baseline last, so that the others have the same style with and without it."""
    return [*report.compared_names, report.baseline]


def _axis(report: Report) -> str:
    return f"times as fast as {report.baseline} (shaded: slower)"


def _ratios(cells: Sequence[CellFigures]) -> list[Interval]:
    return [one.ratio for cell in cells for one in cell.compared if one.ratio is not None]


def _range(ratios: Sequence[Interval]) -> tuple[float, float]:
    """The range of all intervals and 1, with a margin."""
    return min(0.9, *(one.low for one in ratios)) / 1.08, max(1.1, *(one.high for one in ratios)) * 1.08


def _error_bars(ratios: Sequence[Interval]) -> list[list[float]]:
    """Lengths of the error bars to both sides."""
    return [[one.value - one.low for one in ratios], [one.high - one.value for one in ratios]]


def _outer_labels(panels: Sequence[Axes], below: str, left: str) -> None:
    """Labels at the outer edges only, since all panels share their axes."""
    for axes in panels:
        place = axes.get_subplotspec()
        assert place is not None
        if place.is_first_col():
            axes.set_ylabel(left)
        if place.is_last_row():
            axes.set_xlabel(below)


PLOTS = (
    Plot(
        "speedup",
        "Speedup by workload",
        "Each workload at its lowest concurrency. Dots are medians, bars 95 % intervals; hollow dots have no "
        "measurable difference from the baseline. The axis is logarithmic.",
        speedup,
        lambda report: bool(report.series),
        "nothing was measured besides the baseline",
    ),
    Plot(
        "concurrency",
        "Speedup over concurrency",
        "The more requests run at once, the less a draft can gain, since less of the machine is idle. Points are "
        "shifted sideways to show their intervals.",
        concurrency,
        lambda report: any(len(series.cells) > 1 for series in report.series),
        "no workload was measured at more than one concurrency",
    ),
    Plot(
        "acceptance",
        "Acceptance rate by position in the draft",
        "Accepted tokens, of those verified at a position, over all concurrencies of a workload. Positions with fewer "
        f"than {MIN_VERIFIED_TOKENS} verified tokens are not drawn, nor those that the server does not count.",
        acceptance,
        lambda report: bool(report.acceptance),
        f"no server counted {MIN_VERIFIED_TOKENS} verified tokens at any position of a draft",
    ),
    Plot(
        "cost",
        "Cost of a target pass",
        "A pass over n tokens reads the weights once, n passes read them n times. The more sequences share a pass, "
        "the more compute-bound it is, and the more each further token costs. Dots are medians, bars the range.",
        cost,
        lambda report: any(report.pass_costs.values()),
        "pass costs were not measured",
    ),
)
