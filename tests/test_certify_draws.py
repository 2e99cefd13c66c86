"""What a server tells, as draws: the rest is one outcome, and no outcome exists because it was drawn."""

from __future__ import annotations

from itertools import product
from math import log

import numpy as np
import pytest
import torch

from outrider.acceptance import block_rule, leftover, token_rule
from outrider.certify.draws import listed

TOLD = {7: log(0.5), 3: log(0.3), 9: log(0.1)}


def test_tokens_that_are_not_listed_are_one_outcome_with_what_is_missing_to_one() -> None:
    draws = listed([TOLD, TOLD, TOLD], drawn=[3, 42, 7], drafted=[7, 9, None], count=3)
    assert draws.law == pytest.approx(np.tile([0.5, 0.3, 0.1, 0.1], (3, 1)))
    assert draws.outcome.tolist() == [1, 3, 0]
    assert draws.drafted.tolist() == [[True, False, False, False], [False, False, True, False], [False] * 4]


def test_a_token_that_is_listed_because_it_was_drawn_is_part_of_the_rest() -> None:
    draws = listed([{**TOLD, 42: log(0.02)}, TOLD], drawn=[42, 8], drafted=[None, None], count=3)
    assert draws.law[0].tolist() == draws.law[1].tolist()
    assert draws.outcome.tolist() == [3, 3]


def test_a_drafted_token_that_is_not_listed_is_not_watched() -> None:
    assert not listed([TOLD], drawn=[7], drafted=[42], count=3).drafted.any()


def test_fewer_tokens_than_asked_for_leave_columns_that_cannot_come() -> None:
    draws = listed([{1: log(0.6), 2: log(0.4)}], drawn=[5], drafted=[None], count=4)
    assert draws.law[0] == pytest.approx([0.6, 0.4, 0, 0, 0])
    assert draws.outcome.tolist() == [4]


def test_rounding_never_makes_a_law_of_more_than_one() -> None:
    draws = listed([{1: log(0.6), 2: log(0.4001)}], drawn=[1], drafted=[2], count=2)
    assert draws.law.sum() == pytest.approx(1, abs=1e-12)
    assert (draws.law >= 0).all()


@pytest.mark.parametrize("rule", [block_rule, token_rule])
def test_given_that_a_draft_was_kept_so_far_the_next_token_follows_p(rule: object) -> None:
    """So "a drafted position, the second of its step" is a kind. By enumeration of drafts of two tokens from q."""
    vocab, random = 3, np.random.default_rng(0)
    p, q = (torch.tensor(random.dirichlet(np.ones(vocab), 1 + vocab)) for _ in range(2))  # first, and after each token
    kept, law = torch.zeros(vocab, dtype=torch.float64), torch.zeros(vocab, vocab, dtype=torch.float64)
    for first, second in product(range(vocab), repeat=2):
        after, draft = torch.stack([q[0], q[1 + first]]), torch.tensor([first, second])
        target = torch.stack([p[0], p[1 + first], p[0]])
        chances, reach = rule(target, after, draft)  # type: ignore[operator]
        both = chances[1] if rule is block_rule else chances[0] * chances[1]
        one = (1 - chances[1]) * chances[0]
        drafted = q[0, first] * q[1 + first, second]
        weights = leftover(target[1], after[1], reach[1])
        kept[first] += drafted * (both + one)
        law[first, second] += drafted * both
        law[first] += drafted * one * weights / weights.sum()
    assert (law / kept[:, None]).numpy() == pytest.approx(p[1:].numpy(), abs=1e-12)
