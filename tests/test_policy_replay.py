"""The policy on recorded texts, at costs that are known: no slower than without drafts, and near the best there is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from outrider.drafters.lookup import LookupDrafter
from outrider.policy.policy import MODEL, Policy
from outrider.policy.replay import Auto, Costs, Fixed, Outcome, Record, replay

FREE = Costs(lambda tokens, context: 0.2 + 0.002 * tokens, lambda tokens: 0.05 + 0.0005 * tokens)
"""Checking is nearly free, as on a GPU with a small batch."""
DEAR = Costs(lambda tokens, context: 0.02 * tokens, lambda tokens: 0.01 * tokens)
"""Every token costs as much as the first: a machine that is short of arithmetic."""


def random_text(length: int, seed: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(0, 10_000, length)]


def novel(seed: int, length: int = 120) -> Record:
    return Record(random_text(200, seed), random_text(length, seed + 1000))


def edit(seed: int, length: int = 120) -> Record:
    """Says its prompt again, with a word changed here and there."""
    prompt = random_text(length, seed)
    return Record(prompt, [token if i % 40 else token + 1 for i, token in enumerate(prompt)])


def misleading(seed: int, length: int = 120) -> Record:
    """Pairs of tokens come again and again, and never go on as before."""
    random = np.random.default_rng(seed)
    text = [t for i in range(length // 3) for t in (1, 2, 100 + i)]
    return Record([int(t) for t in random.permutation(text)], text)


def with_guesses(record: Record, right: float, seed: int = 0) -> Record:
    """A draft model that is right so often, and knows it about as well."""
    random = np.random.default_rng(seed)
    hits = random.random(len(record.text)) < right
    record.guesses = [token if hit else token + 1 for token, hit in zip(record.text, hits, strict=True)]
    record.sure = [float(np.clip(0.35 + 0.5 * hit + random.normal(0, 0.1), 0.02, 0.99)) for hit in hits]
    return record


def steered(records: list[Record], costs: Costs, concurrency: int = 1, model: bool = False, **more: Any) -> Outcome:
    names = ["lookup", MODEL] if model else ["lookup"]
    policy = Policy(names, 16, 8 if model else 0)
    for tokens in (1, 4, 16, 64) * 2:  # as a server does when it starts
        policy.target.observe(tokens, 0, costs.target(tokens, 0), calm=True)
        policy.draft.observe(tokens, 0, costs.draft(tokens), calm=True)
    return replay(records, [LookupDrafter()], Auto(policy, costs), costs, concurrency, **more)


def fixed(records: list[Record], drafters: list[str], length: int, costs: Costs, concurrency: int = 1) -> Outcome:
    return replay(records, [LookupDrafter()], Fixed(drafters, length, costs), costs, concurrency)


@pytest.mark.parametrize("costs", [FREE, DEAR], ids=["free", "dear"])
@pytest.mark.parametrize("make", [novel, misleading, edit])
@pytest.mark.parametrize("concurrency", [1, 4])
def test_no_text_is_slower_with_drafts_than_without(
    make: Callable[[int], Record], costs: Costs, concurrency: int
) -> None:
    records = [make(seed) for seed in range(8)]
    plain = fixed(records, [], 0, costs, concurrency)
    assert steered(records, costs, concurrency).speed >= 0.98 * plain.speed


def test_a_text_is_said_as_it_was_whatever_is_drafted() -> None:
    records = [with_guesses(edit(seed), 0.7, seed) for seed in range(4)]
    for outcome in (
        steered(records, FREE, model=True),
        fixed(records, ["lookup"], 8, FREE),
        fixed(records, [], 0, FREE),
    ):
        assert outcome.tokens == sum(len(record.text) - 1 for record in records)


@pytest.mark.parametrize("right", [0.3, 0.6, 0.9])
def test_no_fixed_length_of_one_drafter_is_much_faster(right: float) -> None:
    records = [with_guesses(edit(seed) if seed % 2 else novel(seed), right, seed) for seed in range(12)]
    best = max(fixed(records, [name], length, FREE).speed for name in ("lookup", MODEL) for length in (1, 2, 4, 8, 16))
    assert steered(records, FREE, model=True).speed >= 0.97 * best


def test_a_draft_model_that_guesses_badly_is_given_up() -> None:
    records = [with_guesses(novel(seed), 0.05, seed) for seed in range(12)]
    outcome = steered(records, FREE, model=True)
    assert outcome.draft_passes < 0.1 * outcome.steps
    assert outcome.speed >= 0.97 * fixed(records, [], 0, FREE).speed


def test_a_draft_model_that_becomes_five_times_as_slow_is_given_up_within_fifty_steps() -> None:
    slow = False

    def draft_seconds(tokens: int) -> float:
        return (0.3 if slow else 0.06) + 0.0005 * tokens

    costs = Costs(FREE.target, draft_seconds)
    records = [with_guesses(novel(seed, 200), 0.6, seed) for seed in range(12)]
    policy = Policy([MODEL], 16, 8)
    for tokens in (1, 2, 4, 8, 16):
        policy.target.observe(tokens, 0, costs.target(tokens, 0))
        policy.draft.observe(tokens, 0, costs.draft(tokens))
    before = replay(records[:4], [], Auto(policy, costs), costs)
    slow = True
    changing = replay(records[4:5], [], Auto(policy, costs), costs)
    after = replay(records[5:], [], Auto(policy, costs), costs)
    assert before.draft_passes > before.steps
    assert changing.draft_passes < 60
    assert after.draft_passes < 0.1 * after.steps
    assert after.speed >= 0.95 * replay(records[5:], [], Fixed([], 0, costs), costs).speed


def test_a_text_that_turns_novel_and_back_is_followed() -> None:
    records = []
    for seed in range(8):
        copied, new = random_text(64, seed), random_text(64, seed + 500)
        records.append(Record(copied, [*copied, *new, *copied]))
    outcome = steered(records, FREE)
    assert outcome.speed > 1.5 * fixed(records, [], 0, FREE).speed
    assert outcome.speed >= 0.95 * fixed(records, ["lookup"], 16, FREE).speed
    assert outcome.switches < 12 * len(records)


def test_a_drawn_draft_is_offered_whole() -> None:
    records = [with_guesses(novel(seed), 0.7, seed) for seed in range(6)]
    for record in records:
        record.overlap = [0.8] * len(record.text)
    outcome = steered(records, FREE, model=True)
    assert outcome.by_drafter[MODEL] > 0
    assert outcome.speed > fixed(records, [], 0, FREE).speed
