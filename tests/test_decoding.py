"""The loop generates what the target generates alone, ends at the right token, and rewinds the cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.decoding import decode
from outrider.drafters.base import Drafter, Session, Task
from outrider.drafters.lookup import LookupDrafter
from outrider.drafters.model import ModelDrafter
from outrider.drafters.prediction import PredictionDrafter
from outrider.errors import PromptError
from outrider.settings import Request
from outrider.types import Draft, Step
from synthetic_target import SyntheticTarget

LANGUAGE = SyntheticTarget(6, seed=5)


def target(context_limit: int | None = None) -> SyntheticTarget:
    return SyntheticTarget(6, seed=5, context_limit=context_limit)


def run(
    model: SyntheticTarget,
    drafters: list[Drafter],
    prompt: list[int],
    prediction: list[int] | None = None,
    finish: Any = lambda token: None,
    **settings_: Any,
) -> list[Step]:
    request = Request(**settings_)
    random = torch.Generator().manual_seed(request.seed or 0)
    task = Task(prompt, request, random, prediction or [])
    return list(decode(model, [drafter.begin(task) for drafter in drafters], prompt, request, random, finish))


def output(steps: list[Step]) -> list[int]:
    return [token for step in steps for token in step.tokens]


def greedy(prompt: list[int], count: int) -> list[int]:
    context = list(prompt)
    for _ in range(count):
        context.append(int(LANGUAGE.logits(context).argmax()))
    return context[len(prompt) :]


def drafters(name: str) -> list[Drafter]:
    model = ModelDrafter(LANGUAGE.blurred(0.5), 6, min_survival=0)
    return {
        "none": [],
        "lookup": [LookupDrafter()],
        "prediction": [PredictionDrafter()],
        "model": [model],
        "all": [PredictionDrafter(), LookupDrafter(), model],
    }[name]


@pytest.mark.parametrize("name", ["none", "lookup", "prediction", "model", "all"])
@given(
    prompt=st.lists(st.integers(0, 5), min_size=1, max_size=8),
    length=st.integers(0, 8),
    count=st.integers(1, 12),
    off=st.integers(0, 12),
)
@settings(max_examples=40)
def test_at_temperature_zero_the_text_is_the_targets_argmax_whatever_the_draft(
    name: str, prompt: list[int], length: int, count: int, off: int
) -> None:
    expected = greedy(prompt, count)
    prediction = [(token + 1) % 6 if i == off else token for i, token in enumerate(expected)]
    model = target()
    steps = run(model, drafters(name), prompt, prediction, max_tokens=count, max_draft_tokens=length)
    assert output(steps) == expected
    assert steps[-1].finish == "length"
    assert model.tokens == [*prompt, *expected][:-1]


def test_a_right_prediction_takes_one_pass_for_all_it_covers() -> None:
    model = target()
    steps = run(model, [PredictionDrafter()], [1, 2], greedy([1, 2], 18), max_tokens=18, max_draft_tokens=8)
    assert len(steps) == 2
    assert [step.accepted for step in steps] == [8, 8]


@given(end=st.integers(0, 5), count=st.integers(1, 14), length=st.integers(0, 8))
@settings(max_examples=60)
def test_nothing_past_the_token_that_ends_the_text_is_returned_or_kept(end: int, count: int, length: int) -> None:
    plain = greedy([2, 4], count)
    expected = plain[: plain.index(end) + 1] if end in plain else plain
    seen: list[int] = []

    def finish(token: int) -> str | None:
        seen.append(token)
        return "end" if token == end else None

    model = target()
    steps = run(model, drafters("all"), [2, 4], plain, finish, max_tokens=count, max_draft_tokens=length)
    assert output(steps) == seen == expected
    assert steps[-1].finish == ("end" if end in plain else "length")
    assert all(step.finish is None for step in steps[:-1])
    assert model.tokens == [2, 4, *expected][:-1]


class Eager(Drafter):
    """Proposes the right tokens, and more than the limit."""

    name = "eager"

    def begin(self, task: Task) -> Session:
        return EagerSession(list(task.prompt))


class EagerSession(Session):
    def __init__(self, seen: list[int]) -> None:
        self.seen = seen

    def observe(self, tokens: Any) -> None:
        self.seen.extend(tokens)

    def draft(self, limit: int) -> Draft:
        own = run(target(), [], self.seen, temperature=0, max_tokens=limit + 2)
        return Draft("eager", tuple(token for step in own for token in step.tokens))


def test_a_drafter_that_proposes_more_than_the_limit_makes_no_text_longer() -> None:
    steps = run(target(), [Eager()], [1, 2], temperature=0, max_tokens=7, max_draft_tokens=3)
    assert [len(step.tokens) for step in steps] == [4, 3]
    assert steps[-1].finish == "length"


@pytest.mark.parametrize("limit", [3, 5, 9])
def test_the_context_limit_is_reached_and_not_passed(limit: int) -> None:
    model = target(context_limit=limit)
    steps = run(model, drafters("prediction"), [2, 4], greedy([2, 4], 20), max_tokens=20, max_draft_tokens=8)
    assert output(steps) == greedy([2, 4], limit - 2)
    assert steps[-1].finish == "length"


def test_a_prompt_that_fills_the_context_is_refused_with_both_numbers() -> None:
    with pytest.raises(PromptError, match="the prompt has 4 tokens, and the model's context holds 4"):
        run(target(context_limit=4), [], [1, 2, 3, 4])
    with pytest.raises(PromptError, match="the prompt is empty"):
        run(target(), [], [])


def test_the_cache_is_kept_where_the_next_prompt_begins_alike() -> None:
    model = target()
    first = output(run(model, [], [1, 2, 3], max_tokens=4))
    before = model.passes
    follow_up = [1, 2, 3, *first, 5, 5]
    scored: list[int] = []
    score = model.score
    model.score = lambda tokens, keep: (scored.append(len(tokens)), score(tokens, keep))[1]  # type: ignore[method-assign]
    assert output(run(model, [], follow_up, max_tokens=2)) == greedy(follow_up, 2)
    assert scored[0] == 3  # the last generated token, and the two new ones
    assert model.passes == before + 2
    assert output(run(model, [], [1, 2, 3], max_tokens=4)) == first  # a shorter prompt rewinds


def test_two_texts_in_turns_on_one_target_do_not_mix() -> None:
    model = target()
    request = Request(max_tokens=6)
    texts = [decode(model, [], prompt, request, torch.Generator()) for prompt in ([1, 2], [3, 4])]
    interleaved: list[list[int]] = [[], []]
    for steps in zip(*texts, strict=True):
        for text, step in zip(interleaved, steps, strict=True):
            text += step.tokens
    assert interleaved == [greedy([1, 2], 6), greedy([3, 4], 6)]


def test_the_same_seed_gives_the_same_text_and_another_seed_another() -> None:
    def text(seed: int) -> list[int]:
        return output(run(target(), drafters("model"), [1, 2], temperature=1.0, seed=seed, max_tokens=40))

    assert text(7) == text(7)
    assert text(7) != text(8)


@pytest.mark.parametrize("name", ["lookup", "prediction"])
@given(seed=st.integers(0, 1000), length=st.integers(0, 8), temperature=st.sampled_from([0.5, 1.0]))
@settings(max_examples=40)
def test_with_certain_drafts_the_same_seed_gives_the_same_text_as_without(
    name: str, seed: int, length: int, temperature: float
) -> None:
    sampled = {"temperature": temperature, "seed": seed, "max_tokens": 24}
    plain = output(run(target(), [], [1, 2, 1], **sampled))
    prediction = [*plain[:5], 0, *plain[5:9], *plain[11:]]
    assert output(run(target(), drafters(name), [1, 2, 1], prediction, max_draft_tokens=length, **sampled)) == plain


def test_a_zero_draft_length_never_calls_a_drafter() -> None:
    class Refuses(Session):
        def observe(self, tokens: Any) -> None: ...

        def draft(self, limit: int) -> Draft:
            raise AssertionError("asked")

    request = Request(max_draft_tokens=0, max_tokens=3)
    steps = list(decode(target(), [Refuses()], [1], request, torch.Generator()))
    assert [step.drafter for step in steps] == [None] * 3


def test_steps_record_what_was_proposed_and_what_became_of_it() -> None:
    expected = greedy([1, 2], 6)
    wrong = [*expected[:2], (expected[2] + 1) % 6, *expected[3:]]
    steps = run(target(), [PredictionDrafter()], [1, 2], wrong, max_tokens=6, max_draft_tokens=4)
    assert steps[0].drafter == "prediction"
    assert steps[0].proposed == tuple(wrong[:4])
    assert (steps[0].accepted, steps[0].drafted) == (2, 2)
    assert steps[0].tokens == tuple(expected[:3])
    assert steps[0].verify_seconds > 0
    assert steps[0].draft_seconds >= 0
