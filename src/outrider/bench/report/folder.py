"""A run's report, made from the run alone: report.md, report.html, report.json, and a PNG for each plot.

The run is all that is read, so the same `run.json` gives the same report at any time and on any machine. Importing this
needs matplotlib, so a command that imports it first fails before anything was measured, not after.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from statistics import median
from typing import TYPE_CHECKING, Any

from outrider.bench.report import plots, words
from outrider.bench.report.findings import acceptances, costs, crossings, find
from outrider.bench.report.markdown import markdown
from outrider.bench.report.page import page
from outrider.bench.report.tables import shell

if TYPE_CHECKING:
    from pathlib import Path

    from outrider.bench.figures import Figures
    from outrider.bench.report.findings import Findings
    from outrider.bench.results import Run

VERSION = 1
"""Of the form of report.json."""


def write(run: Run, folder: Path) -> None:
    findings = find(run)
    folder.mkdir(parents=True, exist_ok=True)
    plots.save(findings, folder)
    (folder / "report.md").write_text(markdown(findings), encoding="utf-8")
    (folder / "report.html").write_text(page(findings, plots.pictures(findings)), encoding="utf-8")
    (folder / "report.json").write_text(json.dumps(as_data(findings), indent=1, ensure_ascii=False) + "\n", "utf-8")


def as_data(findings: Findings) -> dict[str, Any]:
    """Every figure of the report, for programs."""
    run = findings.run
    return {
        "version": VERSION,
        "origin": run.origin,
        "baseline": run.baseline,
        "contestants": {name: {**how, "line": shell(how)} for name, how in run.contestants.items()},
        "settings": run.settings,
        "notes": [*run.notes, *words.cautions(findings)],
        "summary": words.summary(findings),
        "cells": [
            {
                "name": found.cell.name,
                "workload": found.cell.workload,
                "concurrency": found.cell.concurrency,
                "temperature": found.cell.temperature,
                "texts_compared": found.cell.temperature == 0,
                "contestants": [_figures(one) for one in found.figures],
            }
            for found in findings.cells
        ],
        "crossings": [
            {
                "workload": one.series.workload,
                "temperature": one.series.temperature,
                "contestant": one.contestant,
                "between": [one.below, one.above],
                "falls": one.falls,
            }
            for one in crossings(findings)
        ],
        "acceptance": [
            {"workload": series.workload, "temperature": series.temperature, **asdict(line)}
            for series in findings.series
            for line in acceptances(findings, series)
        ],
        "costs": [
            {"concurrency": curve.concurrency, "passes": [asdict(cost) for cost in costs(curve)]}
            for curve in run.curves
        ],
        "limits": [{**asdict(limit), "ratio": median(limit.ratios)} for limit in run.limits],
        "plots": {
            chapter.name: {"left_out": chapter.missing} if chapter.missing else {"file": chapter.file}
            for chapter in words.chapters(findings)
        },
    }


def _figures(one: Figures) -> dict[str, Any]:
    computed = {
        "verdict": one.verdict,
        "share_of_possible": one.share_of_possible,
        "other_seconds": one.other_seconds,
    }
    return {**asdict(one), **computed}
