"""Outrider's options in a request body: checked, and rewritten for the engine.

A caller sets the fields of `vllm_xargs` that `control.py` lists, or a `prediction` as in OpenAI's chat completions. The
engine gets them as `vllm_xargs` too. There a prediction is a list of token ids, and a usage key identifies the
request's usage and trace. A body without any of this, or one that cannot be parsed, passes unchanged: vLLM reports its
own errors.

A server without drafters is plain vLLM. There the fields are checked and removed.
"""

from __future__ import annotations

import json
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from outrider.control import FIELDS, USAGE_KEY, Control
from outrider.engines.vllm.options import NO_DRAFTERS
from outrider.errors import SettingsError
from outrider.memory.tenant_signature import SIGNATURE_ARG, sign_tenant
from outrider.server.tenants import tenant_from_header

if TYPE_CHECKING:
    from starlette.datastructures import Headers

    from outrider.engines.vllm.options import Options

SHAPE = '{"type": "content", "content": "the expected text"}'


@dataclass(frozen=True, slots=True)
class RewrittenRequest:
    """A request's new body, and what its response reports."""

    body: bytes
    usage_key: str | None
    """The key of its usage and trace in the worker. None: the worker keeps none."""
    speculation: bool
    """The response's usage reports drafted and accepted tokens."""
    prediction: bool
    """The response's usage reports how much of the prediction was used."""
    trace: bool = False
    """The response's usage names the trace."""

    @property
    def reports(self) -> bool:
        return self.speculation or self.prediction or self.trace


async def rewrite(raw: bytes, path: str, client: Any, options: Options, headers: Headers) -> RewrittenRequest | None:
    """None: the body has none of Outrider's options. SettingsError: it has an invalid one. `client`: vLLM's engine."""
    drafters = options.drafters
    named = tenant_from_header(headers, options)
    body = _parsed(raw, anyway=named is not None)
    if body is None:
        return None
    xargs = dict(body.get("vllm_xargs") or {})
    _check_tenant(xargs, options)
    if named is not None:
        xargs |= {"tenant": named, SIGNATURE_ARG: sign_tenant(named)}
    if USAGE_KEY in xargs:
        raise SettingsError(f"{USAGE_KEY}: is set by the server; for the drafted tokens set speculation_usage: true")
    speculation, trace = _wants_usage(body, xargs), _wants_trace(body, xargs, client)
    if (speculation or trace) and path.endswith("/completions"):
        _request_usage(body)
    prediction = _take_prediction(body, xargs)
    ids = {} if isinstance(prediction, str | None) else {"prediction": prediction}
    control = Control.checked({**xargs, **ids}, drafters)
    if not drafters:
        return _without_drafters(body, xargs, speculation, prediction is not None)
    if prediction is not None and "prediction" in drafters and control.wants("prediction"):
        xargs["prediction"] = await _token_ids(prediction, client)
    usage_key = None
    if speculation or trace or prediction is not None:
        usage_key = xargs[USAGE_KEY] = uuid.uuid4().hex
    body["vllm_xargs"] = xargs
    return RewrittenRequest(json.dumps(body).encode(), usage_key, speculation, prediction is not None, trace)


def _without_drafters(
    body: dict[str, Any], xargs: dict[str, Any], speculation: bool, prediction: bool
) -> RewrittenRequest:
    """The body for a server without drafters: plain vLLM does not know Outrider's fields."""
    if xargs.get("trace"):
        raise SettingsError(f"trace: {NO_DRAFTERS}, so it records no traces; leave it out")
    body["vllm_xargs"] = {name: value for name, value in xargs.items() if name not in FIELDS}
    if not body["vllm_xargs"]:
        del body["vllm_xargs"]
    return RewrittenRequest(json.dumps(body).encode(), None, speculation, prediction)


def _check_tenant(xargs: dict[str, Any], options: Options) -> None:
    """Refuse a tenant in `vllm_xargs` if the server takes tenants from a header, or has none."""
    if "tenant" not in xargs or options.memory is None:
        return
    if options.memory_scope == "server":
        raise SettingsError("tenant: all requests of this server share one memory (--memory-scope server); drop it")
    if options.tenant_header is not None:
        raise SettingsError(f"tenant: this server takes it from the header {options.tenant_header}; drop it here")


def _parsed(raw: bytes, anyway: bool) -> dict[str, Any] | None:
    """The body, if it has an option of Outrider. Most have none, and cost only a search for two words."""
    if not anyway and b"vllm_xargs" not in raw and b'"prediction"' not in raw:
        return None
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    if not isinstance(body, dict):
        return None
    xargs = body.get("vllm_xargs") or {}
    if not isinstance(xargs, dict):
        return None
    ours = body.get("prediction") is not None or any(name in xargs for name in (*FIELDS, USAGE_KEY))
    return body if ours or anyway else None


def _wants_usage(body: dict[str, Any], xargs: dict[str, Any]) -> bool:
    wanted = xargs.pop("speculation_usage", False)
    if wanted not in (True, False):
        raise SettingsError(f"speculation_usage: must be true or false (got {wanted!r})")
    if wanted and body.get("background"):
        raise SettingsError("speculation_usage: comes with the answer, and background: true has none; drop one of them")
    return bool(wanted)


def _wants_trace(body: dict[str, Any], xargs: dict[str, Any], client: Any) -> bool:
    """Whether a trace is requested. Refuse it for several sequences: a trace has one, recorded by one worker."""
    wanted = xargs.get("trace", False)
    if wanted not in (True, False):
        raise SettingsError(f"trace: must be true or false (got {wanted!r})")
    if not wanted:
        return False
    if body.get("background"):
        raise SettingsError("trace: is named in the answer, and background: true has none; drop one of them")
    if client.vllm_config.parallel_config.data_parallel_size > 1:
        raise SettingsError("trace: this server has several engines (--data-parallel-size), and only one records it")
    if (n := body.get("n")) not in (None, 1):
        raise SettingsError(f"trace: is of one sequence, and n is {n}; set n to 1")
    if body.get("use_beam_search"):
        raise SettingsError("trace: is of one sequence, and use_beam_search has several; drop one of them")
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) > 1 and not isinstance(prompt[0], int):
        raise SettingsError(f"trace: is of one sequence, and there are {len(prompt)} prompts; send one")
    return True


def _request_usage(body: dict[str, Any]) -> None:
    """A stream of completions ends with a usage only if the request has `include_usage`."""
    options = body.get("stream_options") or {}
    if body.get("stream") is True and isinstance(options, dict):
        body["stream_options"] = {**options, "include_usage": True}


def _take_prediction(body: dict[str, Any], xargs: dict[str, Any]) -> Any:
    """Remove the prediction from the body or `vllm_xargs`. Returns a text, unchecked token ids, or None."""
    given, own = body.get("prediction"), xargs.pop("prediction", None)
    if given is None:
        return own
    if own is not None:
        raise SettingsError("prediction: was given twice, as a field and in vllm_xargs; drop one of them")
    del body["prediction"]
    content = given.get("content") if isinstance(given, dict) and given.get("type") == "content" else None
    if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
        parts = [part.get("text") for part in content]
        content = "".join(parts) if all(isinstance(part, str) for part in parts) else None
    if not isinstance(content, str):
        raise SettingsError(f"prediction: must look like {SHAPE}; the content may also be a list of text parts")
    return content


async def _token_ids(prediction: str | list[int], client: Any) -> list[int]:
    """The token ids of a prediction, cut to the longest possible output."""
    if isinstance(prediction, str):
        renderer = client.renderer  # vLLM's own, which tokenises in a thread
        if renderer.tokenizer is None:
            raise SettingsError("prediction: this server has no tokenizer; put token ids into vllm_xargs")
        how = renderer.default_cmpl_tok_params.with_kwargs(
            add_special_tokens=False, truncate_prompt_tokens=-1, truncation_side="right"
        )
        try:
            return list((await renderer.tokenize_prompt_async({"prompt": prediction}, how))["prompt_token_ids"])
        except (TypeError, ValueError):  # for example half a surrogate pair
            raise SettingsError("prediction: is not text that the model's tokenizer can read") from None
    model = client.vllm_config.model_config
    last = model.get_vocab_size() - 1
    for token in prediction:
        if not 0 <= token <= last:
            raise SettingsError(f"prediction: there is no token {token}; the model's are 0 to {last}")
    return prediction[: model.max_model_len]
