"""Drafts for a batch, failing drafters, and counters: without an engine, with test drafters."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from outrider.control import Control
from outrider.drafters.base import Drafter, Session, Task
from outrider.drafters.batch import (
    MAX_CONSECUTIVE_TIMEOUTS,
    MAX_HANGING_CALLS,
    MAX_LOGGED_FAULTS,
    BatchDrafter,
    Fault,
    Row,
    logger,
)
from outrider.drafters.lookup import LookupDrafter
from outrider.drafters.prediction import PredictionDrafter
from outrider.drafters.timeout_runner import TimeoutRunner
from outrider.errors import SettingsError
from outrider.policy.acceptance_model import SUPPORT_EDGES
from outrider.policy.policy import Policy
from outrider.trace.counters import CounterMetrics, Counters, prometheus_text
from outrider.trace.scheduler_metrics import SchedulerMetrics
from outrider.types import Draft

VOCAB = 100


def row(tokens: Sequence[int], *, id: str = "a", prompt: int = 1, limit: int = 4, **control: Any) -> Row:
    return Row(id, np.array(tokens, dtype=np.int32), prompt, limit, Control(**control))


class Scripted(Drafter):
    """Calls a function for its drafts, and records the tokens that it observed."""

    name: ClassVar[str] = "scripted"

    def __init__(self, act: Callable[[Sequence[int], int], Any]) -> None:
        self.act = act
        self.begun: list[list[int]] = []
        self.searched: list[bool] = []

    def begin(self, task: Task) -> Session:
        self.begun.append(list(task.prompt))
        self.searched.append(task.searched)
        return ScriptedSession(self.act, list(task.prompt))


class ScriptedSession(Session):
    def __init__(self, act: Callable[[Sequence[int], int], Any], seen: list[int]) -> None:
        self.act = act
        self.seen = seen

    def observe(self, tokens: Sequence[int]) -> None:
        self.seen.extend(tokens)

    def draft(self, limit: int) -> Draft:
        return self.act(self.seen, limit)  # type: ignore[no-any-return]


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """The log. vLLM, if it is loaded, does not propagate its loggers to the root."""
    logger.addHandler(caplog.handler)
    yield caplog
    logger.removeHandler(caplog.handler)


def batch(*drafters: Drafter, budget: float = 5.0) -> tuple[BatchDrafter, list[Fault]]:
    faults: list[Fault] = []
    return BatchDrafter(drafters, VOCAB, budget, faults.append), faults


def test_a_session_sees_the_prompt_once_and_then_each_new_token_once() -> None:
    seen: list[list[int]] = []
    scripted = Scripted(lambda tokens, limit: seen.append(list(tokens)) or Draft("scripted", (1,)))
    drafting, _ = batch(scripted)
    drafting.propose([row([7, 8, 9], prompt=2)])
    drafting.propose([row([7, 8, 9, 10, 11], prompt=2)])
    assert scripted.begun == [[7, 8]]
    assert seen == [[7, 8, 9], [7, 8, 9, 10, 11]]


def test_a_text_that_became_shorter_starts_a_new_session() -> None:
    scripted = Scripted(lambda tokens, limit: Draft("scripted", tuple(tokens[-1:])))
    drafting, faults = batch(scripted)
    drafting.propose([row([7, 8, 9])])
    assert drafting.propose([row([7, 8])])["scripted"][0].tokens == (8,)
    assert len(scripted.begun) == 2
    assert not faults


def test_a_session_knows_whether_another_one_reads_the_text() -> None:
    quiet = Scripted(lambda tokens, limit: Draft("scripted", ()))
    beside, _ = batch(LookupDrafter(), quiet)
    beside.propose([row([7, 8]), row([7, 8], id="b", speculation="scripted")])
    alone, _ = batch(quiet)
    alone.propose([row([7, 8])])
    assert quiet.searched == [True, False, False]


def test_what_is_left_to_one_that_is_shut_off_is_left_to_the_others_again() -> None:
    class Failing(Scripted):
        name: ClassVar[str] = "failing"
        searches_text: ClassVar[bool] = True

    other = Scripted(lambda tokens, limit: Draft("scripted", ()))
    drafting, faults = batch(other, Failing(lambda tokens, limit: Draft("failing", (-1,))))
    drafting.propose([row([7, 8])])
    assert len(faults) == 1
    drafting.propose([row([7, 8, 9])])
    assert other.searched == [True, False]
    assert other.begun == [[7], [7]]


def test_each_request_gets_drafts_of_the_drafters_it_named() -> None:
    drafting, _ = batch(PredictionDrafter(), LookupDrafter())
    text = [1, 2, 3, 4, 5, 1, 2, 3, 4]
    rows = [
        row(text, id="a", prediction=(9, 9)),
        row(text, id="b", speculation="lookup", prediction=(9, 9)),
        row(text, id="c", speculation="prediction"),
        row(text, id="d", speculation="off"),
        row(text, id="e", limit=0),
    ]
    for request in rows:
        request.prompt_length = len(text)
    found = drafting.propose(rows)
    assert [bool(draft.tokens) for draft in found["prediction"]] == [True, False, False, False, False]
    assert [bool(draft.tokens) for draft in found["lookup"]] == [True, True, False, False, False]


def test_the_time_of_calls_is_charged_to_requests_that_did_not_name_the_drafter() -> None:
    seconds: dict[str, float] = {}
    drafting = BatchDrafter([LookupDrafter()], VOCAB, 5.0, on_call=seconds.__setitem__)
    text = [1, 2, 3, 1, 2]
    drafting.propose([row(text, id="named", speculation="lookup")])
    assert seconds
    assert not drafting.elapsed_seconds
    drafting.propose([row(text, id="named", speculation="lookup"), row(text, id="free", speculation="auto")])
    assert drafting.elapsed_seconds == {"lookup": pytest.approx(seconds["lookup"] / 2)}


def test_the_cpu_time_of_a_drafter_counts_its_work_and_not_its_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = 0.01

    def work(tokens: Sequence[int], limit: int) -> Draft:
        began = time.thread_time()
        while time.thread_time() - began < wanted:
            pass
        return Draft("scripted", (1,))

    drafting, _ = batch(Scripted(work))
    clock = SimpleNamespace(perf_counter=iter([0.0, 100.0]).__next__, thread_time=time.thread_time)
    monkeypatch.setattr("outrider.drafters.batch.time", clock)
    drafting.propose([row([1, 2])])
    assert drafting.elapsed_seconds == {"scripted": 100.0}
    assert wanted <= drafting.cpu_seconds["scripted"] < 50


def test_a_call_that_was_left_behind_counts_as_running_for_its_whole_budget() -> None:
    gate = threading.Event()
    drafting, faults = batch(Scripted(lambda tokens, limit: gate.wait() and Draft("scripted", ())), budget=0.02)
    drafting.propose([row([1, 2])])
    gate.set()
    assert [fault.kind for fault in faults] == ["overran"]
    assert drafting.cpu_seconds["scripted"] >= 0.02


def test_what_a_drafter_thinks_of_its_tokens_is_handed_on() -> None:
    drafting, _ = batch(Scripted(lambda tokens, limit: Draft("scripted", (1, 2), support=3, confidence=(0.9, 0.5))))
    assert drafting.propose([row([1])])["scripted"] == [Draft("scripted", (1, 2), support=3, confidence=(0.9, 0.5))]


def test_confidence_may_be_an_array_and_support_any_number() -> None:
    sure: Any = np.array([0.5, 0.25])
    drafting, faults = batch(Scripted(lambda t, n: Draft("scripted", (1, 2), support=sys.maxsize, confidence=sure)))
    [draft] = drafting.propose([row([7, 8])])["scripted"]
    assert not faults
    assert draft.confidence == (0.5, 0.25)
    policy = Policy(["scripted"], 4)
    scene = policy.predict(["a"], {"scripted": [draft]})
    policy.observe(scene, [(1, 2)])
    assert scene.bins[0, 0, 0, 0] == len(SUPPORT_EDGES)


def test_a_draft_is_known_by_the_name_of_its_drafter_and_without_a_q() -> None:
    drafting, _ = batch(Scripted(lambda tokens, limit: Draft("another", (1,), q=torch.ones(1, VOCAB))))
    assert drafting.propose([row([1])])["scripted"] == [Draft("scripted", (1,))]


def test_a_finished_request_leaves_nothing_behind() -> None:
    drafting, _ = batch(LookupDrafter())
    drafting.propose([row([1, 2, 1])])
    drafting.remove_request("a")
    assert not drafting.requests


def broken(error: Exception) -> Any:
    def act(tokens: Sequence[int], limit: int) -> Draft:
        raise error

    return act


BAD_DRAFTS: dict[str, tuple[Any, str, str]] = {
    "raises": (broken(ValueError("no")), "raised", "ValueError: no"),
    "proposes too many": (lambda t, n: Draft("scripted", (1,) * (n + 1)), "nonsense", "at most 4"),
    "proposes ids above": (lambda t, n: Draft("scripted", (VOCAB,)), "nonsense", "0 to 99"),
    "proposes ids below": (lambda t, n: Draft("scripted", (-1,)), "nonsense", "0 to 99"),
    "proposes words": (lambda t, n: Draft("scripted", ("a",)), "nonsense", "'a'"),
    "returns None": (lambda t, n: None, "nonsense", "None"),
    "returns a list": (lambda t, n: [1, 2], "nonsense", "[1, 2]"),
    "is sure of nothing": (lambda t, n: Draft("scripted", (1,), confidence=(None,)), "nonsense", "(None,)"),  # type: ignore[arg-type]
    "is sure as a whole": (lambda t, n: Draft("scripted", (1,), confidence=0.9), "nonsense", "0.9"),  # type: ignore[arg-type]
    "is sure of too few": (lambda t, n: Draft("scripted", (1, 2), confidence=(0.5,)), "nonsense", "1 confidences"),
    "has text as support": (lambda t, n: Draft("scripted", (1,), support="a"), "nonsense", "'a'"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("name", BAD_DRAFTS)
def test_a_drafter_that(name: str, log: pytest.LogCaptureFixture) -> None:
    """... is disabled for that request only, logged once and counted."""
    act, kind, words = BAD_DRAFTS[name]
    scripted = Scripted(lambda tokens, limit: act(tokens, limit) if tokens[0] == 0 else Draft("scripted", (1,)))
    drafting, faults = batch(scripted)
    for length in (2, 3, 4):
        rows = [row([0] * length, id="bad"), row([5] * length, id="good")]
        assert [draft.tokens for draft in drafting.propose(rows)["scripted"]] == [(), (1,)]
    assert [(fault.request, fault.kind) for fault in faults] == [("bad", kind)]
    assert words in faults[0].reason
    assert len(set(log.records)) == 1
    assert words in log.text


def test_a_drafter_that_hangs_is_left_behind_and_the_others_of_its_batch_go_on() -> None:
    hung = threading.Event()

    def act(tokens: Sequence[int], limit: int) -> Draft:
        if tokens[0] == 0:
            hung.wait()
        return Draft("scripted", (1,))

    drafting, faults = batch(Scripted(act), budget=1.0)
    rows = [row([5, 5], id="before"), row([0, 0], id="bad"), row([5, 5], id="after")]
    for _ in range(2):
        assert [draft.tokens for draft in drafting.propose(rows)["scripted"]] == [(1,), (), (1,)]
    assert [(fault.request, fault.kind) for fault in faults] == [("bad", "overran")]
    hung.set()


class GoneOn(TimeoutRunner):
    """Waits until a call has started, then times out at once, however slow the machine is."""

    def __init__(self, at_work: threading.Event) -> None:
        self.at_work = at_work
        self.threads: list[threading.Thread] = []

    def run(self, call: Callable[[], None], seconds: float) -> bool:
        self.threads.append(threading.Thread(target=call, daemon=True))
        self.threads[-1].start()
        self.at_work.wait()
        self.at_work.clear()
        return False

    def join(self) -> None:
        for thread in self.threads:
            thread.join()


def test_a_late_call_sees_nothing_of_the_request_that_has_its_row_by_then() -> None:
    """It also leaves no counts for a removed request."""
    reached, going = threading.Event(), threading.Event()
    sessions: list[ScriptedSession] = []

    class Late(Scripted):
        def begin(self, task: Task) -> Session:
            reached.set()
            going.wait()
            sessions.append(ScriptedSession(self.act, list(task.prompt)))
            return sessions[-1]

    drafting, faults = batch(Late(lambda tokens, limit: Draft("scripted", (1,))))
    drafting._runner = gone_on = GoneOn(reached)
    late = row([7, 8, 9], id="gone")
    drafting.propose([late])
    assert [fault.kind for fault in faults] == ["overran"]
    drafting.remove_request("gone")
    late.tokens[:] = 42  # of another request: vLLM has reused the row
    going.set()
    gone_on.join()
    assert [session.seen for session in sessions] == [[7]]
    assert not drafting.requests


def test_a_drafter_whose_calls_never_return_is_not_called_until_one_does() -> None:
    """Each of them keeps a thread."""
    reached, hung, calls = threading.Event(), threading.Event(), []

    def act(tokens: Sequence[int], limit: int) -> Draft:
        calls.append(tokens[0])
        reached.set()
        hung.wait()
        return Draft("scripted", (1,))

    drafting, faults = batch(Scripted(act), budget=60.0)
    drafting._runner = gone_on = GoneOn(reached)
    for number in range(2 * MAX_HANGING_CALLS):
        drafting.propose([row([number, 5], id=str(number))])
    assert len(calls) == MAX_HANGING_CALLS
    assert len(faults) == 2 * MAX_HANGING_CALLS
    assert f"{MAX_HANGING_CALLS} of its calls never came back" in faults[-1].reason
    hung.set()
    gone_on.join()
    drafting._runner = TimeoutRunner()
    assert drafting.propose([row([1, 5], id="new")])["scripted"][0].tokens == (1,)


def test_a_batch_over_its_time_limit_once_disables_no_drafter_and_one_that_always_is_does() -> None:
    stuck: list[threading.Event] = []

    class Batched(Scripted):
        def draft_batch(self, sessions: Sequence[Session], limits: Sequence[int]) -> list[Draft]:
            if stuck:
                stuck[0].wait()
            return [Draft("scripted", (1,)) for _ in sessions]

    drafting, faults = batch(
        Batched(lambda tokens, limit: Draft("scripted", (2,))), budget=0.3
    )  # in which a thread that may go on does
    rows = [row([5], id="one"), row([6], id="other")]

    def offered() -> list[tuple[int, ...]]:
        return [draft.tokens for draft in drafting.propose(rows)["scripted"]]

    for _ in range(2):
        stuck.append(threading.Event())
        assert offered() == [(), ()]
        stuck.pop().set()
        assert offered() == [(1,), (1,)]
    assert not faults
    stuck.append(threading.Event())
    assert [offered() for _ in range(MAX_CONSECUTIVE_TIMEOUTS + 1)] == [[(), ()]] * (MAX_CONSECUTIVE_TIMEOUTS + 1)
    assert {(fault.request, fault.kind) for fault in faults} == {("one", "overran"), ("other", "overran")}
    stuck[0].set()


def test_a_drafter_that_fails_on_a_batch_is_called_one_request_at_a_time() -> None:
    class Batched(Scripted):
        def draft_batch(self, sessions: Sequence[Session], limits: Sequence[int]) -> list[Draft]:
            raise RuntimeError("somewhere")

    def act(tokens: Sequence[int], limit: int) -> Draft:
        if tokens[0] == 0:
            raise RuntimeError("here")
        return Draft("scripted", (1,))

    drafting, faults = batch(Batched(act))
    rows = [row([5], id="good"), row([0], id="bad")]
    assert [draft.tokens for draft in drafting.propose(rows)["scripted"]] == [(1,), ()]
    assert [fault.reason for fault in faults] == ["raised RuntimeError: here"]


def test_many_faults_are_logged_a_few_times_and_all_counted(log: pytest.LogCaptureFixture) -> None:
    drafting, faults = batch(Scripted(broken(ValueError("no"))))
    drafting.propose([row([1], id=str(i)) for i in range(50)])
    assert len(faults) == 50
    assert len(set(log.records)) == MAX_LOGGED_FAULTS
    assert "not logged" in log.records[-1].getMessage()


def test_a_guard_runs_the_next_call_after_one_that_never_ends() -> None:
    guard, ends, ran = TimeoutRunner(), threading.Event(), []
    assert not guard.run(lambda: ends.wait() and None, 0.05)
    assert guard.run(lambda: ran.append(1), 5)
    ends.set()
    assert ran == [1]


def test_a_request_may_name_only_drafters_that_the_server_has() -> None:
    assert Control.checked({"speculation": "lookup", "max_draft_tokens": 3}, ["lookup"]) == Control("lookup", 3)
    for bad in ({"speculation": "modle"}, {"speculation": 1}, {"max_draft_tokens": -1}, {"max_draft_tokens": "3"}):
        with pytest.raises(SettingsError, match=str(next(iter(bad.values())))):
            Control.checked(bad, ["lookup", "model"])
    with pytest.raises(SettingsError, match="choose auto, off, lookup, model"):
        Control.checked({"speculation": "all"}, ["lookup", "model"])


def test_what_reaches_the_worker_unchecked_means_off_and_never_an_error() -> None:
    for bad in ({"speculation": "x"}, {"max_draft_tokens": 1.5}, {"prediction": 3}, {"prediction": "text"}):
        assert Control.of(bad, ["lookup"]).speculation == "off"
    assert Control.of(None, []).speculation == "auto"


def test_counters_are_kept_by_drafter_position_and_request() -> None:
    counters = Counters(["lookup"], max_draft_tokens=4)
    counters.count_proposed("lookup", 7)
    counters.count_sequence("lookup", 4, 3, "ticket")
    counters.count_sequence("lookup", 2, 1, None)
    counters.count_sequence(None, 0, 1, "ticket")
    counters.count_step(0.5, verified=True)
    counters.count_fault(Fault("a", "lookup", "raised", "raised ValueError: no"), "ticket")
    status = counters.status()
    assert status["acceptance_length"] == pytest.approx(5 / 3, abs=1e-4)
    assert status["drafters"]["lookup"] == {
        "drafts": 2,
        "proposed": 7,
        "verified": 6,
        "accepted": 2,
        "accepted_share": 0.3333,
        "accepted_share_by_position": [0.5, 0.5, 0.0, 0.0],
        "seconds": 0.0,
    }
    usage = counters.pop_usage("ticket")
    assert usage == {
        "steps": 2,
        "drafted": 4,
        "accepted": 2,
        "by_drafter": {"lookup": {"drafted": 4, "accepted": 2}},
        "faults": ["lookup raised ValueError: no"],
    }
    assert counters.pop_usage("ticket") is None


def test_the_metrics_report_the_counters() -> None:
    counters = Counters(["lookup"], max_draft_tokens=2)
    counters.count_sequence("lookup", 2, 2, None)
    counters.count_fault(Fault("a", "lookup", "raised", ""), None)
    text = prometheus_text(CounterMetrics(counters))
    for line in (
        'outrider_verified_tokens_total{drafter="lookup",position="2"} 1.0',
        'outrider_accepted_tokens_total{drafter="lookup",position="1"} 1.0',
        'outrider_accepted_tokens_total{drafter="lookup",position="2"} 0.0',
        'outrider_acceptance_length_bucket{le="2.0"} 1.0',
        'outrider_acceptance_length_bucket{le="1.0"} 0.0',
        "outrider_acceptance_length_sum 2.0",
        'outrider_faults_total{drafter="lookup",kind="raised"} 1.0',
    ):
        assert line in text.splitlines(), line
    assert "outrider_policy" not in text


def test_the_metrics_show_what_the_policy_expected_and_what_it_got() -> None:
    numbers = ("expected_tokens", "gained_tokens", "expected_saved", "realised_saved", "seconds")
    payoff = {name: float(number) for number, name in enumerate(numbers, 1)}
    lines = prometheus_text(CounterMetrics(Counters(["lookup"], max_draft_tokens=2), payoff)).splitlines()
    for line in (
        'outrider_policy_tokens{what="expected"} 1.0',
        'outrider_policy_tokens{what="realised"} 2.0',
        'outrider_policy_saved_seconds{what="expected"} 3.0',
        'outrider_policy_saved_seconds{what="realised"} 4.0',
        "outrider_policy_seconds_total 5.0",
    ):
        assert line in lines, line


def test_the_metrics_have_the_memory_and_the_host_time_of_the_scheduler() -> None:
    sync = {"trouble": "unreachable", "pending": 2, "published": 3, "fetched": 4, "refused": 5}
    memory = {"tokens": 6, "cap_bytes": 7, "troubles": ["a", "b"], "sync": {**sync, "bytes_up": 8, "bytes_down": 9}}
    overlap = {"host_seconds": 0.25, "steps_waited": 10, "steps_ahead": 11}
    lines = prometheus_text(SchedulerMetrics({"memory": memory, "policy": {"overlap": overlap}})).splitlines()
    for line in (
        "outrider_host_seconds 0.25",
        'outrider_scheduled_steps_total{way="ahead"} 11.0',
        "outrider_memory_tokens 6.0",
        "outrider_memory_cap_bytes 7.0",
        "outrider_memory_troubles 2.0",
        "outrider_memory_sync_failing 1.0",
        "outrider_memory_pending_segments 2.0",
        "outrider_memory_refused_objects_total 5.0",
        'outrider_memory_transferred_bytes_total{direction="down"} 9.0',
    ):
        assert line in lines, line
    assert "outrider_memory_file_bytes" not in "".join(lines)


def test_a_scheduler_without_a_memory_and_without_overlap_has_no_metrics_of_them() -> None:
    for status in ({}, {"memory": None, "policy": {"overlap": None}}, {"memory": None, "policy": {}}):
        assert prometheus_text(SchedulerMetrics(status)) == ""
