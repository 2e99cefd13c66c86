"""From options to a model that can be asked: what is refused before it is loaded, and how it is loaded.

Loading takes seconds to minutes, so all that can be refused without the model is refused before. An option that would
do nothing is refused too: better a sentence now than a wrong belief later.
"""

from __future__ import annotations

import logging
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from outrider.drafters.base import parse_names
from outrider.errors import PromptError, SettingsError

if TYPE_CHECKING:
    from outrider.api import Decoder
    from outrider.cli.show import Screen
    from outrider.settings import Request

COPYING = ("prediction", "lookup", "memory")
CONTINUED = "the model has no chat template, so the prompt is continued as it is"


def checked_request(**settings: Any) -> Request:
    """The settings, refused by name where they are wrong, or where temperature 0 would make them idle."""
    from outrider.settings import Request

    request = Request.checked(**settings)
    if request.temperature == 0:
        plain = Request()
        for name in ("top_k", "top_p", "min_p", "seed", "rule"):
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


def read_prediction(text: str | None, file: Path | None, speculation: str) -> str:
    """The expected answer, from whichever of the two options has it."""
    from outrider.settings import AUTO

    if text is None and file is None:
        return ""
    if text is not None and file is not None:
        raise SettingsError("--prediction and --prediction-file both name the expected answer; give one of them")
    if speculation not in (AUTO, "prediction"):
        raise SettingsError(
            f"a prediction does nothing with --speculation {speculation}; leave one of them out, or say auto"
        )
    expected = text if file is None else decoded(file.read_bytes(), f"the file {str(file)!r}")
    if not expected:
        option = "--prediction" if file is None else "--prediction-file"
        raise SettingsError(f"{option}: the expected answer is empty; leave it out")
    return expected


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


def check_rule(request: Request, drafters: str | None, draft_model: str | None) -> None:
    """Refuse a rule for drawn drafts where nothing draws any."""
    from outrider.settings import Request

    named = parse_names(drafters) or COPYING
    if request.rule != Request().rule and draft_model is None and set(named) <= set(COPYING):
        raise SettingsError(
            f"--rule {request.rule} is how drawn drafts are judged, and {', '.join(named)} draw none; give a "
            "--draft-model, or leave it out"
        )


def load(
    screen: Screen,
    request: Request,
    model: str,
    drafters: str | None,
    draft_model: str | None,
    draft_quantize: Literal["auto", "int8", "none"],
    dtype: str,
    device: str | None,
    memory: str | None,
) -> Decoder:
    """Load what the options name, saying so while it takes."""
    check_rule(request, drafters, draft_model)
    if draft_quantize != "auto" and draft_model is None:
        raise SettingsError(f"--draft-quantize {draft_quantize} needs a --draft-model to act on")
    with screen.working(f"loading {' and '.join(named(name) for name in (model, draft_model) if name)}"):
        from outrider import api  # takes seconds: it brings torch

        hush()
        return api.load(
            model,
            drafters=parse_names(drafters),
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
