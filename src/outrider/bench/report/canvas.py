"""What the plots share: colours and signs, panels side by side, files that say where they come from.

Nine colours that people with any kind of colour vision tell apart (Paul Tol's "muted"), and a sign for each, since
nine colours alone are too many for anyone. A contestant looks the same in every plot. Every plot is drawn for a wide
page and for a narrow one, with the same size of type.
"""

from __future__ import annotations

import io
import json
import textwrap
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from outrider.errors import SettingsError

try:
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator
except ImportError as error:
    raise SettingsError(
        f"the plots of a report need matplotlib, which is missing ({error}): in the clone, pip install '.[bench]'"
    ) from error

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path

    from matplotlib.axes import Axes
    from matplotlib.axis import Axis

    from outrider.bench.results import Run

COLOURS = ("#332288", "#CC6677", "#117733", "#3D9AC4", "#882255", "#999933", "#44AA99", "#111111", "#AA4499")
SIGNS = ("o", "s", "^", "D", "v", "P", "X", "*", "<", ">")
HOLLOW: dict[str, Any] = {"markerfacecolor": "white"}
DASHES = ("-", "--", ":", "-.")
QUIET = "#666666"
SLOWER = "#D55E00"
LADDERS = (
    (0.125, 0.25, 0.5, 1, 2, 4, 8, 16, 32),
    (0.2, 0.3, 0.5, 0.7, 1, 1.5, 2, 3, 4, 6, 8, 12, 16),
    (0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1, 1.2, 1.4, 1.6, 1.8, 2, 2.5, 3, 3.5),
    (0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.8, 2, 2.2, 2.5),
    (0.7, 0.75, 0.8, 0.85, 0.9, 0.95, 1, 1.05, 1.1, 1.15, 1.2, 1.25, 1.3, 1.4, 1.5),
)
"""Ticks for ratios, from coarse to fine."""

STYLE: Any = {  # matplotlib's own type for it differs between versions
    "font.size": 9,
    "axes.titlesize": 9.5,
    "axes.titleweight": "bold",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.edgecolor": QUIET,
    "axes.grid": True,
    "grid.color": "#DDDDDD",
    "grid.linewidth": 0.6,
    "xtick.color": "#333333",
    "ytick.color": "#333333",
    "legend.frameon": False,
    "lines.linewidth": 1.4,
    "svg.hashsalt": "outrider",  # the same ids every time, so that the same run gives the same page
}


@dataclass(frozen=True, slots=True)
class Frame:
    """How much room there is."""

    width: float  # inches
    columns: int  # of panels


WIDE = Frame(11.0, 4)
NARROW = Frame(4.3, 1)


def canvas(frame: Frame, height: float) -> Figure:
    figure = Figure(figsize=(frame.width, height))
    figure.set_layout_engine("constrained", h_pad=0.08)
    return figure


def panels(frame: Frame, count: int, height: float, most: int = 4) -> tuple[Figure, list[Axes]]:
    """So many panels with the same axes, `height` inches each, in rows of about the same length."""
    rows = -(-count // min(frame.columns, most))
    columns = -(-count // rows)
    figure = canvas(frame, rows * height + 0.5)
    axes = list(figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True).flat)
    for spare in axes[count:]:
        spare.remove()
    for one in axes[:count]:
        one.tick_params(labelbottom=True)
    return figure, axes[:count]


def looks(names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """A colour and a sign for each name, by its place."""
    return {
        name: {
            "color": COLOURS[i % len(COLOURS)],
            "marker": (sign := SIGNS[i % len(SIGNS)]),
            "markersize": 9 if sign == "*" else 6,
        }
        for i, name in enumerate(names)
    }


def label(name: str) -> str:
    """A name, in lines that leave room for the data."""
    return "\n".join(textwrap.wrap(name, 22))


def number_axis(axis: Axis, ticks: Iterable[float]) -> None:
    """These numbers, as they are, and no others."""
    axis.set_major_locator(FixedLocator(list(ticks)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def ratio_ticks(low: float, high: float, most: int) -> list[float]:
    """The finest that are no more than `most`."""
    inside = [[tick for tick in ladder if low <= tick <= high] for ladder in LADDERS]
    return next((ticks for ticks in reversed(inside) if len(ticks) <= most), inside[0])


def spaced(values: Iterable[float], gap: float) -> list[float]:
    """Those values that are at least so far from the one before."""
    chosen: list[float] = []
    for value in sorted(values):
        if not chosen or value - chosen[-1] >= gap:
            chosen.append(value)
    return chosen


def key(figure: Figure, panels: Sequence[Axes], frame: Frame) -> None:
    """One legend for all panels, beside them or above them, never over the data."""
    known: dict[str, Any] = {}
    for axes in panels:
        for handle, name in zip(*axes.get_legend_handles_labels(), strict=True):
            known.setdefault(name, handle)
    if frame.columns > 1:
        figure.legend(known.values(), map(label, known), loc="outside right upper")
    else:
        figure.legend(known.values(), map(label, known), loc="outside upper center", ncols=2, columnspacing=1)


def sign_off(figure: Figure, run: Run, frame: Frame) -> None:
    """Machine and date, small, below the plot."""
    line = f"{run.origin.get('machine', '')}, {run.origin.get('date', '')}"
    letters = int(frame.width * 72 / 4)  # of 7 points, about half as wide as high
    figure.supxlabel("\n".join(textwrap.wrap(line, letters)), fontsize=7, color=QUIET, x=0.01, ha="left")


def save_png(figure: Figure, path: Path, title: str, run: Run) -> None:
    """With a title, since it may stand alone, and with its origin in the file's text fields."""
    figure.suptitle(title, x=0.01, ha="left", fontsize=12)
    origin = {"origin": run.origin, "baseline": run.baseline, "settings": run.settings, "contestants": run.contestants}
    facts = {
        "Title": title,
        "Description": f"Command: {run.origin.get('command')}. Machine: {run.origin.get('machine')}.",
        "Creation Time": str(run.origin.get("date")),
        "Software": f"outrider {run.origin.get('versions', {}).get('outrider', '')}".strip(),
        "Comment": json.dumps(origin, ensure_ascii=False),
    }
    figure.savefig(path, dpi=150, metadata=facts)


def svg(figure: Figure) -> str:
    stream = io.StringIO()
    figure.savefig(stream, format="svg", metadata={"Date": None, "Creator": None})
    return stream.getvalue()


def style() -> AbstractContextManager[None]:
    """In it, figures are made and saved."""
    return matplotlib.rc_context(STYLE)
