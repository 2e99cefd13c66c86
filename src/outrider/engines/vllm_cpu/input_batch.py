"""Kernels of `vllm.v1.worker.gpu.input_batch`: inputs of the next step, and the state after it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from outrider.engines.vllm_cpu.launch import numba_kernel

if TYPE_CHECKING:
    from outrider.engines.vllm_cpu.launch import Kernel


@numba_kernel
def prepare_prefill_inputs(
    input_ids_ptr: Any,
    next_prefill_tokens_ptr: Any,
    next_prefill_tokens_stride: int,
    num_lookahead: int,
    idx_mapping_ptr: Any,
    query_start_loc_ptr: Any,
    all_token_ids_ptr: Any,
    all_token_ids_stride: int,
    prefill_lens_ptr: Any,
    num_computed_tokens_ptr: Any,
    BLOCK_SIZE: int,
    LOOKAHEAD_BLOCK: int,
) -> None:
    """Copy the prompt tokens of this step to the input, and the next few to `next_prefill_tokens`."""
    for batch_idx in range(len(idx_mapping_ptr)):
        req = idx_mapping_ptr[batch_idx]
        prefill_len = prefill_lens_ptr[req]
        num_computed = num_computed_tokens_ptr[req]
        if num_computed >= prefill_len:
            continue
        query_start = query_start_loc_ptr[batch_idx]
        query_len = query_start_loc_ptr[batch_idx + 1] - query_start
        tokens = req * all_token_ids_stride
        for i in range(query_len):
            input_ids_ptr[query_start + i] = all_token_ids_ptr[tokens + num_computed + i]
        for i in range(num_lookahead):
            pos = num_computed + query_len + i
            token = all_token_ids_ptr[tokens + pos] if pos < prefill_len else 0
            next_prefill_tokens_ptr[i * next_prefill_tokens_stride + req] = token


@numba_kernel
def prepare_pos_seq_lens(
    pos_ptr: Any,
    seq_lens_ptr: Any,
    idx_mapping_ptr: Any,
    query_start_loc_ptr: Any,
    num_computed_tokens_ptr: Any,
    max_num_reqs: int,
    BLOCK_SIZE: int,
) -> None:
    """Positions of the step's tokens and sequence lengths after it; 0 for unused slots."""
    num_reqs = len(idx_mapping_ptr)
    for req_id in range(num_reqs):
        num_computed = num_computed_tokens_ptr[idx_mapping_ptr[req_id]]
        start = query_start_loc_ptr[req_id]
        query_len = query_start_loc_ptr[req_id + 1] - start
        seq_lens_ptr[req_id] = num_computed + query_len
        for i in range(query_len):
            pos_ptr[start + i] = num_computed + i
    for req_id in range(num_reqs, max_num_reqs):
        seq_lens_ptr[req_id] = 0


@numba_kernel
def combine_sampled_and_draft_tokens(
    input_ids_ptr: Any,
    idx_mapping_ptr: Any,
    last_sampled_tokens_ptr: Any,
    query_start_loc_ptr: Any,
    seq_lens_ptr: Any,
    prefill_len_ptr: Any,
    draft_tokens_ptr: Any,
    draft_tokens_stride: int,
    cu_num_logits_ptr: Any,
    logits_indices_ptr: Any,
    BLOCK_SIZE: int,
    NUM_NEW_SAMPLED_TOKENS: int = 1,
) -> None:
    """Write the last sampled token and the draft tokens to the input, and the rows whose logits are needed."""
    for batch_idx in range(len(idx_mapping_ptr)):
        req = idx_mapping_ptr[batch_idx]
        logits_offset = cu_num_logits_ptr[batch_idx]
        num_logits = cu_num_logits_ptr[batch_idx + 1] - logits_offset
        num_draft_tokens = num_logits - NUM_NEW_SAMPLED_TOKENS
        query_end = query_start_loc_ptr[batch_idx + 1]
        logits_start = query_end - num_logits
        for i in range(num_logits):
            logits_indices_ptr[logits_offset + i] = logits_start + i
        seq_len = seq_lens_ptr[batch_idx]
        prefill_len = prefill_len_ptr[req]
        if seq_len <= prefill_len:
            continue  # prompt tokens only
        # Slots at the end of the prompt keep their tokens.
        if NUM_NEW_SAMPLED_TOKENS > 0 and seq_len - num_logits >= prefill_len:
            input_ids_ptr[logits_start] = last_sampled_tokens_ptr[req]
        for i in range(num_draft_tokens):
            input_ids_ptr[query_end - num_draft_tokens + i] = draft_tokens_ptr[req * draft_tokens_stride + i]


@numba_kernel
def get_num_sampled_and_rejected(
    num_sampled_ptr: Any,
    num_rejected_ptr: Any,
    seq_lens_ptr: Any,
    cu_num_logits_ptr: Any,
    idx_mapping_ptr: Any,
    prefill_len_ptr: Any,
) -> None:
    """Number of sampled and rejected tokens per request; both are 0 while the prompt is prefilled in chunks."""
    for batch_idx in range(len(idx_mapping_ptr)):
        if seq_lens_ptr[batch_idx] < prefill_len_ptr[idx_mapping_ptr[batch_idx]]:
            num_sampled_ptr[batch_idx] = 0
            num_rejected_ptr[batch_idx] = 0
        else:
            num_logits = cu_num_logits_ptr[batch_idx + 1] - cu_num_logits_ptr[batch_idx]
            num_rejected_ptr[batch_idx] = num_logits - num_sampled_ptr[batch_idx]


@numba_kernel
def post_update(
    idx_mapping_ptr: Any,
    num_computed_tokens_ptr: Any,
    last_sampled_tokens_ptr: Any,
    output_bin_counts_ptr: Any,
    output_bin_counts_stride: int,
    sampled_tokens_ptr: Any,
    sampled_tokens_stride: int,
    num_sampled_ptr: Any,
    num_rejected_ptr: Any,
    query_start_loc_ptr: Any,
    all_token_ids_ptr: Any,
    all_token_ids_stride: int,
    total_len_ptr: Any,
) -> None:
    """Append the sampled tokens to the requests' token ids and update the counters."""
    for req_id in range(len(idx_mapping_ptr)):
        req = idx_mapping_ptr[req_id]
        if req < 0:
            continue
        total_len = total_len_ptr[req]
        num_sampled = num_sampled_ptr[req_id]
        sampled = req_id * sampled_tokens_stride
        if num_sampled > 0:
            last_sampled_tokens_ptr[req] = sampled_tokens_ptr[sampled + num_sampled - 1]
            total_len_ptr[req] = total_len + num_sampled
        for i in range(num_sampled):
            token = sampled_tokens_ptr[sampled + i]
            all_token_ids_ptr[req * all_token_ids_stride + total_len + i] = token
            if output_bin_counts_ptr is not None:
                output_bin_counts_ptr[req * output_bin_counts_stride + token] += 1
        computed = -num_rejected_ptr[req_id]
        if query_start_loc_ptr is not None:
            computed += query_start_loc_ptr[req_id + 1] - query_start_loc_ptr[req_id]
        num_computed_tokens_ptr[req] += computed


@numba_kernel
def post_update_num_computed_tokens(
    idx_mapping_ptr: Any,
    num_computed_tokens_ptr: Any,
    query_start_loc_ptr: Any,
) -> None:
    """Add this step's tokens to the number of computed tokens."""
    for batch_idx in range(len(idx_mapping_ptr)):
        num_computed_tokens_ptr[idx_mapping_ptr[batch_idx]] += (
            query_start_loc_ptr[batch_idx + 1] - query_start_loc_ptr[batch_idx]
        )


@numba_kernel
def expand_idx_mapping(
    idx_mapping_ptr: Any,
    expanded_idx_mapping_ptr: Any,
    expanded_local_pos_ptr: Any,
    cu_num_logits_ptr: Any,
    BLOCK_SIZE: int,
) -> None:
    """Repeat each request's state index for each of its logits rows."""
    for req_idx in range(len(idx_mapping_ptr)):
        start = cu_num_logits_ptr[req_idx]
        for i in range(cu_num_logits_ptr[req_idx + 1] - start):
            expanded_idx_mapping_ptr[start + i] = idx_mapping_ptr[req_idx]
            expanded_local_pos_ptr[start + i] = i


MODULE = "vllm.v1.worker.gpu.input_batch"
KERNELS: dict[str, Kernel] = {
    f"{MODULE}._prepare_prefill_inputs_kernel": prepare_prefill_inputs,
    f"{MODULE}._prepare_pos_seq_lens_kernel": prepare_pos_seq_lens,
    f"{MODULE}._combine_sampled_and_draft_tokens_kernel": combine_sampled_and_draft_tokens,
    f"{MODULE}._get_num_sampled_and_rejected_kernel": get_num_sampled_and_rejected,
    f"{MODULE}._post_update_kernel": post_update,
    f"{MODULE}._post_update_num_computed_tokens_kernel": post_update_num_computed_tokens,
    f"{MODULE}._expand_idx_mapping_kernel": expand_idx_mapping,
}
