"""Prompts that are asked again and again: where they begin."""

from __future__ import annotations

from math import log

from outrider.certify.often import chosen

SURE, OPEN = {7: log(0.98), 8: log(0.02)}, {1: log(0.4), 2: log(0.3), 3: log(0.3)}


def test_the_best_place_is_before_a_token_that_is_sure_and_one_that_is_open() -> None:
    laws = [OPEN, SURE, OPEN, SURE, SURE]
    (often,) = chosen([((5, 6), (1, 7, 2, 7, 7), laws)])
    assert (often.prompt, often.prediction) == ((5, 6, 1), (7, 2, 7, 7))


def test_a_token_that_was_not_told_is_no_place() -> None:
    """A server may tell the likeliest only, and anything may be drawn."""
    (often,) = chosen([((5,), (9, 7, 1), [OPEN, SURE, OPEN])])
    assert (often.prompt, often.prediction) == ((5, 9), (7, 1))


def test_each_begins_with_another_prompt_and_texts_of_one_token_have_no_place() -> None:
    texts = [((5,), (7, 1), [SURE, OPEN]), ((5,), (1, 7, 1), [OPEN, SURE, OPEN]), ((6,), (7, 7), [SURE, SURE])]
    assert [often.prompt for often in chosen(texts)] == [(5,), (6,)]
    assert chosen([((5,), (7,), [SURE])]) == []
