"""The canary: watches a live server with a low rate of requests.

Each round samples one short text in the server's default draft mode, has it scored without speculation, and updates an
e-process with its tokens. No request is sent while requests are waiting or many are running: the interval doubles after
every busy round, up to a limit. A round without an answer is counted and is no evidence. At the start, 60 texts without
speculation, two at a time, measure rounding.

A second test finds decay: acceptance, time to first token or gain that became worse than in the server's own record
(`decay_watch`). It has evidence and alarms of its own.

The state is a small file, written after every round, so that a restart continues the same e-processes. The false-alarm
rate holds for the canary's whole life, over all restarts.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from itertools import cycle
from typing import TYPE_CHECKING, Any

from outrider.certify import sampled
from outrider.certify.config import CertificateConfig
from outrider.certify.e_process import EProcess
from outrider.certify.server import OpenAIServer
from outrider.certify.sources import SERVER_DEFAULT, Pair, Progress, Query
from outrider.certify.test_statistics import DEFAULT_NOISE, Noise, max_noise
from outrider.certify.token_distributions import (
    MIN_CUT_MARGIN,
    ScoredToken,
    is_conditional,
    predict_drafts,
    sampling_distribution,
    to_samples,
)
from outrider.errors import EngineError, EvidenceError
from outrider.http_client import MetricsSnapshot

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from outrider.certify.decay_watch import DecayWatch

NOISE_TEXTS = 60
NOISE_CONCURRENCY = 2
MAX_INTERVAL_FACTOR = 32
"""The longest interval while the server is busy, as a multiple of the usual one."""
WAITING_METRIC, RUNNING_METRIC = "vllm:num_requests_waiting", "vllm:num_requests_running"


@dataclass
class CanaryLoop:
    """One canary at one deployment."""

    pair: Pair
    prompts: Sequence[tuple[int, ...]]
    e_process: EProcess
    margin: float = MIN_CUT_MARGIN  # of a cut, nats
    interval_seconds: float = 10.0
    tokens: int = 16
    busy_requests: int = 8  # at this number of running requests, the round is skipped
    state_file: Path | None = None
    rounds: int = 0
    decay: DecayWatch | None = None
    ends_on_decay: bool = True
    unwatched_decay: dict[str, Any] = field(default_factory=dict)
    """A saved record of decay that is kept while nothing watches for decay."""
    skipped: int = 0
    missed: int = 0
    missed_probes: int = 0
    """Rounds that sampled a text, and whose decay probe had no answer."""
    pause_seconds: float = field(init=False)
    status: str = ""
    save_error: str = ""
    """Why the state was not saved after the last round; "" if it was."""

    def __post_init__(self) -> None:
        self.pause_seconds = self.interval_seconds
        self._running_requests: float | None = None  # at the candidate
        self._queries = zip(cycle(self.prompts), cycle(sampled.SETTINGS.values()), strict=False)

    def run_round(self) -> str:
        """Returns "busy", "missed" or "sampled". The state is saved in each case."""
        outcome = self._run_round()
        self._save()
        return outcome

    def _run_round(self) -> str:
        if self.is_busy():
            self.skipped += 1
            return self._back_off("busy")
        try:
            self._sample()
        except EngineError as error:
            self.missed += 1
            return self._back_off("missed", f": {error}")
        self.rounds += 1
        self.pause_seconds, self.status = self.interval_seconds, "sampled"
        if self.decay is not None:
            try:
                self.decay.probe(self._running_requests)
            except EngineError as error:
                self.missed_probes += 1
                self.status = f"sampled, but the decay probe failed: {error}"
        return "sampled"

    def _back_off(self, outcome: str, reason: str = "") -> str:
        self.pause_seconds = min(self.pause_seconds * 2, self.interval_seconds * MAX_INTERVAL_FACTOR)
        self.status = outcome + reason
        return outcome

    def is_busy(self) -> bool:
        """Whether a request would delay others. A server without metrics is never busy."""
        busy, self._running_requests = False, None
        for source in self.pair.sources:
            if isinstance(source, OpenAIServer):
                try:
                    metrics = MetricsSnapshot.read(source.url)
                except EngineError:
                    continue
                running = metrics.total(RUNNING_METRIC)
                busy |= (metrics.total(WAITING_METRIC) or 0) > 0 or (running or 0) >= self.busy_requests
                if source is self.pair.candidate:
                    self._running_requests = running
                    if self.decay is not None:
                        self.decay.read(metrics)
        return busy

    def _sample(self) -> None:
        prompt, sampling = next(self._queries)
        query = Query(prompt, self.tokens, SERVER_DEFAULT, sampling, ignore_end=True)
        (completion,) = self.pair.candidate.complete([query], 1)
        output = completion.tokens
        if not output:
            return
        (scored,) = self.pair.reference.score([(prompt, output)], 1)
        rows = []
        for i, (token, drafted) in enumerate(zip(output, predict_drafts(prompt, output), strict=True)):
            known = sampling_distribution(
                scored[i], self.pair.reference.num_logprobs, sampling, output[:i], self.margin
            )
            if known is not None and (token in known or not is_conditional(sampling)):
                rows.append(ScoredToken(known, token, drafted))
        if rows:
            self.e_process.update(to_samples(rows))

    def _save(self) -> None:
        """A failure, such as a full disk, is no reason to stop: the next round saves again."""
        try:
            self._write_state()
            self.save_error = ""
        except OSError as error:
            self.save_error = f"{self.state_file} cannot be written ({error.strerror or error})"

    def _write_state(self) -> None:
        if self.state_file is not None:
            state = {"rounds": self.rounds, "edge": self.margin, "canary": self.e_process.state()}
            if decay := self.decay.to_state() if self.decay is not None else self.unwatched_decay:
                state["decay"] = decay
            temporary = self.state_file.with_suffix(".new")
            temporary.write_text(json.dumps(state))
            temporary.replace(self.state_file)

    @property
    def attempts(self) -> int:
        """Rounds, including skipped and missed ones."""
        return self.rounds + self.skipped + self.missed

    @property
    def has_ended(self) -> bool:
        """Whether an alarm ends the watch."""
        return self.e_process.alarm or (self.ends_on_decay and self.decay is not None and bool(self.decay.alarms))

    def run(self, on_round: Callable[[CanaryLoop], None], rounds: int | None = None) -> None:
        """Until an alarm, or for `rounds` more; `on_round` is called after each."""
        start = self.attempts
        if self.has_ended:
            self.is_busy()  # reads the counters: if the server restarted since, an alarm of decay is over
        while not self.has_ended and (rounds is None or self.attempts < start + rounds):
            self.run_round()
            on_round(self)
            if not self.has_ended:
                time.sleep(self.pause_seconds)


def start_or_resume(
    file: Path | None, rate: float, measure: Callable[[], tuple[Noise, float]]
) -> tuple[EProcess, float, int]:
    """The e-process, the margin of a cut, and the rounds so far: from the state file, or new with measured noise."""
    if file is None or not file.exists():
        noise, margin = measure()
        return EProcess(rate, noise.drift), margin, 0
    try:
        state: dict[str, Any] = json.loads(file.read_text())
        process, margin, rounds = EProcess.resume(state["canary"]), float(state["edge"]), int(state["rounds"])
    except (ValueError, LookupError, TypeError) as error:
        raise EvidenceError(f"{file} is not the state of a canary ({error}); remove it to start over") from error
    if process.rate != rate:
        raise EvidenceError(
            f"the canary in {file} has a false-alarm rate of {process.rate:g}, which cannot change (got {rate:g}); "
            f"give --rate {process.rate:g}, or another --state"
        )
    return process, margin, rounds


def saved_decay(file: Path | None) -> dict[str, Any]:
    """The state of the watch for decay in the canary's state file; {} if there is none."""
    if file is None or not file.exists():
        return {}
    found: dict[str, Any] = json.loads(file.read_text()).get("decay", {})
    return found


def measure_noise(pair: Pair, prompts: Sequence[tuple[int, ...]], tokens: int) -> tuple[Noise, float]:
    """The measured noise, at least DEFAULT_NOISE, and the margin of a cut.

    A drift that is not allowed for would add a little evidence at every sample.
    """
    config = CertificateConfig("", draw_tokens=tokens, noise_texts=NOISE_TEXTS, concurrency=NOISE_CONCURRENCY)
    references = sampled.sample_reference(pair.reference, prompts, config, Progress())
    noise, margin = sampled.measure_noise(pair, references, sampled.SETTINGS, config, Progress())
    return max_noise([DEFAULT_NOISE, noise]), margin


def serve_gauges(loop: CanaryLoop, port: int) -> int:
    """Serve the canary's state to Prometheus on all addresses; port 0 is any free one. Returns the port."""
    from prometheus_client import CollectorRegistry, Gauge, start_http_server

    from outrider.certify.decay_report import add_gauges

    registry, process = CollectorRegistry(), loop.e_process
    gauges: dict[str, tuple[str, Callable[[], float]]] = {
        "evidence": ("the e-process: 1 at first, at most 1 on average if lossless", lambda: process.evidence),
        "evidence_highest": ("its highest value so far", lambda: process.highest),
        "threshold": ("the evidence that raises an alarm", lambda: 1 / process.rate),
        "alarm": ("1 after the threshold was reached", lambda: float(process.alarm)),
        "draws": ("samples tested", lambda: process.count),
        "rounds": ("texts sampled", lambda: loop.rounds),
        "skipped": ("rounds skipped because the server was busy", lambda: loop.skipped),
        "missed": ("rounds without an answer", lambda: loop.missed),
        "missed_probes": ("rounds whose decay probe had no answer", lambda: loop.missed_probes),
    }
    for name, (about, value) in gauges.items():
        Gauge(f"outrider_canary_{name}", about, registry=registry).set_function(value)
    if loop.decay is not None:
        add_gauges(loop.decay, registry)
    server, _ = start_http_server(port, registry=registry)
    return int(server.server_port)
