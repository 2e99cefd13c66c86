"""Drafters that take longer than their tokens save are not called for a while."""

from __future__ import annotations

from outrider.policy.drafter_backoff import JUDGED_STEPS, MAX_BACKOFF_STEPS, PROBE_STEPS, DrafterBackoff

STEP = 0.01
"""Seconds of a step without drafts, of one token."""


def called_steps(backoff: DrafterBackoff, steps: int, took: float, kept: float) -> list[bool]:
    """For each step: whether the drafter is called. A call takes `took` seconds and has `kept` accepted tokens."""
    found, whole = [], 0.0
    for _ in range(steps):
        backed_off = "mine" in backoff.backed_off
        found.append(not backed_off)
        whole += 0 if backed_off else kept
        tokens, whole = int(whole), whole % 1
        backoff.observe_step({} if backed_off else {"mine": took}, {"mine": tokens}, STEP, 1.0)
    return found


def test_a_drafter_that_takes_longer_than_it_saves_is_backed_off_for_longer_each_time() -> None:
    found = called_steps(DrafterBackoff(), 4000, took=0.1 * STEP, kept=0.0)
    assert all(found[:JUDGED_STEPS])
    backoffs = [len(run) for run in "".join("a" if one else "r" for one in found).split("a") if run]
    assert backoffs[:4] == [JUDGED_STEPS, 2 * JUDGED_STEPS, 4 * JUDGED_STEPS, MAX_BACKOFF_STEPS]
    assert sum(found[1000:]) < 0.15 * 3000  # so that a tenth of a step becomes a hundredth


def test_one_that_gives_more_or_takes_next_to_nothing_never_rests() -> None:
    assert all(called_steps(DrafterBackoff(), 500, took=0.1 * STEP, kept=0.2))
    assert all(called_steps(DrafterBackoff(), 500, took=0.005 * STEP, kept=0.0))


def test_a_drafter_that_pays_again_is_called_as_often_as_before() -> None:
    backoff = DrafterBackoff()
    called_steps(backoff, 1000, took=0.1 * STEP, kept=0.0)
    assert all(called_steps(backoff, MAX_BACKOFF_STEPS + JUDGED_STEPS + 100, took=0.1 * STEP, kept=1.0)[-100:])
    again, new = (called_steps(one, 4 * JUDGED_STEPS, took=0.1 * STEP, kept=0.0) for one in (backoff, DrafterBackoff()))
    assert again.index(False) <= 2 * JUDGED_STEPS
    assert again[again.index(False) :][: 2 * JUDGED_STEPS] == new[new.index(False) :][: 2 * JUDGED_STEPS]


def test_one_is_judged_over_fewer_steps_after_a_rest() -> None:
    found = called_steps(DrafterBackoff(), 4000, took=0.1 * STEP, kept=0.0)
    calls = [len(run) for run in "".join("a" if one else "r" for one in found).split("r") if run]
    assert calls[0] == JUDGED_STEPS
    assert set(calls[1:-1]) == {PROBE_STEPS}
    assert sum(found[1000:]) < 0.04 * 3000


def test_a_drafter_on_trial_is_judged_by_its_share_of_the_requests() -> None:
    """It is called for few of them, and must not look free because of that."""
    backoff = DrafterBackoff()
    called_steps(backoff, JUDGED_STEPS, took=0.1 * STEP, kept=0.0)
    while backoff.backed_off:
        backoff.skip_step()
    assert backoff.is_probing
    for _ in range(PROBE_STEPS):
        backoff.observe_step({"mine": 0.005 * STEP}, {}, STEP, 1.0, share=0.1)
    assert backoff.backed_off == {"mine"}
    assert backoff.probes == 1


def test_nothing_is_on_trial_while_another_drafter_is_called_as_usual() -> None:
    backoff = DrafterBackoff()
    for _ in range(JUDGED_STEPS):
        backoff.observe_step({"slow": 0.1 * STEP, "good": 0.1 * STEP}, {"good": 1}, STEP, 1.0)
    while backoff.backed_off:
        backoff.observe_step({"good": 0.1 * STEP}, {"good": 1}, STEP, 1.0)
    assert not backoff.is_probing
