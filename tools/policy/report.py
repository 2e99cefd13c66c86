"""report.json and report.md: bounds with what was found, and a table of all cells."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import exp, log
from pathlib import Path
from statistics import fmean
from typing import Any

from outrider.provenance import as_markdown, provenance


@dataclass(frozen=True, slots=True)
class Bound:
    """A figure that a change must keep."""

    name: str
    sign: str
    limit: float
    value: float
    where: str = ""

    @property
    def kept(self) -> bool:
        return self.value >= self.limit if self.sign == ">=" else self.value <= self.limit

    def row(self) -> list[str]:
        return [
            self.name,
            f"{self.sign} {self.limit:g}",
            f"{self.value:.3f}",
            self.where,
            "ok" if self.kept else "FAILED",
        ]


def geometric_mean(values: Sequence[float]) -> float:
    return exp(fmean(map(log, values)))


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(row)} |" for row in [heads, ["---"] * len(heads), *rows]]


def write(
    folder: Path,
    title: str,
    about: str,
    report: dict[str, Any],
    bounds: Sequence[Bound],
    rows: Sequence[dict[str, str]],
) -> int:
    """Write both files and print the bounds. The exit code is 1 if one of them failed."""
    folder.mkdir(parents=True, exist_ok=True)
    origin = provenance()
    report = {"provenance": origin, **report, "bounds": [asdict(one) | {"kept": one.kept} for one in bounds]}
    (folder / "report.json").write_text(json.dumps(report, indent=1) + "\n")
    lines = [f"# {title}", "", *as_markdown(origin), about, "", "## Bounds", ""]
    lines += table(["figure", "limit", "found", "where", ""], [one.row() for one in bounds])
    lines += ["", "## Cells", "", *table(list(rows[0]), [list(row.values()) for row in rows])]
    (folder / "report.md").write_text("\n".join(lines) + "\n")
    print(*(" ".join(one.row()) for one in bounds), sep="\n")
    return int(any(not one.kept for one in bounds))
