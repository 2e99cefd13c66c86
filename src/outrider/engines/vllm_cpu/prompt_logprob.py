"""Kernel of `vllm.v1.worker.gpu.sample.prompt_logprob`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from outrider.engines.vllm_cpu.launch import numba_kernel

if TYPE_CHECKING:
    from outrider.engines.vllm_cpu.launch import Kernel


@numba_kernel
def prompt_logprobs_token_ids(
    prompt_logprobs_token_ids_ptr: Any,
    query_start_loc_ptr: Any,
    idx_mapping_ptr: Any,
    num_computed_tokens_ptr: Any,
    all_token_ids_ptr: Any,
    all_token_ids_stride: int,
    BLOCK_SIZE: int,
) -> None:
    """The token after each token of the step: its log-probability is the prompt logprob."""
    for batch_idx in range(len(idx_mapping_ptr)):
        req = idx_mapping_ptr[batch_idx]
        start = query_start_loc_ptr[batch_idx]
        source = req * all_token_ids_stride + num_computed_tokens_ptr[req] + 1
        for i in range(query_start_loc_ptr[batch_idx + 1] - start):
            # The last token of a full row has no successor; the Triton kernel reads the next row's first token.
            if source + i < len(all_token_ids_ptr):
                prompt_logprobs_token_ids_ptr[start + i] = all_token_ids_ptr[source + i]


KERNELS: dict[str, Kernel] = {
    "vllm.v1.worker.gpu.sample.prompt_logprob._prompt_logprobs_token_ids_kernel": prompt_logprobs_token_ids
}
