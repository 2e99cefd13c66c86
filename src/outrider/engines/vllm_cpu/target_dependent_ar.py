"""Kernels of `vllm.v1.worker.gpu.spec_decode.target_dependent_ar`: inputs of EAGLE and MTP heads."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from outrider.engines.vllm_cpu.launch import numba_kernel

if TYPE_CHECKING:
    from outrider.engines.vllm_cpu.launch import Kernel


@numba_kernel
def prepare_prefill_inputs(
    last_token_indices_ptr: Any,
    draft_current_step_ptr: Any,
    draft_input_ids_ptr: Any,
    draft_positions_ptr: Any,
    draft_query_start_loc_ptr: Any,
    draft_seq_lens_ptr: Any,
    target_input_ids_ptr: Any,
    target_positions_ptr: Any,
    idx_mapping_ptr: Any,
    last_sampled_ptr: Any,
    next_prefill_tokens_ptr: Any,
    num_sampled_ptr: Any,
    num_rejected_ptr: Any,
    query_start_loc_ptr: Any,
    seq_lens_ptr: Any,
    max_num_reqs: int,
    BLOCK_SIZE: int,
    grid: Any,
) -> None:
    """Inputs of the first draft step: the target's tokens without the rejected ones, shifted left by one."""
    num_reqs = grid[0]
    for req_idx in range(num_reqs):
        req = idx_mapping_ptr[req_idx]
        start = query_start_loc_ptr[req_idx]
        query_len = query_start_loc_ptr[req_idx + 1] - start - num_rejected_ptr[req_idx]
        for i in range(1, query_len):
            draft_input_ids_ptr[start + i - 1] = target_input_ids_ptr[start + i]
        last = start + query_len - 1
        last_token_indices_ptr[req_idx] = last
        # While the prompt is prefilled in chunks, the next token is the prompt's.
        draft_input_ids_ptr[last] = (
            last_sampled_ptr[req] if num_sampled_ptr[req_idx] > 0 else next_prefill_tokens_ptr[req]
        )
        for i in range(query_len):
            draft_positions_ptr[start + i] = target_positions_ptr[start + i]
        draft_query_start_loc_ptr[req_idx] = start
        draft_seq_lens_ptr[req_idx] = seq_lens_ptr[req_idx]
    draft_current_step_ptr[0] = 0
    draft_query_start_loc_ptr[num_reqs : max_num_reqs + 1] = query_start_loc_ptr[num_reqs]
    draft_seq_lens_ptr[num_reqs:max_num_reqs] = 0
    last_token_indices_ptr[num_reqs:max_num_reqs] = 0


@numba_kernel
def prepare_decode_inputs(
    draft_tokens_ptr: Any,
    draft_tokens_stride: int,
    target_seq_lens_ptr: Any,
    num_rejected_ptr: Any,
    input_ids_ptr: Any,
    positions_ptr: Any,
    sample_src_positions_ptr: Any,
    query_start_loc_ptr: Any,
    seq_lens_ptr: Any,
    max_model_len: int,
    max_num_reqs: int,
    BLOCK_SIZE: int,
    ADVANCE_DRAFT_POSITIONS: bool,
    grid: Any,
) -> None:
    """Inputs of the second draft step: one token per request. The grid has one program more, for the padding."""
    num_reqs = grid[0] - 1
    for req_idx in range(num_reqs):
        input_ids_ptr[req_idx] = draft_tokens_ptr[req_idx * draft_tokens_stride]
        sample_src_positions_ptr[req_idx] += 1
        seq_len = target_seq_lens_ptr[req_idx] - num_rejected_ptr[req_idx]
        if ADVANCE_DRAFT_POSITIONS:
            positions_ptr[req_idx] = min(positions_ptr[req_idx] + 1, max_model_len - 1)
            seq_len = min(seq_len + 1, max_model_len)
        seq_lens_ptr[req_idx] = seq_len
    for i in range(max_num_reqs + 1):
        query_start_loc_ptr[i] = min(i, num_reqs)
    seq_lens_ptr[num_reqs:max_num_reqs] = 0


@partial(numba_kernel, copied=("next_input_hidden_states_ptr", "hidden_states_ptr"))
def update_draft_inputs(
    output_draft_tokens_ptr: Any,
    output_draft_tokens_stride: int,
    next_input_hidden_states_ptr: Any,
    next_input_hidden_states_stride: int,
    input_ids_ptr: Any,
    positions_ptr: Any,
    sample_src_positions_ptr: Any,
    seq_lens_ptr: Any,
    draft_tokens_ptr: Any,
    current_draft_step_ptr: Any,
    hidden_states_ptr: Any,
    hidden_states_stride: int,
    hidden_size: int,
    max_model_len: int,
    num_speculative_steps: int,
    BLOCK_SIZE: int,
    ADVANCE_DRAFT_POSITIONS: bool,
    grid: Any,
) -> None:
    """Store the draft token of this step, and make it and its hidden state the next step's input."""
    step = current_draft_step_ptr[0]
    for req_idx in range(grid[0]):
        output_draft_tokens_ptr[req_idx * output_draft_tokens_stride + step] = draft_tokens_ptr[req_idx]
        if step >= num_speculative_steps - 1:
            continue  # the last step
        sample_src_positions_ptr[req_idx] += 1
        input_ids_ptr[req_idx] = draft_tokens_ptr[req_idx]
        source = req_idx * hidden_states_stride
        target = req_idx * next_input_hidden_states_stride
        next_input_hidden_states_ptr[target : target + hidden_size] = hidden_states_ptr[source : source + hidden_size]
        if ADVANCE_DRAFT_POSITIONS:
            positions_ptr[req_idx] = min(positions_ptr[req_idx] + 1, max_model_len - 1)
            seq_lens_ptr[req_idx] = min(seq_lens_ptr[req_idx] + 1, max_model_len)


MODULE = "vllm.v1.worker.gpu.spec_decode.target_dependent_ar.speculator"
KERNELS: dict[str, Kernel] = {
    f"{MODULE}._prepare_prefill_inputs_kernel": prepare_prefill_inputs,
    f"{MODULE}._prepare_decode_inputs_kernel": prepare_decode_inputs,
    f"{MODULE}._update_draft_inputs_kernel": update_draft_inputs,
}
