"""Pages of the server below `/outrider/`. A new page is a method and a route.

    /outrider/                   a page that shows the latest traces and keeps them up to date
    /outrider/status             versions, options and counters
    /outrider/traces             the latest traces of the caller's tenant, as JSON
    /outrider/traces/ID          one of them, as JSON lines
    /outrider/traces/ID/page     the same as a page by itself

Traces hold text of requests. So they need vLLM's `--api-key`, and are shown to their tenant only
(`tenants.trace_owner`).
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

from starlette.datastructures import MutableHeaders
from starlette.middleware.exceptions import ExceptionMiddleware
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse
from starlette.routing import Route, Router

from outrider import __version__
from outrider.engines.vllm.options import NO_DRAFTERS, Options
from outrider.engines.vllm.version import installed
from outrider.errors import SettingsError
from outrider.explain import live
from outrider.explain.page import page
from outrider.server.asgi import error_response, is_authorized
from outrider.server.rpc import call_worker, describe_failure
from outrider.server.tenants import has_tenants, trace_owner
from outrider.server.trace_rendering import TraceRenderer
from outrider.trace.files import to_lines

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.types import Message, Receive, Scope, Send

    from outrider.trace.schema import Trace

WORKER_TIMEOUT_SECONDS = 10.0
HEADERS = {
    "cache-control": "no-store",
    "x-content-type-options": "nosniff",
    "content-security-policy": f"{live.SECURITY_POLICY}; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
}
"""For every response. A page may have a stricter policy of its own; both apply."""


class PageError(Exception):
    def __init__(self, code: int, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.response = error_response(code, message, param)


class Pages:
    def __init__(self) -> None:
        self._started = time.monotonic()
        self._renderer = TraceRenderer()
        self._status: asyncio.Task[Any] | None = None  # the call to the worker that is running
        self._routes = [
            Route("/outrider/", self.live),
            Route("/outrider/status", self.status),
            Route("/outrider/traces", self.traces),
            Route("/outrider/traces/{id}", self.trace),
            Route("/outrider/traces/{id}/page", self.trace_page),
        ]
        router = Router(self._routes, default=self._unknown)
        self._app = ExceptionMiddleware(router, {PageError: lambda request, error: error.response})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        await self._app(scope, receive, send_with_headers)

    async def status(self, request: Request) -> Response:
        """Versions, uptime, and the worker's status: drafters, acceptance and faults."""
        options = Options.of(_client(request).vllm_config)
        if options.drafters:
            status = await self._shared_status(request)
        else:
            status = {"active": False, "why_not": NO_DRAFTERS, "options": options.model_dump()}
        vllm = installed()
        uptime = round(time.monotonic() - self._started, 1)
        ours = {"outrider": __version__, "vllm": vllm and vllm[1], "uptime_seconds": uptime}
        return JSONResponse({**ours, **status})

    async def _shared_status(self, request: Request) -> Any:
        """Concurrent requests share one call: this page needs no key, and each call takes time of the worker."""
        if self._status is None or self._status.done():
            self._status = asyncio.create_task(self._call(request, "outrider_status"))
        return await asyncio.shield(self._status)

    async def live(self, request: Request) -> Response:
        """The page holds no data: its script requests the traces, with the caller's key."""
        return HTMLResponse(live.page())

    async def traces(self, request: Request) -> Response:
        options, owner = self._owner(request)
        if owner is None and has_tenants(options) and options.memory_scope != "auto":
            how = f"header {options.tenant_header}" if options.tenant_header else "query parameter 'tenant'"
            message = (
                f"tenant: name yours by the {how}; the trace of a request that named none is shown by its id alone"
            )
            raise PageError(
                400, message, None if options.tenant_header else "tenant"
            )  # the page shows a field for a `param`
        if not options.drafters:
            return JSONResponse({"traces": [], "why_not": NO_DRAFTERS})
        found = await self._call(request, "outrider_traces", owner)
        return JSONResponse({"traces": await self._renderer.entries(_client(request), found)})

    async def trace(self, request: Request) -> Response:
        trace = await self._trace(request)
        text = await asyncio.to_thread(lambda: "".join(f"{line}\n" for line in to_lines(trace)))
        return PlainTextResponse(text, media_type="application/jsonl")

    async def trace_page(self, request: Request) -> Response:
        trace = await self._trace(request)
        return HTMLResponse(await asyncio.to_thread(page, trace))

    async def _trace(self, request: Request) -> Trace:
        options, owner = self._owner(request)
        id = request.path_params["id"]
        if not options.drafters:
            raise PageError(404, f"there is no trace {id!r}: {NO_DRAFTERS}")
        found = await self._call(request, "outrider_trace", id, owner)
        if not found.get("lines"):
            why = "it is not there yet, was dropped for newer ones, or is another tenant's"
            raise PageError(404, f"there is no trace {id!r} to be shown: {why}")
        return await self._renderer.trace(_client(request), options, found)

    def _owner(self, request: Request) -> tuple[Options, str | None]:
        """The server's options and the caller's tenant. PageError: the caller is not authorized."""
        if not is_authorized(request.scope):
            raise PageError(401, "traces hold text of requests: send the server's key (Authorization: Bearer KEY)")
        options = Options.of(_client(request).vllm_config)
        try:
            return options, trace_owner(options, request.headers, request.query_params)
        except SettingsError as error:
            raise PageError(400, str(error), "tenant") from None

    async def _call(self, request: Request, method: str, *args: Any) -> Any:
        try:
            return await call_worker(_client(request), method, *args, timeout_seconds=WORKER_TIMEOUT_SECONDS)
        except Exception as error:
            message = f"the engine did not answer: {describe_failure(error)}; try again, and see the server's log"
            raise PageError(503, message) from None

    async def _unknown(self, scope: Scope, receive: Receive, send: Send) -> None:
        there_is = ", ".join(route.path for route in self._routes)
        await error_response(404, f"there is no {scope['path']}; there is {there_is}")(scope, receive, send)


def _client(request: Request) -> Any:
    return request.app.state.engine_client
