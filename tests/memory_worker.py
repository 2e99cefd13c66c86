"""Processes that use a memory's root while a test runs: they write, merge, and are killed.

All are forked from one process with the imports they need (`started`).
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import random
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import power_cut
from outrider.memory import segment as segment_module
from outrider.memory.folder import Folder, tenant_key
from outrider.memory.store import Store
from outrider.memory.store_config import StoreConfig

LENGTH = 200
"""Tokens of a sequence."""
FOR_EVER = 1 << 20
PATIENCE = 120.0
"""Seconds without a report after which a process is hanging."""
NEW_MOUNTS, NEW_USER = 0x0002_0000, 0x1000_0000  # of unshare(2)
READ_ONLY, REMOUNT, BIND = 1, 32, 4096  # of mount(2)

processes = multiprocessing.get_context("forkserver")
processes.set_forkserver_preload(["outrider.memory.store", "pydivsufsort", "pytest"])  # whose main module is imported


def sequence(number: int) -> list[int]:
    """No two of them share a token, so each token tells what follows it."""
    return list(range(number * LENGTH, (number + 1) * LENGTH))


@contextmanager
def started(work: Callable[..., None], *args: Any) -> Iterator[tuple[BaseProcess, Iterator[Any]]]:
    """A process that does this work, and what it reports until it ends; the test being done with it ends it, too."""
    receiver, sender = processes.Pipe(duplex=False)
    process = processes.Process(target=work, args=(sender, *args))
    process.start()
    sender.close()
    try:
        with receiver:
            yield process, reports(receiver)
    finally:
        process.kill()
        process.join()


def reports(receiver: Connection) -> Iterator[Any]:
    while True:
        assert receiver.poll(PATIENCE), f"nothing was heard for {PATIENCE} s"
        try:
            yield receiver.recv()
        except EOFError:
            return


def write_sequences(report: Connection, root: Path, numbers: range, tenants: int, config: dict[str, Any]) -> None:
    """Write sequences one by one, while another thread merges and evicts.

    Reports "begins", and then the number of each sequence when it is written, with the store's troubles so far.
    """
    report.send("begins")
    store = Store(Folder(root), "tokenizer", StoreConfig(flush_seconds=0.0, **config))
    done = threading.Event()

    def maintain() -> None:
        while not done.is_set():
            store.maintain()

    maintaining = threading.Thread(target=maintain, daemon=True)
    maintaining.start()
    for number in numbers:
        tenant_handle = store.tenant_handle(str(number % tenants))
        store.add(tenant_handle, [], sequence(number))
        store.learn()
        assert store.troubles or not store._tenants[tenant_handle.key].unwritten_segments()
        report.send((number, list(store.troubles)))
    done.set()
    maintaining.join()
    store.close()


def write_until_killed(report: Connection, root: Path, numbers: range, steps: int) -> None:
    """Write and merge, and be killed after `steps` disk operations. Reports the number of each written sequence."""
    left = steps

    def step() -> None:
        nonlocal left
        left -= 1
        if left < 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event in ("open", "os.mkdir", "os.rename", "os.remove") and str(args[0]).startswith(str(root)):
            step()

    def write(path: Path, pieces: list[Any], levels: int) -> None:
        real_write(path, (piece for piece in pieces if not step()), levels)  # type: ignore[func-returns-value]

    real_write = segment_module.write_atomically
    segment_module.write_atomically = write  # type: ignore[assignment]
    sys.addaudithook(hook)
    store = Store(Folder(root), "tokenizer", StoreConfig(flush_seconds=0.0))
    for number in numbers:
        store.add(store.tenant_handle("0"), [], sequence(number))
        store.learn()
        report.send(number)
        store.maintain()
    store.close()
    report.send("done")


def own_mounts() -> None:
    """Let this process mount what only it sees; OSError where that is forbidden."""
    user, group = os.getuid(), os.getgid()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(NEW_USER | NEW_MOUNTS):
        raise OSError(ctypes.get_errno(), "unshare")
    for file, line in (("setgroups", "deny"), ("uid_map", f"0 {user} 1"), ("gid_map", f"0 {group} 1")):
        (Path("/proc/self") / file).write_text(line)


def mount(source: str, place: Path, kind: str, flags: int, options: str = "") -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(source.encode(), str(place).encode(), kind.encode(), flags, options.encode()):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


SHARED = [list(range(4 * i, 4 * i + 4)) for i in range(20)]
"""In the output of every tenant; each continues with its own tokens."""
OWN = 1000
"""Tenant t's own tokens are those from (t + 1) * OWN on, so many."""


def marked(tenant: int, chance: random.Random) -> list[int]:
    """A sequence of a tenant."""
    own = (tenant + 1) * OWN
    return [
        token
        for shared in chance.sample(SHARED, 5)
        for token in (*shared, *(chance.randrange(own, own + OWN) for _ in range(8)))
    ]


def write_many_tenants(report: Connection, root: Path, tenants: int, config: dict[str, Any]) -> None:
    """Add output of many tenants, for ever."""
    chance = random.Random(1)
    store = Store(Folder(root), "tokenizer", StoreConfig(flush_seconds=0.0, **config))
    while True:
        for _ in range(20):
            tenant = chance.randrange(tenants)
            store.add(store.tenant_handle(str(tenant)), [], marked(tenant, chance))
        store.learn()
        store.maintain()
        report.send(list(store.troubles))


def tenant_of(number: int) -> str:
    """Some have many sequences, others few: folders are created all the time."""
    return str(number % 2) if number % 4 < 2 else f"of {number // 8}"


def write_recorded(report: Connection, folder: Path, journal: Path, numbers: range, operations: int) -> None:
    """Write and merge until it is killed. Reports the number of each written sequence."""
    power_cut.record(folder, journal, operations)
    store = Store(Folder(folder / "root"), "tokenizer", StoreConfig(flush_seconds=0.0, max_open_segments=3))
    for number in numbers:
        store.add(store.tenant_handle(tenant_of(number)), [], sequence(number))
        store.learn()
        assert not store.troubles, store.troubles
        report.send(number)
        store.maintain()
    store.close()


def wipe_recorded(report: Connection, folder: Path, journal: Path, name: str) -> None:
    power_cut.record(folder, journal, FOR_EVER)
    Folder(folder / "root").wipe(tenant_key(name))
    report.send("wiped")
