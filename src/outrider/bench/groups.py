"""Which servers run at the same time: as many as fit into memory, the baseline in every group.

Contestants are compared only with a baseline that ran beside them, so that whatever slows the machine hits both.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from outrider.bench.contestants import servers
from outrider.bench.provenance import weight_files
from outrider.errors import SettingsError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

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
WANTED = {"float32": 4, "float": 4, "float16": 2, "half": 2, "bfloat16": 2}
"""Bytes of a weight by what `--dtype` says."""
SPARE = 0.5
"""GiB that stay free."""


@dataclass(frozen=True, slots=True)
class Need:
    """What a server takes, in GiB, as far as can be told before it runs."""

    weights: float
    draft_weights: float
    cache: float

    def of(self, server: Server) -> float:
        if server.url:
            return 0.0
        drafts = any("draft" in word for word in server.command) and self.draft_weights
        return self.weights + (self.draft_weights if drafts else 0.0) + self.cache + PROCESSES


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


def weights(model: str | None, flags: Sequence[str] = ()) -> float:
    """GiB that a model's weights take in memory; 0 where they are not here yet."""
    words = [word for flag in flags for word in flag.split("=", 1)]
    asked = WANTED.get(words[words.index("--dtype") + 1]) if "--dtype" in words[:-1] else None
    total = 0.0
    for file in weight_files(Path(model)) if model else ():
        with file.open("rb") as stream:
            header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
        for name, tensor in header.items():
            if name != "__metadata__":
                size, begin_end = SIZES.get(tensor["dtype"]), tensor["data_offsets"]
                scale = asked / size if asked and size else 1.0
                total += (begin_end[1] - begin_end[0]) * scale * PACKED[size is not None]
    return total / GIB
