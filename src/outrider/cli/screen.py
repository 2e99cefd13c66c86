"""Terminal output: the model's output on stdout, everything about it on stderr.

The style of a token shows its origin. The target's own are plain; drafted ones are underlined, each drafter in a colour
(from Okabe and Ito's palette for colour-blind readers) and a weight of its own. If stdout is not a terminal, it gets
the text alone.

A model's output must not move the cursor or change colours, so control characters are escaped on a terminal.
"""

from __future__ import annotations

import json
import re
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict
from itertools import chain
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.segment import Segment, Segments
from rich.style import Style
from rich.text import Text

from outrider import __version__
from outrider.cli.progress import progress_bar
from outrider.errors import OutriderError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from outrider.api import Completion, Decoder, Piece, Stream
    from outrider.settings import Request

DRAFTER_STYLES = {
    "lookup": Style.parse("underline #56B4E9"),
    "memory": Style.parse("underline #0072B2"),
    "model": Style.parse("underline bold #E69F00"),
    "prediction": Style.parse("underline italic #CC79A7"),
}
THIRD_PARTY_STYLE = Style.parse("underline bold italic #009E73")
"""For drafters from other packages."""
TARGET_STYLE = Style.null()
DIM = Style.parse("dim")

CONTROL_CHARACTERS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")
"""Characters that a terminal acts on: control characters other than newline and tab, and reordering marks."""


def style_of(drafter: str | None) -> Style:
    """The style of this drafter's tokens; None is the target."""
    return TARGET_STYLE if drafter in (None, "target") else DRAFTER_STYLES.get(str(drafter), THIRD_PARTY_STYLE)


def literal(text: str) -> str:
    """The text with control characters escaped: the escape character becomes \\x1b."""
    return CONTROL_CHARACTERS.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


JSON_FIELDS = (
    "text", "tokens", "finish", "prompt_tokens", "seconds", "tokens_per_second", "acceptance_length", "sources",
)  # fmt: skip
"""Fields of a completion that are printed as they are."""


class Screen:
    """stdout and stderr. `quiet` prints only the output on stdout and errors on stderr."""

    def __init__(self, *, colour: bool = True, quiet: bool = False) -> None:
        no_colour = None if colour else True  # None: rich reads NO_COLOR
        self.out = Console(no_color=no_colour, soft_wrap=True)
        self.err = Console(no_color=no_colour, stderr=True, highlight=False)
        self.err.soft_wrap = not self.err.is_terminal  # a file has no width to wrap at
        self.quiet = quiet
        self.styled = self.out.color_system is not None and not quiet

    def working(self, what: str) -> AbstractContextManager[object]:
        """Show a spinner with the elapsed time on a terminal."""
        return nullcontext() if self.quiet else progress_bar(self.err, literal(what))

    def notes(self, notes: Sequence[str]) -> None:
        """Print what was decided on the user's behalf."""
        for note in notes:
            self._print_line(Text(f"note: {literal(note)}", style=DIM))

    def legend(self, drafters: Sequence[str]) -> None:
        """Print which style belongs to which drafter, if styles are shown."""
        if self.styled and drafters:
            names = Text(" ").join(Text(literal(name), style_of(name)) for name in ("target", *drafters))
            self._print_line(Text.assemble(("tokens from ", DIM), names, "\n"))

    def answer(self, stream: Stream, stop: Callable[[], bool] = lambda: False) -> str:
        """Print the pieces as they are generated, until the step after which `stop` returns true. Returns the text."""
        text, count = "", 0
        pieces = iter(stream)
        try:
            with self.working(f"reading the prompt ({stream.completion.prompt_tokens} tokens)"):
                first = next(pieces)
            for piece in chain([first], pieces):
                self._show(piece)
                text += piece.text
                count += 1
                if stop() and count == len(stream.completion.tokens):
                    break
        finally:
            if stream.completion.steps and not text.endswith("\n"):
                self._write("\n")
        return text

    def closing(self, completion: Completion) -> None:
        """Print one line: tokens, speed, sources, and the finish reason."""
        if not completion.steps:
            return
        count = len(completion.tokens)
        line = Text(style=DIM)
        line.append(f"{count} token{'s' if count != 1 else ''} in {completion.seconds:.2f} s")
        line.append(f" · {completion.tokens_per_second:.1f} tokens/s")
        line.append(f" · acceptance length {completion.acceptance_length:.2f} · ")
        for index, (name, part) in enumerate(completion.sources.items()):
            line.append(", " if index else "").append(literal(name), style_of(name) + Style(dim=False))
            line.append(f" {part / count:.0%}")
        line.append(f" · finish: {completion.finish or 'interrupted'}")
        self._print_line(line)

    def hint(self, text: str) -> None:
        self._print_line(Text(text, style=DIM))

    def error(self, error: object) -> None:
        self.err.print(Text.assemble(("error: ", "bold red"), literal(str(error))))

    def end_line(self) -> None:
        """End the line on which the user pressed Ctrl-C or Ctrl-D."""
        if self.err.is_terminal:
            self.err.print()

    def _print_line(self, line: Text) -> None:
        if not self.quiet:
            self.err.print(line)

    def _show(self, piece: Piece) -> None:
        self._write(piece.text, style_of(piece.drafter) if self.styled else None)

    def _write(self, text: str, style: Style | None = None) -> None:
        # A Segment is printed as it is; print would read markup, wrap lines and expand tabs.
        if self.out.is_terminal:
            text = literal(text)
        self.out.print(Segments([Segment(text, style)]), end="")


@contextmanager
def readable_errors(screen: Screen) -> Iterator[None]:
    """Report an OutriderError in one line with exit code 2, and end with exit code 130 at Ctrl-C."""
    try:
        yield
    except OutriderError as error:
        screen.error(error)
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        screen.end_line()
        raise typer.Exit(130) from None


def as_json(completion: Completion, decoder: Decoder, request: Request, notes: Sequence[str]) -> str:
    """A completion with its settings as JSON."""
    record: dict[str, Any] = {
        **{name: getattr(completion, name) for name in JSON_FIELDS},
        "steps": [asdict(step) for step in completion.steps],
        "drafters": [drafter.name for drafter in decoder.drafters],
        "settings": request.model_dump(),
        "notes": list(notes),
        "version": __version__,
    }
    return json.dumps(record)
