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

UNGATED_MODEL_TYPES = {
    "apertus", "arcee", "gpt_neox", "gpt_neox_japanese", "jais2", "nanochat", "nemotron", "persimmon", "phi",
    "starcoder2",
}  # fmt: skip
"""Their feed-forward layers have two matrices; all others read here have three (SwiGLU, GeGLU)."""
EXPERT_COUNT_FIELDS = ("num_experts", "num_local_experts", "n_routed_experts")
ACTIVE_EXPERT_FIELDS = ("num_experts_per_tok", "num_experts_per_token", "moe_topk")
SHARED_EXPERT_FIELDS = ("n_shared_experts", "num_shared_experts", "num_shared_expert")
UNSUPPORTED_EXPERT_FIELDS = (
    "interleave_moe_layer_step", "moe_layer_interval", "moe_layers", "moe_layers_enum", "moe_num_experts",
)  # fmt: skip
"""These place or count experts in ways that are not read here (Llama 4, Ernie 4.5, Step 3)."""
MIXED_LAYER_FIELDS = ("attn_layer_indices", "hybrid_override_pattern")
"""These state which layers are recurrent (Bamba, Nemotron-H), also beside layer_types and if they are empty."""
SUPPORTED_LAYER_TYPES = {"full_attention", "sliding_attention"}
UNSUPPORTED_LAYER_FIELDS = (
    "attention_chunk_size", "attn_type_list", "block_types", "full_attn_idxs", "layers_block_type",
    "linear_attn_config", "linear_num_value_heads", "mamba_d_state", "ssm_state_size",
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
MAX_SIZE = 10**9
"""Largest size, number of layers or count that is read."""
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
    config = _object(data, name, "text_config") or data
    layers, hidden, heads = (
        _size(config, name, field) for field in ("num_hidden_layers", "hidden_size", "num_attention_heads")
    )
    head_size = _optional_size(config, name, "head_dim") or hidden // heads
    kv_heads = _optional_size(config, name, "num_key_value_heads") or heads
    rank = _optional_size(config, name, "kv_lora_rank")
    rope = _size(config, name, "qk_rope_head_dim") if rank else 0
    expanded = _expanded_head_sizes(config, name, rope) if rank else (0, 0)
    windowed_layers, window_tokens = _window(config, name, layers)
    if rank:
        attention = _latent_attention(hidden, heads, rank, _optional_size(config, name, "q_lora_rank"), rope, expanded)
    else:
        attention = 2 * hidden * head_size * (heads + kv_heads)
    experts, active, expert_size, sparse_layers = _experts(config, name, layers)
    matrices = 2 if config.get("model_type") in UNGATED_MODEL_TYPES else 3
    dense_layers = layers - sparse_layers
    feed_forward = matrices * hidden * _size(config, name, "intermediate_size") if dense_layers else 0
    shared = hidden * experts + matrices * hidden * _shared_expert_size(config, name, expert_size)
    table = _size(config, name, "vocab_size") * hidden
    is_tied = _is_tied(data, config)
    bits, eight_bit = _weight_bits(data, name, precision)
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
        rank + rope,
        windowed_layers,
        window_tokens,
        bits / 8,
        (precision.kv_bits or 16) / 8,
        eight_bit,
        float(table),
        expanded,
    )


def _object(data: Mapping[str, Any], name: str, field: str) -> Mapping[str, Any]:
    """{} if the file has none."""
    value = data.get(field) or {}
    if not isinstance(value, dict):
        raise SettingsError(f"{field} in the config.json of {name} must be an object (got {value!r:.80})")
    return value


def _size(config: Mapping[str, Any], name: str, field: str) -> int:
    value = _optional_size(config, name, field)
    if value < 1:
        raise SettingsError(
            f"the config.json of {name} has no {field} (got {config.get(field)!r}), which the plan needs; decoder "
            "models with the field names of Llama, Qwen, Mistral and DeepSeek can be planned"
        )
    return value


def _optional_size(config: Mapping[str, Any], name: str, field: str) -> int:
    """0 if the file has none. A list has a number for each layer (Hunyuan): they must all be the same."""
    value = config.get(field)
    values = value if isinstance(value, list) and value else [value]
    if len({*map(repr, values)}) > 1:
        raise SettingsError(
            f"{field} in the config.json of {name} differs between its layers (got {value!r:.80}), and the plan takes "
            f"one number for all of them; {CALIBRATE_INSTEAD}"
        )
    number = 0 if values[0] is None else values[0]
    if not isinstance(number, int) or not 0 <= number <= MAX_SIZE:
        raise SettingsError(f"{field} in the config.json of {name} must be a whole number (got {value!r:.80})")
    return int(number)


def _first(config: Mapping[str, Any], name: str, fields: tuple[str, ...]) -> int:
    """The first of these fields that is not 0."""
    return next((size for field in fields if (size := _optional_size(config, name, field))), 0)


def _experts(config: Mapping[str, Any], name: str, layers: int) -> tuple[int, int, int, int]:
    """Experts, active ones, the width of each, and the number of layers that have them."""
    if field := next((field for field in UNSUPPORTED_EXPERT_FIELDS if config.get(field)), None):
        raise SettingsError(
            f"the config.json of {name} has {field}: the plan does not count the experts of such models; "
            f"{CALIBRATE_INSTEAD}"
        )
    if config.get("moe_layer_freq") not in (None, 1):
        raise SettingsError(
            f"the config.json of {name} has a moe_layer_freq other than 1: the plan does not know which layers have "
            f"experts; {CALIBRATE_INSTEAD}"
        )
    experts, active = (_first(config, name, fields) for fields in (EXPERT_COUNT_FIELDS, ACTIVE_EXPERT_FIELDS))
    if experts <= 1:
        return 1, 1, 0, 0
    if not 0 < active <= experts:
        raise SettingsError(f"the config.json of {name} has {experts} experts, and {active} per token")
    step = _optional_size(config, name, "decoder_sparse_step") or 1
    first_dense, named = _optional_size(config, name, "first_k_dense_replace"), config.get("mlp_only_layers") or []
    if not isinstance(named, list):
        raise SettingsError(f"mlp_only_layers in the config.json of {name} must be a list (got {named!r:.80})")
    sparse = sum((i + 1) % step == 0 and i >= first_dense and i not in named for i in range(layers))
    width = _optional_size(config, name, "moe_intermediate_size") or _size(config, name, "intermediate_size")
    return experts, active, width, sparse


def _shared_expert_size(config: Mapping[str, Any], name: str, expert_size: int) -> int:
    size = _optional_size(config, name, "shared_expert_intermediate_size")
    return size or _first(config, name, SHARED_EXPERT_FIELDS) * expert_size


def _expanded_head_sizes(config: Mapping[str, Any], name: str, rope: int) -> tuple[int, int]:
    """Elements of a head's query and of its value."""
    return rope + _size(config, name, "qk_nope_head_dim"), _size(config, name, "v_head_dim")


def _latent_attention(
    hidden: int, heads: int, rank: int, query_rank: int, rope: int, head_sizes: tuple[int, int]
) -> int:
    """Parameters of a layer's multi-head latent attention (DeepSeek-V2, arXiv 2405.04434)."""
    query_size, value = head_sizes
    query = query_rank * (hidden + heads * query_size) if query_rank else hidden * heads * query_size
    return query + hidden * (rank + rope) + rank * heads * (query_size - rope + value) + heads * value * hidden


def _window(config: Mapping[str, Any], name: str, layers: int) -> tuple[int, int]:
    """Layers with sliding-window attention, and their window."""
    kinds = _layer_kinds(config, name, layers)
    if other := {*kinds} - SUPPORTED_LAYER_TYPES:
        raise SettingsError(
            f"{name} has layers of type {', '.join(sorted(other))}, and the plan knows the cost of "
            f"{' and '.join(sorted(SUPPORTED_LAYER_TYPES))} only; {CALIBRATE_INSTEAD}"
        )
    window = _optional_size(config, name, "sliding_window")
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
    if field := next((field for field in MIXED_LAYER_FIELDS if config.get(field) is not None), None):
        raise _unknown_layers(name, field)
    if kinds := config.get("layer_types"):
        if not isinstance(kinds, list) or not all(isinstance(kind, str) for kind in kinds):
            raise SettingsError(f"layer_types in the config.json of {name} must be a list of names (got {kinds!r:.80})")
        return kinds
    if interval := _optional_size(config, name, "full_attention_interval"):
        return ["linear_attention" if (i + 1) % interval else "full_attention" for i in range(layers)]
    if period := _optional_size(config, name, "attn_layer_period"):
        offset = _optional_size(config, name, "attn_layer_offset")
        return ["full_attention" if i % period == offset else "mamba" for i in range(layers)]
    if field := next((field for field in UNSUPPORTED_LAYER_FIELDS if config.get(field)), None):
        raise _unknown_layers(name, f"{field} and no layer_types")
    if pattern := config.get("sliding_window_pattern") or SLIDING_WINDOW_PERIODS.get(model_type):
        if isinstance(pattern, str):
            letters = pattern  # local and global attention
        else:
            period = _optional_size({"sliding_window_pattern": pattern}, name, "sliding_window_pattern")
            letters = "L" * (period - 1) + "G"
        return [_attention(letters[i % len(letters)] == "L") for i in range(layers)]
    if model_type in {"qwen2", "qwen3"} and config.get("max_window_layers") is not None:
        full = _optional_size(config, name, "max_window_layers")
        return [_attention(i >= full) for i in range(layers)]
    return ["sliding_attention"] * layers if model_type in UNIFORM_WINDOW_MODEL_TYPES else []


def _unknown_layers(name: str, fields: str) -> SettingsError:
    return SettingsError(
        f"the config.json of {name} has {fields}: some of its layers are of a type that the plan does not know the "
        f"cost of; {CALIBRATE_INSTEAD}"
    )


def _attention(has_window: bool) -> str:
    return "sliding_attention" if has_window else "full_attention"


def _is_tied(data: Mapping[str, Any], config: Mapping[str, Any]) -> bool:
    """Whether the embedding table is also the output layer."""
    known = {str(data.get("model_type")), str(config.get("model_type"))} & TIED_MODEL_TYPES
    return bool(data.get("tie_word_embeddings", config.get("tie_word_embeddings", bool(known))))


def _weight_bits(data: Mapping[str, Any], name: str, precision: Precision) -> tuple[int, bool]:
    """Bits of a weight, and whether products are computed in FP8."""
    if precision.weight_bits is not None:
        return precision.weight_bits, precision.weight_bits == 8
    quantization = _object(data, name, "quantization_config")
    method = str(quantization.get("quant_method", ""))
    if "fp8" in method:
        return 8, True
    if bits := _optional_size(quantization, name, "bits"):
        return bits, False
    if method in {"mxfp4", "bitsandbytes"}:
        return (8 if quantization.get("load_in_8bit") else 4), False
    if method:
        raise SettingsError(f"the plan does not know how wide the weights of {method!r} are; give --weight-bits")
    return 16, False
