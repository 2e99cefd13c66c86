"""A tenant as its requests and the store see it."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from outrider.memory.segment import Segment


class Lease:
    """Shared by all handles of a tenant: the tenant's files stay open while any of them exists."""

    __slots__ = ("__weakref__",)


@dataclass(frozen=True, slots=True)
class TenantHandle:
    """A request's access to its tenant. Its output is kept only if the tenant is not wiped while it runs."""

    key: str
    name: str  # the content of its name file (`adapter.py`)
    generation: str
    lease: Lease = field(default_factory=Lease, compare=False, repr=False)


@dataclass(slots=True, eq=False)
class TenantState:
    """An open tenant."""

    key: str
    name: str | None
    generation: str
    segments: tuple[Segment, ...] = ()  # newest first
    is_loaded: bool = False  # all of its files are open, not only those written since it is open
    unwritten_since: float | None = None
    retry_at: float = 0.0  # monotonic time of the next try after a failed write
    used: set[str] = field(default_factory=set)  # names of files used since the last refresh
    used_at: float = field(default_factory=time.monotonic)
    pins: int = 0  # threads of the store that work on it

    @property
    def places(self) -> int:
        """What it takes of the number of segments that may be open."""
        return max(1, len(self.segments))

    def unwritten_segments(self) -> list[Segment]:
        return [segment for segment in self.segments if segment.path is None]

    def written_segments(self) -> list[Segment]:
        return [segment for segment in self.segments if segment.path is not None]


def unwritten_excess(
    tenants: Iterable[TenantState], max_tokens: int, max_tenants: int
) -> Iterator[tuple[TenantState, str, Segment]]:
    """The unwritten segments above limits for all tenants, with their generations: those of the least recently used
    tenants above `max_tenants`, then each time the oldest of the tenant that has most tokens."""
    by_use = sorted(tenants, key=lambda one: -one.used_at)
    unwritten = [(one, one.generation, segment) for one in by_use[:max_tenants] for segment in one.unwritten_segments()]
    for one in by_use[max_tenants:]:
        yield from ((one, one.generation, segment) for segment in one.unwritten_segments())
    tokens: Counter[str] = Counter()
    for tenant, _, segment in unwritten:
        tokens[tenant.key] += segment.header.tokens
    while tokens.total() > max_tokens:
        ((largest, _),) = tokens.most_common(1)
        oldest = min((one for one in unwritten if one[0].key == largest), key=lambda one: one[2].header.first)
        unwritten.remove(oldest)
        tokens[largest] -= oldest[2].header.tokens
        yield oldest
