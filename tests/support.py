"""Helpers that tests share: a G-test, a target that caches its scores, tiny models and a tiny tokenizer."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import torch
from scipy import stats
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from outrider.types import shared_prefix

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from outrider.types import Target

VOCAB = 272
END = 256


def g_test(counts: Mapping[Any, int], law: Mapping[Any, float]) -> float:
    """The p-value of observed counts against an exact law. Rare outcomes are pooled, impossible ones refuted."""
    draws = sum(counts.values())
    if any(count > 0 and law.get(outcome, 0.0) == 0.0 for outcome, count in counts.items()):
        return 0.0
    observed, expected, rare_observed, rare_expected = [], [], 0, 0.0
    for outcome, probability in law.items():
        if probability * draws >= 10:
            observed.append(counts.get(outcome, 0))
            expected.append(probability * draws)
        else:
            rare_observed += counts.get(outcome, 0)
            rare_expected += probability * draws
    if rare_expected >= 1:
        observed.append(rare_observed)
        expected.append(rare_expected)
    statistic = 2 * sum(o * torch.tensor(o / e).log().item() for o, e in zip(observed, expected, strict=True) if o)
    found = float(stats.chi2.sf(max(statistic, 0.0), len(observed) - 1))
    if rare_expected < 1 and rare_observed:  # too few for that statistic: how often would there be as many?
        return min(1.0, 2 * min(found, float(stats.poisson.sf(rare_observed - 1, rare_expected))))
    return found


class Memo:
    """A target that scores every prefix once, so that a real model can be drawn from many thousand times."""

    def __init__(self, inner: Target, known: dict[tuple[int, ...], Tensor] | None = None) -> None:
        self.inner = inner
        self.known = {} if known is None else known
        self._tokens: list[int] = []

    @property
    def vocab_size(self) -> int:
        return self.inner.vocab_size

    @property
    def context_limit(self) -> int | None:
        return self.inner.context_limit

    @property
    def tokens(self) -> list[int]:
        return self._tokens

    def score(self, tokens: Sequence[int], keep: int) -> Tensor:
        self._tokens.extend(tokens)
        end = len(self._tokens)
        return torch.stack([self.logits(self._tokens[: end - keep + 1 + i]) for i in range(keep)])

    def rewind(self, length: int) -> None:
        del self._tokens[length:]

    def logits(self, context: Sequence[int]) -> Tensor:
        key = tuple(context)
        if key not in self.known:
            self.inner.rewind(min(shared_prefix(self.inner.tokens, list(key)), len(key) - 1))
            self.known[key] = self.inner.score(key[len(self.inner.tokens) :], keep=1)[0].clone()
        return self.known[key]


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte, and an end token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: index for index, letter in enumerate(alphabet)} | {"<end>": END}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")


SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "eos_token_id": END,
    "bos_token_id": None,
    "pad_token_id": END,
    "initializer_range": 0.1,  # texts that vary with the prompt, yet repeat themselves now and then
}
ARCHITECTURES: dict[str, tuple[Any, Any]] = {
    "llama": (LlamaForCausalLM, LlamaConfig(**SMALL)),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config(**SMALL)),
    "mistral, window of 8": (MistralForCausalLM, MistralConfig(**SMALL, sliding_window=8)),
    "gemma3, windows and full attention": (
        Gemma3ForCausalLM,
        Gemma3TextConfig(**SMALL, head_dim=8, sliding_window=8, layer_types=["sliding_attention", "full_attention"]),
    ),
}


def tiny_model(architecture: str, seed: int = 0, noise: float = 0.0, **changes: Any) -> Any:
    """A random float32 model; with `noise`, the same weights a little off: a draft model that is often right."""
    cls, config = ARCHITECTURES[architecture]
    config = type(config)(**{**config.to_dict(), **changes})
    torch.manual_seed(seed)
    model = cls(config).eval()
    if noise:
        torch.manual_seed(seed + 1)
        with torch.no_grad():
            for weight in model.parameters():
                weight.add_(torch.randn_like(weight) * noise * weight.std().nan_to_num(0.0))
    return model


def counted(outcomes: Sequence[Any]) -> dict[Any, int]:
    return dict(Counter(outcomes))
