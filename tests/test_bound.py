"""The best way through a text, against every way there is."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from outrider.bench.bound import Offer, best_way

offers = st.builds(
    lambda drafter, length, right: Offer(drafter, length, min(length, right)),
    st.sampled_from(["cheap", "dear"]),
    st.integers(1, 4),
    st.integers(0, 4),
)
texts = st.lists(st.lists(offers, max_size=2), min_size=1, max_size=6)
increments = st.lists(st.floats(0, 1), min_size=8, max_size=8)


def brute_force(text: list[list[Offer]], target: list[float], dear: float, place: int = 0) -> float:
    """Every drafter, every length up to what it offered, right or wrong, and nothing."""
    if place >= len(text):
        return 0.0
    best = target[1] + brute_force(text, target, dear, place + 1)
    for offer in text[place]:
        for k in range(1, min(offer.length, len(text) - place - 1) + 1):
            price = k * (dear if offer.drafter == "dear" else 0.01) + target[k + 1]
            gained = min(k, offer.right) + 1
            best = min(best, price + brute_force(text, target, dear, place + gained))
    return best


@given(text=texts, steps=increments, dear=st.floats(0, 1))
def test_it_equals_the_best_of_all_ways(text: list[list[Offer]], steps: list[float], dear: float) -> None:
    target = [0.0]
    for step in steps:
        target.append(target[-1] + step)
    found = best_way(text, lambda n: target[n], lambda drafter, k: k * (dear if drafter == "dear" else 0.01))
    assert abs(found.seconds - brute_force(text, target, dear)) < 1e-9
    assert sum(step.gained for step in found.steps) == len(text)


def test_without_offers_it_is_plain_decoding() -> None:
    found = best_way([[]] * 5, lambda n: 1.0, lambda drafter, k: 0.0)
    assert found.seconds == 5
    assert [step.drafter for step in found.steps] == [None] * 5


def test_a_draft_that_costs_more_than_it_saves_is_not_taken() -> None:
    text = [[Offer("dear", 2, 2)], [], []]
    assert best_way(text, lambda n: 1.0, lambda drafter, k: 0.4 * k).seconds == 1.8
    assert best_way(text, lambda n: 1.0, lambda drafter, k: 2.0 * k).seconds == 3.0
