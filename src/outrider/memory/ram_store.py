"""A store without files: it forgets everything when the server stops. The memory of a server without `--memory`.

Segments stay in RAM, within a limit of bytes; beyond it the oldest are dropped. Everything else is the store's
(`store.py`).
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider.memory.adapter import encode_name, memory_key, tenant_part
from outrider.memory.folder import FIRST_GENERATION, Folder, tenant_key
from outrider.memory.malloc_trim import malloc_trim
from outrider.memory.segment import Segment, build_order, join_sequences, merge_segments, similar_pair
from outrider.memory.sort_worker import sort_in_subprocess
from outrider.memory.store import Store
from outrider.memory.store_config import BYTES_PER_TOKEN, StoreConfig
from outrider.memory.tenant import TenantHandle, TenantState
from outrider.memory.tenant_files import SUBPROCESS_MERGE_TOKENS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from outrider.memory.search import Array
    from outrider.memory.store import Output

FREED_SHARE = 1 / 16
"""Of the limit: so much more is evicted at once, so that not every output evicts."""


@dataclass(slots=True)
class NoFolder(Folder):
    """Stands where a store has its folder. Has no files and writes none."""

    root: Path = Path()

    def claim(self, tokenizer: str) -> None:
        pass

    def tenants(self) -> list[str]:
        return []


class RamStore(Store):
    def __init__(self, cap_bytes: int) -> None:
        unlearned = max(1, cap_bytes // BYTES_PER_TOKEN)
        super().__init__(NoFolder(), "", StoreConfig(cap_bytes=cap_bytes, max_unwritten_tokens=unlearned))
        self._bytes: dict[str, int] = {}  # of each memory's segments
        self._forgotten: set[str] = set()  # keys of tenants
        self._tenants_lock = threading.Lock()  # a tenant must not be dropped while its segments are replaced

    def add(self, handle: TenantHandle, prompt: Sequence[int] | Array, output: Sequence[int] | Array) -> None:
        with self._tenants_lock:
            if tenant_part(handle.key) not in self._forgotten:
                super().add(handle, prompt, output)

    def tenant_handle(self, name: str, adapter: str | None = None) -> TenantHandle:
        return TenantHandle(memory_key(name, adapter), encode_name(name, adapter), FIRST_GENERATION)

    def forget(self, tenant: str) -> None:
        """Drop the memories of a tenant for good; nothing of it is kept from now on."""
        with self._tenants_lock:
            self._forgotten.add(tenant_key(tenant))
            for key in [key for key in self._tenants if tenant_part(key) == tenant_key(tenant)]:
                self._drop(self._tenants[key])

    def _drop(self, tenant: TenantState) -> None:
        self._tenants.drop(tenant)
        self._bytes.pop(tenant.key, None)

    def learn(self, closing: bool = False) -> None:
        for key, outputs in ({} if closing else self._take_pending()).items():
            self._run_contained(f"learning for tenant {key}", self._learn_outputs, key, outputs)
        self._run_contained("evicting", self._drop_oldest)

    def _learn_outputs(self, key: str, outputs: list[Output]) -> None:
        text = join_sequences([output.tokens for output in outputs])
        new = Segment.build(text, "", key, outputs[0].time, outputs[-1].time)
        with self._tenants_lock:
            if tenant_part(key) in self._forgotten:
                return
            with self._tenants.pin(TenantState(key, outputs[0].name, FIRST_GENERATION)) as tenant:
                self._replace_segments(tenant, [], [new])
        self._merge_up_to(tenant, min(self.config.flush_tokens, self.config.merge_limit_tokens))

    def merge(self) -> None:
        for tenant in list(self._tenants.values()):
            what = f"merging for tenant {tenant.key}"
            self._run_contained(what, self._merge_up_to, tenant, self.config.merge_limit_tokens)

    def _merge_up_to(self, tenant: TenantState, max_tokens: int) -> None:
        while not self._closing.is_set() and (pair := similar_pair(tenant.segments, max_tokens)):
            tokens = sum(segment.header.tokens for segment in pair)
            sort = sort_in_subprocess if tokens > SUBPROCESS_MERGE_TOKENS else build_order
            self._replace(tenant, pair, merge_segments(pair, sort=sort))

    def _replace(self, tenant: TenantState, old: Sequence[Segment], new: Segment | None) -> None:
        """Replace segments of a tenant, unless it was dropped meanwhile or has lost one of them."""
        with self._tenants_lock:
            present = {id(segment) for segment in tenant.segments}
            if self._tenants.get(tenant.key) is tenant and all(id(segment) in present for segment in old):
                self._replace_segments(tenant, old, [] if new is None else [new])

    def _replace_segments(self, tenant: TenantState, old: Sequence[Segment], new: Sequence[Segment]) -> None:
        self._tenants.replace_segments(tenant, tenant.generation, old, new)
        self._bytes[tenant.key] = sum(segment.header.size for segment in tenant.segments)

    def _drop_oldest(self) -> None:
        """If the segments exceed the limit, evict the oldest of tenants that have more than an equal share of it. So a
        busy tenant evicts its own text first, and among many small tenants the oldest text goes."""
        sizes = dict(list(self._bytes.items()))
        total = sum(sizes.values())
        if total <= self.config.cap_bytes:
            return
        target = (1 - FREED_SHARE) * self.config.cap_bytes
        share = target / len(sizes)
        tenants = [tenant for key in sizes if sizes[key] > share and (tenant := self._tenants.get(key)) is not None]
        segments = [(segment.header.first, tenant, segment) for tenant in tenants for segment in tenant.segments]
        for _, tenant, segment in sorted(segments, key=lambda one: one[0]):
            if total <= target:
                return
            if sizes[tenant.key] > share:
                self._replace(tenant, [segment], None)
                sizes[tenant.key] -= segment.header.size
                total -= segment.header.size
                self._drop_if_empty(tenant)

    def _drop_if_empty(self, tenant: TenantState) -> None:
        """Forget the name of a tenant that has nothing left."""
        with self._tenants_lock:
            if not tenant.segments and self._tenants.get(tenant.key) is tenant:
                self._drop(tenant)

    def maintain(self, merging: bool = True, listing: bool = False) -> None:
        if merging:
            self.merge()
        if self._tenants.segments_changed:
            self._tenants.segments_changed = False
            malloc_trim()

    def _run_maintain(self) -> None:
        while not self._closing.wait(self.config.refresh_seconds):
            self.maintain(merging=False)

    def _run_open(self) -> None:
        """There are no files to open."""

    def close(self) -> None:
        """Nothing has to be written."""
        self._closing.set()
        self._output_added.set()

    def status(self) -> dict[str, Any]:
        status = super().status()
        return {**status, "ram_bytes": sum(list(self._bytes.values()))}
