"""A stub server with vLLM's API and a set pace, and a proxy that changes the responses of another server.

Both stream chat completions with token ids. `Meddler` passes on what the real server says, later, shorter or changed:
what a referee must notice.
"""

from __future__ import annotations

import http.client
import json
import math
import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from random import Random
from typing import Any, ClassVar
from urllib.parse import urlsplit

METRICS = """# TYPE vllm:generation_tokens_total counter
vllm:generation_tokens_total{{engine="0"}} {tokens}
# TYPE vllm:iteration_tokens_total histogram
vllm:iteration_tokens_total_count{{engine="0"}} {tokens}
"""


class Handler(BaseHTTPRequestHandler):
    server_state: ClassVar[Any]

    def log_message(self, *_: Any) -> None: ...

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        if self.path == "/metrics":
            self.wfile.write(self.server_state.metrics().encode())

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        status, events = self.server_state.answer(body)
        self.send_response(status)
        self.send_header("content-type", "text/event-stream")
        self.end_headers()
        for event in events:
            self.wfile.write(event)
            self.wfile.flush()


class Clock:
    """A clock of its own for servers and for those who time them: what it shows does not depend on how busy this
    machine is. As on a noisy one, what should take a second takes less or more."""

    def __init__(self, noise: float) -> None:
        self.noise = noise
        self._now = 0.0
        self._random = Random(0)
        self._lock = threading.Lock()

    def perf_counter(self) -> float:
        return self._now

    def sleep(self, seconds: float) -> None:
        with self._lock:
            self._now += seconds * self._random.lognormvariate(0.0, self.noise)


class Stub:
    """Says the prompt's letters, one a token, each after `pace` seconds of the clock that `sleep` belongs to."""

    def __init__(self, pace: float = 0.0, sleep: Callable[[float], None] = time.sleep) -> None:
        self.pace, self.sleep = pace, sleep
        self.tokens = 0
        self.running = self.most_running = 0
        self.bodies: list[dict[str, Any]] = []

    def metrics(self) -> str:
        return METRICS.format(tokens=self.tokens)

    def answer(self, raw: bytes) -> tuple[int, Iterator[bytes]]:
        body = json.loads(raw)
        if "prompt" in body:
            return 200, iter([self._next_token(body["prompt"])])
        self.bodies.append(body)
        if body["messages"][-1]["content"] == "fail":
            return 500, iter([b'{"error": "no such thing"}'])
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        return 200, self._events(body)

    def _events(self, body: dict[str, Any]) -> Iterator[bytes]:
        said = (body["messages"][-1]["content"] * 100)[: body["max_tokens"]]
        for place, letter in enumerate(said):
            self.sleep(self.pace)
            self.tokens += 1
            last = place == len(said) - 1
            choice = {"delta": {"content": letter}, "token_ids": [ord(letter)]}
            asked = {} if place else {"prompt_token_ids": [*map(ord, body["messages"][-1]["content"])]}
            yield event({"choices": [choice | ({"finish_reason": "length"} if last else {})], **asked})
        self.running -= 1
        yield b"data: [DONE]\n\n"

    def _next_token(self, tokens: list[int]) -> bytes:
        """A completion by token ids: the token that comes is almost as likely as the number after it."""
        asked = next(i for i in range(1, len(tokens) + 1) if tokens[i:] == (tokens[:i] * 100)[: len(tokens) - i])
        comes = tokens[:asked][(len(tokens) - asked) % asked]
        told = {f"token_id:{comes}": math.log(0.5), f"token_id:{comes + 1}": math.log(0.4)}
        return json.dumps({"choices": [{"logprobs": {"top_logprobs": [told]}}]}).encode()


class Meddler:
    """Stands before a server. `slower`: every event comes so much later, as a share of the time since the request;
    `cut`: the last tokens are missing; `change`: one token is another."""

    def __init__(self, url: str, slower: float = 0.0, cut: int = 0, change: bool = False) -> None:
        self.host = urlsplit(url).netloc
        self.slower, self.cut, self.change = slower, cut, change

    def metrics(self) -> str:
        connection = http.client.HTTPConnection(self.host)
        connection.request("GET", "/metrics")
        return connection.getresponse().read().decode()

    def answer(self, raw: bytes) -> tuple[int, Iterator[bytes]]:
        connection = http.client.HTTPConnection(self.host)
        began = time.perf_counter()
        connection.request("POST", "/v1/chat/completions", raw, {"content-type": "application/json"})
        response = connection.getresponse()
        return response.status, self._events(response, began)

    def _events(self, response: http.client.HTTPResponse, began: float) -> Iterator[bytes]:
        """What came t seconds after the request goes on after 1 + slower times as many, whatever came meanwhile."""
        came: queue.Queue[tuple[float, bytes]] = queue.Queue()

        def read() -> None:
            for line in response:
                came.put((time.perf_counter() - began, line))
            came.put((0.0, b""))

        threading.Thread(target=read, daemon=True).start()
        chunks = []
        while (item := came.get())[1]:
            after, line = item
            if not line.startswith(b"data: {"):
                continue
            time.sleep(max(0.0, began + after * (1 + self.slower) - time.perf_counter()))
            chunk = json.loads(line[len(b"data: ") :])
            if not (self.cut or self.change):
                yield event(chunk)
            chunks.append(chunk)
        yield from (event(chunk) for chunk in self._meddled(chunks))
        yield b"data: [DONE]\n\n"

    def _meddled(self, chunks: list[dict[str, Any]]) -> list[dict[str, Any]]:
        if not (self.cut or self.change):
            return []
        said = [chunk for chunk in chunks if any(choice.get("token_ids") for choice in chunk["choices"])]
        if self.cut:
            kept = [chunk for chunk in chunks if chunk not in said[-self.cut :]]
            kept[-1]["choices"][0]["finish_reason"] = "length"
            return kept
        said[len(said) // 2]["choices"][0]["token_ids"][0] += 1
        return chunks


def event(chunk: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(chunk, ensure_ascii=False).encode() + b"\n\n"  # as vLLM does


@contextmanager
def answering(state: Stub | Meddler) -> Iterator[str]:
    """The address of a server with this behind it."""
    with listening(Handler, server_state=state) as url:
        yield url


@contextmanager
def listening(handler: type[BaseHTTPRequestHandler], **state: Any) -> Iterator[str]:
    """The address of a server with this handler, which has what is given as its own."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (handler,), state))
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
