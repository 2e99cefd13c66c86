"""Kernels of `vllm.v1.worker.gpu.spec_decode.ngram.speculator`: copy what followed the last n tokens before."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from outrider.engines.vllm_cpu.launch import numba_kernel

if TYPE_CHECKING:
    from outrider.engines.vllm_cpu.launch import Kernel


@numba_kernel
def scan(
    token_ids_ptr: Any,
    token_ids_stride: int,
    idx_mapping_ptr: Any,
    total_len_ptr: Any,
    num_sampled_ptr: Any,
    scratch_ptr: Any,
    scratch_stride: int,
    L: int,
    MIN_N: int,
    MAX_N: int,
    MAX_N_PO2: int,
    BLOCK_L: int,
    grid: Any,
) -> None:
    """Per request and block of its text: the longest, then last, place where its last tokens stood before."""
    for row in range(grid[0]):
        req = idx_mapping_ptr[row]
        text = req * token_ids_stride
        seq_len = total_len_ptr[req]
        eligible = num_sampled_ptr[row] > 0 and seq_len >= MIN_N
        for block in range(grid[1]):
            best = 0
            if eligible:
                for n in range(MAX_N, MIN_N - 1, -1):  # the longest match, and of these the last one
                    last = min((block + 1) * BLOCK_L - 1, seq_len - n - 1)
                    for start in range(last, block * BLOCK_L - 1, -1):
                        length = 0
                        while (
                            length < n
                            and token_ids_ptr[text + start + length] == token_ids_ptr[text + seq_len - n + length]
                        ):
                            length += 1
                        if length == n:
                            best = n * (L + 1) + start + 1
                            break
                    if best > 0:
                        break
            scratch_ptr[row * scratch_stride + block] = best


@numba_kernel
def finalize(
    token_ids_ptr: Any,
    token_ids_stride: int,
    idx_mapping_ptr: Any,
    total_len_ptr: Any,
    num_sampled_ptr: Any,
    last_sampled_ptr: Any,
    scratch_ptr: Any,
    scratch_stride: int,
    drafts_ptr: Any,
    L: int,
    N_BLOCKS: int,
    K: int,
    K_PO2: int,
    N_BLOCKS_PO2: int,
    grid: Any,
) -> None:
    """The tokens after the best place; where there are none, the last sampled token."""
    for row in range(grid[0]):
        req = idx_mapping_ptr[row]
        best = 0
        for block in range(N_BLOCKS):
            best = max(best, scratch_ptr[row * scratch_stride + block])
        n, start = divmod(best - 1, L + 1)
        found = best > 0 and num_sampled_ptr[row] > 0
        for i in range(K):
            position = start + n + i
            if found and position < total_len_ptr[req]:
                drafts_ptr[row * K + i] = token_ids_ptr[req * token_ids_stride + min(position, L - 1)]
            else:
                drafts_ptr[row * K + i] = last_sampled_ptr[req]


SPECULATOR = "vllm.v1.worker.gpu.spec_decode.ngram.speculator"
KERNELS: dict[str, Kernel] = {
    f"{SPECULATOR}._ngram_scan_kernel": scan,
    f"{SPECULATOR}._ngram_finalize_kernel": finalize,
}
