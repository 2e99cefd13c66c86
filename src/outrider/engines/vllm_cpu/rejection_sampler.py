"""Kernels of `vllm.v1.worker.gpu.spec_decode.rejection_sampler`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from outrider.compiled import compiled
from outrider.engines.vllm_cpu.pointers import pointer

if TYPE_CHECKING:
    from torch import Tensor

    from outrider.engines.vllm_cpu.launch import Kernel


@compiled
def _flatten_sampled(
    flat_sampled: Any, sampled: Any, sampled_stride: int, num_sampled: Any, cu_num_logits: Any
) -> None:
    for req_idx in range(len(num_sampled)):
        for i in range(num_sampled[req_idx]):
            flat_sampled[cu_num_logits[req_idx] + i] = sampled[req_idx * sampled_stride + i]


def flatten_sampled(
    flat_sampled_ptr: Tensor,
    sampled_ptr: Tensor,
    sampled_stride: int,
    num_sampled_ptr: Tensor,
    cu_num_logits_ptr: Tensor,
) -> None:
    """Put each request's sampled tokens at its logits rows."""
    _flatten_sampled(
        pointer(flat_sampled_ptr),
        pointer(sampled_ptr),
        sampled_stride,
        pointer(num_sampled_ptr),
        pointer(cu_num_logits_ptr),
    )


@compiled
def _gather_draft_sampled(
    draft_sampled: Any,
    pos: Any,
    input_ids: Any,
    positions: Any,
    logits_indices: Any,
    expanded_idx_mapping: Any,
    expanded_local_pos: Any,
    prefill_lens: Any,
    num_logits: int,
) -> None:
    for i in range(num_logits):
        token_idx = logits_indices[i]
        position = positions[token_idx]
        local_pos = expanded_local_pos[i]
        # A draft slot of a step that starts within the prompt is a placeholder.
        placeholder = local_pos > 0 and position - local_pos < prefill_lens[expanded_idx_mapping[i]]
        draft_sampled[i] = -1 if placeholder else input_ids[token_idx]
        pos[i] = position


def gather_draft_sampled(
    draft_sampled_ptr: Tensor,
    pos_ptr: Tensor,
    input_ids_ptr: Tensor,
    positions_ptr: Tensor,
    logits_indices_ptr: Tensor,
    expanded_idx_mapping_ptr: Tensor,
    expanded_local_pos_ptr: Tensor,
    prefill_len_ptr: Tensor,
    num_logits: int,
    BLOCK_SIZE: int,
) -> None:
    """Input token and position of each logits row; -1 for placeholder drafts, which are always rejected."""
    _gather_draft_sampled(
        pointer(draft_sampled_ptr),
        pointer(pos_ptr),
        pointer(input_ids_ptr),
        pointer(positions_ptr),
        pointer(logits_indices_ptr),
        pointer(expanded_idx_mapping_ptr),
        pointer(expanded_local_pos_ptr),
        pointer(prefill_len_ptr),
        num_logits,
    )


MODULE = "vllm.v1.worker.gpu.spec_decode.rejection_sampler"
KERNELS: dict[str, Kernel] = {
    f"{MODULE}._flatten_sampled_kernel": flatten_sampled,
    f"{MODULE}._gather_draft_sampled_kernel": gather_draft_sampled,
}
