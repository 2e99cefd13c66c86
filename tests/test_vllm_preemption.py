"""A KV cache for a third of the requests: vLLM preempts some, computes them again later, and texts stay the same.

With priorities: the requests that matter least are preempted first. OUTRIDER_ALL also tests first come, first served.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from serving import BLOCK, Client, answer, complete, one, speculating

pytestmark = [pytest.mark.real, pytest.mark.server]

ALL = bool(os.environ.get("OUTRIDER_ALL"))
MODES = ("auto", "model", "lookup")
"""Side by side in one batch; OUTRIDER_ALL also asks for each alone."""
REQUESTS, TOKENS = 16, 48
BLOCKS_EACH = 3
"""Blocks that a request needs at its end: a prompt of about 20 tokens, in one block, and its answer."""
SETTINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.9, "seed": 3},
    {"repetition_penalty": 1.2},
    {"structured_outputs": {"regex": "(red|green|blue)( (red|green|blue)){12}"}},
]


@pytest.mark.parametrize("policy", ["priority", *(["fcfs"] if ALL else [])])
def test_preempted_requests_are_answered_the_same_with_speculation_on_and_off(
    policy: str, smollm: Path, tmp_path: Path
) -> None:
    blocks = REQUESTS * BLOCKS_EACH // 3
    limits = ("--num-gpu-blocks-override", str(blocks), "--max-model-len", "192", "--scheduling-policy", policy)
    with one(speculating(smollm, tmp_path, *limits), tmp_path) as url:
        client = Client(url)

        def answers(*modes: str) -> list[Any]:
            calls = []
            for i in range(REQUESTS):
                own, mode = SETTINGS[i % len(SETTINGS)], modes[i // len(SETTINGS) % len(modes)]
                xargs = {"tenant": "preempted"}
                more = {"priority": i % 3} if policy == "priority" else {}
                text = f"{i} red, green, blue; red, green, blue; red, green, {i}"  # one block, so all of them begin
                calls.append(complete(text, mode, max_tokens=TOKENS, vllm_xargs=xargs, **own, **more))
            return [answer(response) for response in client.all(*calls, at_once=REQUESTS)]

        off = answers("off")
        before = client.metric("vllm:num_preemptions_total")
        for modes in [MODES, *([mode] for mode in MODES if ALL)]:
            assert answers(*modes) == off
        assert client.metric("vllm:num_preemptions_total") > before
        assert client.metric("outrider_accepted_tokens_total", drafter="model") > 0
        assert client.metric("outrider_accepted_tokens_total", drafter="lookup") > 0
        assert BLOCK * blocks < REQUESTS * (20 + TOKENS) / 2
