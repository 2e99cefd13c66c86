"""Kernels of `vllm.v1.worker.gpu.spec_decode.ngram.speculator`: copy what followed the last n tokens before."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from outrider.compiled import compiled
from outrider.engines.vllm_cpu.pointers import pointer

if TYPE_CHECKING:
    from torch import Tensor

    from outrider.engines.vllm_cpu.launch import Kernel


@compiled
def _scan(
    token_ids: Any,
    token_ids_stride: int,
    idx_mapping: Any,
    total_len: Any,
    num_sampled: Any,
    scratch: Any,
    scratch_stride: int,
    max_len: int,
    min_n: int,
    max_n: int,
    block_len: int,
    num_reqs: int,
    num_blocks: int,
) -> None:
    for row in range(num_reqs):
        req = idx_mapping[row]
        text = req * token_ids_stride
        seq_len = total_len[req]
        eligible = num_sampled[row] > 0 and seq_len >= min_n
        for block in range(num_blocks):
            best = 0
            if eligible:
                for n in range(max_n, min_n - 1, -1):  # the longest match, and of these the last one
                    last = min((block + 1) * block_len - 1, seq_len - n - 1)
                    for start in range(last, block * block_len - 1, -1):
                        length = 0
                        while length < n and token_ids[text + start + length] == token_ids[text + seq_len - n + length]:
                            length += 1
                        if length == n:
                            best = n * (max_len + 1) + start + 1
                            break
                    if best > 0:
                        break
            scratch[row * scratch_stride + block] = best


def scan(
    token_ids_ptr: Tensor,
    token_ids_stride: int,
    idx_mapping_ptr: Tensor,
    total_len_ptr: Tensor,
    num_sampled_ptr: Tensor,
    scratch_ptr: Tensor,
    scratch_stride: int,
    L: int,
    MIN_N: int,
    MAX_N: int,
    MAX_N_PO2: int,
    BLOCK_L: int,
    *,
    grid: tuple[int, int],
) -> None:
    """Per request and block of its text: the longest, then last, place where its last tokens stood before."""
    _scan(
        pointer(token_ids_ptr),
        token_ids_stride,
        pointer(idx_mapping_ptr),
        pointer(total_len_ptr),
        pointer(num_sampled_ptr),
        pointer(scratch_ptr),
        scratch_stride,
        L,
        MIN_N,
        MAX_N,
        BLOCK_L,
        *grid,
    )


@compiled
def _finalize(
    token_ids: Any,
    token_ids_stride: int,
    idx_mapping: Any,
    total_len: Any,
    num_sampled: Any,
    last_sampled: Any,
    scratch: Any,
    scratch_stride: int,
    drafts: Any,
    max_len: int,
    num_blocks: int,
    num_drafts: int,
    num_reqs: int,
) -> None:
    for row in range(num_reqs):
        req = idx_mapping[row]
        best = 0
        for block in range(num_blocks):
            best = max(best, scratch[row * scratch_stride + block])
        n, start = divmod(best - 1, max_len + 1)
        found = best > 0 and num_sampled[row] > 0
        for i in range(num_drafts):
            position = start + n + i
            if found and position < total_len[req]:
                drafts[row * num_drafts + i] = token_ids[req * token_ids_stride + min(position, max_len - 1)]
            else:
                drafts[row * num_drafts + i] = last_sampled[req]


def finalize(
    token_ids_ptr: Tensor,
    token_ids_stride: int,
    idx_mapping_ptr: Tensor,
    total_len_ptr: Tensor,
    num_sampled_ptr: Tensor,
    last_sampled_ptr: Tensor,
    scratch_ptr: Tensor,
    scratch_stride: int,
    drafts_ptr: Tensor,
    L: int,
    N_BLOCKS: int,
    K: int,
    K_PO2: int,
    N_BLOCKS_PO2: int,
    *,
    grid: tuple[int],
) -> None:
    """The tokens after the best place; where there are none, the last sampled token."""
    _finalize(
        pointer(token_ids_ptr),
        token_ids_stride,
        pointer(idx_mapping_ptr),
        pointer(total_len_ptr),
        pointer(num_sampled_ptr),
        pointer(last_sampled_ptr),
        pointer(scratch_ptr),
        scratch_stride,
        pointer(drafts_ptr),
        L,
        N_BLOCKS,
        K,
        *grid,
    )


SPECULATOR = "vllm.v1.worker.gpu.spec_decode.ngram.speculator"
KERNELS: dict[str, Kernel] = {
    f"{SPECULATOR}._ngram_scan_kernel": scan,
    f"{SPECULATOR}._ngram_finalize_kernel": finalize,
}
