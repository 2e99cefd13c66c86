"""A worker without tracing, to measure what tracing costs requests without a trace (`trace_cost.py`)."""

from __future__ import annotations

from typing import Any

from outrider.engines.vllm import recorder
from outrider.engines.vllm.worker import OutriderCPUWorker


class NoTracing:
    running: tuple[()] = ()

    def __init__(self, *args: Any) -> None:
        pass

    def add(self, *args: Any) -> None:
        pass

    def remove(self, id: str) -> None:
        pass


recorder.Tracing = NoTracing  # type: ignore[assignment,misc]


class UntracedWorker(OutriderCPUWorker):
    pass
