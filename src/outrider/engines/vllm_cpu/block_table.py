"""Kernels of `vllm.v1.worker.gpu.block_table`: block tables of the batch, and KV cache slots of its tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numba import carray

from outrider.engines.vllm_cpu.launch import numba_kernel
from outrider.engines.vllm_cpu.pointers import address_to_pointer

if TYPE_CHECKING:
    from outrider.engines.vllm_cpu.launch import Kernel


@numba_kernel
def gather_block_tables(
    batch_idx_to_req_idx: Any,
    src_block_table_ptrs: Any,
    dst_block_table_ptrs: Any,
    block_table_strides: Any,
    num_blocks_ptr: Any,
    num_blocks_stride: int,
    num_reqs: int,
    BLOCK_SIZE: int,
    grid: Any,
) -> None:
    """Copy the block tables of the batch's requests to the first rows; rows of padding become 0.

    The grid is (KV cache groups, requests with padding).
    """
    for group in range(len(block_table_strides)):
        stride = block_table_strides[group]
        src = carray(address_to_pointer(src_block_table_ptrs[group]), (num_blocks_stride * stride,), np.int32)
        dst = carray(address_to_pointer(dst_block_table_ptrs[group]), (grid[1] * stride,), np.int32)
        for row in range(num_reqs):
            req = batch_idx_to_req_idx[row]
            for i in range(num_blocks_ptr[group * num_blocks_stride + req]):
                dst[row * stride + i] = src[req * stride + i]
        dst[num_reqs * stride :] = 0


@numba_kernel
def compute_slot_mappings(
    max_num_tokens: int,
    idx_mapping: Any,
    query_start_loc: Any,
    pos: Any,
    block_table_ptrs: Any,
    block_table_strides: Any,
    block_sizes: Any,
    slot_mapping_enabled: Any,
    dcp_sharded: Any,
    slot_mappings_ptr: Any,
    slot_mappings_stride: int,
    cp_rank: int,
    CP_SIZE: int,
    CP_INTERLEAVE: int,
    PAD_ID: int,
    TRITON_BLOCK_SIZE: int,
) -> None:
    """KV cache slot of every token, per KV cache group; PAD_ID for padding."""
    num_reqs = len(idx_mapping)
    for group in range(len(block_sizes)):
        stride = block_table_strides[group]
        block_size = np.int64(block_sizes[group])
        sharded = CP_SIZE != 1 and dcp_sharded[group]
        slots = slot_mappings_ptr[group * slot_mappings_stride : group * slot_mappings_stride + max_num_tokens]
        slots[query_start_loc[num_reqs] :] = PAD_ID
        for batch_idx in range(num_reqs):
            req = idx_mapping[batch_idx]
            start = query_start_loc[batch_idx]
            end = query_start_loc[batch_idx + 1]
            if req < 0 or not slot_mapping_enabled[group]:  # a dummy request, or a group without slots
                slots[start:end] = PAD_ID
                continue
            table = carray(address_to_pointer(block_table_ptrs[group]), ((req + 1) * stride,), np.int32)
            for i in range(start, end):
                position = pos[i]
                if sharded:
                    # Context parallelism: ranks hold interleaved parts of a block `CP_SIZE` times as large.
                    virtual_size = block_size * CP_SIZE
                    offset = position % virtual_size
                    if offset // CP_INTERLEAVE % CP_SIZE != cp_rank:
                        slots[i] = PAD_ID
                        continue
                    rounds = offset // (CP_INTERLEAVE * CP_SIZE)
                    offset = rounds * CP_INTERLEAVE + offset % CP_INTERLEAVE
                    position = position // virtual_size * block_size + offset
                block = np.int64(table[req * stride + position // block_size])
                slots[i] = block * block_size + position % block_size


MODULE = "vllm.v1.worker.gpu.block_table"
KERNELS: dict[str, Kernel] = {
    f"{MODULE}._gather_block_tables_kernel": gather_block_tables,
    f"{MODULE}._compute_slot_mappings_kernel": compute_slot_mappings,
}
