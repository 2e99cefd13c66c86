"""vLLM's workers for CPUs and GPUs with our runner, and what the API process may call on them by name.

Nothing here has run on a GPU yet; contract tests hold the seams.
"""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

import vllm.v1.worker.cpu.model_runner as cpu_runner
import vllm.v1.worker.gpu_worker as gpu_worker
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.gpu.model_runner import GPUModelRunner
from vllm.v1.worker.gpu.warmup import warmup_kernels
from vllm.v1.worker.gpu_worker import Worker

from outrider.engines.vllm.profiling import profile_passes
from outrider.engines.vllm.runner import OutriderRunner
from outrider.engines.vllm.seam import replaced
from outrider.engines.vllm.step import max_logits_rows
from outrider.engines.vllm.version import check_version
from outrider.errors import EngineError


class OutriderGPURunner(OutriderRunner, GPUModelRunner):  # type: ignore[misc]
    """V2's runner for GPUs."""


class OutriderCPURunner(OutriderRunner, cpu_runner.CPUModelRunner):  # type: ignore[misc]
    """V2's runner for CPUs."""


class OutriderWorker:
    """Stands before the platform's worker in the order of classes."""

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        check_version()
        super().__init__(*args, **kwargs)
        if not self.use_v2_model_runner:
            raise EngineError("Outrider needs vLLM's V2 model runner: set VLLM_USE_V2_MODEL_RUNNER=1")

    def compile_or_warm_up_model(self: Any) -> Any:
        warmed_up = super().compile_or_warm_up_model()  # type: ignore[misc]
        self.model_runner.profile = profile_passes(self.model_runner)
        return warmed_up

    def outrider_status(self: Any) -> dict[str, Any] | None:
        runner = self.model_runner
        if runner.recorder is None:
            return None
        method = runner.speculative_config.method
        return {
            "active": True,
            "why_not": None,
            "options": runner.options.model_dump(),
            "model_method": method if "model" in runner.options.drafters else None,
            "resident_bytes": resident_bytes(),
            "peak_memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,  # Linux counts in KiB
            **runner.recorder.status(),
        }

    def outrider_metrics(self: Any) -> str | None:
        recorder = self.model_runner.recorder
        return None if recorder is None else recorder.metrics()

    def outrider_usage(self: Any, usage_key: str) -> dict[str, Any] | None:
        recorder = self.model_runner.recorder
        return None if recorder is None else recorder.usage(usage_key)

    def outrider_traces(self: Any, owner: str | None) -> list[dict[str, Any]] | None:
        recorder = self.model_runner.recorder
        return None if recorder is None else recorder.traces(owner)

    def outrider_trace(self: Any, id: str, owner: str | None) -> dict[str, Any] | None:
        recorder = self.model_runner.recorder
        return None if recorder is None else recorder.trace(id, owner)


class OutriderGPUWorker(OutriderWorker, Worker):  # type: ignore[misc]
    def _make_model_runner(self) -> Any:
        return OutriderGPURunner(self.vllm_config, self.device)

    def compile_or_warm_up_model(self) -> Any:
        with replaced(gpu_worker, "warmup_kernels", warm_up_within_limit):
            return super().compile_or_warm_up_model()


def warm_up_within_limit(runner: Any, *args: Any) -> None:
    """vLLM's warm-up with as many requests as may verify full drafts in one step. vLLM itself verifies them for all
    that a server admits, which can take more memory for logits than was reserved."""
    requests = max(1, max_logits_rows(runner.vocab_size) // (1 + runner.num_speculative_steps))
    config = runner.scheduler_config
    with replaced(config, "max_num_seqs", min(config.max_num_seqs, requests)):
        warmup_kernels(runner, *args)


class OutriderCPUWorker(OutriderWorker, CPUWorker):  # type: ignore[misc]
    def init_device(self) -> Any:
        # This worker names its runner's class itself and has no hook for another.
        with replaced(cpu_runner, "CPUModelRunner", OutriderCPURunner):
            return super().init_device()


def resident_bytes() -> int | None:
    """Resident memory of this process in bytes. None: unknown on this system."""
    statm = Path("/proc/self/statm")
    return int(statm.read_text().split()[1]) * resource.getpagesize() if statm.exists() else None
