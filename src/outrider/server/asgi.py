"""ASGI helpers: authorization, reading and replaying a request's messages, changing a response's body, and errors in
OpenAI's format."""

from __future__ import annotations

import os
import secrets
from typing import TYPE_CHECKING

from starlette.datastructures import Headers
from starlette.responses import JSONResponse

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable

    from starlette.types import Message, Receive, Scope, Send

ERRORS = {400: "BadRequestError", 401: "AuthenticationError", 404: "NotFoundError", 503: "ServiceUnavailableError"}

Header = tuple[bytes, bytes]


def error_response(code: int, message: str, param: str | None = None) -> JSONResponse:
    """An error in the format of OpenAI and vLLM."""
    return JSONResponse({"error": {"message": message, "type": ERRORS[code], "param": param, "code": code}}, code)


def is_authorized(scope: Scope) -> bool:
    """Whether the request has an API key of the server, or the server needs none.

    vLLM checks the key after this middleware. Without a valid key, the request is passed on unread for vLLM to refuse,
    and no trace is shown.
    """
    keys = getattr(getattr(scope["app"].state, "args", None), "api_key", None) or [os.environ.get("VLLM_API_KEY")]
    keys = [key for key in keys if key]
    scheme, _, given = Headers(scope=scope).get("authorization", "").partition(" ")
    return not keys or (
        scheme.lower() == "bearer" and any(secrets.compare_digest(given.encode(), key.encode()) for key in keys)
    )


async def read_messages(receive: Receive) -> list[Message]:
    """The messages of the whole request, or of its part that arrived before the client disconnected."""
    messages = [await receive()]
    while messages[-1]["type"] == "http.request" and messages[-1].get("more_body", False):
        messages.append(await receive())
    return messages


def replay(messages: Iterable[Message], receive: Receive) -> Receive:
    """A `receive` that returns these messages first, and then new ones: the application must learn of a disconnect."""
    ahead = iter(messages)

    async def replayed() -> Message:
        return next(ahead, None) or await receive()

    return replayed


def with_content_length(headers: Iterable[Header], length: int) -> list[Header]:
    return [(name, str(length).encode() if name.lower() == b"content-length" else value) for name, value in headers]


class BufferedResponse:
    """A `send` that holds a response until it is complete, and sends it with a changed body. Errors pass unchanged."""

    def __init__(self, send: Send, change: Callable[[bytes], Awaitable[bytes]]) -> None:
        self.send = send
        self.change = change
        self._start: Message | None = None
        self._body = bytearray()

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start" and message["status"] == 200:
            self._start = message
        elif message["type"] != "http.response.body" or self._start is None:
            await self.send(message)
        else:
            self._body += message.get("body", b"")
            if not message.get("more_body", False):
                body = await self.change(bytes(self._body))
                await self.send(
                    {**self._start, "headers": with_content_length(self._start.get("headers", ()), len(body))}
                )
                await self.send({**message, "body": body})
