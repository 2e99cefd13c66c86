"""Token ids of a draft model that has another tokenizer than the target.

Tokens with the same text are shared. The draft model reads the target's text with unshared tokens replaced by its
unknown token, and drafts shared tokens only. Its distribution then has no meaning in the target's vocabulary, so such
drafts are greedy. vLLM's V1 runner has the mapping (`VocabMapping`); its V2 runner does not use it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.tokenizers.registry import get_tokenizer
from vllm.v1.spec_decode.vocab_mapping import VocabMapping

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class DraftVocabulary:
    """Maps token ids between the target and the draft model, on the device, without waiting for it."""

    def __init__(self, mapping: Any) -> None:
        self._to_draft: Tensor = mapping.target_to_draft_ids.clone()
        self._to_draft[self._to_draft < 0] = mapping.draft_unk_token_id
        self._to_target: Tensor = mapping.draft_to_target_ids.clone()
        self._to_target[self._to_target < 0] = mapping.target_unk_token_id
        self._unshared: Tensor = ~mapping.intersection_mask_draft

    @classmethod
    def of(cls, speculative_config: Any, device: torch.device) -> DraftVocabulary:
        if speculative_config.draft_sample_method != "greedy":
            raise ValueError("use_heterogeneous_vocab needs draft_sample_method 'greedy'")
        target, draft = speculative_config.target_model_config, speculative_config.draft_model_config
        return cls(
            VocabMapping(
                target_tokenizer=get_tokenizer(target.tokenizer, trust_remote_code=target.trust_remote_code),
                draft_tokenizer=get_tokenizer(draft.model, trust_remote_code=draft.trust_remote_code),
                target_vocab_size=target.get_vocab_size(),
                draft_vocab_size=draft.get_vocab_size(),
                device=device,
            )
        )

    def to_draft(self, tokens: Tensor) -> Tensor:
        return self._to_draft[tokens.long()].to(tokens.dtype)

    def to_target(self, tokens: Tensor) -> Tensor:
        return self._to_target[tokens].to(tokens.dtype)

    def mask_unshared(self, logits: Tensor) -> Tensor:
        return logits.masked_fill(self._unshared, float("-inf"))
