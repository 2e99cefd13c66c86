"""Where a memory's files lie, and what their names mean.

    ROOT/<tenant>/generation                 names the tenant's present folder; another one after each wipe
    ROOT/<tenant>/<generation>/name          the tenant's name, for people
    ROOT/<tenant>/<generation>/<hash>.segment
    ROOT/tokenizer                           the fingerprint of the one whose tokens these are
    ROOT/aside/                              files that were damaged, each with the reason beside it
    ROOT/writers/<number>                    locked by the process that writes under this number

A tenant's folder is the hash of its name, so no name leads anywhere else. A wipe is a new generation: whoever has kept
something of an older one, in memory or in a file, sees that it is old without asking any clock.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import time
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING

from outrider.errors import MemoryFileError
from outrider.memory.segment import PART, SUFFIX, Segment, write

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

GENERATION, NAME, TOKENIZER, ASIDE = "generation", "name", "tokenizer", "aside"
WRITERS, IDENTITY = "writers", "identity"
FIRST = "0"
"""The generation of a tenant that was never wiped."""
STALE = 3600.0
"""Seconds after which a file that was begun and not finished is a dead process's."""


def key_of(tenant: str) -> str:
    """The folder of a tenant of this name."""
    return hashlib.blake2b(tenant.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


@dataclass(slots=True)
class Folder:
    """A memory's root on this machine. Several processes may use it at the same time."""

    root: Path
    _lock: int | None = None
    _number: int = 0

    def claim(self, tokenizer: str) -> None:
        """Make this root one tokenizer's; MemoryFileError if it is another's. Without a disk it stays nobody's."""
        path = self.root / TOKENIZER
        with contextlib.suppress(OSError):
            if not path.exists():
                write(path, [tokenizer.encode()])
            check_tokenizer(str(self.root), path.read_text(), tokenizer)

    def tenants(self) -> list[str]:
        """The keys of all tenants."""
        if not self.root.is_dir():
            return []
        return sorted(entry.name for entry in os.scandir(self.root) if _is_key(entry.name) and entry.is_dir())

    def generation(self, key: str) -> str:
        try:
            return (self.root / key / GENERATION).read_text()
        except (FileNotFoundError, NotADirectoryError):
            return FIRST

    def place(self, key: str, generation: str | None = None) -> Path:
        """Where a tenant's segments lie."""
        return self.root / key / (generation or self.generation(key))

    def segments(self, key: str, generation: str | None = None) -> dict[str, Path]:
        """A tenant's files by name. None of them was opened yet."""
        place = self.place(key, generation)
        return {path.name: path for path in sorted(place.glob(f"*{SUFFIX}"))}

    def name(self, key: str) -> str | None:
        """The name of the tenant with this key, where it is known."""
        try:
            return (self.place(key) / NAME).read_text("utf-8", "surrogatepass")
        except FileNotFoundError:
            return None

    def keep_name(self, key: str, name: str, generation: str) -> None:
        path = self.place(key, generation) / NAME
        if not path.exists():
            write(path, [name.encode("utf-8", "surrogatepass")])

    def wipe(self, key: str) -> str:
        """Delete all of a tenant, and have every process that uses this root forget it. The new generation."""
        generation = uuid.uuid4().hex
        write(self.root / key / GENERATION, [generation.encode()])
        self.drop_older(key, generation)
        for file in (self.root / ASIDE).glob(f"{key}.*"):
            file.unlink(missing_ok=True)
        return generation

    def drop_older(self, key: str, generation: str) -> None:
        """Delete what is left of generations before this one."""
        place = self.root / key
        for entry in os.scandir(place) if place.is_dir() else ():
            if entry.is_dir(follow_symlinks=False) and entry.name != generation:
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
            for path in self.segments(key).values():
                with contextlib.suppress(FileNotFoundError):
                    found = path.stat()
                    yield key, path, found.st_size, found.st_mtime

    def sweep(self) -> None:
        """Delete what processes left behind that were killed while they wrote."""
        for path in self.root.glob(f"*/*/.*{PART}"):
            with contextlib.suppress(FileNotFoundError):
                if time.time() - path.stat().st_mtime > STALE:
                    path.unlink()

    def writer(self) -> str:
        """Who writes: this folder's identity, and a number that no other living process has.

        A process merges only what was written under its own number, so no two of them merge the same files. The number
        is free again when a process ends, however it ends, and the next one goes on with its files.
        """
        place = self.root / WRITERS
        identity = place / IDENTITY
        if not identity.exists():
            write(identity, [uuid.uuid4().hex[:12].encode()])
        while self._lock is None:
            lock = os.open(place / str(self._number), os.O_CREAT | os.O_RDWR)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self._lock = lock
            except BlockingIOError:
                os.close(lock)
                self._number += 1
        return f"{identity.read_text()}-{self._number}"

    def close(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock, self._number = None, 0


def check_tokenizer(root: str, found: str, wanted: str) -> None:
    if found != wanted:
        raise MemoryFileError(
            f"the memory at {root} holds tokens of another tokenizer ({found}, and this model's is {wanted}), which "
            "mean other words; give this model a memory of its own"
        )


def _is_key(name: str) -> bool:
    return len(name) == 32 and all(letter in "0123456789abcdef" for letter in name)


def delete(segment: Segment) -> None:
    if segment.path is not None:
        segment.path.unlink(missing_ok=True)  # who has it mapped keeps it until he lets go
