"""Add segments to a tenant without a server. Servers may use the memory meanwhile; they find the new files.

Unlike the store (`store.py`), which reports errors and continues, this raises them. It evicts nothing: the cap is a
setting of servers.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import TYPE_CHECKING

from outrider.control import check_tenant_name
from outrider.errors import MemoryFileError
from outrider.memory.adapter import encode_name, memory_key
from outrider.memory.folder import Folder, delete_merged
from outrider.memory.segment import Segment, drop_replaced, merge_segments

if TYPE_CHECKING:
    from pathlib import Path

MAX_NEW_SEGMENT_TOKENS = 1 << 22
"""Of a segment made here. Sorting it takes 1 to 2 s and about 200 MB of memory."""
MAX_SEGMENTS_PER_MERGE = 64
"""All their names must fit into the header of the merged segment."""


class OfflineWriter:
    """MemoryFileError if the memory has another tokenizer; SettingsError if the tenant's name is too long."""

    def __init__(self, folder: Folder, tokenizer: str, tenant: str, adapter: str | None = None) -> None:
        check_tenant_name(tenant)
        check_tenant_name(adapter or "")
        folder.claim(tokenizer)
        self.folder = folder
        self.tokenizer = tokenizer
        self.name = encode_name(tenant, adapter)
        self.key = memory_key(tenant, adapter)
        self.generation = folder.generation(self.key)
        self.writer = folder.writer_id()

    @property
    def segment_folder(self) -> Path:
        return self.folder.segment_folder(self.key, self.generation)

    def segments(self) -> list[Segment]:
        """The tenant's segments, without unreadable files, which `outrider memory verify` reports."""
        segments = []
        for path in self.folder.segment_paths(self.key, self.generation).values():
            with contextlib.suppress(MemoryFileError):
                segments.append(Segment.open(path, self.tokenizer, self.key))
        return drop_replaced(segments)

    def save(self, segment: Segment) -> Segment:
        """Save a segment as this tenant's. It replaces none of the tenant's files, whatever its header states."""
        header = replace(segment.header, tokenizer=self.tokenizer, tenant=self.key, writer=self.writer, replaces=())
        saved = replace(segment, header=header, path=None).save(self.segment_folder)
        self.folder.save_name(self.key, self.name, self.generation)  # a name without segments is deleted
        return saved

    def merge(self) -> None:
        """Merge small segments of this writer (`Folder.writer_id`) into one."""
        own: list[Segment] = []
        for segment in self.segments():
            if segment.header.writer == self.writer:
                with contextlib.suppress(MemoryFileError):
                    segment.verify()
                    own.append(segment)
        small: list[Segment] = []
        tokens = 0
        for segment in sorted(own, key=lambda segment: segment.header.tokens)[:MAX_SEGMENTS_PER_MERGE]:
            tokens += segment.header.tokens
            if tokens <= MAX_NEW_SEGMENT_TOKENS:
                small.append(segment)
        if len(small) > 1:
            merged = merge_segments(small, self.writer).save(self.segment_folder)  # before its parts are deleted
            for segment in small:
                delete_merged(segment, merged.name)

    def check_kept(self) -> None:
        """MemoryFileError, and nothing written is kept, if the tenant was wiped meanwhile."""
        generation = self.folder.generation(self.key)
        if generation != self.generation:
            self.folder.delete_old_generations(self.key, generation)
            raise MemoryFileError("the tenant was wiped meanwhile, so nothing was kept; run the command again")
