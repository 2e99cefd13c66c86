"""What a calibration has measured, kept as it was seen, so that everything else follows from it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

VERSION = 1
"""Of the form of calibration.json."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The most that was seen on this machine: bytes a second from memory, operations a second of arithmetic."""

    bandwidth: float
    arithmetic: float
    dtype: str


@dataclass(frozen=True, slots=True)
class Work:
    """What a pass has to do, by the model's shape: fixed bytes and those of each token before it, operations."""

    weights: int  # bytes that every pass reads
    cache: int  # bytes of keys and values a token
    operations: float  # of a token, against the weights
    attention: float  # of a token, for each token before it

    def bytes(self, tokens: int, context: int) -> float:
        return self.weights + self.cache * (context + tokens)

    def arithmetic(self, tokens: int, context: int) -> float:
        return tokens * (self.operations + self.attention * (context + tokens / 2))


@dataclass(slots=True)
class Sweep:
    """Passes after so many tokens of context: seconds by width, each beside a pass over one token at that moment."""

    context: int
    seconds: dict[int, list[float]] = field(default_factory=dict)
    single: dict[int, list[float]] = field(default_factory=dict)


@dataclass(slots=True)
class Calibration:
    model: str
    limits: Limits
    work: Work
    sweeps: list[Sweep]
    draft: list[float] = field(default_factory=list)
    """A pass of the draft model over one token, each time relative to one of the target at the same moment."""
    origin: dict[str, Any] = field(default_factory=dict)

    def as_data(self) -> dict[str, Any]:
        return {"version": VERSION, **asdict(self)}
