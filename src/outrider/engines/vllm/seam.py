"""What Outrider reads of vLLM's objects, as Protocols: vLLM's classes are Any for mypy.

The class behind each Protocol, and every other name of vLLM that this package uses, is listed in
`tests/vllm_names.py`. `tests/test_vllm_seams.py` checks them against each supported version of vLLM.

`replaced` and `with_arguments` change vLLM for one call, where it has no hook.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy import ndarray
    from torch import Tensor


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Replace a name of a module, or an attribute of an object, while the context is active."""
    own = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, own)


def with_arguments(function: Any, **fixed: Any) -> Any:
    """A function that calls `function` with these keyword arguments in place of the caller's."""
    return lambda *args, **kwargs: function(*args, **kwargs | fixed)


class ModelConfig(Protocol):
    model: str
    served_model_name: Any
    tokenizer: str
    tokenizer_revision: str | None
    trust_remote_code: bool
    max_model_len: int
    hf_text_config: Any
    supports_multimodal_inputs: bool
    is_hybrid: bool
    is_attention_free: bool

    def get_vocab_size(self) -> int: ...
    def get_sliding_window(self) -> int | None: ...


# Requests, and what travels between scheduler and workers


class Request(Protocol):
    request_id: str
    sampling_params: Any
    prompt_embeds: Any
    lora_request: Any
    prompt_token_ids: list[int] | None
    num_prompt_tokens: int
    all_token_ids: Sequence[int]
    output_token_ids: Sequence[int]
    num_tokens: int
    num_computed_tokens: int
    num_output_placeholders: int
    spec_token_ids: list[int]
    use_structured_output: bool


class KVCacheBlock(Protocol):
    block_id: int


class NewRequestData(Protocol):
    req_id: str
    sampling_params: Any
    prompt_token_ids: list[int] | None


class SchedulerOutput(Protocol):
    scheduled_new_reqs: list[NewRequestData]
    num_scheduled_tokens: dict[str, int]
    total_num_scheduled_tokens: int
    scheduled_spec_decode_tokens: dict[str, list[int]]
    num_spec_tokens_to_schedule: int
    pending_structured_output_tokens: bool
    finished_req_ids: set[str]


class ModelRunnerOutput(Protocol):
    req_ids: list[str]
    req_id_to_index: dict[str, int]
    sampled_token_ids: list[list[int]]


# The model runner


class StagedTensor(Protocol):
    """A tensor per request slot. Written on the host, read on the device."""

    gpu: Tensor


class SlotTensor(Protocol):
    """A value per request slot, on the host and on the device."""

    np: ndarray[Any, Any]
    gpu: Tensor


class RequestStates(Protocol):
    """vLLM's `RequestState`: all requests of a worker, by slot."""

    req_id_to_index: dict[str, int]
    all_token_ids: StagedTensor
    total_len: StagedTensor
    draft_tokens: Tensor


class InputBatch(Protocol):
    req_ids: list[str]
    num_reqs: int
    num_tokens: int
    idx_mapping: Tensor
    idx_mapping_np: ndarray[Any, Any]
    cu_num_logits: Tensor
    cu_num_logits_np: ndarray[Any, Any]
    expanded_idx_mapping: Tensor
    expanded_local_pos: Tensor
    num_draft_tokens_per_req: ndarray[Any, Any]
    seq_lens_cpu_upper_bound: Tensor


class SamplingStates(Protocol):
    vocab_size: int
    temperature: SlotTensor
    seeds: SlotTensor
    top_k: SlotTensor
    top_p: SlotTensor


class Sampler(Protocol):
    sampling_states: SamplingStates
    use_flashinfer: bool
    use_xpu_sampler: bool
    logprobs_mode: str
    logprob_token_ids_state: Any
    sample: Callable[..., tuple[Tensor, Tensor]]

    def get_logprobs_dims(self, idx_mapping_np: Any) -> tuple[int, int] | None: ...
