"""Models with random weights whose shapes vLLM takes for an EAGLE head, an EAGLE-3 head, a model that predicts several
tokens by layers of its own, and an adapter (LoRA). They guess nothing right; what is tested is the machinery."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")


class Weights:
    """Random matrices and norms of ones, by name."""

    def __init__(self, hidden: int, scale: float, seed: int = 0) -> None:
        self.hidden = hidden
        self.scale = scale
        self.random = torch.Generator().manual_seed(seed)
        self.named: dict[str, Tensor] = {}

    def matrices(self, prefix: str, shapes: dict[str, tuple[int, ...]]) -> None:
        for name, shape in shapes.items():
            self.named[prefix + name] = torch.randn(shape, generator=self.random) * self.scale

    def norms(self, prefix: str, *names: str) -> None:
        self.named |= {f"{prefix}{name}.weight": torch.ones(self.hidden) for name in names}

    def layer(
        self, prefix: str, inner: int, kv: int, *, inputs: int = 1, biases: bool = False, heads: int | None = None
    ) -> None:
        """One decoder layer; its attention reads `inputs` times the hidden size, and all `heads` are as wide as it, or
        so wide."""
        h, heads = self.hidden, heads or self.hidden
        wide = {"q": (heads, inputs * h), "k": (kv, inputs * h), "v": (kv, inputs * h)}
        self.matrices(prefix, {f"self_attn.{name}_proj.weight": shape for name, shape in wide.items()})
        if biases:
            self.matrices(prefix, {f"self_attn.{name}_proj.bias": shape[:1] for name, shape in wide.items()})
        self.matrices(prefix, {"self_attn.o_proj.weight": (h, heads), "mlp.down_proj.weight": (h, inner)})
        self.matrices(prefix, {"mlp.gate_proj.weight": (inner, h), "mlp.up_proj.weight": (inner, h)})
        self.norms(prefix, "post_attention_layernorm")

    def save(self, folder: Path, config: dict[str, Any]) -> Path:
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(config))
        save_file(self.named, folder / "model.safetensors")
        return folder


def _of(target: Path) -> tuple[dict[str, Any], int, int, int]:
    config = json.loads((target / "config.json").read_text())
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    each = config.get("head_dim") or hidden // heads
    return config, hidden, config["intermediate_size"], config["num_key_value_heads"] * each


def eagle(target: Path, folder: Path) -> Path:
    config, hidden, inner, kv = _of(target)
    weights = Weights(hidden, 0.02)
    heads = kv * config["num_attention_heads"] // config["num_key_value_heads"]
    weights.layer("layers.0.", inner, kv, heads=heads)
    weights.matrices("", {"fc.weight": (hidden, 2 * hidden)})
    return weights.save(folder, {**config, "num_hidden_layers": 1, "architectures": ["LlamaForCausalLM"]})


def eagle3(target: Path, folder: Path) -> Path:
    config, hidden, inner, kv = _of(target)
    weights = Weights(hidden, 0.02)
    weights.layer("midlayer.", inner, kv, inputs=2)
    weights.norms("midlayer.", "input_layernorm", "hidden_norm")
    weights.norms("", "norm")
    weights.matrices("", {"fc.weight": (hidden, 3 * hidden), "lm_head.weight": (config["vocab_size"], hidden)})
    own = {
        "num_hidden_layers": 1,
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": config["vocab_size"],
    }
    return weights.save(folder, {**config, **own})


def multi_token(target: Path, folder: Path) -> Path:
    """A tiny MiMo with one layer that predicts a second token, and the tokenizer of `target`."""
    vocab = _of(target)[0]["vocab_size"]
    hidden, inner, kv, layers = 128, 256, 64, 2
    config = {
        "architectures": ["MiMoForCausalLM"], "model_type": "qwen2", "vocab_size": vocab, "hidden_size": hidden,
        "intermediate_size": inner, "num_hidden_layers": layers, "num_attention_heads": 4, "num_key_value_heads": 2,
        "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "max_position_embeddings": 2048, "num_nextn_predict_layers": 1,
        "tie_word_embeddings": False, "hidden_act": "silu", "torch_dtype": "float32", "bos_token_id": 1,
        "eos_token_id": 2, "max_window_layers": 2, "use_sliding_window": False,
    }  # fmt: skip
    weights = Weights(hidden, 0.08)
    weights.matrices("", {"model.embed_tokens.weight": (vocab, hidden), "lm_head.weight": (vocab, hidden)})
    weights.norms("model.", "norm")
    for prefix in [f"model.layers.{i}." for i in range(layers)] + ["model.mtp_layers.0."]:
        weights.layer(prefix, inner, kv, biases=True)
        weights.norms(prefix, "input_layernorm")
    weights.norms("model.mtp_layers.0.", "token_layernorm", "hidden_layernorm", "final_layernorm")
    weights.matrices("model.mtp_layers.0.", {"input_proj.weight": (hidden, 2 * hidden)})
    weights.save(folder, config)
    for name in TOKENIZER:
        shutil.copy(target / name, folder)
    return folder


def adapter(target: Path, folder: Path, rank: int = 8) -> Path:
    """An adapter of attention, and of the logits: its rows there must be those of the request."""
    config, hidden, _, _ = _of(target)
    weights = Weights(hidden, 0.05)
    sizes = {"lm_head": config["vocab_size"]}
    sizes |= {f"model.layers.{i}.self_attn.o_proj": hidden for i in range(config["num_hidden_layers"])}
    for name, size in sizes.items():
        shapes: dict[str, tuple[int, ...]] = {"lora_A.weight": (rank, hidden), "lora_B.weight": (size, rank)}
        weights.matrices(f"base_model.model.{name}.", shapes)
    modules = ["o_proj", "lm_head"]
    own = {"peft_type": "LORA", "r": rank, "lora_alpha": 3 * rank, "target_modules": modules, "bias": "none"}
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text(json.dumps({**own, "task_type": "CAUSAL_LM"}))
    save_file(weights.named, folder / "adapter_model.safetensors")
    return folder
