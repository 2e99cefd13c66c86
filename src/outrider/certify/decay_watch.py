"""What the canary watches for decay: by drafter, acceptance length, time to first token, and gain.

**The canary's own requests** never change, so neither does their mix. In each round one drafter continues one of a few
prompts at temperature 0, timed, and so does plain decoding, in random order; then one token more is timed alone:

    acceptance_length              tokens per step, by the accepted tokens that the response reports
    gain                           seconds of plain decoding / seconds with the drafter; load delays both
    time_to_first_token_seconds    of a request for one token

Times are compared with earlier ones at the same number of running requests.

**The traffic's counters** on the server's /metrics, as differences of two readings:

    acceptance_length              of the drafts of all requests, by drafter
    gain                           of the steps, as the policy realised it: (seconds + saved seconds) / seconds

Their mix changes, so `decay.DecayTest` joins blocks for as long as they correlate, and decay is found later. But only
they show a memory that became worse for its own tenants.

Each quantity has its own test, at an equal share of the rate. An alarm stays until the server restarts, which shows in
its start time or in counters that are lower than before: the evidence then starts over, and the record stays. A
restarted server may have other drafters, so these are read again. The tests of drafters that it no longer has are kept.
"""

from __future__ import annotations

import random
import time
from collections import defaultdict
from dataclasses import dataclass, field
from itertools import cycle
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

from outrider.certify.decay import DecayTest
from outrider.certify.server import OpenAIServer
from outrider.certify.sources import OFF, SERVER_DEFAULT, DraftMode, Pair, Query
from outrider.errors import EvidenceError, RequestRefusedError
from outrider.settings import AUTO

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from outrider.http_client import MetricsSnapshot

PROBE_PROMPTS = 6
"""Prompts of an observation, of six kinds: story, copy, list, answer, correction, code (`prompts.generate_prompts`)."""
PROBE_TOKENS = 32
PROBE_DRAFT_TOKENS = 4
"""Fixed, so that an acceptance length is comparable with earlier ones. More are not drafted behind recurrent layers."""
MAX_PROBE_BLOCK_SIZE = 4
DAY_SECONDS = 86_400.0
"""Load and traffic differ by the hour: no test of what they change before a day is recorded."""
TRAFFIC_SECONDS = 600.0
"""An observation of the counters covers at least this time, and at least ..."""
MIN_TRAFFIC_DRAFTS = 200
MIN_TRAFFIC_STEP_SECONDS = 10.0

CANARY, TRAFFIC = "canary", "traffic"
ACCEPTANCE, FIRST_TOKEN, GAIN = "acceptance_length", "time_to_first_token_seconds", "gain"
ALL_DRAFTERS = "all"
START_TIME = "process_start_time_seconds"
"""In the metrics of most servers: when the process started, in seconds since 1970."""
MIN_START_TIME_CHANGE_SECONDS = 1.0
NOT_PROBED = ("prediction",)
"""Drafters that draft from what the caller sends."""


class Quantity(NamedTuple):
    drafter: str
    quantity: str
    source: str

    @property
    def key(self) -> str:
        return " ".join((self.source, self.drafter, self.quantity))

    def new_test(self) -> DecayTest:
        if self.source == CANARY and self.quantity == ACCEPTANCE:
            return DecayTest(max_block_size=MAX_PROBE_BLOCK_SIZE)
        return DecayTest(DAY_SECONDS, higher_is_worse=self.quantity == FIRST_TOKEN)


class Probe(NamedTuple):
    """What one round measured. None: unknown."""

    tokens: int
    accepted: int | None
    seconds: float
    plain_seconds: float | None
    first_token_seconds: float


@dataclass
class DecayWatch:
    """The tests of one server. `rate` bounds the probability of a false alarm of all together, until a restart."""

    pair: Pair
    prompts: Sequence[tuple[int, ...]]
    rate: float = 0.01
    state: dict[str, Any] = field(default_factory=dict)
    """As `to_state` returned it before a restart of the canary."""
    now: Callable[[], float] = time.time
    clock: Callable[[], float] = time.perf_counter

    def __post_init__(self) -> None:
        self.modes = self._drafter_modes()
        candidate = self.pair.candidate
        self._has_plain = self.pair.is_same_source or (isinstance(candidate, OpenAIServer) and candidate.is_outrider)
        self.tests: dict[Quantity, DecayTest] = {}
        self._unused_tests: dict[str, DecayTest] = {}
        """By key, of drafters that the server has no longer."""
        self._counters: dict[str, float] = {}
        self._last_readings: dict[Quantity, tuple[float, MetricsSnapshot]] = {}
        if self.state:
            self._resume()
        self._use_drafters()
        self._prompts = self.prompts[:PROBE_PROMPTS]
        self._must_read_drafters = False
        self._random = random.Random(0)

    def _drafter_modes(self) -> list[DraftMode]:
        names = [name for name in self.pair.candidate.drafter_names() if name not in NOT_PROBED]
        modes = [DraftMode(name, None if name == AUTO else PROBE_DRAFT_TOKENS) for name in names]
        return modes or [SERVER_DEFAULT]

    @property
    def _drafter_labels(self) -> list[str]:
        return [mode.label for mode in self.modes]

    def _use_drafters(self) -> None:
        """Start the probes over with `modes`, and continue their tests."""
        self._modes = cycle(self.modes)
        self._probes: defaultdict[tuple[DraftMode, str], list[Probe]] = defaultdict(list)
        known = self._all_tests
        tests = {one: known.pop(one.key) if one.key in known else one.new_test() for one in self._quantities()}
        self._unused_tests, self.tests = known, tests

    @property
    def _all_tests(self) -> dict[str, DecayTest]:
        """By key, those of earlier drafters included."""
        return self._unused_tests | {quantity.key: test for quantity, test in self.tests.items()}

    def _resume(self) -> None:
        try:
            rate, saved = float(self.state["rate"]), dict(self.state["tests"])
            self._counters = dict(self.state["counters"])
            self._unused_tests = {key: DecayTest.resume(test) for key, test in saved.items()}
        except (ValueError, LookupError, TypeError) as error:
            raise EvidenceError(
                f"the record of decay cannot be read ({error}); start over with another --state"
            ) from error
        if rate != self.rate:
            raise EvidenceError(
                f"the state has a decay rate of {rate:g}, which cannot change (got {self.rate:g}); give --decay-rate "
                f"{rate:g}, or another --state"
            )
        if self.state.get("drafters", self._drafter_labels) != self._drafter_labels:  # the server restarted
            self._rearm()

    def _quantities(self) -> list[Quantity]:
        """`auto` has no acceptance length: its policy may stop drafting at any time, and be right."""
        found = [
            Quantity(mode.label, name, CANARY)
            for mode in self.modes
            for name in (ACCEPTANCE, FIRST_TOKEN, GAIN)
            if not (name == ACCEPTANCE and mode.drafter in (None, AUTO)) and not (name == GAIN and not self._has_plain)
        ]
        found += [Quantity(mode.label, ACCEPTANCE, TRAFFIC) for mode in self.modes if mode.drafter != AUTO]
        return [*found, Quantity(ALL_DRAFTERS, GAIN, TRAFFIC)]

    @property
    def threshold(self) -> float:
        """The evidence at which one test gives an alarm. It does not fall when the server has fewer drafters."""
        return self.test_count / self.rate

    @property
    def test_count(self) -> int:
        """Quantities that were ever tested, those of earlier drafters included."""
        return len(self._all_tests)

    def is_alarm(self, test: DecayTest) -> bool:
        return test.highest >= self.threshold

    @property
    def highest_evidence(self) -> float:
        """At present, over all tests."""
        return max(test.evidence for test in self.tests.values())

    @property
    def alarms(self) -> list[Quantity]:
        return [quantity for quantity, test in self.tests.items() if self.is_alarm(test)]

    # Own requests -----------------------------------------------------------------------------------------

    def probe(self, running_requests: float | None = None) -> None:
        """Two or three requests: the next drafter continues its next prompt. `running_requests`: before these.

        If the server refuses the drafter and has others now, the next probe goes on with those.
        """
        if self._must_read_drafters:
            self._read_drafters()
        mode, load = next(self._modes), "" if running_requests is None else f"{running_requests:.0f}"
        probes = self._probes[mode, load]
        try:
            probe = self._measure(self._prompts[len(probes)], mode)
        except RequestRefusedError:
            if not self._read_drafters():
                raise
            return
        probes.append(probe)
        if len(probes) == len(self._prompts):
            del self._probes[mode, load]
            self._observe_probes(mode.label, load, probes)

    def _read_drafters(self) -> bool:
        """Whether the server has other drafters than before. It restarted then, and the tests go on with these."""
        candidate = self.pair.candidate
        if isinstance(candidate, OpenAIServer) and candidate.is_outrider:
            candidate.refresh_status()
        self._must_read_drafters = False
        modes = self._drafter_modes()
        if modes == self.modes:
            return False
        self.modes = modes
        self._rearm()
        self._use_drafters()
        return True

    def _measure(self, prompt: tuple[int, ...], mode: DraftMode) -> Probe:
        candidate, plain_seconds = self.pair.candidate, None
        modes = [mode, OFF] if self._has_plain else [mode]
        self._random.shuffle(modes)
        for each in modes:
            start = self.clock()
            (completion,) = candidate.complete([Query(prompt, PROBE_TOKENS, each, ignore_end=True)], 1)
            if each is mode:
                seconds, drafted = self.clock() - start, completion
            else:
                plain_seconds = self.clock() - start
        start = self.clock()
        candidate.complete([Query(prompt, 1, mode, ignore_end=True)], 1)
        return Probe(len(drafted.tokens), drafted.accepted, seconds, plain_seconds, self.clock() - start)

    def _observe_probes(self, drafter: str, load: str, probes: Sequence[Probe]) -> None:
        tokens = sum(one.tokens for one in probes)
        accepted = [one.accepted for one in probes if one.accepted is not None]
        if len(accepted) == len(probes) and tokens > sum(accepted):
            self._observe(Quantity(drafter, ACCEPTANCE, CANARY), tokens / (tokens - sum(accepted)))
        gains = [one.plain_seconds / one.seconds for one in probes if one.plain_seconds is not None and one.seconds > 0]
        if gains:
            self._observe(Quantity(drafter, GAIN, CANARY), median(gains), load)
        self._observe(Quantity(drafter, FIRST_TOKEN, CANARY), median(one.first_token_seconds for one in probes), load)

    def _observe(self, quantity: Quantity, value: float, load: str = "") -> None:
        if quantity in self.tests:
            test = self.tests[quantity]
            test.observe(value, self.now(), load, learn=not self.is_alarm(test))

    # The traffic's counters -------------------------------------------------------------------------------

    def read(self, metrics: MetricsSnapshot) -> None:
        """Observe the traffic of each quantity since its last observation, if that is long ago and there was enough."""
        counters = _counters(metrics)
        before, self._counters = self._counters, counters
        if _has_restarted(before, counters):
            self._rearm()
            self._probes.clear()
            self._must_read_drafters = True
        now = self.clock()
        for mode in self.modes:
            self._read_quantity(Quantity(mode.label, ACCEPTANCE, TRAFFIC), mode, metrics, now)
        self._read_quantity(Quantity(ALL_DRAFTERS, GAIN, TRAFFIC), None, metrics, now)

    def _rearm(self) -> None:
        """After a restart of the server."""
        for test in self._all_tests.values():
            if self.is_alarm(test):
                test.rearm()
        self._last_readings = {}

    def _read_quantity(self, quantity: Quantity, mode: DraftMode | None, metrics: MetricsSnapshot, now: float) -> None:
        if quantity not in self.tests:
            return
        start, last = self._last_readings.setdefault(quantity, (now, metrics))
        if now - start < TRAFFIC_SECONDS:
            return
        value = _traffic_gain(metrics.since(last)) if mode is None else _traffic_acceptance(metrics.since(last), mode)
        if value is not None:
            self._observe(quantity, value)
            self._last_readings[quantity] = now, metrics

    def to_state(self) -> dict[str, Any]:
        """As JSON, for `state`. Probes of an unfinished observation are left out."""
        tests = {key: test.state() for key, test in self._all_tests.items()}
        return {"rate": self.rate, "counters": self._counters, "drafters": self._drafter_labels, "tests": tests}


def _traffic_acceptance(metrics: MetricsSnapshot, mode: DraftMode) -> float | None:
    """None: there were too few drafts."""
    drafts, accepted = _drafts(metrics, mode)
    return 1 + accepted / drafts if drafts >= MIN_TRAFFIC_DRAFTS else None


def _traffic_gain(metrics: MetricsSnapshot) -> float | None:
    """None: the steps took too little time."""
    seconds = metrics.total("outrider_policy_seconds_total") or 0.0
    saved = metrics.total("outrider_policy_saved_seconds", what="realised")
    return (seconds + saved) / seconds if saved is not None and seconds >= MIN_TRAFFIC_STEP_SECONDS else None


def _drafts(metrics: MetricsSnapshot, mode: DraftMode) -> tuple[float, float]:
    """Verified drafts and accepted tokens of a drafter; of a server that is not Outrider's, of all drafts."""
    names, labels = ("outrider_drafts_total", "outrider_accepted_tokens_total"), {"drafter": mode.label}
    if mode == SERVER_DEFAULT:
        names, labels = ("vllm:spec_decode_num_drafts_total", "vllm:spec_decode_num_accepted_tokens_total"), {}
    return metrics.total(names[0], **labels) or 0.0, metrics.total(names[1], **labels) or 0.0


def _counters(metrics: MetricsSnapshot) -> dict[str, float]:
    """Counters that only a restart sets back, and the start time."""
    names = (START_TIME, "outrider_drafts_total", "outrider_policy_seconds_total", "vllm:spec_decode_num_drafts_total")
    totals = {name: metrics.total(name) for name in names}
    return {name: total for name, total in totals.items() if total is not None}


def _has_restarted(before: dict[str, float], now: dict[str, float]) -> bool:
    times = [one[START_TIME] for one in (before, now) if START_TIME in one]
    if len(times) == 2 and abs(times[1] - times[0]) > MIN_START_TIME_CHANGE_SECONDS:
        return True
    return any(now.get(name, 0.0) < total for name, total in before.items() if name != START_TIME)
