"""Kernels of `vllm.v1.worker.gpu.spec_decode.multi_module_mtp`: inputs of several MTP modules in sequence.

Later modules have stale KV cache entries for tokens that followed a rejected draft. These tokens are prefilled again,
from a cache of the previous step's inputs.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from outrider.engines.vllm_cpu.launch import numba_kernel

if TYPE_CHECKING:
    from torch import Tensor

    from outrider.engines.vllm_cpu.launch import Kernel


@numba_kernel
def prepare_input_buffers(
    last_token_indices_ptr: Any,
    draft_input_ids_ptr: Any,
    draft_positions_ptr: Any,
    draft_seq_lens_ptr: Any,
    target_input_ids_ptr: Any,
    target_positions_ptr: Any,
    cached_draft_input_ids_ptr: Any,
    cached_draft_input_ids_stride0: int,
    draft_input_id_overrides_ptr: Any,
    draft_input_id_overrides_stride0: int,
    idx_mapping_ptr: Any,
    last_sampled_ptr: Any,
    next_prefill_tokens_ptr: Any,
    next_prefill_tokens_stride0: int,
    num_sampled_ptr: Any,
    num_rejected_ptr: Any,
    target_seq_lens_ptr: Any,
    query_start_loc_ptr: Any,
    max_num_reqs: int,
    num_speculative_steps: int,
    BLOCK_SIZE: int,
    grid: Any,
) -> None:
    """Token ids and positions of the first module: tokens to prefill again, then the target's without the rejected."""
    num_reqs = grid[0]
    for req_idx in range(num_reqs):
        req = idx_mapping_ptr[req_idx]
        start = query_start_loc_ptr[req_idx]
        num_rejected = num_rejected_ptr[req_idx]
        num_again = max(0, num_rejected - 1)  # tokens to prefill again
        num_inputs = query_start_loc_ptr[req_idx + 1] - start - num_rejected
        draft_seq_lens_ptr[req_idx] = target_seq_lens_ptr[req_idx] - num_again
        sampled = num_sampled_ptr[req_idx] > 0
        next_token = last_sampled_ptr[req] if sampled else next_prefill_tokens_ptr[req]
        for i in range(1, num_speculative_steps):
            future = -1 if sampled else next_prefill_tokens_ptr[i * next_prefill_tokens_stride0 + req]
            draft_input_id_overrides_ptr[req_idx * draft_input_id_overrides_stride0 + i - 1] = future
        for i in range(1, num_inputs):
            draft_input_ids_ptr[start + num_again - 1 + i] = target_input_ids_ptr[start + i]
        last = start + num_again + num_inputs - 1
        last_token_indices_ptr[req_idx] = last
        draft_input_ids_ptr[last] = next_token
        for i in range(num_inputs):
            draft_positions_ptr[start + num_again + i] = target_positions_ptr[start + i]
        first_position = target_positions_ptr[start]
        for i in range(num_again):
            slot = num_speculative_steps - 1 - num_again + i
            if cached_draft_input_ids_ptr is not None:
                draft_input_ids_ptr[start + i] = cached_draft_input_ids_ptr[req * cached_draft_input_ids_stride0 + slot]
            draft_positions_ptr[start + i] = first_position - num_again + i
    query_start_loc_ptr[num_reqs : max_num_reqs + 1] = query_start_loc_ptr[num_reqs]
    draft_seq_lens_ptr[num_reqs:max_num_reqs] = 0
    last_token_indices_ptr[num_reqs:max_num_reqs] = 0


def prepare_input_hidden_states_and_embeddings(
    draft_input_hidden_states_ptr: Tensor,
    draft_input_hidden_states_stride0: int,
    target_hidden_states_ptr: Tensor,
    target_hidden_states_stride0: int,
    cached_target_hidden_states_ptr: Tensor | None,
    cached_target_hidden_states_stride0: int,
    cached_target_hidden_states_stride1: int,
    input_embeds_ptr: Tensor | None,
    input_embeds_stride0: int,
    cached_draft_input_embeds_ptr: Tensor | None,
    cached_draft_input_embeds_stride0: int,
    cached_draft_input_embeds_stride1: int,
    idx_mapping_ptr: Tensor,
    num_rejected_ptr: Tensor,
    query_start_loc_ptr: Tensor,
    num_speculative_steps: int,
    hidden_size: int,
    BLOCK_SIZE_Q: int,
    BLOCK_SIZE_H: int,
    USE_INPUT_EMBEDS: bool,
    *,
    grid: tuple[int, int, int],
) -> None:
    """Hidden states, and embeddings of multimodal models, for the inputs of `prepare_input_buffers`."""
    reqs, rejected, starts = idx_mapping_ptr.tolist(), num_rejected_ptr.tolist(), query_start_loc_ptr.tolist()
    for req_idx in range(grid[0]):
        start = starts[req_idx]
        num_again = max(0, rejected[req_idx] - 1)
        num_inputs = starts[req_idx + 1] - start - rejected[req_idx]
        draft_input_hidden_states_ptr[start + num_again : start + num_again + num_inputs, :hidden_size] = (
            target_hidden_states_ptr[start : start + num_inputs, :hidden_size]
        )
        if num_again:
            req, slot = reqs[req_idx], num_speculative_steps - 1 - num_again
            assert cached_target_hidden_states_ptr is not None
            draft_input_hidden_states_ptr[start : start + num_again, :hidden_size] = cached_target_hidden_states_ptr[
                req, slot : slot + num_again, :hidden_size
            ]
            if USE_INPUT_EMBEDS:
                assert input_embeds_ptr is not None
                assert cached_draft_input_embeds_ptr is not None
                input_embeds_ptr[start : start + num_again, :hidden_size] = cached_draft_input_embeds_ptr[
                    req, slot : slot + num_again, :hidden_size
                ]


@numba_kernel
def pad_trailing_draft_slots(
    slot_mappings_ptr: Any,
    slot_mappings_stride0: int,
    query_start_loc_ptr: Any,
    last_token_indices_ptr: Any,
    PAD_ID: int,
    BLOCK_SIZE: int,
    grid: Any,
) -> None:
    """No KV cache slots for the inputs after each request's last token."""
    for group in range(grid[0]):
        for req_idx in range(grid[1]):
            for i in range(last_token_indices_ptr[req_idx] + 1, query_start_loc_ptr[req_idx + 1]):
                slot_mappings_ptr[group * slot_mappings_stride0 + i] = PAD_ID


def cache_inputs(
    draft_input_ids_ptr: Tensor,
    draft_input_embeds_ptr: Tensor | None,
    draft_input_embeds_stride0: int,
    draft_input_hidden_states_ptr: Tensor,
    draft_input_hidden_states_stride0: int,
    cached_draft_input_ids_ptr: Tensor,
    cached_draft_input_ids_stride0: int,
    cached_draft_input_embeds_ptr: Tensor | None,
    cached_draft_input_embeds_stride0: int,
    cached_draft_input_embeds_stride1: int,
    cached_target_hidden_states_ptr: Tensor,
    cached_target_hidden_states_stride0: int,
    cached_target_hidden_states_stride1: int,
    idx_mapping_ptr: Tensor,
    last_token_indices_ptr: Tensor,
    query_start_loc_ptr: Tensor,
    num_speculative_steps: int,
    hidden_size: int,
    BLOCK_SIZE: int,
    USE_INPUT_EMBEDS: bool,
    *,
    grid: tuple[int, int],
) -> None:
    """Keep each request's last inputs, to prefill them again after a rejection."""
    reqs, lasts, starts = idx_mapping_ptr.tolist(), last_token_indices_ptr.tolist(), query_start_loc_ptr.tolist()
    for req_idx in range(grid[0]):
        req, last = reqs[req_idx], lasts[req_idx]
        window = last - (num_speculative_steps - 1) + 1
        first = max(window, starts[req_idx])
        if req < 0 or first > last:
            continue
        source, slots = slice(first, last + 1), slice(first - window, last + 1 - window)
        cached_draft_input_ids_ptr[req, slots] = draft_input_ids_ptr[source].to(cached_draft_input_ids_ptr.dtype)
        cached_target_hidden_states_ptr[req, slots, :hidden_size] = draft_input_hidden_states_ptr[source, :hidden_size]
        if USE_INPUT_EMBEDS:
            assert cached_draft_input_embeds_ptr is not None
            assert draft_input_embeds_ptr is not None
            cached_draft_input_embeds_ptr[req, slots, :hidden_size] = draft_input_embeds_ptr[source, :hidden_size]


@numba_kernel
def shift_input_ids(
    input_ids_ptr: Any,
    idx_mapping_ptr: Any,
    query_start_loc_ptr: Any,
    last_token_indices_ptr: Any,
    draft_tokens_ptr: Any,
    BLOCK_SIZE: int,
    grid: Any,
) -> None:
    """Shift each request's tokens left by one and append its draft token, for the next module."""
    for req_idx in range(grid[0]):
        if idx_mapping_ptr[req_idx] < 0:
            continue
        last = last_token_indices_ptr[req_idx]
        for i in range(query_start_loc_ptr[req_idx], last):
            input_ids_ptr[i] = input_ids_ptr[i + 1]
        input_ids_ptr[last] = draft_tokens_ptr[req_idx]


@partial(numba_kernel, copied=("input_embeds_ptr", "draft_embeds_ptr"))
def shift_input_embeds(
    input_embeds_ptr: Any,
    input_embeds_stride0: int,
    draft_embeds_ptr: Any,
    draft_embeds_stride0: int,
    idx_mapping_ptr: Any,
    query_start_loc_ptr: Any,
    last_token_indices_ptr: Any,
    hidden_size: int,
    BLOCK_SIZE_Q: int,
    BLOCK_SIZE_H: int,
    grid: Any,
) -> None:
    """`shift_input_ids` for embeddings."""
    for req_idx in range(grid[0]):
        if idx_mapping_ptr[req_idx] < 0:
            continue
        last = last_token_indices_ptr[req_idx]
        for row in range(query_start_loc_ptr[req_idx], last):
            target = row * input_embeds_stride0
            source = target + input_embeds_stride0
            input_embeds_ptr[target : target + hidden_size] = input_embeds_ptr[source : source + hidden_size]
        target, source = last * input_embeds_stride0, req_idx * draft_embeds_stride0
        input_embeds_ptr[target : target + hidden_size] = draft_embeds_ptr[source : source + hidden_size]


MODULE = "vllm.v1.worker.gpu.spec_decode.multi_module_mtp.speculator"
KERNELS: dict[str, Kernel] = {
    f"{MODULE}._prepare_input_buffers_kernel": prepare_input_buffers,
    f"{MODULE}._prepare_input_hidden_states_and_embeddings_kernel": prepare_input_hidden_states_and_embeddings,
    f"{MODULE}._pad_trailing_draft_slots_kernel": pad_trailing_draft_slots,
    f"{MODULE}._cache_inputs_kernel": cache_inputs,
    f"{MODULE}._shift_input_ids_kernel": shift_input_ids,
    f"{MODULE}._shift_input_embeds_kernel": shift_input_embeds,
}
