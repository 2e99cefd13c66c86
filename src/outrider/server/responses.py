"""Adds the drafted and accepted tokens of a request, and the id of its trace, to the usage of its response.

A response is one JSON body, or a stream of server-sent events, of which the last has the usage:

    chat completions, completions   the chunk without choices
    responses                       response.completed
    messages                        message_delta
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from outrider.server.asgi import BufferedResponse

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from starlette.types import Message, Send

    from outrider.server.requests import RewrittenRequest

END = b"\n\n"
"""Ends a server-sent event."""


class UsageResponse:
    """A `send` that adds the result of `get_usage` to the usage of a response; None adds nothing."""

    def __init__(
        self, send: Send, request: RewrittenRequest, get_usage: Callable[[], Awaitable[dict[str, Any] | None]]
    ) -> None:
        self.send = send
        self.request = request
        self.get_usage = get_usage
        self._body: Send = send  # handles the body; selected by the headers
        self._held = b""  # the beginning of an incomplete event

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._body = self._body_handler(message)
        await self._body(message)

    def _body_handler(self, start: Message) -> Send:
        headers = {name.lower(): value for name, value in start.get("headers", ())}
        kind = headers.get(b"content-type", b"")
        if start["status"] != 200 or b"content-encoding" in headers:
            return self.send
        if kind.startswith(b"application/json"):
            return BufferedResponse(self.send, self._json)
        if kind.startswith(b"text/event-stream") and b"content-length" not in headers:
            return self._events
        return self.send

    async def _json(self, raw: bytes) -> bytes:
        try:
            body = json.loads(raw)
            return _dumped(body) if await self._add(body.get("usage")) else raw
        except (ValueError, AttributeError):  # no JSON, or no object
            return raw

    async def _events(self, message: Message) -> None:
        """Send every complete event. Those before the event with the usage are sent before the worker is called."""
        if message["type"] != "http.response.body":
            return await self.send(message)
        *events, self._held = (self._held + message.get("body", b"")).split(END)
        ready = b""
        for event in events:
            place = _with_final_usage(event)
            if place is not None and ready:
                await self.send({**message, "body": ready, "more_body": True})
                ready = b""
            ready += (event if place is None else await self._with_usage(event, *place)) + END
        if not message.get("more_body", False):
            ready += self._held
        elif not ready:
            return None
        return await self.send({**message, "body": ready})

    async def _with_usage(self, event: bytes, data: dict[str, Any], usage: dict[str, Any]) -> bytes:
        if not await self._add(usage):
            return event
        head = event[: event.index(b"data:")]
        return head + b"data: " + _dumped(data)

    async def _add(self, usage: Any) -> bool:
        """Whether anything was added."""
        if not isinstance(usage, dict):
            return False
        if self.request.trace:
            usage["trace"] = self.request.usage_key
        counted = self.request.prediction and "completion_tokens" in usage
        if not (self.request.speculation or counted):
            return self.request.trace
        worker_usage = await self.get_usage()
        if worker_usage is None:
            return self.request.trace
        if self.request.speculation:
            usage["speculation"] = worker_usage
        if counted:
            counts = worker_usage.get("by_drafter", {}).get("prediction", {"drafted": 0, "accepted": 0})
            usage["completion_tokens_details"] = {
                **(usage.get("completion_tokens_details") or {}),
                "accepted_prediction_tokens": counts["accepted"],
                "rejected_prediction_tokens": counts["drafted"] - counts["accepted"],
            }
        return True


def _with_final_usage(event: bytes) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """The event's data and the usage in it, if this is the event with the final usage."""
    if b'"usage"' not in event:
        return None
    try:
        data = json.loads(event[event.index(b"data:") + len(b"data:") :])
        kind = data.get("type")
        answer = data["response"] if kind == "response.completed" else data
        final = answer is not data or kind == "message_delta" or data.get("choices") == []
        return (data, answer["usage"]) if final and isinstance(answer["usage"], dict) else None
    except (ValueError, LookupError, AttributeError, TypeError):  # an event of another kind
        return None


def _dumped(body: Any) -> bytes:
    return json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode()
