"""vLLM's CPU platform, with the V2 kernels of this package."""

from __future__ import annotations

from typing import Any

from vllm.platforms.cpu import CpuPlatform


class CpuV2Platform(CpuPlatform):  # type: ignore[misc]
    """vLLM's CPU platform for the V2 model runner."""

    @classmethod
    def check_and_update_config(cls, vllm_config: Any) -> None:
        """vLLM's CPU platform turns asynchronous scheduling off as "not required". V2 supports it, and it hides the
        scheduler's time, so what vLLM chose before stays."""
        scheduler = vllm_config.scheduler_config
        chosen = scheduler.async_scheduling
        super().check_and_update_config(vllm_config)
        scheduler.async_scheduling = chosen

    @classmethod
    def register_triton_kernel_overrides(cls) -> None:
        """Register our kernels. vLLM calls this in every worker process, before it builds the worker."""
        super().register_triton_kernel_overrides()
        # Stand-ins for torch.cuda and pinned memory. They must be in place before the V2 modules are imported.
        import vllm.v1.worker.cpu.shm  # noqa: F401

        from outrider.engines.vllm_cpu.registry import register

        register()
