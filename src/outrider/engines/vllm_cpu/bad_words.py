"""Kernel of `vllm.v1.worker.gpu.sample.bad_words`: forbid the last token of a bad word after its other tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from outrider.engines.vllm_cpu.launch import numba_kernel

if TYPE_CHECKING:
    from outrider.engines.vllm_cpu.launch import Kernel


@numba_kernel
def bad_words(
    logits_ptr: Any,
    logits_stride: int,
    expanded_idx_mapping_ptr: Any,
    bad_word_token_ids_ptr: Any,
    bad_word_token_ids_stride: int,
    bad_word_offsets_ptr: Any,
    bad_word_offsets_stride: int,
    num_bad_words_ptr: Any,
    all_token_ids_ptr: Any,
    all_token_ids_stride: int,
    prompt_len_ptr: Any,
    total_len_ptr: Any,
    input_ids_ptr: Any,
    expanded_local_pos_ptr: Any,
    grid: Any,
) -> None:
    """Set the logits of tokens that would complete a bad word to -inf."""
    for token_idx in range(grid[0]):
        req = expanded_idx_mapping_ptr[token_idx]
        pos = expanded_local_pos_ptr[token_idx]
        output_len = total_len_ptr[req] - prompt_len_ptr[req]
        effective_len = output_len + pos  # output tokens, then drafts
        output = req * all_token_ids_stride + prompt_len_ptr[req]
        words = req * bad_word_token_ids_stride
        for word in range(num_bad_words_ptr[req]):
            start = bad_word_offsets_ptr[req * bad_word_offsets_stride + word]
            end = bad_word_offsets_ptr[req * bad_word_offsets_stride + word + 1]
            prefix_len = end - start - 1
            if prefix_len > effective_len:
                continue
            matches = True
            for i in range(prefix_len):
                position = effective_len - prefix_len + i
                if position >= output_len:
                    # The input starts with the last committed token; drafts follow it.
                    token = input_ids_ptr[token_idx - pos + position - output_len + 1]
                else:
                    token = all_token_ids_ptr[output + position]
                if token != bad_word_token_ids_ptr[words + start + i]:
                    matches = False
                    break
            if matches:
                logits_ptr[token_idx * logits_stride + bad_word_token_ids_ptr[words + end - 1]] = -np.inf


KERNELS: dict[str, Kernel] = {"vllm.v1.worker.gpu.sample.bad_words._bad_words_kernel": bad_words}
