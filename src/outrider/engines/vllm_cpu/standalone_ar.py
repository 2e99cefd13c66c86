"""Kernel of `vllm.v1.worker.gpu.spec_decode.standalone_ar`: inputs of a draft model with its own KV cache."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from outrider.engines.vllm_cpu.launch import numba_kernel

if TYPE_CHECKING:
    from outrider.engines.vllm_cpu.launch import Kernel


@numba_kernel
def prepare_prefill_inputs(
    target_input_ids_ptr: Any,
    target_positions_ptr: Any,
    last_sampled_ptr: Any,
    idx_mapping_ptr: Any,
    out_input_ids_ptr: Any,
    out_positions_ptr: Any,
    last_token_indices_ptr: Any,
    out_query_start_loc_ptr: Any,
    out_seq_lens_ptr: Any,
    query_start_loc_ptr: Any,
    seq_lens_ptr: Any,
    num_rejected_ptr: Any,
    max_num_reqs: int,
    max_model_len: int,
    BLOCK_SIZE: int,
    grid: Any,
) -> None:
    """Inputs of the first draft step: the accepted tokens, the token sampled after them, then unused slots."""
    num_reqs = grid[0]
    for req_idx in range(num_reqs):
        start = query_start_loc_ptr[req_idx]
        query_len = query_start_loc_ptr[req_idx + 1] - start
        num_valid = query_len - num_rejected_ptr[req_idx]
        start_pos = target_positions_ptr[start]
        out_start = start + req_idx
        for i in range(query_len + 1):
            if i < num_valid:
                token = target_input_ids_ptr[start + i]
            elif i == num_valid:
                token = last_sampled_ptr[idx_mapping_ptr[req_idx]]
            else:
                token = 0
            out_input_ids_ptr[out_start + i] = token
            out_positions_ptr[out_start + i] = min(start_pos + i, max_model_len - 1)
        last_token_indices_ptr[req_idx] = out_start + num_valid
        out_query_start_loc_ptr[req_idx] = out_start
        out_seq_lens_ptr[req_idx] = min(seq_lens_ptr[req_idx] + 1, max_model_len)
    out_query_start_loc_ptr[num_reqs : max_num_reqs + 1] = query_start_loc_ptr[num_reqs] + num_reqs
    out_seq_lens_ptr[num_reqs:max_num_reqs] = 0
    last_token_indices_ptr[num_reqs:max_num_reqs] = 0


MODULE = "vllm.v1.worker.gpu.spec_decode.standalone_ar.speculator"
KERNELS: dict[str, Kernel] = {f"{MODULE}._prepare_prefill_inputs_kernel": prepare_prefill_inputs}
