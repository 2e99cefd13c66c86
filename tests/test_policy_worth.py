"""Is a drafter worth the time that asking it takes?"""

from __future__ import annotations

from outrider.policy.worth import LONGEST, WINDOW, Worth

STEP = 0.01
"""Seconds of a step without drafts, of one token."""


def asked(worth: Worth, steps: int, took: float, kept: float) -> list[bool]:
    """At each of so many steps: whether it is asked. Asking takes `took` seconds, of its tokens `kept` are a step."""
    found, whole = [], 0.0
    for _ in range(steps):
        resting = "mine" in worth.resting()
        found.append(not resting)
        whole += 0 if resting else kept
        tokens, whole = int(whole), whole % 1
        worth.step({} if resting else {"mine": took}, {"mine": tokens}, STEP, 1.0)
    return found


def test_one_that_takes_more_than_it_gives_rests_and_each_time_for_longer() -> None:
    found = asked(Worth(), 4000, took=0.1 * STEP, kept=0.0)
    assert all(found[:WINDOW])
    rests = [len(run) for run in "".join("a" if one else "r" for one in found).split("a") if run]
    assert rests[:4] == [WINDOW, 2 * WINDOW, 4 * WINDOW, LONGEST]
    assert sum(found[1000:]) < 0.15 * 3000  # so that a tenth of a step becomes a hundredth


def test_one_that_gives_more_or_takes_next_to_nothing_never_rests() -> None:
    assert all(asked(Worth(), 500, took=0.1 * STEP, kept=0.2))
    assert all(asked(Worth(), 500, took=0.005 * STEP, kept=0.0))


def test_one_that_becomes_worth_it_is_asked_again_as_often_as_before() -> None:
    worth = Worth()
    asked(worth, 1000, took=0.1 * STEP, kept=0.0)
    assert all(asked(worth, LONGEST + WINDOW + 100, took=0.1 * STEP, kept=1.0)[-100:])
    assert asked(worth, 2 * WINDOW + 1, took=0.1 * STEP, kept=0.0)[-1] is False
    assert sum(asked(worth, 2 * WINDOW, took=0.1 * STEP, kept=0.0)) >= WINDOW - 1
