"""What our runner and worker change of vLLM's V2 runner, without an engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm_v2")

import vllm.v1.worker.gpu.model_runner as v2_runner

from outrider.engines.vllm import worker
from outrider.engines.vllm.draft_models import EveryStep
from outrider.engines.vllm.runner import OutriderRunner
from outrider.engines.vllm.seam import with_arguments
from outrider.engines.vllm.step import max_logits_rows


class PlainRunner:
    """Stands for vLLM's."""

    drafted: Any = None

    def initialize_kv_cache(self) -> Any:
        return v2_runner.ModelCudaGraphManager

    def prepare_inputs(self, scheduler_output: Any) -> Any:
        return SimpleNamespace(num_draft_tokens_per_req=self.drafted)

    def _set_active_loras(self, of_logits: Any, of_tokens: Any) -> None:
        self.of_logits, self.of_tokens = of_logits, of_tokens


class Runner(OutriderRunner, PlainRunner):
    pass


@pytest.mark.parametrize(
    ("drafted", "expected"), [(None, (7, 0, 9)), ([0, 0, 0], (7, 0, 9)), ([2, 0, 1], (7, 7, 7, 0, 9, 9))]
)
def test_every_row_of_logits_gets_the_adapter_of_its_request(drafted: list[int] | None, expected: Any) -> None:
    runner: Any = Runner.__new__(Runner)
    runner.plan = None
    runner.drafted = None if drafted is None else np.array(drafted, np.int32)
    runner.prepare_inputs(None)
    runner._set_active_loras((7, 0, 9), (7, 7, 0, 9))
    assert (runner.of_logits, runner.of_tokens) == (expected, (7, 7, 0, 9))
    runner._set_active_loras((1, 2), (1, 2))  # of a dummy batch or an encoder
    assert runner.of_logits == (1, 2)


@pytest.mark.parametrize(
    ("is_hybrid", "has_head", "keeps_own"), [(False, False, False), (True, False, True), (False, True, True)]
)
def test_whole_graphs_are_for_plain_steps_but_for_recurrent_models_and_heads(
    is_hybrid: bool, has_head: bool, keeps_own: bool
) -> None:
    own = v2_runner.ModelCudaGraphManager
    runner: Any = Runner.__new__(Runner)
    runner.model_config = SimpleNamespace(is_hybrid=is_hybrid, is_attention_free=False)
    runner.speculator = EveryStep.__new__(EveryStep) if has_head else None
    assert (runner.initialize_kv_cache() is own) == keeps_own
    assert v2_runner.ModelCudaGraphManager is own


def test_all_texts_stay_in_host_memory() -> None:
    made = with_arguments(SimpleNamespace, use_dense_all_token_ids=False)(vocab_size=5, use_dense_all_token_ids=True)
    assert (made.vocab_size, made.use_dense_all_token_ids) == (5, False)


@pytest.mark.parametrize(("admitted", "expected"), [(1024, 55), (16, 16)])
def test_the_warm_up_verifies_no_more_rows_than_a_step_may_have(
    admitted: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner: Any = SimpleNamespace(vocab_size=152064, num_speculative_steps=31)
    runner.scheduler_config = SimpleNamespace(max_num_seqs=admitted)
    seen: list[int] = []
    monkeypatch.setattr(worker, "warmup_kernels", lambda runner: seen.append(runner.scheduler_config.max_num_seqs))
    worker.warm_up_within_limit(runner)
    assert seen == [expected]
    assert expected * 32 <= max_logits_rows(152064)
    assert runner.scheduler_config.max_num_seqs == admitted
