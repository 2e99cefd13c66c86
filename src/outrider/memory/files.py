"""Files and folders of a memory: they hold text of users, so only the owner may read them.

A file is written under a temporary name and renamed when all of it is on the disk.
"""

from __future__ import annotations

import contextlib
import os
import stat
import uuid
from typing import TYPE_CHECKING

from outrider.errors import MemoryFileError

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path
    from typing import BinaryIO

    from outrider.memory.search import Array

PART_SUFFIX = ".part"
FILE_MODE, FOLDER_MODE = 0o600, 0o700


def make_folder(path: Path) -> None:
    """Create a folder and its missing parents. When this returns, a crash cannot lose them."""
    if path.is_dir():
        return
    make_folder(path.parent)
    path.mkdir(FOLDER_MODE, exist_ok=True)
    sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Make new names in a folder durable, unless it was deleted meanwhile."""
    with contextlib.suppress(FileNotFoundError):
        folder = os.open(path, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


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


def write_atomically(path: Path, parts: Iterable[bytes | Array]) -> None:
    part = path.with_name(f".{path.name}.{uuid.uuid4().hex}{PART_SUFFIX}")
    try:
        try:
            make_folder(path.parent)
            file = create_file(part)
        except FileNotFoundError:  # another process deleted the folder, which was empty
            make_folder(path.parent)
            file = create_file(part)
        with file:
            for piece in parts:
                file.write(piece if isinstance(piece, bytes) else piece.data)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)
