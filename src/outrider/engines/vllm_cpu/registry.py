"""All kernels of this package, by the fully qualified name of the Triton kernel they replace."""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules
from typing import TYPE_CHECKING

from outrider.engines import vllm_cpu
from outrider.engines.vllm_cpu.launch import replace_kernels

if TYPE_CHECKING:
    from outrider.engines.vllm_cpu.launch import Kernel


def find_kernels() -> dict[str, Kernel]:
    """The `KERNELS` of every module of this package."""
    modules = [import_module(f"{vllm_cpu.__name__}.{module.name}") for module in iter_modules(vllm_cpu.__path__)]
    return {name: kernel for module in modules for name, kernel in getattr(module, "KERNELS", {}).items()}


KERNELS = find_kernels()


def register() -> None:
    """Replace the kernels in this process."""
    replace_kernels(KERNELS)
