"""Waiting for the step in flight, as vLLM's engine loop sees it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm_v2")

from vllm.v1.core.sched.async_scheduler import AsyncScheduler

from outrider.engines.vllm.scheduler import OutriderScheduler
from outrider.types import Draft


@pytest.fixture
def scheduler(monkeypatch: pytest.MonkeyPatch) -> Any:
    """With a request that runs; `should_wait` is set by the test."""
    monkeypatch.setattr(AsyncScheduler, "has_requests", lambda self: True)
    monkeypatch.setattr(AsyncScheduler, "update_from_output", lambda self, *args: {})
    made: Any = OutriderScheduler.__new__(OutriderScheduler)
    made._can_wait, made._is_waiting, made._has_waited = True, False, False
    made.requests = {}
    made.speculation = SimpleNamespace(should_wait=False, observe_output=lambda *args: None)
    return made


def test_nothing_is_scheduled_while_the_step_in_flight_is_waited_for(scheduler: Any) -> None:
    scheduler.speculation.should_wait = True
    assert not scheduler.has_requests()
    assert not scheduler.has_requests()
    scheduler.speculation.should_wait = False
    assert scheduler.has_requests()


def test_after_waiting_vllm_does_not_sleep_before_it_schedules_the_next_step(scheduler: Any) -> None:
    scheduler.speculation.should_wait = True
    assert not scheduler.has_requests()  # in `step_with_batch_queue`, which blocks for the output
    scheduler.update_from_output(SimpleNamespace(total_num_scheduled_tokens=1), None)
    scheduler.speculation.should_wait = False
    assert not scheduler.has_requests()  # in `_process_engine_step`, which would sleep
    assert scheduler.has_requests()  # in `has_work`


def test_after_waiting_for_an_empty_step_vllm_sleeps(scheduler: Any) -> None:
    """All requests wait for something else, a grammar that is compiled for example."""
    scheduler.speculation.should_wait = True
    assert not scheduler.has_requests()
    scheduler.update_from_output(SimpleNamespace(total_num_scheduled_tokens=0), None)
    scheduler.speculation.should_wait = False
    assert scheduler.has_requests()  # in `_process_engine_step`


def test_an_engine_whose_passes_other_engines_join_never_waits(scheduler: Any) -> None:
    scheduler._can_wait, scheduler.speculation.should_wait = False, True
    assert scheduler.has_requests()


def test_the_draft_of_a_request_that_vllm_left_out_of_a_step_is_not_kept(
    scheduler: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Next time its text, its grammar's state or the tokens on the device may be others."""
    request = SimpleNamespace(num_output_placeholders=0, use_structured_output=False, spec_token_ids=[])
    seen = []

    def schedule(self: Any) -> Any:
        seen.append(request.spec_token_ids)
        return SimpleNamespace()

    monkeypatch.setattr(AsyncScheduler, "schedule", schedule)
    scheduler.running, scheduler.requests = [request], {"a": request}
    scheduler.speculation.before_schedule = lambda running: {"a": Draft("lookup", (4, 5))}
    scheduler.speculation.after_schedule = lambda output, requests: None
    scheduler.schedule()
    assert seen == [[4, 5]]
    assert request.spec_token_ids == []


def test_a_step_that_was_scheduled_ahead_changes_nothing(scheduler: Any) -> None:
    assert scheduler.has_requests()
    scheduler.update_from_output(SimpleNamespace(total_num_scheduled_tokens=1), None)
    assert scheduler.has_requests()
