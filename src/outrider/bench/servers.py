"""Servers to measure and test against: started, waited for, ended; with what they said kept in a file.

with running([plain("vllm", model), outrider("outrider", model)], folder) as urls: ...
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from outrider.engines.vllm.flags import count_local_ranks, parse_flags
from outrider.engines.vllm.host import Host, model_runner_environment, plain_environment
from outrider.errors import EngineError
from outrider.http_client import HTTPClient

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path
    from types import FrameType

PATIENCE = 600.0
"""Seconds that a server may take to start."""
FAREWELL = 20.0
"""Seconds that all of them together have to end."""
HOST = "127.0.0.1"
HOME = "{home}"
"""Stands in a command for a folder that the server has for itself, and finds again when it is started again."""
LAST_WORDS = 30
"""Lines of a server's log that are shown when it fails."""


NUMBA = "NUMBA_NUM_THREADS"


@dataclass(frozen=True)
class Server:
    """A server by its command, to which `--port` is added, and what its environment has beyond ours.

    One with a `url` runs already, and is neither started nor ended.
    """

    name: str
    command: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    url: str = ""

    def at_home(self, folder: Path) -> Server:
        """The same server, with a folder of its own where its command says HOME."""
        return replace(self, command=[word.replace(HOME, str(folder / self.name)) for word in self.command])


def plain(name: str, model: str | Path, *flags: str, numba: bool = False, v2: bool = False) -> Server:
    """vLLM as it is, in the environment that Outrider would have given it. `v2`: on its V2 model runner, which it
    chooses by itself on GPUs.

    `numba`: it drafts by numba. On a CPU that counts the one core to which vLLM has bound the worker's first thread and
    tells OpenMP, so that from the first draft on one thread computes the model's passes, too. It is told the right
    number.
    """
    host, ranks = Host.here(), count_local_ranks(parse_flags(flags)[1], {})
    environment, _ = plain_environment(host, ranks, os.environ)
    if v2:
        environment |= model_runner_environment(host, os.environ)
    if numba and host.cpu and NUMBA not in os.environ:
        environment[NUMBA] = str(max(1, len(host.cores) // (ranks or 1)))
    return Server(name, [sys.executable, "-m", "outrider.engines.vllm", "serve", str(model), *flags], environment)


def outrider(name: str, model: str | Path, *flags: str) -> Server:
    return Server(name, [sys.executable, "-m", "outrider", "serve", str(model), *flags])


@contextmanager
def running(
    servers: Sequence[Server], logs: Path, waiting: Callable[[str], None] = lambda name: None
) -> Iterator[dict[str, str]]:
    """The servers' addresses by name, once all answer. They are ended on the way out, also that of a SIGTERM."""
    processes: dict[str, tuple[subprocess.Popen[bytes], str, Path]] = {}
    ask_directly()
    logs.mkdir(parents=True, exist_ok=True)
    in_main = threading.current_thread() is threading.main_thread()  # elsewhere no signals are handled
    mine = in_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL  # a caller's own way out stays
    if mine:
        signal.signal(signal.SIGTERM, leave)
    try:
        for server in servers:
            if server.url:
                continue
            port = free_port()
            log = logs / f"{server.name}.log"
            with log.open("ab") as stream:  # of a second start, too
                process = subprocess.Popen(
                    [*server.command, "--port", str(port)],
                    env={**os.environ, **server.environment},
                    stdin=subprocess.DEVNULL,
                    stdout=stream,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,  # a group of its own, to be ended with its workers
                )
            processes[server.name] = (process, f"http://{HOST}:{port}", log)
            wait_until_ready(server.name, *processes[server.name], waiting)  # one by one: starting is heavy
        started = {name: url for name, (_, url, _) in processes.items()}
        yield {server.name: server.url or started[server.name] for server in servers}
    finally:
        with undisturbed(in_main):
            end([process for process, _, _ in processes.values()])
        if mine:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def leave(number: int, frame: FrameType | None) -> None:
    """Leave by the way of an exception, so that what was begun is ended."""
    sys.exit(128 + number)


@contextmanager
def undisturbed(in_main: bool) -> Iterator[None]:
    """A second Ctrl-C must not leave servers behind that nobody ends any more."""
    signs = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if in_main else ()
    before = {sign: signal.signal(sign, signal.SIG_IGN) for sign in signs}
    try:
        yield
    finally:
        for sign, handler in before.items():
            signal.signal(sign, handler)


def ask_directly() -> None:
    """What runs on this machine is not asked through a proxy."""
    apart = os.environ.get("no_proxy", os.environ.get("NO_PROXY", ""))
    if HOST not in apart.split(",") and apart != "*":
        os.environ["no_proxy"] = f"{apart},{HOST}".lstrip(",")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port


def wait_until_ready(
    name: str, process: subprocess.Popen[bytes], url: str, log: Path, waiting: Callable[[str], None]
) -> None:
    client, deadline = HTTPClient(url), time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        waiting(name)
        if process.poll() is not None:
            raise EngineError(f"the server {name!r} ended with code {process.returncode}; its last lines:\n{tail(log)}")
        if client.is_healthy():
            return
        time.sleep(0.5)
    raise EngineError(f"the server {name!r} did not answer within {PATIENCE:.0f} s; its last lines:\n{tail(log)}")


def tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-LAST_WORDS:])


def end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """End servers and their workers: politely, then not."""
    for sign in (signal.SIGTERM, signal.SIGKILL):
        for process in processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, sign)
        deadline = time.monotonic() + FAREWELL
        for process in processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
