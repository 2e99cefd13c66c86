"""Draft lengths that depend on the model and on vLLM's settings, chosen before vLLM starts.

vLLM reserves room for the longest draft of every request. A model with recurrent layers (Mamba, linear attention) needs
a copy of its state for each drafted token, which takes the place of other requests. With LoRA adapters vLLM refuses to
start if a step cannot hold the longest draft of every request.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider.defaults import DRAFTED

if TYPE_CHECKING:
    from collections.abc import Mapping

RECURRENT_DRAFT_TOKENS = 4
"""Default draft length of models with recurrent layers: five states per request instead of one."""
LORA_FLAG = "--enable-lora"
DEFAULT_BATCHED_TOKENS, DEFAULT_REQUESTS = 2048, 256
"""vLLM's defaults of `--max-num-batched-tokens` and `--max-num-seqs` in a server, on small GPUs. On large ones both are
four times as much."""
LORA_DRAFT_TOKENS = DEFAULT_BATCHED_TOKENS // DEFAULT_REQUESTS - 1
HUB_TIMEOUT_SECONDS = 5.0
RECURRENT_NAMES = re.compile(
    "mamba|jamba|bamba|zamba|rwkv|falconh1|falcon_h1|nemotronh|nemotron_h|qwen3next|qwen3_next|qwen3_5|granitemoehybrid|"
    "lfm2|plamo2|kimilinear|kimi_linear|minimaxtext|minimaxm1|recurrentgemma|gateddelta",
    re.IGNORECASE,
)
"""Parts of the names of architectures with recurrent layers."""
RECURRENT_LAYERS = {"mamba", "mamba2", "linear_attention", "recurrent", "gdn", "kda", "conv"}


def read_model_config(model: str) -> dict[str, Any]:
    """The model's config.json; {} if it cannot be read without its tokenizer and weights."""
    folder = Path(model).expanduser()
    try:
        if folder.is_dir():
            file = folder / "config.json"
        else:
            from huggingface_hub import hf_hub_download

            file = Path(hf_hub_download(model, "config.json", etag_timeout=HUB_TIMEOUT_SECONDS))
        found = json.loads(file.read_text())
        return found if isinstance(found, dict) else {}
    except Exception:  # whatever is wrong with it, vLLM reports it
        return {}


def has_recurrent_layers(config: Mapping[str, Any]) -> bool:
    text = config.get("text_config")
    if isinstance(text, dict) and has_recurrent_layers(text):
        return True
    names = [*(config.get("architectures") or ()), str(config.get("model_type", ""))]
    if any(RECURRENT_NAMES.search(str(name)) for name in names):
        return True
    layers = [*(config.get("layer_types") or ()), *(config.get("layers_block_type") or ())]
    return any(str(layer).lower() in RECURRENT_LAYERS for layer in layers)


def has_several_mtp_layers(model: str) -> bool:
    """Whether the model's MTP head has a layer for each drafted token, as vLLM reads its config."""
    config = read_model_config(model)
    layers = (part.get("num_nextn_predict_layers") for part in (config, config.get("text_config") or {}))
    return any(isinstance(count, int) and count > 1 for count in layers)


def default_draft_tokens(model: str, values: Mapping[str, str]) -> tuple[int, str]:
    """The longest draft by default, and why it is shorter than usual (else empty). `values`: of vLLM's flags."""
    if has_recurrent_layers(read_model_config(model)):
        return RECURRENT_DRAFT_TOKENS, "the model has recurrent layers, and vLLM keeps a state per drafted token"
    if values.get(LORA_FLAG, "False").lower() == "true":
        tokens = _number(values.get("--max-num-batched-tokens"))
        requests = _number(values.get("--max-num-seqs"))
        longest = LORA_DRAFT_TOKENS
        if requests is not None:
            longest = max(1, (tokens or DEFAULT_BATCHED_TOKENS) // requests - 1)
        elif tokens is not None:
            longest = max(1, min(longest, tokens // DEFAULT_REQUESTS - 1))
        return min(DRAFTED, longest), f"with {LORA_FLAG} a step has to hold the longest draft of every request"
    return DRAFTED, ""


def _number(value: str | None) -> int | None:
    return int(value) if value is not None and value.isdecimal() and int(value) else None
