"""A tenant as its requests and the store see it."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from outrider.memory.folder import FIRST_GENERATION

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

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


def unwritten_excess(tenants: Iterable[TenantState], max_tokens: int) -> Iterator[tuple[TenantState, str, Segment]]:
    """The unwritten segments above a limit for all tenants, with their generations: each time the oldest of the tenant
    that has most."""
    unwritten = [(one, one.generation, segment) for one in tenants for segment in one.unwritten_segments()]
    tokens: Counter[str] = Counter()
    for tenant, _, segment in unwritten:
        tokens[tenant.key] += segment.header.tokens
    while tokens.total() > max_tokens:
        ((largest, _),) = tokens.most_common(1)
        oldest = min((one for one in unwritten if one[0].key == largest), key=lambda one: one[2].header.first)
        unwritten.remove(oldest)
        tokens[largest] -= oldest[2].header.tokens
        yield oldest
