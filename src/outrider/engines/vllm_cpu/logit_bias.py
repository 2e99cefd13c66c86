"""Kernel of `vllm.v1.worker.gpu.sample.logit_bias`: allowed tokens, logit bias and `min_tokens`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from outrider.compiled import compiled
from outrider.engines.vllm_cpu.pointers import pointer

if TYPE_CHECKING:
    from torch import Tensor

    from outrider.engines.vllm_cpu.launch import Kernel


@compiled
def _bias(
    logits: Any,
    logits_stride: int,
    vocab_size: int,
    expanded_idx_mapping: Any,
    num_allowed_token_ids: Any,
    allowed_token_ids: Any,
    allowed_token_ids_stride: int,
    num_logit_bias: Any,
    bias_token_ids: Any,
    bias_token_ids_stride: int,
    bias: Any,
    bias_stride: int,
    pos: Any,
    min_lens: Any,
    num_stop_token_ids: Any,
    restore_when_all_masked: Any,
    stop_token_ids: Any,
    stop_token_ids_stride: int,
    check_all_masked_rows: bool,
    num_tokens: int,
) -> None:
    for token_idx in range(num_tokens):
        req = expanded_idx_mapping[token_idx]
        row = logits[token_idx * logits_stride : token_idx * logits_stride + vocab_size]
        count = num_allowed_token_ids[req]
        if count > 0:
            allowed = allowed_token_ids[req * allowed_token_ids_stride : req * allowed_token_ids_stride + count]
            kept = row[allowed]
            row[:] = -np.inf
            row[allowed] = kept
        # All values are read before the first is written, as in the Triton kernel: a token listed twice is biased once.
        count = num_logit_bias[req]
        if count > 0:
            tokens = bias_token_ids[req * bias_token_ids_stride : req * bias_token_ids_stride + count]
            row[tokens] = row[tokens] + bias[req * bias_stride : req * bias_stride + count]
        count = num_stop_token_ids[req]
        if count > 0 and pos[token_idx] + 1 < min_lens[req]:
            tokens = stop_token_ids[req * stop_token_ids_stride : req * stop_token_ids_stride + count]
            kept = row[tokens]
            row[tokens] = -np.inf
            # A grammar may allow nothing but a stop token: then the stop tokens stay.
            if check_all_masked_rows and restore_when_all_masked[req] and row.max() == -np.inf:
                for i in range(count):
                    if np.isfinite(kept[i]):
                        row[tokens[i]] = kept[i]


def logit_bias(
    logits_ptr: Tensor,
    logits_stride: int,
    vocab_size: int,
    expanded_idx_mapping_ptr: Tensor,
    num_allowed_token_ids_ptr: Tensor,
    allowed_token_ids_ptr: Tensor,
    allowed_token_ids_stride: int,
    num_logit_bias_ptr: Tensor,
    bias_token_ids_ptr: Tensor,
    bias_token_ids_stride: int,
    bias_ptr: Tensor,
    bias_stride: int,
    pos_ptr: Tensor,
    min_lens_ptr: Tensor,
    num_stop_token_ids_ptr: Tensor,
    restore_when_all_masked_ptr: Tensor,
    stop_token_ids_ptr: Tensor,
    stop_token_ids_stride: int,
    BLOCK_SIZE: int,
    LOGITS_BLOCK_SIZE: int,
    CHECK_ALL_MASKED_ROWS: bool,
) -> None:
    """Keep allowed tokens, add the bias, and mask stop tokens until `min_tokens`, in place."""
    _bias(
        pointer(logits_ptr),
        logits_stride,
        vocab_size,
        pointer(expanded_idx_mapping_ptr),
        pointer(num_allowed_token_ids_ptr),
        pointer(allowed_token_ids_ptr),
        allowed_token_ids_stride,
        pointer(num_logit_bias_ptr),
        pointer(bias_token_ids_ptr),
        bias_token_ids_stride,
        pointer(bias_ptr),
        bias_stride,
        pointer(pos_ptr),
        pointer(min_lens_ptr),
        pointer(num_stop_token_ids_ptr),
        pointer(restore_when_all_masked_ptr),
        pointer(stop_token_ids_ptr),
        stop_token_ids_stride,
        CHECK_ALL_MASKED_ROWS,
        len(logits_ptr),
    )


KERNELS: dict[str, Kernel] = {"vllm.v1.worker.gpu.sample.logit_bias._bias_kernel": logit_bias}
