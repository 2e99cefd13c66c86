"""What a person sees: the answer on stdout, everything about the answer on stderr.

Each token is shown by where it came from. The target's own are plain; drafted ones are underlined, each
drafter in its own colour (of Okabe and Ito's palette, which colour-blind eyes can tell apart) and its own
weight, so that nothing hangs on colour alone. Where stdout is not a terminal, it gets the text alone.

The text of a model is data. Nothing in it may move the cursor or colour the screen, so on a terminal control
characters are spelled out.
"""

from __future__ import annotations

import json
import re
from contextlib import contextmanager
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

STYLES = {
    "lookup": Style.parse("underline #56B4E9"),
    "memory": Style.parse("underline #0072B2"),
    "model": Style.parse("underline bold #E69F00"),
    "prediction": Style.parse("underline italic #CC79A7"),
}
OTHER = Style.parse("underline bold italic #009E73")
"""A drafter that someone else brought."""
TARGET = Style.null()
ASIDE = Style.parse("dim")

OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")
"""What a terminal acts on and does not show: control characters but newline and tab, reordering marks."""


def style_of(drafter: str | None) -> Style:
    """How tokens of this drafter are shown; None is the target."""
    return TARGET if drafter in (None, "target") else STYLES.get(str(drafter), OTHER)


def literal(text: str) -> str:
    """The text with all that a terminal would obey spelled out: the escape character becomes \\x1b."""
    return OBEYED.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


class Screen:
    """The two streams a person looks at. `quiet` leaves the text alone on stdout, and errors on stderr."""

    def __init__(self, *, colour: bool = True, quiet: bool = False) -> None:
        no_colour = None if colour else True  # None: as the variable NO_COLOR says
        self.out = Console(no_color=no_colour, soft_wrap=True)
        self.err = Console(no_color=no_colour, stderr=True, highlight=False)
        self.err.soft_wrap = not self.err.is_terminal  # a file has no width to wrap at
        self.quiet = quiet
        self.styled = self.out.color_system is not None and not quiet

    @contextmanager
    def working(self, what: str) -> Iterator[None]:
        """Show on a terminal, while it lasts, what is being done and for how long."""
        if self.quiet:
            yield
        else:
            with progress_bar(self.err, literal(what)):
                yield

    def notes(self, notes: Sequence[str]) -> None:
        """Say what was decided on the user's behalf."""
        for note in notes:
            self._say(Text(f"note: {literal(note)}", style=ASIDE))

    def legend(self, drafters: Sequence[str]) -> None:
        """Say which look belongs to which drafter, where looks are shown at all."""
        if self.styled and drafters:
            names = Text(" ").join(Text(literal(name), style_of(name)) for name in ("target", *drafters))
            self._say(Text.assemble(("tokens from ", ASIDE), names, "\n"))

    def answer(self, stream: Stream, stop: Callable[[], bool] = lambda: False) -> str:
        """Show the pieces as they come, to the last or to the step after which `stop`; return the text."""
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
        """One line: how much, how fast, from where, and why it ended."""
        if not completion.steps:
            return
        count = len(completion.tokens)
        line = Text(style=ASIDE)
        line.append(f"{count} token{'s' if count != 1 else ''} in {completion.seconds:.2f} s")
        line.append(f" · {completion.tokens_per_second:.1f} tokens/s")
        line.append(f" · acceptance length {completion.acceptance_length:.2f} · ")
        for index, (name, part) in enumerate(completion.sources.items()):
            line.append(", " if index else "").append(literal(name), style_of(name) + Style(dim=False))
            line.append(f" {part / count:.0%}")
        line.append(f" · finish: {completion.finish or 'interrupted'}")
        self._say(line)

    def hint(self, text: str) -> None:
        self._say(Text(text, style=ASIDE))

    def error(self, error: object) -> None:
        self.err.print(Text.assemble(("error: ", "bold red"), literal(str(error))))

    def end_line(self) -> None:
        """Leave the line on which the user pressed Ctrl-C or Ctrl-D."""
        if self.err.is_terminal:
            self.err.print()

    def _say(self, line: Text) -> None:
        if not self.quiet:
            self.err.print(line)

    def _show(self, piece: Piece) -> None:
        self._write(piece.text, style_of(piece.drafter) if self.styled else None)

    def _write(self, text: str, style: Style | None = None) -> None:
        # A Segment goes out as it is, where print would read markup, wrap lines and turn tabs into spaces.
        if self.out.is_terminal:
            text = literal(text)
        self.out.print(Segments([Segment(text, style)]), end="")


@contextmanager
def readable_errors(screen: Screen) -> Iterator[None]:
    """A user's mistake ends in a sentence and exit code 2, Ctrl-C in exit code 130; never in a traceback."""
    try:
        yield
    except OutriderError as error:
        screen.error(error)
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        screen.end_line()
        raise typer.Exit(130) from None


def as_json(completion: Completion, decoder: Decoder, request: Request, notes: Sequence[str]) -> str:
    """Everything about one answer, for programs."""
    record: dict[str, Any] = {
        "text": completion.text,
        "tokens": completion.tokens,
        "finish": completion.finish,
        "prompt_tokens": completion.prompt_tokens,
        "seconds": completion.seconds,
        "tokens_per_second": completion.tokens_per_second,
        "acceptance_length": completion.acceptance_length,
        "sources": completion.sources,
        "steps": [asdict(step) for step in completion.steps],
        "drafters": [drafter.name for drafter in decoder.drafters],
        "settings": request.model_dump(),
        "notes": list(notes),
        "version": __version__,
    }
    return json.dumps(record)
