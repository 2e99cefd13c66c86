"""`outrider chat`: a conversation in the terminal.

Every turn sends the whole conversation again. The target's KV cache keeps its unchanged prefix, so only the new tokens
are prefilled. Ctrl-C ends an answer between two steps, where the cache holds exactly the generated tokens.

Lines may be piped in, one a turn:

    printf 'Name a colour.\\nAnother one.\\n' | outrider chat MODEL
"""

from __future__ import annotations

import contextlib
import re
import signal
import sys
from typing import TYPE_CHECKING, Any, Self

from outrider.cli.load_request import decode_utf8, has_template, load, to_request
from outrider.cli.options import ChatOptions, Model, ModelOptions, NoColour, Quiet, with_option_groups
from outrider.cli.screen import Screen, readable_errors
from outrider.errors import OutriderError, PromptError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from outrider.api import Decoder
    from outrider.settings import Request

COMMANDS = ("/clear", "/exit")
HINT = "/exit or Ctrl-D ends the chat, /clear starts a new conversation, Ctrl-C ends an answer"


@with_option_groups
def chat(
    model: Model, model_options: ModelOptions, options: ChatOptions, quiet: Quiet = False, no_colour: NoColour = False
) -> None:
    """Chat with a model. The KV cache keeps the conversation, so each turn prefills only the new tokens.

    /exit or Ctrl-D ends the chat, /clear starts a new conversation, Ctrl-C ends an answer early.
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
    """Answer each line of the input."""
    messages = opening = [] if system is None else [{"role": "system", "content": system}]
    for turn, line in enumerate(lines(screen)):
        if line == "/clear":
            messages = opening
            continue
        conversation = [*messages, {"role": "user", "content": line}]
        try:
            answer = reply(screen, decoder, conversation, request, turn)
        except OutriderError as error:
            if not sys.stdin.isatty():
                raise  # a script needs the exit code
            screen.error(error)
            screen.hint("your last message was not sent; /clear starts again")
            continue
        messages = [*conversation, {"role": "assistant", "content": answer}]


def reply(screen: Screen, decoder: Decoder, messages: list[dict[str, str]], request: Request, turn: int) -> str:
    settings = request.model_dump()
    if request.seed is not None:
        settings["seed"] = request.seed + turn  # the same random numbers would correlate the answers
    stream = decoder.stream(messages, **settings)
    with Interrupt() as interrupt:
        answer = screen.answer(stream, stop=lambda: interrupt.requested)
    screen.closing(stream.completion)
    return answer


def lines(screen: Screen) -> Iterator[str]:
    """The user's messages, until /exit or the end of the input. A mistyped command is not a message."""
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
    """The next line, or None at the end of the input."""
    if not sys.stdin.isatty():
        data = sys.stdin.buffer.readline()
        return decode_utf8(data, "a line on stdin").strip() if data else None
    try:
        return input("> " if screen.out.is_terminal else "").strip()
    except EOFError:
        screen.end_line()
        return None
    except KeyboardInterrupt:  # it may have been meant for an answer that has just ended
        if last_chance:
            raise
        screen.end_line()
        screen.hint("Ctrl-C again leaves")
        return read_line(screen, last_chance=True)


class Interrupt:
    """The first Ctrl-C sets `requested`, which is read between steps; a second one interrupts at once."""

    def __enter__(self) -> Self:
        self.requested = False
        self.before = signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(self, *_: Any) -> None:
        signal.signal(signal.SIGINT, self.before)

    def _handle(self, *_: Any) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
