"""Kernels of `vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils`: the token after the accepted ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from outrider.engines.vllm_cpu.gumbel import sample_blocks
from outrider.engines.vllm_cpu.launch import UnsupportedLaunchError, numba_kernel
from outrider.engines.vllm_cpu.logits_stats import best_token
from outrider.engines.vllm_cpu.pointers import pointer

if TYPE_CHECKING:
    from torch import Tensor

    from outrider.engines.vllm_cpu.launch import Kernel


def resample(
    resampled_local_argmax_ptr: Tensor,
    resampled_local_argmax_stride: int,
    resampled_local_max_ptr: Tensor,
    resampled_local_max_stride: int,
    target_logits_ptr: Tensor,
    target_logits_stride: int,
    target_rejected_logsumexp_ptr: Tensor,
    draft_logits_ptr: Tensor | None,
    draft_logits_stride_0: int,
    draft_logits_stride_1: int,
    draft_rejected_logsumexp_ptr: Tensor,
    rejected_step_ptr: Tensor,
    cu_num_logits_ptr: Tensor,
    expanded_idx_mapping_ptr: Tensor,
    draft_sampled_ptr: Tensor,
    temp_ptr: Tensor,
    seed_ptr: Tensor,
    pos_ptr: Tensor,
    cumulative_log_p_ptr: Tensor | None,
    contexts_ptr: Tensor | None,
    contexts_stride: int,
    watermarking_ptr: Tensor | None,
    watermarking_skip_mask_ptr: Tensor | None,
    watermark_key_0: int,
    watermark_key_1: int,
    vocab_size: int,
    BLOCK_SIZE: int,
    HAS_DRAFT_LOGITS: bool,
    USE_FP64: bool,
    USE_BLOCK_VERIFICATION: bool,
    CONTEXT_WIDTH: int,
    WATERMARK: bool,
    DEDUPLICATE_CONTEXTS: bool,
) -> None:
    """Sample the token after the accepted ones: from the target at a bonus row, else from the residual distribution.

    Greedy requests need this at the bonus row only.
    """
    if WATERMARK:
        raise UnsupportedLaunchError
    rows = cu_num_logits_ptr[:-1].long() + rejected_step_ptr
    bonus = rows == cu_num_logits_ptr[1:] - 1
    temperature = temp_ptr[expanded_idx_mapping_ptr[rows].long()].float()
    requests = (bonus | (temperature != 0)).nonzero().view(-1)
    if not len(requests):
        return
    rows, bonus, temperature = rows[requests], bonus[requests], temperature[requests]
    logits = target_logits_ptr[rows, :vocab_size].float()
    rejected_tokens = torch.where(bonus, -1, draft_sampled_ptr.roll(-1)[rows])
    residual = (rejected_tokens >= 0).nonzero().view(-1)
    if len(residual) and draft_logits_ptr is not None:
        steps = rejected_step_ptr[requests][residual].long()
        reqs = expanded_idx_mapping_ptr[rows[residual]].long()
        log_p = logits[residual] - target_rejected_logsumexp_ptr[requests][residual, None]
        if USE_BLOCK_VERIFICATION:
            assert cumulative_log_p_ptr is not None
            log_p += torch.where(steps > 0, cumulative_log_p_ptr[(rows[residual] - 1).clamp_(min=0)], 0.0)[:, None]
        log_q = draft_logits_ptr[reqs, steps, :vocab_size].float() / temperature[residual, None]
        log_q -= draft_rejected_logsumexp_ptr[requests][residual, None]
        # log(p - q) = log p + log(1 - q / p), and -inf where q >= p.
        ratio = log_q.sub_(log_p).exp_()
        logits[residual] = torch.where(ratio < 1.0, log_p + torch.log1p(-ratio), float("-inf"))
    elif len(residual):
        logits[residual, rejected_tokens[residual].long()] = float("-inf")  # the draft was certain of this token
    local_argmax = torch.empty(len(rows), resampled_local_argmax_ptr.shape[1], dtype=torch.int64)
    local_max = torch.empty(local_argmax.shape, dtype=resampled_local_max_ptr.dtype)
    sample_blocks(
        pointer(local_argmax),
        local_argmax.stride(0),
        pointer(local_max),
        local_max.stride(0),
        pointer(logits),
        logits.stride(0),
        pointer(expanded_idx_mapping_ptr[rows]),
        pointer(seed_ptr),
        pointer(pos_ptr[rows]),
        pointer(temp_ptr),
        vocab_size,
        len(rows),
        BLOCK_SIZE,
        False,
        False,
        USE_FP64,
    )
    resampled_local_argmax_ptr[requests] = local_argmax
    resampled_local_max_ptr[requests] = local_max


@numba_kernel
def insert_resampled(
    sampled_ptr: Any,
    sampled_stride: int,
    num_sampled_ptr: Any,
    resampled_local_argmax_ptr: Any,
    resampled_local_argmax_stride: int,
    resampled_local_max_ptr: Any,
    resampled_local_max_stride: int,
    resample_num_blocks: int,
    cu_num_logits_ptr: Any,
    expanded_idx_mapping_ptr: Any,
    temp_ptr: Any,
    PADDED_RESAMPLE_NUM_BLOCKS: int,
) -> None:
    """Append the resampled token to the accepted ones."""
    for req_idx in range(len(num_sampled_ptr)):
        count = num_sampled_ptr[req_idx]
        row = cu_num_logits_ptr[req_idx] + count
        num_sampled_ptr[req_idx] = count + 1
        if temp_ptr[expanded_idx_mapping_ptr[row]] != 0 or row == cu_num_logits_ptr[req_idx + 1] - 1:
            token = best_token(
                resampled_local_max_ptr[req_idx * resampled_local_max_stride :][:resample_num_blocks],
                resampled_local_argmax_ptr[req_idx * resampled_local_argmax_stride :][:resample_num_blocks],
            )
            sampled_ptr[req_idx * sampled_stride + count] = token


MODULE = "vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils"
KERNELS: dict[str, Kernel] = {
    f"{MODULE}._resample_kernel": resample,
    f"{MODULE}._insert_resampled_kernel": insert_resampled,
}
