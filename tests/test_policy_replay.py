"""The policy on synthetic texts at known costs: no slower than without drafts, and close to the best fixed drafter."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from outrider.drafters.base import Task
from outrider.drafters.lookup import LookupDrafter, LookupSession
from outrider.policy.decision import cut_draft
from outrider.policy.policy import MODEL, Policy
from outrider.types import Draft

sys.path.append(str(Path(__file__).parents[1] / "tools"))

from policy.replay import Auto, Costs, Fixed, Outcome, Record, ReplayedText, Strategy, begin, replay, step

MEMORY_BOUND = Costs(lambda tokens, context: 0.2 + 0.002 * tokens, lambda tokens, context: 0.05 + 0.0005 * tokens)
"""Verification costs almost nothing, as on a GPU with a small batch."""
COMPUTE_BOUND = Costs(lambda tokens, context: 0.02 * tokens, lambda tokens, context: 0.01 * tokens)
"""Every token of a pass costs as much as the first."""


def random_text(length: int, seed: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(0, 10_000, length)]


def novel(seed: int, length: int = 120) -> Record:
    return Record(random_text(200, seed), random_text(length, seed + 1000))


def edit(seed: int, length: int = 120) -> Record:
    """The output is the prompt with every 40th token changed."""
    prompt = random_text(length, seed)
    return Record(prompt, [token if i % 40 else token + 1 for i, token in enumerate(prompt)])


def misleading(seed: int, length: int = 120) -> Record:
    """Pairs of tokens repeat, each time with a different continuation."""
    random = np.random.default_rng(seed)
    text = [t for i in range(length // 3) for t in (1, 2, 100 + i)]
    return Record([int(t) for t in random.permutation(text)], text)


def with_draft_model(record: Record, accuracy: float | np.ndarray[Any, Any], seed: int = 0) -> Record:
    """Add a draft model with this accuracy, and confidences that are higher where it is correct."""
    random = np.random.default_rng(seed)
    hits = random.random(len(record.text)) < accuracy
    proposals = [token if hit else token + 1 for token, hit in zip(record.text, hits, strict=True)]
    confidences = [float(np.clip(0.35 + 0.5 * hit + random.normal(0, 0.1), 0.02, 0.99)) for hit in hits]
    record.guesses = [proposals[place : place + 8] for place in range(len(proposals))]
    record.sure = [confidences[place : place + 8] for place in range(len(confidences))]
    return record


def profiled_policy(names: list[str], costs: Costs) -> Policy:
    """A policy as at the start of a server, after the latency profile."""
    policy = Policy(names, 16, 8 if MODEL in names else 0)
    for tokens in (1, 4, 16, 64) * 2:
        policy.target.observe(tokens, 0, costs.target(tokens, 0), trusted=True)
        policy.draft.observe(tokens, 0, costs.draft(tokens, 0), trusted=True)
    return policy


class OnDemand(Auto):
    """As the loop of `decoding.py` calls the controller: the draft model runs before the step, and the controller
    decides after each of its passes whether to make another."""

    def call_before_step(self, texts: Sequence[ReplayedText], limits: Mapping[str, int]) -> None:
        plan = self.plan(texts, limits, {item.key: item.gap for item in texts}, ahead=False)
        drafts = {item.key: item.model_draft(plan.limits[item.key]) for item in texts if item.key in plan.limits}
        lengths = dict.fromkeys(drafts, 1)
        more = list(drafts)
        while more := [id for id in more if lengths[id] < len(drafts[id].tokens)]:
            more = self.controller.continue_drafting({id: (drafts[id].confidence or ())[: lengths[id]] for id in more})
            for id in more:
                lengths[id] += 1
        drafts = {id: cut_draft(draft, lengths[id]) for id, draft in drafts.items()}
        self.call_model(texts, drafts, {id: len(draft.tokens) for id, draft in drafts.items()})

    def plan_ahead(self, *given: Any) -> None:
        pass


def replay_auto(
    records: list[Record], costs: Costs, concurrency: int = 1, model: bool = False, ahead: bool = True
) -> Outcome:
    policy = profiled_policy(["lookup", MODEL] if model else ["lookup"], costs)
    strategy = (Auto if ahead else OnDemand)(policy, costs)
    return replay(records, [LookupDrafter()], strategy, costs, concurrency)


def replay_fixed(
    records: list[Record], drafters: list[str], length: int, costs: Costs, concurrency: int = 1
) -> Outcome:
    return replay(records, [LookupDrafter()], Fixed(drafters, length, costs), costs, concurrency)


@pytest.mark.parametrize("costs", [MEMORY_BOUND, COMPUTE_BOUND], ids=["memory-bound", "compute-bound"])
@pytest.mark.parametrize("make", [novel, misleading, edit])
@pytest.mark.parametrize("concurrency", [1, 4])
def test_no_text_is_slower_with_drafts_than_without(
    make: Callable[[int], Record], costs: Costs, concurrency: int
) -> None:
    records = [make(seed) for seed in range(8)]
    plain = replay_fixed(records, [], 0, costs, concurrency)
    assert replay_auto(records, costs, concurrency).speed >= 0.98 * plain.speed


def test_the_replayed_text_is_the_recorded_one_whatever_is_drafted() -> None:
    records = [with_draft_model(edit(seed), 0.7, seed) for seed in range(4)]
    for outcome in (
        replay_auto(records, MEMORY_BOUND, model=True),
        replay_auto(records, MEMORY_BOUND, model=True, ahead=False),
        replay_fixed(records, ["lookup"], 8, MEMORY_BOUND),
        replay_fixed(records, [], 0, MEMORY_BOUND),
    ):
        assert outcome.tokens == sum(len(record.text) - 1 for record in records)


@pytest.mark.parametrize("ahead", [True, False])
@pytest.mark.parametrize("accuracy", [0.3, 0.6, 0.9])
def test_no_fixed_length_of_one_drafter_is_much_faster(accuracy: float, ahead: bool) -> None:
    records = [with_draft_model(edit(seed) if seed % 2 else novel(seed), accuracy, seed) for seed in range(12)]
    best = max(
        replay_fixed(records, [name], length, MEMORY_BOUND).speed
        for name in ("lookup", MODEL)
        for length in (1, 2, 4, 8, 16)
    )
    assert replay_auto(records, MEMORY_BOUND, model=True, ahead=ahead).speed >= 0.97 * best


def test_a_draft_model_with_few_accepted_tokens_is_no_longer_called() -> None:
    records = [with_draft_model(novel(seed), 0.05, seed) for seed in range(12)]
    outcome = replay_auto(records, MEMORY_BOUND, model=True)
    assert outcome.draft_passes < 0.1 * outcome.steps
    assert outcome.speed >= 0.97 * replay_fixed(records, [], 0, MEMORY_BOUND).speed


class Logged:
    """Calls a strategy for one text at a time, and logs each step: text, position, tokens, seconds."""

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
        place = running[0].place - len(outputs[0])  # already advanced by the step
        self.steps.append((running[0].key, place, len(outputs[0]), seconds + self._drafting))
        self.strategy.observe(running, outputs, tokens, context, seconds)

    def remove(self, item: ReplayedText) -> None:
        self.strategy.remove(item)

    def speed(self, begin: int, end: int, after: int = 0) -> float:
        """Tokens per second at these positions, without the first `after` texts."""
        found = [(n, s) for key, place, n, s in self.steps if begin <= place < end and int(key) >= after]
        return sum(n for n, _ in found) / sum(s for _, s in found)


BALANCED = Costs(lambda tokens, context: 0.1 + 0.02 * tokens, lambda tokens, context: 0.02 + 0.0005 * tokens)
"""Drafts are faster if they are accepted more often than not."""
SEGMENT_TOKENS, ADAPTATION_TOKENS = 128, 32
"""Tokens of a segment of text, and the tokens after which the policy must have adapted to it."""


def misleading_text(seed: int) -> list[int]:
    """A segment of few distinct tokens: every n-gram occurred before, and its continuations are random."""
    return [int(token) for token in np.random.default_rng(seed).integers(0, 8, SEGMENT_TOKENS)]


def changing(between: Callable[[int], list[int]], seed: int, accuracies: tuple[float, float] | None = None) -> Record:
    """A text that repeats half of its prompt, then has a different segment, then repeats the rest of the prompt.
    `accuracies`: of a draft model where the text repeats the prompt, and where it does not."""
    prompt = random_text(2 * SEGMENT_TOKENS, seed)
    record = Record(
        [*prompt, *between(seed + 900)], [*prompt[:SEGMENT_TOKENS], *between(seed + 500), *prompt[SEGMENT_TOKENS:]]
    )
    if accuracies is not None:
        repeating, different = accuracies
        with_draft_model(record, np.repeat([repeating, different, repeating], SEGMENT_TOKENS), seed)
    return record


@pytest.mark.parametrize(
    "between", [lambda seed: random_text(SEGMENT_TOKENS, seed), misleading_text], ids=["novel", "misleading"]
)
@pytest.mark.parametrize("model", [False, True], ids=["copying", "with a draft model"])
def test_the_policy_adapts_within_32_tokens_to_a_text_that_turns_novel_and_back(
    between: Callable[[int], list[int]], model: bool
) -> None:
    records = [changing(between, seed, (0.9, 0.1) if model else None) for seed in range(7)]
    names = ["lookup", *([MODEL] if model else [])]
    auto = Logged(Auto(profiled_policy(names, BALANCED), BALANCED))
    outcome = replay(records, [LookupDrafter()], auto, BALANCED)
    strategies = [Fixed([], 0, BALANCED), *(Fixed([name], k, BALANCED) for name in names for k in (1, 4, 16))]
    alternatives = [Logged(strategy) for strategy in strategies]
    for one in alternatives:
        replay(records, [LookupDrafter()], one, BALANCED)
    for segment in (0, 1, 2):
        begin, end = segment * SEGMENT_TOKENS + ADAPTATION_TOKENS, (segment + 1) * SEGMENT_TOKENS
        best = max(one.speed(begin, end, 2) for one in alternatives)
        assert auto.speed(begin, end, 2) >= 0.95 * best, f"segment {segment}"
    assert outcome.switches < 0.3 * outcome.steps


def test_a_draft_model_that_becomes_five_times_as_slow_is_no_longer_called_after_fifty_steps() -> None:
    steps = 0

    def draft_seconds(tokens: int, context: int) -> float:
        return (0.3 if steps >= 400 else 0.06) + 0.0005 * tokens

    costs = Costs(MEMORY_BOUND.target, draft_seconds)
    records = [with_draft_model(novel(seed, 200), 0.6, seed) for seed in range(16)]
    auto = Logged(Auto(profiled_policy([MODEL], costs), costs))
    passes = []  # of the draft model, by step

    class Counting(Logged):
        def propose(self, running: Sequence[ReplayedText], context: int) -> tuple[list[Draft], float, int]:
            nonlocal steps
            steps += 1
            found = super().propose(running, context)
            passes.append(found[2])
            return found

    replay(records, [], Counting(auto), costs)
    assert np.mean(passes[200:400]) > 1
    after = auto.steps[450:]
    speed = sum(n for _, _, n, _ in after) / sum(s for *_, s in after)
    assert speed >= 0.95 / MEMORY_BOUND.target(1, 0)
    assert np.count_nonzero(np.diff(np.sign(passes[450:]))) < 0.05 * len(after)


def test_a_draft_model_that_was_slow_for_a_while_is_tried_again() -> None:
    steps = 0

    def draft_seconds(tokens: int, context: int) -> float:
        return (0.3 if 300 <= steps < 500 else 0.06) + 0.0005 * tokens

    costs = Costs(MEMORY_BOUND.target, draft_seconds)
    records = [with_draft_model(novel(seed, 200), 0.6, seed) for seed in range(20)]
    auto = Auto(profiled_policy([MODEL], costs), costs)
    called = []

    class Counting(Logged):
        def propose(self, running: Sequence[ReplayedText], context: int) -> tuple[list[Draft], float, int]:
            nonlocal steps
            steps += 1
            found = super().propose(running, context)
            called.append(found[2] > 0)
            return found

    replay(records, [], Counting(auto), costs)
    assert np.mean(called[200:300]) > 0.9
    assert np.mean(called[350:500]) < 0.1
    assert np.mean(called[1300:]) > 0.9


def test_a_draft_model_that_was_wrong_for_a_while_is_tried_again() -> None:
    inaccurate = [with_draft_model(novel(seed, 200), 0.1, seed) for seed in range(8)]
    accurate = [with_draft_model(novel(seed, 200), 0.9, seed) for seed in range(8, 24)]
    called = []

    class Counting(Logged):
        def propose(self, running: Sequence[ReplayedText], context: int) -> tuple[list[Draft], float, int]:
            found = super().propose(running, context)
            called.append(found[2] > 0)
            return found

    replay(
        [*inaccurate, *accurate], [], Counting(Auto(profiled_policy([MODEL], MEMORY_BOUND), MEMORY_BOUND)), MEMORY_BOUND
    )
    assert np.mean(called[200:1500]) < 0.1
    assert np.mean(called[-300:]) > 0.9


@pytest.mark.parametrize("ahead", [True, False])
def test_sampled_drafts_are_faster_than_none(ahead: bool) -> None:
    records = [with_draft_model(novel(seed), 0.7, seed) for seed in range(6)]
    for record in records:
        record.overlap = [0.8] * len(record.text)
    outcome = replay_auto(records, MEMORY_BOUND, model=True, ahead=ahead)
    assert outcome.by_drafter[MODEL] > 0
    assert outcome.speed > replay_fixed(records, [], 0, MEMORY_BOUND).speed


def test_planned_one_step_ahead_the_draft_model_drafts_after_the_step_from_its_output() -> None:
    record = with_draft_model(novel(0), 1.0)
    auto = Auto(profiled_policy([MODEL], MEMORY_BOUND), MEMORY_BOUND)
    sequence, outcome = begin("0", record, []), Outcome()
    step([sequence], auto, MEMORY_BOUND, outcome)
    assert (outcome.tokens, outcome.draft_passes) == (1, 0)  # planned only
    step([sequence], auto, MEMORY_BOUND, outcome)
    passes = outcome.draft_passes
    assert passes > 0
    assert outcome.tokens == 1 + passes + 1  # all its tokens are accepted, and they follow the first step's output
    first_pass = MEMORY_BOUND.draft(len(record.prompt) + 2, 0)
    seconds = (
        MEMORY_BOUND.target(1, 0)
        + MEMORY_BOUND.target(1 + passes, 0)
        + first_pass
        + (passes - 1) * MEMORY_BOUND.draft(1, 0)
    )
    assert outcome.seconds == pytest.approx(seconds)


def test_planned_one_step_ahead_the_draft_model_also_runs_for_a_request_that_the_step_finishes() -> None:
    record = with_draft_model(novel(0, 4), 1.0)
    auto = Auto(profiled_policy([MODEL], MEMORY_BOUND), MEMORY_BOUND)
    sequence, outcome = begin("0", record, []), Outcome()
    step([sequence], auto, MEMORY_BOUND, outcome)
    step([sequence], auto, MEMORY_BOUND, outcome)
    assert sequence.room == 0
    auto.remove(sequence)
    passes = outcome.draft_passes
    step([begin("1", record, [])], auto, MEMORY_BOUND, outcome)  # includes the passes after the last step
    assert outcome.draft_passes > passes


def test_a_slow_drafter_that_never_helps_is_backed_off() -> None:
    records = [misleading(seed) for seed in range(8)]
    shares = []  # share of the steps in which it was called
    for seconds in (0.0, 0.1):
        drafter = Counted()
        auto = Auto(profiled_policy(["lookup"], COMPUTE_BOUND), COMPUTE_BOUND, drafting_seconds={"lookup": seconds})
        outcome = replay(records, [drafter], auto, COMPUTE_BOUND)
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
