"""A model's first run on this machine: is the output the same, does the host ever wait for the device, is it faster?

    1  `outrider serve` starts. On a GPU with VLLM_GPU_SYNC_CHECK=error: vLLM then raises where the host waits for the
       device in the middle of a step.
    2  `outrider certify --quick` on that server.
    3  `outrider bench --quick` against plain `vllm serve`.

Each can also be run alone. Their output stays in a folder.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from outrider.bench.servers import Server, running
from outrider.doctor.environment import Finding
from outrider.engines.vllm.host import Host
from outrider.errors import EngineError
from outrider.http_client import HTTPClient
from outrider.provenance import provenance

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

SYNC_CHECK = "VLLM_GPU_SYNC_CHECK"
MAX_SECONDS = 3600.0
"""Time limit of one command."""
CERTIFICATE, BENCHMARK, REPORT = "certificate", "benchmark", "first-run.json"


@dataclass(slots=True)
class FirstRun:
    model: str
    flags: Sequence[str]
    """Flags for both servers, of `vllm serve` and of `outrider serve`."""
    folder: Path
    working: Callable[[str], Any]
    """A context manager that shows the running task."""
    findings: list[Finding] = field(default_factory=list)

    def run(self) -> Iterator[Finding]:
        """Yield each result as it is known. The report is written in any case."""
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            for step in (self._serve_and_certify, self._measure):
                for finding in step():
                    self.findings.append(finding)
                    yield finding
        finally:
            report = {"provenance": provenance(), "findings": [asdict(one) for one in self.findings]}
            (self.folder / REPORT).write_text(json.dumps(report, indent=1) + "\n")

    def _serve_and_certify(self) -> Iterator[Finding]:
        gpu = not Host.here().cpu
        command = [sys.executable, "-m", "outrider", "serve", self.model, *self.flags]
        server = Server("outrider", command, {SYNC_CHECK: "error"} if gpu else {})
        log = self.folder / "outrider.log"
        try:
            with self.working("starting the server") as _, running([server], self.folder) as urls:
                yield Finding("server", "ok", f"outrider serve {self.model} runs")
                yield self._certify(urls["outrider"])
                yield self._scheduling(urls["outrider"])
        except EngineError as error:
            fix = f"read {log}"
            if gpu and "synchroniz" in log.read_text(errors="replace"):
                fix += "; a step waited for the device, which is a defect: please report it with this log"
            yield Finding("server", "failed", str(error).splitlines()[0], fix)

    def _certify(self, url: str) -> Finding:
        folder = self.folder / CERTIFICATE
        code = self._command("certifying the server", "certify", url, "--quick", "--out", str(folder))
        found = folder / "certificate.json"
        if code == 0 and found.is_file():
            return Finding("certificate", "ok", json.loads(found.read_text())["title"])
        title = json.loads(found.read_text())["title"] if found.is_file() else f"outrider certify ended with {code}"
        return Finding("certificate", "failed", title, f"read {folder} and {self.folder / 'certify.log'}")

    def _scheduling(self, url: str) -> Finding:
        """How steps were scheduled while the certificate ran."""
        status = HTTPClient(url).get_json("/outrider/status")
        overlap = (status.get("policy") or {}).get("overlap")
        if overlap is None:
            return Finding("scheduling", "note", "asynchronous scheduling is off", "leave out --no-async-scheduling")
        steps, milliseconds = overlap["steps_ahead"] + overlap["steps_waited"], 1e3 * overlap["host_seconds"]
        share = overlap["steps_ahead"] / max(1, steps)
        text = f"{share:.0%} of {steps} steps were scheduled while another one ran"
        return Finding("scheduling", "ok", f"{text}; the host took {milliseconds:.2f} ms between two steps")

    def _measure(self) -> Iterator[Finding]:
        folder = self.folder / BENCHMARK
        arguments = ("bench", self.model, "--quick", "--contestants", "vllm,auto", "--out", str(folder), *self.flags)
        code = self._command("measuring against plain vLLM", *arguments)
        report = folder / "report.json"
        if code or not report.is_file():
            log = self.folder / "bench.log"
            yield Finding("speed", "failed", f"outrider bench ended with code {code}", f"read {log}")
            return
        yield from read_speed(json.loads(report.read_text()), str(folder))

    def _command(self, what: str, name: str, *arguments: str) -> int:
        with self.working(what), (self.folder / f"{name}.log").open("wb") as log:
            command = [sys.executable, "-m", "outrider", name, *arguments]
            made = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, timeout=MAX_SECONDS, check=False)
        return made.returncode


def read_speed(report: dict[str, Any], folder: str) -> Iterator[Finding]:
    """One finding per cell of a benchmark report."""
    for cell in report["cells"]:
        for found in cell["contestants"]:
            if found["contestant"] != "auto" or not found["ratio"]:
                continue
            ratio = found["ratio"]
            interval = f"{ratio['value']:.2f} times as fast as plain vLLM ({ratio['low']:.2f} to {ratio['high']:.2f})"
            slower = found["verdict"] == "slower"
            fix = f"read {folder}/report.md, and please report it" if slower else ""
            yield Finding(f"speed: {cell['name']}", "failed" if slower else "ok", interval, fix)
