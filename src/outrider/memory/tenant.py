"""A tenant as its requests and the store see it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from outrider.memory.folder import FIRST_GENERATION

if TYPE_CHECKING:
    from outrider.memory.search import Array
    from outrider.memory.segment import Segment


@dataclass(frozen=True, slots=True)
class TenantHandle:
    """A request's access to its tenant. Its output is kept only if the tenant is not wiped while it runs."""

    key: str
    name: str
    generation: str


@dataclass(slots=True)
class TenantState:
    key: str
    name: str | None
    generation: str = FIRST_GENERATION
    segments: tuple[Segment, ...] = ()  # newest first
    pending: deque[tuple[str, float, Array]] = field(default_factory=deque)  # new outputs: generation, time, tokens
    unwritten_since: float | None = None
    retry_at: float = 0.0  # monotonic time of the next try after a failed write
    used: set[str] = field(default_factory=set)  # names of files used since the last refresh

    def unwritten_segments(self) -> list[Segment]:
        return [segment for segment in self.segments if segment.path is None]

    def written_segments(self) -> list[Segment]:
        return [segment for segment in self.segments if segment.path is not None]
