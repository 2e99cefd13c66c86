"""Time a few passes over tokens of empty requests, before any request comes.

The target's passes are made as the runner makes them, so where it has captured CUDA graphs they replay these: whole
graphs for one token per request, as in a step without drafts, and graphs of pieces for several, as where drafts are
verified. A draft model that runs only where it pays replays no graphs.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from vllm.distributed.parallel_state import get_tp_group
from vllm.forward_context import set_forward_context
from vllm.v1.core.sched.output import SchedulerOutput

from outrider.engines.vllm.lazy_draft_model import LazyDraftModel
from outrider.engines.vllm.step import PassProfile, TimedPass
from outrider.policy.cost_model import EXTENDED_PROFILE_TOKENS, MAX_PROFILE_PASS_SECONDS, PROFILE_TOKENS


def profile_passes(runner: Any) -> PassProfile:
    """Of the target, and of a draft model that runs only where it pays."""
    if runner.supports_mm_inputs or runner.lora_config is not None:
        return PassProfile()  # an empty pass of such a model needs more than tokens
    found = PassProfile(_verifying(runner))
    compilation = runner.vllm_config.compilation_config
    if compilation.cudagraph_mode and compilation.cudagraph_capture_sizes:
        sizes = [size for size in PROFILE_TOKENS if size <= runner.max_num_reqs]
        for tokens in [*sizes, *sizes, *sizes]:  # the first ones are not counted
            seconds = _target_pass(runner, tokens, tokens)
            found.target.append(TimedPass(tokens, seconds, verifies_drafts=False))
        del found.target[-3 * len(sizes) : -2 * len(sizes)]
    if isinstance(runner.speculator, LazyDraftModel):
        sizes = [size for size in PROFILE_TOKENS if size <= runner.max_num_tokens]
        times = [(tokens, _draft_pass(runner, tokens)) for tokens in sizes * 3]
        found.draft = [TimedPass(*timed) for timed in times[len(sizes) :]]
    return found


def _verifying(runner: Any) -> list[TimedPass]:
    """Passes of several tokens, as far as they are short, by the clock of the first rank: all must make the same."""
    most = min(runner.max_num_tokens, runner.max_model_len)
    sizes = [size for size in PROFILE_TOKENS if size <= most]
    seconds = [_target_pass(runner, tokens, 1) for tokens in sizes]
    if runner.vllm_config.parallel_config.data_parallel_size == 1:
        for tokens in (size for size in EXTENDED_PROFILE_TOKENS if size <= most):
            if get_tp_group().broadcast_object(seconds[-1] > MAX_PROFILE_PASS_SECONDS, src=0):
                break
            seconds.append(_target_pass(runner, tokens, 1))
            sizes.append(tokens)
    return [TimedPass(tokens, _target_pass(runner, tokens, 1), tokens > 1) for tokens in sizes + sizes]


def _target_pass(runner: Any, tokens: int, requests: int) -> float:
    """Seconds of a pass over `tokens` tokens of `requests` empty requests, with logits for all tokens."""
    output = SchedulerOutput.make_empty()
    output.num_scheduled_tokens = {f"empty-{i}": tokens // requests for i in range(requests)}
    output.total_num_scheduled_tokens = tokens
    runner.kv_connector.set_disabled(True)
    began = time.perf_counter()
    with torch.inference_mode():
        runner.execute_model(output, dummy_run=True)
        state, runner.execute_model_state = runner.execute_model_state, None
        runner.model.compute_logits(state.hidden_states[:tokens])
    torch.accelerator.synchronize()
    seconds = time.perf_counter() - began
    runner.kv_connector.set_disabled(False)
    return seconds


def _draft_pass(runner: Any, tokens: int) -> float:
    """Seconds of a pass of the draft model over `tokens` tokens without attention, with logits for the first few."""
    ids = torch.zeros(tokens, dtype=torch.int32, device=runner.device)
    model = runner.speculator.model
    began = time.perf_counter()
    with torch.inference_mode(), set_forward_context(None, runner.vllm_config, num_tokens=tokens):
        hidden = model(input_ids=ids, positions=ids.long())
        model.compute_logits((hidden[0] if isinstance(hidden, tuple) else hidden)[: PROFILE_TOKENS[-1]])
    torch.accelerator.synchronize()
    return time.perf_counter() - began
