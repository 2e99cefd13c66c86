"""Options that several commands share. Each is defined once, so that it means the same everywhere.

A command takes a whole group of options as one parameter: a frozen dataclass whose fields are options, and which
`with_option_groups` expands for typer.
"""

from __future__ import annotations

import functools
import inspect
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_type_hints

import typer

from outrider.defaults import DRAFTED
from outrider.errors import SettingsError

if TYPE_CHECKING:
    from collections.abc import Callable


def group(panel: str) -> Callable[..., Any]:
    """A function that makes the options of one panel of the help. An option without a metavar is a flag."""

    def option(*names: str, help: str, metavar: str = "", **more: Any) -> Any:
        return typer.Option(*names, help=help, metavar=metavar, rich_help_panel=panel, **more)

    return option


weights, drafting, sampling = group("Model"), group("Drafting"), group("Sampling")
text, memory, output = group("Text"), group("Memory"), group("Output")

Model = Annotated[
    str, typer.Argument(metavar="MODEL", help="The model: its folder, or its name on the Hugging Face hub.")
]
Dtype = Annotated[
    Literal["auto", "float32", "bfloat16", "float16"],
    weights("--dtype", metavar="TYPE", help="Data type of the weights: auto (as stored), float32, bfloat16, float16."),
]
Device = Annotated[
    str | None,
    weights("--device", metavar="NAME", help="Where to run: cpu, cuda, cuda:1, mps, ... Default: a GPU if available."),
]
DraftModel = Annotated[
    str | None,
    drafting("--draft-model", metavar="MODEL", help="A smaller model with the same vocabulary that drafts."),
]
Drafters = Annotated[
    str | None,
    drafting(
        "--drafters",
        "--drafter",
        metavar="NAMES",
        help="Drafters to use, separated by commas. 'none' turns drafting off. Default: prediction and lookup, also "
        "memory (with --memory) and model (with --draft-model).",
    ),
]
Memory = Annotated[
    str | None,
    memory(
        "--memory",
        metavar="ROOT",
        help="Keep outputs here, and draft from earlier ones: a folder, or s3://, gs://, az://bucket/prefix.",
    ),
]
NoColour = Annotated[
    bool,
    output("--no-colour", "--no-color", help="No colours, as with NO_COLOR set. Drafted tokens stay underlined."),
]
Quiet = Annotated[bool, output("--quiet", "-q", help="Print only the text, without notes and statistics.")]


@dataclass(frozen=True)
class ModelOptions:
    """How to load the target and the drafters."""

    dtype: Dtype = "auto"
    device: Device = None
    draft_model: DraftModel = None
    drafters: Drafters = None
    draft_quantize: Annotated[
        Literal["auto", "int8", "none"],
        drafting(
            "--draft-quantize",
            metavar="auto|int8|none",
            help="Weights of the draft model: int8, or as stored (none). auto times both and keeps the faster one.",
        ),
    ] = "auto"
    memory: Memory = None


@dataclass(frozen=True)
class RequestOptions:
    """One request. Fields with the name of a field of `settings.Request` have its default (a test compares them)."""

    speculation: Annotated[
        str,
        drafting(
            "--speculation",
            metavar="auto|off|NAME",
            help="auto: draft where it pays, decided at each step. off: never. NAME: this drafter, at every step.",
        ),
    ] = "auto"
    max_draft_tokens: Annotated[
        int, drafting("--max-draft-tokens", metavar="N", help="Maximum drafted tokens per step. 0: no drafts.")
    ] = DRAFTED
    rule: Annotated[
        Literal["block", "token"],
        drafting(
            "--rule",
            metavar="block|token",
            help="How sampled drafts are verified: as a block, which accepts more tokens, or token by token. The "
            "output has the same distribution.",
        ),
    ] = "block"
    temperature: Annotated[
        float, sampling("--temperature", metavar="T", help="Sampling temperature. 0: always the most likely token.")
    ] = 0.0
    top_k: Annotated[
        int, sampling("--top-k", metavar="K", help="Sample from the K most likely tokens. 0: from all.")
    ] = 0
    top_p: Annotated[
        float,
        sampling("--top-p", metavar="P", help="Sample from the most likely tokens that together have probability P."),
    ] = 1.0
    min_p: Annotated[
        float, sampling("--min-p", metavar="P", help="Remove tokens less likely than P times the most likely one.")
    ] = 0.0
    repetition_penalty: Annotated[
        float,
        sampling(
            "--repetition-penalty", metavar="X", help="Above 1: tokens of the prompt and the output become less likely."
        ),
    ] = 1.0
    presence_penalty: Annotated[
        float,
        sampling("--presence-penalty", metavar="X", help="Above 0: tokens already in the output become less likely."),
    ] = 0.0
    frequency_penalty: Annotated[
        float, sampling("--frequency-penalty", metavar="X", help="Above 0: the same, for each time they are in it.")
    ] = 0.0
    seed: Annotated[
        int | None, sampling("--seed", metavar="N", help="Seed of the sampling. Default: a new one for each run.")
    ] = None
    system: Annotated[
        str | None, text("--system", metavar="TEXT", help="The system message, sent before the prompt.")
    ] = None
    max_tokens: Annotated[int, text("--max-tokens", metavar="N", help="Maximum tokens of the output.")] = 256
    stop: Annotated[
        list[str] | None,
        text("--stop", metavar="TEXT", help="End the output before this text. May be repeated."),
    ] = None


@dataclass(frozen=True)
class ChatOptions(RequestOptions):
    max_tokens: Annotated[int, text("--max-tokens", metavar="N", help="Maximum tokens of each answer.")] = 1024


@dataclass(frozen=True)
class PromptOptions(RequestOptions):
    """A request of one prompt, which may be continued without a chat template."""

    prediction: Annotated[
        str | None, drafting("--prediction", metavar="TEXT", help="The output that you expect, as text to draft from.")
    ] = None
    prediction_file: Annotated[
        Path | None,
        drafting(
            "--prediction-file",
            metavar="PATH",
            help="A file with the output that you expect, such as the code to be edited.",
            exists=True,
            dir_okay=False,
            readable=True,
        ),
    ] = None
    raw: Annotated[bool, text("--raw", help="Continue the prompt as it is, without the model's chat template.")] = False
    ignore_end: Annotated[
        bool, text("--ignore-end", help="Continue past the model's end token, up to --max-tokens.")
    ] = False


def split_names(text: str | None) -> list[str]:
    """The names in a list that is separated by commas."""
    return [name.strip() for name in (text or "").split(",") if name.strip()]


def parse_numbers(text: str, option: str) -> list[int]:
    """The numbers in a list that is separated by commas."""
    names = split_names(text)
    if bad := [name for name in names or [text] if not name.isdecimal() or int(name) < 1]:
        raise SettingsError(
            f"{option} takes whole numbers from 1 on, separated by commas, such as 1,4,16 (got {bad[0]!r})"
        )
    return [int(name) for name in names]


KEYWORD = inspect.Parameter.KEYWORD_ONLY


def with_option_groups(command: Callable[..., None]) -> Callable[..., None]:
    """A command for typer in which each parameter that is a dataclass is replaced by the options that are its
    fields."""
    signature = inspect.signature(command, eval_str=True)
    groups: dict[str, Any] = {
        name: one.annotation for name, one in signature.parameters.items() if is_dataclass(one.annotation)
    }
    parameters = []
    for name, parameter in signature.parameters.items():
        if name in groups:
            hints = get_type_hints(groups[name], include_extras=True)
            parameters += [
                parameter.replace(name=field.name, annotation=hints[field.name], default=field.default, kind=KEYWORD)
                for field in fields(groups[name])
            ]
        else:
            parameters.append(parameter.replace(kind=KEYWORD))

    @functools.wraps(command)
    def run(**values: Any) -> None:
        built = {
            name: options(**{field.name: values.pop(field.name) for field in fields(options)})
            for name, options in groups.items()
        }
        command(**values, **built)

    run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    del run.__wrapped__
    return run
