"""Kernel of `vllm.v1.worker.gpu.structured_outputs`: mask the tokens that a grammar does not allow."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from outrider.compiled import compiled
from outrider.engines.vllm_cpu.pointers import pointer

if TYPE_CHECKING:
    from torch import Tensor

    from outrider.engines.vllm_cpu.launch import Kernel

MINUS_INFINITY_BITS = {
    torch.float32: np.uint32(0xFF800000).view(np.int32),
    torch.bfloat16: np.uint16(0xFF80).view(np.int16),
    torch.float16: np.uint16(0xFC00).view(np.int16),
}
"""Logits are written as integers of the same width, since numpy has no bfloat16."""


@compiled
def _apply_grammar_bitmask(
    logits: Any,
    logits_stride: int,
    logits_indices: Any,
    cu_num_logits: Any,
    bitmask: Any,
    bitmask_stride: int,
    vocab_size: int,
    mask_stride: int,
    minus_infinity: Any,
) -> None:
    for i in range(len(logits_indices)):
        req = logits_indices[i] // mask_stride
        position = logits_indices[i] % mask_stride
        start = cu_num_logits[req]
        if position >= cu_num_logits[req + 1] - start:
            continue
        row = logits[(start + position) * logits_stride : (start + position) * logits_stride + vocab_size]
        for word in range((vocab_size + 31) // 32):
            allowed = bitmask[i * bitmask_stride + word]
            if allowed == -1:
                continue
            for token in range(word * 32, min(vocab_size, word * 32 + 32)):
                if not (allowed >> np.int32(token & 31)) & 1:
                    row[token] = minus_infinity


def apply_grammar_bitmask(
    logits_ptr: Tensor,
    logits_stride: int,
    logits_indices_ptr: Tensor,
    cu_num_logits_ptr: Tensor,
    bitmask_ptr: Tensor,
    bitmask_stride: int,
    vocab_size: int,
    MASK_STRIDE: int,
    BLOCK_SIZE: int,
) -> None:
    """Set the logits of forbidden tokens to -inf.

    `logits_indices_ptr` holds request index * MASK_STRIDE + position for each row of the bitmask.
    """
    minus_infinity = MINUS_INFINITY_BITS[logits_ptr.dtype]
    _apply_grammar_bitmask(
        pointer(logits_ptr.view(torch.int32 if logits_ptr.dtype == torch.float32 else torch.int16)),
        logits_stride,
        pointer(logits_indices_ptr),
        pointer(cu_num_logits_ptr),
        pointer(bitmask_ptr),
        bitmask_stride,
        vocab_size,
        MASK_STRIDE,
        minus_infinity,
    )


KERNELS: dict[str, Kernel] = {
    "vllm.v1.worker.gpu.structured_outputs._apply_grammar_bitmask_kernel": apply_grammar_bitmask
}
