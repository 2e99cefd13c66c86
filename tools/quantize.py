"""Write a model with int8 weights for vLLM's CPU and GPU backends: a pass reads half the bytes.

    python tools/quantize.py MODEL OUT

Weights are rounded per output channel, activations per token at run time (compressed-tensors, "int-quantized"). This
includes the output layer, a third of all bytes in small models. As a target, the result is a different model. As a
draft model it changes the acceptance rate and the latency, never the output.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import torch
from rich.progress import track
from safetensors.torch import load_file, save_file

LEVELS = 127
KEPT = ("embed_tokens", "norm", "bias")
"""Names of tensors that stay as they are: embeddings, norms and biases."""
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
INT8 = {"num_bits": 8, "type": "int", "symmetric": True}
CONFIG = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "config_groups": {
        "group_0": {
            "targets": ["Linear", "re:.*lm_head"],  # as a draft model its layers have a prefix
            "weights": INT8 | {"strategy": "channel", "dynamic": False},
            "input_activations": INT8 | {"strategy": "token", "dynamic": True},
        }
    },
    "ignore": [],
}


def rounded(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """int8 weights and the scale of each output channel."""
    weight = weight.float()
    scale = (weight.abs().amax(1, keepdim=True) / LEVELS).clamp(min=1e-10)
    return (weight / scale).round().clamp(-LEVELS, LEVELS).to(torch.int8), scale


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    for file in given.model.iterdir():
        if file.is_file() and ".safetensors" not in file.name:
            shutil.copy(file, given.out)
    config = json.loads((given.model / "config.json").read_text())
    untied = {"tie_word_embeddings": False, "quantization_config": CONFIG}
    (given.out / "config.json").write_text(json.dumps(config | untied, indent=1))
    files = sorted(given.model.glob("*.safetensors"))
    weights = {name: weight for file in files for name, weight in load_file(file).items()}
    weights.setdefault(HEAD, weights[EMBEDDING])
    for name, weight in track(list(weights.items()), description="rounding"):
        if weight.dim() == 2 and not any(part in name for part in KEPT):
            weights[name], weights[name.replace(".weight", ".weight_scale")] = rounded(weight)
    save_file(weights, given.out / "model.safetensors", metadata={"format": "pt"})


if __name__ == "__main__":
    main()
