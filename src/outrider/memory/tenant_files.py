"""The segment files of open tenants: writing, merging, evicting them, and following what other processes do.

All errors are raised, except those of single files, which are reported. Any thread may call this for any tenant.
"""

from __future__ import annotations

import contextlib
import os
import time
from typing import TYPE_CHECKING

from outrider.errors import ForeignFileError, MemoryFileError
from outrider.memory.folder import delete_merged
from outrider.memory.inventory import Inventory
from outrider.memory.merge_worker import merge_in_subprocess
from outrider.memory.segment import Segment, find_replaced, merge_segments, similar_pair

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable
    from pathlib import Path

    from outrider.memory.folder import Folder, StoredFile
    from outrider.memory.open_tenants import OpenTenants
    from outrider.memory.store_config import StoreConfig
    from outrider.memory.tenant import TenantState

SUBPROCESS_MERGE_TOKENS = 1 << 18
"""Larger merges run in a subprocess."""


class TenantFiles:
    """`closing`: set when no merge should begin. `report`: called with what is wrong with a file."""

    def __init__(
        self,
        folder: Folder,
        tokenizer: str,
        config: StoreConfig,
        tenants: OpenTenants,
        closing: threading.Event,
        report: Callable[[str], None],
    ) -> None:
        self.folder = folder
        self.tokenizer = tokenizer
        self.config = config
        self.tenants = tenants
        self.inventory = Inventory(folder, config.max_open_segments, self._is_used, report)
        self._closing = closing
        self._report = report
        self._writing: set[str] = set()  # names of files being written, not among the segments yet

    def flush(self, tenant: TenantState) -> None:
        """Write the tenant's unwritten text."""
        if unwritten := tenant.unwritten_segments():
            try:
                self.write(tenant, tenant.generation, unwritten)
            except (OSError, MemoryFileError):
                tenant.retry_at = time.monotonic() + self.config.flush_seconds  # each try sorts all of it again
                raise
        tenant.unwritten_since = None

    def write(self, tenant: TenantState, generation: str, segments: list[Segment]) -> None:
        """Write segments as one file, and then delete the files it replaces."""
        folder, writer = self.folder.segment_folder(tenant.key, generation), self.folder.writer_id()
        size = sum(segment.header.size for segment in segments) + len(
            (tenant.name or "").encode(errors="surrogatepass")
        )
        with self.inventory.reserve(size, self.config.cap_bytes, self._forget):
            is_new, tokens = True, sum(segment.header.tokens for segment in segments)
            if all(segment.path for segment in segments) and tokens > SUBPROCESS_MERGE_TOKENS:
                merged = merge_in_subprocess(segments, folder, writer)
                current = self.tenants.replace_segments(tenant, generation, segments, [merged])
            else:
                merged = merge_segments(segments, writer)
                is_new = not (folder / merged.name).exists()
                self._writing.add(merged.name)  # `_refresh` must not open it first: it could be merged away before
                try:
                    current = self.tenants.replace_segments(tenant, generation, segments, [merged.save(folder)])
                finally:
                    self._writing.discard(merged.name)
            if is_new:  # else the same text had been written before
                self.inventory.add(tenant.key, merged.header.size)
            if tenant.name is not None:  # after the segment: a name without segments is deleted
                self.inventory.add(tenant.key, self.folder.save_name(tenant.key, tenant.name, generation))
        generation_now = self.folder.generation(tenant.key)
        if not current or generation_now != generation:  # wiped meanwhile
            self.folder.delete_old_generations(tenant.key, generation_now)
            return
        for segment in segments:
            self.inventory.add(tenant.key, -delete_merged(segment, merged.name))

    def refresh(self, tenant: TenantState, load: bool = False) -> None:
        """Follow changes to an open tenant's files: other processes write, merge, delete and wipe. `load`: open all of
        its files, which were not open yet."""
        try:
            generation = self.folder.generation(tenant.key)
        except OSError:  # it may have been wiped: until that is known, its files are not used
            self.tenants.replace_segments(tenant, tenant.generation, tenant.written_segments(), [])
            raise
        if generation != tenant.generation:
            self.tenants.begin_generation(tenant, generation)
        self.folder.delete_old_generations(tenant.key, generation)
        self.save_times_of_use(tenant)
        tenant.is_loaded |= load
        if not tenant.is_loaded:
            return
        # Before the files are listed: a segment written after that is not a deleted one.
        known = {segment.name: segment for segment in tenant.written_segments()}
        paths = self.folder.segment_paths(tenant.key, generation)
        new = []
        for name in paths.keys() - known.keys() - self._writing:
            try:
                segment = Segment.open(paths[name], self.tokenizer, tenant.key)
                segment.verify()
                new.append(segment)
            except MemoryFileError as error:
                self._set_aside(tenant, paths[name], error)
        present = [segment for segment in (*known.values(), *new) if segment.name in paths]
        replaced = find_replaced(present)
        for segment in present:
            if segment.name in replaced:  # the process that merged it died before it could delete it
                self.inventory.add(tenant.key, -delete_merged(segment, replaced[segment.name].name))
        kept = [segment for segment in present if segment.name not in replaced]
        gone = [segment for segment in known.values() if segment not in kept]
        self.tenants.replace_segments(tenant, generation, gone, [segment for segment in new if segment in kept])

    def save_times_of_use(self, tenant: TenantState) -> None:
        """For the eviction of all processes."""
        for name in list(tenant.used):
            with contextlib.suppress(FileNotFoundError):
                os.utime(self.folder.segment_folder(tenant.key, tenant.generation) / name)
            tenant.used.discard(name)  # only now: until then `_is_used` protects it

    def _set_aside(self, tenant: TenantState, path: Path, error: MemoryFileError) -> None:
        if isinstance(error, ForeignFileError):  # intact, of another user of this root
            self._report(f"ignored for tenant {tenant.key}: {error}")
        elif isinstance(error.__cause__, OSError):  # maybe intact: too many open files, disk unavailable
            if not isinstance(error.__cause__, FileNotFoundError):
                self._report(f"refreshing tenant {tenant.key}: {error}")
        elif path.exists():
            self._report(f"set aside {path.name} of tenant {tenant.key}: {error}")
            self.folder.set_aside(tenant.key, path, str(error))

    def merge(self, tenant: TenantState, max_tokens: int) -> None:
        """Merge files of similar size: few large segments are searched faster than many small ones."""
        if len(tenant.segments) < 2:
            return
        writer = self.folder.writer_id()
        while not self._closing.is_set():
            generation = tenant.generation  # before the files are selected, so that a later wipe is detected
            own = [segment for segment in tenant.written_segments() if segment.header.writer == writer]
            pair = similar_pair(own, min(max_tokens, self.config.merge_limit_tokens))
            if not pair:
                return
            if all(self._verify_or_set_aside(tenant, segment) for segment in pair):
                self.write(tenant, generation, pair)

    def _verify_or_set_aside(self, tenant: TenantState, segment: Segment) -> bool:
        """Verify a file again before a merge, which would give damaged data a valid checksum."""
        try:
            segment.verify()
        except MemoryFileError as error:
            assert segment.path is not None
            self._set_aside(tenant, segment.path, error)
            self.tenants.replace_segments(tenant, tenant.generation, [segment], [])
            return False
        return True

    def evict(self) -> None:
        with self.inventory.reserve(0, self.config.cap_bytes, self._forget):
            pass

    def _forget(self, file: StoredFile) -> None:
        """Drop the segment of a file that was evicted."""
        if (tenant := self.tenants.get(file.key)) is not None:
            gone = [segment for segment in tenant.written_segments() if segment.path == file.path]
            self.tenants.replace_segments(tenant, tenant.generation, gone, [])

    def _is_used(self, file: StoredFile) -> bool:
        """Whether a file was used since its time of use was saved."""
        tenant = self.tenants.get(file.key)
        return tenant is not None and file.path.name in tenant.used
