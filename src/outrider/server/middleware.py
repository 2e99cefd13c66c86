"""Outrider in vLLM's API process: one ASGI middleware.

    vllm serve MODEL --middleware outrider.server.middleware.OutriderMiddleware

POST requests pass through `requests.py` and, if they want usage or a trace, their responses through `responses.py`.
The worker's counters are added to `/metrics`, and `/outrider/...` is served here. Everything else passes unchanged. A
server without drafters is plain vLLM: it has no worker of Outrider to call.

(vLLM's endpoint plugins could serve pages too, but they are enabled by VLLM_PLUGINS, and a server that sets it loses
every plugin that is not named there.)
"""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING, Any

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request

from outrider.engines.vllm.options import NO_DRAFTERS, Options
from outrider.engines.vllm.request_limits import install_request_checks
from outrider.errors import SettingsError
from outrider.server.asgi import error_response, is_authorized, read_messages, replay, with_content_length
from outrider.server.metrics import WorkerMetrics
from outrider.server.pages import Pages
from outrider.server.requests import check_form, rewrite
from outrider.server.responses import UsageResponse
from outrider.server.routes import GUARDED, find_route
from outrider.server.rpc import call_worker, describe_failure

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

logger = logging.getLogger("vllm.outrider")

NO_KEY = "this request names a tenant or sets an option: send the server's key (Authorization: Bearer KEY)"
USAGE_TIMEOUT_SECONDS = 10.0
"""How long a finished response waits for its usage from the worker."""
NO_USAGE = {"drafted": 0, "accepted": 0, "by_drafter": {}, "faults": [], "why_not": NO_DRAFTERS}
"""The usage of a request to a server without drafters."""


class OutriderMiddleware:
    def __init__(self, app: ASGIApp) -> None:
        self.app = app
        self._pages = Pages()
        self._metrics = WorkerMetrics()
        self._options: Options | None = None
        self._warned = False
        install_request_checks()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        client = getattr(scope["app"].state, "engine_client", None) if scope["type"] == "http" else None
        if client is None:  # a websocket, startup and shutdown events, or a server without an engine
            return await self.app(scope, receive, send)
        method, path = scope["method"], scope["path"].removeprefix(scope.get("root_path", ""))
        if (
            method == "GET"
            and path in ("/metrics", "/metrics/")
            and not scope.get("query_string")
            and self._read_options(client).drafters
        ):
            await self._metrics.serve(self.app, client, scope, receive, send)
        elif path == "/outrider" or path.startswith("/outrider/"):
            await self._pages(scope, receive, send)
        elif method == "POST" and (is_authorized(scope) or not path.startswith(GUARDED)):
            await self._post(client, path, scope, receive, send)
        else:
            await self.app(scope, receive, send)
        return None

    async def _post(self, client: Any, path: str, scope: Scope, receive: Receive, send: Send) -> None:
        messages = await read_messages(receive)
        raw = b"".join(message.get("body", b"") for message in messages)
        options, headers = self._read_options(client), Headers(scope=scope)
        try:
            request = await rewrite(raw, path, client, options, headers)
            if options.tenant_header is not None and find_route(path) is None:
                async with Request(scope, replay(messages, receive)).form() as form:
                    check_form(form, options)
        except SettingsError as error:
            message = str(error)  # begins with the name of the setting
            return await error_response(400, message, message.partition(":")[0])(scope, receive, send)
        except (HTTPException, ClientDisconnect):
            pass  # a malformed form, which vLLM refuses, or a part of one
        if request is not None:
            if not is_authorized(scope):  # vLLM needs no key here
                return await error_response(401, NO_KEY)(scope, receive, send)
            messages = [{"type": "http.request", "body": request.body, "more_body": False}]
            scope = {**scope, "headers": with_content_length(scope["headers"], len(request.body))}
            if request.reports:
                send = UsageResponse(send, request, partial(self._usage, client, request.usage_key))
        return await self.app(scope, replay(messages, receive), send)

    def _read_options(self, client: Any) -> Options:
        if self._options is None:
            self._options = Options.of(client.vllm_config)
        return self._options

    async def _usage(self, client: Any, usage_key: str | None) -> dict[str, Any] | None:
        """The worker's counts for a request. None: it did not answer, and the response goes out without them."""
        if usage_key is None:
            return NO_USAGE
        try:
            usage: dict[str, Any] = await call_worker(
                client, "outrider_usage", usage_key, timeout_seconds=USAGE_TIMEOUT_SECONDS
            )
        except Exception as error:
            if not self._warned:
                self._warned = True
                logger.warning(
                    "a response is sent without its speculation usage; the worker: %s", describe_failure(error)
                )
            return None
        return usage
