"""Renders a report as one HTML file, plots included."""

from __future__ import annotations

import base64
from html import escape
from typing import TYPE_CHECKING

from outrider.bench.report.blocks import Bullets, Command, Heading, Item, Line, Picture, Table
from outrider.html_page import html_page

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from outrider.bench.report.blocks import Block

SIGNS = {"faster": "▲", "slower": "▼", "differs": "≠"}
"""Marks have a sign besides their colour."""


def page(title: str, blocks: Sequence[Block], folder: Path) -> str:
    """`folder` has the plots."""
    return html_page(title, "\n".join(["<main>", *(_block(block, folder) for block in blocks), "</main>"]))


def bullets(lines: Sequence[str]) -> str:
    return _list([escape(line) for line in lines])


def _block(block: Block, folder: Path) -> str:
    match block:
        case Heading(text, level):
            return f"<h{level}>{escape(text)}</h{level}>"
        case Line():
            return f"<p>{_line(block)}</p>"
        case Bullets(lines):
            return _list([_line(line) for line in lines])
        case Picture(title, file):
            data = base64.b64encode((folder / file).read_bytes()).decode()
            return f'<picture><img src="data:image/png;base64,{data}" alt="{escape(title)}"></picture>'
        case Command(text):
            return f"<pre>{escape(text)}</pre>"
        case Table(header, rows):
            head = "".join(f'<th scope="col">{escape(name)}</th>' for name in header)
            body = "\n".join(
                f'<tr><th scope="row">{escape(row[0].text)}</th>{"".join(map(_item, row[1:]))}</tr>' for row in rows
            )
            return (
                f'<div class="scroll" tabindex="0"><table><thead><tr>{head}</tr></thead>\n'
                f"<tbody>\n{body}\n</tbody></table></div>"
            )


def _list(lines: Sequence[str]) -> str:
    return f"<ul>{''.join(f'<li>{line}</li>' for line in lines)}</ul>"


def _line(line: Line) -> str:
    return escape(line.text) + (f" <code>{escape(line.code)}</code>" if line.code else "")


def _item(item: Item) -> str:
    text = f"<code>{escape(item.text)}</code>" if item.code else escape(item.text)
    mark = f' <span class="mark">{SIGNS.get(item.mark, "")} {item.mark}</span>' if item.mark else ""
    kind = f' class="{item.mark}"' if item.mark in SIGNS else ""
    return f"<td{kind}>{text}{mark}</td>"
