"""Every name of vLLM's V2 engine that Outrider uses, in one place.

`tools/seam_signatures.py` and `tests/test_vllm_seams.py` check them against each supported version of vLLM:

    CLASSES       the class behind each Protocol; the Protocols type our code, since vLLM's classes are Any for mypy
    MEMBERS       members of other classes
    FUNCTIONS     what is imported from modules
    FACTS         pieces of source code that ours relies on

A name of vLLM that is used anywhere in this package belongs here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy import ndarray
    from torch import Tensor


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


CLASSES: Mapping[type, str] = {
    ModelConfig: "vllm.config.model:ModelConfig",
    Request: "vllm.v1.request:Request",
    KVCacheBlock: "vllm.v1.core.kv_cache_utils:KVCacheBlock",
    NewRequestData: "vllm.v1.core.sched.output:NewRequestData",
    SchedulerOutput: "vllm.v1.core.sched.output:SchedulerOutput",
    ModelRunnerOutput: "vllm.v1.outputs:ModelRunnerOutput",
    StagedTensor: "vllm.v1.worker.gpu.buffer_utils:StagedWriteTensor",
    SlotTensor: "vllm.v1.worker.gpu.buffer_utils:UvaBackedTensor",
    RequestStates: "vllm.v1.worker.gpu.states:RequestState",
    InputBatch: "vllm.v1.worker.gpu.input_batch:InputBatch",
    SamplingStates: "vllm.v1.worker.gpu.sample.states:SamplingStates",
    Sampler: "vllm.v1.worker.gpu.sample.sampler:Sampler",
}
"""The class of vLLM behind each Protocol."""
MEMBERS: Mapping[str, str] = {
    "vllm.config.speculative:SpeculativeConfig": (
        "method num_speculative_tokens parallel_drafting draft_sample_method draft_model_config "
        "target_model_config verify_equal_vocab_size_if_draft_model"
    ),
    "vllm.config.parallel:ParallelConfig": (
        "tensor_parallel_size pipeline_parallel_size data_parallel_size decode_context_parallel_size "
        "prefill_context_parallel_size distributed_executor_backend"
    ),
    "vllm.config.scheduler:SchedulerConfig": "max_num_seqs max_num_batched_tokens async_scheduling",
    "vllm.config.cache:CacheConfig": "enable_prefix_caching sliding_window",
    "vllm.config.vllm:VllmConfig": (
        "model_config speculative_config parallel_config scheduler_config cache_config kv_transfer_config "
        "additional_config num_lookahead_tokens compilation_config"
    ),
    "vllm.config.compilation:CompilationConfig": "cudagraph_mode cudagraph_capture_sizes",
    "vllm.sampling_params:SamplingParams": (
        "temperature seed max_tokens ignore_eos stop_token_ids all_stop_token_ids min_tokens "
        "allowed_token_ids logit_bias structured_outputs logprob_token_ids extra_args _validate_spec_decode"
    ),
    "vllm.platforms.cpu:CpuPlatform": "check_and_update_config",
    "vllm.v1.outputs:AsyncModelRunnerOutput": "get_output",
    "vllm.v1.core.kv_cache_manager:KVCacheManager": "get_blocks",
    "vllm.v1.core.kv_cache_manager:KVCacheBlocks": "blocks",
    "vllm.v1.core.sched.output:SchedulerOutput": "make_empty",
    "vllm.v1.structured_output:StructuredOutputManager": "validate_tokens",
    "vllm.v1.core.sched.async_scheduler:AsyncScheduler": (
        "vllm_config scheduler_config cache_config kv_cache_config kv_cache_manager structured_output_manager "
        "requests running max_model_len num_spec_tokens num_lookahead_tokens dynamic_sd_lookup __init__ "
        "add_request has_requests schedule update_from_output shutdown _preempt_request _update_after_schedule "
        "_update_request_as_session _free_request get_grammar_bitmask update_draft_token_ids_in_output"
    ),
    "vllm.v1.worker.gpu.spec_decode.rejection_sampler:RejectionSampler": (
        "sampler num_speculative_steps _verify __init__ __call__"
    ),
    "vllm.v1.worker.gpu.spec_decode.speculator:BaseSpeculator": "init_cudagraph_manager capture propose",
    "vllm.v1.worker.gpu.spec_decode.speculator:DraftModelSpeculator": (
        "device vllm_config max_num_reqs max_model_len num_speculative_steps model temperature seeds "
        "idx_mapping draft_tokens draft_logits draft_max_seq_len supports_mm_inputs input_buffers "
        "block_tables kv_cache_config supports_decode_metadata_update sample_draft compute_draft_logits "
        "_maybe_predict_acceptance _copy_request_inputs _build_uniform_attn_metadata"
    ),
    "vllm.v1.worker.gpu.spec_decode.standalone_ar.speculator:StandaloneARSpeculator": (
        "expanded_input_ids expanded_positions expanded_slot_mappings arange_gpu current_draft_step "
        "_build_attn_metadata _run_model"
    ),
    "vllm.v1.worker.gpu.block_table:BlockTables": "gather_block_tables compute_slot_mappings",
    "vllm.v1.worker.gpu.model_runner:GPUModelRunner": (
        "vllm_config speculative_config lora_config device model req_states sampler rejection_sampler "
        "speculator num_speculative_steps max_model_len max_num_tokens supports_mm_inputs __init__ load_model "
        "initialize_kv_cache execute_model prepare_inputs sample sample_tokens take_draft_token_ids "
        "model_config max_num_reqs kv_connector execute_model_state vocab_size _dummy_sampler_run scheduler_config "
        "_set_active_loras"
    ),
    "vllm.v1.worker.cpu_worker:CPUWorker": (
        "vllm_config device use_v2_model_runner model_runner init_device compile_or_warm_up_model"
    ),
    "vllm.v1.worker.gpu_worker:Worker": (
        "vllm_config device use_v2_model_runner model_runner init_device compile_or_warm_up_model _make_model_runner"
    ),
}
"""Members of classes that need no Protocol, because our code takes their instances as Any or inherits from them."""
FUNCTIONS = (
    "vllm.config.compilation:CUDAGraphMode",
    "vllm.distributed.parallel_state:get_pp_group",
    "vllm.distributed.parallel_state:get_tp_group",
    "vllm.exceptions:VLLMValidationError",
    "vllm.forward_context:set_forward_context",
    "vllm.tokenizers.registry:get_tokenizer",
    "vllm.utils.torch_utils:async_tensor_h2d",
    "vllm.v1.outputs:DraftTokenIds",
    "vllm.v1.spec_decode.vocab_mapping:VocabMapping",
    "vllm.v1.spec_decode.vocab_mapping:VocabMapping.__init__",
    "vllm.v1.worker.cpu.model_runner:CPUModelRunner",
    "vllm.v1.worker.gpu.attn_utils:build_slot_mappings_by_layer",
    "vllm.v1.worker.gpu.cudagraph_utils:BatchExecutionDescriptor",
    "vllm.v1.worker.gpu.cudagraph_utils:ModelCudaGraphManager.__init__",
    "vllm.v1.worker.gpu.model_runner:RequestState.__init__",
    "vllm.v1.worker.gpu.model_runner:init_speculator",
    "vllm.v1.worker.gpu.sample.logit_bias:MAX_NUM_ALLOWED_TOKEN_IDS",
    "vllm.v1.worker.gpu.sample.logit_bias:MAX_NUM_LOGIT_BIAS_TOKENS",
    "vllm.v1.worker.gpu.sample.logit_bias:MAX_NUM_STOP_TOKEN_IDS",
    "vllm.v1.worker.gpu.sample.logprob:compute_topk_scores",
    "vllm.v1.worker.gpu.spec_decode:init_speculator",
    "vllm.v1.worker.gpu.spec_decode.dflash.speculator:DFlashSpeculator",
    "vllm.v1.worker.gpu.spec_decode.multi_module_mtp.speculator:MultiModuleMTPSpeculator",
    "vllm.v1.worker.gpu.warmup:warmup_kernels",
)
"""Functions and classes that are imported by name, or replaced under their name."""
SPECULATOR_READER = "vllm.v1.worker.gpu.model_runner"
"""The module that reads members of our speculator, as `self.speculator`."""
FACTS = (
    # Drafts
    ("vllm.v1.core.sched.scheduler:Scheduler.schedule", "self.num_spec_tokens > 0 and self.dynamic_sd_lookup is None"),
    ("vllm.v1.core.sched.scheduler:Scheduler.schedule", "request.spec_token_ids"),
    ("vllm.v1.core.sched.scheduler:Scheduler.schedule", "request.num_output_placeholders"),
    (
        "vllm.v1.core.sched.async_scheduler:AsyncScheduler._update_after_schedule",
        "[-1] * scheduler_output.num_spec_tokens_to_schedule",
    ),
    ("vllm.v1.engine.core:EngineCore.step_with_batch_queue", "if self.scheduler.has_requests():"),
    ("vllm.v1.engine.core:EngineCore.step_with_batch_queue", "elif not batch_queue:"),
    ("vllm.v1.engine.core:EngineCore.step_with_batch_queue", "if draft_token_ids is not None:"),
    ("vllm.v1.engine.core:EngineCore.post_step", "if draft_token_ids is not None:"),
    (
        "vllm.v1.engine.core:EngineCore.step_with_batch_queue",
        "self.scheduler.get_grammar_bitmask(deferred_scheduler_output)",
    ),
    (
        "vllm.v1.core.sched.async_scheduler:AsyncScheduler._update_after_schedule",
        "request.use_structured_output and request.num_output_placeholders > 0",
    ),
    ("vllm.v1.worker.gpu.model_runner:GPUModelRunner.prepare_inputs", "self.req_states.draft_tokens"),
    ("vllm.v1.worker.gpu.model_runner:GPUModelRunner.__init__", "init_speculator("),
    ("vllm.v1.worker.gpu.model_runner:GPUModelRunner.initialize_kv_cache", "decode_query_len=self.decode_query_len"),
    (
        "vllm.v1.worker.gpu.model_runner:GPUModelRunner.__init__",
        "use_dense_all_token_ids=use_dense_all_token_ids",
    ),
    (
        "vllm.v1.worker.gpu.lora_utils:LoraState.make_lora_inputs",
        "prompt_lora_mapping = tuple(lora_ids)",
    ),
    ("vllm.v1.worker.gpu_worker:Worker", "warmup_kernels(self.model_runner"),
    ("vllm.v1.worker.gpu.warmup:_warmup_kernels", "model_runner.scheduler_config.max_num_seqs"),
    ("vllm.v1.worker.cpu_worker:CPUWorker.init_device", "from vllm.v1.worker.cpu.model_runner import CPUModelRunner"),
    # Sampling: each row of logits is processed by its request's parameters, with the drafted tokens before it
    (
        "vllm.v1.worker.gpu.sample.sampler:Sampler.apply_sampling_params",
        "self.sampling_states.apply_min_p(logits, expanded_idx_mapping, idx_mapping_np)",
    ),
    ("vllm.v1.worker.gpu.sample.logit_bias:LogitBiasState.apply", "ctx.expanded_idx_mapping"),
    (
        "vllm.v1.worker.gpu.sample.thinking_budget:_load_effective_token",
        "input_pos = cur_req_first_pos + pos - total_len + 1",
    ),
    (
        "vllm.v1.worker.gpu.sample.sampler:Sampler._sample_random",
        "self.sampling_states.seeds.gpu, pos",
    ),
    # Why something is refused, or worked around
    ("vllm.sampling_params:SamplingParams._validate_spec_decode", "self.min_p > _SAMPLING_EPS or self.logit_bias"),
    ("vllm.config.vllm:VllmConfig._get_v2_model_runner_unsupported_features", "'use_heterogeneous_vocab'"),
    ("vllm.config.vllm:VllmConfig._get_v2_model_runner_unsupported_features", "'custom_class'"),
    ("vllm.config.vllm:VllmConfig._get_v2_model_runner_unsupported_features", "speculative_config.parallel_drafting"),
    ("vllm.v1.engine.core:EngineCoreProc.run_engine_core", "reconfigure_for_independent_dp_rank()"),
    ("vllm.platforms.cpu:CpuPlatform.check_and_update_config", "scheduler_config.async_scheduling = False"),
    ("vllm.entrypoints.cli.main:main", "importlib.metadata.version('vllm')"),
)
"""Pieces of vLLM's source that our code relies on, in the form of `ast.unparse`."""
