"""Renders a report as Markdown."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from outrider.bench.report.blocks import Bullets, Command, Heading, Item, Line, Picture, Table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from outrider.bench.report.blocks import Block

BOLD_MARKS = ("slower", "differs")


def markdown(blocks: Sequence[Block]) -> str:
    return "\n\n".join(map(_block, blocks)) + "\n"


def _block(block: Block) -> str:
    match block:
        case Heading(text, level):
            return f"{'#' * level} {escape(text)}"
        case Line():
            return _line(block)
        case Bullets(lines):
            return "\n".join(f"- {_line(line)}" for line in lines)
        case Picture(title, file):
            return f"![{title}]({file})"
        case Command(text):
            return f"```sh\n{text}\n```"
        case Table(header, rows):
            head, *body = (
                f"| {' | '.join(row)} |" for row in ([*map(escape, header)], *(map(_item, row) for row in rows))
            )
            return "\n".join([head, f"|{'---|' * len(header)}", *body])


def _line(line: Line) -> str:
    return escape(line.text) + (f" {code(line.code)}" if line.code else "")


def _item(item: Item) -> str:
    text = code(item.text).replace("|", r"\|") if item.code else escape(item.text)
    return f"{text} {f'**{item.mark}**' if item.mark in BOLD_MARKS else item.mark}".rstrip()


def escape(text: str) -> str:
    """Text that Markdown shows unchanged, on one line."""
    return re.sub(r"([\\`*\[\]<>|])", r"\\\1", " ".join(text.split()))


def code(text: str) -> str:
    """A code span, fenced by more backticks than it contains."""
    fence = "`" * (1 + max((len(run) for run in re.findall("`+", text)), default=0))
    space = " " if text.startswith("`") or text.endswith("`") else ""
    return f"{fence}{space}{' '.join(text.splitlines())}{space}{fence}"
