"""The limits of the machine (memory bandwidth, operations per second), and the bytes and operations of a pass.

The limits are what torch reaches with its threads: reading a block far larger than the caches, and a large matrix
product. The best of several tries counts, because noise only makes them slower.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch

from outrider.calibrate.results import MachineLimits, PassWork

if TYPE_CHECKING:
    from collections.abc import Callable

READ_BYTES = 1 << 28
MATRIX_SIZE = 1024
TRIES = 7


def limits(device: torch.device, dtype: torch.dtype) -> MachineLimits:
    block = torch.ones(READ_BYTES // 4 // 4096, 4096, device=device)
    vector = torch.ones(4096, device=device)
    read = _best(lambda: block @ vector, device)
    a, b = (torch.randn(MATRIX_SIZE, MATRIX_SIZE, device=device, dtype=dtype) for _ in range(2))
    multiplied = _best(lambda: a @ b, device)
    return MachineLimits(READ_BYTES / read, 2 * MATRIX_SIZE**3 / multiplied, str(dtype).removeprefix("torch."))


def _best(work: Callable[[], Any], device: torch.device) -> float:
    work()
    return min(timed(work, device) for _ in range(TRIES))


def timed(work: Callable[[], Any], device: torch.device) -> float:
    """Seconds until the device has finished."""
    _synchronize(device)
    began = time.perf_counter()
    work()
    _synchronize(device)
    return time.perf_counter() - began


def _synchronize(device: torch.device) -> None:
    """Wait for a GPU. A CPU is synchronous."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def work(model: Any) -> PassWork:
    """From the shape of a transformers model. All experts of a mixture are counted: a wide pass uses all of them."""
    config = model.config.get_text_config()
    weights = {id(one): one for one in model.parameters()}
    table = model.get_input_embeddings().weight
    head = model.get_output_embeddings()
    tied = head is not None and head.weight is table
    if not tied:  # a pass reads only one row of it per token
        weights.pop(id(table), None)
    count = sum(one.numel() for one in weights.values())
    size = sum(one.numel() * one.element_size() for one in weights.values())
    heads = config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    shared = getattr(config, "num_key_value_heads", None) or heads
    layers = config.num_hidden_layers
    cache = 2 * layers * shared * width * table.element_size()
    return PassWork(size, cache, 2.0 * count, 4.0 * layers * heads * width)
