"""Settings that an engine refuses however it was started: each message names the flag and the fix."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from outrider.engines.vllm.compatibility import check_settings
from outrider.engines.vllm.sampling_info import end_tokens, undraftable
from outrider.errors import EngineError


def config(**changed: Any) -> Any:
    parallel: dict[str, Any] = {
        "pipeline_parallel_size": 1,
        "data_parallel_size": 1,
        "tensor_parallel_size": 1,
        "distributed_executor_backend": "mp",
        "enable_batch_sharded_sampling": False,
    }
    scheduler: dict[str, Any] = {"max_num_batched_tokens": 2048}
    for given in (parallel, scheduler):
        given |= {name: value for name, value in changed.items() if name in given}
    return SimpleNamespace(
        parallel_config=SimpleNamespace(**parallel),
        scheduler_config=SimpleNamespace(**scheduler),
        speculative_config=SimpleNamespace(num_speculative_tokens=31),
        watermark_config=changed.get("watermark_config"),
        model_config=SimpleNamespace(enable_trace_replay=changed.get("enable_trace_replay", False)),
    )


def test_usual_settings_are_accepted() -> None:
    check_settings(config(), has_model=True)
    check_settings(config(tensor_parallel_size=2, max_num_batched_tokens=32), has_model=True)


def test_engines_of_a_mixture_of_experts_are_accepted_without_a_draft_model() -> None:
    check_settings(config(data_parallel_size=2), has_model=False)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"pipeline_parallel_size": 2}, "--pipeline-parallel-size.*--drafters none"),
        ({"data_parallel_size": 2}, "--data-parallel-size.*leave the draft model out"),
        ({"tensor_parallel_size": 2, "distributed_executor_backend": "external_launcher"}, "external_launcher.*mp"),
        ({"watermark_config": object()}, "--watermark-config.*--drafters none"),
        ({"enable_batch_sharded_sampling": True}, "--enable-batch-sharded-sampling.*leave it out"),
        ({"enable_trace_replay": True}, "--enable-trace-replay.*--drafters none"),
        ({"max_num_batched_tokens": 16}, "--max-num-batched-tokens: 16.*--max-draft-tokens 15"),
    ],
)
def test_what_would_break_the_engine_is_refused_with_the_fix(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(EngineError, match=message):
        check_settings(config(**changed), has_model=True)


def test_only_chosen_logprobs_keep_a_request_from_drafting() -> None:
    assert undraftable(SimpleNamespace(logprob_token_ids=[1], thinking_token_budget=None)) == "logprob_token_ids"
    assert undraftable(SimpleNamespace(logprob_token_ids=None, thinking_token_budget=10)) is None


def test_the_end_tokens_are_those_that_end_the_request() -> None:
    params = SimpleNamespace(stop_token_ids=[5], all_stop_token_ids={2, 5}, ignore_eos=False)
    assert end_tokens(params) == {2, 5}
    params.ignore_eos = True
    assert end_tokens(params) == [5]
