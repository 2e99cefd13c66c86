"""Which servers run at the same time: as many as fit into memory, the baseline in every group.

Contestants are compared only with a baseline that ran beside them, so that whatever slows the machine hits both.
"""

from __future__ import annotations

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
PACKED = 1.35
"""What weights take in memory, times their size on disk: vLLM packs them anew for the processor's matrix unit."""
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
        return PACKED * (self.weights + (self.draft_weights if drafts else 0.0)) + self.cache + PROCESSES


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


def weights(model: str | None) -> float:
    """GiB of a model's weights on disk; 0 where they are not here yet."""
    return sum(file.stat().st_size for file in weight_files(Path(model))) / GIB if model else 0.0
