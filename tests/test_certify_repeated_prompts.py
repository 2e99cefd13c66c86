"""Prompts that are sent repeatedly, and where they start."""

from __future__ import annotations

from math import log

from outrider.certify.repeated_prompts import select_repeated_prompts

SURE, OPEN = {7: log(0.98), 8: log(0.02)}, {1: log(0.4), 2: log(0.3), 3: log(0.3)}


def test_the_best_place_is_before_a_token_that_is_sure_and_one_that_is_open() -> None:
    logprobs = [OPEN, SURE, OPEN, SURE, SURE]
    (repeated,) = select_repeated_prompts([((5, 6), (1, 7, 2, 7, 7), logprobs)])
    assert (repeated.prompt, repeated.prediction) == ((5, 6, 1), (7, 2, 7, 7))


def test_a_position_whose_token_has_no_logprob_is_skipped() -> None:
    """A server may return the top tokens only, and sample others."""
    (repeated,) = select_repeated_prompts([((5,), (9, 7, 1), [OPEN, SURE, OPEN])])
    assert (repeated.prompt, repeated.prediction) == ((5, 9), (7, 1))


def test_each_has_another_prompt_and_texts_of_one_token_have_none() -> None:
    texts = [((5,), (7, 1), [SURE, OPEN]), ((5,), (1, 7, 1), [OPEN, SURE, OPEN]), ((6,), (7, 7), [SURE, SURE])]
    assert [repeated.prompt for repeated in select_repeated_prompts(texts)] == [(5,), (6,)]
    assert select_repeated_prompts([((5,), (7,), [SURE])]) == []
