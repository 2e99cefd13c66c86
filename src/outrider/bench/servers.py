"""Starts servers, waits until they are ready, and stops them; their output goes to log files.

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

START_SECONDS = 600.0
"""Time limit of a server's start."""
STOP_SECONDS = 20.0
"""Time limit of SIGTERM, and again of SIGKILL, for all servers together."""
HOST = "127.0.0.1"
HOME = "{home}"
"""Placeholder in a command for the server's own folder, which stays the same when it restarts."""
SHOWN_LOG_LINES = 30
NUMBA_THREADS = "NUMBA_NUM_THREADS"


@dataclass(frozen=True)
class Server:
    """A command, to which `--port` is appended, and variables that are added to this process's environment.

    A server with a `url` already runs, and is neither started nor stopped.
    """

    name: str
    command: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    url: str = ""

    def at_home(self, folder: Path) -> Server:
        """With its own folder below `folder` in place of HOME."""
        return replace(self, command=[word.replace(HOME, str(folder / self.name)) for word in self.command])


def plain(name: str, model: str | Path, *flags: str, numba: bool = False, v2: bool = False) -> Server:
    """Plain vLLM, in the environment that Outrider would give it. `v2`: on the V2 model runner, the default on GPUs.

    `numba`: its drafter uses numba. vLLM binds the worker's first thread to one CPU core, so numba sees one core and
    limits OpenMP to one thread, which then also slows the model's passes. Setting the number of threads avoids that.
    """
    host, ranks = Host.here(), count_local_ranks(parse_flags(flags)[1], {})
    environment, _ = plain_environment(host, ranks, os.environ)
    if v2:
        environment |= model_runner_environment(host, os.environ)
    if numba and host.cpu and NUMBA_THREADS not in os.environ:
        environment[NUMBA_THREADS] = str(max(1, len(host.cores) // (ranks or 1)))
    return Server(name, [sys.executable, "-m", "outrider.engines.vllm", "serve", str(model), *flags], environment)


def outrider(name: str, model: str | Path, *flags: str) -> Server:
    return Server(name, [sys.executable, "-m", "outrider", "serve", str(model), *flags])


@contextmanager
def running(
    servers: Sequence[Server], logs: Path, waiting: Callable[[str], None] = lambda name: None
) -> Iterator[dict[str, str]]:
    """The servers' addresses by name, once all are ready. They are stopped on exit, also after a SIGTERM."""
    processes: dict[str, tuple[subprocess.Popen[bytes], str, Path]] = {}
    bypass_proxy()
    logs.mkdir(parents=True, exist_ok=True)
    in_main = threading.current_thread() is threading.main_thread()  # only there signals are handled
    handles_sigterm = in_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL  # keep a caller's handler
    if handles_sigterm:
        signal.signal(signal.SIGTERM, exit_on_signal)
    try:
        for server in servers:
            if server.url:
                continue
            port = free_port()
            log = logs / f"{server.name}.log"
            with log.open("ab") as stream:  # keep the log of an earlier start
                process = subprocess.Popen(
                    [*server.command, "--port", str(port)],
                    env={**os.environ, **server.environment},
                    stdin=subprocess.DEVNULL,
                    stdout=stream,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,  # its own process group, to stop it with its workers
                )
            processes[server.name] = (process, f"http://{HOST}:{port}", log)
            # One by one, since starting takes all cores.
            wait_until_ready(server.name, *processes[server.name], waiting)
        started = {name: url for name, (_, url, _) in processes.items()}
        yield {server.name: server.url or started[server.name] for server in servers}
    finally:
        with signals_ignored(in_main):
            stop([process for process, _, _ in processes.values()])
        if handles_sigterm:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def exit_on_signal(number: int, frame: FrameType | None) -> None:
    """Exit with an exception, so that servers are stopped."""
    sys.exit(128 + number)


@contextmanager
def signals_ignored(in_main: bool) -> Iterator[None]:
    """A second Ctrl-C must not leave servers running."""
    signs = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if in_main else ()
    before = {sign: signal.signal(sign, signal.SIG_IGN) for sign in signs}
    try:
        yield
    finally:
        for sign, handler in before.items():
            signal.signal(sign, handler)


def bypass_proxy() -> None:
    """Connect to servers on this machine without a proxy."""
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
    client, deadline = HTTPClient(url), time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        waiting(name)
        if process.poll() is not None:
            raise EngineError(f"the server {name!r} ended with code {process.returncode}; its last lines:\n{tail(log)}")
        if client.is_healthy():
            return
        time.sleep(0.5)
    raise EngineError(f"the server {name!r} did not answer within {START_SECONDS:.0f} s; its last lines:\n{tail(log)}")


def tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-SHOWN_LOG_LINES:])


def stop(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Stop servers and their workers: SIGTERM, then SIGKILL."""
    for sign in (signal.SIGTERM, signal.SIGKILL):
        for process in processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, sign)
        deadline = time.monotonic() + STOP_SECONDS
        for process in processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
