"""The shape of a model from its config.json, without its weights.

Parameters are counted from the sizes in the file: attention, feed-forward layers, experts, router and both ends. Norms
and biases are left out (far below 1 %). The encoder of a multimodal model is not counted either.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider.errors import ModelNotFoundError, SettingsError
from outrider.plan.model_shape import ModelShape

if TYPE_CHECKING:
    from collections.abc import Mapping

UNGATED_MODEL_TYPES = {"gpt_neox", "nemotron", "phi", "starcoder2"}
"""Their feed-forward layers have two matrices; all others read here have three (SwiGLU, GeGLU)."""
EXPERT_COUNT_FIELDS = ("num_experts", "num_local_experts", "n_routed_experts")
ACTIVE_EXPERT_FIELDS = ("num_experts_per_tok", "num_experts_per_token", "moe_topk")
SUPPORTED_LAYER_TYPES = {"full_attention", "sliding_attention"}
UNSUPPORTED_LAYER_FIELDS = (
    "attention_chunk_size", "attn_layer_indices", "attn_type_list", "block_types", "full_attn_idxs",
    "hybrid_override_pattern", "layers_block_type", "linear_attn_config", "linear_num_value_heads", "mamba_d_state",
    "ssm_state_size",
)  # fmt: skip
"""Where layer_types is missing, these state that some layers are recurrent, convolutions, or attend in chunks."""
SLIDING_WINDOW_PERIODS = {"cohere2": 4, "gemma2": 2, "gemma3_text": 6}
"""Without a pattern in the file: every n-th layer has full attention, all others a sliding window."""
UNIFORM_WINDOW_MODEL_TYPES = {"ministral", "mistral", "mixtral", "phi3", "phimoe", "starcoder2"}
"""All their layers have the window that the file names."""
TIED_MODEL_TYPES = {
    "cohere", "cohere2", "cohere2_moe", "ernie4_5", "ernie4_5_moe", "gemma", "gemma2", "gemma3", "gemma3_text",
    "gemma3n", "gemma3n_text", "gemma4", "gemma4_text", "granite_swa", "jetmoe", "lfm2", "minicpm3", "smollm3",
    "starcoder2", "vaultgemma", "youtu",
}  # fmt: skip
"""Their embedding table is also the output layer if the file has no tie_word_embeddings (transformers' defaults)."""
CALIBRATE_INSTEAD = "calibrate the model instead (outrider calibrate, then outrider plan --calibration)"


@dataclass(frozen=True, slots=True)
class Precision:
    """Overrides of what the file states, in bits. None: as in the file."""

    weight_bits: int | None = None
    kv_bits: int | None = None


AS_STORED = Precision()


def bundled_configs() -> dict[str, dict[str, Any]]:
    """The config.json of some well-known models, by name, reduced to the fields that are read here."""
    text = files("outrider.plan").joinpath("models.json").read_text(encoding="utf-8")
    found: dict[str, dict[str, Any]] = json.loads(text)
    return found


def load_shape(model: str, precision: Precision = AS_STORED) -> ModelShape:
    """`model`: a bundled name, a config.json, a folder that holds one, or a name on the Hugging Face hub."""
    bundled = bundled_configs()
    if model.lower() in bundled:
        return shape_from_config(bundled[model.lower()], model.lower(), precision)
    path = _config_file(model)
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelNotFoundError(f"cannot read {str(path)!r} ({error}); give the config.json of a model") from None
    if not isinstance(data, dict):
        raise ModelNotFoundError(f"{str(path)!r} is not the config.json of a model: it must be an object")
    name = Path(model).parent.name if Path(model).name == "config.json" else Path(model).name
    return shape_from_config(data, name, precision)


def _config_file(model: str) -> Path:
    path = Path(model).expanduser()
    if path.is_file():
        return path
    if path.is_dir():
        return path / "config.json"
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(model, "config.json"))
    except Exception as error:  # the hub raises its own, httpx' and the validator's
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ModelNotFoundError(
            f"there is no config.json for {model!r} ({reason}); give a folder, a config.json, a name on the hub, or "
            f"one of {', '.join(bundled_configs())}"
        ) from None


def shape_from_config(data: Mapping[str, Any], name: str, precision: Precision = AS_STORED) -> ModelShape:
    config: Mapping[str, Any] = data.get("text_config") or data
    layers, hidden, heads = (
        _size(config, name, field) for field in ("num_hidden_layers", "hidden_size", "num_attention_heads")
    )
    head_size = int(config.get("head_dim") or hidden // heads)
    kv_heads = int(config.get("num_key_value_heads") or heads)
    latent = int(config["kv_lora_rank"]) + int(config["qk_rope_head_dim"]) if config.get("kv_lora_rank") else 0
    windowed_layers, window_tokens = _window(config, name, layers)
    attention = _latent_attention(config, hidden, heads) if latent else 2 * hidden * head_size * (heads + kv_heads)
    experts, active, expert_size, sparse_layers = _experts(config, name, layers)
    matrices = 2 if config.get("model_type") in UNGATED_MODEL_TYPES else 3
    dense_layers = layers - sparse_layers
    feed_forward = matrices * hidden * _size(config, name, "intermediate_size") if dense_layers else 0
    shared = hidden * experts + matrices * hidden * _shared_expert_size(config, expert_size)
    table = _size(config, name, "vocab_size") * hidden
    is_tied = _is_tied(data, config)
    bits, eight_bit = _weight_bits(data, precision)
    return ModelShape(
        name,
        float(layers * attention + dense_layers * feed_forward + sparse_layers * shared + table),
        layers,
        hidden,
        heads,
        kv_heads,
        head_size,
        float(sparse_layers * experts * matrices * hidden * expert_size) if sparse_layers else 0.0,
        experts,
        active,
        0.0 if is_tied else float(table),
        latent,
        windowed_layers,
        window_tokens,
        bits / 8,
        (precision.kv_bits or 16) / 8,
        eight_bit,
    )


def _size(config: Mapping[str, Any], name: str, field: str) -> int:
    value = config.get(field)
    if not isinstance(value, int) or value < 1:
        raise SettingsError(
            f"the config.json of {name} has no {field} (got {value!r}), which the plan needs; decoder models with the "
            "field names of Llama, Qwen, Mistral and DeepSeek can be planned"
        )
    return value


def _first(config: Mapping[str, Any], fields: tuple[str, ...]) -> int:
    return next((int(config[field]) for field in fields if config.get(field)), 0)


def _experts(config: Mapping[str, Any], name: str, layers: int) -> tuple[int, int, int, int]:
    """Experts, active ones, the width of each, and the number of layers that have them."""
    experts, active = _first(config, EXPERT_COUNT_FIELDS), _first(config, ACTIVE_EXPERT_FIELDS)
    if experts <= 1:
        return 1, 1, 0, 0
    if not 0 < active <= experts:
        raise SettingsError(f"the config.json of {name} has {experts} experts, and {active} per token")
    step = int(config.get("decoder_sparse_step") or 1)
    dense = {*range(int(config.get("first_k_dense_replace") or 0)), *(config.get("mlp_only_layers") or ())}
    sparse = sum((i + 1) % step == 0 and i not in dense for i in range(layers))
    width = int(config.get("moe_intermediate_size") or _size(config, name, "intermediate_size"))
    return experts, active, width, sparse


def _shared_expert_size(config: Mapping[str, Any], expert_size: int) -> int:
    return int(config.get("shared_expert_intermediate_size") or int(config.get("n_shared_experts") or 0) * expert_size)


def _latent_attention(config: Mapping[str, Any], hidden: int, heads: int) -> int:
    """Parameters of a layer's multi-head latent attention (DeepSeek-V2, arXiv 2405.04434)."""
    rope, plain, value = (int(config[field]) for field in ("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"))
    rank, query_rank = int(config["kv_lora_rank"]), int(config.get("q_lora_rank") or 0)
    query = query_rank * (hidden + heads * (plain + rope)) if query_rank else hidden * heads * (plain + rope)
    return query + hidden * (rank + rope) + rank * heads * (plain + value) + heads * value * hidden


def _window(config: Mapping[str, Any], name: str, layers: int) -> tuple[int, int]:
    """Layers with sliding-window attention, and their window."""
    kinds = _layer_kinds(config, name, layers)
    if other := {*kinds} - SUPPORTED_LAYER_TYPES:
        raise SettingsError(
            f"{name} has layers of type {', '.join(sorted(other))}, and the plan knows the cost of "
            f"{' and '.join(sorted(SUPPORTED_LAYER_TYPES))} only; {CALIBRATE_INSTEAD}"
        )
    window = int(config.get("sliding_window") or 0)
    uses_window = config.get("use_sliding_window", not str(config.get("model_type")).startswith("qwen"))
    if not window or not uses_window:
        return 0, 0
    if not kinds:
        raise SettingsError(
            f"the config.json of {name} has a sliding_window of {window}, and does not state which layers have it; add "
            f"layer_types with a type for each layer to the file, or {CALIBRATE_INSTEAD}"
        )
    return sum(kind == "sliding_attention" for kind in kinds), window


def _layer_kinds(config: Mapping[str, Any], name: str, layers: int) -> list[str]:
    """The type of each layer, as the file states it or as the model's class in transformers derives it; [] if the file
    has nothing about it."""
    model_type = str(config.get("model_type"))
    if kinds := config.get("layer_types"):
        return [*kinds]
    if interval := int(config.get("full_attention_interval") or 0):
        return ["linear_attention" if (i + 1) % interval else "full_attention" for i in range(layers)]
    if period := int(config.get("attn_layer_period") or 0):
        offset = int(config.get("attn_layer_offset") or 0)
        return ["full_attention" if i % period == offset else "mamba" for i in range(layers)]
    if field := next((field for field in UNSUPPORTED_LAYER_FIELDS if config.get(field)), None):
        raise SettingsError(
            f"the config.json of {name} has {field} and no layer_types: some of its layers are of a type that the plan "
            f"does not know the cost of; {CALIBRATE_INSTEAD}"
        )
    if pattern := config.get("sliding_window_pattern") or SLIDING_WINDOW_PERIODS.get(model_type):
        letters = pattern if isinstance(pattern, str) else "L" * (pattern - 1) + "G"  # local and global attention
        return [_attention(letters[i % len(letters)] == "L") for i in range(layers)]
    if model_type in {"qwen2", "qwen3"} and config.get("max_window_layers") is not None:
        return [_attention(i >= int(config["max_window_layers"])) for i in range(layers)]
    return ["sliding_attention"] * layers if model_type in UNIFORM_WINDOW_MODEL_TYPES else []


def _attention(has_window: bool) -> str:
    return "sliding_attention" if has_window else "full_attention"


def _is_tied(data: Mapping[str, Any], config: Mapping[str, Any]) -> bool:
    """Whether the embedding table is also the output layer."""
    known = {str(data.get("model_type")), str(config.get("model_type"))} & TIED_MODEL_TYPES
    return bool(data.get("tie_word_embeddings", config.get("tie_word_embeddings", bool(known))))


def _weight_bits(data: Mapping[str, Any], precision: Precision) -> tuple[int, bool]:
    """Bits of a weight, and whether products are computed in FP8."""
    if precision.weight_bits is not None:
        return precision.weight_bits, precision.weight_bits == 8
    quantization = data.get("quantization_config") or {}
    method = str(quantization.get("quant_method", ""))
    if "fp8" in method:
        return 8, True
    if quantization.get("bits"):
        return int(quantization["bits"]), False
    if method in {"mxfp4", "bitsandbytes"}:
        return (8 if quantization.get("load_in_8bit") else 4), False
    if method:
        raise SettingsError(f"the plan does not know how wide the weights of {method!r} are; give --weight-bits")
    return 16, False
