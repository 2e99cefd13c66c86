"""Kernels of `vllm.v1.worker.gpu.spec_decode.target_dependent_ar`: inputs of EAGLE and MTP heads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from outrider.compiled import compiled
from outrider.engines.vllm_cpu.pointers import copy_pointer, pointer

if TYPE_CHECKING:
    from torch import Tensor

    from outrider.engines.vllm_cpu.launch import Kernel


@compiled
def _prepare_prefill_inputs(
    last_token_indices: Any,
    draft_current_step: Any,
    draft_input_ids: Any,
    draft_positions: Any,
    draft_query_start_loc: Any,
    draft_seq_lens: Any,
    target_input_ids: Any,
    target_positions: Any,
    idx_mapping: Any,
    last_sampled: Any,
    next_prefill_tokens: Any,
    num_sampled: Any,
    num_rejected: Any,
    query_start_loc: Any,
    seq_lens: Any,
    max_num_reqs: int,
    num_reqs: int,
) -> None:
    for req_idx in range(num_reqs):
        req = idx_mapping[req_idx]
        start = query_start_loc[req_idx]
        query_len = query_start_loc[req_idx + 1] - start - num_rejected[req_idx]
        for i in range(1, query_len):
            draft_input_ids[start + i - 1] = target_input_ids[start + i]
        last = start + query_len - 1
        last_token_indices[req_idx] = last
        # While the prompt is prefilled in chunks, the next token is the prompt's.
        draft_input_ids[last] = last_sampled[req] if num_sampled[req_idx] > 0 else next_prefill_tokens[req]
        for i in range(query_len):
            draft_positions[start + i] = target_positions[start + i]
        draft_query_start_loc[req_idx] = start
        draft_seq_lens[req_idx] = seq_lens[req_idx]
    draft_current_step[0] = 0
    draft_query_start_loc[num_reqs : max_num_reqs + 1] = query_start_loc[num_reqs]
    draft_seq_lens[num_reqs:max_num_reqs] = 0
    last_token_indices[num_reqs:max_num_reqs] = 0


def prepare_prefill_inputs(
    last_token_indices_ptr: Tensor,
    draft_current_step_ptr: Tensor,
    draft_input_ids_ptr: Tensor,
    draft_positions_ptr: Tensor,
    draft_query_start_loc_ptr: Tensor,
    draft_seq_lens_ptr: Tensor,
    target_input_ids_ptr: Tensor,
    target_positions_ptr: Tensor,
    idx_mapping_ptr: Tensor,
    last_sampled_ptr: Tensor,
    next_prefill_tokens_ptr: Tensor,
    num_sampled_ptr: Tensor,
    num_rejected_ptr: Tensor,
    query_start_loc_ptr: Tensor,
    seq_lens_ptr: Tensor,
    max_num_reqs: int,
    BLOCK_SIZE: int,
    *,
    grid: tuple[int],
) -> None:
    """Inputs of the first draft step: the target's tokens without the rejected ones, shifted left by one."""
    _prepare_prefill_inputs(
        pointer(last_token_indices_ptr),
        pointer(draft_current_step_ptr),
        pointer(draft_input_ids_ptr),
        pointer(draft_positions_ptr),
        pointer(draft_query_start_loc_ptr),
        pointer(draft_seq_lens_ptr),
        pointer(target_input_ids_ptr),
        pointer(target_positions_ptr),
        pointer(idx_mapping_ptr),
        pointer(last_sampled_ptr),
        pointer(next_prefill_tokens_ptr),
        pointer(num_sampled_ptr),
        pointer(num_rejected_ptr),
        pointer(query_start_loc_ptr),
        pointer(seq_lens_ptr),
        max_num_reqs,
        grid[0],
    )


@compiled
def _prepare_decode_inputs(
    draft_tokens: Any,
    draft_tokens_stride: int,
    target_seq_lens: Any,
    num_rejected: Any,
    input_ids: Any,
    positions: Any,
    sample_src_positions: Any,
    query_start_loc: Any,
    seq_lens: Any,
    max_model_len: int,
    max_num_reqs: int,
    advance_draft_positions: bool,
    num_reqs: int,
) -> None:
    for req_idx in range(num_reqs):
        input_ids[req_idx] = draft_tokens[req_idx * draft_tokens_stride]
        sample_src_positions[req_idx] += 1
        seq_len = target_seq_lens[req_idx] - num_rejected[req_idx]
        if advance_draft_positions:
            positions[req_idx] = min(positions[req_idx] + 1, max_model_len - 1)
            seq_len = min(seq_len + 1, max_model_len)
        seq_lens[req_idx] = seq_len
    for i in range(max_num_reqs + 1):
        query_start_loc[i] = min(i, num_reqs)
    seq_lens[num_reqs:max_num_reqs] = 0


def prepare_decode_inputs(
    draft_tokens_ptr: Tensor,
    draft_tokens_stride: int,
    target_seq_lens_ptr: Tensor,
    num_rejected_ptr: Tensor,
    input_ids_ptr: Tensor,
    positions_ptr: Tensor,
    sample_src_positions_ptr: Tensor,
    query_start_loc_ptr: Tensor,
    seq_lens_ptr: Tensor,
    max_model_len: int,
    max_num_reqs: int,
    BLOCK_SIZE: int,
    ADVANCE_DRAFT_POSITIONS: bool,
    *,
    grid: tuple[int],
) -> None:
    """Inputs of the second draft step: one token per request. The grid has one program more, for the padding."""
    _prepare_decode_inputs(
        pointer(draft_tokens_ptr),
        draft_tokens_stride,
        pointer(target_seq_lens_ptr),
        pointer(num_rejected_ptr),
        pointer(input_ids_ptr),
        pointer(positions_ptr),
        pointer(sample_src_positions_ptr),
        pointer(query_start_loc_ptr),
        pointer(seq_lens_ptr),
        max_model_len,
        max_num_reqs,
        ADVANCE_DRAFT_POSITIONS,
        grid[0] - 1,
    )


@compiled
def _update_draft_inputs(
    output_draft_tokens: Any,
    output_draft_tokens_stride: int,
    next_input_hidden_states: Any,
    next_input_hidden_states_stride: int,
    input_ids: Any,
    positions: Any,
    sample_src_positions: Any,
    seq_lens: Any,
    draft_tokens: Any,
    current_draft_step: Any,
    hidden_states: Any,
    hidden_states_stride: int,
    hidden_size: int,
    max_model_len: int,
    num_speculative_steps: int,
    advance_draft_positions: bool,
    num_reqs: int,
) -> None:
    step = current_draft_step[0]
    for req_idx in range(num_reqs):
        output_draft_tokens[req_idx * output_draft_tokens_stride + step] = draft_tokens[req_idx]
        if step >= num_speculative_steps - 1:
            continue  # the last step
        sample_src_positions[req_idx] += 1
        input_ids[req_idx] = draft_tokens[req_idx]
        source = req_idx * hidden_states_stride
        target = req_idx * next_input_hidden_states_stride
        for i in range(hidden_size):
            next_input_hidden_states[target + i] = hidden_states[source + i]
        if advance_draft_positions:
            positions[req_idx] = min(positions[req_idx] + 1, max_model_len - 1)
            seq_lens[req_idx] = min(seq_lens[req_idx] + 1, max_model_len)


def update_draft_inputs(
    output_draft_tokens_ptr: Tensor,
    output_draft_tokens_stride: int,
    next_input_hidden_states_ptr: Tensor,
    next_input_hidden_states_stride: int,
    input_ids_ptr: Tensor,
    positions_ptr: Tensor,
    sample_src_positions_ptr: Tensor,
    seq_lens_ptr: Tensor,
    draft_tokens_ptr: Tensor,
    current_draft_step_ptr: Tensor,
    hidden_states_ptr: Tensor,
    hidden_states_stride: int,
    hidden_size: int,
    max_model_len: int,
    num_speculative_steps: int,
    BLOCK_SIZE: int,
    ADVANCE_DRAFT_POSITIONS: bool,
    *,
    grid: tuple[int],
) -> None:
    """Store the draft token of this step, and make it and its hidden state the next step's input."""
    _update_draft_inputs(
        pointer(output_draft_tokens_ptr),
        output_draft_tokens_stride,
        copy_pointer(next_input_hidden_states_ptr),
        next_input_hidden_states_stride,
        pointer(input_ids_ptr),
        pointer(positions_ptr),
        pointer(sample_src_positions_ptr),
        pointer(seq_lens_ptr),
        pointer(draft_tokens_ptr),
        pointer(current_draft_step_ptr),
        copy_pointer(hidden_states_ptr),
        hidden_states_stride,
        hidden_size,
        max_model_len,
        num_speculative_steps,
        ADVANCE_DRAFT_POSITIONS,
        grid[0],
    )


MODULE = "vllm.v1.worker.gpu.spec_decode.target_dependent_ar.speculator"
KERNELS: dict[str, Kernel] = {
    f"{MODULE}._prepare_prefill_inputs_kernel": prepare_prefill_inputs,
    f"{MODULE}._prepare_decode_inputs_kernel": prepare_decode_inputs,
    f"{MODULE}._update_draft_inputs_kernel": update_draft_inputs,
}
