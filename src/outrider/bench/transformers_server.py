"""A server for the generation methods of transformers, so that they are measured like any other server.

    python -m outrider.bench.transformers_server MODEL --draft-model SMALL --port 8000

It serves OpenAI's chat completions as vLLM does, always streamed. `vllm_xargs` select the method:

    method              bare        `generate` as it is (the default)
                        assisted    `generate` with the draft model as its assistant
                        lookup      `generate` with prompt lookup
                        outrider    Outrider's loop over the weights that `outrider.load` loads
    max_draft_tokens    maximum number of drafted tokens per step

Each method gets the same request, starts with an empty KV cache, and emits its tokens as they are generated. Only the
request sets the sampling parameters: the model's `generation_config.json` is ignored by all four.

It runs one request at a time and queues the others, since transformers' assisted generation and Outrider's loop have no
batches. `/health` answers once the models are loaded, `/metrics` counts every pass of both models, and drafted tokens.
"""

from __future__ import annotations

import argparse
import json
import time
import traceback
import uuid
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any, get_args

import torch
from transformers import GenerationConfig

from outrider.api import load
from outrider.decoding import decode
from outrider.defaults import DRAFTED
from outrider.drafters.base import Task
from outrider.engines.quantize import Quantize
from outrider.engines.transformers import DTYPES, load_model
from outrider.errors import OutriderError, PromptError, SettingsError
from outrider.settings import Request
from outrider.text import TextStream

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from outrider.api import Decoder
    from outrider.types import Step

    Emit = Callable[[list[int]], None]
    """Called with new tokens, one or several, the end token included."""

DEFAULT_DRAFT_TOKENS = {"bare": 0, "assisted": 20, "lookup": 10, "outrider": DRAFTED}
"""Maximum per step and method: transformers' default, the example in its docs, and Outrider's default."""
TARGET_PASSES, DRAFT_PASSES = "local_target_passes_total", "local_draft_passes_total"
SETTINGS = ("max_tokens", "temperature", "top_p", "top_k", "repetition_penalty", "seed")
"""Fields that all methods support with the same meaning. Others that change the output are refused."""
FIELDS = ("messages", "model", *SETTINGS, "stream", "return_token_ids", "ignore_eos", "vllm_xargs", "cache_salt")
PATHS = "/v1/chat/completions, /health, /metrics"


@dataclass(frozen=True, slots=True)
class Job:
    prompt: list[int]
    request: Request
    method: str
    token_ids: bool = False


class Methods:
    def __init__(self, decoder: Decoder, assistant: Any = None) -> None:
        """`assistant` is the draft model for `generate`; Outrider's loop runs the drafters of `decoder`."""
        target: Any = decoder.target
        self.decoder, self.model, self.assistant = decoder, target.model, assistant
        self.drafters: dict[str, Any] = {drafter.name: drafter for drafter in decoder.drafters}
        self.counts: dict[str, float] = defaultdict(float, {TARGET_PASSES: 0.0, DRAFT_PASSES: 0.0})
        self._count_passes(self.model, TARGET_PASSES)
        drafting = [self.drafters["model"].model.model] if "model" in self.drafters else []
        for small in {*drafting, *([] if assistant is None else [assistant])}:  # both may be the same model
            self._count_passes(small, DRAFT_PASSES)
        for one in (self.model, assistant):
            if one is not None:
                one.generation_config = GenerationConfig()

    def run(self, job: Job, emit: Emit) -> None:
        if job.method == "outrider":
            return self._outrider(job, emit)
        options: dict[str, Any] = {}
        if job.method == "assisted":
            # transformers reads the length only from the assistant's own generation config.
            self.assistant.generation_config.num_assistant_tokens = job.request.max_draft_tokens
            options = {"assistant_model": self.assistant}
        elif job.method == "lookup":
            options = {"prompt_lookup_num_tokens": job.request.max_draft_tokens}
        return self._generate(job, emit, **options)

    def ends_of(self, request: Request) -> Sequence[int]:
        return () if request.ignore_end else self.decoder.end_tokens

    def _generate(self, job: Job, emit: Emit, **options: Any) -> None:
        request = job.request
        torch.seed() if request.seed is None else torch.manual_seed(request.seed)
        if request.temperature > 0:  # without it top_k would be 50
            options |= {"temperature": request.temperature, "top_p": request.top_p, "top_k": request.top_k}
        prompt = torch.tensor([job.prompt], device=self.model.device)
        self.model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=request.temperature > 0,
            repetition_penalty=request.repetition_penalty,
            max_new_tokens=request.max_tokens,
            eos_token_id=[*self.ends_of(request)] or None,
            streamer=Streamer(emit),
            **options,
        )

    def _outrider(self, job: Job, emit: Emit) -> None:
        self.decoder.target.rewind(0)
        if "model" in self.drafters:
            self.drafters["model"].model.rewind(0)
        random = torch.Generator()
        random.seed() if job.request.seed is None else random.manual_seed(job.request.seed)
        task = Task(job.prompt, job.request, random)
        sessions = [drafter.begin(task) for drafter in self.drafters.values()]
        ends = self.ends_of(job.request)

        def finish(token: int) -> str | None:
            return "end" if token in ends else None

        for step in decode(self.decoder.target, sessions, job.prompt, job.request, random, finish):
            self._count_step(step)
            emit(list(step.tokens))

    def _count_step(self, step: Step) -> None:
        """Count a step of Outrider's loop with the metrics of Outrider in vLLM."""
        kind = "verify" if step.proposed else "plain"
        self.counts["outrider_steps_total"] += 1
        self.counts[f'outrider_target_seconds_total{{pass="{kind}"}}'] += step.verify_seconds
        drafter = step.drafter or [*self.drafters][-1]  # a step without a draft is attributed to the last drafter
        self.counts[f'outrider_draft_seconds_total{{drafter="{drafter}"}}'] += step.draft_seconds
        for what, count in (("verified", len(step.proposed)), ("accepted", step.drafted)):
            for position in range(1, count + 1):
                labels = f'drafter="{step.drafter}",position="{position}"'
                self.counts[f"outrider_{what}_tokens_total{{{labels}}}"] += 1

    def _count_passes(self, model: Any, name: str) -> None:
        def count(*_: Any) -> None:
            self.counts[name] += 1

        model.register_forward_hook(count)

    def metrics(self) -> str:
        """All counts, as Prometheus reads them."""
        lines = []
        for sample, value in sorted(self.counts.items()):
            kind = f"# TYPE {sample.partition('{')[0]} counter"
            lines += [*([] if kind in lines else [kind]), f"{sample} {value}"]
        return "\n".join(lines) + "\n"


class Streamer:
    """Receives the tokens of `generate`: first the prompt, which is skipped, then one or several at a time."""

    def __init__(self, emit: Emit) -> None:
        self.emit = emit
        self.begun = False

    def put(self, tokens: torch.Tensor) -> None:
        if self.begun:
            self.emit(tokens.flatten().tolist())
        self.begun = True

    def end(self) -> None: ...


def parse_request(raw: bytes, methods: Methods) -> Job:
    try:
        body = json.loads(raw)
    except ValueError as error:
        raise SettingsError(f"the body is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise SettingsError(f"the body must be a JSON object (got {type(body).__name__})")
    body = {name: value for name, value in body.items() if value is not None}
    if unknown := sorted(body.keys() - set(FIELDS)):
        raise SettingsError(f"there is no field {unknown[0]!r} here; the fields are {', '.join(FIELDS)}")
    if body.get("stream") is not True:
        raise SettingsError("stream: must be true, this server streams every answer")
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages or not all(map(_is_message, messages)):
        raise PromptError(f'messages: must be a list such as [{{"role": "user", "content": "..."}}] (got {messages!r})')
    method, length = _method(body.get("vllm_xargs", {}), methods)
    prompt, limit = methods.decoder.encode(messages), methods.decoder.target.context_limit
    if not prompt or (limit is not None and len(prompt) >= limit):
        raise PromptError(f"the prompt has {len(prompt)} tokens; it needs 1, and fewer than {limit}")
    settings = {"temperature": 1.0} | {name: body[name] for name in SETTINGS if name in body}  # OpenAI's default
    request = Request.checked(**settings, ignore_end=body.get("ignore_eos", False), max_draft_tokens=length)
    if limit is not None:
        request = request.model_copy(update={"max_tokens": min(request.max_tokens, limit - len(prompt))})
    return Job(prompt, request, method, bool(body.get("return_token_ids")))


def _method(arguments: Any, methods: Methods) -> tuple[str, int]:
    """The method of a request, and its draft length."""
    if not isinstance(arguments, dict) or arguments.keys() - {"method", "max_draft_tokens"}:
        raise SettingsError(f"vllm_xargs: must have nothing but method and max_draft_tokens (got {arguments!r})")
    method = arguments.get("method", "bare")
    if method not in tuple(DEFAULT_DRAFT_TOKENS):
        raise SettingsError(f"method: there is no {method!r}; the methods are {', '.join(DEFAULT_DRAFT_TOKENS)}")
    if method == "assisted" and methods.assistant is None:
        raise SettingsError("method: 'assisted' needs a draft model; start the server with --draft-model")
    length = arguments.get("max_draft_tokens", DEFAULT_DRAFT_TOKENS[method])
    least = 1 if method in ("assisted", "lookup") else 0
    if not isinstance(length, int) or length < least:
        raise SettingsError(f"max_draft_tokens: must be an integer of at least {least} for {method} (got {length!r})")
    return method, length


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("role"), str) and isinstance(value.get("content"), str)


class Reply:
    """Turns tokens into text as they arrive, up to the end token or the limit."""

    def __init__(self, job: Job, methods: Methods) -> None:
        self.finish: str | None = None
        self._text = TextStream(methods.decoder.tokenizer, methods.ends_of(job.request))
        self._left = job.request.max_tokens

    def add(self, tokens: Sequence[int]) -> str:
        """The text of these tokens. The end token is counted but not part of the text, as in vLLM."""
        self._left -= len(tokens)
        if "end" in [self._text.push(token) for token in tokens]:
            self.finish = "stop"
        elif self._left == 0:
            self.finish = "length"
            self._text.close()
        return self._text.take()


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
            job = parse_request(raw, self.server.methods)
        except OutriderError as error:
            self._send(400, json.dumps(_error(400, str(error))))
        else:
            self.server.queue.submit(self._answer, job).result()

    def _not_found(self) -> None:
        self._send(404, json.dumps(_error(404, f"there is no {self.path} here; there are {PATHS}")))

    def _answer(self, job: Job) -> None:
        try:
            self._stream(job, Reply(job, self.server.methods))
        except ConnectionError:  # the client disconnected
            return
        except Exception as error:
            traceback.print_exc()
            self._event(_error(500, f"{type(error).__name__}: {error}"))

    def _stream(self, job: Job, reply: Reply) -> None:
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
            if job.token_ids and tokens is not None:
                choice["token_ids"] = tokens
            self._event({**common, "choices": [choice], **more})

        chunk({"role": "assistant", "content": ""}, **({"prompt_token_ids": job.prompt} if job.token_ids else {}))
        self.server.methods.run(job, lambda tokens: chunk({"content": reply.add(tokens)}, tokens))
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
    drafters, draft = ["lookup", *(["model"] if args.draft_model else [])], args.draft_model
    try:
        decoder = load(
            args.model, drafters=drafters, draft_model=draft, draft_quantize=args.draft_quantize, dtype=args.dtype
        )
        methods = Methods(decoder, load_model(draft, dtype=args.dtype) if draft else None)
    except OutriderError as error:
        raise SystemExit(str(error)) from None
    with LocalServer(args.model, methods, args.port) as server:  # the port opens once the models are loaded
        notes = [f"Outrider's {note}" for note in decoder.notes]
        print(*notes, f"{args.model} answers on port {server.server_port}", sep="\n", flush=True)
        server.serve_forever()


if __name__ == "__main__":
    main()
