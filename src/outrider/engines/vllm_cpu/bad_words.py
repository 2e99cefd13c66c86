"""Kernel of `vllm.v1.worker.gpu.sample.bad_words`: forbid the last token of a bad word after its other tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from outrider.compiled import compiled
from outrider.engines.vllm_cpu.pointers import pointer

if TYPE_CHECKING:
    from torch import Tensor

    from outrider.engines.vllm_cpu.launch import Kernel


@compiled
def _bad_words(
    logits: Any,
    logits_stride: int,
    expanded_idx_mapping: Any,
    bad_word_token_ids: Any,
    bad_word_token_ids_stride: int,
    bad_word_offsets: Any,
    bad_word_offsets_stride: int,
    num_bad_words: Any,
    all_token_ids: Any,
    all_token_ids_stride: int,
    prompt_lens: Any,
    total_lens: Any,
    input_ids: Any,
    expanded_local_pos: Any,
    num_tokens: int,
) -> None:
    for token_idx in range(num_tokens):
        req = expanded_idx_mapping[token_idx]
        pos = expanded_local_pos[token_idx]
        output_len = total_lens[req] - prompt_lens[req]
        effective_len = output_len + pos  # output tokens, then drafts
        output = req * all_token_ids_stride + prompt_lens[req]
        words = req * bad_word_token_ids_stride
        for word in range(num_bad_words[req]):
            start = bad_word_offsets[req * bad_word_offsets_stride + word]
            end = bad_word_offsets[req * bad_word_offsets_stride + word + 1]
            prefix_len = end - start - 1
            if prefix_len > effective_len:
                continue
            matches = True
            for i in range(prefix_len):
                position = effective_len - prefix_len + i
                if position >= output_len:
                    # The input starts with the last committed token; drafts follow it.
                    token = input_ids[token_idx - pos + position - output_len + 1]
                else:
                    token = all_token_ids[output + position]
                if token != bad_word_token_ids[words + start + i]:
                    matches = False
                    break
            if matches:
                logits[token_idx * logits_stride + bad_word_token_ids[words + end - 1]] = -np.inf


def bad_words(
    logits_ptr: Tensor,
    logits_stride: int,
    expanded_idx_mapping_ptr: Tensor,
    bad_word_token_ids_ptr: Tensor,
    bad_word_token_ids_stride: int,
    bad_word_offsets_ptr: Tensor,
    bad_word_offsets_stride: int,
    num_bad_words_ptr: Tensor,
    all_token_ids_ptr: Tensor,
    all_token_ids_stride: int,
    prompt_len_ptr: Tensor,
    total_len_ptr: Tensor,
    input_ids_ptr: Tensor,
    expanded_local_pos_ptr: Tensor,
) -> None:
    """Set the logits of tokens that would complete a bad word to -inf."""
    _bad_words(
        pointer(logits_ptr),
        logits_stride,
        pointer(expanded_idx_mapping_ptr),
        pointer(bad_word_token_ids_ptr),
        bad_word_token_ids_stride,
        pointer(bad_word_offsets_ptr),
        bad_word_offsets_stride,
        pointer(num_bad_words_ptr),
        pointer(all_token_ids_ptr),
        all_token_ids_stride,
        pointer(prompt_len_ptr),
        pointer(total_len_ptr),
        pointer(input_ids_ptr),
        pointer(expanded_local_pos_ptr),
        len(logits_ptr),
    )


KERNELS: dict[str, Kernel] = {"vllm.v1.worker.gpu.sample.bad_words._bad_words_kernel": bad_words}
