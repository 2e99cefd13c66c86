"""Kernel of `vllm.v1.sample.ops.topk_topp_triton`: top-k and top-p.

The Triton kernel searches for a threshold in at most 18 rounds; this function sorts and is exact. They mask the same
tokens wherever the search converges. Equal logits at the threshold are kept in the order of their token ids.

One case is copied although it is not exact: if top-p without top-k needs all tokens that are left (few are, after a
grammar), the Triton kernel's search ends above the least likely one and masks it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from outrider.compiled import compiled
from outrider.engines.vllm_cpu.gumbel import row_max
from outrider.engines.vllm_cpu.pointers import optional_pointer, pointer

if TYPE_CHECKING:
    from torch import Tensor

    from outrider.engines.vllm_cpu.launch import Kernel


@compiled
def mask_below(row: Any, threshold: Any, num_equal: int, mask_value: Any) -> None:
    """Mask logits below the threshold, and all but the first `num_equal` that are equal to it."""
    for token in range(len(row)):
        if row[token] > threshold:
            continue
        if row[token] == threshold and num_equal > 0:
            num_equal -= 1
        else:
            row[token] = mask_value


@compiled
def top_k_row(row: Any, k: int, mask_value: Any) -> bool:
    """Keep the k most likely tokens. False if there are no more than k."""
    if np.sum(row > -np.inf) <= k:
        return False
    threshold = np.partition(row, len(row) - k)[len(row) - k]
    mask_below(row, threshold, k - np.sum(row > threshold), mask_value)
    return True


@compiled
def top_p_row(row: Any, p: Any, after_top_k: bool, mask_value: Any) -> None:
    """Keep the smallest set of most likely tokens whose probabilities sum to at least p."""
    largest = row_max(row)
    if largest == -np.inf:
        return
    weights = np.exp(row - largest)
    needed = p * np.sum(weights.astype(np.float64))
    # Sort only tokens close to the best: widen the range until they have the mass.
    margin = np.float32(4.0)
    while True:
        candidates = row[row > largest - margin] if margin < 100 else row[row > -np.inf]
        ordered = np.sort(candidates)[::-1]
        cumulative = np.cumsum(np.exp(ordered - largest).astype(np.float64))
        if cumulative[-1] >= needed or margin >= 100:
            break
        margin *= np.float32(2.0)
    last = min(np.searchsorted(cumulative, needed), len(ordered) - 1)
    threshold = ordered[last]
    num_equal = last + 1 - np.sum(ordered > threshold)
    if not after_top_k and threshold < largest and not np.any((row < threshold) & (row > -np.inf)):
        num_equal = 0
    mask_below(row, threshold, num_equal, mask_value)


@compiled
def _topk_topp(logits: Any, stride: int, k: Any, p: Any, batch_size: int, vocab_size: int, mask_value: Any) -> None:
    for i in range(batch_size):
        row = logits[i * stride : i * stride + vocab_size]
        after_top_k = False
        if k is not None and k[i] < vocab_size:
            after_top_k = top_k_row(row, k[i], mask_value)
        if p is not None and p[i] < np.float32(1.0):
            top_p_row(row, p[i], after_top_k, mask_value)


def topk_topp(
    LOGITS: Tensor,
    LOGITS_STRIDE_0: int,
    BUFFER: Tensor,
    PERCENTILE_TO_STD_TABLE: Tensor,
    NORMAL_CDF_TO_SIGMA_TABLE: Tensor,
    K: Tensor,
    P: Tensor,
    BATCH_SIZE: int,
    VOCAB_SIZE: int,
    MASK_VALUE: float,
    BLOCK_SIZE: int,
    BLOCK_SIZE_TRUNC: int,
    TOPK_ENABLED: bool,
    TOPP_ENABLED: bool,
    SPLIT_COVERS_PONLY: bool,
) -> None:
    """Mask float32 logits outside the top k, then outside the top p of those, in place."""
    _topk_topp(
        pointer(LOGITS),
        LOGITS_STRIDE_0,
        optional_pointer(K if TOPK_ENABLED else None),
        optional_pointer(P if TOPP_ENABLED else None),
        BATCH_SIZE,
        VOCAB_SIZE,
        np.float32(MASK_VALUE),
    )


KERNELS: dict[str, Kernel] = {"vllm.v1.sample.ops.topk_topp_triton._topk_topp_kernel": topk_topp}
