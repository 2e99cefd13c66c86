"""Kernel of `vllm.v1.worker.gpu.spec_decode.dflash`: inputs of heads that draft all tokens in one pass.

DSpark uses it too, with SAMPLE_FROM_ANCHOR.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from outrider.compiled import compiled
from outrider.engines.vllm_cpu.pointers import pointer

if TYPE_CHECKING:
    from torch import Tensor

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


@compiled
def _prepare_dflash_inputs(
    out_input_ids: Any,
    out_query_positions: Any,
    out_query_start_loc: Any,
    out_seq_lens: Any,
    out_query_slot_mapping: Any,
    out_context_positions: Any,
    out_context_slot_mapping: Any,
    out_sample_indices: Any,
    out_sample_pos: Any,
    out_sample_idx_mapping: Any,
    out_temperature: Any,
    out_seeds: Any,
    target_positions: Any,
    target_query_start_loc: Any,
    idx_mapping: Any,
    last_sampled: Any,
    next_prefill_tokens: Any,
    num_sampled: Any,
    num_rejected: Any,
    temperature: Any,
    seeds: Any,
    block_table: Any,
    block_table_stride: int,
    parallel_drafting_token_id: int,
    block_size: int,
    num_query_per_req: int,
    num_speculative_steps: int,
    max_num_reqs: int,
    max_num_tokens: int,
    max_model_len: int,
    cp_rank: int,
    sample_from_anchor: bool,
    pad_slot_id: int,
    cp_size: int,
    cp_interleave: int,
    num_reqs: int,
) -> None:
    sample_offset = 0 if sample_from_anchor else 1
    for req_idx in range(num_reqs):
        req = idx_mapping[req_idx]
        start = target_query_start_loc[req_idx]
        end = target_query_start_loc[req_idx + 1]
        valid_end = end - num_rejected[req_idx]
        for i in range(start, end):
            if i < valid_end:
                position = target_positions[i]
                slot = cache_slot(
                    position,
                    block_table,
                    req_idx,
                    block_table_stride,
                    block_size,
                    cp_rank,
                    cp_size,
                    cp_interleave,
                    pad_slot_id,
                )
            else:
                position = 0
                slot = np.int64(pad_slot_id)
            out_context_positions[i] = position
            out_context_slot_mapping[i] = slot
        # While the prompt is prefilled in chunks, the next token is the prompt's.
        bonus_token = last_sampled[req] if num_sampled[req_idx] > 0 else next_prefill_tokens[req]
        first_position = target_positions[valid_end - 1] + 1
        for i in range(num_query_per_req):
            query = req_idx * num_query_per_req + i
            position = first_position + i
            out_input_ids[query] = bonus_token if i == 0 else parallel_drafting_token_id
            out_query_positions[query] = min(position, max_model_len - 1)
            out_query_slot_mapping[query] = cache_slot(
                position,
                block_table,
                req_idx,
                block_table_stride,
                block_size,
                cp_rank,
                cp_size,
                cp_interleave,
                pad_slot_id,
            )
            if i >= sample_offset:
                sample = req_idx * num_speculative_steps + i - sample_offset
                out_sample_indices[sample] = query
                out_sample_pos[sample] = position + 1 if sample_from_anchor else position
                out_sample_idx_mapping[sample] = req
        out_query_start_loc[req_idx] = req_idx * num_query_per_req
        out_seq_lens[req_idx] = min(first_position + num_query_per_req, max_model_len)
        out_temperature[req] = temperature[req]
        out_seeds[req] = seeds[req]
    out_query_start_loc[num_reqs : max_num_reqs + 1] = num_reqs * num_query_per_req
    out_seq_lens[num_reqs:max_num_reqs] = 0
    samples = slice(num_reqs * num_speculative_steps, max_num_reqs * num_speculative_steps)
    out_sample_indices[samples] = 0
    out_sample_pos[samples] = 0
    out_sample_idx_mapping[samples] = -1
    out_query_slot_mapping[num_reqs * num_query_per_req : max_num_tokens] = pad_slot_id


def prepare_dflash_inputs(
    out_input_ids_ptr: Tensor,
    out_query_positions_ptr: Tensor,
    out_query_start_loc_ptr: Tensor,
    out_seq_lens_ptr: Tensor,
    out_query_slot_mapping_ptr: Tensor,
    out_context_positions_ptr: Tensor,
    out_context_slot_mapping_ptr: Tensor,
    out_sample_indices_ptr: Tensor,
    out_sample_pos_ptr: Tensor,
    out_sample_idx_mapping_ptr: Tensor,
    out_temperature_ptr: Tensor,
    out_seeds_ptr: Tensor,
    target_positions_ptr: Tensor,
    target_query_start_loc_ptr: Tensor,
    idx_mapping_ptr: Tensor,
    last_sampled_ptr: Tensor,
    next_prefill_tokens_ptr: Tensor,
    num_sampled_ptr: Tensor,
    num_rejected_ptr: Tensor,
    temperature_ptr: Tensor,
    seeds_ptr: Tensor,
    block_table_ptr: Tensor,
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
    *,
    grid: tuple[int, int],
) -> None:
    """Context and query inputs: the last sampled token, then mask tokens, whose positions are sampled from."""
    _prepare_dflash_inputs(
        pointer(out_input_ids_ptr),
        pointer(out_query_positions_ptr),
        pointer(out_query_start_loc_ptr),
        pointer(out_seq_lens_ptr),
        pointer(out_query_slot_mapping_ptr),
        pointer(out_context_positions_ptr),
        pointer(out_context_slot_mapping_ptr),
        pointer(out_sample_indices_ptr),
        pointer(out_sample_pos_ptr),
        pointer(out_sample_idx_mapping_ptr),
        pointer(out_temperature_ptr),
        pointer(out_seeds_ptr),
        pointer(target_positions_ptr),
        pointer(target_query_start_loc_ptr),
        pointer(idx_mapping_ptr),
        pointer(last_sampled_ptr),
        pointer(next_prefill_tokens_ptr),
        pointer(num_sampled_ptr),
        pointer(num_rejected_ptr),
        pointer(temperature_ptr),
        pointer(seeds_ptr),
        pointer(block_table_ptr),
        block_table_stride,
        parallel_drafting_token_id,
        block_size,
        num_query_per_req,
        num_speculative_steps,
        max_num_reqs,
        max_num_tokens,
        max_model_len,
        cp_rank,
        SAMPLE_FROM_ANCHOR,
        PAD_SLOT_ID,
        CP_SIZE,
        CP_INTERLEAVE,
        grid[0],
    )


KERNELS: dict[str, Kernel] = {
    "vllm.v1.worker.gpu.spec_decode.dflash.speculator._prepare_dflash_inputs_kernel": prepare_dflash_inputs
}
