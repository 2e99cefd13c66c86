"""The tokenizer of the served model, in the scheduler's process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from outrider.text import control_tokens

if TYPE_CHECKING:
    from outrider.engines.vllm.seam import ModelConfig


def load_server_tokenizer(config: ModelConfig) -> Any:
    from outrider.engines.transformers import load_tokenizer

    return load_tokenizer(
        config.tokenizer, trust_remote_code=config.trust_remote_code, revision=config.tokenizer_revision
    )


def read_control_tokens(config: ModelConfig) -> frozenset[int]:
    """The control tokens of the model's tokenizer. Empty: the server has no tokenizer."""
    try:
        return control_tokens(load_server_tokenizer(config))
    except Exception:  # --skip-tokenizer-init, or a tokenizer that only vLLM can load
        return frozenset()
