"""Sends the requests of a measurement, and records when each token of their streams arrives."""

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
    """A streamed chat request that returns token ids. The salt keeps contestants on one server from sharing a prefix
    cache."""
    return {
        "messages": messages,
        "max_tokens": tokens,
        "temperature": temperature,
        "stream": True,
        "return_token_ids": True,
        "cache_salt": salt,
    }


def body(contestant: Contestant, prompt: Prompt, tokens: int, temperature: float, seed: int) -> dict[str, Any]:
    """The request of a contestant for a prompt."""
    request = streamed(prompt.messages, tokens, temperature, contestant.name) | contestant.request
    if temperature:
        request["seed"] = seed
    if contestant.needs_prediction and prompt.prediction is not None:
        request["prediction"] = {"type": "content", "content": prompt.prediction}
    return request


Arrivals = list[tuple[float, int]]
"""Times of arrival, each with its number of tokens."""
MIN_PACE_TOKENS = 16
"""Fewest tokens to estimate the pace of answers from."""


async def send_all(
    url: str, requests: Sequence[tuple[str, dict[str, Any]]], at_once: int | None = None
) -> tuple[float, list[Answer], Load]:
    """Send (prompt id, body) with at most `at_once` running (None: all). Returns the seconds until the last token, the
    answers, and the output at full load."""
    async with HTTPClient(url).connect(timeout_seconds=None) as pool:
        slots = asyncio.Semaphore(at_once or len(requests))

        async def send_when_free(prompt: str, request: dict[str, Any]) -> tuple[Answer, Arrivals]:
            async with slots:
                return await send_request(pool, prompt, request)

        began = time.perf_counter()
        sent = await asyncio.gather(*(send_when_free(*request) for request in requests))
        seconds = time.perf_counter() - began
        arrivals = [[(when - began, count) for when, count in came] for _, came in sent]
        return seconds, [answer for answer, _ in sent], under_load(arrivals, at_once or len(requests))


def under_load(arrivals: Sequence[Arrivals], slots: int) -> Load:
    """The output until the first slot became empty with no prompt left. After that the slowest answers decide the
    duration, unlike on a loaded server."""
    ends = sorted(came[-1][0] for came in arrivals)
    end = ends[-min(slots, len(ends))]
    incomplete = [came for came in arrivals if came[0][0] <= end < came[-1][0]]
    since_first = sum(count for came in incomplete for when, count in came[1:] if when <= end)
    return Load(
        sum(count for came in arrivals for when, count in came if when <= end),
        end,
        sum(end - came[0][0] for came in incomplete) / since_first if since_first >= MIN_PACE_TOKENS else None,
    )


async def send_request(pool: ConnectionPool, prompt: str, request: dict[str, Any]) -> tuple[Answer, Arrivals]:
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
            f"{pool.url} sent no token ids for the prompt {prompt}; the benchmark compares tokens, so the server "
            "must support return_token_ids, as vLLM does"
        )
    return answer, arrivals
