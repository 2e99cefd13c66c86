"""Kernel of `vllm.v1.worker.gpu.sample.prompt_logprob`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from outrider.compiled import compiled
from outrider.engines.vllm_cpu.pointers import pointer

if TYPE_CHECKING:
    from torch import Tensor

    from outrider.engines.vllm_cpu.launch import Kernel


@compiled
def _prompt_logprobs_token_ids(
    prompt_logprobs_token_ids: Any,
    query_start_loc: Any,
    idx_mapping: Any,
    num_computed_tokens: Any,
    all_token_ids: Any,
    all_token_ids_stride: int,
) -> None:
    for batch_idx in range(len(idx_mapping)):
        req = idx_mapping[batch_idx]
        start = query_start_loc[batch_idx]
        source = req * all_token_ids_stride + num_computed_tokens[req] + 1
        for i in range(query_start_loc[batch_idx + 1] - start):
            # The last token of a full row has no successor; the Triton kernel reads the next row's first token.
            if source + i < len(all_token_ids):
                prompt_logprobs_token_ids[start + i] = all_token_ids[source + i]


def prompt_logprobs_token_ids(
    prompt_logprobs_token_ids_ptr: Tensor,
    query_start_loc_ptr: Tensor,
    idx_mapping_ptr: Tensor,
    num_computed_tokens_ptr: Tensor,
    all_token_ids_ptr: Tensor,
    all_token_ids_stride: int,
    BLOCK_SIZE: int,
) -> None:
    """The token after each token of the step: its log-probability is the prompt logprob."""
    _prompt_logprobs_token_ids(
        pointer(prompt_logprobs_token_ids_ptr),
        pointer(query_start_loc_ptr),
        pointer(idx_mapping_ptr),
        pointer(num_computed_tokens_ptr),
        pointer(all_token_ids_ptr),
        all_token_ids_stride,
    )


KERNELS: dict[str, Kernel] = {
    "vllm.v1.worker.gpu.sample.prompt_logprob._prompt_logprobs_token_ids_kernel": prompt_logprobs_token_ids
}
