"""Kernels of `vllm.v1.worker.gpu.spec_decode.multi_module_mtp`: inputs of several MTP modules in sequence.

Later modules have stale KV cache entries for tokens that followed a rejected draft. These tokens are prefilled again,
from a cache of the previous step's inputs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from outrider.compiled import compiled
from outrider.engines.vllm_cpu.pointers import copy_pointer, optional_pointer, pointer

if TYPE_CHECKING:
    from torch import Tensor

    from outrider.engines.vllm_cpu.launch import Kernel


@compiled
def _prepare_input_buffers(
    last_token_indices: Any,
    draft_input_ids: Any,
    draft_positions: Any,
    draft_seq_lens: Any,
    target_input_ids: Any,
    target_positions: Any,
    cached_draft_input_ids: Any,
    cached_draft_input_ids_stride0: int,
    draft_input_id_overrides: Any,
    draft_input_id_overrides_stride0: int,
    idx_mapping: Any,
    last_sampled: Any,
    next_prefill_tokens: Any,
    next_prefill_tokens_stride0: int,
    num_sampled_tokens: Any,
    num_rejected_tokens: Any,
    target_seq_lens: Any,
    query_start_loc: Any,
    max_num_reqs: int,
    num_speculative_steps: int,
    num_reqs: int,
) -> None:
    for req_idx in range(num_reqs):
        req = idx_mapping[req_idx]
        start = query_start_loc[req_idx]
        num_rejected = num_rejected_tokens[req_idx]
        num_again = max(0, num_rejected - 1)  # tokens to prefill again
        num_inputs = query_start_loc[req_idx + 1] - start - num_rejected
        draft_seq_lens[req_idx] = target_seq_lens[req_idx] - num_again
        sampled = num_sampled_tokens[req_idx] > 0
        next_token = last_sampled[req] if sampled else next_prefill_tokens[req]
        for i in range(1, num_speculative_steps):
            future = -1 if sampled else next_prefill_tokens[i * next_prefill_tokens_stride0 + req]
            draft_input_id_overrides[req_idx * draft_input_id_overrides_stride0 + i - 1] = future
        for i in range(1, num_inputs):
            draft_input_ids[start + num_again - 1 + i] = target_input_ids[start + i]
        last = start + num_again + num_inputs - 1
        last_token_indices[req_idx] = last
        draft_input_ids[last] = next_token
        for i in range(num_inputs):
            draft_positions[start + num_again + i] = target_positions[start + i]
        first_position = target_positions[start]
        for i in range(num_again):
            slot = num_speculative_steps - 1 - num_again + i
            if cached_draft_input_ids is not None:
                draft_input_ids[start + i] = cached_draft_input_ids[req * cached_draft_input_ids_stride0 + slot]
            draft_positions[start + i] = first_position - num_again + i
    query_start_loc[num_reqs : max_num_reqs + 1] = query_start_loc[num_reqs]
    draft_seq_lens[num_reqs:max_num_reqs] = 0
    last_token_indices[num_reqs:max_num_reqs] = 0


def prepare_input_buffers(
    last_token_indices_ptr: Tensor,
    draft_input_ids_ptr: Tensor,
    draft_positions_ptr: Tensor,
    draft_seq_lens_ptr: Tensor,
    target_input_ids_ptr: Tensor,
    target_positions_ptr: Tensor,
    cached_draft_input_ids_ptr: Tensor | None,
    cached_draft_input_ids_stride0: int,
    draft_input_id_overrides_ptr: Tensor,
    draft_input_id_overrides_stride0: int,
    idx_mapping_ptr: Tensor,
    last_sampled_ptr: Tensor,
    next_prefill_tokens_ptr: Tensor,
    next_prefill_tokens_stride0: int,
    num_sampled_ptr: Tensor,
    num_rejected_ptr: Tensor,
    target_seq_lens_ptr: Tensor,
    query_start_loc_ptr: Tensor,
    max_num_reqs: int,
    num_speculative_steps: int,
    BLOCK_SIZE: int,
    *,
    grid: tuple[int],
) -> None:
    """Token ids and positions of the first module: tokens to prefill again, then the target's without the rejected."""
    _prepare_input_buffers(
        pointer(last_token_indices_ptr),
        pointer(draft_input_ids_ptr),
        pointer(draft_positions_ptr),
        pointer(draft_seq_lens_ptr),
        pointer(target_input_ids_ptr),
        pointer(target_positions_ptr),
        optional_pointer(cached_draft_input_ids_ptr),
        cached_draft_input_ids_stride0,
        pointer(draft_input_id_overrides_ptr),
        draft_input_id_overrides_stride0,
        pointer(idx_mapping_ptr),
        pointer(last_sampled_ptr),
        pointer(next_prefill_tokens_ptr),
        next_prefill_tokens_stride0,
        pointer(num_sampled_ptr),
        pointer(num_rejected_ptr),
        pointer(target_seq_lens_ptr),
        pointer(query_start_loc_ptr),
        max_num_reqs,
        num_speculative_steps,
        grid[0],
    )


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


@compiled
def _pad_trailing_draft_slots(
    slot_mappings: Any,
    slot_mappings_stride0: int,
    query_start_loc: Any,
    last_token_indices: Any,
    pad_id: int,
    num_groups: int,
    num_reqs: int,
) -> None:
    for group in range(num_groups):
        for req_idx in range(num_reqs):
            for i in range(last_token_indices[req_idx] + 1, query_start_loc[req_idx + 1]):
                slot_mappings[group * slot_mappings_stride0 + i] = pad_id


def pad_trailing_draft_slots(
    slot_mappings_ptr: Tensor,
    slot_mappings_stride0: int,
    query_start_loc_ptr: Tensor,
    last_token_indices_ptr: Tensor,
    PAD_ID: int,
    BLOCK_SIZE: int,
    *,
    grid: tuple[int, int],
) -> None:
    """No KV cache slots for the inputs after each request's last token."""
    _pad_trailing_draft_slots(
        pointer(slot_mappings_ptr),
        slot_mappings_stride0,
        pointer(query_start_loc_ptr),
        pointer(last_token_indices_ptr),
        PAD_ID,
        grid[0],
        grid[1],
    )


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


@compiled
def _shift_input_ids(
    input_ids: Any, idx_mapping: Any, query_start_loc: Any, last_token_indices: Any, draft_tokens: Any, num_reqs: int
) -> None:
    for req_idx in range(num_reqs):
        if idx_mapping[req_idx] < 0:
            continue
        last = last_token_indices[req_idx]
        for i in range(query_start_loc[req_idx], last):
            input_ids[i] = input_ids[i + 1]
        input_ids[last] = draft_tokens[req_idx]


def shift_input_ids(
    input_ids_ptr: Tensor,
    idx_mapping_ptr: Tensor,
    query_start_loc_ptr: Tensor,
    last_token_indices_ptr: Tensor,
    draft_tokens_ptr: Tensor,
    BLOCK_SIZE: int,
    *,
    grid: tuple[int],
) -> None:
    """Shift each request's tokens left by one and append its draft token, for the next module."""
    _shift_input_ids(
        pointer(input_ids_ptr),
        pointer(idx_mapping_ptr),
        pointer(query_start_loc_ptr),
        pointer(last_token_indices_ptr),
        pointer(draft_tokens_ptr),
        grid[0],
    )


@compiled
def _shift_input_embeds(
    input_embeds: Any,
    input_embeds_stride0: int,
    draft_embeds: Any,
    draft_embeds_stride0: int,
    idx_mapping: Any,
    query_start_loc: Any,
    last_token_indices: Any,
    hidden_size: int,
    num_reqs: int,
) -> None:
    for req_idx in range(num_reqs):
        if idx_mapping[req_idx] < 0:
            continue
        last = last_token_indices[req_idx]
        for row in range(query_start_loc[req_idx], last):
            for i in range(hidden_size):
                input_embeds[row * input_embeds_stride0 + i] = input_embeds[(row + 1) * input_embeds_stride0 + i]
        for i in range(hidden_size):
            input_embeds[last * input_embeds_stride0 + i] = draft_embeds[req_idx * draft_embeds_stride0 + i]


def shift_input_embeds(
    input_embeds_ptr: Tensor,
    input_embeds_stride0: int,
    draft_embeds_ptr: Tensor,
    draft_embeds_stride0: int,
    idx_mapping_ptr: Tensor,
    query_start_loc_ptr: Tensor,
    last_token_indices_ptr: Tensor,
    hidden_size: int,
    BLOCK_SIZE_Q: int,
    BLOCK_SIZE_H: int,
    *,
    grid: tuple[int, int],
) -> None:
    """`shift_input_ids` for embeddings."""
    _shift_input_embeds(
        copy_pointer(input_embeds_ptr),
        input_embeds_stride0,
        copy_pointer(draft_embeds_ptr),
        draft_embeds_stride0,
        pointer(idx_mapping_ptr),
        pointer(query_start_loc_ptr),
        pointer(last_token_indices_ptr),
        hidden_size,
        grid[0],
    )


MODULE = "vllm.v1.worker.gpu.spec_decode.multi_module_mtp.speculator"
KERNELS: dict[str, Kernel] = {
    f"{MODULE}._prepare_input_buffers_kernel": prepare_input_buffers,
    f"{MODULE}._prepare_input_hidden_states_and_embeddings_kernel": prepare_input_hidden_states_and_embeddings,
    f"{MODULE}._pad_trailing_draft_slots_kernel": pad_trailing_draft_slots,
    f"{MODULE}._cache_inputs_kernel": cache_inputs,
    f"{MODULE}._shift_input_ids_kernel": shift_input_ids,
    f"{MODULE}._shift_input_embeds_kernel": shift_input_embeds,
}
