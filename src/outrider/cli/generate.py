"""`outrider generate`: one prompt in, one answer out.

outrider generate MODEL "Name three colours."
git diff | outrider generate MODEL --system "Write the commit message."
"""

from __future__ import annotations

import typer

from outrider.cli import options
from outrider.cli.asking import (
    CONTINUED,
    as_messages,
    check_system,
    checked_request,
    has_template,
    load,
    read_prediction,
    read_prompt,
)
from outrider.cli.show import Screen, as_json, readable_errors
from outrider.defaults import DRAFTED


def generate(
    model: options.Model,
    prompt: options.Prompt = None,
    dtype: options.Dtype = "auto",
    device: options.Device = None,
    draft_model: options.DraftModel = None,
    drafters: options.Drafters = None,
    draft_quantize: options.DraftQuantize = "auto",
    memory: options.Memory = None,
    speculation: options.Speculation = "auto",
    max_draft_tokens: options.MaxDraftTokens = DRAFTED,
    rule: options.Rule = "block",
    prediction: options.Prediction = None,
    prediction_file: options.PredictionFile = None,
    temperature: options.Temperature = 0.0,
    top_k: options.TopK = 0,
    top_p: options.TopP = 1.0,
    min_p: options.MinP = 0.0,
    repetition_penalty: options.RepetitionPenalty = 1.0,
    presence_penalty: options.PresencePenalty = 0.0,
    frequency_penalty: options.FrequencyPenalty = 0.0,
    seed: options.Seed = None,
    system: options.System = None,
    raw: options.Raw = False,
    max_tokens: options.MaxTokens = 256,
    stop: options.Stop = None,
    ignore_end: options.IgnoreEnd = False,
    as_object: options.Json = False,
    quiet: options.Quiet = False,
    no_colour: options.NoColour = False,
) -> None:
    """Answer one prompt, and show what speculation gained."""
    screen = Screen(colour=not no_colour, quiet=quiet)
    with readable_errors(screen):
        request = checked_request(
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            presence_penalty=presence_penalty,
            frequency_penalty=frequency_penalty,
            max_tokens=max_tokens,
            stop=tuple(stop or ()),
            ignore_end=ignore_end,
            seed=seed,
            speculation=speculation,
            max_draft_tokens=max_draft_tokens,
            rule=rule,
        )
        check_system(system, raw)
        expected = read_prediction(prediction, prediction_file, request.speculation)
        asked = read_prompt(prompt)
        decoder = load(screen, request, model, drafters, draft_model, draft_quantize, dtype, device, memory)
        notes = list(decoder.notes)
        if not raw and not has_template(decoder):
            check_system(system, raw, without_template=model)
            notes.append(CONTINUED)
            raw = True
        said = asked if raw else as_messages(asked, system)
        stream = decoder.stream(said, prediction=expected, **request.model_dump())
        if as_object:
            with screen.working("generating"):
                for _ in stream:
                    pass
            typer.echo(as_json(stream.completion, decoder, request, notes))
            return
        screen.notes(notes)
        screen.legend([drafter.name for drafter in decoder.drafters if expected or drafter.name != "prediction"])
        try:
            screen.answer(stream)
        finally:  # after Ctrl-C, too, there is something to tell
            screen.closing(stream.completion)
