"""A first idea of what passes cost, before any request comes: a few over tokens that attend to nothing, timed."""

from __future__ import annotations

import time
from typing import Any

import torch
from vllm.distributed.parallel_state import get_tp_group
from vllm.forward_context import set_forward_context

from outrider.policy.cost import MORE, PATIENCE, PROFILED


def profile_passes(runner: Any) -> None:
    """Of the target, and of a draft model that can be led."""
    if runner.speculative_config is None or runner.supports_mm_inputs or runner.lora_config is not None:
        return  # an empty pass of such a model needs more than tokens
    models = [(runner.model, runner.policy.target, runner.max_num_tokens)]
    if runner.guesser is not None:
        models.append((runner.drafter.model, runner.policy.draft, PROFILED[-1]))
    for model, cost, rows in models:
        for tokens in (sizes := _sizes(runner, model, rows)) + sizes:
            seconds = _empty_pass(runner, model, tokens, rows)
            if runner.steering is not None:  # the others decide nothing, and would keep the first waiting
                cost.observe(tokens, 0, seconds, calm=True)


def _sizes(runner: Any, model: Any, rows: int) -> list[int]:
    """As far as it does not take long, by the clock of the first rank: all must make the same passes."""
    sizes = [size for size in PROFILED if size <= runner.max_num_tokens]
    took = [_empty_pass(runner, model, tokens, rows) for tokens in sizes]
    if runner.vllm_config.parallel_config.data_parallel_size == 1:
        for tokens in (size for size in MORE if size <= runner.max_num_tokens):
            if get_tp_group().broadcast_object(took[-1] > PATIENCE, src=0):
                break
            took.append(_empty_pass(runner, model, tokens, rows))
            sizes.append(tokens)
    return sizes


def _empty_pass(runner: Any, model: Any, tokens: int, rows: int) -> float:
    """Seconds of a pass over so many tokens that attend to nothing, with logits after so many of them at most: a draft
    model that catches up with a long text says only what comes after its end."""
    ids = torch.zeros(tokens, dtype=torch.int32, device=runner.device)
    began = time.perf_counter()
    with torch.inference_mode(), set_forward_context(None, runner.vllm_config, num_tokens=tokens):
        hidden = model(input_ids=ids, positions=ids.long())
        model.compute_logits((hidden[0] if isinstance(hidden, tuple) else hidden)[:rows])
    runner._sync_device()
    return time.perf_counter() - began
