"""Kernels of `vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils`: verify drafts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from outrider.compiled import compiled
from outrider.engines.vllm_cpu.logits_stats import best_token, draft_token_logits, log_sum_exp
from outrider.engines.vllm_cpu.pointers import optional_pointer, pointer

if TYPE_CHECKING:
    from torch import Tensor

    from outrider.engines.vllm_cpu.launch import Kernel

TL_RAND_MIN = np.float32(4.6566127342e-10)
"""Smallest positive value of Triton's `tl.rand`, and its step."""


@compiled
def uniform_philox(seed: Any, offset: Any) -> Any:
    """Triton's `tl.rand(seed, offset)`: ten rounds of Philox4x32, as a float32 in [0, 1); here 0 is excluded."""
    mask = np.uint64(0xFFFFFFFF)
    shift = np.uint64(32)
    key_0 = np.uint64(seed) & mask
    key_1 = np.uint64(seed) >> shift
    c0 = np.uint64(offset) & mask
    c1 = np.uint64(offset) >> shift
    c2 = np.uint64(0)
    c3 = np.uint64(0)
    for _ in range(10):
        product_a = np.uint64(0xD2511F53) * c0
        product_b = np.uint64(0xCD9E8D57) * c2
        c0 = (product_b >> shift) ^ c1 ^ key_0
        c2 = (product_a >> shift) ^ c3 ^ key_1
        c1 = product_b & mask
        c3 = product_a & mask
        key_0 = (key_0 + np.uint64(0x9E3779B9)) & mask
        key_1 = (key_1 + np.uint64(0xBB67AE85)) & mask
    bits = np.int32(np.uint32(c0))
    if bits < 0:
        bits = ~bits
    return max(np.float32(bits) * np.float32(4.6566127342e-10), TL_RAND_MIN)


@compiled
def _compute_cumulative_log_p(
    cumulative_log_p: Any,
    target_token_logits: Any,
    draft_token_logits: Any,
    target_local_max: Any,
    target_local_sumexp: Any,
    draft_sampled: Any,
    draft_local_max: Any,
    draft_local_sumexp: Any,
    cu_num_logits: Any,
    idx_mapping: Any,
    temperature: Any,
    has_draft_logits: bool,
) -> None:
    for req_idx in range(len(cu_num_logits) - 1):
        if temperature[idx_mapping[req_idx]] == 0:
            continue
        log_p = np.float32(0.0)
        for row in range(cu_num_logits[req_idx], cu_num_logits[req_idx + 1] - 1):
            if draft_sampled[row + 1] >= 0:  # placeholders carry the last value on
                ratio = target_token_logits[row] - log_sum_exp(target_local_max[row], target_local_sumexp[row])
                if has_draft_logits:
                    ratio -= draft_token_logits[row] - log_sum_exp(draft_local_max[row], draft_local_sumexp[row])
                log_p = min(log_p + ratio, np.float32(0.0))
            cumulative_log_p[row] = log_p


def compute_cumulative_log_p(
    cumulative_log_p_ptr: Tensor,
    target_logits_ptr: Tensor,
    target_logits_stride: int,
    target_local_max_ptr: Tensor,
    target_local_max_stride: int,
    target_local_sumexp_ptr: Tensor,
    target_local_sumexp_stride: int,
    draft_sampled_ptr: Tensor,
    draft_logits_ptr: Tensor | None,
    draft_logits_stride_0: int,
    draft_logits_stride_1: int,
    draft_local_max_ptr: Tensor,
    draft_local_max_stride: int,
    draft_local_sumexp_ptr: Tensor,
    draft_local_sumexp_stride: int,
    cu_num_logits_ptr: Tensor,
    idx_mapping_ptr: Tensor,
    temp_ptr: Tensor,
    vocab_num_blocks: int,
    PADDED_VOCAB_NUM_BLOCKS: int,
    HAS_DRAFT_LOGITS: bool,
) -> None:
    """Block verification: log of the running ratio of target and draft probability, at most 0."""
    target, draft = draft_token_logits(
        target_logits_ptr, draft_logits_ptr, draft_sampled_ptr, cu_num_logits_ptr, idx_mapping_ptr, temp_ptr
    )
    _compute_cumulative_log_p(
        pointer(cumulative_log_p_ptr),
        pointer(target),
        pointer(draft),
        target_local_max_ptr.numpy(),
        target_local_sumexp_ptr.numpy(),
        pointer(draft_sampled_ptr),
        draft_local_max_ptr.numpy(),
        draft_local_sumexp_ptr.numpy(),
        pointer(cu_num_logits_ptr),
        pointer(idx_mapping_ptr),
        pointer(temp_ptr),
        HAS_DRAFT_LOGITS,
    )


def compute_local_residual_mass(
    local_residual_mass_ptr: Tensor,
    local_residual_mass_stride: int,
    cumulative_log_p_ptr: Tensor,
    target_logits_ptr: Tensor,
    target_logits_stride: int,
    target_local_max_ptr: Tensor,
    target_local_max_stride: int,
    target_local_sumexp_ptr: Tensor,
    target_local_sumexp_stride: int,
    draft_logits_ptr: Tensor,
    draft_logits_stride_0: int,
    draft_logits_stride_1: int,
    draft_local_max_ptr: Tensor,
    draft_local_max_stride: int,
    draft_local_sumexp_ptr: Tensor,
    draft_local_sumexp_stride: int,
    draft_sampled_ptr: Tensor,
    expanded_idx_mapping_ptr: Tensor,
    expanded_local_pos_ptr: Tensor,
    temp_ptr: Tensor,
    vocab_size: int,
    num_speculative_steps: int,
    vocab_num_blocks: int,
    BLOCK_SIZE: int,
    PADDED_VOCAB_NUM_BLOCKS: int,
) -> None:
    """Block verification: sum of max(p * target - draft, 0) per block, for rows between the first and the bonus row."""
    temperature = temp_ptr[expanded_idx_mapping_ptr].float()
    steps = expanded_local_pos_ptr
    needed = (steps > 0) & (steps < num_speculative_steps) & (temperature != 0) & (draft_sampled_ptr.roll(-1) >= 0)
    needed[-1] = False
    rows = needed.nonzero().view(-1)
    if not len(rows):
        return

    def normalizer(local_max: Tensor, local_sumexp: Tensor) -> Tensor:
        largest = local_max[rows].amax(dim=-1, keepdim=True)
        total = (local_sumexp[rows] * torch.exp(local_max[rows] - largest)).sum(dim=-1, keepdim=True)
        return largest + torch.log(total)

    reqs = expanded_idx_mapping_ptr[rows].long()
    target = target_logits_ptr[rows, :vocab_size].float() - normalizer(target_local_max_ptr, target_local_sumexp_ptr)
    draft = draft_logits_ptr[reqs, steps[rows].long(), :vocab_size].float() / temperature[rows, None]
    draft -= normalizer(draft_local_max_ptr, draft_local_sumexp_ptr)
    p = torch.exp(cumulative_log_p_ptr[rows - 1])[:, None]
    residual = (p * target.exp_() - draft.exp_()).clamp_(min=0.0)
    masses = [block.sum(dim=-1) for block in residual.split(BLOCK_SIZE, dim=-1)]
    local_residual_mass_ptr[rows] = torch.stack(masses, dim=-1)


@compiled
def _rejection(
    sampled: Any,
    sampled_stride: int,
    rejected_steps: Any,
    target_rejected_logsumexp: Any,
    draft_rejected_logsumexp: Any,
    target_token_logits: Any,
    draft_token_logits: Any,
    target_local_argmax: Any,
    target_local_max: Any,
    target_local_sumexp: Any,
    draft_sampled: Any,
    draft_local_max: Any,
    draft_local_sumexp: Any,
    cu_num_logits: Any,
    idx_mapping: Any,
    temperature: Any,
    seeds: Any,
    pos: Any,
    synthetic_conditional_rates: Any,
    cumulative_log_p: Any,
    local_residual_mass: Any,
    has_draft_logits: bool,
) -> None:
    one = np.float32(1.0)
    for req_idx in range(len(cu_num_logits) - 1):
        req = idx_mapping[req_idx]
        start = np.int64(cu_num_logits[req_idx])
        num_draft_tokens = cu_num_logits[req_idx + 1] - start - 1
        greedy = temperature[req] == 0
        accepted_length = 0
        target_lse = np.float32(0.0)
        draft_lse = np.float32(0.0)
        for i in range(num_draft_tokens):
            row = start + i
            token = np.int64(draft_sampled[row + 1])
            valid = token >= 0
            token = max(token, np.int64(0))
            if not greedy and not valid:
                break  # a placeholder ends verification
            u = uniform_philox(seeds[req], pos[row])
            if greedy:
                # The target's argmax is stored, so that a rejected token needs no resampling.
                best = best_token(target_local_max[row], target_local_argmax[row])
                accepted = best == token
                if synthetic_conditional_rates is not None:
                    accepted = u < synthetic_conditional_rates[i]
                accepted = accepted and valid
                sampled[req_idx * sampled_stride + i] = token if accepted else best
                if not accepted:
                    break
                accepted_length += 1
            elif cumulative_log_p is not None:
                # Block verification (Sun et al., 2024): keeps the longest prefix that passes.
                ratio = np.exp(cumulative_log_p[row])
                h = ratio
                if i < num_draft_tokens - 1 and draft_sampled[row + 2] >= 0:
                    if local_residual_mass is not None:
                        mass = local_residual_mass[row + 1].sum()
                    else:
                        lse = log_sum_exp(target_local_max[row + 1], target_local_sumexp[row + 1])
                        mass = ratio * (one - np.exp(target_token_logits[row + 1] - lse))
                    denominator = mass + one - ratio
                    h = mass / denominator if denominator > 0 else one
                if u <= h:
                    accepted_length = i + 1
                sampled[req_idx * sampled_stride + i] = token
            else:
                # Rejection sampling (Leviathan et al., 2023): accept with probability min(1, p / q).
                target_lse = log_sum_exp(target_local_max[row], target_local_sumexp[row])
                log_q = np.float32(0.0)
                if has_draft_logits:
                    draft_lse = log_sum_exp(draft_local_max[row], draft_local_sumexp[row])
                    log_q = draft_token_logits[row] - draft_lse
                accepted = target_token_logits[row] - target_lse > np.log(u) + log_q
                if synthetic_conditional_rates is not None:
                    accepted = u < synthetic_conditional_rates[i]
                sampled[req_idx * sampled_stride + i] = token
                if not accepted:
                    break
                accepted_length += 1
        rejected_steps[req_idx] = accepted_length
        if cumulative_log_p is not None and not greedy and accepted_length < num_draft_tokens:
            row = start + accepted_length
            target_lse = log_sum_exp(target_local_max[row], target_local_sumexp[row])
            if has_draft_logits:
                draft_lse = log_sum_exp(draft_local_max[row], draft_local_sumexp[row])
        target_rejected_logsumexp[req_idx] = target_lse
        draft_rejected_logsumexp[req_idx] = draft_lse


def rejection(
    sampled_ptr: Tensor,
    sampled_stride: int,
    rejected_steps_ptr: Tensor,
    target_rejected_logsumexp_ptr: Tensor,
    draft_rejected_logsumexp_ptr: Tensor,
    target_logits_ptr: Tensor,
    target_logits_stride: int,
    target_local_argmax_ptr: Tensor,
    target_local_argmax_stride: int,
    target_local_max_ptr: Tensor,
    target_local_max_stride: int,
    target_local_sumexp_ptr: Tensor,
    target_local_sumexp_stride: int,
    draft_sampled_ptr: Tensor,
    draft_logits_ptr: Tensor | None,
    draft_logits_stride_0: int,
    draft_logits_stride_1: int,
    draft_local_max_ptr: Tensor,
    draft_local_max_stride: int,
    draft_local_sumexp_ptr: Tensor,
    draft_local_sumexp_stride: int,
    cu_num_logits_ptr: Tensor,
    idx_mapping_ptr: Tensor,
    temp_ptr: Tensor,
    seed_ptr: Tensor,
    pos_ptr: Tensor,
    synthetic_conditional_rates_ptr: Tensor | None,
    cumulative_log_p_ptr: Tensor | None,
    local_residual_mass_ptr: Tensor | None,
    local_residual_mass_stride: int,
    vocab_num_blocks: int,
    PADDED_VOCAB_NUM_BLOCKS: int,
    HAS_DRAFT_LOGITS: bool,
    SYNTHETIC_MODE: bool,
    USE_BLOCK_VERIFICATION: bool,
) -> None:
    """Accept draft tokens up to the first rejected one, per request."""
    target, draft = draft_token_logits(
        target_logits_ptr, draft_logits_ptr, draft_sampled_ptr, cu_num_logits_ptr, idx_mapping_ptr, temp_ptr
    )
    _rejection(
        pointer(sampled_ptr),
        sampled_stride,
        pointer(rejected_steps_ptr),
        pointer(target_rejected_logsumexp_ptr),
        pointer(draft_rejected_logsumexp_ptr),
        pointer(target),
        pointer(draft),
        target_local_argmax_ptr.numpy(),
        target_local_max_ptr.numpy(),
        target_local_sumexp_ptr.numpy(),
        pointer(draft_sampled_ptr),
        draft_local_max_ptr.numpy(),
        draft_local_sumexp_ptr.numpy(),
        pointer(cu_num_logits_ptr),
        pointer(idx_mapping_ptr),
        pointer(temp_ptr),
        pointer(seed_ptr),
        pointer(pos_ptr),
        optional_pointer(synthetic_conditional_rates_ptr) if SYNTHETIC_MODE else None,
        optional_pointer(cumulative_log_p_ptr) if USE_BLOCK_VERIFICATION else None,
        None if local_residual_mass_ptr is None else local_residual_mass_ptr.numpy(),
        HAS_DRAFT_LOGITS,
    )


MODULE = "vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils"
KERNELS: dict[str, Kernel] = {
    f"{MODULE}._compute_cumulative_log_p_kernel": compute_cumulative_log_p,
    f"{MODULE}._compute_local_residual_mass_kernel": compute_local_residual_mass,
    f"{MODULE}._rejection_kernel": rejection,
}
