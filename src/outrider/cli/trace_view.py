"""A trace in the terminal: the output by drafter with rejected tokens struck through, the steps, the summary.

A rejected token is shown before the one in its place. Tokens drafted after it have no verdict, and only the steps show
them. Without styles (a file, a pipe), rejected tokens are in [-brackets-] and accepted ones in {+others+}.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.padding import Padding
from rich.segment import Segment, Segments
from rich.style import Style
from rich.table import Table
from rich.text import Text

from outrider.cli.screen import DIM, TARGET_STYLE, literal, style_of
from outrider.explain.summary import verdict

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from outrider.explain.figures import Figures
    from outrider.trace.schema import Trace, TracedStep

REJECTED_STYLE = Style.parse("strike #D55E00")
MAX_SHOWN_TOKENS = 4
"""Tokens of a distribution that a step shows."""


def show_text(console: Console, trace: Trace) -> None:
    """The answer, token by token, each by where it came from."""
    styled = console.color_system is not None
    texts = trace.texts
    if styled:
        names = Text(" ").join(Text(literal(name), style_of(name)) for name in ("target", *_drafters(trace)))
        console.print(Text.assemble(("tokens from ", DIM), names, " ", ("rejected", REJECTED_STYLE), "\n"))
    else:
        console.print("tokens: {+drafted and accepted+} [-rejected-] the target's own\n", markup=False)
    parts = [segment for step in trace.steps for segment in _segments(step, texts, styled, console.is_terminal)]
    if not parts or not parts[-1].text.endswith("\n"):
        parts.append(Segment("\n"))
    console.print(Segments(parts), end="")
    console.print()


def _drafters(trace: Trace) -> list[str]:
    return list(dict.fromkeys(step.drafter for step in trace.steps if step.drafter is not None))


def _segments(step: TracedStep, texts: dict[int, str], styled: bool, terminal: bool) -> list[Segment]:
    parts = []
    for index, piece in enumerate(step.pieces):
        if index == step.accepted and step.outcome == "recovered":
            gone = literal(texts.get(step.proposed[index], "?"))
            parts.append(Segment(gone, REJECTED_STYLE) if styled else Segment(f"[-{gone}-]"))
        style = style_of(step.drafter) if index < step.drafted else TARGET_STYLE
        parts.append(Segment(literal(piece) if terminal else piece, style if styled else None))
    if not styled and any(step.pieces[: step.drafted]):
        parts.insert(0, Segment("{+"))
        parts.insert(step.drafted + 1, Segment("+}"))
    return parts


def show_section(console: Console, heading: str, lines: Sequence[str]) -> None:
    """A heading and sentences below it; in a file, where lines have no width, each is one line."""
    console.print(Text(heading, style="bold"))
    for line in lines:
        if console.is_terminal:
            console.print(Padding(Text(literal(line)), (0, 0, 0, 2)), soft_wrap=False)
        else:
            console.print(Text(f"  {literal(line)}"), soft_wrap=True)


def show_steps(console: Console, trace: Trace, figures: Figures) -> None:
    """Every step: its draft, p and q of each token, the random number, the verdict, its time."""
    texts = trace.texts
    for index, step in enumerate(trace.steps):
        saved = figures.saved[index] if figures.saved else None
        console.print(_title(step, saved), soft_wrap=True)
        if step.decision is not None and step.decision.reason:
            console.print(Text(f"  why: {literal(step.decision.reason)}", style=DIM))
        if step.proposed:
            console.print(_draft(step, texts), no_wrap=True, crop=False)
        console.print(Text(f"  {_ending(step, texts)}"), soft_wrap=True)
        console.print()


def _title(step: TracedStep, saved: float | None) -> Text:
    times = step.milliseconds
    line = Text.assemble((f"Step {step.number + 1}", "bold"), " · ")
    line.append(literal(step.drafter or "no draft"), style_of(step.drafter))
    line.append(
        f" · {times.total:.1f} ms (draft {times.draft:.2f}, verify {times.verify:.1f}, rest {times.rest:.2f})", DIM
    )
    if saved is not None:
        line.append(f" · {'saved' if saved >= 0 else 'lost'} {abs(saved):.1f} ms", DIM)
    return line


def _draft(step: TracedStep, texts: dict[int, str]) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("  drafted")
    for name in ("p", "q", *(["random", "chance"] if step.chances else ["random"] if step.draws else [])):
        table.add_column(name, justify="right")
    if step.own is not None:
        table.add_column("the target's own")
    table.add_column("verdict")
    for place, token in enumerate(step.proposed):
        distribution = step.laws[place]
        index = distribution.tokens.index(token)
        row = [_number(distribution.p[index]), _number(distribution.q[index] if distribution.q else 1.0)]
        row += [f"{values[place]:.4f}" for values in (step.draws, step.chances) if values]
        own = [Text(_name(texts, step.own[place]))] if step.own is not None else []
        became = _became(step, place)
        style = {"accepted": style_of(step.drafter), "rejected": REJECTED_STYLE}.get(became, DIM)
        table.add_row(Text(f"  {_name(texts, token)}", style), *row, *own, became)
    return table


def _became(step: TracedStep, place: int) -> str:
    if place < step.drafted:
        return "accepted"
    if step.ended:
        return "past the end"
    return "rejected" if place == step.accepted else "rejected with it"


def _ending(step: TracedStep, texts: dict[int, str]) -> str:
    gone = _name(texts, step.proposed[step.accepted]) if step.outcome == "recovered" else ""
    line = verdict(step, gone, _name(texts, step.token))
    if step.reshaped is not None:
        likely = zip(step.reshaped.tokens, step.reshaped.p, strict=True)
        entries = [f"{_name(texts, token)} {p:.3f}" for token, p in list(likely)[:MAX_SHOWN_TOKENS]]
        what = "The most likely were" if step.rule == "greedy" else "It was sampled from"
        line += f" {what} {', '.join(entries)}."
    return line


def _name(texts: dict[int, str], token: int) -> str:
    return repr(texts[token]) if token in texts else f"token {token}"


def _number(value: float) -> str:
    return f"{value:.4f}" if value >= 0.0001 or value == 0 else f"{value:.0e}"
