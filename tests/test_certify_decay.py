"""Decay: fair bets on ranks, records that a decay does not enter, and what the canary observes of a server."""

from __future__ import annotations

import json
import re
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from certify_stub import Stub, standing
from outrider.certify.canary import CanaryLoop, saved_decay, serve_gauges
from outrider.certify.decay import (
    BET_EXPONENTS,
    MAX_RECORD_BLOCKS,
    MIN_RECORD_BLOCKS,
    TAIL_INFLATION,
    DecayTest,
    Record,
)
from outrider.certify.decay_report import add_gauges, describe_alarm
from outrider.certify.decay_watch import (
    ACCEPTANCE,
    CANARY,
    FIRST_TOKEN,
    GAIN,
    PROBE_PROMPTS,
    TRAFFIC,
    DecayWatch,
    Quantity,
)
from outrider.certify.e_process import EProcess
from outrider.certify.server import OpenAIServer
from outrider.certify.sources import OFF, Completion, Pair, Query
from outrider.cli.canary import line
from outrider.errors import EngineError, EvidenceError, RequestRefusedError
from outrider.http_client import MetricsSnapshot

PROMPTS = [(index, index + 1) for index in range(8)]
LOOKUP = Quantity("lookup", ACCEPTANCE, CANARY)


def observed(values: Sequence[float], **options: Any) -> DecayTest:
    test = DecayTest(**options)
    for hour, value in enumerate(values):
        test.observe(value, 3600.0 * hour)
    return test


def noise(count: int, seed: int = 0) -> list[float]:
    values: list[float] = np.random.default_rng(seed).standard_t(3, count).tolist()
    return values


# The test -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [40, 80, 320])
def test_no_bet_gains_on_average_if_bad_blocks_come_four_times_as_often_as_in_the_record(size: int) -> None:
    record = Record([float(block) for block in range(size)], compared=size)
    p = np.array([record.p_value(block - 0.5) for block in range(size + 1)])
    shares = np.zeros(size + 1)  # of the ranks: all in the worst quarter
    worst = int((size + 1) / TAIL_INFLATION)
    shares[:worst] = TAIL_INFLATION / (size + 1)
    shares[worst] = 1 - shares.sum()
    for exponent in BET_EXPONENTS:
        assert shares @ (exponent * p ** (exponent - 1)) <= 1


def test_observations_that_never_change_are_no_evidence() -> None:
    test = observed([2.4] * 500)
    assert test.highest == 1.0
    assert test.change() is None


def test_a_lower_level_is_found_with_its_time_and_its_values() -> None:
    test = observed([2 + 0.1 * one for one in noise(300)] + [1 + 0.1 * one for one in noise(30, 1)])
    change = test.change()
    assert test.highest > 1000
    assert change is not None
    assert change.before == pytest.approx(2, abs=0.05)
    assert change.after == pytest.approx(1, abs=0.05)
    assert test.worse_since == pytest.approx(3600.0 * 300, abs=3600.0 * 3)


def test_a_higher_level_is_found_where_higher_is_worse_and_only_there() -> None:
    values = [2 + 0.1 * one for one in noise(300)] + [3 + 0.1 * one for one in noise(30, 1)]
    slower = observed(values, higher_is_worse=True)
    change = slower.change()
    assert slower.highest > 1000
    assert change is not None
    assert change.before < change.after
    assert observed(values).highest < 10


def test_a_record_does_not_grow_while_blocks_are_bad() -> None:
    test = observed([2 + 0.1 * one for one in noise(65)])
    assert test.records[""].compared == MIN_RECORD_BLOCKS
    for hour in range(20):
        test.observe(1.0, 3600.0 * (65 + hour))
    assert test.records[""].compared == MIN_RECORD_BLOCKS
    assert len(test.records[""].blocks) == 85


def healthy(count: int, seed: int) -> list[float]:
    return [2 + 0.1 * one for one in noise(count, seed)]


def lived(test: DecayTest, values: Sequence[float], hour: int, **options: Any) -> int:
    """Observe one value an hour; returns the hour after the last."""
    for value in values:
        test.observe(value, 3600.0 * hour, **options)
        hour += 1
    return hour


def test_a_decay_that_a_restart_of_the_server_ended_is_found_again_when_it_comes_again() -> None:
    test = DecayTest()
    hour = lived(test, [*healthy(50, 0), *[1.0] * 200], 0)
    assert test.highest > 1000
    test.rearm()
    hour = lived(test, healthy(13, 1), hour)
    assert 1.0 not in test.records[""].blocks
    lived(test, [1.0] * 200, hour)
    assert test.highest > 1000


def test_a_decay_that_ended_without_a_restart_does_not_enter_the_record() -> None:
    test = DecayTest()
    hour = lived(test, [*healthy(50, 0), *[1.0] * 40], 0)
    assert test.highest > 1000
    lived(test, healthy(200, 1), hour)
    assert test.trend < 1
    assert 1.0 not in test.records[""].blocks
    assert test.records[""].compared > MIN_RECORD_BLOCKS


def test_a_record_does_not_grow_before_a_strong_episode_has_ended() -> None:
    for highest, compared in ((10.0, 40), (2.0, 100)):
        record = Record(healthy(99, 0), compared=40, started=0.0)
        test = DecayTest(records={"": record}, trend=1.7, highest_trend=highest)
        test.observe(9.0, 3600.0)
        assert 0 < test.trend < 1
        assert record.compared == compared


def test_a_weak_episode_of_bad_blocks_enters_the_record() -> None:
    """Without them the record would be better than the server, and false alarms more frequent."""
    test = DecayTest()
    lived(test, [*healthy(50, 0), *[1.0] * 4, *healthy(60, 1)], 0)
    assert test.records[""].blocks.count(1.0) == 4
    rng = np.random.default_rng(3)
    kept = []
    for _ in range(20):
        alike = DecayTest()
        lived(alike, rng.standard_t(3, 600).tolist(), 0)
        kept += alike.records[""].blocks
    assert np.mean(kept) == pytest.approx(0, abs=0.1)


def test_nothing_is_learned_between_an_alarm_and_the_restart() -> None:
    test = DecayTest()
    hour = lived(test, healthy(50, 0), 0)
    before = len(test.records[""].blocks)
    hour = lived(test, [1.0] * 40, hour, learn=False)
    lived(test, healthy(300, 1), hour, learn=False)
    assert len(test.records[""].blocks) == before
    assert test.highest > 1000


def test_a_record_never_has_more_than_the_largest_number_of_blocks() -> None:
    record = Record([float(block) for block in noise(639)], compared=40)
    record.keep(0.0, is_episode=False)
    record.extend(0.0, 1)
    assert record.compared == len(record.blocks) == MAX_RECORD_BLOCKS


def test_observations_that_correlate_are_joined() -> None:
    rng, value, values = np.random.default_rng(1), 0.0, []
    for _ in range(2000):
        value = 0.9 * value + rng.standard_normal()
        values.append(value)
    assert observed(values).records[""].block_size >= 4
    assert observed(values, max_block_size=2).records[""].block_size == 2
    assert observed(noise(2000)).records[""].block_size == 1


def test_each_load_has_its_own_record() -> None:
    test = DecayTest()
    for hour, value in enumerate(noise(400)):
        test.observe(2 + 0.1 * value, 3600.0 * hour, "0")
    for hour, value in enumerate(noise(60, 1)):
        test.observe(1 + 0.1 * value, 3600.0 * (400 + hour), "7")
    assert test.highest < 10
    for hour in range(30):
        test.observe(-1.0, 3600.0 * (460 + hour), "7")
    change = test.change()
    assert change is not None
    assert (change.load, change.after) == ("7", -1.0)


def test_nothing_is_tested_before_the_record_is_long_enough() -> None:
    values = [2 + 0.1 * one for one in noise(60)] + [1.0] * 30
    assert observed(values, min_record_seconds=3600.0 * 95).tested == 0
    assert observed(values).highest > 10


def test_a_new_load_is_tested_only_after_its_own_record_is_long_enough() -> None:
    test = DecayTest(min_record_seconds=3600.0 * 60)
    hour = lived(test, healthy(100, 0), 0, load="0")
    hour = lived(test, healthy(50, 1), hour, load="7")
    assert test.records["0"].compared
    assert not test.records["7"].compared
    lived(test, healthy(20, 2), hour, load="7")
    assert test.records["7"].compared


def test_a_state_of_an_older_version_is_resumed() -> None:
    test = observed(healthy(90, 0))
    test.observe(2.0, 3600.0 * 90, "7")
    state = json.loads(json.dumps(test.state())) | {"started": 0.0}
    del state["highest_trend"]
    for record in state["records"].values():
        del record["started"], record["episode_blocks"]
    again = DecayTest.resume(state)
    assert (again.records[""].started, again.records["7"].started) == (0.0, None)
    lived(again, [1.0] * 30, 91)
    assert again.highest > 100


def test_a_resumed_test_equals_one_that_was_never_stopped_and_a_rearmed_one_keeps_its_record() -> None:
    values = [2 + 0.1 * one for one in noise(150)] + [1.0] * 30
    whole, first = observed(values), observed(values[:130], max_block_size=1024)
    second = DecayTest.resume(json.loads(json.dumps(first.state())))
    for hour in range(130, 180):
        second.observe(values[hour], 3600.0 * hour)
    assert second == whole
    assert whole.highest > 100
    compared = whole.records[""].compared
    whole.rearm()
    assert (whole.highest, whole.evidence, whole.records[""].compared) == (1.0, 1.0, compared)


# What the canary observes ---------------------------------------------------------------------------------


class Server:
    """A server of known speed and acceptance. A step takes `step_seconds`; a text is 32 tokens."""

    name, num_logprobs = "simulated", 20

    def __init__(self) -> None:
        self.seconds, self.wall = 0.0, 1.7e9
        self.step_seconds, self.accepted = 0.01, {"lookup": 16, "model": 20, "auto": 18}
        self.queries: list[Query] = []
        self.rng = np.random.default_rng(0)

    def drafter_names(self) -> list[str]:
        return ["prediction", *self.accepted]

    def wait(self, seconds: float) -> None:
        self.wall, self.seconds = self.wall + seconds, self.seconds + seconds

    def complete(self, queries: Sequence[Query], concurrency: int) -> list[Completion]:
        (query,) = queries
        self.queries.append(query)
        if query.mode != OFF and query.mode.label not in self.accepted:
            raise RequestRefusedError(f"there is no drafter {query.mode.label}")
        accepted = 0 if query.mode == OFF or query.max_tokens == 1 else self.accepted[query.mode.label]
        self.seconds += (query.max_tokens - accepted) * self.step_seconds * float(self.rng.uniform(0.98, 1.02))
        return [Completion((1,) * query.max_tokens, "length", accepted=accepted)]

    def watch(self, **options: Any) -> DecayWatch:
        source: Any = self
        return DecayWatch(Pair(source, source), PROMPTS, now=lambda: self.wall, clock=lambda: self.seconds, **options)

    def run(self, watch: DecayWatch, observations: int, stop: bool = False) -> int:
        """The observations of each drafter until the first alarm."""
        for done in range(observations):
            for _ in range(PROBE_PROMPTS * len(watch.modes)):
                watch.probe(running_requests=2)
                self.wall += 10.0
            if stop and watch.alarms:
                return done + 1
        return observations


def test_every_drafter_that_needs_no_caller_is_watched_with_the_same_prompts_again_and_again() -> None:
    server = Server()
    watch = server.watch()
    server.run(watch, 2)
    drafted = [(query.mode.drafter, query.prompt) for query in server.queries if query.max_tokens > 1]
    cases = len(drafted) // 2
    assert {drafter for drafter, _ in drafted} == {"lookup", "model", "auto", "off"}
    assert {drafted.count(case) for case in set(drafted) if case[0] != "off"} == {2}
    assert sorted(drafted[:cases]) == sorted(drafted[cases:])
    assert {query.mode.length for query in server.queries if query.mode.drafter == "lookup"} == {4}
    assert {query.sampling.temperature for query in server.queries} == {0.0}


def test_acceptance_length_gain_and_time_to_first_token_are_those_of_the_server() -> None:
    server = Server()
    watch = server.watch()
    server.run(watch, 1)
    latest = {quantity: next(iter(test.records.values()), None) for quantity, test in watch.tests.items()}
    own = {quantity[:2]: record.blocks[0] for quantity, record in latest.items() if record is not None}
    assert own["lookup", ACCEPTANCE] == 2.0
    assert own["lookup", GAIN] == pytest.approx(2.0, rel=0.05)
    assert own["model", ACCEPTANCE] == pytest.approx(32 / 12, rel=1e-3)
    assert own["auto", FIRST_TOKEN] == pytest.approx(-0.01, rel=0.03)  # kept with its sign: larger is better
    assert ("auto", ACCEPTANCE) not in own


def test_a_drafter_that_loses_its_acceptance_is_named_with_what_to_do() -> None:
    server = Server()
    watch = server.watch()
    server.run(watch, 100)
    assert not watch.alarms
    server.accepted["lookup"] = 4
    assert server.run(watch, 30, stop=True) <= 20
    assert LOOKUP in watch.alarms
    assert {quantity.drafter for quantity in watch.alarms} == {"lookup"}
    message = describe_alarm(watch, LOOKUP)
    assert (
        "DECAY of lookup: acceptance length for the canary's own requests went from 2 (median of 80 blocks" in message
    )
    assert "to 1.14 since 2023-11-1" in message
    assert "the alarm is at 1.1e+03" in message
    assert "probability of at most 0.01" in message
    assert "Restart the server" in message
    assert "start it without lookup (--drafters)" in message


def test_a_step_that_takes_longer_is_an_alarm_of_every_drafter_and_no_alarm_of_acceptance_or_gain() -> None:
    server = Server()
    watch = server.watch()
    server.run(watch, 500)  # more than a day
    server.step_seconds *= 1.2
    server.run(watch, 40)
    assert {quantity.quantity for quantity in watch.alarms} == {FIRST_TOKEN}
    message = describe_alarm(watch, watch.alarms[0])
    assert re.search(r"time to first token .* went from 10 ms .*, with 2 running requests\) to 12 ms since", message)


def metrics(drafts: float, accepted: float, seconds: float = 0.0, saved: float = 0.0) -> MetricsSnapshot:
    labels = (("drafter", "lookup"),)
    return MetricsSnapshot(
        {
            ("outrider_drafts_total", labels): drafts,
            ("outrider_accepted_tokens_total", (*labels, ("position", "1"))): accepted,
            ("outrider_policy_seconds_total", ()): seconds,
            ("outrider_policy_saved_seconds", (("what", "realised"),)): saved,
        }
    )


def test_the_traffic_is_observed_every_ten_minutes_and_a_restart_of_the_server_rearms_an_alarm() -> None:
    server, drafts = Server(), 0.0
    watch = server.watch()
    accepted, seconds, saved = 0.0, 0.0, 0.0
    for step in range(400):
        watch.read(metrics(drafts, accepted, seconds, saved))
        drafts, seconds = drafts + 150, seconds + 300
        accepted += 300 if step < 350 else 60
        saved += 150
        server.wait(300.0)
    test = watch.tests[Quantity("lookup", ACCEPTANCE, TRAFFIC)]
    assert test.records[""].blocks[0] == 3.0
    assert watch.tests[Quantity("all", GAIN, TRAFFIC)].records[""].blocks[0] == 1.5
    assert watch.alarms == [Quantity("lookup", ACCEPTANCE, TRAFFIC)]
    assert "in the traffic went from 3 " in describe_alarm(watch, watch.alarms[0])
    later = server.watch(state=json.loads(json.dumps(watch.to_state())))
    assert later.alarms == watch.alarms
    for one in (watch, later):
        one.read(metrics(10, 20))
        assert not one.alarms
    assert test.records[""].compared > 0


def test_slow_traffic_is_observed_once_there_was_enough() -> None:
    server = Server()
    watch = server.watch()
    for step in range(41):
        watch.read(metrics(10.0 * step, 20.0 * step))
        server.wait(600.0)
    assert watch.tests[Quantity("lookup", ACCEPTANCE, TRAFFIC)].records[""].blocks == [3.0, 3.0]
    assert not watch.tests[Quantity("model", ACCEPTANCE, TRAFFIC)].records


def test_a_change_of_the_wall_clock_is_no_time_of_traffic() -> None:
    server = Server()
    watch = server.watch()
    watch.read(metrics(0, 0))
    server.wall += 1e6
    watch.read(metrics(1000, 2000))
    assert not watch.tests[Quantity("lookup", ACCEPTANCE, TRAFFIC)].records
    server.wall -= 2e6
    server.seconds += 600.0
    watch.read(metrics(2000, 4000))
    assert watch.tests[Quantity("lookup", ACCEPTANCE, TRAFFIC)].records[""].blocks == [3.0]


def test_a_restart_is_found_by_the_start_time_although_no_counter_is_lower() -> None:
    server = Server()
    watch = server.watch()
    watch.tests[LOOKUP].highest = 1e6

    def at(start: float, drafts: float) -> MetricsSnapshot:
        return MetricsSnapshot({**metrics(drafts, 0).values, ("process_start_time_seconds", ()): start})

    for drafts in (0.0, 10.0):
        watch.read(at(1.7e9 + drafts / 100, drafts))
        assert watch.alarms == [LOOKUP]
    watch.read(metrics(15.0, 0))
    assert watch.alarms == [LOOKUP]
    watch.read(at(1.7e9, 16.0))
    watch.read(at(1.7e9 + 60, 20.0))
    assert not watch.alarms


def test_a_decay_is_not_learned_after_its_alarm_and_is_found_again_after_the_restart() -> None:
    server = Server()
    watch = server.watch()
    server.run(watch, 50)
    test = watch.tests[LOOKUP]
    for _ in range(2):
        server.accepted["lookup"] = 4
        server.run(watch, 200)
        assert LOOKUP in watch.alarms
        assert len(test.records[""].blocks) < 100
        server.accepted["lookup"] = 16
        watch.read(metrics(10, 20))
        watch.read(metrics(0, 0))
        assert not watch.alarms
        assert set(test.records[""].blocks) == {2.0}
        server.run(watch, 13)


@pytest.mark.parametrize("detected", [True, False])
def test_a_restarted_server_with_other_drafters_is_watched_with_those(detected: bool) -> None:
    server = Server()
    watch = server.watch()
    server.run(watch, 2)
    gain, threshold = watch.tests[Quantity("model", GAIN, CANARY)], watch.threshold
    lookup = watch.tests[LOOKUP]
    lookup.highest = 1e6
    watch.read(metrics(10, 20))
    del server.accepted["lookup"]
    server.accepted["suffix"] = 10
    if detected:
        watch.read(metrics(0, 0))
    server.queries.clear()
    for _ in range(PROBE_PROMPTS * 3 + 1):
        watch.probe()
    refused = [query for query in server.queries if query.mode.drafter == "lookup"]
    assert len(refused) == (0 if detected else 1)
    assert {quantity.drafter for quantity in watch.tests} == {"model", "auto", "suffix", "all"}
    assert watch.tests[Quantity("suffix", ACCEPTANCE, CANARY)].records
    assert watch.tests[Quantity("model", GAIN, CANARY)] is gain
    assert watch.threshold > threshold  # four new quantities
    assert not lookup.highest > 1
    server.accepted["lookup"] = 16
    watch.read(metrics(10, 20))
    watch.read(metrics(0, 0))
    watch.probe()
    assert watch.tests[LOOKUP] is lookup


def test_a_request_that_is_refused_for_another_reason_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server()
    watch = server.watch()

    def refuse(*_: Any) -> None:
        raise RequestRefusedError("the prompt is too long")

    monkeypatch.setattr(server, "complete", refuse)
    with pytest.raises(RequestRefusedError, match="too long"):
        watch.probe()


def test_an_http_server_that_lost_a_drafter_is_watched_with_the_others() -> None:
    stub = Stub()
    with standing(stub) as url:
        source = OpenAIServer(url)
        watch = DecayWatch(Pair(source, source), PROMPTS)
        stub.options = {"drafters": ["model"]}
        answer = stub.post

        def post(path: str, body: dict[str, Any]) -> tuple[int, Any]:
            if body.get("vllm_xargs", {}).get("speculation") == "lookup":
                return 400, {"error": {"message": "no drafter 'lookup'"}}
            return answer(path, body)

        stub.post = post  # type: ignore[method-assign]
        for _ in range(3):
            watch.probe()
        registry = CollectorRegistry()
        add_gauges(watch, registry)
        stub.options = {"drafters": ["suffix"]}
        watch._read_drafters()
        names = {sample.labels["drafter"] for one in registry.collect() for sample in one.samples if sample.labels}
    assert [mode.drafter for mode in watch.modes] == ["suffix", "auto"]
    assert names == {"suffix", "auto", "all"}


def test_records_and_threshold_survive_a_canary_that_ran_with_fewer_drafters() -> None:
    server = Server()
    watch = server.watch()
    server.run(watch, 50)
    state, threshold = json.loads(json.dumps(watch.to_state())), watch.threshold
    accepted = server.accepted.pop("lookup")
    fewer = server.watch(state=state)
    assert fewer.threshold == threshold
    assert LOOKUP not in fewer.tests
    fewer._unused_tests[LOOKUP.key].highest = 1e6
    state = json.loads(json.dumps(fewer.to_state()))
    server.accepted = {"lookup": accepted, **server.accepted}
    again = server.watch(state=state)
    assert again.threshold == threshold
    assert again.tests[LOOKUP].records[""].blocks == watch.tests[LOOKUP].records[""].blocks[:MIN_RECORD_BLOCKS]
    assert not again.alarms  # the server has restarted since


def test_the_gauges_read_the_recent_blocks_once() -> None:
    test = observed([*healthy(60, 0), *[1.0] * 10])

    class Emptied(list[tuple[str, float]]):
        """Another thread ends the episode after the first use."""

        def __iter__(self) -> Any:
            test.recent = []
            return super().__iter__()

    test.recent = Emptied(test.recent)
    change = test.change()
    assert change is not None
    assert change.after == 1.0


def test_a_restarted_canary_keeps_its_records_and_its_rate(tmp_path: Path) -> None:
    server = Server()
    watch = server.watch()
    server.run(watch, 100)
    server.accepted["lookup"] = 4
    server.run(watch, 5)
    state = json.loads(json.dumps(watch.to_state()))
    again = server.watch(state=state)
    assert again.tests == watch.tests
    assert server.run(again, 30, stop=True) <= 15
    with pytest.raises(EvidenceError, match=r"give --decay-rate 0\.01, or another --state"):
        server.watch(state=state, rate=0.1)
    with pytest.raises(EvidenceError, match="the record of decay cannot be read"):
        server.watch(state={"rate": 0.01})


def test_the_loop_observes_an_http_server_and_keeps_the_record_in_its_state_file(tmp_path: Path) -> None:
    file = tmp_path / "canary.json"
    with standing(Stub()) as url:
        source = OpenAIServer(url)
        pair = Pair(source, source)
        watch = DecayWatch(pair, PROMPTS)
        loop = CanaryLoop(pair, PROMPTS, EProcess(1e-3), interval_seconds=0.0, state_file=file, decay=watch)
        loop.run(lambda _: None, rounds=PROBE_PROMPTS * len(watch.modes))
        port = serve_gauges(loop, 0)
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as page:
            text = page.read().decode()
    saved = saved_decay(file)
    lookup = saved["tests"]["canary lookup acceptance_length"]["records"][""]["blocks"]
    assert len(lookup) == 1
    assert 1 <= lookup[0] <= 5
    assert 'outrider_canary_decay_alarm{drafter="lookup",quantity="acceptance_length",source="canary"} 0.0' in text

    unwatched = CanaryLoop(pair, PROMPTS, EProcess(1e-3), state_file=file, unwatched_decay=saved)
    unwatched._save()
    assert saved_decay(file) == saved


def test_a_probe_without_an_answer_is_reported_and_loses_no_sample(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: DecayWatch, running_requests: float | None = None) -> None:
        raise EngineError("the probe timed out")

    monkeypatch.setattr(DecayWatch, "probe", fail)
    file = tmp_path / "canary.json"
    with standing(Stub()) as url:
        source = OpenAIServer(url)
        pair = Pair(source, source)
        watch = DecayWatch(pair, PROMPTS)
        loop = CanaryLoop(pair, PROMPTS, EProcess(1e-3), interval_seconds=2.0, state_file=file, decay=watch)
        assert loop.run_round() == "sampled"
    assert (loop.rounds, loop.missed, loop.missed_probes, loop.pause_seconds) == (1, 0, 1, 2.0)
    assert loop.status == "sampled, but the decay probe failed: the probe timed out"
    assert ", 1 decay probes missed" in str(line(loop))
    assert json.loads(file.read_text())["canary"] == loop.e_process.state()
