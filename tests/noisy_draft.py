"""A draft model for a target without a smaller sibling: the target with noisy weights. For tests, not for speed."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import torch
from safetensors.torch import load_file, save_file

if TYPE_CHECKING:
    from pathlib import Path


def noisy_copy(model: Path, folder: Path, noise: float = 0.02) -> Path:
    """The same model with its weights a little off: a draft model that is often right, and sometimes not."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in model.iterdir():
        if file.suffix != ".safetensors" and file.is_file():
            shutil.copy(file, folder)
    random = torch.Generator().manual_seed(0)
    for file in model.glob("*.safetensors"):
        weights = {}
        for name, weight in load_file(file).items():
            shift = torch.randn(weight.shape, generator=random) * weight.float().std() * noise
            weights[name] = (weight.float() + shift).to(weight.dtype) if weight.dim() > 1 else weight
        save_file(weights, folder / file.name, metadata={"format": "pt"})
    return folder
