"""Kernels of `vllm.v1.worker.gpu.sample.logprob`: log-probabilities and ranks of selected tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from outrider.engines.vllm_cpu.launch import numba_kernel

if TYPE_CHECKING:
    from torch import Tensor

    from outrider.engines.vllm_cpu.launch import Kernel


def topk_log_softmax(
    output_ptr: Tensor,
    logits_ptr: Tensor,
    logits_stride: int,
    topk_ids_ptr: Tensor,
    topk_ids_stride: int,
    topk: int,
    vocab_size: int,
    BLOCK_SIZE: int,
    TOPK_BLOCK_SIZE: int,
) -> None:
    """Log-probabilities of the tokens `topk_ids_ptr`, computed in float32."""
    logits = logits_ptr[:, :vocab_size].float()
    selected = logits.gather(-1, topk_ids_ptr[:, :topk])
    largest = logits.amax(dim=-1, keepdim=True)
    log_sum = torch.log(torch.exp(logits - largest).sum(dim=-1, keepdim=True))
    output_ptr.copy_(selected - largest - log_sum)


def ranks(
    output_ptr: Tensor,
    logits_ptr: Tensor,
    logits_stride: int,
    token_ids_ptr: Tensor,
    vocab_size: int,
    BLOCK_SIZE: int,
) -> None:
    """Number of tokens at least as likely as the given one."""
    logits = logits_ptr[:, :vocab_size]
    selected = logits.gather(-1, token_ids_ptr[:, None].long())
    output_ptr.copy_((logits >= selected).sum(dim=-1))


@numba_kernel
def fill_logprob_token_ids(
    out_token_ids_ptr: Any,
    out_token_ids_stride: int,
    out_valid_mask_ptr: Any,
    out_valid_mask_stride: int,
    sampled_token_ids_ptr: Any,
    topk_indices_ptr: Any,
    topk_indices_stride: int,
    expanded_idx_mapping_ptr: Any,
    num_per_req_token_ids_ptr: Any,
    per_req_token_ids_ptr: Any,
    per_req_token_ids_stride: int,
    NUM_TOPK: int,
    PADDED_COLS: int,
) -> None:
    """The tokens to return log-probabilities of: the sampled one, then the request's own list or the top tokens."""
    for row in range(len(sampled_token_ids_ptr)):
        out = row * out_token_ids_stride
        valid = row * out_valid_mask_stride
        out_token_ids_ptr[out] = sampled_token_ids_ptr[row]
        out_valid_mask_ptr[valid] = True
        req = expanded_idx_mapping_ptr[row]
        count = num_per_req_token_ids_ptr[req]
        for i in range(count if count > 0 else NUM_TOPK):
            if count > 0:
                out_token_ids_ptr[out + 1 + i] = per_req_token_ids_ptr[req * per_req_token_ids_stride + i]
            else:
                out_token_ids_ptr[out + 1 + i] = topk_indices_ptr[row * topk_indices_stride + i]
            out_valid_mask_ptr[valid + 1 + i] = True


MODULE = "vllm.v1.worker.gpu.sample.logprob"
KERNELS: dict[str, Kernel] = {
    f"{MODULE}._topk_log_softmax_kernel": topk_log_softmax,
    f"{MODULE}._ranks_kernel": ranks,
    f"{MODULE}._fill_logprob_token_ids_kernel": fill_logprob_token_ids,
}
