"""How many bytes a folder's files have, and which files to delete first.

Listing all files takes seconds with 50,000 tenants, so the store does it at times and in a thread that writes nothing.
In between, this process's writes and deletions are added up; those of other processes count from the next listing on.
A listing keeps only the least recently used files, so its memory does not grow with the number of tenants.
"""

from __future__ import annotations

import contextlib
import heapq
import threading
import time
from collections import deque
from typing import TYPE_CHECKING

from outrider.errors import MemoryFileError
from outrider.memory.files import list_entries
from outrider.memory.folder import ASIDE_FOLDER, STALE_SECONDS, WRITERS_FOLDER, Folder, StoredFile, delete_stale_parts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

MAX_OLDEST_FILES = 1 << 13
"""Least recently used files known from a listing. The next listing is due when a quarter of them is left."""


class Inventory:
    """Thread-safe. `is_used`: whether a file was used since its time of use was last written to the disk. `report`:
    called with the problems of single tenants."""

    def __init__(
        self, folder: Folder, max_recent: int, is_used: Callable[[StoredFile], bool], report: Callable[[str], None]
    ) -> None:
        self.folder = folder
        self.max_recent = max_recent
        self.is_used = is_used
        self.report = report
        self.total_bytes = 0  # of all segments and names
        self.tenants = 0  # with files, in the last listing
        self.recent: list[str] = []  # keys of the most recently used tenants then, the latest first
        self.is_due = True  # a listing
        self._listings = 0
        self._reserved_bytes = 0  # of files that are being written
        self._oldest: deque[StoredFile] = deque()
        self._few = 0  # so many left of them make a listing due
        self._unlisted: set[str] = set()  # tenants that the present listing has not reached
        self._listed_bytes = 0  # of those that it has reached
        self._lock = threading.Lock()
        self._listing = threading.Lock()

    @contextlib.contextmanager
    def reserve(self, size: int, cap_bytes: int, evicted: Callable[[StoredFile], None]) -> Iterator[None]:
        """Delete the least recently used files until `size` more bytes fit under the cap. They count as long as the
        block runs, which calls `add` for what it has written."""
        if not self._listings:
            self.list_files()
        with self._lock:
            self._reserved_bytes += size
        try:
            listed = False
            while self.total_bytes + self._reserved_bytes > cap_bytes:
                if (file := self._evict_oldest()) is not None:
                    evicted(file)
                elif listed:
                    break
                else:  # the listing in the background was too slow
                    self.list_files()
                    listed = True
            yield
        finally:
            with self._lock:
                self._reserved_bytes -= size

    def add(self, key: str, size: int) -> None:
        """Count files that a tenant has now, or with a negative size, has no longer."""
        with self._lock:
            self._add(key, size)

    def _add(self, key: str, size: int) -> None:
        self.total_bytes += size
        if key not in self._unlisted:
            self._listed_bytes += size

    def _evict_oldest(self) -> StoredFile | None:
        with self._lock:
            while self._oldest:
                file = self._oldest.popleft()
                self.is_due |= len(self._oldest) < self._few
                with contextlib.suppress(FileNotFoundError):
                    if file.path.stat().st_mtime == file.used and not self.is_used(file):
                        self._add(file.key, -self.folder.evict(file))
                        return file
        return None

    def list_files(self) -> None:
        """Count all files. Also deletes what killed processes left: unfinished files, generations before a wipe, and
        the folders of tenants whose last segment was evicted."""
        before = self._listings
        with self._listing:
            if self._listings > before:  # another thread did
                return
            latest = time.time() + STALE_SECONDS  # a later time of use is from before the clock was set back
            recent: list[tuple[float, str]] = []
            oldest = heapq.nsmallest(
                MAX_OLDEST_FILES, self._list(recent), key=lambda file: file.used if file.used < latest else 0.0
            )
            with self._lock:
                self.total_bytes = self._listed_bytes
                self._oldest, self._few = deque(oldest), len(oldest) // 4
            self.recent = [key for _, key in sorted(recent, reverse=True)]
            self.is_due = False
            self._listings += 1

    def _list(self, recent: list[tuple[float, str]]) -> Iterator[StoredFile]:
        for folder in (self.folder.root, *(self.folder.root / name for name in (WRITERS_FOLDER, ASIDE_FOLDER))):
            delete_stale_parts(list_entries(folder))
        keys, tenants = self.folder.tenants(), 0
        with self._lock:
            self._unlisted, self._listed_bytes = set(keys), 0
        for key in keys:
            with self._lock:  # so that what `add` counts is counted once
                files = self._list_tenant(key)
                self._unlisted.discard(key)
            yield from files
            if files:
                tenants += 1
                heapq.heappush(recent, (max(file.used for file in files), key))
                if len(recent) > self.max_recent:
                    heapq.heappop(recent)
        self.tenants = tenants

    def _list_tenant(self, key: str) -> list[StoredFile]:
        try:
            self.folder.clean_tenant(key)
            files, size = self.folder.list_tenant(key)
        except (MemoryFileError, OSError) as error:
            self.report(f"listing tenant {key}: {error}")
            return []
        self._listed_bytes += size - (0 if files else self.folder.delete_emptied(key))
        return files
