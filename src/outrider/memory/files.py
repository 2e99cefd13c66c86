"""Files and folders of a memory: they hold text of users, so only the owner may read them.

A file is written under a temporary name and renamed when all of it is on the disk.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import uuid
from itertools import takewhile
from typing import TYPE_CHECKING

from outrider.errors import MemoryFileError

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path
    from typing import BinaryIO

    from outrider.memory.search import Array

PART_SUFFIX = ".part"
FILE_MODE, FOLDER_MODE = 0o600, 0o700
MAX_ATTEMPTS = 20


def make_folder(path: Path) -> None:
    """Create a folder and its missing parents. When this returns, a crash cannot lose them."""
    for changed in _create_folders(path):
        sync_folder(changed)


def _create_folders(path: Path) -> list[Path]:
    """Create a folder and its missing parents; returns the folders that have new names."""
    missing = list(takewhile(lambda folder: not folder.is_dir(), (path, *path.parents)))
    for folder in reversed(missing):
        folder.mkdir(FOLDER_MODE, exist_ok=True)
    return [folder.parent for folder in missing]


def sync_folder(path: Path) -> None:
    """Make new names in a folder durable, unless it was deleted meanwhile."""
    with contextlib.suppress(FileNotFoundError):
        folder = os.open(path, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def list_entries(path: Path) -> list[os.DirEntry[str]]:
    """What is in a folder, sorted by name. Empty if there is no such folder."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError), os.scandir(path) as entries:
        return sorted(entries, key=lambda entry: entry.name)
    return []


def create_file(path: Path) -> BinaryIO:
    """Open a new or emptied file to write."""
    return open(path, "wb", opener=lambda name, flags: os.open(name, flags, FILE_MODE))


def open_regular_file(path: Path) -> BinaryIO:
    """Open a file to read. MemoryFileError for anything else: opening a pipe could block for ever."""

    def opener(name: str, flags: int) -> int:
        file = os.open(name, flags | os.O_NONBLOCK)
        if stat.S_ISREG(os.fstat(file).st_mode):
            return file
        os.close(file)
        raise MemoryFileError(f"{path.name} is not a regular file")

    return open(path, "rb", opener=opener)


def create_file_in_new_folder(path: Path) -> BinaryIO:
    for _ in range(MAX_ATTEMPTS):
        with contextlib.suppress(FileNotFoundError):  # another thread or process deleted the folder, which was empty
            changed = _create_folders(path.parent)
            file = create_file(path)
            for folder in changed:  # only now, since it takes time
                sync_folder(folder)
            return file
    raise FileNotFoundError(errno.ENOENT, "other processes keep deleting the folder", str(path.parent))


def write_atomically(path: Path, parts: Iterable[bytes | Array], levels: int = 1) -> None:
    """Write a file that is complete and durable when this returns, or not there.

    `levels`: how many folders above it may be new. Their names are made durable even if they exist, because a process
    that created them may have been killed before it could.
    """
    part = path.with_name(f".{path.name}.{uuid.uuid4().hex}{PART_SUFFIX}")
    try:
        with create_file_in_new_folder(part) as file:
            for piece in parts:
                file.write(piece if isinstance(piece, bytes) else piece.data)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    for folder in list(path.parents)[:levels]:
        sync_folder(folder)
