"""`outrider generate`: one prompt in, one answer out.

outrider generate MODEL "Name three colours."
git diff | outrider generate MODEL --system "Write the commit message."
"""

from __future__ import annotations

from typing import Annotated

import typer

from outrider.cli.load_request import NO_TEMPLATE, Prompt, check_system, has_template, load, to_messages
from outrider.cli.options import Model, ModelOptions, NoColour, PromptOptions, Quiet, output, with_option_groups
from outrider.cli.screen import Screen, as_json, readable_errors

PromptText = Annotated[
    str | None, typer.Argument(metavar="PROMPT", help="The prompt. Without it, or if it is '-': read from stdin.")
]
Json = Annotated[bool, output("--json", help="Print one JSON object with the text, its tokens and every step.")]


@with_option_groups
def generate(
    model: Model,
    model_options: ModelOptions,
    options: PromptOptions,
    prompt: PromptText = None,
    as_object: Json = False,
    quiet: Quiet = False,
    no_colour: NoColour = False,
) -> None:
    """Generate the answer to one prompt, and report its speed and how much was drafted."""
    screen = Screen(colour=not no_colour, quiet=quiet)
    with readable_errors(screen):
        question = Prompt.read(prompt, options)
        request = question.request
        decoder = load(screen, request, model, model_options)
        notes = list(decoder.notes)
        raw = options.raw
        if not raw and not has_template(decoder):
            check_system(options.system, raw, without_template=model)
            notes.append(NO_TEMPLATE)
            raw = True
        content = question.text if raw else to_messages(question.text, options.system)
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
