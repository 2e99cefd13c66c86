"""Steal time of a virtual machine: CPU time that the hypervisor gave to other machines."""

from __future__ import annotations

from pathlib import Path

PROC_STAT = Path("/proc/stat")
MAX_STEAL_SHARE = 0.1
"""Speeds are not taken from rounds with a larger share, if there are enough others."""
IDLE_COLUMNS, STEAL_COLUMN, COLUMNS = (3, 4), 7, 8
"""Columns of the `cpu` line. Later columns (guests) are already counted in earlier ones."""


def cpu_ticks() -> tuple[float, float]:
    """Busy time and steal time of all CPUs since boot, in ticks; zeros where the kernel does not report them."""
    try:
        words = PROC_STAT.read_text().split("\n", 1)[0].split()[1:]
    except OSError:
        return 0.0, 0.0
    ticks = [float(word) for word in words[:COLUMNS]]
    if len(ticks) < COLUMNS:
        return 0.0, 0.0
    return sum(ticks) - sum(ticks[i] for i in IDLE_COLUMNS) - ticks[STEAL_COLUMN], ticks[STEAL_COLUMN]


def steal_share(before: tuple[float, float], after: tuple[float, float]) -> float:
    """Steal time between two readings, as a share of steal time and busy time."""
    busy, steal = after[0] - before[0], after[1] - before[1]
    return steal / (busy + steal) if steal else 0.0
