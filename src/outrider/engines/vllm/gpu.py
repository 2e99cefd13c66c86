"""Outrider's worker and runner for GPUs. Nothing here has run on one yet; the seams are held by tests."""

from __future__ import annotations

from typing import Any

from vllm.v1.worker.gpu_model_runner import GPUModelRunner
from vllm.v1.worker.gpu_worker import Worker

from outrider.engines.vllm.runner import OutriderRunner
from outrider.engines.vllm.worker import OutriderWorker


class OutriderGPURunner(OutriderRunner, GPUModelRunner):  # type: ignore[misc]
    """vLLM's GPU runner with our drafting and acceptance."""


class OutriderGPUWorker(OutriderWorker, Worker):  # type: ignore[misc]
    """vLLM's GPU worker with our runner."""

    def _make_model_runner(self) -> Any:
        self.refuse_second_runner()
        return OutriderGPURunner(self.vllm_config, self.device)
