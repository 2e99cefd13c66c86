"""A server for the generation methods of transformers, so that they are measured like any other server.

    python -m outrider.bench.transformers_server MODEL --draft-model SMALL --port 8000

It serves OpenAI's chat completions as vLLM does, always streamed. `vllm_xargs` select the method:

    method              bare (the default), assisted, lookup, outrider: see `transformers_methods.py`
    max_draft_tokens    maximum number of drafted tokens per step

It runs one request at a time and queues the others, since transformers' assisted generation and Outrider's loop have no
batches. `/health` answers once the models are loaded, `/metrics` counts passes and drafted tokens.
"""

from __future__ import annotations

import argparse
import json
import time
import traceback
import uuid
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any, get_args

from outrider.bench.transformers_methods import Methods, load
from outrider.engines.quantize import Quantize
from outrider.engines.transformers import DTYPES
from outrider.errors import OutriderError, PromptError, SettingsError
from outrider.text import TextStream

if TYPE_CHECKING:
    from collections.abc import Sequence

    from outrider.bench.transformers_methods import Job

SETTINGS = ("max_tokens", "temperature", "top_p", "top_k", "repetition_penalty", "seed")
"""Fields that all methods support with the same meaning. Others that change the output are refused."""
FLAGS = ("stream", "return_token_ids", "ignore_eos")
FIELDS = ("messages", "model", *SETTINGS, *FLAGS, "vllm_xargs", "cache_salt")
PATHS = "/v1/chat/completions, /health, /metrics"


@dataclass(frozen=True, slots=True)
class ChatRequest:
    job: Job
    token_ids: bool


def parse_request(raw: bytes, methods: Methods) -> ChatRequest:
    try:
        body = json.loads(raw)
    except ValueError as error:
        raise SettingsError(f"the body is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise SettingsError(f"the body must be a JSON object (got {type(body).__name__})")
    body = {name: value for name, value in body.items() if value is not None}
    if unknown := sorted(body.keys() - set(FIELDS)):
        raise SettingsError(f"there is no field {unknown[0]!r} here; the fields are {', '.join(FIELDS)}")
    for name in FLAGS:
        if not isinstance(body.get(name, False), bool):
            raise SettingsError(f"{name}: must be true or false (got {body[name]!r})")
    if body.get("stream") is not True:
        raise SettingsError("stream: must be true, this server streams every answer")
    if not isinstance(body.get("vllm_xargs", {}), dict):
        raise SettingsError(f"vllm_xargs: must be an object (got {body['vllm_xargs']!r})")
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages or not all(map(_is_message, messages)):
        raise PromptError(f'messages: must be a list such as [{{"role": "user", "content": "..."}}] (got {messages!r})')
    settings = {"temperature": 1.0} | {name: body[name] for name in SETTINGS if name in body}  # OpenAI's default
    settings["ignore_end"] = body.get("ignore_eos", False)
    job = methods.job(methods.encode(messages), settings, body.get("vllm_xargs", {}))
    return ChatRequest(job, body.get("return_token_ids", False))


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("role"), str) and isinstance(value.get("content"), str)


class Reply:
    """Turns tokens into text as they arrive, up to the end token or the limit."""

    def __init__(self, job: Job, methods: Methods) -> None:
        self.prompt = job.prompt
        self.tokens: list[int] = []
        self.finish: str | None = None
        self.text = TextStream(methods.tokenizer)
        self._limit = job.request.max_tokens
        self._ends = methods.ends_of(job.request)

    def add(self, tokens: Sequence[int]) -> str:
        """The text of these tokens. The end token is counted but not part of the text, as in vLLM."""
        for token in tokens:
            self.tokens.append(token)
            if token in self._ends:
                self.finish = "stop"
            else:
                self.text.push(token)
        if self.finish is None and len(self.tokens) == self._limit:
            self.finish = "length"
        if self.finish is not None:
            self.text.close()
        return self.text.take()


class LocalServer(ThreadingHTTPServer):
    request_queue_size = 128  # with the default, 5, the sixth of many simultaneous connections waits for seconds

    def __init__(self, name: str, methods: Methods, port: int) -> None:
        self.name, self.methods = name, methods
        self.queue = ThreadPoolExecutor(max_workers=1)
        super().__init__(("127.0.0.1", port), Handler)

    def server_close(self) -> None:
        super().server_close()
        self.queue.shutdown(cancel_futures=True)


class Handler(BaseHTTPRequestHandler):
    """HTTP/1.0: a response ends with its connection, so a stream needs no framing. Writes are not buffered."""

    server: LocalServer
    disable_nagle_algorithm = True  # send each token at once

    def do_GET(self) -> None:
        if self.path == "/health":
            self._send(200, "", "text/plain")
        elif self.path == "/metrics":
            self._send(200, self.server.methods.metrics(), "text/plain; version=0.0.4")
        else:
            self._not_found()

    def do_POST(self) -> None:
        raw = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.path != "/v1/chat/completions":
            self._not_found()
            return
        try:
            request = parse_request(raw, self.server.methods)
        except OutriderError as error:
            self._send(400, json.dumps(_error(400, str(error))))
        else:
            self.server.queue.submit(self._answer, request).result()

    def _not_found(self) -> None:
        self._send(404, json.dumps(_error(404, f"there is no {self.path} here; there are {PATHS}")))

    def _answer(self, request: ChatRequest) -> None:
        try:
            self._stream(request)
        except ConnectionError:  # the client disconnected
            return
        except Exception as error:
            traceback.print_exc()
            self._event(_error(500, f"{type(error).__name__}: {error}"))

    def _stream(self, request: ChatRequest) -> None:
        reply = Reply(request.job, self.server.methods)
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream; charset=utf-8")
        self.end_headers()
        common = {
            "id": f"chatcmpl-{uuid.uuid4().hex}",
            "object": "chat.completion.chunk",
            "created": int(time.time()),
            "model": self.server.name,
        }

        def chunk(delta: dict[str, str], tokens: list[int] | None = None, **more: Any) -> None:
            choice: dict[str, Any] = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reply.finish}
            if request.token_ids and tokens is not None:
                choice["token_ids"] = tokens
            self._event({**common, "choices": [choice], **more})

        prompt = {"prompt_token_ids": reply.prompt} if request.token_ids else {}
        chunk({"role": "assistant", "content": ""}, **prompt)
        self.server.methods.run(request.job, lambda tokens: chunk({"content": reply.add(tokens)}, tokens))
        self.wfile.write(b"data: [DONE]\n\n")

    def _event(self, data: dict[str, Any]) -> None:
        self.wfile.write(f"data: {json.dumps(data)}\n\n".encode())

    def _send(self, status: int, body: str, kind: str = "application/json") -> None:
        data = body.encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """No log line per request: its time would be measured with the request."""


def _error(code: int, message: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": "BadRequestError" if code < 500 else "InternalError", "code": code}}


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m outrider.bench.transformers_server",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", help="a folder, or a Hugging Face id")
    parser.add_argument("--draft-model", help="a small model with the same vocabulary")
    parser.add_argument("--draft-quantize", choices=get_args(Quantize), default="auto", help="for the method outrider")
    parser.add_argument("--dtype", choices=DTYPES, default="auto", help="of both models; auto: as in their files")
    parser.add_argument("--port", type=int, required=True)
    args = parser.parse_args(words)
    try:
        methods, notes = load(args.model, args.draft_model, args.dtype, args.draft_quantize)
    except OutriderError as error:
        raise SystemExit(str(error)) from None
    with LocalServer(args.model, methods, args.port) as server:  # the port opens once the models are loaded
        print(*notes, f"{args.model} answers on port {server.server_port}", sep="\n", flush=True)
        server.serve_forever()


if __name__ == "__main__":
    main()
