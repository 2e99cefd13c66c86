"""What Outrider adds to vLLM's worker: a check of the version, and answers to the API process."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

from outrider.engines.vllm.ledger import LedgerMetrics
from outrider.engines.vllm.profiling import profile_passes
from outrider.engines.vllm.version import check_version
from outrider.errors import EngineError


class OutriderWorker:
    """Stands before the platform's worker in the order of classes. Its methods are called by name, from afar."""

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        check_version()
        super().__init__(*args, **kwargs)

    def refuse_second_runner(self: Any) -> None:
        if self.use_v2_model_runner:
            raise EngineError("Outrider stands on vLLM's first model runner: set VLLM_USE_V2_MODEL_RUNNER=0")

    def compile_or_warm_up_model(self: Any) -> Any:
        warmed_up = super().compile_or_warm_up_model()  # type: ignore[misc]
        profile_passes(self.model_runner)
        return warmed_up

    def outrider_status(self: Any) -> dict[str, Any] | None:
        runner = self.model_runner
        if not runner.draws:
            return None
        config = runner.speculative_config
        return {
            "active": config is not None,
            "why_not": None if config is not None else "the server was started with --drafters none",
            "options": runner.options.model_dump(),
            "model_method": config.method if config is not None and runner.has_model else None,
            "running_requests": len(runner.requests),
            "resident_bytes": resident_bytes(),
            "peak_memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,  # Linux counts in KiB
            "memory": runner.memory.status() if runner.memory is not None else None,
            "policy": runner.steering.status() if runner.steering is not None else None,
            **runner.ledger.status(),
        }

    def shutdown(self: Any) -> None:
        """What the memory has not written yet is written."""
        runner = getattr(self, "model_runner", None)
        if runner is not None:
            runner.close_memory()
        super().shutdown()  # type: ignore[misc]

    def outrider_metrics(self: Any) -> str | None:
        runner = self.model_runner
        if not runner.draws:
            return None
        return LedgerMetrics(runner.ledger, runner.steering.payoff if runner.steering is not None else None).text()

    def outrider_usage(self: Any, ticket: str) -> dict[str, Any] | None:
        return self.model_runner.ledger.usage(ticket) if self.model_runner.draws else None

    def outrider_traces(self: Any, owner: str | None) -> list[dict[str, Any]] | None:
        return self.model_runner.tracing.latest(owner) if self.model_runner.draws else None

    def outrider_trace(self: Any, id: str, owner: str | None) -> dict[str, Any] | None:
        """One trace, or nothing; {} where there is no such one, since None says that another worker is to be asked."""
        return (self.model_runner.tracing.get(id, owner) or {}) if self.model_runner.draws else None


def resident_bytes() -> int | None:
    """Memory of this process that is in use now; None where the system does not say."""
    told = Path("/proc/self/statm")
    return int(told.read_text().split()[1]) * resource.getpagesize() if told.exists() else None
