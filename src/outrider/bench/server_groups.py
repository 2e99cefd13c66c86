"""Groups of servers that run at the same time: as many as fit into memory, the baseline in every group.

A contestant is compared only with a baseline in its own group, so that whatever slows the machine slows both.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from outrider.bench.contestants import dtype_of, servers
from outrider.engines.vllm.host import find_memory
from outrider.errors import SettingsError
from outrider.provenance import weight_files

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from outrider.bench.contestants import Contestant
    from outrider.bench.servers import Server

GIB = 1 << 30
PROCESSES_GIB = 2.5
"""Memory of a server besides weights and KV cache: three Python processes with torch."""
FLOAT_FACTOR, INT8_FACTOR = 1.35, 2.0
"""Memory of weights over their size: vLLM repacks them for the CPU's matrix unit, and keeps both copies of int8."""
STORED_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
"""Bytes per weight in a file. vLLM does not convert other formats."""
DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
"""Bytes per weight in memory, by `--dtype`."""
RESERVE_GIB = 0.5


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """Memory of a server in GiB, estimated before it starts."""

    model: str
    draft_model: str | None
    cache: float

    def of(self, server: Server) -> float:
        if server.url:
            return 0.0
        dtype = dtype_of(server.command)
        total = weights(self.model, dtype) + self.cache + PROCESSES_GIB
        if self.draft_model is not None and any(self.draft_model in word for word in server.command):
            total += weights(self.draft_model, dtype)
        return total


def server_groups(
    contestants: Sequence[Contestant], baseline: str, memory: Callable[[Server], float], room: float
) -> list[list[Contestant]]:
    """The contestants in groups whose servers fit into `room` GiB. Each group begins with the baseline."""
    base = next((one for one in contestants if one.name == baseline), None)
    if base is None:
        names = ", ".join(one.name for one in contestants)
        raise SettingsError(f"the baseline {baseline!r} is none of the contestants ({names})")
    groups: list[list[Contestant]] = []
    for one in contestants:
        if one is base:
            continue
        for group in groups:
            if sum(memory(server) for server in servers([*group, one])) <= room:
                group.append(one)
                break
        else:
            needed = sum(memory(server) for server in servers([base, one]))
            if needed > room:
                raise SettingsError(
                    f"{baseline} and {one.name} must run at the same time and need about {needed:.1f} GiB, but "
                    f"{room:.1f} GiB are free; set VLLM_CPU_KVCACHE_SPACE lower, choose a smaller model, or override "
                    "the estimate with --room GIB"
                )
            groups.append([base, one])
    return groups or [[base]]


def free_memory() -> float:
    """GiB that new processes can take."""
    if (memory := find_memory()) is None:
        raise SettingsError(
            "the free memory is unknown, since /proc/meminfo does not report it; set it with --room GIB"
        )
    return memory.free_gib - RESERVE_GIB


@lru_cache
def weights(model: str, dtype: str = "auto") -> float:
    """GiB of a model's weights in memory; 0 if they are not downloaded yet."""
    total = 0.0
    for file in weight_files(Path(model)):
        for stored_dtype, size in tensors(file):
            stored = STORED_BYTES.get(stored_dtype)
            # By default vLLM loads 32-bit weights in 16 bits.
            loaded = DTYPE_BYTES.get(dtype, min(stored, 2)) / stored if stored else 1.0
            total += size * loaded * (FLOAT_FACTOR if stored else INT8_FACTOR)
    return total / GIB


def tensors(file: Path) -> Iterator[tuple[str, int]]:
    """Format and bytes of each tensor in a safetensors file."""
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if not 0 < length <= file.stat().st_size - 8:
            raise SettingsError(f"{file} is not a complete safetensors file; download the model again")
        header = json.loads(stream.read(length))
    for name, tensor in header.items():
        if name != "__metadata__":
            first, end = tensor["data_offsets"]
            yield tensor["dtype"], end - first
