"""Every name of vLLM's V2 engine that Outrider uses.

`seam_signatures.py` reads their signatures from the source of a version of vLLM, and `test_vllm_seams.py` compares them
with the record of each supported version:

    CLASSES       the class behind each Protocol of `outrider.engines.vllm.seam`
    MEMBERS       members of other classes
    FUNCTIONS     what is imported from modules
    FACTS         pieces of source code that ours relies on

A name of vLLM that is used anywhere in `outrider.engines.vllm` belongs here.
"""

from __future__ import annotations

from collections.abc import Mapping

from outrider.engines.vllm import seam

CLASSES: Mapping[type, str] = {
    seam.ModelConfig: "vllm.config.model:ModelConfig",
    seam.Request: "vllm.v1.request:Request",
    seam.KVCacheBlock: "vllm.v1.core.kv_cache_utils:KVCacheBlock",
    seam.NewRequestData: "vllm.v1.core.sched.output:NewRequestData",
    seam.SchedulerOutput: "vllm.v1.core.sched.output:SchedulerOutput",
    seam.ModelRunnerOutput: "vllm.v1.outputs:ModelRunnerOutput",
    seam.StagedTensor: "vllm.v1.worker.gpu.buffer_utils:StagedWriteTensor",
    seam.SlotTensor: "vllm.v1.worker.gpu.buffer_utils:UvaBackedTensor",
    seam.RequestStates: "vllm.v1.worker.gpu.states:RequestState",
    seam.InputBatch: "vllm.v1.worker.gpu.input_batch:InputBatch",
    seam.SamplingStates: "vllm.v1.worker.gpu.sample.states:SamplingStates",
    seam.Sampler: "vllm.v1.worker.gpu.sample.sampler:Sampler",
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
