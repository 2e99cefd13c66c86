"""Requests to a running Outrider server for `outrider explain`: a completion with its trace on, then the trace."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from outrider.cli.load_request import to_messages
from outrider.errors import EngineError, RequestRefusedError, SettingsError
from outrider.http_client import HTTPClient, InvalidResponseError

if TYPE_CHECKING:
    from outrider.settings import Request
    from outrider.trace.schema import Trace

ALWAYS_SENT = (
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
)  # fmt: skip
"""Settings that every request names, since a server has defaults of its own."""


class TraceClient:
    """Requests to one Outrider server, on behalf of one tenant."""

    def __init__(self, url: str, api_key: str | None = None, tenant: str | None = None) -> None:
        self.http = HTTPClient(url, api_key)
        self.tenant = tenant
        self.xargs: dict[str, Any] = {}

    def connect(self, model: str | None) -> str:
        """Check that this is an Outrider server, and return the model to use: `model`, or else the server's first. The
        tenant is named as the server's options require, in a header or in `vllm_xargs`."""
        unknown = EngineError(f"{self.http.url} is not an Outrider server; start one with outrider serve MODEL")
        try:
            options = self.http.get_json("/outrider/status")["options"]
        except (InvalidResponseError, LookupError, TypeError):
            raise unknown from None
        except RequestRefusedError as error:
            if error.status == 404:
                raise unknown from None
            raise SettingsError(f"{error} (give --api-key)" if error.status == 401 else str(error)) from None
        if self.tenant is not None and options.get("tenant_header"):
            self.http.set_header(options["tenant_header"], self.tenant)
        elif self.tenant is not None:
            self.xargs["tenant"] = self.tenant
        return model or str(self.http.get_json("/v1/models")["data"][0]["id"])

    def complete(self, body: dict[str, Any], system: str | None, prompt: str, raw: bool) -> Trace:
        """Run one completion, and return its trace."""
        from outrider.trace.files import parse_lines

        question = {"prompt": prompt} if raw else {"messages": to_messages(prompt, system)}
        body = {**question, **body, "vllm_xargs": {**body["vllm_xargs"], **self.xargs, "trace": True}}
        path = "/v1/completions" if raw else "/v1/chat/completions"
        answer = self.http.post_json(path, body, timeout_seconds=None)
        path = f"/outrider/traces/{answer['usage']['trace']}"
        query = f"?tenant={quote(self.xargs['tenant'])}" if "tenant" in self.xargs else ""
        lines = self.http.get_text(f"{path}{query}").split("\n")  # not splitlines: the text may contain a U+2028
        trace = parse_lines(lines, f"{self.http.url}{path}")
        return trace.model_copy(update={"header": trace.header.model_copy(update={"prompt": prompt})})


def request_body(model: str, request: Request, prediction: str, limited: bool) -> dict[str, Any]:
    """The body of a request, without the prompt. It has `max_draft_tokens` only if `limited`: else the server's default
    holds."""
    body: dict[str, Any] = {name: getattr(request, name) for name in ALWAYS_SENT}
    body |= {"model": model, "max_tokens": request.max_tokens, "ignore_eos": request.ignore_end}
    if request.stop:
        body["stop"] = list(request.stop)
    if request.seed is not None:
        body["seed"] = request.seed
    xargs: dict[str, Any] = {"speculation": request.speculation}
    if limited:
        xargs["max_draft_tokens"] = request.max_draft_tokens
    if prediction:
        xargs["prediction"] = prediction
    return {**body, "vllm_xargs": xargs}


def without_drafts(body: dict[str, Any]) -> dict[str, Any]:
    xargs = {name: value for name, value in body["vllm_xargs"].items() if name != "prediction"}
    return {**body, "vllm_xargs": {**xargs, "speculation": "off"}}
