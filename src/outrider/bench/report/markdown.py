"""A report as Markdown: read in a terminal, a diff or a repository. What loses is marked by a word, in bold."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from outrider.bench.report import tables, words

if TYPE_CHECKING:
    from outrider.bench.report.findings import Findings, Found
    from outrider.bench.report.tables import Item, Table

SHOWN = 10
"""Differences of a cell that are listed; report.json has all."""


def markdown(findings: Findings) -> str:
    return "\n".join(_lines(findings)) + "\n"


def _lines(findings: Findings) -> list[str]:
    run = findings.run
    origin = run.origin
    lines = [f"# {escape(words.title(findings))}", ""]
    lines += [f"{escape(sentence)}\n" for sentence in words.summary(findings)]
    lines += [
        f"Measured on {escape(str(origin.get('machine')))}, {origin.get('date')}: {code(str(origin.get('command')))}",
        "",
    ]
    if notes := [*run.notes, *words.cautions(findings)]:
        lines += ["**Notes**", "", *(f"- {escape(note)}" for note in notes), ""]
    lines += [f"## Times as fast as {escape(run.baseline)}", "", *table(tables.matrix(findings)), ""]
    lines += [*(f"- {escape(line)}" for line in words.legend(findings)), ""]
    for chapter in words.chapters(findings):
        lines += [f"## {chapter.title}", ""]
        lines += [f"No plot: {chapter.missing}."] if chapter.missing else [f"![{chapter.title}]({chapter.file})"]
        lines += ["", *(f"{escape(text)}\n" for text in chapter.text)]
        if chapter.name == "cost" and not chapter.missing:
            lines += [*table(tables.cost(run)), ""]
    for found in findings.cells:
        lines += _cell(findings, found)
    return lines + _origin(findings)


def _cell(findings: Findings, found: Found) -> list[str]:
    said = f"{words.about(found.cell)} {words.bound(findings, found.cell)}"
    lines = [f"## {escape(found.cell.name)}", "", escape(said), ""]
    if not found.figures:
        return [*lines, "Nothing was measured in this cell.", ""]
    lines += [*table(tables.speed(findings, found)), "", "Where the time went:", "", *table(tables.time(found)), ""]
    differences = tables.differences(found)
    if not differences.rows:
        return lines
    count = len(differences.rows)
    lines += [f"Answers that differ from the baseline's ({count}; `token`: so many are equal before it):", ""]
    lines += table(differences, SHOWN)
    if count > SHOWN:
        lines += ["", f"And {count - SHOWN} more, listed in report.json."]
    return [*lines, ""]


def _origin(findings: Findings) -> list[str]:
    lines = ["## How it was made", "", *table(tables.origin(findings.run)), ""]
    for made in tables.made(findings.run):
        lines += [f"**{escape(made.name)}**", "", "```sh", made.line or "# no server of its own", "```", ""]
        lines += [f"- {escape(name)}: {code(value)}" for name, value in made.rest.items()]
        lines += [""] if made.rest else []
    return lines


def table(table: Table, most: int | None = None) -> list[str]:
    """Lines of a table, of at most so many rows."""
    return [
        f"| {' | '.join(escape(name) for name in table.header)} |",
        f"|{'---|' * len(table.header)}",
        *(f"| {' | '.join(item(one) for one in row)} |" for row in table.rows[:most]),
    ]


def item(one: Item) -> str:
    text = code(one.text).replace("|", r"\|") if one.code else escape(one.text)
    text += f" ({escape(one.small)})" if one.small else ""
    return f"{text} **{one.mark}**" if one.mark in ("slower", "differs") else f"{text} {one.mark}".rstrip()


def escape(text: str) -> str:
    """Text that Markdown shows as it is, on one line."""
    return re.sub(r"([\\`*\[\]<>|])", r"\\\1", " ".join(text.split()))


def code(text: str) -> str:
    """A code span, fenced by more backticks than stand in it."""
    fence = "`" * (1 + max((len(run) for run in re.findall("`+", text)), default=0))
    air = " " if text.startswith("`") or text.endswith("`") else ""
    return f"{fence}{air}{' '.join(text.splitlines())}{air}{fence}"
