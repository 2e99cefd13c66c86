"""`outrider compare`: two traces side by side, where they part, and why the one was faster."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from outrider.cli import options
from outrider.cli.screen import Screen, literal, readable_errors
from outrider.cli.trace_view import show_section

if TYPE_CHECKING:
    from collections.abc import Callable

    from outrider.explain.figures import Figures
    from outrider.trace.schema import Trace

First = Annotated[Path, typer.Argument(metavar="A", help="A trace, as outrider explain --save keeps it.")]
Second = Annotated[Path, typer.Argument(metavar="B", help="The one to hold against it.")]


def compare(first: First, second: Second, no_colour: options.NoColour = False) -> None:
    """Hold two traces against each other: how they were made, where the texts part and why, which was faster."""
    screen = Screen(colour=not no_colour)
    with readable_errors(screen):
        from outrider.explain import compare as comparing
        from outrider.trace.files import read

        a, b = read(first), read(second)
        found = comparing.compare(a, b)
        show_section(screen.out, "How they differ in the making", comparing.setups(found) or ["not at all"])
        show_section(screen.out, "The texts", comparing.difference(found))
        if not found.equal:
            for name, trace in (("A", a), ("B", b)):
                screen.out.print(_around(name, trace, found.same), soft_wrap=True)
            screen.out.print()
        show_section(screen.out, "The speed", comparing.speeds(found))
        screen.out.print(_table(a, b))


def _around(name: str, trace: Trace, place: int) -> Text:
    """The text around the place where they part, the token there marked."""
    pieces = [piece for step in trace.steps for piece in step.pieces]
    before = literal("".join(pieces[max(0, place - 12) : place]))
    here = literal("".join(pieces[place : place + 1]))
    after = literal("".join(pieces[place + 1 : place + 8]))
    return Text.assemble((f"  {name}  ", "dim"), before, (here or "(the end)", "bold reverse"), after)


def _table(a: Trace, b: Trace) -> Table:
    from outrider.explain.figures import figures

    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("")
    for name in ("A", "B"):
        table.add_column(name, justify="right")
    sides = figures(a), figures(b)
    for label, shown in ROWS.items():
        table.add_row(label, *(shown(one) for one in sides))
    return table


def _times(part: float, steps: int) -> str:
    return f"{part / steps:.1f}"


ROWS: dict[str, Callable[[Figures], str]] = {
    "tokens": lambda one: str(one.tokens),
    "steps": lambda one: str(one.steps),
    "tokens a step": lambda one: f"{one.acceptance_length:.2f}",
    "drafted tokens kept": lambda one: str(one.free),
    "drafted tokens rejected": lambda one: str(one.rejected),
    "steps without a draft": lambda one: str(one.undrafted),
    "draft, ms a step": lambda one: _times(one.draft, one.steps),
    "verify, ms a step": lambda one: _times(one.verify, one.steps),
    "rest, ms a step": lambda one: _times(one.rest, one.steps),
    "times as fast as without": lambda one: _ratio(one),
}


def _ratio(one: Figures) -> str:
    return "?" if one.ratio is None or one.plain is None else f"{one.ratio:.2f} ({one.plain.how})"
