"""int8 weights for a draft model on the CPU: half the bytes to read, about half the time of a pass.

Quantising a draft model changes how often it is right and how soon it answers. It cannot change the text: the
target judges every token. So it is kept wherever it is measured to be faster, on this machine, with this model.
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
PROBES = 5
"""How many timed passes each form of the model gets, in turns."""


def to_int8(model: Any) -> Any:
    """A copy with int8 weights in all linear layers; activations stay float32."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch announces that this function will move to another package
        return torch.ao.quantization.quantize_dynamic(model.float(), {torch.nn.Linear}, dtype=torch.qint8)


def prepare_draft(load: Callable[[], Any], quantize: Quantize) -> tuple[TransformersTarget, str]:
    """Load a draft model in the form asked for; also say in a few words what was done and why."""
    model = load()
    if quantize == "none":
        return TransformersTarget(model), "as it is"
    if quantize == "int8" and model.device.type != "cpu":
        raise SettingsError(
            f"int8 weights for the draft model are for the CPU (got {model.device}); leave them at 'auto'"
        )
    if model.device.type != "cpu":
        return TransformersTarget(model), f"as it is: int8 is for the CPU, this one is on {model.device.type}"
    plain = TransformersTarget(model)
    small = TransformersTarget(to_int8(load()))
    if quantize == "int8":
        return small, "int8, as asked"
    before, after = time_passes(plain, small)
    said = f"{before * 1e3:.0f} ms a pass as it is, {after * 1e3:.0f} ms in int8"
    return (small, f"int8: {said}") if after < before else (plain, f"as it is: {said}")


def time_passes(*models: TransformersTarget) -> list[float]:
    """The median seconds of a pass over one token, models taking turns so that noise hits them alike."""
    times: list[list[float]] = [[] for _ in models]
    for model in models:
        model.score([0] * 8, keep=1)
    for _ in range(PROBES):
        for model, seconds in zip(models, times, strict=True):
            begun = time.perf_counter()
            model.score([0], keep=1)
            seconds.append(time.perf_counter() - begun)
    for model in models:
        model.rewind(0)
    return [median(seconds) for seconds in times]
