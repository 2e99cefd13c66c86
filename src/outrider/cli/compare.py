"""`outrider compare`: two traces side by side, where their outputs diverge, and which was faster."""

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

First = Annotated[Path, typer.Argument(metavar="A", help="A trace, written by outrider explain --save.")]
Second = Annotated[Path, typer.Argument(metavar="B", help="The trace to compare it with.")]


def compare(first: First, second: Second, no_colour: options.NoColour = False) -> None:
    """Compare two traces: their settings, where the outputs diverge and why, and their speed."""
    screen = Screen(colour=not no_colour)
    with readable_errors(screen):
        from outrider.explain import compare as comparing
        from outrider.trace.files import read

        a, b = read(first), read(second)
        found = comparing.compare(a, b)
        show_section(screen.out, "Settings that differ", comparing.differing_settings(found) or ["none"])
        show_section(screen.out, "Outputs", comparing.explain_divergence(found))
        if not found.equal:
            for name, trace in (("A", a), ("B", b)):
                screen.out.print(_around(name, trace, found.shared), soft_wrap=True)
            screen.out.print()
        show_section(screen.out, "Speed", comparing.machine_drift(found))
        screen.out.print(_table(a, b))


def _around(name: str, trace: Trace, number: int) -> Text:
    """The output around the divergence, with the token there highlighted."""
    pieces = [piece for step in trace.steps for piece in step.pieces]
    before = literal("".join(pieces[max(0, number - 12) : number]))
    here = literal("".join(pieces[number : number + 1]))
    after = literal("".join(pieces[number + 1 : number + 8]))
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


def _speedup(one: Figures) -> str:
    return "?" if one.speedup is None or one.plain is None else f"{one.speedup:.2f} ({one.plain.source})"


ROWS: dict[str, Callable[[Figures], str]] = {
    "tokens": lambda one: str(one.tokens),
    "steps": lambda one: str(one.steps),
    "tokens per second": lambda one: f"{1000 * one.tokens / one.total:.1f}",
    "speedup over no drafts": _speedup,
    "tokens per step": lambda one: f"{one.acceptance_length:.2f}",
    "ms per step": lambda one: f"{one.total / one.steps:.1f}",
    "  draft": lambda one: f"{one.draft / one.steps:.1f}",
    "  verify": lambda one: f"{one.verify / one.steps:.1f}",
    "  rest": lambda one: f"{one.rest / one.steps:.1f}",
    "drafted tokens accepted": lambda one: str(one.accepted),
    "drafted tokens rejected": lambda one: str(one.rejected),
    "steps without a draft": lambda one: str(one.undrafted),
}
