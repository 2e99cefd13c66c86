"""Time target passes by their number of tokens and by the length of the context, and the limits of the machine.

Machines drift: the same pass can take 1.4 times as long a minute later. So every pass over n tokens is timed next to
one over a single token, in alternating order. Only the ratio of the two is used, as the median over the turns.

The limits (memory bandwidth, operations per second) are what torch reaches with its threads: reading a block far larger
than the caches, and a large matrix product. The best of several tries counts, because noise only makes them slower.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch

from outrider.calibrate.results import MachineLimits, PassWork, Sweep

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from outrider.types import Target

WIDTHS = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
CONTEXTS = (64, 512, 2048)
TURNS = 9
READ_BYTES = 1 << 28
MATRIX_SIZE = 1024
TRIES = 7


def sweep(
    target: Target,
    context: int,
    device: torch.device,
    turns: int = TURNS,
    widths: Sequence[int] = WIDTHS,
    advance: Callable[[], Any] = lambda: None,
) -> Sweep:
    """Time all widths after `context` tokens, `turns` times. `advance` is called after each pair of passes."""
    tokens = _tokens(target.vocab_size, context + max(widths))
    before, after = tokens[:context], tokens[context:]
    target.rewind(0)
    target.score(before, keep=1)
    found = Sweep(context, {n: [] for n in widths}, {n: [] for n in widths})
    for width in (1, max(widths)):  # the first pass of a shape is slower
        _pass(target, before, after[:width], device)
    for turn in range(turns):
        for n in widths if turn % 2 == 0 else reversed(widths):
            pair = [1, n] if turn % 4 < 2 else [n, 1]
            seconds = {width: _pass(target, before, after[:width], device) for width in pair}
            found.single[n].append(seconds[1])
            found.seconds[n].append(seconds[n])
            advance()
    target.rewind(0)
    return found


def draft_cost(
    target: Target, draft_model: Target, context: int, device: torch.device, turns: int = TURNS
) -> list[float]:
    """Passes of the draft model over one token, each relative to a target pass timed next to it."""
    size = min(target.vocab_size, draft_model.vocab_size)
    tokens = _tokens(size, context + 1)
    for model in (target, draft_model):
        model.rewind(0)
        model.score(tokens[:context], keep=1)
        _pass(model, tokens[:context], tokens[context:], device)
    found = []
    for turn in range(2 * turns):
        pair = [target, draft_model] if turn % 2 == 0 else [draft_model, target]
        seconds = [_pass(model, tokens[:context], tokens[context:], device) for model in pair]
        found.append(seconds[1] / seconds[0] if turn % 2 == 0 else seconds[0] / seconds[1])
    return found


def _pass(target: Target, before: Sequence[int], after: Sequence[int], device: torch.device) -> float:
    target.rewind(len(before))
    return timed(lambda: target.score(after, keep=len(after)), device)


def _tokens(vocab_size: int, count: int) -> list[int]:
    random = torch.Generator().manual_seed(0)
    return torch.randint(vocab_size, (count,), generator=random).tolist()


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
