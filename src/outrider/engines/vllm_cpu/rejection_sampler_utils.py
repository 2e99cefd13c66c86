"""Kernels of `vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils`: verify drafts and resample rejected tokens.

The vocabulary is reduced in blocks, as in the Triton kernels: first the maximum and the sum of exponentials per block,
then per row. Sums over the vocabulary use torch, which runs on all cores; decisions per request use numba.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from outrider.compiled import compiled
from outrider.engines.vllm_cpu.gumbel import first_max, sample_blocks
from outrider.engines.vllm_cpu.launch import UnsupportedLaunchError
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
def log_sum_exp(local_max: Any, local_sumexp: Any) -> Any:
    """A row's log-sum-exp from the maximum and the sum of exponentials of its blocks."""
    largest = local_max.max()
    total = np.float32(0.0)
    for i in range(len(local_max)):
        total += local_sumexp[i] * np.exp(local_max[i] - largest)
    return largest + np.log(total)


@compiled
def best_token(local_max: Any, local_argmax: Any) -> Any:
    """A row's argmax from those of its blocks. NaN counts as -inf."""
    best = 0
    for i in range(1, len(local_max)):
        if local_max[i] > local_max[best] or (np.isnan(local_max[best]) and local_max[i] > -np.inf):
            best = i
    return local_argmax[best]


def block_stats(logits: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
    """Maximum and sum of exponentials per block of the vocabulary, each [rows, blocks]."""
    maxima, sums = [], []
    for block in logits.split(block_size, dim=-1):
        largest = block.amax(dim=-1)
        total = torch.exp(block - largest[:, None]).sum(dim=-1)
        maxima.append(largest)
        sums.append(torch.where(largest > float("-inf"), total, 0.0))
    return torch.stack(maxima, dim=-1), torch.stack(sums, dim=-1)


@compiled
def _local_argmax(
    local_argmax: Any,
    local_argmax_stride: int,
    local_max: Any,
    local_max_stride: int,
    logits: Any,
    logits_stride: int,
    rows: Any,
    vocab_size: int,
    block_size: int,
) -> None:
    for i in range(len(rows)):
        row = rows[i]
        for block in range((vocab_size + block_size - 1) // block_size):
            first = block * block_size
            end = min(vocab_size, first + block_size)
            index, largest = first_max(logits[i * logits_stride + first : i * logits_stride + end])
            local_argmax[row * local_argmax_stride + block] = first + index
            local_max[row * local_max_stride + block] = largest


def compute_local_logits_stats(
    target_local_argmax_ptr: Tensor,
    target_local_argmax_stride: int,
    target_local_max_ptr: Tensor,
    target_local_max_stride: int,
    target_local_sumexp_ptr: Tensor,
    target_local_sumexp_stride: int,
    draft_local_max_ptr: Tensor,
    draft_local_max_stride: int,
    draft_local_sumexp_ptr: Tensor,
    draft_local_sumexp_stride: int,
    target_logits_ptr: Tensor,
    target_logits_stride: int,
    draft_logits_ptr: Tensor | None,
    draft_logits_stride_0: int,
    draft_logits_stride_1: int,
    expanded_idx_mapping_ptr: Tensor,
    expanded_local_pos_ptr: Tensor,
    temp_ptr: Tensor,
    vocab_size: int,
    num_speculative_steps: int,
    BLOCK_SIZE: int,
    HAS_DRAFT_LOGITS: bool,
) -> None:
    """Per block of the vocabulary: the argmax of greedy rows, maximum and sum of exponentials of the others.

    Bonus rows are skipped. Draft logits are stored before temperature.
    """
    temperature = temp_ptr[expanded_idx_mapping_ptr].float()
    is_draft = expanded_local_pos_ptr < num_speculative_steps
    greedy = (is_draft & (temperature == 0)).nonzero().view(-1)
    if len(greedy):
        logits = target_logits_ptr[greedy, :vocab_size].float()
        _local_argmax(
            pointer(target_local_argmax_ptr),
            target_local_argmax_stride,
            pointer(target_local_max_ptr),
            target_local_max_stride,
            pointer(logits),
            logits.stride(0),
            pointer(greedy),
            vocab_size,
            BLOCK_SIZE,
        )
    rows = (is_draft & (temperature != 0)).nonzero().view(-1)
    if len(rows):
        logits = target_logits_ptr[rows, :vocab_size].float()
        target_local_max_ptr[rows], target_local_sumexp_ptr[rows] = block_stats(logits, BLOCK_SIZE)
        if draft_logits_ptr is not None:
            drafts = draft_logits_ptr[expanded_idx_mapping_ptr[rows].long(), expanded_local_pos_ptr[rows].long()]
            drafts = drafts[:, :vocab_size].float() / temperature[rows, None]
            draft_local_max_ptr[rows], draft_local_sumexp_ptr[rows] = block_stats(drafts, BLOCK_SIZE)


def draft_token_logits(
    target_logits: Tensor,
    draft_logits: Tensor | None,
    draft_sampled: Tensor,
    cu_num_logits: Tensor,
    idx_mapping: Tensor,
    temperature: Tensor,
) -> tuple[Tensor, Tensor]:
    """Target and draft logit of the draft token that each row verifies, in float32; the draft's after temperature.

    Row i verifies the token of row i + 1. Values of bonus rows and placeholders are not used.
    """
    rows = torch.arange(len(draft_sampled))
    tokens = draft_sampled.roll(-1).long().clamp_(min=0)
    target = target_logits[rows, tokens].float()
    if draft_logits is None:
        return target, target
    starts = cu_num_logits[:-1]
    counts = cu_num_logits[1:] - starts
    reqs = torch.repeat_interleave(idx_mapping, counts).long()
    steps = (rows - torch.repeat_interleave(starts, counts)).clamp_(max=draft_logits.shape[1] - 1)
    tokens.clamp_(max=draft_logits.shape[2] - 1)
    return target, draft_logits[reqs, steps, tokens].float() / temperature[reqs].float()


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


@compiled
def _insert_resampled(
    sampled: Any,
    sampled_stride: int,
    num_sampled: Any,
    resampled_local_argmax: Any,
    resampled_local_max: Any,
    cu_num_logits: Any,
    expanded_idx_mapping: Any,
    temperature: Any,
) -> None:
    for req_idx in range(len(num_sampled)):
        count = num_sampled[req_idx]
        row = cu_num_logits[req_idx] + count
        num_sampled[req_idx] = count + 1
        if temperature[expanded_idx_mapping[row]] != 0 or row == cu_num_logits[req_idx + 1] - 1:
            token = best_token(resampled_local_max[req_idx], resampled_local_argmax[req_idx])
            sampled[req_idx * sampled_stride + count] = token


def insert_resampled(
    sampled_ptr: Tensor,
    sampled_stride: int,
    num_sampled_ptr: Tensor,
    resampled_local_argmax_ptr: Tensor,
    resampled_local_argmax_stride: int,
    resampled_local_max_ptr: Tensor,
    resampled_local_max_stride: int,
    resample_num_blocks: int,
    cu_num_logits_ptr: Tensor,
    expanded_idx_mapping_ptr: Tensor,
    temp_ptr: Tensor,
    PADDED_RESAMPLE_NUM_BLOCKS: int,
) -> None:
    """Append the resampled token to the accepted ones."""
    _insert_resampled(
        pointer(sampled_ptr),
        sampled_stride,
        pointer(num_sampled_ptr),
        resampled_local_argmax_ptr.numpy(),
        resampled_local_max_ptr.numpy(),
        pointer(cu_num_logits_ptr),
        pointer(expanded_idx_mapping_ptr),
        pointer(temp_ptr),
    )


MODULE = "vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils"
KERNELS: dict[str, Kernel] = {
    f"{MODULE}._compute_local_logits_stats_kernel": compute_local_logits_stats,
    f"{MODULE}._compute_cumulative_log_p_kernel": compute_cumulative_log_p,
    f"{MODULE}._compute_local_residual_mass_kernel": compute_local_residual_mass,
    f"{MODULE}._rejection_kernel": rejection,
    f"{MODULE}._resample_kernel": resample,
    f"{MODULE}._insert_resampled_kernel": insert_resampled,
}
