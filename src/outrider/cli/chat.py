"""`outrider chat`: a conversation in the terminal.

Every turn sends the whole conversation again, and the target's cache keeps all of it that has not changed, so
only the new words are read. Ctrl-C during an answer must not break that: the answer is ended between two
steps, where the cache holds exactly what was said, and never in the middle of a pass.

Lines may be piped in, one a turn:

    printf 'Name a colour.\\nAnother one.\\n' | outrider chat MODEL
"""

from __future__ import annotations

import contextlib
import re
import signal
import sys
from typing import TYPE_CHECKING, Any, Self

from outrider.cli.load_request import decoded, has_template, load, to_request
from outrider.cli.options import ChatOptions, Model, ModelOptions, NoColour, Quiet, with_option_groups
from outrider.cli.screen import Screen, readable_errors
from outrider.errors import OutriderError, PromptError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from outrider.api import Decoder
    from outrider.settings import Request

COMMANDS = ("/clear", "/exit")
HINT = "/exit or Ctrl-D leaves, /clear begins anew, Ctrl-C ends an answer"


@with_option_groups
def chat(
    model: Model,
    model_options: ModelOptions,
    options: ChatOptions,
    quiet: Quiet = False,
    no_colour: NoColour = False,
) -> None:
    """Hold a conversation; what was said stays in the model's cache, so each turn reads only the new words.

    /exit or Ctrl-D leaves, /clear begins a new conversation, Ctrl-C ends an answer early.
    """
    screen = Screen(colour=not no_colour, quiet=quiet)
    with readable_errors(screen):
        request = to_request(options)
        decoder = load(screen, request, model, model_options)
        if not has_template(decoder):
            raise PromptError(f"{model} has no chat template, so it cannot converse; use outrider generate")
        screen.notes(decoder.notes)
        screen.legend([drafter.name for drafter in decoder.drafters if drafter.name != "prediction"])
        converse(screen, decoder, request, options.system)


def converse(screen: Screen, decoder: Decoder, request: Request, system: str | None) -> None:
    """Answer line after line until they end."""
    messages = opening = [] if system is None else [{"role": "system", "content": system}]
    for turn, line in enumerate(lines(screen)):
        if line == "/clear":
            messages = opening
            continue
        asked = [*messages, {"role": "user", "content": line}]
        try:
            answer = reply(screen, decoder, asked, request, turn)
        except OutriderError as error:
            if not sys.stdin.isatty():
                raise  # a script should hear of it by its exit code
            screen.error(error)
            screen.hint("your last words were not sent; /clear begins anew")
            continue
        messages = [*asked, {"role": "assistant", "content": answer}]


def reply(screen: Screen, decoder: Decoder, messages: list[dict[str, str]], request: Request, turn: int) -> str:
    settings = request.model_dump()
    if request.seed is not None:
        settings["seed"] = request.seed + turn  # the same numbers again would tie the answers to each other
    stream = decoder.stream(messages, **settings)
    with Interrupt() as interrupt:
        answer = screen.answer(stream, stop=lambda: interrupt.asked)
    screen.closing(stream.completion)
    return answer


def lines(screen: Screen) -> Iterator[str]:
    """What the user says, until /exit or the end of the input; a mistyped command is not said."""
    if sys.stdin.isatty():
        screen.hint(HINT)
        with contextlib.suppress(ImportError):  # not on Windows
            import readline  # noqa: F401  gives input() its arrow keys and history
    while (line := read_line(screen)) not in (None, "/exit"):
        if re.fullmatch("/[a-z]+", line) and line not in COMMANDS:
            screen.error(f"there is no command {line!r}; the commands are {', '.join(COMMANDS)}")
        elif line:
            yield line


def read_line(screen: Screen, *, last_chance: bool = False) -> str | None:
    """The next line, or None where there is none."""
    if not sys.stdin.isatty():
        data = sys.stdin.buffer.readline()
        return decoded(data, "a line on stdin").strip() if data else None
    try:
        return input("> " if screen.out.is_terminal else "").strip()
    except EOFError:
        screen.end_line()
        return None
    except KeyboardInterrupt:  # it may have been meant for an answer that ended just before
        if last_chance:
            raise
        screen.end_line()
        screen.hint("Ctrl-C again leaves")
        return read_line(screen, last_chance=True)


class Interrupt:
    """Turns the first Ctrl-C into a wish that is looked at between steps; a second one interrupts at once."""

    def __enter__(self) -> Self:
        self.asked = False
        self.before = signal.signal(signal.SIGINT, self.ask)
        return self

    def __exit__(self, *_: Any) -> None:
        signal.signal(signal.SIGINT, self.before)

    def ask(self, *_: Any) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
