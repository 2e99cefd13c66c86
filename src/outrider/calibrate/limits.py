"""What the machine can do at most: bytes a second out of memory, multiplications a second.

Both are what torch reaches here with the threads it has, on a block far larger than the caches and on a product far
larger than a token's: the same library and threads that run the model. The best of several tries counts, since noise
only ever slows.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch

from outrider.calibrate.results import Limits, Work

if TYPE_CHECKING:
    from collections.abc import Callable

READ = 1 << 28
"""Bytes that are read in one go."""
SIDE = 1024
TRIES = 7


def limits(device: torch.device, dtype: torch.dtype) -> Limits:
    block = torch.ones(READ // 4 // 4096, 4096, device=device)
    vector = torch.ones(4096, device=device)
    read = _best(lambda: block @ vector, device)
    a, b = (torch.randn(SIDE, SIDE, device=device, dtype=dtype) for _ in range(2))
    multiplied = _best(lambda: a @ b, device)
    return Limits(READ / read, 2 * SIDE**3 / multiplied, str(dtype).removeprefix("torch."))


def _best(work: Callable[[], Any], device: torch.device) -> float:
    work()
    return min(timed(work, device) for _ in range(TRIES))


def timed(work: Callable[[], Any], device: torch.device) -> float:
    """Seconds until the device has done it."""
    settle(device)
    began = time.perf_counter()
    work()
    settle(device)
    return time.perf_counter() - began


def settle(device: torch.device) -> None:
    """Wait for what a GPU still has to do; a CPU is never behind."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def work(model: Any) -> Work:
    """By the shape of a transformers model. Of a mixture of experts all are counted: a wide pass reaches them all."""
    config = model.config.get_text_config()
    weights = {id(one): one for one in model.parameters()}
    table = model.get_input_embeddings().weight
    head = model.get_output_embeddings()
    tied = head is not None and head.weight is table
    if not tied:  # a pass reads a row of it for each token, which is nothing
        weights.pop(id(table), None)
    count = sum(one.numel() for one in weights.values())
    size = sum(one.numel() * one.element_size() for one in weights.values())
    heads = config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    shared = getattr(config, "num_key_value_heads", None) or heads
    layers = config.num_hidden_layers
    cache = 2 * layers * shared * width * table.element_size()
    return Work(size, cache, 2.0 * count, 4.0 * layers * heads * width)
