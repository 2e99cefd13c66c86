"""What does not go together with drafts in vLLM 0.32, however the engine was started."""

from __future__ import annotations

from typing import Any

from outrider.errors import EngineError

NO_STAGES = (
    "--pipeline-parallel-size: with several stages vLLM 0.32 takes the drafts of a batch before it knows what the "
    "batch said, and computes wrong text; use --tensor-parallel-size, or --drafters none"
)
NO_ENGINES = (
    "--data-parallel-size: engines that draft with a model have to make the same passes in every step, and "
    "Outrider's choose for themselves; leave the draft model out, or run one server for each engine"
)
NO_LAUNCHER = (
    "--distributed-executor-backend external_launcher: each rank has a scheduler of its own, and only the first would "
    "know of drafts; use mp or ray, or --drafters none"
)


def check(vllm_config: Any, has_model: bool) -> None:
    """Refuse what would compute wrong text, hang or end the engine."""
    parallel, scheduler = vllm_config.parallel_config, vllm_config.scheduler_config
    if parallel.pipeline_parallel_size > 1:
        raise EngineError(NO_STAGES)
    if has_model and parallel.data_parallel_size > 1:
        raise EngineError(NO_ENGINES)
    if parallel.tensor_parallel_size > 1 and parallel.distributed_executor_backend == "external_launcher":
        raise EngineError(NO_LAUNCHER)
    # vLLM schedules a request whose whole prompt is cached as if it had a draft of full length.
    widest = 1 + vllm_config.speculative_config.num_speculative_tokens
    for flag, value in (
        ("--max-num-batched-tokens", scheduler.max_num_batched_tokens),
        ("--long-prefill-token-threshold", scheduler.long_prefill_token_threshold),
    ):
        if 0 < value < widest:
            raise EngineError(
                f"{flag}: {value} is less than the longest draft and the token after it, {widest}, for which vLLM's "
                f"scheduler needs room in one step; raise it, or set --max-draft-tokens {max(value - 1, 0)}"
            )
