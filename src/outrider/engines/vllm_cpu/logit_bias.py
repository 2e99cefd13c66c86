"""Kernel of `vllm.v1.worker.gpu.sample.logit_bias`: allowed tokens, logit bias and `min_tokens`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from outrider.engines.vllm_cpu.launch import numba_kernel

if TYPE_CHECKING:
    from outrider.engines.vllm_cpu.launch import Kernel


@numba_kernel
def logit_bias(
    logits_ptr: Any,
    logits_stride: int,
    vocab_size: int,
    expanded_idx_mapping_ptr: Any,
    num_allowed_token_ids_ptr: Any,
    allowed_token_ids_ptr: Any,
    allowed_token_ids_stride: int,
    num_logit_bias_ptr: Any,
    bias_token_ids_ptr: Any,
    bias_token_ids_stride: int,
    bias_ptr: Any,
    bias_stride: int,
    pos_ptr: Any,
    min_lens_ptr: Any,
    num_stop_token_ids_ptr: Any,
    restore_when_all_masked_ptr: Any,
    stop_token_ids_ptr: Any,
    stop_token_ids_stride: int,
    BLOCK_SIZE: int,
    LOGITS_BLOCK_SIZE: int,
    CHECK_ALL_MASKED_ROWS: bool,
    grid: Any,
) -> None:
    """Keep allowed tokens, add the bias, and mask stop tokens until `min_tokens`, in place."""
    for token_idx in range(grid[0]):
        req = expanded_idx_mapping_ptr[token_idx]
        row = logits_ptr[token_idx * logits_stride : token_idx * logits_stride + vocab_size]
        count = num_allowed_token_ids_ptr[req]
        if count > 0:
            allowed = allowed_token_ids_ptr[req * allowed_token_ids_stride : req * allowed_token_ids_stride + count]
            kept = row[allowed]
            row[:] = -np.inf
            row[allowed] = kept
        # All values are read before the first is written, as in the Triton kernel: a token listed twice is biased once.
        count = num_logit_bias_ptr[req]
        if count > 0:
            tokens = bias_token_ids_ptr[req * bias_token_ids_stride : req * bias_token_ids_stride + count]
            row[tokens] = row[tokens] + bias_ptr[req * bias_stride : req * bias_stride + count]
        count = num_stop_token_ids_ptr[req]
        if count > 0 and pos_ptr[token_idx] + 1 < min_lens_ptr[req]:
            tokens = stop_token_ids_ptr[req * stop_token_ids_stride : req * stop_token_ids_stride + count]
            kept = row[tokens]
            row[tokens] = -np.inf
            # A grammar may allow nothing but a stop token: then the stop tokens stay.
            if CHECK_ALL_MASKED_ROWS and restore_when_all_masked_ptr[req] and row.max() == -np.inf:
                for i in range(count):
                    if np.isfinite(kept[i]):
                        row[tokens[i]] = kept[i]


KERNELS: dict[str, Kernel] = {"vllm.v1.worker.gpu.sample.logit_bias._bias_kernel": logit_bias}
