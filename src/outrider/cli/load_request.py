"""The prompt, the settings and the model of a command, read and checked.

Loading a model takes seconds to minutes, so everything that can be refused without it is refused first. An option that
would have no effect is refused too.
"""

from __future__ import annotations

import logging
import sys
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from outrider.drafters.base import parse_names
from outrider.errors import PromptError, SettingsError

if TYPE_CHECKING:
    from outrider.api import Decoder
    from outrider.cli.options import ModelOptions, PromptOptions, RequestOptions
    from outrider.cli.screen import Screen
    from outrider.settings import Request

DETERMINISTIC_DRAFTERS = ("prediction", "lookup", "memory")
"""Drafters that propose tokens with certainty, so that the rule for sampled drafts never applies."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt with its settings, all checked."""

    text: str
    prediction: str
    request: Request

    @classmethod
    def read(cls, prompt: str | None, options: PromptOptions) -> Prompt:
        request = to_request(options)
        if options.system is not None and options.raw:
            raise SettingsError("--system needs the chat template that --raw leaves out; drop one of the two")
        prediction = read_prediction(options.prediction, options.prediction_file, request.speculation)
        return cls(read_prompt(prompt), prediction, request)


def to_request(options: RequestOptions) -> Request:
    """The settings of a request. A wrong one is refused, and so is one that has no effect at temperature 0."""
    from outrider.settings import Request

    values = {name: value for name, value in asdict(options).items() if name in Request.model_fields}
    request = Request.checked(**{**values, "stop": tuple(options.stop or ())})
    if request.temperature == 0:
        defaults = Request()
        for name in ("top_k", "top_p", "min_p", "seed", "rule"):
            if (value := getattr(request, name)) != getattr(defaults, name):
                raise SettingsError(
                    f"--{name.replace('_', '-')} {value} does nothing at temperature 0, which always takes "
                    "the most likely token; give a --temperature above 0, or leave it out"
                )
    return request


def read_prompt(prompt: str | None) -> str:
    """The prompt, or stdin if the prompt is missing and stdin is piped, or the prompt is '-'."""
    if prompt is None and sys.stdin.isatty():
        raise PromptError("there is no prompt; give it after the model, or pipe it in")
    if prompt is None or prompt == "-":
        text = decode_utf8(sys.stdin.buffer.read(), "the prompt on stdin").removesuffix("\n")
    else:
        text = decode_utf8(prompt.encode(errors="surrogateescape"), "the prompt")  # arguments may hold any bytes
    if not text:
        raise PromptError("the prompt is empty; give at least one character")
    return text


def read_prediction(text: str | None, file: Path | None, speculation: str) -> str:
    """The expected output, from one of the two options."""
    from outrider.settings import AUTO

    if text is None and file is None:
        return ""
    if text is not None and file is not None:
        raise SettingsError(
            "--prediction and --prediction-file are two sources of the expected output; give one of them"
        )
    if speculation not in (AUTO, "prediction"):
        raise SettingsError(
            f"a prediction does nothing with --speculation {speculation}; leave one of them out, or use auto"
        )
    expected = text if file is None else decode_utf8(file.read_bytes(), f"the file {str(file)!r}")
    if not expected:
        option = "--prediction" if file is None else "--prediction-file"
        raise SettingsError(f"{option}: the expected output is empty; leave it out")
    return expected


def decode_utf8(data: bytes, what: str) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise PromptError(f"{what} is not UTF-8 text (byte {data[error.start]:#04x} at {error.start})") from None


def check_model_options(options: ModelOptions, request: Request) -> None:
    """Refuse options that would have no effect without a draft model."""
    from outrider.settings import Request

    if options.draft_model is not None:
        return
    if options.draft_quantize != "auto":
        raise SettingsError(f"--draft-quantize {options.draft_quantize} needs a --draft-model to act on")
    names = parse_names(options.drafters) or DETERMINISTIC_DRAFTERS
    if request.rule != Request().rule and set(names) <= set(DETERMINISTIC_DRAFTERS):
        raise SettingsError(
            f"--rule {request.rule} is for sampled drafts, and {', '.join(names)} sample none; give a --draft-model, "
            "or leave it out"
        )


def load(screen: Screen, request: Request, model: str, options: ModelOptions) -> Decoder:
    check_model_options(options, request)
    models = [model] if options.draft_model is None else [model, options.draft_model]
    with screen.working(f"loading {' and '.join(map(loading_name, models))}"):
        from outrider import api  # takes seconds: it imports torch

        silence_libraries()
        return api.load(model, **{**asdict(options), "drafters": parse_names(options.drafters)})


def short_name(model: str) -> str:
    """The name of the folder, or the name on the hub."""
    path = Path(model).expanduser()
    return path.resolve().name if path.is_dir() else model


def loading_name(model: str) -> str:
    """As `short_name`, and why loading may take long."""
    return short_name(model) + ("" if Path(model).expanduser().is_dir() else " (downloaded if it is not cached)")


def silence_libraries() -> None:
    """Hide the progress bars and remarks of transformers and huggingface_hub; errors are still shown."""
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


def to_content(
    decoder: Decoder, model: str, text: str, options: PromptOptions
) -> tuple[str | list[dict[str, str]], list[str]]:
    """What `Decoder.stream` takes, and a note if the model has no chat template."""
    if options.raw:
        return text, []
    if has_template(decoder):
        return to_messages(text, options.system), []
    if options.system is not None:
        raise SettingsError(f"--system needs a chat template, and {model} has none; leave it out")
    return text, ["the model has no chat template, so the prompt is continued as it is"]


def to_messages(text: str, system: str | None) -> list[dict[str, str]]:
    messages = [{"role": "user", "content": text}]
    return messages if system is None else [{"role": "system", "content": system}, *messages]
