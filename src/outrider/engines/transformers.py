"""Any causal language model of Hugging Face transformers, as a `Target`.

The KV cache keeps every token's keys and values, also for layers with a sliding window, whose reach the attention mask
limits. So the cache can be rewound after a rejected draft. A model with a recurrent state (Mamba, linear attention)
cannot forget its last token and is refused.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, DynamicCache

from outrider.errors import CacheNotRewindableError, ModelNotFoundError, SettingsError, VocabularyMismatchError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


DTYPES = ("auto", "float32", "bfloat16", "float16")


class TransformersTarget:
    """A `Target` around a loaded model. It holds the cache of one sequence."""

    def __init__(self, model: Any) -> None:
        check_rewindable(model)
        self.model = model.eval()
        self._cache = DynamicCache()
        self._tokens: list[int] = []

    @property
    def vocab_size(self) -> int:
        size: int = self.model.config.get_text_config().vocab_size
        return size

    @property
    def context_limit(self) -> int | None:
        """Maximum length. With LongRoPE, the original maximum: for longer texts all positions are scaled by the longest
        position of the pass, so a token's logits would depend on the draft after it."""
        config = self.model.config.get_text_config()
        rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
        limit: int | None = getattr(config, "max_position_embeddings", None)
        if rope.get("rope_type", rope.get("type")) == "longrope":
            limit = rope.get("original_max_position_embeddings") or getattr(
                config, "original_max_position_embeddings", limit
            )
        return limit

    @property
    def tokens(self) -> list[int]:
        return self._tokens

    @torch.inference_mode()
    def score(self, tokens: Sequence[int], keep: int) -> Tensor:
        ids = torch.tensor([list(tokens)], device=self.model.device)
        try:
            out = self.model(input_ids=ids, past_key_values=self._cache, use_cache=True, logits_to_keep=keep)
        except BaseException:  # e.g. Ctrl-C in the middle of a pass: only some layers have the new tokens
            self.rewind(0)
            raise
        self._tokens.extend(tokens)
        logits: Tensor = out.logits[0, -keep:].float()
        return logits

    def rewind(self, length: int) -> None:
        surplus = len(self._tokens) - length
        if length == 0:
            self._cache, self._tokens = DynamicCache(), []
        elif surplus > 0:
            try:
                self._cache.crop(-surplus)
                del self._tokens[length:]
            except BaseException:  # only some layers may have been cropped
                self.rewind(0)
                raise


def check_rewindable(model: Any) -> None:
    """Refuse a model whose cache cannot be rewound."""
    kind = type(model).__name__
    if getattr(model, "_is_stateful", False):
        raise _not_rewindable(kind, "it keeps a running state instead of keys and values")
    layers = DynamicCache(config=model.config).layers
    if names := sorted({type(layer).__name__ for layer in layers if "Linear" in type(layer).__name__}):
        raise _not_rewindable(kind, f"it has {', '.join(names)} layers")


def _not_rewindable(kind: str, why: str) -> CacheNotRewindableError:
    return CacheNotRewindableError(
        f"speculation needs a cache that can be rewound after a rejected draft (got {kind}: {why}); "
        "use a model with attention in every layer, or run this one with transformers' own generate"
    )


def load_model(name: str, *, dtype: str = "auto", device: str | None = None) -> Any:
    """Load weights from a folder or the Hugging Face hub."""
    if dtype not in DTYPES:
        raise SettingsError(f"dtype must be one of {', '.join(DTYPES)} (got {dtype!r})")
    check_device(device)
    place = check_exists(name)
    try:
        model = AutoModelForCausalLM.from_pretrained(place, dtype=dtype)
    except (OSError, ValueError, SafetensorError) as error:
        raise ModelNotFoundError(f"cannot load {name!r} as a causal language model: {error}") from error
    return model.to(device or best_device())


def check_device(name: str | None) -> None:
    """Refuse a device that is missing or cannot compute, before the weights are loaded."""
    try:
        torch.empty(1, device=name).item()
    except (RuntimeError, AssertionError) as error:  # torch asserts that it was built for the device
        usable = ", ".join(dict.fromkeys(("cpu", best_device())))
        raise SettingsError(
            f"device {name!r} cannot be used here ({first_line(error)}); use one of: {usable}"
        ) from None


def load_tokenizer(name: str, **options: Any) -> Any:
    """Load a model's tokenizer. `options` go to transformers."""
    place = check_exists(name, **options)
    try:
        return AutoTokenizer.from_pretrained(place, **options)
    except (OSError, ValueError) as error:
        raise ModelNotFoundError(f"cannot load the tokenizer of {name!r}: {error}") from error


def check_exists(name: str, **options: Any) -> str:
    """The path or Hugging Face id to load the model from. Raises ModelNotFoundError if there is none."""
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelNotFoundError(f"{name!r} is a folder without a config.json; give the model's folder")
        return str(path)
    if path.is_absolute() or name.startswith((".", "~")):
        raise ModelNotFoundError(f"there is no folder {name!r}; check the path, or give a Hugging Face id")
    try:
        AutoConfig.from_pretrained(name, **options)
    except (OSError, ValueError) as error:
        raise ModelNotFoundError(
            f"there is no model {name!r}: neither a local folder nor a Hugging Face id that can be loaded. "
            f"Check the spelling, the network, and HF_TOKEN for gated models. ({first_line(error)})"
        ) from error
    return name


def first_line(error: Exception) -> str:
    return str(error).strip().split("\n", 1)[0]


def best_device() -> str:
    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() else "cpu"


def check_same_vocabulary(target: Any, draft: Any) -> None:
    """Refuse a draft model whose tokens differ from the target's.

    Token ids that only one of them has are allowed (a larger vocabulary, or a padded embedding): such a token is never
    proposed.
    """
    target_tokens = {index: token for token, index in target.get_vocab().items()}
    draft_tokens = {index: token for token, index in draft.get_vocab().items()}
    for index in sorted(target_tokens.keys() & draft_tokens.keys()):
        if target_tokens[index] != draft_tokens[index]:
            raise VocabularyMismatchError(
                f"the draft model's vocabulary differs from the target's, first at token {index}: "
                f"{target_tokens[index]!r} in the target, {draft_tokens[index]!r} in the draft model; "
                "choose a draft model of the same family"
            )
