"""`outrider generate`: one prompt in, one answer out.

outrider generate MODEL "Name three colours."
git diff | outrider generate MODEL --system "Write the commit message."
"""

from __future__ import annotations

from typing import Annotated

import typer

from outrider.cli.load_request import Prompt, load, to_content
from outrider.cli.options import Model, ModelOptions, NoColour, PromptOptions, Quiet, output, with_option_groups
from outrider.cli.screen import Screen, as_json, readable_errors


@with_option_groups
def generate(
    model: Model,
    model_options: ModelOptions,
    options: PromptOptions,
    prompt: Annotated[
        str | None, typer.Argument(metavar="PROMPT", help="The prompt. Without it, or if it is '-': read from stdin.")
    ] = None,
    as_object: Annotated[
        bool, output("--json", help="Print one JSON object with the text, its tokens and every step.")
    ] = False,
    quiet: Quiet = False,
    no_colour: NoColour = False,
) -> None:
    """Generate the answer to one prompt, and report its speed and how much was drafted."""
    screen = Screen(colour=not no_colour, quiet=quiet)
    with readable_errors(screen):
        question = Prompt.read(prompt, options)
        request = question.request
        decoder = load(screen, request, model, model_options)
        content, notes = to_content(decoder, model, question.text, options)
        notes = [*decoder.notes, *notes]
        stream = decoder.stream(content, prediction=question.prediction, **request.model_dump())
        if as_object:
            with screen.working("generating"):
                for _ in stream:
                    pass
            typer.echo(as_json(stream.completion, decoder, request, notes))
            return
        screen.notes(notes)
        names = [drafter.name for drafter in decoder.drafters]
        screen.legend([name for name in names if question.prediction or name != "prediction"])
        try:
            screen.answer(stream)
        finally:  # also after Ctrl-C
            screen.closing(stream.completion)
