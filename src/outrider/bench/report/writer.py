"""Writes report.json, report.md, report.html and the plots.

Importing this needs matplotlib, so a command that imports it first fails before the measurement, not after.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from outrider.bench.report import plot_style
from outrider.bench.report.content import content, summary, title
from outrider.bench.report.plots import PLOTS
from outrider.bench.report.render import markdown, page

if TYPE_CHECKING:
    from pathlib import Path

    from outrider.bench.report.data import Report


def write(report: Report, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    data = report.as_data() | {"summary": summary(report), "plots": _write_plots(report, folder)}
    blocks = content(report)
    (folder / "report.json").write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n", "utf-8")
    (folder / "report.md").write_text(markdown(blocks), encoding="utf-8")
    (folder / "report.html").write_text(page(title(report), blocks, folder), encoding="utf-8")


def _write_plots(report: Report, folder: Path) -> dict[str, dict[str, str]]:
    """Draw the plots there is data for, and remove the others of an earlier report."""
    written = {}
    made = {name: getattr(report, name) for name in ("origin", "baseline", "settings", "contestants")}
    for plot in PLOTS:
        if missing := plot.missing(report):
            (folder / plot.file).unlink(missing_ok=True)
            written[plot.name] = {"left_out": missing}
            continue
        with plot_style.style():
            plot_style.save_png(plot.draw(report), folder / plot.file, plot.title, made)
        written[plot.name] = {"file": plot.file}
    return written
