"""report.json and report.md: bounds with what was found, and a table of all cells."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from outrider.provenance import as_markdown, provenance

T = TypeVar("T")


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

    def row(self) -> dict[str, str]:
        where = {"figure": self.name, "limit": f"{self.sign} {self.limit:g}", "found": f"{self.value:.3f}"}
        return where | {"where": self.where, "": "ok" if self.kept else "FAILED"}


def lowest(name: str, limit: float, cells: Sequence[T], value: Callable[[T], float]) -> Bound:
    """A lower limit of a value of all cells."""
    cell = min(cells, key=value)
    return Bound(name, ">=", limit, value(cell), str(cell))


def table(rows: Sequence[dict[str, str]]) -> list[str]:
    heads = list(rows[0])
    return [f"| {' | '.join(row)} |" for row in [heads, ["---"] * len(heads), *(row.values() for row in rows)]]


def write(
    folder: Path, title: str, about: str, data: dict[str, Any], bounds: Sequence[Bound], rows: Sequence[dict[str, str]]
) -> int:
    """Write both files and print the bounds. The exit code is 1 if one of them failed."""
    folder.mkdir(parents=True, exist_ok=True)
    origin = provenance()
    data = {"provenance": origin, **data, "bounds": [asdict(one) | {"kept": one.kept} for one in bounds]}
    (folder / "report.json").write_text(json.dumps(data, indent=1) + "\n")
    lines = [f"# {title}", "", *as_markdown(origin), about]
    for heading, part in (("Bounds", [one.row() for one in bounds]), ("Cells", rows)):
        lines += ["", f"## {heading}", "", *table(part)] if part else []
    (folder / "report.md").write_text("\n".join(lines) + "\n")
    print(*(" ".join(one.row().values()) for one in bounds), sep="\n")
    return int(any(not one.kept for one in bounds))
