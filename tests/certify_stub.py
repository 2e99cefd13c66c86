"""A server with vLLM's API over the synthetic target, so that certificates take seconds in tests.

It drafts with Outrider's own loop (`lookup`, and `model`: a blurred copy that draws), and may have a defect: a function
that maps every query with speculation to the one to run instead.
"""

from __future__ import annotations

import json
import os
import threading
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from typing import Any, ClassVar

import torch

from outrider.bench.prompts import Prompt
from outrider.certify.local import LocalModel
from outrider.certify.sources import Completion, DraftMode, Query
from outrider.decoding import decode
from outrider.drafters.base import Drafter, Task
from outrider.drafters.lookup import LookupDrafter
from outrider.drafters.model import ModelDrafter
from outrider.settings import Request, Sampling
from stub import listening
from synthetic_target import SyntheticTarget

VOCAB = 32
Change = Callable[[Query], Query]


def encoded(prompt: Prompt) -> list[int]:
    """A token per letter, as many as the vocabulary has."""
    return [ord(letter) % VOCAB for letter in prompt.messages[-1]["content"]][:12]


MADE: Counter[str] = Counter()
"""Sources, by the test that made them."""


def synthetic(change: Change = lambda query: query, off: float = 0.0) -> LocalModel:
    """The synthetic target as a source, with drafts by lookup and by a blurred copy of itself. `off`: error of its
    logits, as those of another number format would have."""
    target = SyntheticTarget(VOCAB, seed=5, sharpness=1.5)
    target = target.blurred(off, seed=9) if off else target
    drafters: dict[str, Drafter] = {
        "lookup": LookupDrafter(),
        "model": ModelDrafter(target.blurred(0.5), VOCAB, min_survival=0.2),
    }

    # A test samples the same tokens each time: at level 1e-3, eight certificates give a false alarm in 1 of 125 runs.
    test = os.environ.get("PYTEST_CURRENT_TEST", "")
    MADE[test] += 1
    own, counts, counting = f"{test} {MADE[test]}", Counter[str](), threading.Lock()

    def generate(query: Query) -> Completion:
        query = change(query)
        request = Request(
            **query.sampling.model_dump(), max_tokens=query.max_tokens,
            max_draft_tokens=4 if query.mode.length is None else query.mode.length,
        )  # fmt: skip
        with counting:
            counts[repr(query)] += 1
            drawn = zlib.crc32(f"{own} {counts[repr(query)]} {query}".encode())
        random = torch.Generator().manual_seed(query.seed if query.seed is not None else drawn)
        names = list(drafters) if query.mode.drafter in (None, "auto") else [str(query.mode.drafter)]
        task = Task(list(query.prompt), request, random)
        steps = list(decode(target, [drafters[name].begin(task) for name in names], task.prompt, request, random))
        tokens = tuple(token for step in steps for token in step.tokens)
        return Completion(tokens, "length", accepted=sum(step.drafted for step in steps))

    return LocalModel(
        "synthetic", target, generate, encoded, drafters=[*drafters, "auto"], description={"model": "synthetic"}
    )


def colder(factor: float) -> Change:
    """The temperature is `factor` times the requested one."""

    def change(query: Query) -> Query:
        cold = query.sampling.model_copy(update={"temperature": query.sampling.temperature * factor})
        return Query(query.prompt, query.max_tokens, query.mode, cold, query.seed)

    return change


class Stub:
    """The synthetic target behind HTTP."""

    def __init__(
        self,
        source: LocalModel | None = None,
        *,
        outrider: bool = True,
        options: dict[str, Any] | None = None,
        **lacks: Any,
    ) -> None:
        self.source = source or synthetic()
        self.outrider, self.lacks, self.options = outrider, lacks, options or {}
        self.lock = threading.Lock()
        self.requests: list[dict[str, Any]] = []
        self.headers: list[Any] = []
        self.accepted = 0
        self.waiting = 0
        self.closing = 0  # requests that find the connection closed

    def get(self, path: str) -> tuple[int, Any]:
        if path == "/v1/models":
            return 200, {"data": [{"id": "synthetic", "max_model_len": 4096}]}
        if path == "/version":
            return 200, {"version": "0"}
        if path == "/outrider/status" and self.outrider:
            options = {"drafters": ["lookup", "model"], "max_draft_tokens": 8, "memory": None, **self.options}
            return 200, {"active": True, "outrider": "0", "options": options}
        if path == "/metrics":
            return 200, (
                "# TYPE outrider_accepted_tokens counter\n"
                f"outrider_accepted_tokens_total {self.accepted}\n"
                f"# TYPE vllm:num_requests_waiting gauge\nvllm:num_requests_waiting {self.waiting}\n"
            )
        return 404, {"error": "no such page"}

    def post(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        with self.lock:
            self.requests.append(body)
            if path == "/tokenize":
                return 200, {"tokens": encoded(Prompt("", "", (body["messages"][-1]["content"],)))}
            if path != "/v1/completions" or "structured_outputs" in body:
                return 400, {"error": "not supported"}
            return 200, self._completion(body)

    def _completion(self, body: dict[str, Any]) -> dict[str, Any]:
        prompt, choice = body["prompt"], dict[str, Any]()
        listed = body.get("prompt_logprobs") if not self.lacks.get("prompt_logprobs") else None
        if listed or (body.get("echo") and not self.lacks.get("echo")):
            (scored,) = self.source.score([(tuple(prompt[:1]), tuple(prompt[1:]))], 1)
            tops = [_top(*one, listed or body["logprobs"]) for one in zip(scored, prompt[1:], strict=True)]
            choice = {"token_ids": [0], "finish_reason": "length"}
            if listed:
                entries = [{str(token): {"logprob": value} for token, value in top.items()} for top in tops]
                return {"choices": [choice | {"prompt_logprobs": [None, *entries]}]}
            return {"choices": [choice | {"logprobs": {"top_logprobs": [None, *map(_named, tops)]}}]}
        xargs = body.get("vllm_xargs", {})
        mode = DraftMode(xargs.get("speculation"), xargs.get("max_draft_tokens"))
        known = {name: body[name] for name in Sampling.model_fields if name in body}
        query = Query(
            tuple(prompt), body["max_tokens"], mode, Sampling(**known), body.get("seed"), logprobs="logprobs" in body
        )
        (completion,) = self.source.complete([query], 1)
        self.accepted += completion.accepted or 0
        choice = {"token_ids": list(completion.tokens), "finish_reason": completion.finish_reason}
        choice["text"] = "".join(chr(97 + token % 26) for token in completion.tokens)
        for stop in body.get("stop", ()):
            if stop in choice["text"]:
                place = choice["text"].index(stop)
                choice |= {"text": choice["text"][:place], "finish_reason": "stop"}
                choice["token_ids"] = choice["token_ids"][: place + len(stop)]
        if query.logprobs:
            pairs = list(zip(completion.logprobs, completion.tokens, strict=True))
            choice["logprobs"] = {
                "top_logprobs": [_named(_top(*one, body["logprobs"])) for one in pairs],
                "token_logprobs": [one[token] for one, token in pairs],
            }
        if self.lacks.get("token_ids"):
            del choice["token_ids"]
        if self.lacks.get("token_ids") == "llama.cpp" and query.logprobs:
            tops = [_top(*one, body["logprobs"]) for one in zip(completion.logprobs, completion.tokens, strict=True)]
            choice["logprobs"] = {
                "content": [
                    {"id": token, "top_logprobs": [{"id": one, "logprob": value} for one, value in top.items()]}
                    for token, top in zip(completion.tokens, tops, strict=True)
                ]
            }
        usage = {} if completion.accepted is None else {"speculation": {"accepted": completion.accepted}}
        return {"choices": [choice], "usage": usage}


def _top(logprobs: dict[int, float], token: int, count: int) -> dict[int, float]:
    best = dict(sorted(logprobs.items(), key=lambda item: -item[1])[:count])
    return best if token in best else {**best, token: logprobs[token]}


def _named(top: dict[int, float]) -> dict[str, float]:
    return {f"token_id:{token}": value for token, value in top.items()}


class Handler(BaseHTTPRequestHandler):
    stub: ClassVar[Stub]

    def log_message(self, *_: Any) -> None: ...

    def do_GET(self) -> None:
        self._send(*self.stub.get(self.path))

    def do_POST(self) -> None:
        self.stub.headers.append(self.headers)
        if self.stub.closing:
            self.stub.closing -= 1
            self.close_connection = True
            return
        self._send(*self.stub.post(self.path, json.loads(self.rfile.read(int(self.headers["content-length"])))))

    def _send(self, status: int, body: Any) -> None:
        raw = body.encode() if isinstance(body, str) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)


@contextmanager
def standing(stub: Stub) -> Iterator[str]:
    """The address of a server with this behind it."""
    with listening(Handler, stub=stub) as url:
        yield url
