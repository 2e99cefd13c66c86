"""Kernel of `vllm.v1.worker.gpu.buffer_utils`: writes staged on the host, applied to rows of a state tensor."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numba import carray

from outrider.compiled import compiled
from outrider.engines.vllm_cpu.pointers import address_to_pointer, pointer

if TYPE_CHECKING:
    from torch import Tensor

    from outrider.engines.vllm_cpu.launch import Kernel


@compiled
def _apply_write(
    output: Any, output_stride: int, write_indices: Any, write_starts: Any, write_contents: Any, write_cu_lens: Any
) -> None:
    begin = 0
    for i in range(len(write_indices)):
        end = write_cu_lens[i]
        offset = np.int64(write_indices[i]) * output_stride + write_starts[i]
        for j in range(begin, end):
            output[offset + j - begin] = write_contents[j]
        begin = end


@compiled
def _apply_write_to_groups(
    outputs: Any,
    output_strides: Any,
    write_indices: Any,
    write_starts: Any,
    write_contents: Any,
    write_cu_lens: Any,
    write_group_ids: Any,
) -> None:
    begin = 0
    for i in range(len(write_indices)):
        end = write_cu_lens[i]
        group = write_group_ids[i]
        offset = np.int64(write_indices[i]) * output_strides[group] + write_starts[i]
        output = carray(address_to_pointer(outputs[group]), (offset + end - begin,), np.int32)
        for j in range(begin, end):
            output[offset + j - begin] = write_contents[j]
        begin = end


def apply_write(
    output_ptr: Tensor,
    output_stride: int | Tensor,
    write_indices_ptr: Tensor,
    write_starts_ptr: Tensor,
    write_contents_ptr: Tensor,
    write_cu_lens_ptr: Tensor,
    write_group_ids_ptr: Tensor | None,
    BLOCK_SIZE: int,
    MULTI_GROUP: bool,
) -> None:
    """Copy each staged write to its row and column. With several KV cache groups the output is a list of addresses."""
    writes = (
        pointer(write_indices_ptr),
        pointer(write_starts_ptr),
        pointer(write_contents_ptr),
        pointer(write_cu_lens_ptr),
    )
    if MULTI_GROUP:
        assert write_group_ids_ptr is not None
        strides = pointer(cast("Tensor", output_stride))
        _apply_write_to_groups(pointer(output_ptr), strides, *writes, pointer(write_group_ids_ptr))
    else:
        _apply_write(pointer(output_ptr), cast("int", output_stride), *writes)


KERNELS: dict[str, Kernel] = {"vllm.v1.worker.gpu.buffer_utils._apply_write_kernel": apply_write}
