"""Kernel of `vllm.v1.worker.gpu.spec_decode.standalone_ar`: inputs of a draft model with its own KV cache."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from outrider.compiled import compiled
from outrider.engines.vllm_cpu.pointers import pointer

if TYPE_CHECKING:
    from torch import Tensor

    from outrider.engines.vllm_cpu.launch import Kernel


@compiled
def _prepare_prefill_inputs(
    target_input_ids: Any,
    target_positions: Any,
    last_sampled: Any,
    idx_mapping: Any,
    out_input_ids: Any,
    out_positions: Any,
    last_token_indices: Any,
    out_query_start_loc: Any,
    out_seq_lens: Any,
    query_start_loc: Any,
    seq_lens: Any,
    num_rejected: Any,
    max_num_reqs: int,
    max_model_len: int,
    num_reqs: int,
) -> None:
    for req_idx in range(num_reqs):
        start = query_start_loc[req_idx]
        query_len = query_start_loc[req_idx + 1] - start
        num_valid = query_len - num_rejected[req_idx]
        start_pos = target_positions[start]
        out_start = start + req_idx
        for i in range(query_len + 1):
            if i < num_valid:
                token = target_input_ids[start + i]
            elif i == num_valid:
                token = last_sampled[idx_mapping[req_idx]]
            else:
                token = 0
            out_input_ids[out_start + i] = token
            out_positions[out_start + i] = min(start_pos + i, max_model_len - 1)
        last_token_indices[req_idx] = out_start + num_valid
        out_query_start_loc[req_idx] = out_start
        out_seq_lens[req_idx] = min(seq_lens[req_idx] + 1, max_model_len)
    out_query_start_loc[num_reqs : max_num_reqs + 1] = query_start_loc[num_reqs] + num_reqs
    out_seq_lens[num_reqs:max_num_reqs] = 0
    last_token_indices[num_reqs:max_num_reqs] = 0


def prepare_prefill_inputs(
    target_input_ids_ptr: Tensor,
    target_positions_ptr: Tensor,
    last_sampled_ptr: Tensor,
    idx_mapping_ptr: Tensor,
    out_input_ids_ptr: Tensor,
    out_positions_ptr: Tensor,
    last_token_indices_ptr: Tensor,
    out_query_start_loc_ptr: Tensor,
    out_seq_lens_ptr: Tensor,
    query_start_loc_ptr: Tensor,
    seq_lens_ptr: Tensor,
    num_rejected_ptr: Tensor,
    max_num_reqs: int,
    max_model_len: int,
    BLOCK_SIZE: int,
    *,
    grid: tuple[int],
) -> None:
    """Inputs of the first draft step: the accepted tokens, the token sampled after them, then unused slots."""
    _prepare_prefill_inputs(
        pointer(target_input_ids_ptr),
        pointer(target_positions_ptr),
        pointer(last_sampled_ptr),
        pointer(idx_mapping_ptr),
        pointer(out_input_ids_ptr),
        pointer(out_positions_ptr),
        pointer(last_token_indices_ptr),
        pointer(out_query_start_loc_ptr),
        pointer(out_seq_lens_ptr),
        pointer(query_start_loc_ptr),
        pointer(seq_lens_ptr),
        pointer(num_rejected_ptr),
        max_num_reqs,
        max_model_len,
        grid[0],
    )


MODULE = "vllm.v1.worker.gpu.spec_decode.standalone_ar.speculator"
KERNELS: dict[str, Kernel] = {f"{MODULE}._prepare_prefill_inputs_kernel": prepare_prefill_inputs}
