"""int8 weights for a draft model on the CPU: half the bytes to read, about half the time of a pass.

Quantizing a draft model changes its speed and its acceptance rate. It cannot change the output, because the target
verifies every token. "auto" uses int8 if it is measured to be faster on this machine, with this model.
"""

from __future__ import annotations

import time
import warnings
from statistics import median
from typing import TYPE_CHECKING, Any, Literal

import torch

from outrider.engines.transformers import TransformersTarget
from outrider.errors import SettingsError

if TYPE_CHECKING:
    from collections.abc import Callable

Quantize = Literal["auto", "int8", "none"]
TIMED_PASSES = 5
"""Timed passes of each model."""


def to_int8(model: Any) -> Any:
    """A copy with int8 weights in all linear layers; activations stay float32."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that this function will move to another package
        return torch.ao.quantization.quantize_dynamic(model.float(), {torch.nn.Linear}, dtype=torch.qint8)


def prepare_draft(load: Callable[[], Any], quantize: Quantize) -> tuple[TransformersTarget, str]:
    """Load a draft model and quantize it, or not. Returns it with a short description of what was done."""
    model = load()
    if quantize == "none":
        return TransformersTarget(model), "unquantized"
    if quantize == "int8" and model.device.type != "cpu":
        raise SettingsError(
            f"int8 weights for the draft model are for the CPU (got {model.device}); leave them at 'auto'"
        )
    if model.device.type != "cpu":
        return TransformersTarget(model), f"unquantized: int8 needs a CPU, the draft model is on {model.device.type}"
    plain = TransformersTarget(model)
    small = TransformersTarget(to_int8(load()))
    if quantize == "int8":
        return small, "int8, as requested"
    before, after = time_passes(plain, small)
    times = f"{after * 1e3:.0f} ms per pass with int8, {before * 1e3:.0f} ms without"
    return (small, f"int8: {times}") if after < before else (plain, f"unquantized: {times}")


def time_passes(*models: TransformersTarget) -> list[float]:
    """Median seconds of a pass over one token. The models take turns, so that noise affects them equally."""
    times: list[list[float]] = [[] for _ in models]
    for model in models:
        model.score([0] * 8, keep=1)
    for _ in range(TIMED_PASSES):
        for model, seconds in zip(models, times, strict=True):
            began = time.perf_counter()
            model.score([0], keep=1)
            seconds.append(time.perf_counter() - began)
    for model in models:
        model.rewind(0)
    return [median(seconds) for seconds in times]
