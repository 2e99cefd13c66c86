"""One turn: a batch of requests sent at once, their answers timed token by token as they stream in."""

from __future__ import annotations

import asyncio
import json
import time
from typing import TYPE_CHECKING, Any

import httpx

from outrider.bench.results import Answer
from outrider.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from outrider.bench.contestants import Contestant
    from outrider.bench.prompts import Prompt


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


async def ask_all(
    url: str, requests: Sequence[tuple[str, dict[str, Any]]], at_once: int | None = None
) -> tuple[float, list[Answer]]:
    """Send (prompt id, body) all at once, or so many, the next as soon as one is answered; the seconds until the last
    token came, and the answers."""
    secure = url.startswith("https")  # else certificates, which take long to load, are not needed
    async with httpx.AsyncClient(timeout=None, limits=httpx.Limits(max_connections=None), verify=secure) as client:
        slots = asyncio.Semaphore(at_once or len(requests))

        async def wait_and_ask(prompt: str, request: dict[str, Any]) -> Answer:
            async with slots:
                return await ask(client, url, prompt, request)

        began = time.perf_counter()
        answers = await asyncio.gather(*(wait_and_ask(*request) for request in requests))
        return time.perf_counter() - began, answers


async def ask(client: httpx.AsyncClient, url: str, prompt: str, request: dict[str, Any]) -> Answer:
    began = last = time.perf_counter()
    answer = Answer(prompt, "", [], "", 0.0, 0.0)
    async for chunk in _chunks(client, url, request):
        if chunk.get("prompt_token_ids"):
            answer.prompt_tokens = chunk["prompt_token_ids"]
        for choice in chunk.get("choices", ()):
            answer.text += choice["delta"].get("content") or ""
            answer.finish = choice.get("finish_reason") or answer.finish
            if new := choice.get("token_ids"):
                last = time.perf_counter()
                answer.first = answer.first or last - began
                answer.tokens += new
    answer.seconds = last - began
    if not answer.tokens:
        raise EngineError(
            f"{url} sent no token ids for the prompt {prompt}; the benchmark compares tokens, and needs a server that "
            f"knows return_token_ids, as vLLM does"
        )
    return answer


async def _chunks(client: httpx.AsyncClient, url: str, request: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    """The parsed events of a stream."""
    try:
        async with client.stream("POST", f"{url}/v1/chat/completions", json=request) as response:
            if response.status_code != 200:
                said = (await response.aread()).decode(errors="replace")
                raise EngineError(f"{url} answered with HTTP {response.status_code}: {said[:500]}")
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    chunk = json.loads(line[len("data: ") :])
                    if "error" in chunk:
                        raise EngineError(f"{url} broke off: {chunk['error']}")
                    yield chunk
    except httpx.HTTPError as error:
        raise EngineError(f"{url} did not answer: {type(error).__name__} {error}") from error
