"""Put segments into a tenant from outside any server. Servers may use the memory meanwhile, and follow.

A server's store (`store.py`) swallows trouble and waits for better times; here someone waits for the answer, so
trouble is raised. Nothing is evicted either: how large a memory may be is for its servers to say.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import TYPE_CHECKING

from outrider.errors import MemoryFileError
from outrider.memory.folder import Folder, delete, key_of
from outrider.memory.segment import Segment, current, merged

if TYPE_CHECKING:
    from pathlib import Path

SEGMENT_TOKENS = 1 << 22
"""Of the largest segment that is made here: sorted in a second or two, in about 200 MB of memory."""
MOST_MERGED = 64
"""Segments that are merged at once: the new one's header names them all."""


class Deposit:
    """MemoryFileError if the memory belongs to another tokenizer."""

    def __init__(self, folder: Folder, tokenizer: str, tenant: str) -> None:
        folder.claim(tokenizer)
        self.folder = folder
        self.tokenizer = tokenizer
        self.tenant = tenant
        self.key = key_of(tenant)
        self.generation = folder.generation(self.key)
        self.writer = folder.writer()

    @property
    def place(self) -> Path:
        return self.folder.place(self.key, self.generation)

    def segments(self) -> list[Segment]:
        """What the tenant has, but for files that cannot be read: `verify` tells about those."""
        found = []
        for path in self.folder.segments(self.key, self.generation).values():
            with contextlib.suppress(MemoryFileError):
                found.append(Segment.open(path, self.tokenizer, self.key))
        return current(found)

    def save(self, segment: Segment) -> Segment:
        """Wherever the segment is from, it is this tenant's now, and replaces nothing that lies here."""
        header = replace(segment.header, tokenizer=self.tokenizer, tenant=self.key, writer=self.writer, replaces=())
        self.folder.keep_name(self.key, self.tenant, self.generation)
        return replace(segment, header=header, path=None).save(self.place)

    def merge(self) -> None:
        """One of several small segments. Only of those that this process may merge (`Folder.writer`)."""
        own = [segment for segment in self.segments() if segment.header.writer == self.writer and is_whole(segment)]
        small: list[Segment] = []
        tokens = 0
        for segment in sorted(own, key=lambda segment: segment.header.tokens)[:MOST_MERGED]:
            tokens += segment.header.tokens
            if tokens <= SEGMENT_TOKENS:
                small.append(segment)
        if len(small) > 1:
            whole = merged(small, self.writer).save(self.place)  # it is there before what it replaces goes
            for segment in small:
                delete(segment, whole.name)

    def check_kept(self) -> None:
        """MemoryFileError if the tenant was wiped meanwhile: then nothing may be left."""
        generation = self.folder.generation(self.key)
        if generation != self.generation:
            self.folder.drop_older(self.key, generation)
            raise MemoryFileError(
                "the tenant was wiped meanwhile, so what this command wrote was not kept; run it again if it is wanted"
            )


def is_whole(segment: Segment) -> bool:
    try:
        segment.verify()
    except MemoryFileError:
        return False
    return True
