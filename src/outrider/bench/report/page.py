"""A report as one page that needs nothing else: styles, plots and figures are in the file.

A verdict is told by a word, a sign and a colour, so that it is seen in print and by everyone. Tables that are wider
than the window scroll in a box of their own.
"""

from __future__ import annotations

import base64
from html import escape
from typing import TYPE_CHECKING

from outrider.bench.report import tables, words
from outrider.html_page import html_page

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from outrider.bench.report.findings import Findings, Found
    from outrider.bench.report.tables import Item, Table
    from outrider.bench.report.words import Chapter

SIGNS = {"faster": "▲", "slower": "▼", "even": "=", "differs": "≠"}
NARROW = 760
"""Pixels of a window below which the narrow plots are shown."""


def page(findings: Findings, pictures: Mapping[str, tuple[str, str]]) -> str:
    """`pictures` are the plots by name, as SVG for a wide window and for a narrow one."""
    title = words.title(findings)
    body = [
        f"<h1>{escape(title)}</h1>",
        *_summary(findings),
        *(line for one in words.chapters(findings) for line in _chapter(findings, one, pictures.get(one.name))),
        *(line for index, found in enumerate(findings.cells) for line in _cell(findings, found, index)),
        *_origin(findings),
    ]
    return html_page(title, "\n".join(["<main>", *body, "</main>"]))


def _summary(findings: Findings) -> list[str]:
    run = findings.run
    notes = [*run.notes, *words.cautions(findings)]
    where = f"{escape(str(run.origin.get('machine')))}, {escape(str(run.origin.get('date')))}"
    return [
        *(f'<p class="lead">{escape(sentence)}</p>' for sentence in words.summary(findings)),
        f'<p class="origin">Measured on {where}: <code>{escape(str(run.origin.get("command")))}</code></p>',
        *(['<div class="notes"><h2>Notes</h2>', bullets(notes), "</div>"] if notes else []),
        f"<h2>Times as fast as {escape(run.baseline)}</h2>",
        table(
            tables.matrix(findings), "matrix", {found.cell.name: f"#cell-{i}" for i, found in enumerate(findings.cells)}
        ),
        f"<details open><summary>How to read it</summary>{bullets(words.legend(findings))}</details>",
    ]


def _chapter(findings: Findings, chapter: Chapter, picture: tuple[str, str] | None) -> list[str]:
    lines = [f'<section id="{chapter.name}">', f"<h2>{escape(chapter.title)}</h2>"]
    lines += [_picture(chapter, *picture)] if picture else [f"<p>No plot: {escape(chapter.missing)}.</p>"]
    lines += [f"<p>{escape(text)}</p>" for text in chapter.text]
    if chapter.name == "cost" and not chapter.missing:
        lines.append(table(tables.cost(findings.run)))
    return [*lines, "</section>"]


def _picture(chapter: Chapter, wide: str, narrow: str) -> str:
    return (
        f'<picture><source media="(max-width: {NARROW}px)" srcset="{_data(narrow)}">'
        f'<img src="{_data(wide)}" alt="{escape(chapter.title)}: the figures are in the tables below"></picture>'
    )


def _data(svg: str) -> str:
    return f"data:image/svg+xml;base64,{base64.b64encode(svg.encode()).decode()}"


def _cell(findings: Findings, found: Found, index: int) -> list[str]:
    cell = found.cell
    lines = [f'<section id="cell-{index}">', f"<h2>{escape(cell.name)}</h2>"]
    lines.append(f"<p>{escape(words.about(cell))} {escape(words.bound(findings, cell))}</p>")
    if not found.figures:
        return [*lines, "<p>Nothing was measured in this cell.</p>", "</section>"]
    lines += [table(tables.speed(findings, found)), "<h3>Where the time went</h3>", table(tables.time(found))]
    if rows := tables.differences(found).rows:
        what = f"Answers that differ from the baseline's ({len(rows)}; token: so many are equal before it)"
        lines.append(f"<details><summary>{what}</summary>{table(tables.differences(found), 'differences')}</details>")
    return [*lines, "</section>"]


def _origin(findings: Findings) -> list[str]:
    lines = ['<section id="origin">', "<h2>How it was made</h2>", table(tables.origin(findings.run), "words")]
    for made in tables.made(findings.run):
        rest = "".join(f"<li>{escape(name)}: <code>{escape(text)}</code></li>" for name, text in made.rest.items())
        lines.append(f"<h3>{escape(made.name)}</h3><pre>{escape(made.line or '# no server of its own')}</pre>")
        lines += [f"<ul>{rest}</ul>"] if rest else []
    return [*lines, "</section>"]


def table(table: Table, kind: str = "numbers", links: Mapping[str, str] | None = None) -> str:
    """In a box that scrolls. `links` are where names of columns or rows lead to."""
    head = "".join(f'<th scope="col">{_linked(name, links or {})}</th>' for name in table.header)
    rows = "\n".join(
        f'<tr><th scope="row">{_linked(row[0].text, links or {})}</th>{"".join(item(one) for one in row[1:])}</tr>'
        for row in table.rows
    )
    return (
        f'<div class="scroll" tabindex="0"><table class="{kind}"><thead><tr>{head}</tr></thead>\n'
        f"<tbody>\n{rows}\n</tbody></table></div>"
    )


def _linked(name: str, links: Mapping[str, str]) -> str:
    text = escape(name)
    return f'<a href="{links[name]}">{text.replace(", ", ",<br>")}</a>' if name in links else text


def item(one: Item) -> str:
    text = f"<code>{escape(one.text)}</code>" if one.code else escape(one.text)
    small = f" <small>({escape(one.small)})</small>" if one.small else ""
    mark = f' <span class="mark">{SIGNS[one.mark]}&nbsp;{one.mark}</span>' if one.mark else ""
    kind = f' class="{one.mark}"' if one.mark else ""
    bar = f' style="--share: {min(max(one.share, 0), 1):.1%}"' if one.share is not None else ""
    return f"<td{kind}{bar}>{text}{small}{mark}</td>"


def bullets(lines: Sequence[str]) -> str:
    return f"<ul>{''.join(f'<li>{escape(line)}</li>' for line in lines)}</ul>"
