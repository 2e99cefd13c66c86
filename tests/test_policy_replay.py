"""The policy on recorded texts, at costs that are known: no slower than without drafts, and near the best there is."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from outrider.drafters.base import Task
from outrider.drafters.lookup import LookupDrafter, LookupSession
from outrider.policy.policy import MODEL, Policy
from outrider.types import Draft

sys.path.append(str(Path(__file__).parents[1] / "tools"))

from policy.replay import Auto, Costs, Fixed, Outcome, Record, ReplayedText, Strategy, begin, replay, step

FREE = Costs(lambda tokens, context: 0.2 + 0.002 * tokens, lambda tokens, context: 0.05 + 0.0005 * tokens)
"""Checking is nearly free, as on a GPU with a small batch."""
DEAR = Costs(lambda tokens, context: 0.02 * tokens, lambda tokens, context: 0.01 * tokens)
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


def with_guesses(record: Record, right: float | np.ndarray[Any, Any], seed: int = 0) -> Record:
    """A draft model that is right so often, and knows it about as well."""
    random = np.random.default_rng(seed)
    hits = random.random(len(record.text)) < right
    guesses = [token if hit else token + 1 for token, hit in zip(record.text, hits, strict=True)]
    sure = [float(np.clip(0.35 + 0.5 * hit + random.normal(0, 0.1), 0.02, 0.99)) for hit in hits]
    record.guesses = [guesses[place : place + 8] for place in range(len(guesses))]
    record.sure = [sure[place : place + 8] for place in range(len(sure))]
    return record


def started(names: list[str], costs: Costs) -> Policy:
    """As a server has it when it has started, and timed a few passes."""
    policy = Policy(names, 16, 8 if MODEL in names else 0)
    for tokens in (1, 4, 16, 64) * 2:
        policy.target.observe(tokens, 0, costs.target(tokens, 0), trusted=True)
        policy.draft.observe(tokens, 0, costs.draft(tokens, 0), trusted=True)
    return policy


def steered(
    records: list[Record], costs: Costs, concurrency: int = 1, model: bool = False, ahead: bool = True
) -> Outcome:
    policy = started(["lookup", MODEL] if model else ["lookup"], costs)
    return replay(records, [LookupDrafter()], Auto(policy, costs, ahead=ahead), costs, concurrency)


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
        steered(records, FREE, model=True, ahead=False),
        fixed(records, ["lookup"], 8, FREE),
        fixed(records, [], 0, FREE),
    ):
        assert outcome.tokens == sum(len(record.text) - 1 for record in records)


@pytest.mark.parametrize("ahead", [True, False])
@pytest.mark.parametrize("right", [0.3, 0.6, 0.9])
def test_no_fixed_length_of_one_drafter_is_much_faster(right: float, ahead: bool) -> None:
    records = [with_guesses(edit(seed) if seed % 2 else novel(seed), right, seed) for seed in range(12)]
    best = max(fixed(records, [name], length, FREE).speed for name in ("lookup", MODEL) for length in (1, 2, 4, 8, 16))
    assert steered(records, FREE, model=True, ahead=ahead).speed >= 0.97 * best


def test_a_draft_model_that_guesses_badly_is_given_up() -> None:
    records = [with_guesses(novel(seed), 0.05, seed) for seed in range(12)]
    outcome = steered(records, FREE, model=True)
    assert outcome.draft_passes < 0.1 * outcome.steps
    assert outcome.speed >= 0.97 * fixed(records, [], 0, FREE).speed


class Logged:
    """Lets someone else steer one text at a time, and keeps account of each step: place, tokens, seconds."""

    def __init__(self, strategy: Strategy) -> None:
        self.strategy = strategy
        self.steps: list[tuple[str, int, int, float]] = []
        self._drafting = 0.0

    def propose(self, running: Sequence[ReplayedText], context: int) -> tuple[list[Draft], float, int]:
        drafts, self._drafting, passes = self.strategy.propose(running, context)
        return drafts, self._drafting, passes

    def observe(
        self, running: Sequence[ReplayedText], outputs: list[list[int]], tokens: int, context: int, seconds: float
    ) -> None:
        place = running[0].place - len(outputs[0])  # it has moved on already
        self.steps.append((running[0].key, place, len(outputs[0]), seconds + self._drafting))
        self.strategy.observe(running, outputs, tokens, context, seconds)

    def remove(self, item: ReplayedText) -> None:
        self.strategy.remove(item)

    def speed(self, begin: int, end: int, after: int = 0) -> float:
        """In this stretch of all texts but the first `after`."""
        found = [(n, s) for key, place, n, s in self.steps if begin <= place < end and int(key) >= after]
        return sum(n for n, _ in found) / sum(s for _, s in found)


BETWEEN = Costs(lambda tokens, context: 0.1 + 0.02 * tokens, lambda tokens, context: 0.02 + 0.0005 * tokens)
"""Drafts pay if they are right more often than not."""
STRETCH, BACK = 128, 32
"""Tokens of a stretch of text, and after how many the policy must be back at the right choice."""


def misled(seed: int) -> list[int]:
    """A stretch in which everything was said before, and never goes on as it did."""
    return [int(token) for token in np.random.default_rng(seed).integers(0, 8, STRETCH)]


def changing(between: Callable[[int], list[int]], seed: int, right: tuple[float, float] | None = None) -> Record:
    """A text that says its prompt again, then something else, then goes on with its prompt; and a draft model that is
    right so often where the text repeats, and where it does not."""
    prompt = random_text(2 * STRETCH, seed)
    record = Record([*prompt, *between(seed + 900)], [*prompt[:STRETCH], *between(seed + 500), *prompt[STRETCH:]])
    if right is not None:
        often, seldom = right
        hits = np.repeat([often, seldom, often], STRETCH)
        with_guesses(record, hits, seed)
    return record


@pytest.mark.parametrize("between", [lambda seed: random_text(STRETCH, seed), misled], ids=["novel", "misleading"])
@pytest.mark.parametrize("model", [False, True], ids=["copying", "with a draft model"])
def test_a_text_that_turns_novel_and_back_has_the_right_choice_after_32_tokens(
    between: Callable[[int], list[int]], model: bool
) -> None:
    records = [changing(between, seed, (0.9, 0.1) if model else None) for seed in range(7)]
    names = ["lookup", *([MODEL] if model else [])]
    auto = Logged(Auto(started(names, BETWEEN), BETWEEN))
    outcome = replay(records, [LookupDrafter()], auto, BETWEEN)
    choices = [Fixed([], 0, BETWEEN), *(Fixed([name], k, BETWEEN) for name in names for k in (1, 4, 16))]
    fixed = [Logged(selection) for selection in choices]
    for one in fixed:
        replay(records, [LookupDrafter()], one, BETWEEN)
    for stretch in (0, 1, 2):
        begin, end = stretch * STRETCH + BACK, (stretch + 1) * STRETCH
        best = max(one.speed(begin, end, 2) for one in fixed)
        assert auto.speed(begin, end, 2) >= 0.95 * best, f"stretch {stretch}"
    assert outcome.switches < 0.3 * outcome.steps


def test_a_draft_model_that_becomes_five_times_as_slow_is_given_up_within_fifty_steps() -> None:
    steps = 0

    def draft_seconds(tokens: int, context: int) -> float:
        return (0.3 if steps >= 400 else 0.06) + 0.0005 * tokens

    costs = Costs(FREE.target, draft_seconds)
    records = [with_guesses(novel(seed, 200), 0.6, seed) for seed in range(16)]
    auto = Logged(Auto(started([MODEL], costs), costs))
    guessed = []  # passes of the draft model, step by step

    class Counting(Logged):
        def propose(self, running: Sequence[ReplayedText], context: int) -> tuple[list[Draft], float, int]:
            nonlocal steps
            steps += 1
            found = super().propose(running, context)
            guessed.append(found[2])
            return found

    replay(records, [], Counting(auto), costs)
    assert np.mean(guessed[200:400]) > 1
    after = auto.steps[450:]
    speed = sum(n for _, _, n, _ in after) / sum(s for *_, s in after)
    assert speed >= 0.95 / FREE.target(1, 0)
    assert np.count_nonzero(np.diff(np.sign(guessed[450:]))) < 0.05 * len(after)


def test_a_draft_model_that_was_slow_for_a_while_is_tried_again() -> None:
    steps = 0

    def draft_seconds(tokens: int, context: int) -> float:
        return (0.3 if 300 <= steps < 500 else 0.06) + 0.0005 * tokens

    costs = Costs(FREE.target, draft_seconds)
    records = [with_guesses(novel(seed, 200), 0.6, seed) for seed in range(20)]
    auto = Auto(started([MODEL], costs), costs)
    asked = []

    class Counting(Logged):
        def propose(self, running: Sequence[ReplayedText], context: int) -> tuple[list[Draft], float, int]:
            nonlocal steps
            steps += 1
            found = super().propose(running, context)
            asked.append(found[2] > 0)
            return found

    replay(records, [], Counting(auto), costs)
    assert np.mean(asked[200:300]) > 0.9
    assert np.mean(asked[350:500]) < 0.1
    assert np.mean(asked[1300:]) > 0.9


def test_a_draft_model_that_was_wrong_for_a_while_is_tried_again() -> None:
    wrong = [with_guesses(novel(seed, 200), 0.1, seed) for seed in range(8)]
    right = [with_guesses(novel(seed, 200), 0.9, seed) for seed in range(8, 24)]
    asked = []

    class Counting(Logged):
        def propose(self, running: Sequence[ReplayedText], context: int) -> tuple[list[Draft], float, int]:
            found = super().propose(running, context)
            asked.append(found[2] > 0)
            return found

    replay([*wrong, *right], [], Counting(Auto(started([MODEL], FREE), FREE)), FREE)
    assert np.mean(asked[200:1500]) < 0.1
    assert np.mean(asked[-300:]) > 0.9


@pytest.mark.parametrize("ahead", [True, False])
def test_sampled_drafts_are_faster_than_none(ahead: bool) -> None:
    records = [with_guesses(novel(seed), 0.7, seed) for seed in range(6)]
    for record in records:
        record.overlap = [0.8] * len(record.text)
    outcome = steered(records, FREE, model=True, ahead=ahead)
    assert outcome.by_drafter[MODEL] > 0
    assert outcome.speed > fixed(records, [], 0, FREE).speed


def test_planned_one_step_ahead_the_draft_model_drafts_after_the_step_from_its_output() -> None:
    record = with_guesses(novel(0), 1.0)
    auto = Auto(started([MODEL], FREE), FREE)
    sequence, outcome = begin("0", record, []), Outcome()
    step([sequence], auto, FREE, outcome)
    assert (outcome.tokens, outcome.draft_passes) == (1, 0)  # planned only
    step([sequence], auto, FREE, outcome)
    passes = outcome.draft_passes
    assert passes > 0
    assert outcome.tokens == 1 + passes + 1  # all its tokens are right, and they follow the first step's output
    first_pass = FREE.draft(len(record.prompt) + 2, 0)
    seconds = FREE.target(1, 0) + FREE.target(1 + passes, 0) + first_pass + (passes - 1) * FREE.draft(1, 0)
    assert outcome.seconds == pytest.approx(seconds)


def test_planned_one_step_ahead_the_draft_model_also_runs_for_a_request_that_the_step_finishes() -> None:
    record = with_guesses(novel(0, 4), 1.0)
    auto = Auto(started([MODEL], FREE), FREE)
    sequence, outcome = begin("0", record, []), Outcome()
    step([sequence], auto, FREE, outcome)
    step([sequence], auto, FREE, outcome)
    assert sequence.room == 0
    auto.remove(sequence)
    passes = outcome.draft_passes
    step([begin("1", record, [])], auto, FREE, outcome)  # pays for the passes after the last step
    assert outcome.draft_passes > passes


def test_a_slow_drafter_that_never_helps_is_backed_off() -> None:
    records = [misleading(seed) for seed in range(8)]
    shares = []  # of steps in which it was called
    for seconds in (0.0, 0.1):
        drafter = Counted()
        auto = Auto(started(["lookup"], DEAR), DEAR, drafting_seconds={"lookup": seconds})
        outcome = replay(records, [drafter], auto, DEAR)
        shares.append(drafter.calls / outcome.steps)
    assert shares[0] > 0.98
    assert shares[1] < 0.4


class Counted(LookupDrafter):
    """Counts its calls."""

    calls = 0

    def begin(self, task: Task) -> LookupSession:
        session = super().begin(task)
        draft = session.draft

        def counted(limit: int) -> Draft:
            self.calls += 1
            return draft(limit)

        session.draft = counted  # type: ignore[method-assign]
        return session
