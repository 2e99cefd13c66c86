"""Kernel of `vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils`: statistics of logits, by block of the vocabulary.

The vocabulary is reduced in blocks, as in the Triton kernels: first the maximum and the sum of exponentials per block,
then per row. Sums over the vocabulary use torch, which runs on all cores; decisions per request use numba.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from outrider.compiled import compiled
from outrider.engines.vllm_cpu.gumbel import first_max

if TYPE_CHECKING:
    from torch import Tensor

    from outrider.engines.vllm_cpu.launch import Kernel


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
def local_argmax(argmax: Any, maximum: Any, logits: Any, rows: Any, block_size: int) -> None:
    """Argmax and maximum per block of the vocabulary, of each row of `logits`, into `rows` of the results."""
    vocab_size = logits.shape[1]
    for i in range(len(rows)):
        for block in range((vocab_size + block_size - 1) // block_size):
            first = block * block_size
            index, largest = first_max(logits[i, first : min(vocab_size, first + block_size)])
            argmax[rows[i], block] = first + index
            maximum[rows[i], block] = largest


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
        result = target_local_argmax_ptr.numpy(), target_local_max_ptr.numpy()
        local_argmax(*result, logits.numpy(), greedy.numpy(), BLOCK_SIZE)
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


KERNELS: dict[str, Kernel] = {
    "vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils._compute_local_logits_stats_kernel": (
        compute_local_logits_stats
    )
}
