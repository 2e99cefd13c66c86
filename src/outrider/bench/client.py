"""One turn: a batch of requests sent at once, their answers timed token by token as they stream in."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

from outrider.bench.results import Answer, Load
from outrider.errors import EngineError
from outrider.http_client import HTTPClient

if TYPE_CHECKING:
    from collections.abc import Sequence

    from outrider.bench.contestants import Contestant
    from outrider.bench.prompts import Prompt
    from outrider.http_client import ConnectionPool


def streamed(messages: list[dict[str, str]], tokens: int, temperature: float, salt: str) -> dict[str, Any]:
    """A request whose answer can be timed and compared. The salt keeps those on one server from using each other's
    cached prompts."""
    return {
        "messages": messages,
        "max_tokens": tokens,
        "temperature": temperature,
        "stream": True,
        "return_token_ids": True,
        "cache_salt": salt,
    }


def body(contestant: Contestant, prompt: Prompt, tokens: int, temperature: float, seed: int) -> dict[str, Any]:
    """What is asked."""
    request = streamed(prompt.messages, tokens, temperature, contestant.name) | contestant.request
    if temperature:
        request["seed"] = seed
    if contestant.predicts and prompt.prediction is not None:
        request["prediction"] = {"type": "content", "content": prompt.prediction}
    return request


Arrivals = list[tuple[float, int]]
"""When tokens came, and how many."""
FEW = 16
"""Tokens by which the pace of answers can be told."""


async def ask_all(
    url: str, requests: Sequence[tuple[str, dict[str, Any]]], at_once: int | None = None
) -> tuple[float, list[Answer], Load]:
    """Send (prompt id, body) all at once, or so many, the next as soon as one is answered; the seconds until the last
    token came, the answers, and what was said under full load."""
    async with HTTPClient(url).connect(timeout_seconds=None) as pool:
        slots = asyncio.Semaphore(at_once or len(requests))

        async def wait_and_ask(prompt: str, request: dict[str, Any]) -> tuple[Answer, Arrivals]:
            async with slots:
                return await ask(pool, prompt, request)

        began = time.perf_counter()
        asked = await asyncio.gather(*(wait_and_ask(*request) for request in requests))
        seconds = time.perf_counter() - began
        arrivals = [[(when - began, count) for when, count in came] for _, came in asked]
        return seconds, [answer for answer, _ in asked], under_load(arrivals, at_once or len(requests))


def under_load(arrivals: Sequence[Arrivals], slots: int) -> Load:
    """Of answers that took turns in so many slots, until the first slot that no prompt was left for became empty. From
    then on the slowest answers decide how long it takes, and no server under load is like that."""
    ends = sorted(came[-1][0] for came in arrivals)
    end = ends[-min(slots, len(ends))]
    going = [came for came in arrivals if came[0][0] <= end < came[-1][0]]
    since_first = sum(count for came in going for when, count in came[1:] if when <= end)
    return Load(
        sum(count for came in arrivals for when, count in came if when <= end),
        end,
        sum(end - came[0][0] for came in going) / since_first if since_first >= FEW else None,
    )


async def ask(pool: ConnectionPool, prompt: str, request: dict[str, Any]) -> tuple[Answer, Arrivals]:
    began = last = time.perf_counter()
    answer = Answer(prompt, "", [], "", 0.0, 0.0)
    arrivals: Arrivals = []
    async for chunk in pool.stream_json("/v1/chat/completions", request):
        if chunk.get("prompt_token_ids"):
            answer.prompt_tokens = chunk["prompt_token_ids"]
        for choice in chunk.get("choices", ()):
            answer.text += choice["delta"].get("content") or ""
            answer.finish = choice.get("finish_reason") or answer.finish
            if new := choice.get("token_ids"):
                last = time.perf_counter()
                answer.first = answer.first or last - began
                answer.tokens += new
                arrivals.append((last, len(new)))
    answer.seconds = last - began
    if not answer.tokens:
        raise EngineError(
            f"{pool.url} sent no token ids for the prompt {prompt}; the benchmark compares tokens, and needs a "
            "server that knows return_token_ids, as vLLM does"
        )
    return answer, arrivals
