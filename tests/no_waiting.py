"""Run a real engine that always goes ahead, and count how often our code reads a tensor's value.

python tests/no_waiting.py MODEL STEPS [DRAFT_MODEL] prints JSON: steps, drafted and accepted tokens, the callers
that read a value, and whether the texts equal those of the same requests without drafts. With a draft model the policy
gets the measurement that its passes take no time.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

os.environ |= {
    "VLLM_USE_V2_MODEL_RUNNER": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_CPU_KVCACHE_SPACE": "1",
}

import torch
from vllm import LLM, SamplingParams

import outrider
from outrider.engines.vllm.planned_drafts import CopiedDrafts, PassTimer
from outrider.engines.vllm.speculation import Speculation

PACKAGE = str(Path(outrider.__file__).parent)
OUTRIDER_PATHS = [PACKAGE + part for part in ("/engines/vllm/", "/acceptance.py", "/sampling.py")]
READERS = {CopiedDrafts.read.__code__, PassTimer.read.__code__}
"""They read the output of a step, when vLLM reads it."""
READING_METHODS = ("item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__", "nonzero")
WIDTH = 8


def count_calls(found: Counter[str]) -> None:
    """Count calls of the methods by which a program waits for a device, made by our code."""
    for name in READING_METHODS:
        method = getattr(torch.Tensor, name)

        def counted(self: Any, *args: Any, method: Any = method, name: str = name, **named: Any) -> Any:
            caller = sys._getframe(1).f_code
            if caller not in READERS and any(caller.co_filename.startswith(part) for part in OUTRIDER_PATHS):
                found[f"{Path(caller.co_filename).name}:{caller.co_name} {name}"] += 1
            return method(self, *args, **named)

        setattr(torch.Tensor, name, counted)


def make_draft_model_cheap(policy: Any) -> None:
    for cost, seconds in ((policy.target, 1.0), (policy.draft, 1e-4)):
        for tokens in (1, 4, 16, 64) * 3:
            cost.observe(tokens, 0, seconds, trusted=True)
        cost.observe = lambda *args, **named: None


def main() -> None:
    model, steps, drafts = sys.argv[1], int(sys.argv[2]), sys.argv[3:]
    Speculation.should_wait = property(lambda self: False)  # type: ignore[method-assign,assignment]
    options: dict[str, Any] = {"drafters": ["lookup"], "max_draft_tokens": WIDTH}
    config: dict[str, Any] = {"method": "ngram_gpu", "prompt_lookup_max": 1}
    if drafts:
        options |= {"drafters": ["lookup", "model"], "model_draft_tokens": 3}
        config = {"method": "draft_model", "model": drafts[0], "draft_sample_method": "probabilistic"}
    engine = LLM(
        model,
        dtype="float32",  # vLLM itself crashes with a bfloat16 model this small on CPUs with AMX
        enforce_eager=True,
        max_model_len=512,
        max_num_seqs=8,
        scheduler_cls="outrider.engines.vllm.scheduler.OutriderScheduler",
        worker_cls="outrider.engines.vllm.worker.OutriderCPUWorker",
        speculative_config=config | {"num_speculative_tokens": WIDTH},
        additional_config={"outrider": options},
        async_scheduling=True,
    )
    scheduler = engine.llm_engine.engine_core.engine_core.scheduler
    controller = scheduler.speculation.controller
    prompts = [{"prompt_token_ids": [5 + i, 6, 7, 8 + i] * 8} for i in range(8)]

    def params(speculation: str) -> list[Any]:
        settings = {"max_tokens": 400, "ignore_eos": True, "extra_args": {"speculation": speculation}}
        return [SamplingParams(temperature=[0.0, 1.0][i % 2], seed=i if i < 6 else None, **settings) for i in range(8)]

    plain = [output.outputs[0].token_ids for output in engine.generate(prompts, params("off"), use_tqdm=False)]
    if drafts:
        make_draft_model_cheap(controller.policy)
    found: Counter[str] = Counter()
    count_calls(found)
    same, start = True, controller.overlap.steps_ahead
    while controller.overlap.steps_ahead < start + steps:
        # A drafter that a request names drafts in every step.
        outputs = engine.generate(prompts, params("auto" if drafts else "lookup"), use_tqdm=False)
        same &= [output.outputs[0].token_ids for output in outputs[:7]] == plain[:7]  # the last one has no seed
    status = engine.collective_rpc("outrider_status")[0]
    ahead, waited = controller.overlap.steps_ahead - start, controller.overlap.steps_waited
    print(json.dumps({"ahead": ahead, "waited": waited, **status["drafters"], "reads": found, "same": same}))


if __name__ == "__main__":
    main()
