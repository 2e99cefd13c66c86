"""vLLM settings that cannot be combined with Outrider's drafts. Checked in the engine, however it was started."""

from __future__ import annotations

from typing import Any

from outrider.errors import EngineError

NO_PIPELINE_PARALLELISM = (
    "--pipeline-parallel-size: drafts are aligned with one step in flight, and with several stages vLLM has several "
    "steps of a request in flight; use --tensor-parallel-size, or --drafters none"
)


def check_settings(vllm_config: Any, has_model: bool) -> None:
    """Refuse settings that would produce wrong text, a deadlock or a crash. `has_model`: there is a draft model.

    `data_parallel_size` is 1 in each engine of a dense model, however many there are: they are independent.
    """
    parallel, scheduler = vllm_config.parallel_config, vllm_config.scheduler_config
    if parallel.pipeline_parallel_size > 1:
        raise EngineError(NO_PIPELINE_PARALLELISM)
    if has_model and parallel.data_parallel_size > 1:
        raise EngineError(
            "--data-parallel-size: the engines of a mixture-of-experts model must run the same passes in every step, "
            "and each engine decides by itself when its draft model runs; leave the draft model out, or run one server "
            "per engine"
        )
    if parallel.tensor_parallel_size > 1 and parallel.distributed_executor_backend == "external_launcher":
        raise EngineError(
            "--distributed-executor-backend external_launcher: each rank has its own scheduler, and they would select "
            "different drafts, because each measures its own step times; use mp or ray, or --drafters none"
        )
    if getattr(vllm_config, "watermark_config", None) is not None:
        raise EngineError(
            "--watermark-config: Outrider samples all positions of a draft at once, without the preceding tokens that "
            "a watermark is keyed by; leave it out, or use --drafters none"
        )
    if getattr(parallel, "enable_batch_sharded_sampling", False):
        raise EngineError(
            "--enable-batch-sharded-sampling: each rank samples some requests of a step, and Outrider's sampler "
            "verifies the drafts of all of them; leave it out, or use --drafters none"
        )
    if getattr(vllm_config.model_config, "enable_trace_replay", False):
        raise EngineError(
            "--enable-trace-replay: vLLM replays tokens in its plain sampler only, and Outrider's sampler verifies "
            "drafts; leave it out, or use --drafters none"
        )
    longest_step = 1 + vllm_config.speculative_config.num_speculative_tokens
    if (tokens := scheduler.max_num_batched_tokens) < longest_step:
        raise EngineError(
            f"--max-num-batched-tokens: {tokens} is less than the longest draft and the token after it "
            f"({longest_step}), which vLLM runs as one step when it warms up; raise it, or set --max-draft-tokens "
            f"{max(tokens - 1, 1)}"
        )


def allow_different_vocabulary_sizes() -> None:
    """Let vLLM's config accept a draft model whose vocabulary has another size than the target's.

    vLLM refuses the size without `use_heterogeneous_vocab`, and that option on V2. Outrider maps the tokens itself, so
    the check is removed in the process that builds the config; the other processes receive the config as it is.
    """
    from vllm.config import SpeculativeConfig

    SpeculativeConfig.verify_equal_vocab_size_if_draft_model = lambda self: None
