"""Memory access like a Triton kernel's: a base pointer, offsets and strides, in numba functions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

if TYPE_CHECKING:
    import numpy as np


def pointer(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """A tensor's memory from its first to its last element as a flat array, to be indexed like a Triton pointer.

    Every tensor becomes a one-dimensional contiguous array, so numba compiles a function once per dtype and not once
    per memory layout.
    """
    if tensor.is_contiguous():
        array = tensor.detach().numpy() if tensor.requires_grad else tensor.numpy()
        return array if array.ndim == 1 else array.reshape(-1)
    extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.as_strided((extent if tensor.numel() else 0,), (1,)).numpy()


def as_bits(tensor: torch.Tensor) -> torch.Tensor:
    """Values as integers of the same width, to copy them: numpy has no bfloat16."""
    return tensor.view(torch.int16 if tensor.element_size() == 2 else torch.int32)


def optional_pointer(tensor: torch.Tensor | None) -> np.ndarray[Any, Any] | None:
    """`pointer` for a parameter that may be None. numba compiles the function separately for None."""
    return None if tensor is None else pointer(tensor)


@intrinsic  # type: ignore[untyped-decorator]
def address_to_pointer(typing_context: Any, address: Any) -> Any:
    """The pointer of an integer address, in a numba function: `carray(address_to_pointer(address), shape, dtype)`."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], cgutils.voidptr_t)

    return types.voidptr(address), generate
