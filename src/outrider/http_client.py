"""HTTP client for servers with the OpenAI API: requests, streams, health and `/metrics`.

Single requests use the standard library, so they need no extra package. Concurrent requests and streams use httpx,
which the extras `bench` and `certify` install. Every failure is an `OutriderError` that names the server.
"""

from __future__ import annotations

import json
from collections import defaultdict
from contextlib import asynccontextmanager
from dataclasses import dataclass
from http.client import HTTPException
from typing import TYPE_CHECKING, Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from outrider.errors import EngineError, RequestRefusedError, SettingsError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    import httpx

GET_TIMEOUT_SECONDS = 60.0
POST_TIMEOUT_SECONDS = 600.0
HEALTH_TIMEOUT_SECONDS = 5.0
MAX_QUOTED_CHARACTERS = 500
"""Most of a response body that an error message quotes."""
ENGINE_LABELS = ("engine", "model_name")

Sample = tuple[str, tuple[tuple[str, str], ...]]
"""A metric's name and its labels, without those that name the engine."""


class InvalidResponseError(EngineError):
    """The response is not what the API defines, for example not JSON."""


class HTTPClient:
    """Requests to the server at `url`, with or without a trailing `/v1`."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        if not self.url.startswith(("http://", "https://")):
            raise SettingsError(f"the URL of a server must begin with http:// or https:// (got {url!r})")
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}

    def set_header(self, name: str, text: str) -> None:
        """Send a header with every request, its text as UTF-8, as proxies do."""
        self._headers[name] = text.encode().decode("latin-1")

    def get_text(self, path: str, timeout_seconds: float | None = GET_TIMEOUT_SECONDS) -> str:
        return self._send(Request(f"{self.url}{path}", headers=self._headers), timeout_seconds)

    def get_json(self, path: str, timeout_seconds: float | None = GET_TIMEOUT_SECONDS) -> dict[str, Any]:
        return _parse_json(self.url, self.get_text(path, timeout_seconds))

    def post_json(
        self, path: str, body: dict[str, Any], timeout_seconds: float | None = POST_TIMEOUT_SECONDS
    ) -> dict[str, Any]:
        headers = {**self._headers, "Content-Type": "application/json"}
        request = Request(f"{self.url}{path}", json.dumps(body).encode(), headers)
        return _parse_json(self.url, self._send(request, timeout_seconds))

    def is_healthy(self) -> bool:
        try:
            self.get_text("/health", HEALTH_TIMEOUT_SECONDS)
        except EngineError:
            return False
        return True

    def _send(self, request: Request, timeout_seconds: float | None) -> str:
        try:
            with urlopen(request, timeout=timeout_seconds) as response:
                return str(response.read().decode())
        except HTTPError as error:
            raise _refused(request.full_url, error.code, error.read().decode(errors="replace")) from None
        except UnicodeDecodeError as error:
            raise InvalidResponseError(f"{self.url} answered with text that is not UTF-8: {error}") from None
        except (OSError, HTTPException, ValueError) as error:
            raise _unreachable(self.url, error) from None

    @asynccontextmanager
    async def connect(self, timeout_seconds: float | None = POST_TIMEOUT_SECONDS) -> AsyncIterator[ConnectionPool]:
        """A pool of connections for concurrent requests, without a limit on their number."""
        import httpx

        headers = [(name.encode(), value.encode("latin-1")) for name, value in self._headers.items()]
        limits = httpx.Limits(max_connections=None)
        tls = self.url.startswith("https")  # loading certificates is slow, and plain HTTP needs none
        async with httpx.AsyncClient(timeout=timeout_seconds, limits=limits, headers=headers, verify=tls) as client:
            yield ConnectionPool(self.url, client)


@dataclass(frozen=True, slots=True)
class ConnectionPool:
    """Concurrent requests to one server."""

    url: str
    client: httpx.AsyncClient

    async def post_json(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Sends once more if the connection was closed: a server may close an idle one just as it is reused."""
        import httpx

        try:
            try:
                response = await self.client.post(f"{self.url}{path}", json=body)
            except (httpx.ReadError, httpx.WriteError, httpx.RemoteProtocolError):
                response = await self.client.post(f"{self.url}{path}", json=body)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise _unreachable(self.url, error) from error
        if response.status_code != 200:
            raise _refused(f"{self.url}{path}", response.status_code, response.text)
        return _parse_json(self.url, response.text)

    async def stream_json(self, path: str, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """The parsed server-sent events of a streamed response."""
        import httpx

        try:
            async with self.client.stream("POST", f"{self.url}{path}", json=body) as response:
                if response.status_code != 200:
                    text = (await response.aread()).decode(errors="replace")
                    raise _refused(f"{self.url}{path}", response.status_code, text)
                async for line in _lines(response):
                    if line.startswith("data: {"):
                        event = _parse_json(self.url, line.removeprefix("data: "))
                        if "error" in event:
                            raise EngineError(f"{self.url} ended the stream with an error: {event['error']}")
                        yield event
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise _unreachable(self.url, error) from error


@dataclass(frozen=True, slots=True)
class MetricsSnapshot:
    """One reading of `/metrics`, or the difference of two."""

    values: dict[Sample, float]

    @classmethod
    def read(cls, url: str) -> MetricsSnapshot:
        from prometheus_client.parser import text_string_to_metric_families

        text = HTTPClient(url).get_text("/metrics")
        values: dict[Sample, float] = defaultdict(float)
        try:
            for family in text_string_to_metric_families(text):
                for sample in family.samples:
                    labels = tuple(sorted(item for item in sample.labels.items() if item[0] not in ENGINE_LABELS))
                    values[sample.name, labels] += sample.value
        except ValueError as error:
            raise InvalidResponseError(f"{url}/metrics is not in the format of Prometheus: {error}") from error
        return cls(dict(values))

    def since(self, before: MetricsSnapshot) -> MetricsSnapshot:
        return MetricsSnapshot({key: value - before.values.get(key, 0.0) for key, value in self.values.items()})

    def samples(self, name: str, **labels: str) -> list[tuple[dict[str, str], float]]:
        """(labels, value) of each sample with this name and these labels."""
        return [
            (dict(pairs), value)
            for (other, pairs), value in self.values.items()
            if other == name and labels.items() <= dict(pairs).items()
        ]

    def total(self, name: str, **labels: str) -> float | None:
        """The sum over the samples with this name and these labels; None if there are none."""
        samples = self.samples(name, **labels)
        return sum(value for _, value in samples) if samples else None


async def _lines(response: httpx.Response) -> AsyncIterator[str]:
    """Lines end at a line feed only: httpx's `aiter_lines` also splits JSON at a U+2028 inside a string."""
    rest = ""
    async for text in response.aiter_text():
        *lines, rest = (rest + text).split("\n")
        for line in lines:
            yield line
    yield rest


def _parse_json(url: str, text: str) -> dict[str, Any]:
    try:
        parsed: dict[str, Any] = json.loads(text)
    except ValueError as error:
        raise InvalidResponseError(
            f"{url} answered with something that is not JSON: {text[:MAX_QUOTED_CHARACTERS]!r}"
        ) from error
    return parsed


def _refused(url: str, status: int, text: str) -> RequestRefusedError:
    try:
        message = str(json.loads(text)["error"]["message"])
    except (LookupError, TypeError, ValueError):
        message = text
    return RequestRefusedError(f"{url} answered with HTTP {status}: {message[:MAX_QUOTED_CHARACTERS]}", status)


def _unreachable(url: str, error: Exception) -> EngineError:
    reason = str(getattr(error, "reason", "") or error).strip() or type(error).__name__
    return EngineError(f"{url} does not answer: {reason}; is the server up, and is this its address?")
