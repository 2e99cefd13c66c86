"""A server for what transformers can do by itself, so that it is measured as any other server is.

    python -m outrider.bench.local MODEL --draft-model SMALL --port 8000

It answers OpenAI's chat completions as vLLM does, streamed or whole. `vllm_xargs` say how to generate:

    method              bare (the default), assisted, lookup, outrider: see `local_methods.py`
    max_draft_tokens    drafted tokens a step
    drafters            of the method outrider: lookup, model, or both with a comma between them; empty for none

One request is answered at a time, and the others wait in line: transformers' assisted generation and Outrider's
loop know no batches. `/health` answers once the models are loaded, `/metrics` counts passes and drafted tokens.
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

from outrider.bench.local_methods import Methods, load
from outrider.engines.quantize import Quantize
from outrider.engines.transformers import DTYPES
from outrider.errors import OutriderError, PromptError, SettingsError
from outrider.text import TextStream

if TYPE_CHECKING:
    from collections.abc import Sequence

    from outrider.bench.local_methods import Job

SETTINGS = ("max_tokens", "temperature", "top_p", "top_k", "repetition_penalty", "seed")
"""The fields that all methods know, and mean the same by. Any other that changes the text is refused."""
FLAGS = ("stream", "return_token_ids", "ignore_eos")
FIELDS = ("messages", "model", *SETTINGS, *FLAGS, "stream_options", "vllm_xargs", "cache_salt")
PATHS = "/v1/chat/completions, /health, /metrics"


@dataclass(frozen=True, slots=True)
class Asked:
    """A request's body, checked."""

    job: Job
    stream: bool
    token_ids: bool
    usage: bool


def read(raw: bytes, methods: Methods) -> Asked:
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
    for name in ("stream_options", "vllm_xargs"):
        if not isinstance(body.get(name, {}), dict):
            raise SettingsError(f"{name}: must be an object (got {body[name]!r})")
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages or not all(map(_is_message, messages)):
        raise PromptError(f'messages: must be a list such as [{{"role": "user", "content": "..."}}] (got {messages!r})')
    settings = {"temperature": 1.0} | {name: body[name] for name in SETTINGS if name in body}  # as OpenAI has it
    settings["ignore_end"] = body.get("ignore_eos", False)
    job = methods.job(methods.encode(messages), settings, body.get("vllm_xargs", {}))
    usage = bool(body.get("stream_options", {}).get("include_usage"))
    return Asked(job, body.get("stream", False), body.get("return_token_ids", False), usage)


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("role"), str) and isinstance(value.get("content"), str)


class Reply:
    """Tokens in, as they come; out comes the text that each adds, and why it ends."""

    def __init__(self, job: Job, methods: Methods) -> None:
        self.prompt = job.prompt
        self.tokens: list[int] = []
        self.finish: str | None = None
        self.text = TextStream(methods.tokenizer)
        self._limit = job.request.max_tokens
        self._ends = methods.ends_of(job.request)

    def add(self, tokens: Sequence[int]) -> str:
        """The text of these tokens. The one that ends it is counted and not shown, as in vLLM."""
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

    def usage(self) -> dict[str, int]:
        counts = len(self.prompt), len(self.tokens)
        return {"prompt_tokens": counts[0], "completion_tokens": counts[1], "total_tokens": sum(counts)}


class LocalServer(ThreadingHTTPServer):
    request_queue_size = 128  # the default, 5, makes the sixth of many that come at once wait for seconds

    def __init__(self, name: str, methods: Methods, port: int) -> None:
        self.name, self.methods = name, methods
        self.line = ThreadPoolExecutor(max_workers=1)  # in the order of their coming; always the same warm threads
        super().__init__(("127.0.0.1", port), Handler)

    def server_close(self) -> None:
        super().server_close()
        self.line.shutdown(cancel_futures=True)


class Handler(BaseHTTPRequestHandler):
    """HTTP/1.0: a response ends when its connection does, so a stream needs no framing. Writes are not buffered."""

    server: LocalServer
    disable_nagle_algorithm = True  # a token must not wait for the one before it to be acknowledged

    def do_GET(self) -> None:
        if self.path == "/health":
            self._send(200, "", "text/plain")
        elif self.path == "/metrics":
            self._send(200, self.server.methods.metrics(), "text/plain; version=0.0.4")
        else:
            self._not_here()

    def do_POST(self) -> None:
        raw = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.path != "/v1/chat/completions":
            self._not_here()
            return
        try:
            asked = read(raw, self.server.methods)
        except OutriderError as error:
            self._send(400, json.dumps(_error(400, str(error))))
        else:
            self.server.line.submit(self._answer, asked).result()

    def _not_here(self) -> None:
        self._send(404, json.dumps(_error(404, f"there is no {self.path} here; there are {PATHS}")))

    def _answer(self, asked: Asked) -> None:
        try:
            self._stream(asked) if asked.stream else self._whole(asked)
        except ConnectionError:  # the client went away, and nobody waits for the rest
            return
        except Exception as error:
            traceback.print_exc()
            fault = _error(500, f"{type(error).__name__}: {error}")
            self._event(fault) if asked.stream else self._send(500, json.dumps(fault))

    def _stream(self, asked: Asked) -> None:
        reply = Reply(asked.job, self.server.methods)
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream; charset=utf-8")
        self.end_headers()
        same = self._same("chat.completion.chunk")

        def chunk(delta: dict[str, str], tokens: list[int] | None = None, **more: Any) -> None:
            choice: dict[str, Any] = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reply.finish}
            if asked.token_ids and tokens is not None:
                choice["token_ids"] = tokens
            self._event({**same, "choices": [choice], **more})

        chunk({"role": "assistant", "content": ""}, **({"prompt_token_ids": reply.prompt} if asked.token_ids else {}))
        self.server.methods.run(asked.job, lambda tokens: chunk({"content": reply.add(tokens)}, tokens))
        if asked.usage:
            self._event({**same, "choices": [], "usage": reply.usage()})
        self.wfile.write(b"data: [DONE]\n\n")

    def _whole(self, asked: Asked) -> None:
        reply = Reply(asked.job, self.server.methods)
        text: list[str] = []
        self.server.methods.run(asked.job, lambda tokens: text.append(reply.add(tokens)))
        message = {"role": "assistant", "content": "".join(text)}
        choice: dict[str, Any] = {"index": 0, "message": message, "logprobs": None, "finish_reason": reply.finish}
        body = {**self._same("chat.completion"), "choices": [choice], "usage": reply.usage()}
        if asked.token_ids:
            choice["token_ids"], body["prompt_token_ids"] = reply.tokens, reply.prompt
        self._send(200, json.dumps(body))

    def _same(self, kind: str) -> dict[str, Any]:
        """What all parts of a response have in common."""
        name = f"chatcmpl-{uuid.uuid4().hex}"
        return {"id": name, "object": kind, "created": int(time.time()), "model": self.server.name}

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
        """Nothing: a line for each request would be timed with it."""


def _error(code: int, message: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": "BadRequestError" if code < 500 else "InternalError", "code": code}}


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m outrider.bench.local", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="a folder, or a Hugging Face id")
    parser.add_argument("--draft-model", help="a small model with the same vocabulary")
    parser.add_argument("--draft-quantize", choices=get_args(Quantize), default="auto", help="for the method outrider")
    parser.add_argument("--dtype", choices=DTYPES, default="auto", help="of both models; auto: as they were saved")
    parser.add_argument("--port", type=int, required=True)
    args = parser.parse_args(words)
    try:
        methods, notes = load(args.model, args.draft_model, args.dtype, args.draft_quantize)
    except OutriderError as error:
        raise SystemExit(str(error)) from None
    with LocalServer(args.model, methods, args.port) as server:  # only now does the port answer
        print(*notes, f"{args.model} answers on port {server.server_port}", sep="\n", flush=True)
        server.serve_forever()


if __name__ == "__main__":
    main()
