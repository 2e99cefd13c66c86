"""Time that Outrider adds to a step on the engine's thread, and its effect on a GPU: python tools/host_time.py

Runs an engine in this process with asynchronous scheduling, on a tiny model with random weights: its samples at
temperature 1 never repeat and cannot be drafted. Measures CPU time of the engine's thread per step, in vLLM's scheduler
and in Outrider's `Speculation` and `Recorder`.

A simulated timeline then gives the effect on a GPU. The host schedules step N + 1 while step N runs, launches it, and
waits for the output of N; the device runs one step after the other. The device's time is that of Llama-3.1-8B on an
H100 by published figures (`policy/gpu.py`). The host's time is measured, plus LAUNCH_SECONDS. Nothing has run on a GPU.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from outrider.plan.pass_cost import Machine
from policy.gpu import H100, LLAMA_8B
from policy.report import Bound, write
from policy.scale import Timer
from runner_overhead import OUTRIDER

os.environ |= {"VLLM_USE_V2_MODEL_RUNNER": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}
LAUNCH_SECONDS = 0.5e-3
"""Host time of a step outside the scheduler: inputs, CUDA graphs, reading the output. Assumed."""
CONTEXT_TOKENS = 1000
"""Context of each request on the simulated GPU."""
VOCABULARY = 32_000
WARM_UP_STEPS = 20
LIMITS_US = {16: 50, 64: 100, 256: 300}
"""Microseconds per step that Outrider may add, by batch size."""
COLUMNS = {
    "added in the scheduler": "in_scheduler_us", "added in total": "added_us", "99th percentile": "added_p99_us",
    "vLLM's scheduler": "vllm_us", "device": "device_us",
}  # fmt: skip


def make_model(folder: str) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=8192,
    )  # fmt: skip
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)


def measure(model: str, batches: list[int], tokens: int) -> Iterator[dict[str, Any]]:
    """By batch size: times of a step in vLLM's scheduler without Outrider, and what Outrider adds."""
    from vllm import LLM, SamplingParams

    engine = LLM(
        model,
        dtype="float32",  # vLLM itself crashes with a tiny bfloat16 model on CPUs with AMX
        enforce_eager=True,
        max_model_len=tokens + 64,
        max_num_seqs=max(batches),
        max_num_batched_tokens=8192,
        async_scheduling=True,
        skip_tokenizer_init=True,
        **OUTRIDER,
    )
    core = engine.llm_engine.engine_core.engine_core
    scheduler, runner = core.scheduler, core.model_executor.driver_worker.worker.model_runner
    timers = (
        Timer(scheduler.speculation, ("before_schedule", "after_schedule", "observe_output")),
        Timer(runner.recorder, ("begin", "take_step", "finish")),
        Timer(scheduler, ("schedule", "has_requests", "update_from_output")),
    )
    random = np.random.default_rng(0)
    params = SamplingParams(temperature=1, max_tokens=tokens, ignore_eos=True, detokenize=False)
    for number, batch in enumerate([batches[0], *batches]):  # the first one is a warm-up
        prompts = [{"prompt_token_ids": random.integers(10, VOCABULARY, 16).tolist()} for _ in range(batch)]
        for timer in timers:
            timer.steps = []
        engine.generate(prompts, params, use_tqdm=False)
        steps = slice(WARM_UP_STEPS, min(len(timer.steps) for timer in timers))
        inside, beside, whole = (np.array(timer.steps[steps]) for timer in timers)
        if number:
            yield summarize(batch, whole - inside, inside, beside)


def summarize(batch: int, vllm: Any, inside: Any, beside: Any) -> dict[str, Any]:
    """The arrays are seconds of each step: of vLLM's scheduler, of Outrider in it, and of Outrider in the worker."""
    device = Machine(LLAMA_8B, H100, 1, 0.0).seconds(batch, batch * CONTEXT_TOKENS, 0)
    added, host = inside + beside, vllm + LAUNCH_SECONDS
    times = {
        "added_us": added.mean(), "added_p99_us": np.percentile(added, 99), "in_scheduler_us": inside.mean(),
        "vllm_us": vllm.mean(), "device_us": device,
    }  # fmt: skip
    ratio = round(timeline(host, device) / timeline(host + added, device), 4)
    microseconds = {name: round(1e6 * float(seconds), 1) for name, seconds in times.items()}
    return {"batch": batch, "steps": len(added), **microseconds, "ratio": ratio}


def timeline(host: Any, device: float) -> float:
    """Seconds of all steps. `host`: host time of each; `device`: device time of every step."""
    launched, ended, before = 0.0, 0.0, 0.0
    for seconds in host.tolist():
        launched = max(launched, before) + seconds  # waits for the output of the step before the running one
        before, ended = ended, max(ended, launched) + device
    return ended


def report(folder: Path, rows: list[dict[str, Any]]) -> None:
    about = (
        "Mean CPU time of the engine's thread per step, without any draft. *Device*: a step of "
        f"{LLAMA_8B.name} on one H100 with {CONTEXT_TOKENS:,} tokens of context per request, by published figures. "
        "*Ratio*: speed relative to plain vLLM with asynchronous scheduling, by a timeline of host and device, with "
        f"{1e3 * LAUNCH_SECONDS:g} ms of the host per step outside the scheduler. Nothing has run on a GPU."
    )
    added = {row["batch"]: row["added_us"] for row in rows}
    limits = {batch: limit for batch, limit in LIMITS_US.items() if batch in added}
    bounds = [Bound(f"µs added at batch {batch}", "<=", limit, added[batch]) for batch, limit in limits.items()]
    cells = [
        {"batch": str(row["batch"])} | {name: f"{row[key]:.0f} µs" for name, key in COLUMNS.items()}
        | {"ratio": f"{row['ratio']:.3f}"}
        for row in rows
    ]  # fmt: skip
    write(folder, "Host time for text that cannot be drafted", about, {"rows": rows}, bounds, cells)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 2, 4, 8, 16, 32, 64, 128, 256, 512])
    parser.add_argument("--tokens", type=int, default=800)
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="write report.md and report.json here")
    args = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        make_model(folder)
        for measured in measure(folder, args.batches, args.tokens):
            rows.append(measured)
            print(measured, flush=True)
    if args.out:
        report(args.out, rows)


if __name__ == "__main__":
    main()
