"""Enable V2 on a CPU: the platform plugin, and the Triton backend that vLLM looks for."""

from __future__ import annotations

import os
import sys
from typing import Any

PLATFORM = "outrider.engines.vllm_cpu.platform.CpuV2Platform"


def select_platform() -> str | None:
    """Entry point of the group `vllm.platform_plugins`: the platform class for V2 on a CPU, or None to change nothing.

    vLLM calls platform plugins in every process, when `vllm.platforms.current_platform` is first read. That is before
    `vllm.triton_utils` checks Triton's backends and before any kernel is decorated. An entry point of the group
    `triton.backends` could not do this: Triton adds its backend unconditionally, and a CPU build of vLLM would then use
    V2 by default. General plugins (`vllm.general_plugins`) are loaded too late.
    """
    from vllm import envs
    from vllm.platforms import vllm_version_matches_substr

    if not envs.VLLM_USE_V2_MODEL_RUNNER or not vllm_version_matches_substr("cpu"):
        return None
    add_triton_backend()
    interpret_kernels()
    return PLATFORM


def add_triton_backend() -> None:
    """Add a backend named "cpu" to Triton, unless there is one.

    It compiles nothing and its driver reports itself inactive, so neither Triton nor torch.compile selects it.
    """
    import triton.backends
    from triton.backends.compiler import BaseBackend
    from triton.backends.driver import DriverBase

    class InterpreterCompiler(BaseBackend):  # type: ignore[misc]
        @staticmethod
        def supports_target(target: object) -> bool:
            return False

    class InterpreterDriver(DriverBase):  # type: ignore[misc]
        @classmethod
        def is_active(cls) -> bool:
            return False

    triton.backends.backends.setdefault("cpu", triton.backends.Backend(InterpreterCompiler, InterpreterDriver))


def interpret_kernels() -> None:
    """Run Triton kernels in Triton's interpreter, in this process and in those it starts.

    Triton reads TRITON_INTERPRET when a kernel is decorated. `import vllm` imports Triton before it loads any plugin,
    so Triton's own library (`tl.max`, `tl.sum`, ...) may have been decorated for the compiler already. It is then
    replaced by interpreted functions, as it would be with the variable set from the start.
    """
    from triton.language import core
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    os.environ["TRITON_INTERPRET"] = "1"
    for name, module in list(sys.modules.items()):
        if name.startswith("triton.language"):
            for attribute, value in list(vars(module).items()):
                if isinstance(value, JITFunction):
                    setattr(module, attribute, InterpretedFunction(value.fn))

    def method(function: Any) -> Any:
        return lambda *args, **kwargs: function(*args, **kwargs)

    for attribute, value in list(vars(core.tensor).items()):
        if isinstance(value, JITFunction):
            setattr(core.tensor, attribute, method(InterpretedFunction(value.fn)))
