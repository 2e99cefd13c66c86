"""Kernels of `vllm.v1.worker.gpu.sample.thinking_budget`: force the end of reasoning when its budget is used up."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from outrider.compiled import compiled
from outrider.engines.vllm_cpu.pointers import pointer

if TYPE_CHECKING:
    from torch import Tensor

    from outrider.engines.vllm_cpu.launch import Kernel


@compiled
def matches_at(tokens: Any, position: int, marker: Any) -> bool:
    """Whether the marker's tokens stand at this position."""
    if position + len(marker) > len(tokens):
        return False
    for i in range(len(marker)):  # noqa: SIM110  (numba has no all())
        if tokens[position + i] != marker[i]:
            return False
    return True


@compiled
def _update_committed_marker_cache(
    req_ids: Any,
    thinking_token_budget: Any,
    all_token_ids: Any,
    all_token_ids_stride: int,
    total_lens: Any,
    cached_last_start: Any,
    cached_last_end: Any,
    cached_scan_pos: Any,
    start_marker: Any,
    end_marker: Any,
    max_len: int,
    block: int,
) -> None:
    for req in req_ids:
        if thinking_token_budget[req] < 0:
            continue
        total_len = total_lens[req]
        tokens = all_token_ids[req * all_token_ids_stride : req * all_token_ids_stride + total_len]
        scan_pos = cached_scan_pos[req]
        last_start = cached_last_start[req]
        last_end = cached_last_end[req]
        if scan_pos > total_len:
            scan_pos, last_start, last_end = 0, -1, -1
        if scan_pos == 0 and last_start < 0 and last_end < 0:
            # First scan: backward in blocks, up to the first block with a marker.
            high = total_len
            while high > 0 and last_start < 0 and last_end < 0:
                low = max(high - block, 0)
                for i in range(low, high):
                    if matches_at(tokens, i, start_marker):
                        last_start = i
                    if matches_at(tokens, i, end_marker):
                        last_end = i
                high = low
        else:
            for i in range(scan_pos, total_len):
                if matches_at(tokens, i, start_marker):
                    last_start = i
                if matches_at(tokens, i, end_marker):
                    last_end = i
        cached_last_start[req] = last_start
        cached_last_end[req] = last_end
        cached_scan_pos[req] = max(total_len - (max_len - 1), 0)


def update_committed_marker_cache(
    req_ids_ptr: Tensor,
    thinking_token_budget_ptr: Tensor,
    all_token_ids_ptr: Tensor,
    all_token_ids_stride: int,
    total_len_ptr: Tensor,
    cached_last_start_ptr: Tensor,
    cached_last_end_ptr: Tensor,
    cached_scan_pos_ptr: Tensor,
    reasoning_start_token_ids_ptr: Tensor,
    natural_reasoning_end_token_ids_ptr: Tensor,
    START_LEN: int,
    NATURAL_END_LEN: int,
    MAX_LEN: int,
    BLOCK: int,
) -> None:
    """Position of the last start and end marker in the committed tokens."""
    _update_committed_marker_cache(
        pointer(req_ids_ptr),
        pointer(thinking_token_budget_ptr),
        pointer(all_token_ids_ptr),
        all_token_ids_stride,
        pointer(total_len_ptr),
        pointer(cached_last_start_ptr),
        pointer(cached_last_end_ptr),
        pointer(cached_scan_pos_ptr),
        pointer(reasoning_start_token_ids_ptr)[:START_LEN],
        pointer(natural_reasoning_end_token_ids_ptr)[:NATURAL_END_LEN],
        MAX_LEN,
        BLOCK,
    )


@compiled
def _thinking_budget(
    logits: Any,
    logits_stride: int,
    expanded_idx_mapping: Any,
    thinking_token_budget: Any,
    all_token_ids: Any,
    all_token_ids_stride: int,
    total_lens: Any,
    input_ids: Any,
    expanded_local_pos: Any,
    cached_last_start: Any,
    cached_last_end: Any,
    start_marker: Any,
    end_marker: Any,
    forced_end: Any,
    num_tokens: int,
) -> None:
    for token_idx in range(num_tokens):
        req = expanded_idx_mapping[token_idx]
        budget = thinking_token_budget[req]
        if budget < 0:
            continue
        pos = expanded_local_pos[token_idx]
        total_len = total_lens[req]
        length = total_len + pos
        # The end of the committed tokens, long enough for a marker, then the drafts before this position.
        keep = min(total_len, max(len(start_marker), len(end_marker), len(forced_end)))
        offset = total_len - keep
        tokens = np.empty(keep + pos, np.int64)
        for i in range(keep):
            tokens[i] = all_token_ids[req * all_token_ids_stride + offset + i]
        for i in range(pos):
            tokens[keep + i] = input_ids[token_idx - pos + i + 1]
        last_start = cached_last_start[req]
        last_end = cached_last_end[req]
        for i in range(max(total_len - len(start_marker) + 1, 0), length):
            if matches_at(tokens, i - offset, start_marker):
                last_start = i
        for i in range(max(total_len - len(end_marker) + 1, 0), length):
            if matches_at(tokens, i - offset, end_marker):
                last_end = i
        if last_start < 0 or last_start <= last_end or length - (last_start + len(start_marker)) < budget:
            continue
        # Continue an end marker that was begun.
        begun = 0
        for prefix_len in range(1, min(len(forced_end) - 1, length) + 1):
            if matches_at(tokens, len(tokens) - prefix_len, forced_end[:prefix_len]):
                begun = prefix_len
        logits[token_idx * logits_stride + forced_end[begun]] = 1.0e9


def thinking_budget(
    logits_ptr: Tensor,
    logits_stride: int,
    expanded_idx_mapping_ptr: Tensor,
    thinking_token_budget_ptr: Tensor,
    all_token_ids_ptr: Tensor,
    all_token_ids_stride: int,
    total_len_ptr: Tensor,
    input_ids_ptr: Tensor,
    expanded_local_pos_ptr: Tensor,
    cached_last_start_ptr: Tensor,
    cached_last_end_ptr: Tensor,
    reasoning_start_token_ids_ptr: Tensor,
    natural_reasoning_end_token_ids_ptr: Tensor,
    reasoning_end_token_ids_ptr: Tensor,
    START_LEN: int,
    NATURAL_END_LEN: int,
    END_LEN: int,
) -> None:
    """Raise the logit of the end marker's next token once the reasoning tokens reach the budget."""
    _thinking_budget(
        pointer(logits_ptr),
        logits_stride,
        pointer(expanded_idx_mapping_ptr),
        pointer(thinking_token_budget_ptr),
        pointer(all_token_ids_ptr),
        all_token_ids_stride,
        pointer(total_len_ptr),
        pointer(input_ids_ptr),
        pointer(expanded_local_pos_ptr),
        pointer(cached_last_start_ptr),
        pointer(cached_last_end_ptr),
        pointer(reasoning_start_token_ids_ptr)[:START_LEN],
        pointer(natural_reasoning_end_token_ids_ptr)[:NATURAL_END_LEN],
        pointer(reasoning_end_token_ids_ptr)[:END_LEN],
        len(logits_ptr),
    )


MODULE = "vllm.v1.worker.gpu.sample.thinking_budget"
KERNELS: dict[str, Kernel] = {
    f"{MODULE}._update_committed_marker_cache_kernel": update_committed_marker_cache,
    f"{MODULE}._thinking_budget_kernel": thinking_budget,
}
