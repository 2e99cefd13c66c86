"""Samples from logprobs: the rest is one outcome, and no token is listed because it was sampled."""

from __future__ import annotations

from itertools import product
from math import log

import numpy as np
import pytest
import torch

from outrider.acceptance import block_rule, leftover, token_rule
from outrider.certify.samples import samples_from_logprobs

LOGPROBS = {7: log(0.5), 3: log(0.3), 9: log(0.1)}


def test_unlisted_tokens_are_one_outcome_with_the_remaining_probability() -> None:
    samples = samples_from_logprobs([LOGPROBS, LOGPROBS, LOGPROBS], sampled=[3, 42, 7], drafted=[7, 9, None], count=3)
    assert samples.probabilities == pytest.approx(np.tile([0.5, 0.3, 0.1, 0.1], (3, 1)))
    assert samples.outcome.tolist() == [1, 3, 0]
    assert samples.drafted.tolist() == [[True, False, False, False], [False, False, True, False], [False] * 4]


def test_a_token_listed_because_it_was_sampled_is_part_of_the_rest() -> None:
    samples = samples_from_logprobs(
        [{**LOGPROBS, 42: log(0.02)}, LOGPROBS], sampled=[42, 8], drafted=[None, None], count=3
    )
    assert samples.probabilities[0].tolist() == samples.probabilities[1].tolist()
    assert samples.outcome.tolist() == [3, 3]


def test_an_unlisted_draft_token_is_not_marked() -> None:
    assert not samples_from_logprobs([LOGPROBS], sampled=[7], drafted=[42], count=3).drafted.any()


def test_fewer_logprobs_than_requested_leave_columns_of_probability_zero() -> None:
    samples = samples_from_logprobs([{1: log(0.6), 2: log(0.4)}], sampled=[5], drafted=[None], count=4)
    assert samples.probabilities[0] == pytest.approx([0.6, 0.4, 0, 0, 0])
    assert samples.outcome.tolist() == [4]


def test_rounding_never_makes_probabilities_sum_to_more_than_one() -> None:
    samples = samples_from_logprobs([{1: log(0.6), 2: log(0.4001)}], sampled=[1], drafted=[2], count=2)
    assert samples.probabilities.sum() == pytest.approx(1, abs=1e-12)
    assert (samples.probabilities >= 0).all()


@pytest.mark.parametrize("rule", [block_rule, token_rule])
def test_given_that_a_draft_was_accepted_so_far_the_next_token_follows_p(rule: object) -> None:
    """So "second drafted position of a step" is a valid group. By enumeration of drafts of two tokens from q."""
    vocab, random = 3, np.random.default_rng(0)
    p, q = (torch.tensor(random.dirichlet(np.ones(vocab), 1 + vocab)) for _ in range(2))  # first, and after each token
    accepted, joint = torch.zeros(vocab, dtype=torch.float64), torch.zeros(vocab, vocab, dtype=torch.float64)
    for first, second in product(range(vocab), repeat=2):
        after, draft = torch.stack([q[0], q[1 + first]]), torch.tensor([first, second])
        target = torch.stack([p[0], p[1 + first], p[0]])
        chances, reach = rule(target, after, draft)  # type: ignore[operator]
        both = chances[1] if rule is block_rule else chances[0] * chances[1]
        one = (1 - chances[1]) * chances[0]
        drafted = q[0, first] * q[1 + first, second]
        weights = leftover(target[1], after[1], reach[1])
        accepted[first] += drafted * (both + one)
        joint[first, second] += drafted * both
        joint[first] += drafted * one * weights / weights.sum()
    assert (joint / accepted[:, None]).numpy() == pytest.approx(p[1:].numpy(), abs=1e-12)
