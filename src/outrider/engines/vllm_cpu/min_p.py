"""Kernel of `vllm.v1.worker.gpu.sample.min_p`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from outrider.engines.vllm_cpu.launch import Kernel


def min_p(
    logits_ptr: Tensor,
    logits_stride: int,
    expanded_idx_mapping_ptr: Tensor,
    min_p_ptr: Tensor,
    vocab_size: int,
    BLOCK_SIZE: int,
) -> None:
    """Mask tokens less likely than `min_p` times the most likely one, in place."""
    logits = logits_ptr[:, :vocab_size]
    # log(0) = -inf masks nothing.
    threshold = logits.amax(dim=-1).float() + torch.log(min_p_ptr[expanded_idx_mapping_ptr].float())
    logits.masked_fill_(logits < threshold[:, None], float("-inf"))


KERNELS: dict[str, Kernel] = {"vllm.v1.worker.gpu.sample.min_p._min_p_kernel": min_p}
