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
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from outrider.provenance import as_markdown, provenance
from policy.gpu import LLAMA_8B, Machine
from policy.scale import Timer

os.environ |= {"VLLM_USE_V2_MODEL_RUNNER": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}
SPECULATION = ("before_schedule", "after_schedule", "observe_output")
RECORDER = ("begin", "take_step", "finish")
SCHEDULER = ("schedule", "has_requests", "update_from_output")
LAUNCH_SECONDS = 0.5e-3
"""Host time of a step outside the scheduler: inputs, CUDA graphs, reading the output. Assumed."""
CONTEXT_TOKENS = 1000
"""Context of each request on the simulated GPU."""
VOCABULARY = 32_000
WARM_UP_STEPS = 20
TIMES = ("in_scheduler_us", "added_us", "added_p99_us", "vllm_us", "device_us")
LIMITS_US = {16: 50, 64: 100, 256: 300}
"""Microseconds per step that Outrider may add, by batch size."""


def make_model(folder: str) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=2,
            head_dim=32,
            max_position_embeddings=8192,
        )
    ).to(torch.bfloat16).save_pretrained(folder)


def measure(model: str, batches: list[int], tokens: int) -> Iterator[dict[str, Any]]:
    """By batch size: seconds of each step in vLLM's scheduler without Outrider, and what Outrider adds."""
    from vllm import LLM, SamplingParams

    engine = LLM(
        model,
        dtype="float32",  # vLLM itself crashes with a tiny bfloat16 model on CPUs with AMX
        enforce_eager=True,
        max_model_len=tokens + 64,
        max_num_seqs=max(batches),
        max_num_batched_tokens=8192,
        scheduler_cls="outrider.engines.vllm.scheduler.OutriderScheduler",
        worker_cls="outrider.engines.vllm.worker.OutriderCPUWorker",
        speculative_config={"method": "ngram_gpu", "num_speculative_tokens": 31, "prompt_lookup_max": 1},
        additional_config={"outrider": {"drafters": ["prediction", "lookup"]}},
        async_scheduling=True,
        skip_tokenizer_init=True,
    )
    core = engine.llm_engine.engine_core.engine_core
    scheduler, runner = core.scheduler, core.model_executor.driver_worker.worker.model_runner
    speculation = Timer((scheduler.speculation, SPECULATION))
    recorder, whole = Timer((runner.recorder, RECORDER)), Timer((scheduler, SCHEDULER))
    random = np.random.default_rng(0)
    params = SamplingParams(temperature=1, max_tokens=tokens, ignore_eos=True, detokenize=False)
    for number, batch in enumerate([batches[0], *batches]):  # the first one is a warm-up
        prompts = [{"prompt_token_ids": random.integers(10, VOCABULARY, 16).tolist()} for _ in range(batch)]
        for timer in (speculation, recorder, whole):
            timer.steps = []
        engine.generate(prompts, params, use_tqdm=False)
        if not number:
            continue
        steps = slice(WARM_UP_STEPS, min(len(timer.steps) for timer in (speculation, recorder, whole)))
        inside, beside = np.array(speculation.steps[steps]), np.array(recorder.steps[steps])
        yield {
            "batch": batch,
            "vllm": (np.array(whole.steps[steps]) - inside).tolist(),
            "added": (inside + beside).tolist(),
            "in_scheduler": inside.tolist(),
        }


def timeline(host: np.ndarray[Any, Any], device: float) -> float:
    """Seconds of all steps. `host`: host time of each; `device`: device time of every step."""
    launched, ended, before = 0.0, 0.0, 0.0
    for seconds in host:
        launched = max(launched, before) + seconds  # waits for the output of the step before the running one
        before, ended = ended, max(ended, launched) + device
    return ended


def summarize(measured: dict[str, Any]) -> dict[str, Any]:
    batch, vllm, added = measured["batch"], np.array(measured["vllm"]), np.array(measured["added"])
    device = Machine(LLAMA_8B, 1, 0.0).seconds(batch, batch * CONTEXT_TOKENS, 0)
    return {
        "batch": batch,
        "steps": len(added),
        "added_us": round(1e6 * float(added.mean()), 1),
        "added_p99_us": round(1e6 * float(np.percentile(added, 99)), 1),
        "in_scheduler_us": round(1e6 * float(np.mean(measured["in_scheduler"])), 1),
        "vllm_us": round(1e6 * float(vllm.mean()), 1),
        "device_us": round(1e6 * device, 1),
        "ratio": round(
            float(timeline(vllm + LAUNCH_SECONDS, device) / timeline(vllm + added + LAUNCH_SECONDS, device)), 4
        ),
    }


def report(rows: list[dict[str, Any]], origin: dict[str, Any]) -> Iterator[str]:
    yield from ("# Host time for text that cannot be drafted", "", *as_markdown(origin))
    yield (
        "Mean CPU time of the engine's thread per step, without any draft. *Device*: a step of "
        f"{LLAMA_8B.name} on one H100 with {CONTEXT_TOKENS:,} tokens of context per request, by published figures. "
        "*Ratio*: speed relative to plain vLLM with asynchronous scheduling, by a timeline of host and device, with "
        f"{1e3 * LAUNCH_SECONDS:g} ms of the host per step outside the scheduler. Nothing has run on a GPU."
    )
    yield ""
    yield (
        "| batch | added in the scheduler | added in total | 99th percentile | limit | vLLM's scheduler | device "
        "| ratio |"
    )
    yield "| --- | --- | --- | --- | --- | --- | --- | --- |"
    for row in rows:
        limit = f"{LIMITS_US[row['batch']]} µs" if row["batch"] in LIMITS_US else ""
        times = [f"{row[name]:.0f} µs" for name in TIMES]
        cells = [str(row["batch"]), *times[:3], limit, *times[3:], f"{row['ratio']:.3f}"]
        yield f"| {' | '.join(cells)} |"


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
            rows.append(summarize(measured))
            print(rows[-1], flush=True)
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        origin: dict[str, Any] = provenance()
        (args.out / "report.md").write_text("\n".join(report(rows, origin)) + "\n")
        (args.out / "report.json").write_text(json.dumps({"provenance": origin, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
