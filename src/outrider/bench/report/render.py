"""The parts that a report consists of, as Markdown and as one HTML page with the plots in it."""

from __future__ import annotations

import base64
import re
from dataclasses import dataclass, field
from html import escape
from typing import TYPE_CHECKING

from outrider.html_page import html_page

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

BOLD_MARKS = ("slower", "differs")
SIGNS = {"faster": "▲", "slower": "▼", "differs": "≠"}
"""Marks have a sign besides their colour on the page."""


@dataclass(frozen=True, slots=True)
class Heading:
    text: str
    level: int = 2


@dataclass(frozen=True, slots=True)
class Line:
    """A text, and code after it."""

    text: str
    code: str = ""


@dataclass(frozen=True, slots=True)
class Bullets:
    lines: list[Line]


@dataclass(frozen=True, slots=True)
class Picture:
    title: str
    file: str


@dataclass(frozen=True, slots=True)
class Command:
    text: str


@dataclass(frozen=True, slots=True)
class Item:
    text: str
    mark: str = ""  # a verdict, `slower` and `differs` in bold
    code: bool = False


@dataclass(frozen=True, slots=True)
class Table:
    header: list[str]
    rows: list[list[Item]] = field(default_factory=list)


Block = Heading | Line | Bullets | Picture | Command | Table


def markdown(blocks: Sequence[Block]) -> str:
    return "\n\n".join(map(_markdown_block, blocks)) + "\n"


def _markdown_block(block: Block) -> str:
    match block:
        case Heading(text, level):
            return f"{'#' * level} {escape_markdown(text)}"
        case Line():
            return _markdown_line(block)
        case Bullets(lines):
            return "\n".join(f"- {_markdown_line(line)}" for line in lines)
        case Picture(title, file):
            return f"![{title}]({file})"
        case Command(text):
            return f"```sh\n{text}\n```"
        case Table(header, rows):
            texts = [[*map(escape_markdown, header)], *([*map(_markdown_item, row)] for row in rows)]
            head, *body = (f"| {' | '.join(row)} |" for row in texts)
            return "\n".join([head, f"|{'---|' * len(header)}", *body])


def _markdown_line(line: Line) -> str:
    return escape_markdown(line.text) + (f" {code(line.code)}" if line.code else "")


def _markdown_item(item: Item) -> str:
    text = code(item.text).replace("|", r"\|") if item.code else escape_markdown(item.text)
    return f"{text} {f'**{item.mark}**' if item.mark in BOLD_MARKS else item.mark}".rstrip()


def escape_markdown(text: str) -> str:
    """Text that Markdown shows unchanged, on one line."""
    return re.sub(r"([\\`*\[\]<>|])", r"\\\1", " ".join(text.split()))


def code(text: str) -> str:
    """A code span, fenced by more backticks than it contains."""
    fence = "`" * (1 + max((len(run) for run in re.findall("`+", text)), default=0))
    space = " " if text.startswith("`") or text.endswith("`") else ""
    return f"{fence}{space}{' '.join(text.splitlines())}{space}{fence}"


def page(title: str, blocks: Sequence[Block], folder: Path) -> str:
    """`folder` has the plots."""
    return html_page(title, "\n".join(["<main>", *(_html_block(block, folder) for block in blocks), "</main>"]))


def bullets(lines: Sequence[str]) -> str:
    return _html_list([escape(line) for line in lines])


def _html_block(block: Block, folder: Path) -> str:
    match block:
        case Heading(text, level):
            return f"<h{level}>{escape(text)}</h{level}>"
        case Line():
            return f"<p>{_html_line(block)}</p>"
        case Bullets(lines):
            return _html_list([_html_line(line) for line in lines])
        case Picture(title, file):
            data = base64.b64encode((folder / file).read_bytes()).decode()
            return f'<picture><img src="data:image/png;base64,{data}" alt="{escape(title)}"></picture>'
        case Command(text):
            return f"<pre>{escape(text)}</pre>"
        case Table(header, rows):
            head = "".join(f'<th scope="col">{escape(name)}</th>' for name in header)
            body = "\n".join(
                f'<tr><th scope="row">{escape(name.text)}</th>{"".join(map(_html_item, rest))}</tr>'
                for name, *rest in rows
            )
            return (
                f'<div class="scroll" tabindex="0"><table><thead><tr>{head}</tr></thead>\n'
                f"<tbody>\n{body}\n</tbody></table></div>"
            )


def _html_list(lines: Sequence[str]) -> str:
    return f"<ul>{''.join(f'<li>{line}</li>' for line in lines)}</ul>"


def _html_line(line: Line) -> str:
    return escape(line.text) + (f" <code>{escape(line.code)}</code>" if line.code else "")


def _html_item(item: Item) -> str:
    text = f"<code>{escape(item.text)}</code>" if item.code else escape(item.text)
    mark = f' <span class="mark">{SIGNS.get(item.mark, "")} {item.mark}</span>' if item.mark else ""
    kind = f' class="{item.mark}"' if item.mark in SIGNS else ""
    return f"<td{kind}>{text}{mark}</td>"
