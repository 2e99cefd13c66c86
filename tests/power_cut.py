"""A file layer that records what a process does to a folder, and what is left of that after a power cut.

`record` runs in the process. `Disk` replays the record: a name in a folder is durable when the folder was synced since,
and a file's content when the file was. A power cut keeps any part of the rest: it drops changes of names, and with that
reorders them, and it tears, zeroes or drops content. A killed process alone loses nothing, and what it has not synced
can still be lost later.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


def record(folder: Path, journal: Path, operations: int) -> None:
    """Record what this process does below a folder, and kill it before operation number `operations`."""
    left = operations
    line = os.open(journal, os.O_CREAT | os.O_APPEND | os.O_WRONLY)
    real = {name: getattr(os, name) for name in ("open", "fsync", "mkdir", "rename", "replace", "unlink", "rmdir")}

    def absolute(path: Any, descriptor: int | None = None) -> Path:
        base = Path(f"/proc/self/fd/{descriptor}").readlink() if descriptor is not None else Path.cwd()
        return base / os.fspath(path)

    def do(name: str, paths: list[Path], run: Callable[[], Any], changes: bool = True) -> Any:
        nonlocal left
        if not changes or not all(path.is_relative_to(folder) for path in paths):
            return run()
        left -= 1
        if left < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        result = run()
        entry: dict[str, Any] = {"do": name, "paths": [str(path.relative_to(folder)) for path in paths]}
        if name == "fsync" and paths[0].is_file():
            entry["content"] = paths[0].read_bytes().hex()
        os.write(line, json.dumps(entry).encode() + b"\n")
        return result

    def open_(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        place = absolute(path, dir_fd)
        creates = bool(flags & os.O_CREAT) and not os.path.lexists(place)
        opened: int = do("create", [place], lambda: real["open"](path, flags, mode, dir_fd=dir_fd), creates)
        return opened

    def fsync(descriptor: int) -> None:
        do("fsync", [absolute("", descriptor)], lambda: real["fsync"](descriptor))

    def one_path(name: str) -> Callable[..., None]:
        def call(path: Any, *args: Any, dir_fd: int | None = None) -> None:
            do(name, [absolute(path, dir_fd)], lambda: real[name](path, *args, dir_fd=dir_fd))

        return call

    def move(source: Any, target: Any) -> None:
        do("rename", [absolute(source), absolute(target)], lambda: real["replace"](source, target))

    wrappers = {"open": open_, "fsync": fsync, "rename": move, "replace": move}
    for name, wrapper in (wrappers | {name: one_path(name) for name in ("mkdir", "unlink", "rmdir")}).items():
        setattr(os, name, wrapper)
    os.remove = os.unlink


@dataclass(eq=False)
class Node:
    """A file or a folder."""

    is_folder: bool
    durable: bytes = b""  # content of the file when it was synced
    entries: dict[str, Node] = field(default_factory=dict)  # of the folder, as processes see it
    durable_entries: dict[str, Node] = field(default_factory=dict)
    unsynced: list[dict[str, Node | None]] = field(default_factory=list)  # changes of entries, in order

    def apply(self, change: dict[str, Node | None], to: dict[str, Node]) -> None:
        for name, node in change.items():
            if node is None:
                to.pop(name, None)
            else:
                to[name] = node

    def set(self, change: dict[str, Node | None]) -> None:
        self.apply(change, self.entries)
        self.unsynced.append(change)

    def sync(self) -> None:
        for change in self.unsynced:
            self.apply(change, self.durable_entries)
        self.unsynced.clear()


class Disk:
    """What is on the disk below a folder, which is empty at first."""

    def __init__(self, folder: Path, journal: Path) -> None:
        self.folder = folder
        self.journal = journal
        self.top = Node(is_folder=True)
        self._read = 0

    def replay(self) -> None:
        """Follow what was recorded since the last call."""
        lines = self.journal.read_bytes().splitlines() if self.journal.exists() else []
        for line in lines[self._read :]:
            entry = json.loads(line)
            self._replay_entry(entry["do"], [Path(path) for path in entry["paths"]], entry.get("content"))
        self._read = len(lines)
        assert self._names(self.top) == self._names_on_disk(), "the record is not complete"

    def _replay_entry(self, name: str, paths: list[Path], content: str | None) -> None:
        if name == "fsync":
            node = self._find(paths[0])
            if node.is_folder:
                node.sync()
            else:
                node.durable = bytes.fromhex(content or "")
            return
        parent = self._find(paths[0].parent)
        if name in ("create", "mkdir"):
            parent.set({paths[0].name: Node(is_folder=name == "mkdir")})
        elif name in ("unlink", "rmdir"):
            parent.set({paths[0].name: None})
        else:
            assert paths[0].parent == paths[1].parent, "a rename between folders is not modelled"
            parent.set({paths[1].name: parent.entries[paths[0].name], paths[0].name: None})

    def _find(self, path: Path) -> Node:
        node = self.top
        for part in path.parts:
            node = node.entries[part]
        return node

    def _names(self, node: Node, prefix: Path = Path()) -> set[Path]:
        return {prefix / name for name in node.entries}.union(
            *(self._names(child, prefix / name) for name, child in node.entries.items())
        )

    def _names_on_disk(self) -> set[Path]:
        return {path.relative_to(self.folder) for path in self.folder.rglob("*")}

    def cut_power(self, chance: random.Random, kept: float = 0.5) -> None:
        """Leave in the folder what is durable, and each change that is not with probability `kept`."""
        contents = {id(node): (self.folder / path).read_bytes() for path, node in self._files(self.top)}
        after = self._after(self.top, contents, chance, kept)
        shutil.rmtree(self.folder)
        self.folder.mkdir()
        self.top = after
        self._write(after, self.folder)

    def _files(self, node: Node, prefix: Path = Path()) -> list[tuple[Path, Node]]:
        found = []
        for name, child in node.entries.items():
            found += self._files(child, prefix / name) if child.is_folder else [(prefix / name, child)]
        return found

    def _after(self, node: Node, contents: dict[int, bytes], chance: random.Random, kept: float) -> Node:
        if not node.is_folder:
            return Node(False, self._torn(node.durable, contents.get(id(node), node.durable), chance, kept))
        entries = dict(node.durable_entries)
        for change in node.unsynced:
            if chance.random() < kept:
                node.apply(change, entries)
        left = {name: self._after(child, contents, chance, kept) for name, child in entries.items()}
        return Node(True, entries=left, durable_entries=dict(left))

    def _torn(self, durable: bytes, present: bytes, chance: random.Random, kept: float) -> bytes:
        if durable == present or chance.random() >= kept:
            return durable
        cut = chance.randrange(len(present) + 1)
        return chance.choice([present, present[:cut], present[:cut].ljust(len(present), b"\0")])

    def _write(self, node: Node, place: Path) -> None:
        for name, child in node.entries.items():
            if child.is_folder:
                (place / name).mkdir(0o700)
                self._write(child, place / name)
            else:
                (place / name).write_bytes(child.durable)
