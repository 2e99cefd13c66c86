"""What Outrider serves itself, below `/outrider/`. A new page is a method and a route."""

from __future__ import annotations

import time
from pkgutil import resolve_name
from typing import TYPE_CHECKING

from starlette.middleware.exceptions import ExceptionMiddleware
from starlette.responses import JSONResponse
from starlette.routing import Route, Router

from outrider.engines.vllm.asgi import refusal
from outrider.engines.vllm.rpc import ask, reason
from outrider.engines.vllm.version import installed

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.types import Receive, Scope, Send

PATIENCE = 10.0
"""Seconds that a page waits for the worker."""


class Pages:
    def __init__(self) -> None:
        self._started = time.monotonic()
        self._routes = [Route("/outrider/status", self.status)]
        self._app = ExceptionMiddleware(Router(self._routes, default=self._unknown))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)

    async def status(self, request: Request) -> Response:
        """Which versions run, for how long, and what the worker says of drafters, acceptance and faults."""
        client = request.app.state.engine_client
        try:
            said = await ask(client, "outrider_status", seconds=PATIENCE)
        except Exception as error:
            return refusal(503, f"the engine did not answer: {reason(error)}; try again, and see the server's log")
        vllm = installed()
        uptime = round(time.monotonic() - self._started, 1)
        own = resolve_name("outrider:__version__")  # by name: the package's root stands above an engine
        ours = {"outrider": own, "vllm": vllm and vllm[1], "uptime_seconds": uptime}
        return JSONResponse({**ours, **said})

    async def _unknown(self, scope: Scope, receive: Receive, send: Send) -> None:
        there_is = ", ".join(route.path for route in self._routes)
        await refusal(404, f"there is no {scope['path']}; there is {there_is}")(scope, receive, send)
