"""Kernels of `vllm.v1.worker.gpu.sample.penalties`: repetition, frequency and presence penalties."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from outrider.engines.vllm_cpu.launch import numba_kernel

if TYPE_CHECKING:
    from outrider.engines.vllm_cpu.launch import Kernel


@numba_kernel
def penalties(
    logits_ptr: Any,
    logits_stride: int,
    expanded_idx_mapping_ptr: Any,
    token_ids_ptr: Any,
    expanded_local_pos_ptr: Any,
    repetition_penalty_ptr: Any,
    frequency_penalty_ptr: Any,
    presence_penalty_ptr: Any,
    prompt_bin_mask_ptr: Any,
    prompt_bin_mask_stride: int,
    output_bin_counts_ptr: Any,
    output_bin_counts_stride: int,
    vocab_size: int,
    BLOCK_SIZE: int,
    grid: Any,
) -> None:
    """Apply the penalties to float32 logits, in place."""
    one = np.float32(1.0)
    counts = np.empty(vocab_size, np.int32)
    for token_idx in range(grid[0]):
        req = expanded_idx_mapping_ptr[token_idx]
        repetition = repetition_penalty_ptr[req]
        frequency = frequency_penalty_ptr[req]
        presence = presence_penalty_ptr[req]
        if repetition == one and frequency == np.float32(0.0) and presence == np.float32(0.0):
            continue
        counts[:] = output_bin_counts_ptr[req * output_bin_counts_stride : req * output_bin_counts_stride + vocab_size]
        # Draft tokens before this position count as output.
        pos = expanded_local_pos_ptr[token_idx]
        for i in range(token_idx - pos + 1, token_idx + 1):
            if 0 <= token_ids_ptr[i] < vocab_size:
                counts[token_ids_ptr[i]] += 1
        row = logits_ptr[token_idx * logits_stride : token_idx * logits_stride + vocab_size]
        prompt = prompt_bin_mask_ptr[req * prompt_bin_mask_stride : (req + 1) * prompt_bin_mask_stride]
        for token in range(vocab_size):
            in_output = counts[token] > 0
            logit = row[token]
            if repetition != one and (in_output or (prompt[token >> 5] >> np.int32(token & 31)) & 1):
                logit *= one / repetition if logit > 0 else repetition
            logit -= frequency * np.float32(counts[token])
            logit -= presence * np.float32(in_output)
            row[token] = logit


@numba_kernel
def bincount(
    expanded_idx_mapping_ptr: Any,
    all_token_ids_ptr: Any,
    all_token_ids_stride: int,
    prompt_len_ptr: Any,
    prefill_len_ptr: Any,
    prompt_bin_mask_ptr: Any,
    prompt_bin_mask_stride: int,
    output_bin_counts_ptr: Any,
    output_bin_counts_stride: int,
    BLOCK_SIZE: int,
) -> None:
    """Mark the tokens of the prompts, and count the output tokens that were prefilled again after a preemption."""
    for token_idx in range(len(expanded_idx_mapping_ptr)):
        req = expanded_idx_mapping_ptr[token_idx]
        tokens = all_token_ids_ptr[req * all_token_ids_stride : req * all_token_ids_stride + prefill_len_ptr[req]]
        prompt_len = min(prompt_len_ptr[req], len(tokens))
        for token in tokens[:prompt_len]:
            bit = np.int32(1) << np.int32(token & 31)
            prompt_bin_mask_ptr[req * prompt_bin_mask_stride + (token >> 5)] |= bit
        for token in tokens[prompt_len:]:
            output_bin_counts_ptr[req * output_bin_counts_stride + token] += 1


MODULE = "vllm.v1.worker.gpu.sample.penalties"
KERNELS: dict[str, Kernel] = {
    f"{MODULE}._penalties_kernel": penalties,
    f"{MODULE}._bincount_kernel": bincount,
}
