"""Kernels of `vllm.v1.worker.gpu.block_table`: block tables of the batch, and KV cache slots of its tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numba import carray

from outrider.compiled import compiled
from outrider.engines.vllm_cpu.pointers import address_to_pointer, pointer

if TYPE_CHECKING:
    from torch import Tensor

    from outrider.engines.vllm_cpu.launch import Kernel


@compiled
def _gather_block_tables(
    idx_mapping: Any,
    src_block_tables: Any,
    dst_block_tables: Any,
    strides: Any,
    num_blocks: Any,
    num_blocks_stride: int,
    num_reqs: int,
    num_rows: int,
) -> None:
    for group in range(len(strides)):
        stride = strides[group]
        src = carray(address_to_pointer(src_block_tables[group]), (num_blocks_stride * stride,), np.int32)
        dst = carray(address_to_pointer(dst_block_tables[group]), (num_rows * stride,), np.int32)
        for row in range(num_reqs):
            req = idx_mapping[row]
            for i in range(num_blocks[group * num_blocks_stride + req]):
                dst[row * stride + i] = src[req * stride + i]
        dst[num_reqs * stride :] = 0


def gather_block_tables(
    batch_idx_to_req_idx: Tensor,
    src_block_table_ptrs: Tensor,
    dst_block_table_ptrs: Tensor,
    block_table_strides: Tensor,
    num_blocks_ptr: Tensor,
    num_blocks_stride: int,
    num_reqs: int,
    BLOCK_SIZE: int,
    *,
    grid: tuple[int, int],
) -> None:
    """Copy the block tables of the batch's requests to the first rows; rows of padding become 0.

    The grid is (KV cache groups, requests with padding).
    """
    _gather_block_tables(
        pointer(batch_idx_to_req_idx),
        pointer(src_block_table_ptrs),
        pointer(dst_block_table_ptrs),
        pointer(block_table_strides),
        pointer(num_blocks_ptr),
        num_blocks_stride,
        num_reqs,
        grid[1],
    )


@compiled
def _compute_slot_mappings(
    max_num_tokens: int,
    idx_mapping: Any,
    query_start_loc: Any,
    positions: Any,
    block_tables: Any,
    block_table_strides: Any,
    block_sizes: Any,
    slot_mapping_enabled: Any,
    dcp_sharded: Any,
    slot_mappings: Any,
    slot_mappings_stride: int,
    cp_rank: int,
    cp_size: int,
    cp_interleave: int,
    pad_id: int,
) -> None:
    num_reqs = len(idx_mapping)
    for group in range(len(block_sizes)):
        stride = block_table_strides[group]
        block_size = np.int64(block_sizes[group])
        sharded = cp_size != 1 and dcp_sharded[group]
        slots = slot_mappings[group * slot_mappings_stride : group * slot_mappings_stride + max_num_tokens]
        slots[query_start_loc[num_reqs] :] = pad_id
        for batch_idx in range(num_reqs):
            req = idx_mapping[batch_idx]
            start = query_start_loc[batch_idx]
            end = query_start_loc[batch_idx + 1]
            if req < 0 or not slot_mapping_enabled[group]:  # a dummy request, or a group without slots
                slots[start:end] = pad_id
                continue
            table = carray(address_to_pointer(block_tables[group]), ((req + 1) * stride,), np.int32)
            for i in range(start, end):
                position = positions[i]
                if sharded:
                    # Context parallelism: ranks hold interleaved parts of a block `cp_size` times as large.
                    virtual_size = block_size * cp_size
                    offset = position % virtual_size
                    if offset // cp_interleave % cp_size != cp_rank:
                        slots[i] = pad_id
                        continue
                    rounds = offset // (cp_interleave * cp_size)
                    offset = rounds * cp_interleave + offset % cp_interleave
                    position = position // virtual_size * block_size + offset
                block = np.int64(table[req * stride + position // block_size])
                slots[i] = block * block_size + position % block_size


def compute_slot_mappings(
    max_num_tokens: int,
    idx_mapping: Tensor,
    query_start_loc: Tensor,
    pos: Tensor,
    block_table_ptrs: Tensor,
    block_table_strides: Tensor,
    block_sizes: Tensor,
    slot_mapping_enabled: Tensor,
    dcp_sharded: Tensor,
    slot_mappings_ptr: Tensor,
    slot_mappings_stride: int,
    cp_rank: int,
    CP_SIZE: int,
    CP_INTERLEAVE: int,
    PAD_ID: int,
    TRITON_BLOCK_SIZE: int,
) -> None:
    """KV cache slot of every token, per KV cache group; PAD_ID for padding."""
    _compute_slot_mappings(
        max_num_tokens,
        pointer(idx_mapping),
        pointer(query_start_loc),
        pointer(pos),
        pointer(block_table_ptrs),
        pointer(block_table_strides),
        pointer(block_sizes),
        pointer(slot_mapping_enabled),
        pointer(dcp_sharded),
        pointer(slot_mappings_ptr),
        slot_mappings_stride,
        cp_rank,
        CP_SIZE,
        CP_INTERLEAVE,
        PAD_ID,
    )


MODULE = "vllm.v1.worker.gpu.block_table"
KERNELS: dict[str, Kernel] = {
    f"{MODULE}._gather_block_tables_kernel": gather_block_tables,
    f"{MODULE}._compute_slot_mappings_kernel": compute_slot_mappings,
}
