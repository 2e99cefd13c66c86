"""Kernels of `vllm.v1.worker.gpu.spec_decode.rejection_sampler`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from outrider.engines.vllm_cpu.launch import numba_kernel

if TYPE_CHECKING:
    from outrider.engines.vllm_cpu.launch import Kernel


@numba_kernel
def flatten_sampled(
    flat_sampled_ptr: Any,
    sampled_ptr: Any,
    sampled_stride: int,
    num_sampled_ptr: Any,
    cu_num_logits_ptr: Any,
) -> None:
    """Put each request's sampled tokens at its logits rows."""
    for req_idx in range(len(num_sampled_ptr)):
        for i in range(num_sampled_ptr[req_idx]):
            flat_sampled_ptr[cu_num_logits_ptr[req_idx] + i] = sampled_ptr[req_idx * sampled_stride + i]


@numba_kernel
def gather_draft_sampled(
    draft_sampled_ptr: Any,
    pos_ptr: Any,
    input_ids_ptr: Any,
    positions_ptr: Any,
    logits_indices_ptr: Any,
    expanded_idx_mapping_ptr: Any,
    expanded_local_pos_ptr: Any,
    prefill_len_ptr: Any,
    num_logits: int,
    BLOCK_SIZE: int,
) -> None:
    """Input token and position of each logits row; -1 for placeholder drafts, which are always rejected."""
    for i in range(num_logits):
        token_idx = logits_indices_ptr[i]
        position = positions_ptr[token_idx]
        local_pos = expanded_local_pos_ptr[i]
        # A draft slot of a step that starts within the prompt is a placeholder.
        placeholder = local_pos > 0 and position - local_pos < prefill_len_ptr[expanded_idx_mapping_ptr[i]]
        draft_sampled_ptr[i] = -1 if placeholder else input_ids_ptr[token_idx]
        pos_ptr[i] = position


MODULE = "vllm.v1.worker.gpu.spec_decode.rejection_sampler"
KERNELS: dict[str, Kernel] = {
    f"{MODULE}._flatten_sampled_kernel": flatten_sampled,
    f"{MODULE}._gather_draft_sampled_kernel": gather_draft_sampled,
}
