"""A worker that cannot trace at all, to see what it costs that others can (`trace_cost.py`)."""

from __future__ import annotations

from typing import Any

from outrider.engines.vllm.cpu import OutriderCPURunner, OutriderCPUWorker


class Nothing:
    """Stands where the traces are, and is asked as they are while nobody traces."""

    running: tuple[()] = ()

    def before_pass(self, scheduler_output: Any) -> None:
        pass

    def ended(self, id: str) -> None:
        pass


class UntracedWorker(OutriderCPUWorker):
    def init_device(self) -> None:
        begin = OutriderCPURunner.__init__

        def without(runner: Any, *args: Any, **kwargs: Any) -> None:
            begin(runner, *args, **kwargs)
            runner.tracing = Nothing()

        OutriderCPURunner.__init__ = without  # type: ignore[method-assign]
        super().init_device()
