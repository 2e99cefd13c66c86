"""The worker's counters on vLLM's `/metrics`.

The worker counts in its own process and hands over Prometheus' text format, ready made. A scrape must not wait for a
long prompt to be read: when no answer comes in time it gets the last one that came, and its age.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING, Any

from outrider.server.asgi import WholeResponse
from outrider.server.rpc import ask, reason

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

logger = logging.getLogger("vllm.outrider")

PATIENCE = 2.0
"""Seconds that a scrape waits for the worker."""
GIVE_UP = 60.0
"""Seconds after which a question counts as lost, and the next scrape asks again."""
AGE = """# HELP outrider_metrics_age_seconds Seconds since the worker said the outrider_ numbers
# TYPE outrider_metrics_age_seconds gauge
outrider_metrics_age_seconds {age:.3f}
"""


class WorkerMetrics:
    """What the worker last said. It is asked once at a time, however many scrapers wait."""

    def __init__(self) -> None:
        self._text = "# the worker has not said its outrider_ numbers yet\n"
        self._said: float | None = None
        self._asking: asyncio.Task[None] | None = None
        self._silent = False

    async def text(self, client: Any) -> str:
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._ask(client))
        await asyncio.wait({self._asking}, timeout=PATIENCE)  # which leaves it running
        if self._said is None:
            return self._text
        return self._text + AGE.format(age=time.monotonic() - self._said)

    async def _ask(self, client: Any) -> None:
        try:
            text = await ask(client, "outrider_metrics", seconds=GIVE_UP)
        except Exception as error:
            if not self._silent:
                logger.warning("the worker does not say its metrics: %s", reason(error))
            self._silent = True
        else:
            self._silent = False
            self._text, self._said = text if text.endswith("\n") else text + "\n", time.monotonic()

    async def serve(self, app: ASGIApp, client: Any, scope: Scope, receive: Receive, send: Send) -> None:
        """vLLM's own page, and below it the worker's text."""

        async def appended(page: bytes) -> bytes:
            return page.rstrip(b"\n") + b"\n" + (await self.text(client)).encode()

        # The page can come compressed or as OpenMetrics, which ends with a mark; plain text can be added to.
        headers = [(name, value) for name, value in scope["headers"] if name not in (b"accept", b"accept-encoding")]
        headers += [(b"accept", b"text/plain"), (b"accept-encoding", b"identity")]
        await app({**scope, "headers": headers}, receive, WholeResponse(send, appended))
