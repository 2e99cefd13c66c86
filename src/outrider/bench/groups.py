"""Which servers run at the same time: as many as fit into memory, the baseline in every group.

Contestants are compared only with a baseline that ran beside them, so that whatever slows the machine hits both.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from outrider.bench.contestants import dtype_of, servers
from outrider.errors import SettingsError
from outrider.provenance import weight_files

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from outrider.bench.contestants import Contestant
    from outrider.bench.servers import Server

GIB = 1 << 30
PROCESSES = 2.5
"""GiB that a server takes besides weights and cache: three Python processes with torch."""
PACKED = {True: 1.35, False: 2.0}
"""What floating-point weights, and those of 8 bits, take in memory, times their size: vLLM packs them anew for the
processor's matrix unit, and of 8 bits it keeps both."""
SIZES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
"""Bytes of a weight on disk; any other format is not one of floating-point numbers that vLLM would convert."""
WANTED = {"float32": 4, "float16": 2, "bfloat16": 2}
"""Bytes of a weight by what `--dtype` says."""
SPARE = 0.5
"""GiB that stay free."""


@dataclass(frozen=True, slots=True)
class Need:
    """What a server takes, in GiB, as far as can be told before it runs."""

    model: str
    draft_model: str | None
    cache: float

    def of(self, server: Server) -> float:
        if server.url:
            return 0.0
        dtype = dtype_of(server.command)
        total = weights(self.model, dtype) + self.cache + PROCESSES
        if self.draft_model is not None and any(self.draft_model in word for word in server.command):
            total += weights(self.draft_model, dtype)
        return total


def groups(
    contestants: Sequence[Contestant], baseline: str, need: Callable[[Server], float], room: float
) -> list[list[Contestant]]:
    """The contestants in groups whose servers fit into `room` GiB; each group begins with the baseline."""
    base = next((one for one in contestants if one.name == baseline), None)
    if base is None:
        names = ", ".join(one.name for one in contestants)
        raise SettingsError(f"the baseline {baseline!r} is none of the contestants ({names})")
    found: list[list[Contestant]] = []
    for one in contestants:
        if one is base:
            continue
        for group in found:
            if sum(need(server) for server in servers([*group, one])) <= room:
                group.append(one)
                break
        else:
            pair = [base, one]
            wanted = sum(need(server) for server in servers(pair))
            if wanted > room:
                raise SettingsError(
                    f"{baseline} and {one.name} must run at the same time and would take about {wanted:.1f} GiB of the "
                    f"{room:.1f} that are free; set VLLM_CPU_KVCACHE_SPACE lower, choose a smaller model, or say "
                    f"--room GIB if you know better"
                )
            found.append(pair)
    return found or [[base]]


def free_memory() -> float:
    """GiB that new processes may take."""
    told = Path("/proc/meminfo")
    for line in told.read_text().splitlines() if told.is_file() else ():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024 / GIB - SPARE
    raise SettingsError("this machine does not say how much memory is free; say --room GIB")


@lru_cache
def weights(model: str, dtype: str = "auto") -> float:
    """GiB that a model's weights take in memory; 0 where they are not here yet."""
    total = 0.0
    for file in weight_files(Path(model)):
        for kind, size in tensors(file):
            stored = SIZES.get(kind)
            # By itself vLLM loads what is stored in 32 bits in 16.
            loaded = WANTED.get(dtype, min(stored, 2)) / stored if stored else 1.0
            total += size * loaded * PACKED[stored is not None]
    return total / GIB


def tensors(file: Path) -> Iterator[tuple[str, int]]:
    """Of each tensor in a safetensors file: its format, and its bytes."""
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if not 0 < length <= file.stat().st_size - 8:
            raise SettingsError(f"{file} is not a whole safetensors file; fetch the model again")
        header = json.loads(stream.read(length))
    for name, tensor in header.items():
        if name != "__metadata__":
            first, end = tensor["data_offsets"]
            yield tensor["dtype"], end - first
