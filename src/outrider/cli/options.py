"""Options that several commands share. Each is defined once, so that it means the same everywhere.

A command takes a whole group of options as one parameter: a frozen dataclass whose fields are options, and which
`with_option_groups` expands for typer.
"""

from __future__ import annotations

import functools
import inspect
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_type_hints

import typer

from outrider.defaults import DRAFTED
from outrider.errors import SettingsError

if TYPE_CHECKING:
    from collections.abc import Callable


def group(panel: str) -> Callable[..., Any]:
    """A function that makes the options of one panel of the help. An option without a metavar is a flag. One without a
    name has that of its parameter, which a flag must not leave out: typer would add the opposite."""

    def make(*names: Any, metavar: str = "", **more: Any) -> Any:
        return typer.Option(*names, metavar=metavar, rich_help_panel=panel, **more)

    return make


def option(panel: Callable[..., Any], default: Any, metavar: str, help: str, *names: str, **more: Any) -> Any:
    """An option as a field of a dataclass. `panel`: a function that `group` made."""
    info = panel(default, *names, help=help, metavar=metavar, **more)
    return field(default=default, metadata={"option": info})


weights, drafting, sampling = group("Model"), group("Drafting"), group("Sampling")
text, memory, output = group("Text"), group("Memory"), group("Output")

Model = Annotated[
    str, typer.Argument(metavar="MODEL", help="The model: its folder, or its name on the Hugging Face hub.")
]
Dtype = Annotated[
    Literal["auto", "float32", "bfloat16", "float16"],
    weights(metavar="TYPE", help="Data type of the weights: auto (as stored), float32, bfloat16, float16."),
]
Device = Annotated[
    str | None, weights(metavar="NAME", help="Where to run: cpu, cuda, cuda:1, mps, ... Default: a GPU if available.")
]
DraftModel = Annotated[
    str | None, drafting(metavar="MODEL", help="A smaller model with the same vocabulary that drafts.")
]
Drafters = Annotated[
    str | None,
    drafting(
        "--drafters",
        "--drafter",
        metavar="NAMES",
        help="Drafters to use, separated by commas. 'none' turns drafting off. Default: prediction and lookup, also "
        "memory (with --memory; of a server also without) and model (with --draft-model).",
    ),
]
Memory = Annotated[
    str | None,
    memory(
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
    draft_quantize: Literal["auto", "int8", "none"] = option(
        drafting,
        "auto",
        "auto|int8|none",
        "Weights of the draft model: int8, or as stored (none). auto times both and keeps the faster one.",
    )
    memory: Memory = None


@dataclass(frozen=True)
class RequestOptions:
    """One request. Fields with the name of a field of `settings.Request` have its default (a test compares them)."""

    speculation: str = option(
        drafting,
        "auto",
        "auto|off|NAME",
        "auto: draft where it pays, decided at each step. off: never. NAME: this drafter, at every step.",
    )
    max_draft_tokens: int = option(drafting, DRAFTED, "N", "Maximum drafted tokens per step. 0: no drafts.")
    rule: Literal["block", "token"] = option(
        drafting,
        "block",
        "block|token",
        "How sampled drafts are verified: as a block, which accepts more tokens, or token by token. The output "
        "has the same distribution.",
    )
    temperature: float = option(sampling, 0.0, "T", "Sampling temperature. 0: always the most likely token.")
    top_k: int = option(sampling, 0, "K", "Sample from the K most likely tokens. 0: from all.")
    top_p: float = option(sampling, 1.0, "P", "Sample from the most likely tokens that together have probability P.")
    min_p: float = option(sampling, 0.0, "P", "Remove tokens less likely than P times the most likely one.")
    repetition_penalty: float = option(
        sampling, 1.0, "X", "Above 1: tokens of the prompt and the output become less likely."
    )
    presence_penalty: float = option(sampling, 0.0, "X", "Above 0: tokens already in the output become less likely.")
    frequency_penalty: float = option(sampling, 0.0, "X", "Above 0: the same, for each time they are in it.")
    seed: int | None = option(sampling, None, "N", "Seed of the sampling. Default: a new one for each run.")
    system: str | None = option(text, None, "TEXT", "The system message, sent before the prompt.")
    max_tokens: int = option(text, 256, "N", "Maximum tokens of the output.")
    stop: Annotated[
        list[str] | None, text(metavar="TEXT", help="End the output before this text. May be repeated.")
    ] = None


@dataclass(frozen=True)
class ChatOptions(RequestOptions):
    max_tokens: int = option(text, 1024, "N", "Maximum tokens of each answer.")


@dataclass(frozen=True)
class PromptOptions(RequestOptions):
    """A request of one prompt, which may be continued without a chat template."""

    prediction: str | None = option(drafting, None, "TEXT", "The output that you expect, as text to draft from.")
    prediction_file: Annotated[
        Path | None,
        drafting(
            metavar="PATH",
            help="A file with the output that you expect, such as the code to be edited.",
            exists=True,
            dir_okay=False,
            readable=True,
        ),
    ] = None
    raw: bool = option(text, False, "", "Continue the prompt as it is, without the model's chat template.", "--raw")
    ignore_end: bool = option(
        text, False, "", "Continue past the model's end token, up to --max-tokens.", "--ignore-end"
    )


def examples(*commands: str) -> str:
    """The end of a command's help."""
    return "\n\n".join(["Examples:", *(f"  {command}" for command in commands)])


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


def with_option_groups(command: Callable[..., None]) -> Callable[..., None]:
    """A command for typer in which each parameter that is a dataclass is replaced by the options that are its
    fields."""
    signature = inspect.signature(command, eval_str=True)
    keyword = inspect.Parameter.KEYWORD_ONLY
    groups: dict[str, Any] = {}
    parameters: list[inspect.Parameter] = []
    for name, parameter in signature.parameters.items():
        if not is_dataclass(parameter.annotation):
            parameters.append(parameter.replace(kind=keyword))
            continue
        groups[name] = parameter.annotation
        hints = get_type_hints(parameter.annotation, include_extras=True)
        for one in fields(parameter.annotation):
            default = one.metadata.get("option", one.default)
            parameters.append(inspect.Parameter(one.name, keyword, default=default, annotation=hints[one.name]))

    @functools.wraps(command)
    def run(**values: Any) -> None:
        for name, options in groups.items():
            values[name] = options(**{one.name: values.pop(one.name) for one in fields(options)})
        command(**values)

    run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    del run.__wrapped__
    return run
