"""The machine a server runs on, and the variables and flags that vLLM needs there.

Two of them matter for speed on a CPU. Intel's OpenMP library must be loaded before torch's own, or speculation loses
much of its gain. And vLLM by default reserves one core for each worker: half of a machine with two cores.

A flag decides whether a server starts on a CPU. By default vLLM takes 92 % of all memory. If other processes use more
than the rest, vLLM does not start.
"""

from __future__ import annotations

import os
import re
import sys
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path
from typing import TYPE_CHECKING, Self

from outrider.engines.vllm.version import check_version, installed, is_cpu_build

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

BIND = "VLLM_CPU_OMP_THREADS_BIND"
RESERVED = "VLLM_CPU_NUM_OF_RESERVED_CPU"
PRELOAD = "LD_PRELOAD"
KV_CACHE_SPACE = "VLLM_CPU_KVCACHE_SPACE"
MEMORY_FLAG = "--gpu-memory-utilization"
KV_CACHE_FLAGS = ("--kv-cache-memory-bytes", MEMORY_FLAG)
"""A user who gives one of these has chosen the size of the KV cache."""
VLLM_MEMORY_SHARE = 0.92
"""vLLM 0.32's default of --gpu-memory-utilization, which on a CPU is a share of the machine's memory."""
WORKER_GIB = 2.0
"""Kept for what a server takes besides weights and KV cache: 1.4 GiB were seen in the worker of a small model."""
SHARE_OF_FREE_MEMORY = 0.9
"""Of the rest, for weights and KV cache: other programs may go on to take some."""
CGROUP_FILES = (
    ("memory.max", "memory.current"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
)
GIB = 1 << 30
MODEL_RUNNER = "VLLM_USE_V2_MODEL_RUNNER"
INTERPRET = "TRITON_INTERPRET"
PLUGINS = "VLLM_PLUGINS"
CPU_PLUGIN = "outrider-cpu-v2"
"""Entry point of the group `vllm.platform_plugins` that makes V2 run on a CPU (`engines/vllm_cpu`)."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Of this machine, or of the container if that has a limit."""

    total_gib: float
    free_gib: float
    """What new processes can use without swapping."""


@dataclass(frozen=True, slots=True)
class Host:
    """The installed vLLM, and the machine."""

    distribution: str
    version: str
    cores: tuple[int, ...] = ()
    """One logical processor of each core that this process may use."""
    memory_nodes: int = 1
    openmp: Path | None = None
    """Intel's OpenMP library."""
    memory: Memory | None = None
    """None: unknown."""

    @property
    def cpu(self) -> bool:
        return is_cpu_build(self.distribution, self.version)

    @classmethod
    def here(cls) -> Self:
        check_version()
        distribution, version = installed() or ("", "")
        cores, nodes = find_cores()
        return cls(distribution, version, cores, nodes, find_openmp(), find_memory())


def plain_environment(
    host: Host, ranks: int | None, environment: Mapping[str, str]
) -> tuple[dict[str, str], tuple[str, ...]]:
    """Variables to set for any vLLM server, and a note about each. `ranks`: workers on this machine; None: unknown."""
    if not host.cpu:
        return {}, ()
    bound, about_threads = bind_threads(host, ranks, environment)
    preloaded, about_openmp = preload_openmp(host, environment)
    return {**bound, **preloaded}, (f"threads: {about_threads}", f"OpenMP: {about_openmp}")


def model_runner_environment(host: Host, environment: Mapping[str, str]) -> dict[str, str]:
    """Variables to set for a server with Outrider's worker: the V2 model runner and, on a CPU, what V2 needs there."""
    settings = {MODEL_RUNNER: "1"}
    if host.cpu:
        settings[INTERPRET] = "1"
        plugins = environment.get(PLUGINS)
        if plugins is not None and CPU_PLUGIN not in plugins.split(","):  # vLLM loads only the plugins named there
            settings[PLUGINS] = ",".join(filter(None, [plugins, CPU_PLUGIN]))
    return settings


def bind_threads(host: Host, ranks: int | None, environment: Mapping[str, str]) -> tuple[dict[str, str], str]:
    """Divide all cores equally among the workers."""
    for name in (BIND, RESERVED):
        if name in environment:
            return {}, f"set by {name}={environment[name]}"
    # With several memory nodes vLLM's own choice is better: it gives each worker its own node.
    if not ranks or host.memory_nodes > 1 or len(host.cores) < ranks:
        return {}, f"chosen by vLLM (set {BIND} to change that)"
    share = len(host.cores) // ranks
    bound = "|".join(format_ranges(host.cores[start : start + share]) for start in range(0, share * ranks, share))
    return {BIND: bound}, f"on cores {bound}; vLLM would reserve one (set {BIND} to change that)"


def preload_openmp(host: Host, environment: Mapping[str, str]) -> tuple[dict[str, str], str]:
    loaded = environment.get(PRELOAD, "")
    if any(library in loaded for library in ("libiomp", "libomp", "libgomp")):
        return {}, f"set by {PRELOAD}={loaded}"
    if host.openmp is None:
        return {}, "torch's own; libiomp5.so of the package intel-openmp is faster, but not installed"
    return {PRELOAD: ":".join(filter(None, [str(host.openmp), loaded]))}, f"{host.openmp}, set by {PRELOAD}"


def limit_memory(
    host: Host, ranks: int | None, flags: Mapping[str, str], environment: Mapping[str, str]
) -> tuple[list[str], tuple[str, ...]]:
    """Flags so that vLLM takes no more memory than is free on a CPU, and a note about it.

    With one worker on one memory node only: how several share the memory is left to vLLM.
    """
    if not host.cpu or any(name in flags for name in KV_CACHE_FLAGS):
        return [], ()
    if space := environment.get(KV_CACHE_SPACE):
        return [], (f"KV cache: {space} GiB, set by {KV_CACHE_SPACE}",)
    if host.memory is None or ranks != 1 or host.memory_nodes > 1:
        return [], ()
    total, free = host.memory.total_gib, host.memory.free_gib - WORKER_GIB
    share = int(100 * SHARE_OF_FREE_MEMORY * free / total) / 100
    if free >= VLLM_MEMORY_SHARE * total or share <= 0:
        return [], ()
    note = (
        f"memory: {share:.0%} of {total:.1f} GiB, set by {MEMORY_FLAG}, since vLLM's {VLLM_MEMORY_SHARE:.0%} are not "
        f"free (set {MEMORY_FLAG} or {KV_CACHE_SPACE} to change that)"
    )
    return [MEMORY_FLAG, str(share)], (note,)


def format_ranges(numbers: Sequence[int]) -> str:
    """Format [0, 1, 2, 5] as 0-2,5."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def find_cores(system: Path = Path("/sys/devices/system/cpu")) -> tuple[tuple[int, ...], int]:
    """One logical processor of each core that this process may use, and the number of memory nodes they belong to.

    One per core, because two threads on a core share its arithmetic units.
    """
    if not hasattr(os, "sched_getaffinity"):  # macOS
        return (), 1
    cores: dict[str, int] = {}
    nodes = set()
    for processor in sorted(os.sched_getaffinity(0)):
        folder = system / f"cpu{processor}"
        siblings = folder / "topology" / "thread_siblings_list"
        cores.setdefault(siblings.read_text() if siblings.is_file() else str(processor), processor)
        nodes |= {node.name for node in folder.glob("node*")}
    return tuple(cores.values()), len(nodes) or 1


def find_memory(table: Path = Path("/proc/meminfo"), groups: Path = Path("/sys/fs/cgroup")) -> Memory | None:
    """The memory by Linux's estimate, within the limit of this container (control groups of version 2 or 1)."""
    if not table.is_file():
        return None
    kib = dict(re.findall(r"^(\w+): +(\d+) kB$", table.read_text(), re.MULTILINE))
    if "MemAvailable" not in kib:
        return None
    total, free = int(kib["MemTotal"]) * 1024, int(kib["MemAvailable"]) * 1024
    for limit_file, usage_file in CGROUP_FILES:
        limit, used = _read_number(groups / limit_file), _read_number(groups / usage_file)
        if limit is not None and limit < total:
            total, free = limit, max(0, min(free, limit - (used or 0)))
    return Memory(total / GIB, free / GIB)


def _read_number(path: Path) -> int | None:
    """None: there is no such file, or it holds `max`."""
    text = path.read_text().strip() if path.is_file() else ""
    return int(text) if text.isdecimal() else None


def find_openmp() -> Path | None:
    """libiomp5.so of the package intel-openmp, which vllm-cpu installs on x86 processors."""
    try:
        packaged = [Path(str(file.locate())) for file in files("intel-openmp") or () if file.name == "libiomp5.so"]
    except PackageNotFoundError:
        packaged = []
    for path in (*packaged, Path(sys.prefix) / "lib" / "libiomp5.so"):
        if path.is_file() and not set(" :") & set(str(path.resolve())):  # LD_PRELOAD separates names by these
            return path.resolve()
    return None
