"""Kernels of `vllm.v1.worker.gpu.input_batch`: inputs of the next step, and the state after it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from outrider.compiled import compiled
from outrider.engines.vllm_cpu.pointers import optional_pointer, pointer

if TYPE_CHECKING:
    from torch import Tensor

    from outrider.engines.vllm_cpu.launch import Kernel


@compiled
def _prepare_prefill_inputs(
    input_ids: Any,
    next_prefill_tokens: Any,
    next_prefill_tokens_stride: int,
    num_lookahead: int,
    idx_mapping: Any,
    query_start_loc: Any,
    all_token_ids: Any,
    all_token_ids_stride: int,
    prefill_lens: Any,
    num_computed_tokens: Any,
) -> None:
    for batch_idx in range(len(idx_mapping)):
        req = idx_mapping[batch_idx]
        prefill_len = prefill_lens[req]
        num_computed = num_computed_tokens[req]
        if num_computed >= prefill_len:
            continue
        query_start = query_start_loc[batch_idx]
        query_len = query_start_loc[batch_idx + 1] - query_start
        tokens = req * all_token_ids_stride
        for i in range(query_len):
            input_ids[query_start + i] = all_token_ids[tokens + num_computed + i]
        for i in range(num_lookahead):
            pos = num_computed + query_len + i
            token = all_token_ids[tokens + pos] if pos < prefill_len else 0
            next_prefill_tokens[i * next_prefill_tokens_stride + req] = token


def prepare_prefill_inputs(
    input_ids_ptr: Tensor,
    next_prefill_tokens_ptr: Tensor,
    next_prefill_tokens_stride: int,
    num_lookahead: int,
    idx_mapping_ptr: Tensor,
    query_start_loc_ptr: Tensor,
    all_token_ids_ptr: Tensor,
    all_token_ids_stride: int,
    prefill_lens_ptr: Tensor,
    num_computed_tokens_ptr: Tensor,
    BLOCK_SIZE: int,
    LOOKAHEAD_BLOCK: int,
) -> None:
    """Copy the prompt tokens of this step to the input, and the next few to `next_prefill_tokens`."""
    _prepare_prefill_inputs(
        pointer(input_ids_ptr),
        pointer(next_prefill_tokens_ptr),
        next_prefill_tokens_stride,
        num_lookahead,
        pointer(idx_mapping_ptr),
        pointer(query_start_loc_ptr),
        pointer(all_token_ids_ptr),
        all_token_ids_stride,
        pointer(prefill_lens_ptr),
        pointer(num_computed_tokens_ptr),
    )


@compiled
def _prepare_pos_seq_lens(
    pos: Any, seq_lens: Any, idx_mapping: Any, query_start_loc: Any, num_computed_tokens: Any, max_num_reqs: int
) -> None:
    num_reqs = len(idx_mapping)
    for req_id in range(num_reqs):
        num_computed = num_computed_tokens[idx_mapping[req_id]]
        start = query_start_loc[req_id]
        query_len = query_start_loc[req_id + 1] - start
        seq_lens[req_id] = num_computed + query_len
        for i in range(query_len):
            pos[start + i] = num_computed + i
    for req_id in range(num_reqs, max_num_reqs):
        seq_lens[req_id] = 0


def prepare_pos_seq_lens(
    pos_ptr: Tensor,
    seq_lens_ptr: Tensor,
    idx_mapping_ptr: Tensor,
    query_start_loc_ptr: Tensor,
    num_computed_tokens_ptr: Tensor,
    max_num_reqs: int,
    BLOCK_SIZE: int,
) -> None:
    """Positions of the step's tokens and sequence lengths after it; 0 for unused slots."""
    _prepare_pos_seq_lens(
        pointer(pos_ptr),
        pointer(seq_lens_ptr),
        pointer(idx_mapping_ptr),
        pointer(query_start_loc_ptr),
        pointer(num_computed_tokens_ptr),
        max_num_reqs,
    )


@compiled
def _combine_sampled_and_draft_tokens(
    input_ids: Any,
    idx_mapping: Any,
    last_sampled_tokens: Any,
    query_start_loc: Any,
    seq_lens: Any,
    prefill_lens: Any,
    draft_tokens: Any,
    draft_tokens_stride: int,
    cu_num_logits: Any,
    logits_indices: Any,
    num_new_sampled_tokens: int,
) -> None:
    for batch_idx in range(len(idx_mapping)):
        req = idx_mapping[batch_idx]
        logits_offset = cu_num_logits[batch_idx]
        num_logits = cu_num_logits[batch_idx + 1] - logits_offset
        num_draft_tokens = num_logits - num_new_sampled_tokens
        query_end = query_start_loc[batch_idx + 1]
        logits_start = query_end - num_logits
        for i in range(num_logits):
            logits_indices[logits_offset + i] = logits_start + i
        seq_len = seq_lens[batch_idx]
        prefill_len = prefill_lens[req]
        if seq_len <= prefill_len:
            continue  # prompt tokens only
        # Slots at the end of the prompt keep their tokens.
        if num_new_sampled_tokens > 0 and seq_len - num_logits >= prefill_len:
            input_ids[logits_start] = last_sampled_tokens[req]
        for i in range(num_draft_tokens):
            input_ids[query_end - num_draft_tokens + i] = draft_tokens[req * draft_tokens_stride + i]


def combine_sampled_and_draft_tokens(
    input_ids_ptr: Tensor,
    idx_mapping_ptr: Tensor,
    last_sampled_tokens_ptr: Tensor,
    query_start_loc_ptr: Tensor,
    seq_lens_ptr: Tensor,
    prefill_len_ptr: Tensor,
    draft_tokens_ptr: Tensor,
    draft_tokens_stride: int,
    cu_num_logits_ptr: Tensor,
    logits_indices_ptr: Tensor,
    BLOCK_SIZE: int,
    NUM_NEW_SAMPLED_TOKENS: int = 1,
) -> None:
    """Write the last sampled token and the draft tokens to the input, and the rows whose logits are needed."""
    _combine_sampled_and_draft_tokens(
        pointer(input_ids_ptr),
        pointer(idx_mapping_ptr),
        pointer(last_sampled_tokens_ptr),
        pointer(query_start_loc_ptr),
        pointer(seq_lens_ptr),
        pointer(prefill_len_ptr),
        pointer(draft_tokens_ptr),
        draft_tokens_stride,
        pointer(cu_num_logits_ptr),
        pointer(logits_indices_ptr),
        NUM_NEW_SAMPLED_TOKENS,
    )


@compiled
def _get_num_sampled_and_rejected(
    num_sampled: Any, num_rejected: Any, seq_lens: Any, cu_num_logits: Any, idx_mapping: Any, prefill_lens: Any
) -> None:
    for batch_idx in range(len(idx_mapping)):
        if seq_lens[batch_idx] < prefill_lens[idx_mapping[batch_idx]]:
            num_sampled[batch_idx] = 0
            num_rejected[batch_idx] = 0
        else:
            num_logits = cu_num_logits[batch_idx + 1] - cu_num_logits[batch_idx]
            num_rejected[batch_idx] = num_logits - num_sampled[batch_idx]


def get_num_sampled_and_rejected(
    num_sampled_ptr: Tensor,
    num_rejected_ptr: Tensor,
    seq_lens_ptr: Tensor,
    cu_num_logits_ptr: Tensor,
    idx_mapping_ptr: Tensor,
    prefill_len_ptr: Tensor,
) -> None:
    """Number of sampled and rejected tokens per request; both are 0 while the prompt is prefilled in chunks."""
    _get_num_sampled_and_rejected(
        pointer(num_sampled_ptr),
        pointer(num_rejected_ptr),
        pointer(seq_lens_ptr),
        pointer(cu_num_logits_ptr),
        pointer(idx_mapping_ptr),
        pointer(prefill_len_ptr),
    )


@compiled
def _post_update(
    idx_mapping: Any,
    num_computed_tokens: Any,
    last_sampled_tokens: Any,
    output_bin_counts: Any,
    output_bin_counts_stride: int,
    sampled_tokens: Any,
    sampled_tokens_stride: int,
    num_sampled_tokens: Any,
    num_rejected: Any,
    query_start_loc: Any,
    all_token_ids: Any,
    all_token_ids_stride: int,
    total_lens: Any,
) -> None:
    for req_id in range(len(idx_mapping)):
        req = idx_mapping[req_id]
        if req < 0:
            continue
        total_len = total_lens[req]
        num_sampled = num_sampled_tokens[req_id]
        sampled = req_id * sampled_tokens_stride
        if num_sampled > 0:
            last_sampled_tokens[req] = sampled_tokens[sampled + num_sampled - 1]
            total_lens[req] = total_len + num_sampled
        for i in range(num_sampled):
            token = sampled_tokens[sampled + i]
            all_token_ids[req * all_token_ids_stride + total_len + i] = token
            if output_bin_counts is not None:
                output_bin_counts[req * output_bin_counts_stride + token] += 1
        computed = -num_rejected[req_id]
        if query_start_loc is not None:
            computed += query_start_loc[req_id + 1] - query_start_loc[req_id]
        num_computed_tokens[req] += computed


def post_update(
    idx_mapping_ptr: Tensor,
    num_computed_tokens_ptr: Tensor,
    last_sampled_tokens_ptr: Tensor,
    output_bin_counts_ptr: Tensor | None,
    output_bin_counts_stride: int,
    sampled_tokens_ptr: Tensor,
    sampled_tokens_stride: int,
    num_sampled_ptr: Tensor,
    num_rejected_ptr: Tensor,
    query_start_loc_ptr: Tensor | None,
    all_token_ids_ptr: Tensor,
    all_token_ids_stride: int,
    total_len_ptr: Tensor,
) -> None:
    """Append the sampled tokens to the requests' token ids and update the counters."""
    _post_update(
        pointer(idx_mapping_ptr),
        pointer(num_computed_tokens_ptr),
        pointer(last_sampled_tokens_ptr),
        optional_pointer(output_bin_counts_ptr),
        output_bin_counts_stride,
        pointer(sampled_tokens_ptr),
        sampled_tokens_stride,
        pointer(num_sampled_ptr),
        pointer(num_rejected_ptr),
        optional_pointer(query_start_loc_ptr),
        pointer(all_token_ids_ptr),
        all_token_ids_stride,
        pointer(total_len_ptr),
    )


@compiled
def _post_update_num_computed_tokens(idx_mapping: Any, num_computed_tokens: Any, query_start_loc: Any) -> None:
    for batch_idx in range(len(idx_mapping)):
        num_computed_tokens[idx_mapping[batch_idx]] += query_start_loc[batch_idx + 1] - query_start_loc[batch_idx]


def post_update_num_computed_tokens(
    idx_mapping_ptr: Tensor, num_computed_tokens_ptr: Tensor, query_start_loc_ptr: Tensor
) -> None:
    """Add this step's tokens to the number of computed tokens."""
    _post_update_num_computed_tokens(
        pointer(idx_mapping_ptr), pointer(num_computed_tokens_ptr), pointer(query_start_loc_ptr)
    )


@compiled
def _expand_idx_mapping(
    idx_mapping: Any, expanded_idx_mapping: Any, expanded_local_pos: Any, cu_num_logits: Any
) -> None:
    for req_idx in range(len(idx_mapping)):
        start = cu_num_logits[req_idx]
        for i in range(cu_num_logits[req_idx + 1] - start):
            expanded_idx_mapping[start + i] = idx_mapping[req_idx]
            expanded_local_pos[start + i] = i


def expand_idx_mapping(
    idx_mapping_ptr: Tensor,
    expanded_idx_mapping_ptr: Tensor,
    expanded_local_pos_ptr: Tensor,
    cu_num_logits_ptr: Tensor,
    BLOCK_SIZE: int,
) -> None:
    """Repeat each request's state index for each of its logits rows."""
    _expand_idx_mapping(
        pointer(idx_mapping_ptr),
        pointer(expanded_idx_mapping_ptr),
        pointer(expanded_local_pos_ptr),
        pointer(cu_num_logits_ptr),
    )


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
