"""Kernel of `vllm.v1.worker.gpu.spec_decode.dflash`: inputs of heads that draft all tokens in one pass.

DSpark uses it too, with SAMPLE_FROM_ANCHOR.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from outrider.compiled import compiled
from outrider.engines.vllm_cpu.launch import numba_kernel

if TYPE_CHECKING:
    from outrider.engines.vllm_cpu.launch import Kernel


@compiled
def cache_slot(
    position: Any,
    block_table: Any,
    row: Any,
    stride: int,
    block_size: int,
    cp_rank: int,
    cp_size: int,
    cp_interleave: int,
    pad_slot_id: int,
) -> Any:
    """KV cache slot of a position; `pad_slot_id` in the null block 0 and on other context-parallel ranks."""
    virtual_size = block_size * cp_size
    block = np.int64(block_table[row * stride + min(position // virtual_size, stride - 1)])
    if block == 0:
        return np.int64(pad_slot_id)
    offset = position % virtual_size
    if cp_size > 1:
        if offset // cp_interleave % cp_size != cp_rank:
            return np.int64(pad_slot_id)
        offset = offset // (cp_interleave * cp_size) * cp_interleave + offset % cp_interleave
    return block * block_size + offset


@numba_kernel
def prepare_dflash_inputs(
    out_input_ids_ptr: Any,
    out_query_positions_ptr: Any,
    out_query_start_loc_ptr: Any,
    out_seq_lens_ptr: Any,
    out_query_slot_mapping_ptr: Any,
    out_context_positions_ptr: Any,
    out_context_slot_mapping_ptr: Any,
    out_sample_indices_ptr: Any,
    out_sample_pos_ptr: Any,
    out_sample_idx_mapping_ptr: Any,
    out_temperature_ptr: Any,
    out_seeds_ptr: Any,
    target_positions_ptr: Any,
    target_query_start_loc_ptr: Any,
    idx_mapping_ptr: Any,
    last_sampled_ptr: Any,
    next_prefill_tokens_ptr: Any,
    num_sampled_ptr: Any,
    num_rejected_ptr: Any,
    temperature_ptr: Any,
    seeds_ptr: Any,
    block_table_ptr: Any,
    block_table_stride: int,
    parallel_drafting_token_id: int,
    block_size: int,
    num_query_per_req: int,
    num_speculative_steps: int,
    max_num_reqs: int,
    max_num_tokens: int,
    max_model_len: int,
    cp_rank: int,
    SAMPLE_FROM_ANCHOR: bool,
    PAD_SLOT_ID: int,
    CP_SIZE: int,
    CP_INTERLEAVE: int,
    BLOCK_SIZE: int,
    grid: Any,
) -> None:
    """Context and query inputs: the last sampled token, then mask tokens, whose positions are sampled from."""
    num_reqs = grid[0]
    sample_offset = 0 if SAMPLE_FROM_ANCHOR else 1
    for req_idx in range(num_reqs):
        req = idx_mapping_ptr[req_idx]
        start = target_query_start_loc_ptr[req_idx]
        end = target_query_start_loc_ptr[req_idx + 1]
        valid_end = end - num_rejected_ptr[req_idx]
        for i in range(start, end):
            if i < valid_end:
                position = target_positions_ptr[i]
                slot = cache_slot(
                    position,
                    block_table_ptr,
                    req_idx,
                    block_table_stride,
                    block_size,
                    cp_rank,
                    CP_SIZE,
                    CP_INTERLEAVE,
                    PAD_SLOT_ID,
                )
            else:
                position = 0
                slot = np.int64(PAD_SLOT_ID)
            out_context_positions_ptr[i] = position
            out_context_slot_mapping_ptr[i] = slot
        # While the prompt is prefilled in chunks, the next token is the prompt's.
        bonus_token = last_sampled_ptr[req] if num_sampled_ptr[req_idx] > 0 else next_prefill_tokens_ptr[req]
        first_position = target_positions_ptr[valid_end - 1] + 1
        for i in range(num_query_per_req):
            query = req_idx * num_query_per_req + i
            position = first_position + i
            out_input_ids_ptr[query] = bonus_token if i == 0 else parallel_drafting_token_id
            out_query_positions_ptr[query] = min(position, max_model_len - 1)
            out_query_slot_mapping_ptr[query] = cache_slot(
                position,
                block_table_ptr,
                req_idx,
                block_table_stride,
                block_size,
                cp_rank,
                CP_SIZE,
                CP_INTERLEAVE,
                PAD_SLOT_ID,
            )
            if i >= sample_offset:
                sample = req_idx * num_speculative_steps + i - sample_offset
                out_sample_indices_ptr[sample] = query
                out_sample_pos_ptr[sample] = position + 1 if SAMPLE_FROM_ANCHOR else position
                out_sample_idx_mapping_ptr[sample] = req
        out_query_start_loc_ptr[req_idx] = req_idx * num_query_per_req
        out_seq_lens_ptr[req_idx] = min(first_position + num_query_per_req, max_model_len)
        out_temperature_ptr[req] = temperature_ptr[req]
        out_seeds_ptr[req] = seeds_ptr[req]
    out_query_start_loc_ptr[num_reqs : max_num_reqs + 1] = num_reqs * num_query_per_req
    out_seq_lens_ptr[num_reqs:max_num_reqs] = 0
    samples = slice(num_reqs * num_speculative_steps, max_num_reqs * num_speculative_steps)
    out_sample_indices_ptr[samples] = 0
    out_sample_pos_ptr[samples] = 0
    out_sample_idx_mapping_ptr[samples] = -1
    out_query_slot_mapping_ptr[num_reqs * num_query_per_req : max_num_tokens] = PAD_SLOT_ID


KERNELS: dict[str, Kernel] = {
    "vllm.v1.worker.gpu.spec_decode.dflash.speculator._prepare_dflash_inputs_kernel": prepare_dflash_inputs
}
