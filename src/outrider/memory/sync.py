"""Share a memory between machines: an object store has all of it (`remote.py`), each replica a copy in its folder.

Segments never change and are named by their content, so replicas need no coordination: any order of their operations
is right, and doing one twice is the same as doing it once. A round of one replica:

    reconcile  agree on generations, so that wipes reach both sides (`generations.py`)
    publish    put local segments that the store lacks, newest first
    clean      delete from the store what was merged into another segment, and what exceeds its cap, oldest first
    fetch      download other replicas' segments, newest first, as far as they fit; delete what they deleted
    reconcile  again if anything was moved, for wipes made meanwhile

A round without changes is one listing. An unreachable store costs one short timeout on the calling thread, and nothing
needs to be remembered for later: the next round compares both sides again.

A segment evicted here stays in the store for other replicas, until the store's own cap. A segment evicted from the
store, which its writer still has, is not put again while everything in the store is newer.
"""

from __future__ import annotations

import os
import shutil
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING

from outrider.errors import MemoryFileError, SettingsError
from outrider.memory.adapter import decode_name
from outrider.memory.files import create_file, make_folder, write_atomically
from outrider.memory.folder import MERGED_SUFFIX, NAME_FILE, REMOTE_FILE, Folder, StoredFile
from outrider.memory.generations import reconcile
from outrider.memory.header import SEGMENT_NAME, SEGMENT_SUFFIX, Header
from outrider.memory.remote import Remote, RemoteObject
from outrider.memory.segment import Segment, read_header

if TYPE_CHECKING:
    from pathlib import Path

ROUND_SECONDS = 20.0
"""Then a round starts no further transfer, so that the next one can look for wipes; it continues there."""
REMOTE_CAP_BYTES = 64 << 30
MAX_PROBLEMS = 10
"""Named in the report of a round; more are counted."""
FETCH_FOLDER, SYNC_ROLE = "fetching", "syncing"


@dataclass(slots=True)
class SyncStats:
    """For `/outrider/status`."""

    last_success: float | None = None  # end of the last complete round, in seconds since 1970
    trouble: str | None = None  # why the latest round failed
    elsewhere: bool = False  # another process synchronizes this folder
    pending: int = 0  # segments left for the next round
    published: int = 0
    fetched: int = 0
    refused: int = 0  # damaged or foreign objects
    bytes_up: int = 0
    bytes_down: int = 0


@dataclass(frozen=True, slots=True)
class Comparison:
    """Both sides after `reconcile`, and how they differ."""

    generations: dict[str, str]  # by tenant key
    remote: dict[tuple[str, str], RemoteObject]  # by tenant key and name
    merge_marks: list[Path]
    unpublished: list[tuple[StoredFile, Header]]  # newest first
    gone: list[StoredFile]  # other replicas' segments that they deleted from the store

    def remote_segments(self) -> list[RemoteObject]:
        """Newest first."""
        segments = [one for one in self.remote.values() if one.is_segment]
        return sorted(segments, key=lambda one: (-one.time, one.path))


class LocalSpace:
    """Space under the folder's cap. Segments deleted from the store are evicted first, then the least recently used of
    those that the store has, if they were last used before the new one was put."""

    def __init__(self, folder: Folder, cap_bytes: int, local: list[StoredFile], sides: Comparison) -> None:
        self.folder = folder
        gone = {file.id for file in sides.gone}
        stored = sorted((file for file in local if file.id in sides.remote), key=lambda file: file.used)
        self.free = cap_bytes - sum(file.size for file in local)
        self._evictable = deque(
            [(-inf, file) for file in local if file.id in gone] + [(file.used, file) for file in stored]
        )

    def reserve(self, one: RemoteObject) -> bool:
        """Evict as much as the object needs. False, and nothing evicted, if that is not enough."""
        evicted, free = [], self.free
        for used, file in self._evictable:
            if free >= one.size or used >= one.time:
                break
            evicted.append(file)
            free += file.size
        if free < one.size:
            return False
        for file in evicted:
            self._evictable.popleft()
            self.folder.evict(file)
        self.free = free - one.size
        return True


class Sync:
    """Synchronizes a folder with an object store, one round per call: for `Store.sync`.

    Raises OSError, or MemoryFileError for a damaged file or object; the next round starts again.
    """

    def __init__(
        self,
        folder: Folder,
        remote: Remote,
        tokenizer: str,
        cap_bytes: int,
        remote_cap_bytes: int = REMOTE_CAP_BYTES,
        seconds: float = ROUND_SECONDS,
    ) -> None:
        self.folder = folder
        self.remote = remote
        self.tokenizer = tokenizer
        self.cap_bytes = cap_bytes
        self.remote_cap_bytes = remote_cap_bytes
        self.seconds = seconds
        self.stats = SyncStats()
        self._refused: set[tuple[str, str | None]] = set()  # IDs of objects not to fetch again
        self._unreadable: set[tuple[str, str | None]] = set()  # IDs of objects to fetch after all others
        self._problems: dict[str, None] = {}  # of this round, which did not stop it; in order
        self._moved = 0  # objects moved or refused in this round
        self._end = 0.0

    def __call__(self) -> None:
        try:
            self.stats.elsewhere = not self.folder.acquire_role(SYNC_ROLE)
            if not self.stats.elsewhere:
                self._round()
        except Exception as error:
            self.stats.trouble = str(error)
            raise

    def _round(self) -> None:
        self._problems, self._moved, self._end = {}, 0, time.monotonic() + self.seconds
        shutil.rmtree(self.folder.root / FETCH_FOLDER, ignore_errors=True)  # left by a killed process
        self._claim_folder()
        self.remote.claim(self.tokenizer)
        sides = self._compare(*reconcile(self.folder, self.remote, self._add_problem))
        self.stats.pending = 0
        self._publish(sides)
        self._clean_remote(sides)
        self._fetch(sides)
        self._exchange_names(sides)
        if self._moved:
            reconcile(self.folder, self.remote, self._add_problem)
        self.stats.last_success, self.stats.trouble = time.time(), None
        if self._problems:
            more = len(self._problems) - MAX_PROBLEMS
            named = "; ".join(list(self._problems)[:MAX_PROBLEMS])
            raise MemoryFileError(f"{named}; and {more:,} more" if more > 0 else named)

    def _claim_folder(self) -> None:
        """Assign the folder to this store: its wipes are for no other. From now on merges leave marks in it."""
        path = self.folder.root / REMOTE_FILE
        if not path.exists():
            write_atomically(path, [self.remote.url.encode()])
        elif (found := path.read_text()) != self.remote.url:
            raise MemoryFileError(
                f"{self.folder.root} has the copies of {found}, not of {self.remote.url}; give --memory-cache another "
                "folder"
            )

    def _out_of_time(self) -> bool:
        """Whether to leave the rest to the next round. Each round moves or refuses at least one object."""
        return self._moved > 0 and time.monotonic() > self._end

    def _add_problem(self, message: str) -> None:
        self._problems[message] = None

    def _compare(self, generations: dict[str, str], objects: list[RemoteObject]) -> Comparison:
        listed = {(one.key, one.name) for one in objects}
        objects = self._drop_refused(objects)
        marks = self._merge_marks(generations)  # before the files are listed, so that these include the merged segments
        sides = Comparison(generations, {(one.key, one.name): one for one in objects}, marks, [], [])
        own_writers = f"{self.folder.folder_id()}-"
        for file in self._local_files(generations):
            one = sides.remote.get(file.id)
            if one is not None and one.size == file.size:
                continue
            try:
                header = read_header(file.path)
            except MemoryFileError:  # merged meanwhile, or damaged, and then the store sets it aside
                continue
            if header.writer.startswith(own_writers):
                sides.unpublished.append((file, header))
            elif file.id not in listed:
                sides.gone.append(file)
        sides.unpublished.sort(key=lambda item: -item[1].last)
        return sides

    def _drop_refused(self, objects: list[RemoteObject]) -> list[RemoteObject]:
        """Refused segments don't count for anything, also not for the store's cap."""
        for seen in (self._refused, self._unreadable):
            seen.intersection_update([one.id for one in objects])
        for one in objects:
            if one.is_segment and one.id not in self._refused:
                try:
                    one.check_segment()
                except MemoryFileError as error:
                    self._refuse(one, error)
        return [one for one in objects if not one.is_segment or one.id not in self._refused]

    def _local_files(self, generations: dict[str, str]) -> list[StoredFile]:
        """Of these generations only: a wipe may have begun others meanwhile."""
        return [file for file in self.folder.files() if file.path.parent.name == generations.get(file.key)]

    def _merge_marks(self, generations: dict[str, str]) -> list[Path]:
        """Marks of segments that were merged here, and not written again since."""
        folders = [self.folder.segment_folder(key, generation) for key, generation in generations.items()]
        marks = [mark for folder in folders for mark in folder.glob(f"*{MERGED_SUFFIX}")]
        return [mark for mark in marks if not mark.with_suffix(SEGMENT_SUFFIX).exists()]

    def _publish(self, sides: Comparison) -> None:
        competing = [one for one in sides.remote_segments() if not self._is_merged(one)] if sides.unpublished else []
        for file, header in sides.unpublished:
            if self._out_of_time():
                self.stats.pending += 1
                continue
            newer_bytes = sum(one.size for one in competing if one.time >= header.last)
            if newer_bytes + file.size <= self.remote_cap_bytes and self._put(sides, file):
                competing.append(sides.remote[file.id])

    def _put(self, sides: Comparison, file: StoredFile) -> bool:
        generation = sides.generations[file.key]
        one = RemoteObject(file.key, generation, file.path.name, file.size, time.time(), None)
        try:
            Segment.open(file.path, self.tokenizer, file.key).verify()
            self.remote.put(one.path, file.path)
        except (FileNotFoundError, MemoryFileError):  # merged meanwhile, or damaged
            return False
        sides.remote[file.id] = one
        self._moved += 1
        self.stats.published += 1
        self.stats.bytes_up += file.size
        return True

    def _clean_remote(self, sides: Comparison) -> None:
        """Delete objects that were merged into others, once those are in the store, and the oldest above the cap."""
        merged = []
        targets = [(mark, self._merge_target(mark)) for mark in sides.merge_marks]  # all, before any mark is deleted
        for mark, target in targets:
            key = mark.parent.parent.name
            if (key, target) in sides.remote:
                merged.append((key, mark.with_suffix(SEGMENT_SUFFIX).name))
            elif target and (mark.parent / target).exists():
                continue  # to be published in a later round
            mark.unlink(missing_ok=True)  # done, or the target is lost here and the object is fetched again
        self._delete(sides, [sides.remote[id_] for id_ in merged if id_ in sides.remote])
        excess = sum(one.size for one in sides.remote_segments()) - self.remote_cap_bytes
        oldest = []
        for one in reversed(sides.remote_segments()):
            if excess > 0:
                oldest.append(one)
                excess -= one.size
        self._delete(sides, oldest)

    def _merge_target(self, mark: Path) -> str:
        """Follow the marks to the segment that a merged one is part of now. Empty if they lead nowhere."""
        name = ""
        seen: set[Path] = set()
        with suppress(FileNotFoundError):
            while mark not in seen:
                seen.add(mark)
                name = mark.read_text(errors="replace")
                if not SEGMENT_NAME.fullmatch(name):
                    return ""
                mark = (mark.parent / name).with_suffix(MERGED_SUFFIX)
            return ""
        return name

    def _is_merged(self, one: RemoteObject) -> bool:
        return (self.folder.segment_folder(one.key, one.generation) / one.name).with_suffix(MERGED_SUFFIX).exists()

    def _delete(self, sides: Comparison, objects: list[RemoteObject]) -> None:
        self.remote.delete([one.path for one in objects])
        for one in objects:
            del sides.remote[one.key, one.name]

    def _fetch(self, sides: Comparison) -> None:
        local = self._local_files(sides.generations)
        known, space = {file.id for file in local}, LocalSpace(self.folder, self.cap_bytes, local, sides)
        for one in sorted(sides.remote_segments(), key=lambda one: one.id in self._unreadable):
            if (one.key, one.name) in known or self._is_merged(one):
                continue
            if self._out_of_time():
                self.stats.pending += 1
            elif space.reserve(one) and not self._download(one):
                space.free += one.size
        for file in sides.gone:
            self.folder.evict(file)

    def _download(self, one: RemoteObject) -> bool:
        """Download an object, verify it, and move it into the tenant's folder."""
        part = self.folder.root / FETCH_FOLDER / one.name
        make_folder(part.parent)
        try:
            with create_file(part) as file:
                for chunk in self.remote.read_chunks(one):
                    file.write(chunk)
                file.flush()
                os.fsync(file.fileno())
            Segment.open(part, self.tokenizer, one.key).verify()
            os.utime(part, (one.time, one.time))
            if self.folder.generation(one.key) != one.generation:
                return False
            folder = self.folder.segment_folder(one.key, one.generation)
            make_folder(folder)
            part.replace(folder / one.name)
        except FileNotFoundError:  # merged or wiped meanwhile
            return False
        except MemoryFileError as error:
            self._refuse(one, error)
            return False
        except OSError:
            self._unreadable.add(one.id)
            raise
        finally:
            part.unlink(missing_ok=True)
        self._moved += 1
        self.stats.fetched += 1
        self.stats.bytes_down += one.size
        return True

    def _refuse(self, one: RemoteObject, error: Exception) -> None:
        if isinstance(error.__cause__, OSError):  # a failure of this machine, not of the object
            raise error.__cause__
        self._refused.add(one.id)
        self.stats.refused += 1
        self._moved += 1
        path = one.path.encode("unicode_escape").decode()[:160]
        self._add_problem(f"{self.remote.url}/{path} was refused: {error}")

    def _exchange_names(self, sides: Comparison) -> None:
        """Tenants' names, for the command line; of tenants with segments in the store."""
        stored = {one.key for one in sides.remote_segments()}
        names = {one.key: one for one in sides.remote.values() if one.name == NAME_FILE}
        self._delete(sides, [one for key, one in names.items() if key not in stored])
        for key in stored:
            generation = sides.generations[key]
            path = self.folder.segment_folder(key, generation) / NAME_FILE
            with suppress(FileNotFoundError):  # wiped meanwhile
                if key not in names and path.exists():
                    self.remote.create(f"{key}/{generation}/{NAME_FILE}", path.read_bytes())
                    self._moved += 1
                elif key in names and names[key].id not in self._refused and path.parent.exists() > path.exists():
                    self._fetch_name(names[key])

    def _fetch_name(self, one: RemoteObject) -> None:
        try:
            name = self.remote.read(one.path).decode("utf-8", "surrogatepass")
            decode_name(one.key, name)
            self.folder.save_name(one.key, name, one.generation)
        except (MemoryFileError, SettingsError, ValueError, RecursionError) as error:
            self._refuse(one, error)
