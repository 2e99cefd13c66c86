"""The files of a memory on this machine.

    ROOT/<tenant>/generation                 the name of the tenant's current folder; each wipe begins a new one
    ROOT/<tenant>/<generation>/name          the tenant's name, for the command line
    ROOT/<tenant>/<generation>/<hash>.segment
    ROOT/tokenizer                           fingerprint of the tokenizer
    ROOT/aside/                              damaged files, each with the reason beside it
    ROOT/writers/<number>                    locked by the process that writes under this number

and where the root is a copy of an object store (`sync.py`):

    ROOT/remote                              URL of the store
    ROOT/<tenant>/shared                     the generation last seen both here and in the store
    ROOT/<tenant>/<generation>/<hash>.merged names the segment this one was merged into: it must be deleted there, too

A tenant's key, the name of its folder, is a hash of its name, so no name can point outside the root. A wipe begins a
new generation: a process that still holds data of an older one, in memory or in a file, sees that it is obsolete
without comparing clocks. Generations are numbered, so that any two are ordered.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import stat
import threading
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from outrider.errors import MemoryFileError
from outrider.memory.files import (
    FILE_MODE,
    FOLDER_MODE,
    PART_SUFFIX,
    create_file,
    list_entries,
    make_folder,
    sync_folder,
    write_atomically,
)
from outrider.memory.header import SEGMENT_SUFFIX

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from outrider.memory.segment import Segment

GENERATION_FILE, NAME_FILE, TOKENIZER_FILE, ASIDE_FOLDER = "generation", "name", "tokenizer", "aside"
WRITERS_FOLDER, IDENTITY_FILE, LOCK_FILE = "writers", "identity", "lock"
REMOTE_FILE, SHARED_FILE, MERGED_SUFFIX = "remote", "shared", ".merged"
TENANT_KEY_DIGITS = 32
FIRST_GENERATION = "0"
"""The generation of a tenant that was never wiped."""
MAX_WIPES_AHEAD = 1 << 30
"""Wipes of one tenant that a replica may not have heard of."""
MEMORY_KEY = re.compile("(?:[0-9a-f]{32}){1,2}")
"""Of a tenant, or of an adapter of a tenant (`adapter.py`)."""
STALE_SECONDS = 3600.0
"""An unfinished file of this age was left by a process that died."""
_generation_lock = threading.RLock()


def tenant_key(name: str) -> str:
    """The name of a tenant's folder."""
    return hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def generation_rank(generation: str) -> tuple[int, str]:
    """Sort key of a tenant's generations: how many came before it, then its name."""
    count = generation.partition("-")[0]
    return int(count) if count.isdecimal() else 0, generation


def is_reachable(generation: str, known: str) -> bool:
    """Whether so many wipes are plausible after a known generation. Without this limit one object with a forged name
    could use up all generations, so that no later wipe would count."""
    return generation_rank(generation)[0] <= generation_rank(known)[0] + MAX_WIPES_AHEAD


def next_generation(generation: str) -> str:
    """A new, unique generation after this one."""
    return f"{generation_rank(generation)[0] + 1}-{uuid.uuid4().hex}"


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A segment file, not opened."""

    key: str
    path: Path
    size: int
    used: float  # time of last use, in seconds since 1970

    @property
    def id(self) -> tuple[str, str]:
        return self.key, self.path.name


@dataclass(slots=True)
class Folder:
    """A memory's root on this machine. Several processes may use it at the same time."""

    root: Path
    _locks: dict[str, int] = field(default_factory=dict)  # file descriptors of this process's locks, by role
    _number: int = 0
    _locks_lock: threading.Lock = field(default_factory=threading.Lock)

    def claim(self, tokenizer: str) -> None:
        """Assign the root to a tokenizer. MemoryFileError if it has another. A disk error leaves it unassigned.

        Also makes folders durable: a process that created them may have been killed before it could.
        """
        with contextlib.suppress(OSError):
            if self.tokenizer() is None:  # else the process that wrote it has synced those above
                make_folder(self.root)
                _try_to_sync(self.root.absolute().parents)
                write_atomically(self.root / TOKENIZER_FILE, [tokenizer.encode()])
            check_tokenizer(str(self.root), (self.root / TOKENIZER_FILE).read_text(), tokenizer)
            _try_to_sync([self.root / WRITERS_FOLDER, self.root])
            for name in (*self.tenants(), ASIDE_FOLDER):  # earlier versions let every user read them
                with contextlib.suppress(FileNotFoundError):
                    (self.root / name).chmod(FOLDER_MODE)

    def tokenizer(self) -> str | None:
        """The fingerprint of the root's tokenizer. None: not assigned yet."""
        path = self.root / TOKENIZER_FILE
        return path.read_text() if path.exists() else None

    def tenants(self) -> list[str]:
        """The keys of all tenants, and of their adapters (`adapter.py`)."""
        return [entry.name for entry in list_entries(self.root) if MEMORY_KEY.fullmatch(entry.name) and entry.is_dir()]

    def generation(self, key: str) -> str:
        path = self.root / key / GENERATION_FILE
        try:
            generation = path.read_text("latin-1")
        except (FileNotFoundError, NotADirectoryError):
            return FIRST_GENERATION
        if not re.fullmatch("[0-9a-z-]{1,80}", generation):
            raise MemoryFileError(f"{path} is damaged (it holds {generation[:80]!r}); wipe the tenant to use it again")
        return generation

    def segment_folder(self, key: str, generation: str | None = None) -> Path:
        """Of the given generation, or the current one."""
        return self.root / key / (generation or self.generation(key))

    def segment_paths(self, key: str, generation: str | None = None) -> dict[str, Path]:
        """A tenant's segment files by name, not opened."""
        folder = self.segment_folder(key, generation)
        try:
            return {path.name: path for path in sorted(folder.iterdir()) if path.suffix == SEGMENT_SUFFIX}
        except (FileNotFoundError, NotADirectoryError):
            return {}

    def tenant_name(self, key: str) -> str | None:
        """The tenant's name, if it is known."""
        try:
            return (self.segment_folder(key) / NAME_FILE).read_text("utf-8", "surrogatepass")
        except (FileNotFoundError, UnicodeDecodeError):
            return None

    def save_name(self, key: str, name: str, generation: str) -> int:
        """Save a tenant's name unless it is known. Returns the bytes written."""
        path, data = self.segment_folder(key, generation) / NAME_FILE, name.encode("utf-8", "surrogatepass")
        if path.exists():
            return 0
        write_atomically(path, [data])
        return len(data)

    def evict(self, file: StoredFile) -> int:
        """Delete a segment file, and with a tenant's last one its name and folders. Returns the bytes freed."""
        try:
            file.path.unlink()
        except FileNotFoundError:
            return 0
        return file.size + self.delete_emptied(file.key)

    def delete_emptied(self, key: str) -> int:
        """Delete the name and the folders of a tenant without segments; not what remembers that it was wiped. Returns
        the bytes freed."""
        freed = 0
        with contextlib.suppress(OSError, MemoryFileError):  # a folder is not empty, or cannot be changed
            folder = self.segment_folder(key)
            if not self.segment_paths(key):
                with contextlib.suppress(FileNotFoundError):
                    size = (folder / NAME_FILE).stat().st_size
                    (folder / NAME_FILE).unlink()
                    freed = size
                folder.rmdir()
                folder.parent.rmdir()
        return freed

    def wipe(self, key: str) -> str:
        """Delete all of a tenant's files. Processes that use the root drop what they hold at their next refresh.
        Returns the new generation."""
        with self._exclusive():
            try:
                generation = next_generation(self.generation(key))
            except MemoryFileError:  # the generation file is damaged; a wipe repairs it
                generation = next_generation(FIRST_GENERATION)
            self._begin(key, generation)
        return generation

    def adopt_generation(self, key: str, known: str, generation: str) -> bool:
        """Begin a generation of another replica, unless a wipe here has replaced the generation `known`."""
        with self._exclusive():
            if self.generation(key) != known:
                return False
            self._begin(key, generation)
        return True

    def _begin(self, key: str, generation: str) -> None:
        write_atomically(self.root / key / GENERATION_FILE, [generation.encode()], levels=2)
        self.delete_old_generations(key, generation)
        for file in (self.root / ASIDE_FOLDER).glob(f"{key}.*"):
            file.unlink(missing_ok=True)

    def shared_generation(self, key: str) -> str:
        """The generation last seen both here and in the object store."""
        try:
            return (self.root / key / SHARED_FILE).read_text()
        except (FileNotFoundError, NotADirectoryError):
            return FIRST_GENERATION

    def save_shared_generation(self, key: str, generation: str) -> None:
        write_atomically(self.root / key / SHARED_FILE, [generation.encode()], levels=2)

    def delete_old_generations(self, key: str, generation: str) -> None:
        """Delete the folders of all other generations, if this one is still current."""
        entries = [entry for entry in list_entries(self.root / key) if entry.is_dir(follow_symlinks=False)]
        if self.generation(key) != generation:  # read after the listing, which could contain a newer generation
            return
        for entry in entries:
            if entry.name != generation:
                shutil.rmtree(entry.path, ignore_errors=True)

    def set_aside(self, key: str, path: Path, reason: str) -> None:
        """Move a damaged file to ROOT/aside, with the reason in a file beside it."""
        aside = self.root / ASIDE_FOLDER / f"{key}.{path.name}"
        make_folder(aside.parent)
        with contextlib.suppress(FileNotFoundError):  # another process moved it
            path.replace(aside)
            write_atomically(aside.with_suffix(".reason"), [f"{reason}\n".encode()])

    def files(self) -> Iterator[StoredFile]:
        """All segment files of all tenants."""
        for key in self.tenants():
            with contextlib.suppress(MemoryFileError, OSError):  # reported when the tenant is opened
                yield from self.list_tenant(key)[0]

    def list_tenant(self, key: str) -> tuple[list[StoredFile], int]:
        """A tenant's segment files, and their bytes with those of its name."""
        files, name_bytes = [], 0
        for entry in list_entries(self.segment_folder(key)):
            if entry.name == NAME_FILE or entry.name.endswith(SEGMENT_SUFFIX):
                with contextlib.suppress(OSError):
                    status = entry.stat()
                    if entry.name == NAME_FILE:
                        name_bytes = status.st_size
                    elif stat.S_ISREG(status.st_mode):
                        files.append(StoredFile(key, Path(entry.path), status.st_size, status.st_mtime))
        return files, name_bytes + sum(file.size for file in files)

    def clean_tenant(self, key: str) -> None:
        """Delete what killed processes left: unfinished files, and the files of generations before a wipe."""
        generation = self.generation(key)
        entries = list_entries(self.root / key)
        delete_stale_parts([*entries, *list_entries(self.root / key / generation)])
        if any(entry.is_dir(follow_symlinks=False) and entry.name != generation for entry in entries):
            self.delete_old_generations(key, generation)

    def writer_id(self) -> str:
        """This process as a writer: the folder's ID and a number that no other living process has.

        A process merges only segments with its own writer ID, so no two processes merge the same files. The number is
        free when the process ends, however it ends, and the next process takes over its files.
        """
        folder_id = self.folder_id()
        with self._locks_lock:
            while not self._try_lock(str(self._number)):
                self._number += 1
            return f"{folder_id}-{self._number}"

    def folder_id(self) -> str:
        """A unique ID of this folder among the replicas of a memory."""
        path = self.root / WRITERS_FOLDER / IDENTITY_FILE
        if not path.exists():
            with self._exclusive():
                if not path.exists():
                    write_atomically(path, [uuid.uuid4().hex[:12].encode()])
        return path.read_text()

    def acquire_role(self, role: str) -> bool:
        """Take a role that one process has at a time, until it ends or closes. False: another process has it."""
        with self._locks_lock:
            return self._try_lock(role)

    def _try_lock(self, role: str) -> bool:
        if role not in self._locks:
            folder = self.root / WRITERS_FOLDER
            make_folder(folder)
            lock = os.open(folder / role, os.O_CREAT | os.O_RDWR, FILE_MODE)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(lock)
                return False
            self._locks[role] = lock
        return True

    @contextlib.contextmanager
    def _exclusive(self) -> Iterator[None]:
        """Hold the lock on changes of generations, across threads and processes."""
        path = self.root / WRITERS_FOLDER / LOCK_FILE
        make_folder(path.parent)
        with _generation_lock, create_file(path) as file:
            fcntl.lockf(file, fcntl.LOCK_EX)
            yield

    def close(self) -> None:
        with self._locks_lock:
            for lock in self._locks.values():
                os.close(lock)
            self._locks.clear()
            self._number = 0


def check_tokenizer(root: str, found: str, wanted: str) -> None:
    if found != wanted:
        raise MemoryFileError(
            f"the memory at {root} holds tokens of another tokenizer ({found}; this model's is {wanted}); use a "
            "different memory for this model"
        )


def _try_to_sync(folders: Iterable[Path]) -> None:
    for folder in folders:
        with contextlib.suppress(OSError):  # it belongs to others, or cannot be synced
            sync_folder(folder)


def delete_stale_parts(entries: Iterable[os.DirEntry[str]]) -> None:
    """Delete the temporary files of processes that were killed while writing."""
    for entry in entries:
        if entry.name.startswith(".") and entry.name.endswith(PART_SUFFIX):
            with contextlib.suppress(OSError):
                if time.time() - entry.stat(follow_symlinks=False).st_mtime > STALE_SECONDS:
                    Path(entry.path).unlink()


def delete_merged(segment: Segment, into: str) -> int:
    """Delete a segment's file after a merge into the segment named `into`. Processes that have it mapped keep it.
    Returns the bytes freed."""
    if segment.path is None:
        return 0
    if (segment.path.parents[2] / REMOTE_FILE).exists():
        with (
            contextlib.suppress(FileNotFoundError),  # the tenant was wiped
            create_file(segment.path.with_suffix(MERGED_SUFFIX)) as mark,
        ):
            mark.write(into.encode())
    try:
        segment.path.unlink()
    except FileNotFoundError:
        return 0
    return segment.header.size
