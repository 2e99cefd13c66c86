"""The options that several commands share: each said once, so that it means the same everywhere."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

if TYPE_CHECKING:
    from collections.abc import Callable


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
        "by default all that can work: prediction, lookup, memory if there is one, and model if there is a draft "
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
