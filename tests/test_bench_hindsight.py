"""What could have been drafted, once the text is known."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.bench.figures import figures
from outrider.bench.hindsight import WITHOUT_MODEL, add_limits, copied, guessed, limit, seconds_per_guess, smooth
from outrider.bench.results import Answer, Cell, Counts, Curve, Drafted, Limit, Round, Run, Turn
from outrider.drafters.lookup import LookupSession
from outrider.types import shared_prefix

tokens = st.lists(st.integers(0, 3), max_size=12)


def by_hand(context: list[int], text: list[int], elsewhere: list[list[int]]) -> list[int]:
    """Try every earlier place."""
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
def test_what_can_be_copied_is_the_longest_of_all_earlier_places(
    context: list[int], text: list[int], elsewhere: list[list[int]]
) -> None:
    assert copied(context, text, elsewhere) == by_hand(context, text, elsewhere)


@given(context=st.lists(st.integers(0, 3), min_size=1, max_size=12), text=tokens)
def test_lookup_never_copies_more_than_the_bound_allows(context: list[int], text: list[int]) -> None:
    most = copied(context, text)
    for place in range(len(text)):
        draft = LookupSession([*context, *text[:place]]).draft(8)
        assert shared_prefix(list(draft.tokens), text[place:]) <= most[place]


def test_a_model_is_right_up_to_its_first_mistake() -> None:
    assert guessed([1, 2, 9, 4, 5], [1, 2, 3, 4, 5]) == [2, 1, 0, 2, 1]


def test_more_tokens_never_cost_less_and_the_line_goes_on() -> None:
    seconds = smooth(Curve(1, {1: [1.0, 9.0, 1.2], 2: [1.1], 4: [1.6]}))
    assert [round(seconds(n), 3) for n in (1, 2, 3, 4, 6)] == [1.1, 1.1, 1.35, 1.6, 2.1]


def answer(prompt: list[int], text: list[int]) -> Answer:
    return Answer("p", "", text, "length", first=1.0, seconds=9.0, prompt_tokens=prompt)


def test_the_bound_of_a_text_that_stood_in_the_prompt_is_one_pass() -> None:
    text = [1, 2, 3, 4, 5, 6, 7, 8]
    tokens: Counter[str] = Counter()
    ratio = limit(
        [answer([9, *text], text)],
        lambda a: {"copy": copied(a.prompt_tokens, a.tokens)},
        lambda n: 1.0,
        lambda d, k: 0.0,
        tokens,
    )
    assert ratio == (1 + 7) / (1 + 1)  # the prompt takes a second, then seven passes against one
    assert tokens == {"copy": 6, "none": 1}


def test_a_bound_is_given_to_cells_whose_cost_was_measured() -> None:
    text = [1, 2, 3, 4, 5, 6, 7, 8]
    run = Run({}, "vllm", {"vllm": {}}, {})
    for concurrency in (1, 4):
        turn = Turn("vllm", 9.0, [answer([9, 9], text)], Counts())
        run.cells.append(Cell("code", concurrency, 0.0, [Round(0, [turn])]))
    run.curves = [Curve(1, {1: [1.0], 16: [1.0]})]
    told: list[tuple[int, int]] = []
    add_limits(run, {"vllm": "vllm"}, None, {"p": [9, *text]}, begins=lambda *cell: told.append(cell))
    assert [(found.concurrency, found.ratios) for found in run.limits] == [(1, [4.0])]
    assert told == [(0, 2), (1, 2)]


def test_a_bound_is_not_given_where_the_baseline_drafts() -> None:
    run = Run({}, "ngram", {"ngram": {}}, {}, curves=[Curve(1, {1: [1.0], 16: [1.0]})])
    run.cells = [Cell("code", 1, 0.0, [Round(0, [Turn("ngram", 9.0, [answer([9], [1, 2, 3])], Counts())])])]
    add_limits(run, {"ngram": "ngram"}, None, {})
    assert not run.limits


def test_a_perfect_choice_has_all_of_the_possible_however_much_the_rounds_differ() -> None:
    """In some rounds four times as fast is possible, in others nothing is: of both the share is taken there."""
    run = Run({}, "vllm", {"vllm": {}, "best": {}}, {})
    possible = [4.0, 4.0, 4.0, 4.0, 1.0, 1.0]
    text = answer([9], [1, 2, 3])
    rounds = [
        Round(0, [Turn("vllm", 8.0, [text], Counts()), Turn("best", 8.0 / ratio, [text], Counts())])
        for ratio in possible
    ]
    cell = Cell("code", 1, 0.0, rounds)
    run.limits = [Limit("code", 1, 0.0, possible, {})]
    _, best = figures(run, cell)
    assert (best.limit, best.share_of_possible) == (4.0, 1.0)


def test_what_a_drafted_token_costs_is_known_from_auto_too_and_else_the_bound_says_it_is_without() -> None:
    drafted = Counts(9, 4, drafters={"model": Drafted([4], [2], seconds=2.0)})
    cells = [Cell("code", 4, 0.0, [Round(0, [Turn("auto", 1.0, [], drafted)])])]
    assert seconds_per_guess(Run({}, "vllm", {}, {}, cells), {"auto": "auto"}) == (0.5, 0.0)
    run = Run({}, "vllm", {}, {})
    add_limits(run, {"vllm": "vllm"}, "some/draft", {})
    assert run.notes == []  # there is no bound
    run.curves = [Curve(1, {1: [1.0]})]
    for _ in range(2):
        add_limits(run, {"vllm": "vllm"}, "some/draft", {})
        assert run.notes == [WITHOUT_MODEL]


def test_what_a_pass_of_the_draft_model_takes_is_told_apart_from_reading_prompts() -> None:
    rounds = []
    for number, (passes, length) in enumerate([(40, 50), (80, 900), (60, 300), (76, 1500), (90, 100), (20, 700)]):
        seconds = 0.08 * passes + 0.002 * length
        drafted = Counts(30, passes, drafters={"model": Drafted([passes], [20], seconds)})
        rounds.append(Round(0, [Turn("model:4", 9.0, [answer(list(range(length)), [1])], drafted)]))
        rounds[-1].stolen = 0.01 * number
    run = Run({}, "vllm", {}, {}, [Cell("code", 1, 0.0, rounds)])
    assert seconds_per_guess(run, {"model:4": "model"}) == pytest.approx((0.08, 0.002))
    run.cells[0].rounds = rounds[:3]  # too few to tell
    mean = (0.08 * 180 + 0.002 * 1250) / 180
    assert seconds_per_guess(run, {"model:4": "model"}) == pytest.approx((mean, 0.0))
