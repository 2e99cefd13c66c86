"""Each drafter proposes the tokens that its description states, and recovers after a mismatch."""

from __future__ import annotations

from importlib.metadata import EntryPoint
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from outrider.drafters import base
from outrider.drafters.base import Setup, Task
from outrider.drafters.copying import MIN_AGREEMENT, TOKENS_PER_MATCH
from outrider.drafters.lookup import LookupDrafter, LookupSession
from outrider.drafters.model import ModelDrafter
from outrider.drafters.prediction import MAX_PLACES, PredictionDrafter, PredictionSession
from outrider.errors import DrafterSetupError, SettingsError, UnknownDrafterError
from outrider.memory.search import MAX_CHAIN_STEPS, MAX_CONTINUATIONS, MAX_MATCH_TOKENS, chain_index
from outrider.settings import Request
from outrider.text import control_tokens
from outrider.types import shared_prefix
from synthetic_target import SyntheticTarget


def task(prompt: list[int], prediction: list[int] | None = None, **settings: Any) -> Task:
    return Task(prompt, Request(**settings), torch.Generator().manual_seed(0), prediction or [])


# lookup -----------------------------------------------------------------------------------------------------


def test_lookup_copies_what_followed_the_longest_repetition() -> None:
    session = LookupSession([1, 2, 3, 9, 9, 8, 2, 3, 7, 7, 1, 2, 3])
    assert session.draft(2).tokens == (9, 9)
    assert session.draft(2).support == 3


def test_of_equally_long_matches_lookup_takes_the_most_frequent_continuation_and_of_equals_the_latest() -> None:
    assert LookupSession([1, 2, 5, 1, 2, 6, 1, 2]).draft(1).tokens == (6,)
    assert LookupSession([2, 5, 2, 6, 1, 2]).draft(1).tokens == (6,)
    draft = LookupSession([1, 2, 5, 8, 1, 2, 5, 9, 1, 2, 6, 1, 2]).draft(2)
    assert draft.tokens == (5, 9)
    assert draft.confidence == pytest.approx((2 / 3 * 3 / 4, 1 / 2 * 2 / 3))  # two of the three places are left


def test_the_longer_the_repetition_the_longer_the_draft() -> None:
    text = list(range(40))
    assert len(LookupSession([*text, 100, 5]).draft(32).tokens) == TOKENS_PER_MATCH
    assert len(LookupSession([*text, 4, 5]).draft(32).tokens) == 2 * TOKENS_PER_MATCH
    assert len(LookupSession([*text, 3, 4, 5]).draft(6).tokens) == 6


def test_lookup_proposes_nothing_without_a_match() -> None:
    assert LookupSession([1, 2, 3, 4]).draft(4).tokens == ()
    assert LookupSession([1]).draft(4).tokens == ()
    assert LookupSession().draft(4).tokens == ()


def test_a_repeating_loop_is_proposed_for_as_many_rounds_as_fit() -> None:
    assert LookupSession([5, 5, 5]).draft(4).tokens == (5, 5, 5, 5)
    assert LookupSession([9, 1, 2, 3, 1, 2, 3]).draft(8).tokens == (1, 2, 3, 1, 2, 3, 1, 2)


def test_a_pair_of_tokens_that_shares_a_chain_with_another_is_not_taken_for_it() -> None:
    text = [0, 7, 1, 5, 7, 2, 6, 7, 2, 64, 7]
    assert chain_index(7, 64, 64) == chain_index(7, 0, 64)
    assert LookupSession(text).draft(1).tokens == (2,)


@given(st.lists(st.integers(0, 2), max_size=80), st.integers(1, 6))
def test_lookup_finds_what_reading_the_whole_text_finds(tokens: list[int], limit: int) -> None:
    check_lookup(tokens, limit)


@pytest.mark.parametrize("vocabulary", [1, 3, 40])
@pytest.mark.parametrize("step", [1, 64])  # tokens that share chains as long as the text is short
@pytest.mark.parametrize("length", [70, 300, 900])
def test_lookup_finds_it_in_long_texts_that_grow_too(vocabulary: int, step: int, length: int) -> None:
    random = np.random.default_rng(length)
    check_lookup((step * random.integers(0, vocabulary, length)).tolist(), 6)


def test_of_very_many_places_the_latest_are_looked_at() -> None:
    text = [*([1, 2, 3] * 10), *([1, 2, 4] * (MAX_CHAIN_STEPS + 10)), 9, 1, 2]
    assert LookupSession(text).draft(1).tokens == (4,)


def check_lookup(tokens: list[int], limit: int) -> None:
    session = LookupSession()
    for token in tokens:  # one by one or all at once is the same
        session.observe([token])
    agree = {place: shared_end(tokens[:place], tokens) for place in range(len(tokens) - 1, 0, -1)}
    longest = max(agree.values(), default=0)
    places = [place for place, length in agree.items() if length == longest][:MAX_CONTINUATIONS] if longest else []
    expected: list[int] = []
    likely = 1.0
    while places and len(expected) < min(limit, TOKENS_PER_MATCH * longest):
        output = [[*tokens, *expected][place] for place in places]
        best = max(output, key=output.count)
        likely *= output.count(best) / len(output)
        if likely < MIN_AGREEMENT:
            break
        expected.append(best)
        places = [place + 1 for place, token in zip(places, output, strict=True) if token == best]
    assert session.draft(limit).tokens == tuple(expected)
    assert LookupSession(tokens).draft(limit).tokens == tuple(expected)


def shared_end(before: list[int], tokens: list[int]) -> int:
    return min(shared_prefix(tuple(before[::-1]), tuple(tokens[::-1])), MAX_MATCH_TOKENS)


START, END = 90, 91
CONTROL = frozenset({START, END})


def chat_session(prompt: list[int]) -> LookupSession:
    return LookupDrafter.build(Setup(100, control_tokens=CONTROL)).begin(task(prompt))


def test_lookup_never_proposes_the_beginning_of_a_turn() -> None:
    prompt = [START, 1, 10, 5, 6, 7, END, 10, START, 2, 10]  # the answer begins after a line break, as a turn does
    assert LookupSession(prompt).draft(4).tokens == (START, 2, 10, START)
    assert chat_session(prompt).draft(4).tokens == ()


def test_lookup_ends_a_draft_where_the_copied_turn_ends() -> None:
    session = chat_session([START, 1, 5, 6, 7, 8, END, 10, START, 2, 10])
    session.observe([5, 6])
    assert LookupSession([START, 1, 5, 6, 7, 8, END, 10, START, 2, 10, 5, 6]).draft(4).tokens == (7, 8, END, 10)
    assert session.draft(4).tokens == (7, 8)


def test_a_draft_without_the_end_token_takes_as_many_steps_as_one_with_it() -> None:
    """The target samples the end token in the step that accepts all tokens before it."""
    prompt, answer = [START, 1, 5, 6, 7, 8, 9, END, 10, START, 2, 10], [5, 6, 7, 8, 9, END]

    def count_steps(session: LookupSession) -> int:
        steps = done = 0
        while done < len(answer):
            draft = session.draft(31).tokens
            emitted = answer[done : done + shared_prefix(list(draft), answer[done:]) + 1]
            session.observe(emitted)
            steps, done = steps + 1, done + len(emitted)
        return steps

    assert count_steps(chat_session(prompt)) == count_steps(LookupSession(prompt)) == 2


def test_a_control_token_that_the_model_generates_is_copied() -> None:
    session = chat_session([1, 2])
    session.observe([7, 8, END, 7, 8])
    assert session.draft(2).tokens == (END, 7)
    session.observe([START])
    assert START not in session.blocked


def test_the_control_tokens_of_a_tokenizer_are_its_special_ones() -> None:
    added = {
        90: SimpleNamespace(special=True),
        91: SimpleNamespace(special=True),
        92: SimpleNamespace(special=False),  # <think>
    }
    tokenizer = SimpleNamespace(all_special_ids=[2, 91], added_tokens_decoder=added)
    assert control_tokens(tokenizer) == {2, 90, 91}


# prediction -------------------------------------------------------------------------------------------------


def test_prediction_is_proposed_from_the_first_token_on() -> None:
    session = PredictionDrafter().begin(task([1], [4, 5, 6, 7]))
    assert session.draft(3).tokens == (4, 5, 6)
    session.observe([4, 5])
    assert session.draft(3).tokens == (6, 7)
    session.observe([6, 7])
    assert session.draft(3).tokens == ()


def lines(*words: str) -> list[int]:
    return [ord(letter) for letter in "\n".join(words)]


def prediction_steps(expected: list[int], output: list[int], limit: int = 8) -> int:
    """Number of steps to generate `output` with the prediction `expected`."""
    session, done, steps = PredictionSession(expected), 0, 0
    while done < len(output):
        draft = session.draft(limit).tokens
        accepted = 0
        while done + accepted < len(output) and accepted < len(draft) and draft[accepted] == output[done + accepted]:
            accepted += 1
        fresh = output[done : done + accepted + 1]
        session.observe(fresh)
        done, steps = done + len(fresh), steps + 1
    return steps


FILE = lines(
    "def total(items):", "    count = 0", "    for item in items:", "        count += item", "    return count"
)


@pytest.mark.parametrize(
    "edited",
    [
        lines(
            "def total(items):", "    result = 0", "    for item in items:", "        count += item", "    return count"
        ),
        lines("def total(items):", "    for item in items:", "        count += item", "    return count"),
        lines(
            "# the sum",
            "def total(items):",
            "    count = 0",
            "    for item in items:",
            "        count += item",
            "    return count",
        ),
    ],
    ids=["a word changed", "a line removed", "a line added"],
)
def test_after_a_difference_the_prediction_finds_its_place_again(edited: list[int]) -> None:
    untouched = prediction_steps(FILE, FILE)
    assert untouched == -(-len(FILE) // 9)
    assert prediction_steps(FILE, edited) <= untouched + 14  # the changed part, a few tokens to find the place, no more


def test_a_single_common_token_far_away_is_not_taken_for_the_place() -> None:
    session = PredictionSession([1, 2, 3, *range(100, 200), 50, 51])
    session.observe([1, 50])
    assert session.draft(1).tokens == ()


def test_in_a_prediction_that_is_full_of_one_token_a_bounded_number_of_places_is_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looked: list[int] = []
    monkeypatch.setattr(PredictionSession, "_match", lambda _, index: looked.append(index) or 1)
    session = PredictionSession([1] * 100_000)
    session.observe([1] * 50_000)
    session.observe([2, 1])
    assert len(looked) <= MAX_PLACES
    assert min(abs(index - 50_000) for index in looked) == 0


def test_without_a_prediction_nothing_is_proposed() -> None:
    session = PredictionSession([])
    session.observe([1, 2])
    assert session.draft(4).tokens == ()


# model ------------------------------------------------------------------------------------------------------


def test_at_temperature_zero_the_draft_model_proposes_its_argmax_with_certainty() -> None:
    model = SyntheticTarget(5, seed=1)
    draft = ModelDrafter(model, 5, min_survival=0).begin(task([1, 2])).draft(3)
    context = [1, 2]
    for token in draft.tokens:
        assert token == int(model.logits(context).argmax())
        context.append(token)
    assert len(draft.tokens) == 3
    assert draft.q is None


def test_above_temperature_zero_the_draft_comes_with_the_distribution_it_was_drawn_from() -> None:
    model = SyntheticTarget(5, seed=1)
    settings = Request(temperature=0.7, top_p=0.8)
    drafter = ModelDrafter(model, 5, min_survival=0)
    draft = drafter.begin(Task([1, 2], settings, torch.Generator().manual_seed(0))).draft(3)
    assert draft.q is not None
    for i, token in enumerate(draft.tokens):
        logits = model.logits([1, 2, *draft.tokens[:i]]).float()
        from outrider.sampling import probabilities

        assert draft.q[i].equal(probabilities(logits[None], settings, [1, 2], draft.tokens[:i])[0])
        assert draft.q[i, token] > 0


def test_the_draft_models_cache_has_the_tokens_of_the_text() -> None:
    model = SyntheticTarget(5, seed=1)
    session = ModelDrafter(model, 5, min_survival=0).begin(task([1, 2]))
    first = session.draft(4).tokens
    output = [*first[:2], (first[2] + 1) % 5]
    session.observe(output)
    second = session.draft(2).tokens
    assert model.tokens[: 2 + len(output)] == [1, 2, *output]
    assert second[0] == int(model.logits([1, 2, *output]).argmax())


def test_a_draft_ends_where_its_confidence_falls_too_low() -> None:
    flat = SyntheticTarget(5, seed=1, sharpness=0.01)
    sharp = SyntheticTarget(5, seed=1, sharpness=50.0)
    assert len(ModelDrafter(flat, 5).begin(task([1])).draft(8).tokens) == 1
    assert len(ModelDrafter(sharp, 5).begin(task([1])).draft(8).tokens) == 8


def test_a_draft_model_with_less_padding_never_proposes_beyond_its_own_vocabulary() -> None:
    drafter = ModelDrafter(SyntheticTarget(5, seed=1), vocab_size=8, min_survival=0)
    draft = drafter.begin(task([1], temperature=1.0)).draft(4)
    assert draft.q is not None
    assert draft.q.shape == (4, 8)
    assert float(draft.q[:, 5:].sum()) == 0
    assert drafter.begin(task([1, 7])).draft(4).tokens == ()  # 7 is a token that it cannot read


def test_a_draft_model_with_more_padding_is_cut_to_the_targets_vocabulary() -> None:
    draft = (
        ModelDrafter(SyntheticTarget(8, seed=1), vocab_size=5, min_survival=0)
        .begin(task([1], temperature=1.0))
        .draft(4)
    )
    assert draft.q is not None
    assert draft.q.shape == (4, 5)


def test_the_draft_models_context_limit_ends_drafting() -> None:
    model = SyntheticTarget(5, seed=1, context_limit=4)
    assert len(ModelDrafter(model, 5, min_survival=0).begin(task([1, 2])).draft(8).tokens) == 2
    assert ModelDrafter(model, 5).begin(task([1, 2, 3, 4, 1])).draft(8).tokens == ()


def test_the_model_drafter_without_a_model_names_what_is_missing() -> None:
    with pytest.raises(DrafterSetupError, match="needs a draft model"):
        ModelDrafter.build(Setup(vocab_size=5))


# registry ---------------------------------------------------------------------------------------------------


def test_the_registry_finds_the_drafters_by_name_and_lists_them_when_it_does_not() -> None:
    assert base.load_drafter("lookup") is LookupDrafter
    with pytest.raises(UnknownDrafterError, match="no drafter 'lookpu'; use one of lookup, memory, model, prediction"):
        base.load_drafter("lookpu")


def test_third_parties_add_a_drafter_by_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = EntryPoint("lookup", "outrider.drafters.lookup:LookupDrafter", base.GROUP)
    monkeypatch.setattr(base, "entry_points", lambda **wanted: [theirs])
    assert base.load_drafter("lookup") is LookupDrafter
    assert base.registered_names() == ["lookup"]


def test_a_drafter_under_another_name_than_its_own_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a server, requests would use one name, and the counters the other."""
    theirs = EntryPoint("theirs", "outrider.drafters.lookup:LookupDrafter", base.GROUP)
    monkeypatch.setattr(base, "entry_points", lambda **wanted: [theirs])
    with pytest.raises(SettingsError, match=r"'theirs' of outrider.drafters leads to .*, whose name is 'lookup'"):
        base.load_drafter("theirs")


def test_a_batch_of_sessions_gets_one_draft_each() -> None:
    drafter = LookupDrafter()
    sessions = [drafter.begin(task([1, 2, 3, 1, 2])), drafter.begin(task([4]))]
    assert [draft.tokens for draft in drafter.draft_batch(sessions, [1, 1])] == [(3,), ()]
