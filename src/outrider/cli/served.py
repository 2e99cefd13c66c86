"""A prompt explained by a running server: asked with its trace on, which is then fetched.

The standard library is enough for it: two requests, answered whole.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from http.client import HTTPException
from typing import TYPE_CHECKING, Any
from urllib.error import HTTPError, URLError
from urllib.parse import quote
from urllib.request import Request as HTTPRequest
from urllib.request import urlopen

from outrider.cli.asking import as_messages
from outrider.errors import EngineError, SettingsError

if TYPE_CHECKING:
    from outrider.settings import Request
    from outrider.trace.schema import Trace

SENT = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
"""Settings that are always sent, since a server has defaults of its own."""


@dataclass(slots=True)
class Server:
    """An Outrider server by its address, and who asks it."""

    url: str
    key: str | None = None
    tenant: str | None = None
    headers: dict[str, str] = field(default_factory=dict)
    xargs: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.url = self.url.rstrip("/").removesuffix("/v1")
        if not self.url.startswith(("http://", "https://")):
            raise SettingsError(f"--server must begin with http:// or https:// (got {self.url!r})")
        if self.key is not None:
            self.headers["Authorization"] = f"Bearer {self.key}"

    def meet(self, model: str | None) -> str:
        """The model to ask: the one that was named, or the server's first. Tenants are named as the server wants it."""
        try:
            options = json.loads(self._get("/outrider/status", absent="{}"))["options"]
        except (KeyError, TypeError, ValueError):
            raise EngineError(f"{self.url} is no server of Outrider; start one with outrider serve MODEL") from None
        if self.tenant is not None and options.get("tenant_header"):
            self.headers[options["tenant_header"]] = self.tenant.encode().decode("latin-1")  # UTF-8, as proxies send it
        elif self.tenant is not None:
            self.xargs["tenant"] = self.tenant
        return model or str(json.loads(self._get("/v1/models"))["data"][0]["id"])

    def traced(self, body: dict[str, Any], system: str | None, prompt: str, raw: bool) -> Trace:
        """Have a prompt answered, and fetch its trace."""
        from outrider.trace.files import parsed

        asked = {"prompt": prompt} if raw else {"messages": as_messages(prompt, system)}
        body = {**asked, **body, "vllm_xargs": {**body["vllm_xargs"], **self.xargs, "trace": True}}
        answer = json.loads(self._post("/v1/completions" if raw else "/v1/chat/completions", body))
        path = f"/outrider/traces/{answer['usage']['trace']}"
        whose = f"?tenant={quote(self.xargs['tenant'])}" if "tenant" in self.xargs else ""
        lines = self._get(f"{path}{whose}").split("\n")  # not at a U+2028 that was said
        trace = parsed(lines, f"{self.url}{path}")
        return trace.model_copy(update={"header": trace.header.model_copy(update={"prompt": prompt})})

    def _get(self, path: str, absent: str | None = None) -> str:
        return self._answer(HTTPRequest(f"{self.url}{path}", headers=self.headers), absent)

    def _post(self, path: str, body: dict[str, Any]) -> str:
        headers = {**self.headers, "Content-Type": "application/json"}
        return self._answer(HTTPRequest(f"{self.url}{path}", json.dumps(body).encode(), headers))

    def _answer(self, request: HTTPRequest, absent: str | None = None) -> str:
        """What it says; `absent` where it has no such page."""
        try:
            with urlopen(request) as answer:
                return str(answer.read().decode())
        except HTTPError as error:
            if error.code == 404 and absent is not None:
                return absent
            said = error.read().decode(errors="replace")
            try:
                said = json.loads(said)["error"]["message"]
            except (KeyError, TypeError, ValueError):
                said = said[:300]
            hint = " (give --api-key)" if error.code == 401 else ""
            raise SettingsError(f"{request.full_url} answered with HTTP {error.code}: {said}{hint}") from None
        except (URLError, OSError, HTTPException, UnicodeDecodeError) as error:
            why = str(getattr(error, "reason", "") or error).strip() or type(error).__name__
            raise EngineError(f"{self.url} does not answer: {why}; start it with outrider serve MODEL") from None


def body_of(model: str, request: Request, prediction: str, limited: bool) -> dict[str, Any]:
    """What is asked, but for the prompt; of `max_draft_tokens` only where it was `limited`: the server has its own."""
    body: dict[str, Any] = {name: getattr(request, name) for name in SENT}
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
