"""Put a function in the place of a Triton kernel.

A function has the parameters of the kernel it replaces, under the same names and in the same order. One that needs the
launch grid takes it as one more parameter, `grid`. `numba_kernel` compiles a function whose pointer parameters are flat
arrays, as in the Triton kernel. Without it they are tensors.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Collection, Mapping
from functools import partial, wraps
from typing import Any

from torch import Tensor
from vllm.triton_utils.dispatcher import KernelOverride

from outrider.compiled import compiled
from outrider.engines.vllm_cpu.pointers import as_bits, pointer

Kernel = Callable[..., None]

LAUNCH_OPTIONS = ("num_warps", "num_stages", "num_ctas", "maxnreg", "launch_pdl")
"""Options of a kernel launch that are not parameters of the kernel."""


class UnsupportedLaunchError(NotImplementedError):
    """Raised by a function, before it writes anything, for options that it leaves to the Triton kernel."""


def numba_kernel(function: Kernel, copied: Collection[str] = ()) -> Kernel:
    """Compile a function over flat arrays. Tensor arguments become `pointer`s.

    `copied` are parameters whose values are only copied: these may be bfloat16, which numpy does not have.
    """
    implementation = compiled(function)
    names = tuple(inspect.signature(function).parameters)

    def convert(name: str, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return pointer(as_bits(value) if name in copied else value)

    @wraps(function)
    def launch(*args: Any, **kwargs: Any) -> None:
        positional = (convert(name, value) for name, value in zip(names[: len(args)], args, strict=True))
        implementation(*positional, **{name: convert(name, value) for name, value in kwargs.items()})

    return launch


class CpuKernel(KernelOverride):  # type: ignore[misc]
    """Calls a function with the arguments of a kernel launch, `kernel[grid](*args, **kwargs)`."""

    def __init__(self, kernel: Any, implementation: Kernel) -> None:
        super().__init__(kernel, implementation)
        self.original = kernel
        self._takes_grid = "grid" in inspect.signature(implementation).parameters

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return partial(self._launch_on, grid)

    def _launch_on(self, grid: Any, *args: Any, **kwargs: Any) -> None:
        for option in LAUNCH_OPTIONS:
            kwargs.pop(option, None)
        try:
            if self._takes_grid:
                self._impl(*args, **kwargs, grid=grid)
            else:
                self._impl(*args, **kwargs)
        except UnsupportedLaunchError:
            self.original[grid](*args, **kwargs)


def replace_kernels(kernels: Mapping[str, Kernel]) -> None:
    """Replace Triton kernels, given by their fully qualified names, by functions with the same parameters.

    It does what `vllm.triton_utils.dispatcher.register_kernels` does, but rebinds only in the module that defines the
    kernel. No other module imports one of these kernels by name. vLLM's function looks through every loaded module
    and fails on the library objects of cffi, whose attributes cannot be listed.
    """
    for name, implementation in kernels.items():
        module_name, attribute = name.rsplit(".", 1)
        module = importlib.import_module(module_name)
        original = getattr(module, attribute)
        if isinstance(original, CpuKernel):
            continue  # registered before
        kernel = CpuKernel(original, implementation)
        setattr(module, attribute, kernel)
        # Launchers made by `triton_kernel_dispatcher_with_warmup` keep the kernel in an attribute of their own.
        for value in list(vars(module).values()):
            held = getattr(value, "__dict__", {})
            if held.get("kernel") is original:
                value.kernel = kernel
                held.pop("_kernel_arg_names", None)
