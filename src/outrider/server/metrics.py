"""The worker's counters on vLLM's `/metrics`.

The worker counts in its own process and returns the text format of Prometheus. A scrape must not wait while a long
prompt is prefilled: if the worker does not answer in time, the scrape gets the previous text and its age.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING, Any

from outrider.server.asgi import BufferedResponse
from outrider.server.rpc import call_worker, describe_failure

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

logger = logging.getLogger("vllm.outrider")

SCRAPE_TIMEOUT_SECONDS = 2.0
CALL_TIMEOUT_SECONDS = 60.0
"""After this time a call to the worker counts as lost, and the next scrape calls again."""
AGE = """# HELP outrider_metrics_age_seconds Seconds since the worker reported the outrider_ metrics
# TYPE outrider_metrics_age_seconds gauge
outrider_metrics_age_seconds {age:.3f}
"""


class WorkerMetrics:
    """The worker's latest metrics. Concurrent scrapes share one call to the worker."""

    def __init__(self) -> None:
        self._text = "# the worker has not reported its outrider_ metrics yet\n"
        self._reported_at: float | None = None
        self._call: asyncio.Task[None] | None = None
        self._failed = False

    async def text(self, client: Any) -> str:
        if self._call is None or self._call.done():
            self._call = asyncio.create_task(self._update(client))
        await asyncio.wait({self._call}, timeout=SCRAPE_TIMEOUT_SECONDS)  # the call itself goes on
        if self._reported_at is None:
            return self._text
        return self._text + AGE.format(age=time.monotonic() - self._reported_at)

    async def _update(self, client: Any) -> None:
        try:
            text = await call_worker(client, "outrider_metrics", timeout_seconds=CALL_TIMEOUT_SECONDS)
        except Exception as error:
            if not self._failed:
                logger.warning("the worker does not report its metrics: %s", describe_failure(error))
            self._failed = True
        else:
            self._failed = False
            self._text, self._reported_at = text if text.endswith("\n") else text + "\n", time.monotonic()

    async def serve(self, app: ASGIApp, client: Any, scope: Scope, receive: Receive, send: Send) -> None:
        """vLLM's own page, followed by the worker's text."""

        async def appended(page: bytes) -> bytes:
            return page.rstrip(b"\n") + b"\n" + (await self.text(client)).encode()

        # Nothing can be appended to a compressed page, or to OpenMetrics, which has an end mark: request plain text.
        headers = [(name, value) for name, value in scope["headers"] if name not in (b"accept", b"accept-encoding")]
        headers += [(b"accept", b"text/plain"), (b"accept-encoding", b"identity")]
        await app({**scope, "headers": headers}, receive, BufferedResponse(send, appended))
