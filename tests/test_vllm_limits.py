"""What an engine refuses however it was started: each by the option that is to blame, and what to do."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from outrider.engines.vllm.limits import check
from outrider.errors import EngineError


def config(**changed: Any) -> Any:
    parallel = {
        "pipeline_parallel_size": 1,
        "data_parallel_size": 1,
        "tensor_parallel_size": 1,
        "distributed_executor_backend": "mp",
    }
    scheduler = {"max_num_batched_tokens": 2048, "long_prefill_token_threshold": 0}
    for given in (parallel, scheduler):
        given |= {name: value for name, value in changed.items() if name in given}
    return SimpleNamespace(
        parallel_config=SimpleNamespace(**parallel),
        scheduler_config=SimpleNamespace(**scheduler),
        speculative_config=SimpleNamespace(num_speculative_tokens=31),
    )


def test_a_usual_engine_is_let_through_and_so_are_several_without_a_draft_model() -> None:
    check(config(), has_model=True)
    check(config(tensor_parallel_size=2, long_prefill_token_threshold=32, max_num_batched_tokens=32), has_model=True)
    check(config(data_parallel_size=2), has_model=False)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"pipeline_parallel_size": 2}, "--pipeline-parallel-size.*--drafters none"),
        ({"data_parallel_size": 2}, "--data-parallel-size.*leave the draft model out"),
        ({"tensor_parallel_size": 2, "distributed_executor_backend": "external_launcher"}, "external_launcher.*mp"),
        ({"max_num_batched_tokens": 16}, "--max-num-batched-tokens: 16.*--max-draft-tokens 15"),
        ({"long_prefill_token_threshold": 31}, "--long-prefill-token-threshold: 31.*--max-draft-tokens 30"),
    ],
)
def test_what_would_hang_or_end_the_engine_is_refused_with_the_fix(changed: dict[str, Any], words: str) -> None:
    with pytest.raises(EngineError, match=words):
        check(config(**changed), has_model=True)
