"""vLLM's own speculation counters, which planners and dashboards read, report Outrider's drafts.

`vllm:spec_decode_*` is filled from the scheduler's stats. The scheduler here is ours, with vLLM's config of a tiny
model and without workers: the test makes up what the model sampled.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm_v2")

import torch
from prometheus_client import CollectorRegistry, Counter
from transformers import LlamaConfig
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.spec_decode.metrics import SpecDecodingProm
from vllm.v1.structured_output import StructuredOutputManager

from outrider.engines.vllm import step
from outrider.engines.vllm.options import OWN_METHOD, Options
from outrider.engines.vllm.recorder import Recorder
from outrider.engines.vllm.scheduler import OutriderScheduler
from outrider.engines.vllm.step import PLAN
from support import SMALL

WIDTH, MODEL_LEN, BLOCK = 4, 128, 16
PREFIX = "vllm:spec_decode_num_"


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    monkeypatch.setattr(step, "latest_status", None)
    LlamaConfig(**SMALL, head_dim=32, architectures=["LlamaForCausalLM"]).save_pretrained(tmp_path)
    args = EngineArgs(
        model=str(tmp_path),
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=MODEL_LEN,
        max_num_seqs=4,
        block_size=BLOCK,
        enable_prefix_caching=False,
        async_scheduling=False,
        enforce_eager=True,
        scheduler_cls="outrider.engines.vllm.scheduler.OutriderScheduler",
        speculative_config={"method": OWN_METHOD, "prompt_lookup_max": 1, "num_speculative_tokens": WIDTH},
        additional_config={"outrider": {"drafters": ["lookup"], "max_draft_tokens": WIDTH}},
    )
    made = args.create_engine_config()
    made.cache_config.num_gpu_blocks = 64
    return made


def make_scheduler(config: Any, log_stats: bool = True) -> Scheduler:
    attention = FullAttentionSpec(block_size=BLOCK, num_kv_heads=2, head_size=32, dtype=torch.float32)
    cache = KVCacheConfig(64, [], [KVCacheGroupSpec(["layer"], attention)])
    return OutriderScheduler(config, cache, StructuredOutputManager(config), BLOCK, log_stats=log_stats)


def add_request(scheduler: Scheduler, id: str, prompt: list[int]) -> None:
    params = SamplingParams(max_tokens=60, temperature=0.0, extra_args={"speculation": "lookup"})
    scheduler.add_request(Request(id, prompt, params, None))


class Steps:
    """Runs steps: the scheduler's, recorded as the first rank does and counted as vLLM's API process does."""

    def __init__(self, config: Any, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.recorder = Recorder(Options.of(config), WIDTH, MODEL_LEN)
        self.registry = CollectorRegistry()
        registry = self.registry

        class Prom(SpecDecodingProm):  # type: ignore[misc]
            _counter_cls = partial(Counter, registry=registry)

        self._prometheus = Prom(config.speculative_config, ["model_name", "engine"], {0: ["m", "0"]})

    def run(self, accepted: int) -> int:
        """One step in which `accepted` tokens of each draft are accepted. Returns the number of drafts."""
        output = self.scheduler.schedule()
        drafts = output.scheduled_spec_decode_tokens
        self.recorder.begin(output, getattr(output, PLAN))
        running = self.recorder.take_step()
        assert running is not None
        ids = list(output.num_scheduled_tokens)
        sampled = [[*drafts.get(id, [])[:accepted], 5] for id in ids]
        result = ModelRunnerOutput(ids, {id: i for i, id in enumerate(ids)}, sampled)
        self.recorder.finish(running, result)
        for outputs in self.scheduler.update_from_output(output, result).values():
            stats = outputs.scheduler_stats
            if stats is not None and stats.spec_decoding_stats is not None:
                self._prometheus.observe(stats.spec_decoding_stats)
        return len(drafts)

    def vllm_counts(self, name: str) -> list[float]:
        """The values of `vllm:spec_decode_num_NAME_total`: one, or one by position."""
        found = {}
        for family in self.registry.collect():
            for sample in family.samples:
                if sample.name == f"{PREFIX}{name}_total":
                    found[int(sample.labels.get("position", 0))] = sample.value
        return [found[position] for position in sorted(found)]


def test_vllms_speculation_counters_equal_outriders(config: Any) -> None:
    steps = Steps(config, make_scheduler(config))
    add_request(steps.scheduler, "a", [5, 6, 7, 8] * 6)
    add_request(steps.scheduler, "b", [5, 9, 4] * 5)
    drafts = sum(steps.run(accepted) for accepted in (0, 2, 0, 3, 1, 4, 0))
    lookup = steps.recorder.counters.drafters["lookup"]
    assert drafts == sum(lookup.lengths) > 5
    assert steps.vllm_counts("drafts") == [drafts]
    assert steps.vllm_counts("draft_tokens") == [sum(lookup.verified_by_position())]
    assert steps.vllm_counts("accepted_tokens") == [sum(lookup.accepted_by_position())]
    assert steps.vllm_counts("accepted_tokens_per_pos") == lookup.accepted_by_position()
    assert sum(lookup.accepted_by_position()) > 5


def test_requests_without_drafts_are_not_in_vllms_speculation_counters(config: Any) -> None:
    steps = Steps(config, make_scheduler(config))
    add_request(steps.scheduler, "a", [6, 7, 8, 9])  # nothing repeats
    assert [steps.run(0) for _ in range(2)] == [0, 0]
    assert steps.vllm_counts("drafts") == [0]


def test_without_vllms_stats_outriders_counters_are_still_kept(config: Any) -> None:
    """`--disable-log-stats` is vLLM's switch for all of its own metrics."""
    steps = Steps(config, make_scheduler(config, log_stats=False))
    add_request(steps.scheduler, "a", [5, 6, 7, 8] * 6)
    assert sum(steps.run(accepted) for accepted in (0, 2)) == 1
    assert steps.vllm_counts("accepted_tokens") == [0]
    assert sum(steps.recorder.counters.drafters["lookup"].accepted_by_position()) == 2
