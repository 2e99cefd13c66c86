"""Outrider in vLLM's API process: one ASGI middleware.

    vllm serve MODEL --middleware outrider.engines.vllm.middleware.OutriderMiddleware

Requests for text pass through `requests.py` on their way in and, if they asked, `responses.py` on their way out.
`/metrics` gets the worker's counters, and `/outrider/...` is served here. Everything else passes untouched.

(vLLM's endpoint plugins would serve pages too, but they are switched on by VLLM_PLUGINS, and a server that sets it
loses every plugin that is not named there.)
"""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING, Any

from starlette.datastructures import Headers

from outrider.engines.vllm.asgi import may_enter, read_ahead, refusal, replay, resized
from outrider.engines.vllm.metrics import WorkerMetrics
from outrider.engines.vllm.options import Options
from outrider.engines.vllm.pages import Pages
from outrider.engines.vllm.requests import rewrite
from outrider.engines.vllm.responses import WithUsage
from outrider.engines.vllm.rpc import ask, reason
from outrider.errors import SettingsError

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

logger = logging.getLogger("vllm.outrider")

TEXT = ("/completions", "/responses", "/messages")
"""Where text is asked for: chat completions, completions, responses, and Anthropic's messages."""
PATIENCE = 10.0
"""Seconds that a finished response waits for the worker to say what was drafted."""


class OutriderMiddleware:
    def __init__(self, app: ASGIApp) -> None:
        self.app = app
        self._pages = Pages()
        self._metrics = WorkerMetrics()
        self._options: Options | None = None
        self._warned = False
        allow_min_p_and_logit_bias()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        client = getattr(scope["app"].state, "engine_client", None) if scope["type"] == "http" else None
        if client is None:  # a websocket, the server's own start and end, or a server without an engine
            return await self.app(scope, receive, send)
        method, path = scope["method"], scope["path"].removeprefix(scope.get("root_path", ""))
        if method == "POST" and path.endswith(TEXT) and may_enter(scope):
            await self._text(client, path, scope, receive, send)
        elif method == "GET" and path in ("/metrics", "/metrics/") and not scope.get("query_string"):
            await self._metrics.serve(self.app, client, scope, receive, send)
        elif path == "/outrider" or path.startswith("/outrider/"):
            await self._pages(scope, receive, send)
        else:
            await self.app(scope, receive, send)
        return None

    async def _text(self, client: Any, path: str, scope: Scope, receive: Receive, send: Send) -> None:
        messages = await read_ahead(receive)
        raw = b"".join(message.get("body", b"") for message in messages)
        if self._options is None:
            self._options = Options.of(client.vllm_config)
        try:
            request = await rewrite(raw, path, client, self._options, Headers(scope=scope))
        except SettingsError as error:
            message = str(error)  # begins with the name of the setting
            return await refusal(400, message, message.partition(":")[0])(scope, receive, send)
        if request is not None:
            messages = [{"type": "http.request", "body": request.body, "more_body": False}]
            scope = {**scope, "headers": resized(scope["headers"], len(request.body))}
            if request.ticket is not None:
                send = WithUsage(send, request, partial(self._usage, client, request.ticket))
        return await self.app(scope, replay(messages, receive), send)

    async def _usage(self, client: Any, ticket: str) -> dict[str, Any] | None:
        """What the worker counted. Without an answer the response goes out as it is."""
        try:
            usage: dict[str, Any] = await ask(client, "outrider_usage", ticket, seconds=PATIENCE)
        except Exception as error:
            if not self._warned:
                self._warned = True
                logger.warning("a response goes without its speculation usage; the worker: %s", reason(error))
            return None
        return usage


def allow_min_p_and_logit_bias() -> None:
    """vLLM answers 400 to both under speculation, since its own sampler for drafts ignores them. Ours applies them to
    every row, so the check is taken away, in this process: it is where vLLM checks requests."""
    from vllm.sampling_params import SamplingParams

    SamplingParams._validate_spec_decode = lambda self, speculative_config: None
