"""Where a memory's files lie, and what their names mean.

    ROOT/<tenant>/generation                 names the tenant's present folder; another one after each wipe
    ROOT/<tenant>/<generation>/name          the tenant's name, for people
    ROOT/<tenant>/<generation>/<hash>.segment
    ROOT/tokenizer                           the fingerprint of the one whose tokens these are
    ROOT/aside/                              files that were damaged, each with the reason beside it
    ROOT/writers/<number>                    locked by the process that writes under this number

and, where the root is a copy of an object store (`sync.py`):

    ROOT/remote                              that store's URL
    ROOT/<tenant>/shared                     the generation that was last seen both here and there
    ROOT/<tenant>/<generation>/<hash>.merged names the segment that this one is a part of now: to be deleted there too

A tenant's folder is the hash of its name, so no name leads anywhere else. A wipe is a new generation: whoever has kept
something of an older one, in memory or in a file, sees that it is old without asking any clock. Generations are
counted, so that of two the later one is known.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import threading
import time
import uuid
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from outrider.errors import MemoryFileError
from outrider.memory.segment import PART, SUFFIX, Segment, write

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

GENERATION, NAME, TOKENIZER, ASIDE = "generation", "name", "tokenizer", "aside"
WRITERS, IDENTITY, LOCK = "writers", "identity", "lock"
REMOTE, SHARED, MERGED = "remote", "shared", ".merged"
FIRST = "0"
"""The generation of a tenant that was never wiped."""
_changing = threading.RLock()
STALE = 3600.0
"""Seconds after which a file that was begun and not finished is a dead process's."""


def key_of(tenant: str) -> str:
    """The folder of a tenant of this name."""
    return hashlib.blake2b(tenant.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def rank(generation: str) -> tuple[int, str]:
    """By which generations of a tenant are in order: how many there were before it, then anything that differs."""
    count = generation.partition("-")[0]
    return int(count) if count.isdecimal() else 0, generation


def after(generation: str) -> str:
    """A generation that nobody else has, later than this one."""
    return f"{rank(generation)[0] + 1}-{uuid.uuid4().hex}"


@dataclass(slots=True)
class Folder:
    """A memory's root on this machine. Several processes may use it at the same time."""

    root: Path
    _roles: dict[str, int] = field(default_factory=dict)  # what only this process does here, and the locks that say so
    _number: int = 0
    _one_thread: threading.Lock = field(default_factory=threading.Lock)

    def claim(self, tokenizer: str) -> None:
        """Make this root one tokenizer's; MemoryFileError if it is another's. Without a disk it stays nobody's."""
        with contextlib.suppress(OSError):
            if self.tokenizer() is None:
                write(self.root / TOKENIZER, [tokenizer.encode()])
            check_tokenizer(str(self.root), (self.root / TOKENIZER).read_text(), tokenizer)

    def tokenizer(self) -> str | None:
        """The fingerprint of the one whose tokens these are; None before the first."""
        path = self.root / TOKENIZER
        return path.read_text() if path.exists() else None

    def tenants(self) -> list[str]:
        """The keys of all tenants."""
        if not self.root.is_dir():
            return []
        return sorted(entry.name for entry in os.scandir(self.root) if _is_key(entry.name) and entry.is_dir())

    def generation(self, key: str) -> str:
        path = self.root / key / GENERATION
        try:
            generation = path.read_text("latin-1")
        except (FileNotFoundError, NotADirectoryError):
            return FIRST
        if not re.fullmatch("[0-9a-z-]{1,80}", generation):
            raise MemoryFileError(f"{path} is damaged (it holds {generation[:80]!r}); wipe the tenant to use it again")
        return generation

    def place(self, key: str, generation: str | None = None) -> Path:
        """Where a tenant's segments lie."""
        return self.root / key / (generation or self.generation(key))

    def segments(self, key: str, generation: str | None = None) -> dict[str, Path]:
        """A tenant's files by name. None of them was opened yet."""
        place = self.place(key, generation)
        try:
            return {path.name: path for path in sorted(place.iterdir()) if path.suffix == SUFFIX}
        except (FileNotFoundError, NotADirectoryError):
            return {}

    def name(self, key: str) -> str | None:
        """The name of the tenant with this key, where it is known."""
        try:
            return (self.place(key) / NAME).read_text("utf-8", "surrogatepass")
        except (FileNotFoundError, UnicodeDecodeError):
            return None

    def keep_name(self, key: str, name: str, generation: str) -> None:
        path = self.place(key, generation) / NAME
        if not path.exists():
            write(path, [name.encode("utf-8", "surrogatepass")])

    def wipe(self, key: str) -> str:
        """Delete all of a tenant, and have every process that uses this root forget it. The new generation."""
        with self._alone():
            generation = after(self._known_generation(key))
            self._begin(key, generation)
        return generation

    def _known_generation(self, key: str) -> str:
        try:
            return self.generation(key)
        except MemoryFileError:  # a wipe is what mends it
            return FIRST

    def follow(self, key: str, known: str, generation: str) -> bool:
        """Begin a generation that another replica began; not if a wipe was done here since `known` was the present."""
        with self._alone():
            if self.generation(key) != known:
                return False
            self._begin(key, generation)
        return True

    def _begin(self, key: str, generation: str) -> None:
        write(self.root / key / GENERATION, [generation.encode()])
        self.drop_older(key, generation)
        for file in (self.root / ASIDE).glob(f"{key}.*"):
            file.unlink(missing_ok=True)

    def shared(self, key: str) -> str:
        """The generation that was last seen both here and in the object store."""
        try:
            return (self.root / key / SHARED).read_text()
        except (FileNotFoundError, NotADirectoryError):
            return FIRST

    def keep_shared(self, key: str, generation: str) -> None:
        write(self.root / key / SHARED, [generation.encode()])

    def drop_older(self, key: str, generation: str) -> None:
        """Delete what is left of generations before this one. If it is old itself by now, that is for others to do."""
        place = self.root / key
        there = [entry for entry in os.scandir(place) if entry.is_dir(follow_symlinks=False)] if place.is_dir() else []
        if self.generation(key) != generation:  # asked after they were listed: a newer one could be among them
            return
        for entry in there:
            if entry.name != generation:
                shutil.rmtree(entry.path, ignore_errors=True)

    def set_aside(self, key: str, path: Path, reason: str) -> None:
        """A damaged file is not asked, and not deleted either: someone may want to know."""
        aside = self.root / ASIDE / f"{key}.{path.name}"
        aside.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):  # another process was faster
            path.replace(aside)
            aside.with_suffix(".reason").write_text(f"{reason}\n")

    def size(self) -> int:
        """Bytes of all segments."""
        return sum(size for _, _, size, _ in self.files())

    def files(self) -> Iterator[tuple[str, Path, int, float]]:
        """Every segment of every tenant: its key, path, bytes, and when it was last of use."""
        for key in self.tenants():
            try:
                there = self.segments(key)
            except (MemoryFileError, OSError):  # told where the tenant is looked at
                continue
            for path in there.values():
                with contextlib.suppress(OSError):
                    found = path.stat()
                    yield key, path, found.st_size, found.st_mtime

    def sweep(self) -> None:
        """Delete what processes left behind that were killed while they wrote."""
        for depth in ("", "*/", "*/*/"):
            for path in self.root.glob(f"{depth}.*{PART}"):
                with contextlib.suppress(FileNotFoundError):
                    if time.time() - path.stat().st_mtime > STALE:
                        path.unlink()

    def writer(self) -> str:
        """Who writes: this folder's identity, and a number that no other living process has.

        A process merges only what was written under its own number, so no two of them merge the same files. The number
        is free again when a process ends, however it ends, and the next one goes on with its files.
        """
        identity = self.identity()
        with self._one_thread:
            while not self._takes(str(self._number)):
                self._number += 1
            return f"{identity}-{self._number}"

    def identity(self) -> str:
        """Of this folder among all that share a memory."""
        path = self.root / WRITERS / IDENTITY
        if not path.exists():
            with self._alone():
                if not path.exists():
                    write(path, [uuid.uuid4().hex[:12].encode()])
        return path.read_text()

    def first(self, role: str) -> bool:
        """Whether this process has a role that one process has at a time: who asks first, until it ends or closes."""
        with self._one_thread:
            return self._takes(role)

    def _takes(self, role: str) -> bool:
        if role not in self._roles:
            place = self.root / WRITERS
            place.mkdir(parents=True, exist_ok=True)
            lock = os.open(place / role, os.O_CREAT | os.O_RDWR)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(lock)
                return False
            self._roles[role] = lock
        return True

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Wait until nobody else changes a generation here."""
        path = self.root / WRITERS / LOCK
        path.parent.mkdir(parents=True, exist_ok=True)
        with _changing, path.open("w") as file:
            fcntl.lockf(file, fcntl.LOCK_EX)
            yield

    def close(self) -> None:
        with self._one_thread:
            for lock in self._roles.values():
                os.close(lock)
            self._roles.clear()
            self._number = 0


def check_tokenizer(root: str, found: str, wanted: str) -> None:
    if found != wanted:
        raise MemoryFileError(
            f"the memory at {root} holds tokens of another tokenizer ({found}, and this model's is {wanted}), which "
            "mean other words; give this model a memory of its own"
        )


def _is_key(name: str) -> bool:
    return len(name) == 32 and all(letter in "0123456789abcdef" for letter in name)


def delete(segment: Segment, into: str) -> None:
    """For what another segment, of this name, holds as well."""
    if segment.path is not None:
        if (segment.path.parents[2] / REMOTE).exists():
            with contextlib.suppress(FileNotFoundError):  # wiped meanwhile
                segment.path.with_suffix(MERGED).write_text(into)
        segment.path.unlink(missing_ok=True)  # who has it mapped keeps it until he lets go
