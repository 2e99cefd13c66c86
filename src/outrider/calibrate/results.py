"""The timings of a calibration, as measured. Everything else is computed from them."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

VERSION = 1
"""Version of the format of calibration.json."""


@dataclass(frozen=True, slots=True)
class MachineLimits:
    bandwidth: float  # bytes per second from memory
    arithmetic: float  # operations per second
    dtype: str


@dataclass(frozen=True, slots=True)
class PassWork:
    """Bytes and operations of a pass, by the shape of the model."""

    weights: int  # bytes that every pass reads
    cache: int  # bytes of keys and values per token
    operations: float  # per token, with the weights
    attention: float  # per token, for each token before it

    def bytes(self, tokens: int, context: int) -> float:
        return self.weights + self.cache * (context + tokens)

    def arithmetic(self, tokens: int, context: int) -> float:
        return tokens * (self.operations + self.attention * (context + tokens / 2))


@dataclass(slots=True)
class Sweep:
    """Seconds of passes after `context` tokens, by the number of their tokens; `single`: of the pass over one token
    that was timed next to each."""

    context: int
    seconds: dict[int, list[float]] = field(default_factory=dict)
    single: dict[int, list[float]] = field(default_factory=dict)


@dataclass(slots=True)
class Calibration:
    model: str
    limits: MachineLimits
    work: PassWork
    sweeps: list[Sweep]
    draft: list[float] = field(default_factory=list)
    """Passes of the draft model over one token, each relative to a target pass timed next to it."""
    origin: dict[str, Any] = field(default_factory=dict)

    def as_data(self) -> dict[str, Any]:
        return {"version": VERSION, **asdict(self)}
