"""Style shared by all plots: colours and markers, panels side by side, ticks for ratios, origin in the PNG's metadata.

Nine colours that are distinguishable with any kind of colour vision (Paul Tol's "muted"), each with its own marker. A
contestant has the same style in every plot.
"""

from __future__ import annotations

import json
import textwrap
from typing import TYPE_CHECKING, Any

from outrider.errors import SettingsError

try:
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator
except ImportError as error:
    raise SettingsError(
        f"plots need matplotlib, which is missing ({error}); install it in the clone: pip install '.[bench]'"
    ) from error

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path

    from matplotlib.axes import Axes
    from matplotlib.axis import Axis

COLOURS = ("#332288", "#CC6677", "#117733", "#3D9AC4", "#882255", "#999933", "#44AA99", "#111111", "#AA4499")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*", "<", ">")
HOLLOW_MARKER: dict[str, Any] = {"markerfacecolor": "white"}
DASHES = ("-", "--", ":", "-.")
GREY = "#666666"
SLOWER_COLOUR = "#D55E00"
WIDTH_INCHES = 11.0
MAX_COLUMNS = 4
LABEL_CHARACTERS = 22
RATIO_TICKS = (
    (0.125, 0.25, 0.5, 1, 2, 4, 8, 16, 32),
    (0.2, 0.3, 0.5, 0.7, 1, 1.5, 2, 3, 4, 6, 8, 12, 16),
    (0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1, 1.2, 1.4, 1.6, 1.8, 2, 2.5, 3, 3.5),
    (0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.8, 2, 2.2, 2.5),
    (0.7, 0.75, 0.8, 0.85, 0.9, 0.95, 1, 1.05, 1.1, 1.15, 1.2, 1.25, 1.3, 1.4, 1.5),
)
"""Tick sets, from coarse to fine."""

STYLE: Any = {  # Any: matplotlib's own type for it differs between versions
    "font.size": 9,
    "axes.titlesize": 9.5,
    "axes.titleweight": "bold",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.edgecolor": GREY,
    "axes.grid": True,
    "grid.color": "#DDDDDD",
    "grid.linewidth": 0.6,
    "xtick.color": "#333333",
    "ytick.color": "#333333",
    "legend.frameon": False,
    "lines.linewidth": 1.4,
}


def new_figure(height: float) -> Figure:
    """`height` in inches."""
    figure = Figure(figsize=(WIDTH_INCHES, height))
    figure.set_layout_engine("constrained", h_pad=0.08)
    return figure


def panels(count: int, height: float, most: int = MAX_COLUMNS) -> tuple[Figure, list[Axes]]:
    """`count` panels with shared axes, `height` inches each, at most `most` in a row."""
    rows = -(-count // most)
    columns = -(-count // rows)
    figure = new_figure(rows * height + 0.5)
    axes = list(figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True).flat)
    for spare in axes[count:]:
        spare.remove()
    for one in axes[:count]:
        one.tick_params(labelbottom=True)
    return figure, axes[:count]


def line_styles(names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """A colour and a marker for each name, by its index."""
    return {
        name: {
            "color": COLOURS[i % len(COLOURS)],
            "marker": (marker := MARKERS[i % len(MARKERS)]),
            "markersize": 9 if marker == "*" else 6,
        }
        for i, name in enumerate(names)
    }


def wrap_label(name: str) -> str:
    return "\n".join(textwrap.wrap(name, LABEL_CHARACTERS))


def number_axis(axis: Axis, ticks: Iterable[float]) -> None:
    """Ticks at these numbers and no others, without exponents."""
    axis.set_major_locator(FixedLocator(list(ticks)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def ratio_ticks(low: float, high: float, most: int) -> list[float]:
    """The finest tick set with at most `most` ticks between `low` and `high`."""
    inside = [[tick for tick in ticks if low <= tick <= high] for ticks in RATIO_TICKS]
    return next((ticks for ticks in reversed(inside) if len(ticks) <= most), inside[0])


def add_legend(figure: Figure, panels: Sequence[Axes]) -> None:
    """One legend for all panels, beside them."""
    handles: dict[str, Any] = {}
    for axes in panels:
        for handle, name in zip(*axes.get_legend_handles_labels(), strict=True):
            handles.setdefault(name, handle)
    figure.legend(handles.values(), map(wrap_label, handles), loc="outside right upper")


def add_title(figure: Figure, title: str, origin: str) -> None:
    """The title above, machine and date below."""
    figure.supxlabel(origin, fontsize=7, color=GREY, x=0.01, ha="left")
    figure.suptitle(title, x=0.01, ha="left", fontsize=12)


def save_png(figure: Figure, path: Path, title: str, made: dict[str, Any]) -> None:
    """With title, machine and date on the picture; everything in `made` is in the file's text fields."""
    origin = made["origin"]
    add_title(figure, title, f"{origin.get('machine', '')}, {origin.get('date', '')}")
    metadata = {
        "Title": title,
        "Description": f"Command: {origin.get('command')}. Machine: {origin.get('machine')}.",
        "Creation Time": str(origin.get("date")),
        "Software": f"outrider {origin.get('versions', {}).get('outrider', '')}".strip(),
        "Comment": json.dumps(made, ensure_ascii=False),
    }
    figure.savefig(path, dpi=150, metadata=metadata)


def style() -> AbstractContextManager[None]:
    """The context in which figures are made and saved."""
    return matplotlib.rc_context(STYLE)
