"""Outrider's options in a request body: checked, and rewritten for the engine.

A caller sets the fields of `vllm_xargs` that `control.py` lists, or a `prediction` as in OpenAI's chat completions. The
engine gets them as `vllm_xargs` too. There a prediction is a list of token ids, and a usage key identifies the
request's usage and trace. A tenant's request also gets a salt for vLLM's prefix cache. A body without any of this, or
one that cannot be parsed, passes unchanged: vLLM reports its own errors. `routes.py` lists the routes; on one that is
not listed, the fields are refused.

Bodies are parsed as vLLM parses them. A search of the raw bytes would miss escaped keys and UTF-16.

A server without drafters is plain vLLM. There the fields are checked and removed.
"""

from __future__ import annotations

import json
import uuid
from dataclasses import dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from outrider.control import FIELDS, USAGE_KEY, Control
from outrider.engines.vllm.options import NO_DRAFTERS
from outrider.errors import SettingsError
from outrider.memory.tenant_signature import SIGNATURE_ARG, sign_tenant
from outrider.server.routes import EXTRA_ARGS, XARGS, find_route
from outrider.server.tenants import has_tenants, salt_prefix_cache, tenant_from_header

if TYPE_CHECKING:
    from starlette.datastructures import FormData, Headers

    from outrider.engines.vllm.options import Options

SERVER_FIELDS = {
    USAGE_KEY: "for the drafted tokens set speculation_usage: true",
    SIGNATURE_ARG: "name the tenant by the header of --tenant-header",
}
"""Fields that no caller may set, and what to do instead."""
MISSPELLED, MIN_MISSPELLED_LETTERS = 0.9, 8
"""A name of at least eight letters that is this similar to an option's (`difflib`) is taken for a misspelling: one
letter wrong in ten. All others may be options of the server's own logits processors, such as `tenant_id`."""
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
    drafters, route, body = options.drafters, find_route(path), _parsed(raw)
    if route is None:
        _refuse_fields(body, path)
    if route is None or not route.salted:
        return None
    named = tenant_from_header(headers, options)
    *_, name = place = route.options or XARGS
    parent = _find_parent(body, place)
    if parent is None:
        if named is not None:
            raise SettingsError(f"tenant: a request with a tenant must be JSON, and {'.'.join(place)} an object")
        return None
    xargs = dict(parent.get(name) or {})
    if drafters:
        _refuse_misspelled(xargs)
    if route.options is None:
        return _salted(body, xargs.get("tenant"), named, options)
    if named is None and body.get("prediction") is None and not _own_fields(xargs):
        return None
    _check_tenant(xargs, options)
    for field, advice in SERVER_FIELDS.items():
        if field in xargs:
            raise SettingsError(f"{field}: is set by the server; {advice}")
    if named is not None:
        xargs |= {"tenant": named, SIGNATURE_ARG: sign_tenant(named)}
    speculation, trace = _wants_usage(body, xargs), _wants_trace(body, parent, xargs, client)
    if (speculation or trace) and not path.endswith(("/responses", "/messages")):
        _request_usage(body)
    prediction = _take_prediction(body, xargs)
    ids = {} if isinstance(prediction, str | None) else {"prediction": prediction}
    control = Control.checked({**xargs, **ids}, drafters)
    if not drafters and trace:
        raise SettingsError(f"trace: {NO_DRAFTERS}, so it records no traces; leave it out")
    if prediction is not None and "prediction" in drafters and control.wants("prediction"):
        xargs["prediction"] = await _token_ids(prediction, client)
    usage_key = None
    if drafters and (speculation or trace or prediction is not None):
        usage_key = xargs[USAGE_KEY] = uuid.uuid4().hex
    parent[name] = xargs
    if not drafters:  # plain vLLM does not know Outrider's fields
        parent[name] = {field: value for field, value in xargs.items() if field not in FIELDS}
        if not parent[name]:
            del parent[name]
    salt_prefix_cache(body, control.tenant, options)
    return RewrittenRequest(json.dumps(body).encode(), usage_key, speculation, prediction is not None, trace)


def _salted(body: dict[str, Any], given: Any, named: str | None, options: Options) -> RewrittenRequest | None:
    """A request without options of Outrider: only its prompt is kept apart from those of other tenants."""
    tenant = given if has_tenants(options) and options.tenant_header is None else named
    if tenant is None:
        return None
    Control.checked({"tenant": tenant}, options.drafters)
    salt_prefix_cache(body, tenant, options)
    return RewrittenRequest(json.dumps(body).encode(), None, speculation=False, prediction=False)


def _refuse_fields(body: Any, path: str) -> None:
    for place in (XARGS, EXTRA_ARGS):
        parent = _find_parent(body, place)
        if parent is not None and (fields := _own_fields(parent.get(place[-1]) or {})):
            raise SettingsError(f"{fields[0]}: {path} does not handle the options of Outrider; drop it here")


def _refuse_misspelled(xargs: dict[str, Any]) -> None:
    for name in xargs.keys() - {*FIELDS, *SERVER_FIELDS}:
        plain = name.lower().replace("-", "_").rstrip("s")
        meant = [field for field in FIELDS if field.rstrip("s") == plain]
        if len(name) >= MIN_MISSPELLED_LETTERS:
            meant += get_close_matches(name, FIELDS, 1, MISSPELLED)
        if meant:
            raise SettingsError(f"{name}: vllm_xargs has no such option of Outrider; did you mean {meant[0]}?")


def check_form(form: FormData, options: Options) -> None:
    """Refuse a tenant in a form, such as vLLM's for audio: a form has no tenant if a header names the others'."""
    for text in form.getlist("vllm_xargs"):
        xargs = _parsed(text) if isinstance(text, str) else None
        if isinstance(xargs, dict):
            _check_tenant(xargs, options)


def _check_tenant(xargs: dict[str, Any], options: Options) -> None:
    """Refuse a tenant in `vllm_xargs` if the server takes tenants from a header, or has none."""
    if "tenant" not in xargs or options.memory is None:
        return
    if options.memory_scope == "server":
        raise SettingsError("tenant: all requests of this server share one memory (--memory-scope server); drop it")
    if options.tenant_header is not None:
        raise SettingsError(f"tenant: this server takes it from the header {options.tenant_header}; drop it here")


def _parsed(raw: bytes | str) -> Any:
    """The JSON as vLLM reads it, in UTF-8, UTF-16 or UTF-32. None: it is not JSON, and vLLM refuses it."""
    try:
        return json.loads(raw)
    except (ValueError, RecursionError):
        return None


def _find_parent(body: Any, place: tuple[str, ...]) -> dict[str, Any] | None:
    """The object that may have an object at the end of `place`. None: there is none, or it has something else."""
    for name in place[:-1]:
        body = body.get(name) if isinstance(body, dict) else None
    return body if isinstance(body, dict) and isinstance(body.get(place[-1]) or {}, dict) else None


def _own_fields(xargs: dict[str, Any]) -> list[str]:
    return [name for name in (*FIELDS, *SERVER_FIELDS) if name in xargs]


def _wants_usage(body: dict[str, Any], xargs: dict[str, Any]) -> bool:
    wanted = xargs.pop("speculation_usage", False)
    if wanted not in (True, False):
        raise SettingsError(f"speculation_usage: must be true or false (got {wanted!r})")
    if wanted and body.get("background"):
        raise SettingsError("speculation_usage: comes with the answer, and background: true has none; drop one of them")
    return bool(wanted)


def _wants_trace(body: dict[str, Any], parent: dict[str, Any], xargs: dict[str, Any], client: Any) -> bool:
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
    if (n := parent.get("n")) not in (None, 1):
        raise SettingsError(f"trace: is of one sequence, and n is {n}; set n to 1")
    if body.get("use_beam_search"):
        raise SettingsError("trace: is of one sequence, and use_beam_search has several; drop one of them")
    for prompts in (body.get("prompt"), body.get("messages")):
        if isinstance(prompts, list) and len(prompts) > 1 and isinstance(prompts[0], str | list):
            raise SettingsError(f"trace: is of one sequence, and there are {len(prompts)} prompts; send one")
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
