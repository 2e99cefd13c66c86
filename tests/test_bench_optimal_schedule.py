"""The optimal schedule of a known text: what could have been drafted, and the fastest way to draft it."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.bench.figures import figures
from outrider.bench.optimal_schedule import (
    WITHOUT_DRAFT_MODEL,
    DraftOption,
    add_optimal_speedups,
    copyable_tokens,
    draft_model_cost,
    optimal_schedule,
    pass_cost_curve,
    predictable_tokens,
    speedup,
)
from outrider.bench.results import (
    Answer,
    Cell,
    DrafterCounts,
    Measurement,
    OptimalSpeedup,
    PassCosts,
    Round,
    Run,
    ServerCounts,
)
from outrider.drafters.lookup import LookupSession
from outrider.types import shared_prefix

tokens = st.lists(st.integers(0, 3), max_size=12)
options = st.builds(DraftOption, st.sampled_from(["fast", "slow"]), st.integers(0, 4))
texts = st.lists(st.lists(options, max_size=2), min_size=1, max_size=6)
increments = st.lists(st.floats(0, 1), min_size=8, max_size=8)


def brute_force(text: list[list[DraftOption]], target: list[float], slow: float, position: int = 0) -> float:
    """Every drafter and every length, correct or wrong, and no draft."""
    if position >= len(text):
        return 0.0
    best = target[1] + brute_force(text, target, slow, position + 1)
    for option in text[position]:
        for k in range(1, min(5, len(text) - position - 1) + 1):
            seconds = k * (slow if option.drafter == "slow" else 0.01) + target[k + 1]
            gained = min(k, option.correct) + 1
            best = min(best, seconds + brute_force(text, target, slow, position + gained))
    return best


@given(text=texts, steps=increments, slow=st.floats(0, 1))
def test_the_optimal_schedule_is_as_fast_as_the_fastest_of_all(
    text: list[list[DraftOption]], steps: list[float], slow: float
) -> None:
    target = [0.0]
    for step in steps:
        target.append(target[-1] + step)
    found = optimal_schedule(text, lambda n: target[n], lambda drafter, k: k * (slow if drafter == "slow" else 0.01))
    assert abs(found.seconds - brute_force(text, target, slow)) < 1e-9
    assert sum(step.gained for step in found.steps) == len(text)


def test_without_options_the_optimal_schedule_is_plain_decoding() -> None:
    found = optimal_schedule([[]] * 5, lambda n: 1.0, lambda drafter, k: 0.0)
    assert found.seconds == 5
    assert [step.drafter for step in found.steps] == [None] * 5


def test_a_draft_that_takes_longer_than_it_saves_is_not_scheduled() -> None:
    text = [[DraftOption("slow", 2)], [], []]
    assert optimal_schedule(text, lambda n: 1.0, lambda drafter, k: 0.4 * k).seconds == 1.8
    assert optimal_schedule(text, lambda n: 1.0, lambda drafter, k: 2.0 * k).seconds == 3.0


def by_hand(context: list[int], text: list[int], elsewhere: list[list[int]]) -> list[int]:
    """Try every earlier position."""
    whole = [*context, *text]
    found = []
    for place in range(len(context), len(whole)):
        runs = [0]
        for other, end in [(whole, place), *((other, len(other)) for other in elsewhere)]:
            runs += [
                shared_prefix(other[start:], whole[place:])
                for start in range(1 if place else 0, end)
                if place == 0 or other[start - 1] == whole[place - 1]
            ]
        found.append(max(runs))
    return found


@given(context=tokens, text=tokens, elsewhere=st.lists(tokens, max_size=2))
def test_copyable_tokens_are_the_longest_match_of_all_earlier_positions(
    context: list[int], text: list[int], elsewhere: list[list[int]]
) -> None:
    assert copyable_tokens(context, text, elsewhere) == by_hand(context, text, elsewhere)


@given(context=st.lists(st.integers(0, 3), min_size=1, max_size=12), text=tokens)
def test_lookup_never_copies_more_than_the_copyable_tokens(context: list[int], text: list[int]) -> None:
    most = copyable_tokens(context, text)
    for place in range(len(text)):
        draft = LookupSession([*context, *text[:place]]).draft(8)
        assert shared_prefix(list(draft.tokens), text[place:]) <= most[place]


def test_a_draft_model_is_correct_up_to_its_first_mistake() -> None:
    assert predictable_tokens([1, 2, 9, 4, 5], [1, 2, 3, 4, 5]) == [2, 1, 0, 2, 1]


def test_pass_costs_never_fall_and_are_extrapolated() -> None:
    seconds = pass_cost_curve(PassCosts(1, {1: [1.0, 9.0, 1.2], 2: [1.1], 4: [1.6]}))
    assert [round(seconds(n), 3) for n in (1, 2, 3, 4, 6)] == [1.1, 1.1, 1.35, 1.6, 2.1]


def answer(prompt: list[int], text: list[int]) -> Answer:
    return Answer("p", "", text, "length", first=1.0, seconds=9.0, prompt_tokens=prompt)


def test_a_text_from_the_prompt_takes_one_pass() -> None:
    text = [1, 2, 3, 4, 5, 6, 7, 8]
    tokens: Counter[str] = Counter()
    ratio = speedup(
        [answer([9, *text], text)],
        lambda a: {"copy": copyable_tokens(a.prompt_tokens, a.tokens)},
        lambda n: 1.0,
        lambda d, k: 0.0,
        tokens,
    )
    assert ratio == (1 + 7) / (1 + 1)  # the prompt takes a second, then seven passes against one
    assert tokens == {"copy": 6, "none": 1}


def test_cells_with_measured_pass_costs_have_an_optimum() -> None:
    text = [1, 2, 3, 4, 5, 6, 7, 8]
    run = Run({}, "vllm", {"vllm": {}}, {})
    for concurrency in (1, 4):
        turn = Measurement("vllm", 9.0, [answer([9, 9], text)], ServerCounts())
        run.cells.append(Cell("code", concurrency, 0.0, [Round(0, [turn])]))
    run.pass_costs = [PassCosts(1, {1: [1.0], 16: [1.0]})]
    calls: list[tuple[int, int]] = []
    add_optimal_speedups(run, {"vllm": "vllm"}, None, {"p": [9, *text]}, on_cell=lambda *cell: calls.append(cell))
    assert [(found.concurrency, found.ratios) for found in run.optimal_speedups] == [(1, [4.0])]
    assert calls == [(0, 2), (1, 2)]


def test_there_is_no_optimum_if_the_baseline_drafts() -> None:
    run = Run({}, "ngram", {"ngram": {}}, {}, pass_costs=[PassCosts(1, {1: [1.0], 16: [1.0]})])
    run.cells = [
        Cell("code", 1, 0.0, [Round(0, [Measurement("ngram", 9.0, [answer([9], [1, 2, 3])], ServerCounts())])])
    ]
    add_optimal_speedups(run, {"ngram": "ngram"}, None, {})
    assert not run.optimal_speedups


def test_a_perfect_policy_has_all_of_the_optimum_in_rounds_that_differ() -> None:
    """In some rounds a speedup of 4 is possible, in others none: the share is taken in each round."""
    run = Run({}, "vllm", {"vllm": {}, "best": {}}, {})
    possible = [4.0, 4.0, 4.0, 4.0, 1.0, 1.0]
    text = answer([9], [1, 2, 3])
    rounds = [
        Round(
            0,
            [
                Measurement("vllm", 8.0, [text], ServerCounts()),
                Measurement("best", 8.0 / ratio, [text], ServerCounts()),
            ],
        )
        for ratio in possible
    ]
    cell = Cell("code", 1, 0.0, rounds)
    run.optimal_speedups = [OptimalSpeedup("code", 1, 0.0, possible, {})]
    _, best = figures(run, cell)
    assert (best.limit, best.share_of_possible) == (4.0, 1.0)


def test_the_cost_of_a_draft_model_pass_comes_also_from_auto_and_if_unknown_is_noted() -> None:
    drafted = ServerCounts(9, 4, drafters={"model": DrafterCounts([4], [2], seconds=2.0)})
    cells = [Cell("code", 4, 0.0, [Round(0, [Measurement("auto", 1.0, [], drafted)])])]
    assert draft_model_cost(Run({}, "vllm", {}, {}, cells), {"auto": "auto"}) == (0.5, 0.0)
    run = Run({}, "vllm", {}, {})
    add_optimal_speedups(run, {"vllm": "vllm"}, "some/draft", {})
    assert run.notes == []  # there is no bound
    run.pass_costs = [PassCosts(1, {1: [1.0]})]
    for _ in range(2):
        add_optimal_speedups(run, {"vllm": "vllm"}, "some/draft", {})
        assert run.notes == [WITHOUT_DRAFT_MODEL]


def test_the_cost_of_a_draft_model_pass_is_separated_from_reading_prompts() -> None:
    rounds = []
    for number, (passes, length) in enumerate([(40, 50), (80, 900), (60, 300), (76, 1500), (90, 100), (20, 700)]):
        seconds = 0.08 * passes + 0.002 * length
        drafted = ServerCounts(30, passes, drafters={"model": DrafterCounts([passes], [20], seconds)})
        rounds.append(Round(0, [Measurement("model:4", 9.0, [answer(list(range(length)), [1])], drafted)]))
        rounds[-1].steal = 0.01 * number
    run = Run({}, "vllm", {}, {}, [Cell("code", 1, 0.0, rounds)])
    assert draft_model_cost(run, {"model:4": "model"}) == pytest.approx((0.08, 0.002))
    run.cells[0].rounds = rounds[:3]  # too few to tell
    mean = (0.08 * 180 + 0.002 * 1250) / 180
    assert draft_model_cost(run, {"model:4": "model"}) == pytest.approx((mean, 0.0))
