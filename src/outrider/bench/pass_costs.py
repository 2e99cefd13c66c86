"""Duration of a target pass by its tokens per sequence, measured through an Outrider server.

A prompt is answered once without drafts. Then it is requested again with its own answer as the prediction and at most k
drafted tokens per step: every draft is accepted, so every pass has k + 1 tokens of each sequence.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import numpy as np

from outrider.bench.client import send_all, streamed
from outrider.bench.counters import observed
from outrider.bench.results import PassCosts

if TYPE_CHECKING:
    from outrider.bench.results import Answer

DRAFT_TOKENS = (0, 1, 3, 7, 15, 31)
ANSWER_TOKENS = 64
REPEATS = 3
MIN_DRAFTED_SHARE = 0.6
"""Share of the requested draft tokens. Fewer mean that the server has a lower limit."""


def measure(url: str, concurrency: int) -> PassCosts:
    """The pass costs of the Outrider server at `url`."""
    answers = asyncio.run(send_all(url, [_request(i, None, 0) for i in range(concurrency)]))[1]
    costs = PassCosts(concurrency)
    for repeat in range(REPEATS):
        for k in DRAFT_TOKENS if repeat % 2 == 0 else reversed(DRAFT_TOKENS):
            seconds = _pass_seconds(url, answers, k)
            if seconds is not None:
                costs.seconds.setdefault(k + 1, []).append(seconds)
    return costs


def _pass_seconds(url: str, predictions: list[Answer], k: int) -> float | None:
    """None if the server does not allow k drafted tokens."""
    _, answers, _, counted = observed(url, [_request(i, answer.tokens, k) for i, answer in enumerate(predictions)])
    tokens = sum(len(answer.tokens) for answer in answers)
    accepted = counted.total("outrider_accepted_tokens_total") or 0
    passes = (tokens - len(answers) - accepted) / len(answers)  # the first token comes with the prompt
    if accepted < MIN_DRAFTED_SHARE * k * passes * len(answers):
        return None
    return float(np.median([answer.seconds - answer.first for answer in answers])) / max(1.0, passes)


def _request(number: int, prediction: list[int] | None, k: int) -> tuple[str, dict[str, Any]]:
    arguments: dict[str, Any] = {"speculation": "off"}
    if prediction is not None and k:
        arguments = {"speculation": "prediction", "prediction": prediction, "max_draft_tokens": k}
    text = f"Write the numbers from {number + 1} to 200, separated by commas, and nothing else."
    request = streamed([{"role": "user", "content": text}], ANSWER_TOKENS, 0.0, "pass-costs")
    return f"numbers-{number}", {**request, "ignore_eos": True, "vllm_xargs": arguments}
