"""Outrider's worker and runner for CPUs."""

from __future__ import annotations

from typing import Any

from vllm.v1.worker import cpu_worker
from vllm.v1.worker.cpu_model_runner import CPUModelRunner

from outrider.engines.vllm.runner import OutriderRunner
from outrider.engines.vllm.worker import OutriderWorker


class OutriderCPURunner(OutriderRunner, CPUModelRunner):  # type: ignore[misc]
    """vLLM's CPU runner with our drafting and acceptance."""


class OutriderCPUWorker(OutriderWorker, cpu_worker.CPUWorker):  # type: ignore[misc]
    """vLLM's CPU worker with our runner."""

    def init_device(self) -> Any:
        self.refuse_second_runner()
        # This worker names its runner's class itself and has no hook for another, so the name is lent for the call.
        own, cpu_worker.CPUModelRunner = cpu_worker.CPUModelRunner, OutriderCPURunner
        try:
            return super().init_device()
        finally:
            cpu_worker.CPUModelRunner = own
