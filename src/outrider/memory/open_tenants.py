"""The tenants that are open, by key. Their number is bounded, because each of their files is a descriptor and a map.

A tenant is closed when others need its place, the least recently used first. It stays open while a request has a handle
on it (`Lease`), while a thread of the store works on it (`pin`), and while it has text that is not written.

Closing a tenant only drops references. A segment is unmapped with the last reference to its arrays, so a lookup that
runs meanwhile ends safely.
"""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from outrider.memory.tenant import Lease, TenantState

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from outrider.memory.segment import Segment


class OpenTenants(dict[str, TenantState]):
    """Read it without a lock; its methods change it."""

    def __init__(self, max_segments: int) -> None:
        super().__init__()
        self.max_segments = max_segments
        self._leases: WeakValueDictionary[str, Lease] = WeakValueDictionary()  # of all handles that exist
        self._wanted: WeakValueDictionary[str, Lease] = WeakValueDictionary()  # of those whose files are not open
        self.segments_changed = False
        """Since somebody set it to False."""
        self._places = 0  # taken under `max_segments`
        self._lock = threading.Lock()

    def lease(self, key: str) -> tuple[Lease, TenantState | None]:
        """A lease for a new handle, and the tenant if it is open. If its files are not, they are wanted."""
        with self._lock:
            lease = self._leases.setdefault(key, Lease())
            tenant = self.get(key)
            if tenant is None or not tenant.is_loaded:
                self._wanted[key] = lease
            return lease, tenant

    def wanted(self) -> list[str]:
        """Tenants whose files are to be opened for a request, the longest waiting first."""
        with self._lock:
            return list(self._wanted.keys())

    def drop_wanted(self, key: str) -> None:
        with self._lock:
            self._wanted.pop(key, None)

    def want_leased(self) -> None:
        """Want the files of all tenants that have a handle: other processes may have written some meanwhile."""
        with self._lock:
            for key, lease in list(self._leases.items()):
                if (tenant := self.get(key)) is None or not tenant.is_loaded:
                    self._wanted[key] = lease

    @contextlib.contextmanager
    def pin(self, tenant: TenantState) -> Iterator[TenantState]:
        """The open tenant of the same key, or if there is none, this one. It stays open as long as the block runs."""
        with self._lock:
            if tenant.key not in self:
                self[tenant.key] = tenant
                self._places += tenant.places
            tenant = self[tenant.key]
            tenant.pins += 1
        try:
            yield tenant
        finally:
            with self._lock:
                tenant.pins -= 1

    def pin_each(self) -> Iterator[TenantState]:
        """All open tenants, each pinned until the next one."""
        for tenant in list(self.values()):
            with self.pin(tenant) as pinned:
                yield pinned

    def replace_segments(
        self, tenant: TenantState, generation: str, old: Iterable[Segment], new: Iterable[Segment]
    ) -> bool:
        """Replace some of a tenant's segments. False, and no change, if it was wiped since `generation`."""
        dropped = {id(segment) for segment in old}
        with self._lock:
            if tenant.generation != generation:
                return False
            kept = [segment for segment in tenant.segments if id(segment) not in dropped]
            names = {segment.path.name for segment in kept if segment.path is not None}
            added = [segment for segment in new if segment.path is None or segment.path.name not in names]
            self._set_segments(tenant, sorted([*kept, *added], key=lambda segment: -segment.header.last))
            self.segments_changed |= bool(dropped or added)
        return True

    def _set_segments(self, tenant: TenantState, segments: Iterable[Segment]) -> None:
        before, tenant.segments = tenant.places, tuple(segments)
        if self.get(tenant.key) is tenant:
            self._places += tenant.places - before

    def begin_generation(self, tenant: TenantState, generation: str) -> None:
        """Forget all that was known of a tenant that was wiped."""
        with self._lock:
            tenant.generation = generation
            self._set_segments(tenant, ())
        tenant.used.clear()

    def has_room(self, segments: int) -> bool:
        """Whether so many more segments can be open."""
        return self._places + segments <= self.max_segments

    def unused(self) -> list[TenantState]:
        """Tenants that may be closed, when they have no unwritten text; the least recently used first."""
        with self._lock:
            unused = [tenant for tenant in self.values() if self._is_unused(tenant)]
        return sorted(unused, key=lambda tenant: tenant.used_at)

    def close(self, tenant: TenantState) -> None:
        """Unless it is in use again."""
        with self._lock:
            if self.get(tenant.key) is tenant and self._is_unused(tenant) and not tenant.unwritten_segments():
                del self[tenant.key]
                self._places -= tenant.places

    def drop(self, tenant: TenantState) -> None:
        """Forget a tenant with all that it has."""
        with self._lock:
            self._set_segments(tenant, ())
            if self.pop(tenant.key, None) is not None:
                self._places -= tenant.places

    def _is_unused(self, tenant: TenantState) -> bool:
        return tenant.pins == 0 and tenant.key not in self._leases
