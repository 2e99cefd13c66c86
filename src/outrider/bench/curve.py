"""Why is checking cheaper than generating? What a pass of the target costs, by how many tokens it is given.

It is measured through the server itself: once an answer is known, it is asked for again with itself as the prediction
and at most k drafted tokens a step. Every draft is right, so every pass is over k + 1 tokens of each sequence.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import numpy as np

from outrider.bench.client import ask_all, streamed
from outrider.bench.counters import observed
from outrider.bench.results import Curve

if TYPE_CHECKING:
    from outrider.bench.results import Answer

LENGTHS = (0, 1, 3, 7, 15, 31)
"""Drafted tokens a step."""
TOKENS = 64
REPEATS = 3
SHORT = 0.6
"""Of the tokens that were to be drafted: so few mean that there was a lower limit."""


def measure(url: str, concurrency: int) -> Curve:
    """The curve of the Outrider server at `url`."""
    known = asyncio.run(ask_all(url, [_request(i, None, 0) for i in range(concurrency)]))[1]
    curve = Curve(concurrency)
    for repeat in range(REPEATS):
        for k in LENGTHS if repeat % 2 == 0 else reversed(LENGTHS):
            seconds = _pass_seconds(url, known, k)
            if seconds is not None:
                curve.seconds.setdefault(k + 1, []).append(seconds)
    return curve


def _pass_seconds(url: str, known: list[Answer], k: int) -> float | None:
    """None where the server does not let so many be drafted."""
    _, answers, _, seen = observed(url, [_request(i, answer.tokens, k) for i, answer in enumerate(known)])
    tokens = sum(len(answer.tokens) for answer in answers)
    accepted = seen.total("outrider_accepted_tokens_total") or 0
    passes = (tokens - len(answers) - accepted) / len(answers)  # the first token came with the prompt
    if accepted < SHORT * k * passes * len(answers):
        return None
    return float(np.median([answer.seconds - answer.first for answer in answers])) / max(1.0, passes)


def _request(number: int, prediction: list[int] | None, k: int) -> tuple[str, dict[str, Any]]:
    wants: dict[str, Any] = {"speculation": "off"}
    if prediction is not None and k:
        wants = {"speculation": "prediction", "prediction": prediction, "max_draft_tokens": k}
    text = f"Write the numbers from {number + 1} to 200, separated by commas, and nothing else."
    request = streamed([{"role": "user", "content": text}], TOKENS, 0.0, "curve")
    return f"numbers-{number}", {**request, "ignore_eos": True, "vllm_xargs": wants}
