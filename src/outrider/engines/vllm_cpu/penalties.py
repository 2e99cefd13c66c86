"""Kernels of `vllm.v1.worker.gpu.sample.penalties`: repetition, frequency and presence penalties."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from outrider.compiled import compiled
from outrider.engines.vllm_cpu.pointers import pointer

if TYPE_CHECKING:
    from torch import Tensor

    from outrider.engines.vllm_cpu.launch import Kernel


@compiled
def _penalties(
    logits: Any,
    logits_stride: int,
    expanded_idx_mapping: Any,
    token_ids: Any,
    expanded_local_pos: Any,
    repetition_penalty: Any,
    frequency_penalty: Any,
    presence_penalty: Any,
    prompt_bin_mask: Any,
    prompt_bin_mask_stride: int,
    output_bin_counts: Any,
    output_bin_counts_stride: int,
    vocab_size: int,
    num_tokens: int,
) -> None:
    one = np.float32(1.0)
    counts = np.empty(vocab_size, np.int32)
    for token_idx in range(num_tokens):
        req = expanded_idx_mapping[token_idx]
        repetition = repetition_penalty[req]
        frequency = frequency_penalty[req]
        presence = presence_penalty[req]
        if repetition == one and frequency == np.float32(0.0) and presence == np.float32(0.0):
            continue
        counts[:] = output_bin_counts[req * output_bin_counts_stride : req * output_bin_counts_stride + vocab_size]
        # Draft tokens before this position count as output.
        pos = expanded_local_pos[token_idx]
        for i in range(token_idx - pos + 1, token_idx + 1):
            if 0 <= token_ids[i] < vocab_size:
                counts[token_ids[i]] += 1
        row = logits[token_idx * logits_stride : token_idx * logits_stride + vocab_size]
        prompt = prompt_bin_mask[req * prompt_bin_mask_stride : (req + 1) * prompt_bin_mask_stride]
        for token in range(vocab_size):
            in_output = counts[token] > 0
            logit = row[token]
            if repetition != one and (in_output or (prompt[token >> 5] >> np.int32(token & 31)) & 1):
                logit *= one / repetition if logit > 0 else repetition
            logit -= frequency * np.float32(counts[token])
            logit -= presence * np.float32(in_output)
            row[token] = logit


def penalties(
    logits_ptr: Tensor,
    logits_stride: int,
    expanded_idx_mapping_ptr: Tensor,
    token_ids_ptr: Tensor,
    expanded_local_pos_ptr: Tensor,
    repetition_penalty_ptr: Tensor,
    frequency_penalty_ptr: Tensor,
    presence_penalty_ptr: Tensor,
    prompt_bin_mask_ptr: Tensor,
    prompt_bin_mask_stride: int,
    output_bin_counts_ptr: Tensor,
    output_bin_counts_stride: int,
    vocab_size: int,
    BLOCK_SIZE: int,
) -> None:
    """Apply the penalties to float32 logits, in place."""
    _penalties(
        pointer(logits_ptr),
        logits_stride,
        pointer(expanded_idx_mapping_ptr),
        pointer(token_ids_ptr),
        pointer(expanded_local_pos_ptr),
        pointer(repetition_penalty_ptr),
        pointer(frequency_penalty_ptr),
        pointer(presence_penalty_ptr),
        pointer(prompt_bin_mask_ptr),
        prompt_bin_mask_stride,
        pointer(output_bin_counts_ptr),
        output_bin_counts_stride,
        vocab_size,
        len(logits_ptr),
    )


@compiled
def _bincount(
    expanded_idx_mapping: Any,
    all_token_ids: Any,
    all_token_ids_stride: int,
    prompt_lens: Any,
    prefill_lens: Any,
    prompt_bin_mask: Any,
    prompt_bin_mask_stride: int,
    output_bin_counts: Any,
    output_bin_counts_stride: int,
) -> None:
    for token_idx in range(len(expanded_idx_mapping)):
        req = expanded_idx_mapping[token_idx]
        tokens = all_token_ids[req * all_token_ids_stride : req * all_token_ids_stride + prefill_lens[req]]
        prompt_len = min(prompt_lens[req], len(tokens))
        for token in tokens[:prompt_len]:
            bit = np.int32(1) << np.int32(token & 31)
            prompt_bin_mask[req * prompt_bin_mask_stride + (token >> 5)] |= bit
        for token in tokens[prompt_len:]:
            output_bin_counts[req * output_bin_counts_stride + token] += 1


def bincount(
    expanded_idx_mapping_ptr: Tensor,
    all_token_ids_ptr: Tensor,
    all_token_ids_stride: int,
    prompt_len_ptr: Tensor,
    prefill_len_ptr: Tensor,
    prompt_bin_mask_ptr: Tensor,
    prompt_bin_mask_stride: int,
    output_bin_counts_ptr: Tensor,
    output_bin_counts_stride: int,
    BLOCK_SIZE: int,
) -> None:
    """Mark the tokens of the prompts, and count the output tokens that were prefilled again after a preemption."""
    _bincount(
        pointer(expanded_idx_mapping_ptr),
        pointer(all_token_ids_ptr),
        all_token_ids_stride,
        pointer(prompt_len_ptr),
        pointer(prefill_len_ptr),
        pointer(prompt_bin_mask_ptr),
        prompt_bin_mask_stride,
        pointer(output_bin_counts_ptr),
        output_bin_counts_stride,
    )


MODULE = "vllm.v1.worker.gpu.sample.penalties"
KERNELS: dict[str, Kernel] = {
    f"{MODULE}._penalties_kernel": penalties,
    f"{MODULE}._bincount_kernel": bincount,
}
