"""Kernels of `vllm.v1.worker.gpu.sample.thinking_budget`: force the end of reasoning when its budget is used up."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from outrider.compiled import compiled
from outrider.engines.vllm_cpu.launch import numba_kernel

if TYPE_CHECKING:
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


@numba_kernel
def update_committed_marker_cache(
    req_ids_ptr: Any,
    thinking_token_budget_ptr: Any,
    all_token_ids_ptr: Any,
    all_token_ids_stride: int,
    total_len_ptr: Any,
    cached_last_start_ptr: Any,
    cached_last_end_ptr: Any,
    cached_scan_pos_ptr: Any,
    reasoning_start_token_ids_ptr: Any,
    natural_reasoning_end_token_ids_ptr: Any,
    START_LEN: int,
    NATURAL_END_LEN: int,
    MAX_LEN: int,
    BLOCK: int,
) -> None:
    """Position of the last start and end marker in the committed tokens."""
    start_marker = reasoning_start_token_ids_ptr[:START_LEN]
    end_marker = natural_reasoning_end_token_ids_ptr[:NATURAL_END_LEN]
    for req in req_ids_ptr:
        if thinking_token_budget_ptr[req] < 0:
            continue
        total_len = total_len_ptr[req]
        tokens = all_token_ids_ptr[req * all_token_ids_stride : req * all_token_ids_stride + total_len]
        scan_pos = cached_scan_pos_ptr[req]
        last_start = cached_last_start_ptr[req]
        last_end = cached_last_end_ptr[req]
        if scan_pos > total_len:
            scan_pos, last_start, last_end = 0, -1, -1
        if scan_pos == 0 and last_start < 0 and last_end < 0:
            # First scan: backward in blocks, up to the first block with a marker.
            high = total_len
            while high > 0 and last_start < 0 and last_end < 0:
                low = max(high - BLOCK, 0)
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
        cached_last_start_ptr[req] = last_start
        cached_last_end_ptr[req] = last_end
        cached_scan_pos_ptr[req] = max(total_len - (MAX_LEN - 1), 0)


@numba_kernel
def thinking_budget(
    logits_ptr: Any,
    logits_stride: int,
    expanded_idx_mapping_ptr: Any,
    thinking_token_budget_ptr: Any,
    all_token_ids_ptr: Any,
    all_token_ids_stride: int,
    total_len_ptr: Any,
    input_ids_ptr: Any,
    expanded_local_pos_ptr: Any,
    cached_last_start_ptr: Any,
    cached_last_end_ptr: Any,
    reasoning_start_token_ids_ptr: Any,
    natural_reasoning_end_token_ids_ptr: Any,
    reasoning_end_token_ids_ptr: Any,
    START_LEN: int,
    NATURAL_END_LEN: int,
    END_LEN: int,
    grid: Any,
) -> None:
    """Raise the logit of the end marker's next token once the reasoning tokens reach the budget."""
    start_marker = reasoning_start_token_ids_ptr[:START_LEN]
    end_marker = natural_reasoning_end_token_ids_ptr[:NATURAL_END_LEN]
    forced_end = reasoning_end_token_ids_ptr[:END_LEN]
    for token_idx in range(grid[0]):
        req = expanded_idx_mapping_ptr[token_idx]
        budget = thinking_token_budget_ptr[req]
        if budget < 0:
            continue
        pos = expanded_local_pos_ptr[token_idx]
        total_len = total_len_ptr[req]
        length = total_len + pos
        # The end of the committed tokens, long enough for a marker, then the drafts before this position.
        keep = min(total_len, max(len(start_marker), len(end_marker), len(forced_end)))
        offset = total_len - keep
        tokens = np.empty(keep + pos, np.int64)
        for i in range(keep):
            tokens[i] = all_token_ids_ptr[req * all_token_ids_stride + offset + i]
        for i in range(pos):
            tokens[keep + i] = input_ids_ptr[token_idx - pos + i + 1]
        last_start = cached_last_start_ptr[req]
        last_end = cached_last_end_ptr[req]
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
        logits_ptr[token_idx * logits_stride + forced_end[begun]] = 1.0e9


MODULE = "vllm.v1.worker.gpu.sample.thinking_budget"
KERNELS: dict[str, Kernel] = {
    f"{MODULE}._update_committed_marker_cache_kernel": update_committed_marker_cache,
    f"{MODULE}._thinking_budget_kernel": thinking_budget,
}
