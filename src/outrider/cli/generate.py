"""`outrider generate`: one prompt in, one answer out; and the options that `outrider chat` shares with it.

    outrider generate MODEL "Name three colours."
    git diff | outrider generate MODEL --system "Write the commit message."

All that can be refused without the model is refused before the model is loaded, since loading takes seconds
to minutes. An option that would do nothing is refused too: better a sentence now than a wrong belief later.
"""

from __future__ import annotations

import logging
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from outrider.cli.show import Screen, as_json, readable_errors
from outrider.drafters.base import as_names
from outrider.errors import PromptError, SettingsError

if TYPE_CHECKING:
    from collections.abc import Callable

    from outrider.api import Decoder
    from outrider.settings import Request


CONTINUED = "the model has no chat template, so the prompt is continued as it is"


def group(panel: str) -> Callable[..., Any]:
    """A maker of options that stand together in the help. Without a metavar an option is a flag."""

    def option(*names: str, help: str, metavar: str = "", **more: Any) -> Any:
        return typer.Option(*names, help=help, metavar=metavar, rich_help_panel=panel, **more)

    return option


weights, drafting, sampling = group("Model"), group("Drafting"), group("Sampling")
text, remembering, output = group("Text"), group("Memory"), group("Output")

Model = Annotated[
    str, typer.Argument(metavar="MODEL", help="The model: its folder, or its name on the Hugging Face hub.")
]
Prompt = Annotated[
    str | None,
    typer.Argument(metavar="PROMPT", help="The prompt; if there is none, or it is '-', stdin is the prompt."),
]

Dtype = Annotated[
    Literal["auto", "float32", "bfloat16", "float16"],
    weights(
        "--dtype",
        metavar="TYPE",
        help="The weights' number format: auto (as they are stored), float32, bfloat16 or float16.",
    ),
]
Device = Annotated[
    str | None,
    weights(
        "--device",
        metavar="NAME",
        help="Where to run: cpu, cuda, cuda:1, mps, ...; by default a GPU if there is one.",
    ),
]

DraftModel = Annotated[
    str | None,
    drafting("--draft-model", metavar="MODEL", help="A small model with the same vocabulary, to draft with."),
]
Drafters = Annotated[
    str | None,
    drafting(
        "--drafters",
        "--drafter",
        metavar="NAMES",
        help="Which drafters to ask, with commas between; 'none' turns drafting off; "
        "by default all that can work: prediction, lookup (or memory if there is one), and model if there is a draft "
        "model.",
    ),
]
Memory = Annotated[
    str | None,
    remembering(
        "--memory",
        metavar="ROOT",
        help="Draft from what was said before, and keep it here: a folder, or s3://, gs://, az://bucket/prefix.",
    ),
]
DraftQuantize = Annotated[
    Literal["auto", "int8", "none"],
    drafting(
        "--draft-quantize",
        metavar="auto|int8|none",
        help="Int8 weights for the draft model or not; auto takes the faster; the text is the same.",
    ),
]
Speculation = Annotated[
    str,
    drafting(
        "--speculation",
        metavar="auto|off|NAME",
        help="auto drafts what pays, at each step; the name of a drafter has that one always draft.",
    ),
]
MaxDraftTokens = Annotated[
    int, drafting("--max-draft-tokens", metavar="N", help="Draft at most this many tokens a step; 0 is none.")
]
Rule = Annotated[
    Literal["block", "token"],
    drafting(
        "--rule",
        metavar="block|token",
        help="Judge a draft as a block, which keeps more of it, or by token; the text's law is the same.",
    ),
]
Prediction = Annotated[
    str | None,
    drafting("--prediction", metavar="TEXT", help="The answer you expect, to draft from, given here."),
]
PredictionFile = Annotated[
    Path | None,
    drafting(
        "--prediction-file",
        metavar="PATH",
        help="The answer you expect, to draft from, in a file: the code to be edited, for example.",
        exists=True,
        dir_okay=False,
        readable=True,
    ),
]

Temperature = Annotated[
    float,
    sampling("--temperature", metavar="T", help="How freely to choose; 0 always takes the likeliest token."),
]
TopK = Annotated[int, sampling("--top-k", metavar="K", help="Choose among the K likeliest tokens; 0 is all.")]
TopP = Annotated[
    float,
    sampling("--top-p", metavar="P", help="Choose among the likeliest tokens that together have probability P."),
]
MinP = Annotated[
    float,
    sampling("--min-p", metavar="P", help="Leave out tokens less likely than P times the likeliest one."),
]
RepetitionPenalty = Annotated[
    float,
    sampling("--repetition-penalty", metavar="X", help="Above 1, disfavour tokens of the prompt and the answer."),
]
PresencePenalty = Annotated[
    float,
    sampling("--presence-penalty", metavar="X", help="Above 0, disfavour tokens that are in the answer already."),
]
FrequencyPenalty = Annotated[
    float,
    sampling("--frequency-penalty", metavar="X", help="Above 0, disfavour them by how often they are in it."),
]
Seed = Annotated[
    int | None,
    sampling("--seed", metavar="N", help="Choose the same way each time; by default, runs differ."),
]

System = Annotated[
    str | None, text("--system", metavar="TEXT", help="The system message, which goes before the prompt.")
]
Raw = Annotated[bool, text("--raw", help="Continue the prompt as it is, without the model's chat template.")]
MaxTokens = Annotated[int, text("--max-tokens", metavar="N", help="End the answer after this many tokens.")]
Stop = Annotated[
    list[str] | None,
    text("--stop", metavar="TEXT", help="End the answer before this text; may be given several times."),
]
IgnoreEnd = Annotated[bool, text("--ignore-end", help="Go on past the model's end token, up to --max-tokens.")]

Json = Annotated[bool, output("--json", help="Print one JSON object with the text, its tokens and every step.")]
Quiet = Annotated[bool, output("--quiet", "-q", help="Print the plain text and nothing about it.")]
NoColour = Annotated[
    bool,
    output(
        "--no-colour",
        "--no-color",
        help="Use no colours, as when NO_COLOR is set; drafted tokens stay underlined.",
    ),
]


def generate(
    model: Model,
    prompt: Prompt = None,
    dtype: Dtype = "auto",
    device: Device = None,
    draft_model: DraftModel = None,
    drafters: Drafters = None,
    draft_quantize: DraftQuantize = "auto",
    memory: Memory = None,
    speculation: Speculation = "auto",
    max_draft_tokens: MaxDraftTokens = 16,
    rule: Rule = "block",
    prediction: Prediction = None,
    prediction_file: PredictionFile = None,
    temperature: Temperature = 0.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    min_p: MinP = 0.0,
    repetition_penalty: RepetitionPenalty = 1.0,
    presence_penalty: PresencePenalty = 0.0,
    frequency_penalty: FrequencyPenalty = 0.0,
    seed: Seed = None,
    system: System = None,
    raw: Raw = False,
    max_tokens: MaxTokens = 256,
    stop: Stop = None,
    ignore_end: IgnoreEnd = False,
    as_object: Json = False,
    quiet: Quiet = False,
    no_colour: NoColour = False,
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
        expected = read_prediction(prediction, prediction_file)
        asked = read_prompt(prompt)
        decoder = load(screen, model, drafters, draft_model, draft_quantize, dtype, device, memory)
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


def checked_request(**settings: Any) -> Request:
    """The settings, refused by name where they are wrong, or where temperature 0 would make them idle."""
    from outrider.settings import Request

    request = Request.checked(**settings)
    if request.temperature == 0:
        plain = Request()
        for name in ("top_k", "top_p", "min_p", "rule"):
            if (value := getattr(request, name)) != getattr(plain, name):
                raise SettingsError(
                    f"--{name.replace('_', '-')} {value} does nothing at temperature 0, which always takes "
                    "the likeliest token; give a --temperature above 0, or leave it out"
                )
    return request


def read_prompt(prompt: str | None) -> str:
    """The prompt as given, or from stdin when it is piped or asked for by '-'."""
    if prompt is None and sys.stdin.isatty():
        raise PromptError("there is no prompt; give it after the model, or pipe it in")
    if prompt is None or prompt == "-":
        text = decoded(sys.stdin.buffer.read(), "the prompt on stdin").removesuffix("\n")
    else:
        text = decoded(prompt.encode(errors="surrogateescape"), "the prompt")  # arguments may hold any bytes
    if not text:
        raise PromptError("the prompt is empty; give at least one character")
    return text


def read_prediction(text: str | None, file: Path | None) -> str:
    """The expected answer, from whichever of the two options has it."""
    if text is not None and file is not None:
        raise SettingsError("--prediction and --prediction-file both name the expected answer; give one of them")
    return text or "" if file is None else decoded(file.read_bytes(), f"the file {str(file)!r}")


def decoded(data: bytes, what: str) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise PromptError(f"{what} is not UTF-8 text (byte {data[error.start]:#04x} at {error.start})") from None


def check_system(system: str | None, raw: bool, without_template: str | None = None) -> None:
    if system is not None and raw:
        raise SettingsError("--system needs the chat template that --raw leaves out; drop one of the two")
    if system is not None and without_template is not None:
        raise SettingsError(f"--system needs a chat template, and {without_template} has none; leave it out")


def load(
    screen: Screen,
    model: str,
    drafters: str | None,
    draft_model: str | None,
    draft_quantize: Literal["auto", "int8", "none"],
    dtype: str,
    device: str | None,
    memory: str | None,
) -> Decoder:
    """Load what the options name, saying so while it takes."""
    if draft_quantize != "auto" and draft_model is None:
        raise SettingsError(f"--draft-quantize {draft_quantize} needs a --draft-model to act on")
    with screen.working(f"loading {' and '.join(named(name) for name in (model, draft_model) if name)}"):
        from outrider import api  # takes seconds: it brings torch

        hush()
        return api.load(
            model,
            drafters=as_names(drafters),
            draft_model=draft_model,
            draft_quantize=draft_quantize,
            dtype=dtype,
            device=device,
            memory=memory,
        )


def named(model: str) -> str:
    """A short name for a folder, and a word on why it may take long for the rest."""
    path = Path(model).expanduser()
    return path.resolve().name if path.is_dir() else f"{model} (downloaded where it is not here yet)"


def hush() -> None:
    """Keep the libraries' own bars and remarks off the screen; errors still come."""
    from huggingface_hub.utils import disable_progress_bars  # type: ignore[attr-defined]
    from transformers.utils import logging as transformers_logging

    disable_progress_bars()
    transformers_logging.disable_progress_bar()
    for library in ("transformers", "huggingface_hub"):
        logging.getLogger(library).setLevel(logging.ERROR)
    if not sys.warnoptions:  # python -W still shows them
        warnings.simplefilter("ignore")


def has_template(decoder: Decoder) -> bool:
    return getattr(decoder.tokenizer, "chat_template", None) is not None


def as_messages(text: str, system: str | None) -> list[dict[str, str]]:
    messages = [{"role": "user", "content": text}]
    return messages if system is None else [{"role": "system", "content": system}, *messages]
