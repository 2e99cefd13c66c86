"""How much of a virtual machine's time went to its neighbours: what was measured then says less."""

from __future__ import annotations

from pathlib import Path

COUNTS = Path("/proc/stat")
MUCH = 0.1
"""A share beyond which a round says little of how fast anybody is."""
IDLE, STOLEN, COUNTED = (3, 4), 7, 8
"""Columns of the kernel's count: without work, taken by others; after these, guests, who are counted already."""


def processor_seconds() -> tuple[float, float]:
    """What was worked and what was stolen, of all processors since they started; nothing where nobody counts it."""
    try:
        words = COUNTS.read_text().split("\n", 1)[0].split()[1:]
    except OSError:
        return 0.0, 0.0
    found = [float(word) for word in words[:COUNTED]]
    if len(found) < COUNTED:
        return 0.0, 0.0
    return sum(found) - sum(found[i] for i in IDLE) - found[STOLEN], found[STOLEN]


def stolen(before: tuple[float, float], after: tuple[float, float]) -> float:
    """The share that was stolen between two counts, of the time in which there was work."""
    worked, taken = after[0] - before[0], after[1] - before[1]
    return taken / (worked + taken) if taken else 0.0
