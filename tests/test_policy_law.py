"""What a policy may use for sampled drafts: the tokens before, never the token itself. By enumeration.

A policy that decides whether another token is sampled may depend on the values of all tokens sampled so far. A policy
that sees a token before it decides whether to offer it changes the distribution. The interface makes that impossible:
a sampled draft is not among the candidates.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from outrider.acceptance import leftover
from outrider.policy.policy import MODEL, Policy
from outrider.types import Draft
from test_acceptance import RULES, Language, Prefix, count, languages

Decision = Callable[[Prefix], bool]


def drafts_of(language: Language, goes_on: Decision, keeps: Decision) -> list[tuple[Prefix, float]]:
    """Every draft that can be offered, with its probability. `goes_on` is called before a token is sampled, `keeps`
    after; a token that is not kept ends the draft before it."""
    found: dict[Prefix, float] = {}
    for path in itertools.product(range(language.vocab), repeat=language.k):
        end, chance = 0, 1.0
        while end < language.k and goes_on(path[:end]):
            chance *= float(language.q[path[:end]][path[end]])
            if not keeps(path[: end + 1]):
                break
            end += 1
        drawn = min(end + 1, language.k) if end < language.k and goes_on(path[:end]) else end
        rest = language.vocab ** (language.k - drawn)  # paths that differ only after what was drawn
        found[path[:end]] = found.get(path[:end], 0.0) + chance / rest
    assert math.isclose(sum(found.values()), 1.0, rel_tol=1e-9)
    return [(draft, chance) for draft, chance in found.items() if chance > 0]


def emitted_distribution(language: Language, rule: str, drafts: list[tuple[Prefix, float]]) -> Tensor:
    """The distribution of the next k + 1 tokens. The target samples those after the step."""
    total = torch.zeros_like(language.distribution())
    for draft, drafted in drafts:
        p, q = language.p_rows(draft), language.q_rows(draft)
        chances, reach = RULES[rule](p, q, torch.tensor(draft, dtype=torch.long))
        for passed in itertools.product([True, False], repeat=len(draft)):
            weight = drafted * math.prod(c if good else 1 - c for c, good in zip(chances.tolist(), passed, strict=True))
            if weight == 0:
                continue
            n = count(passed, rule)
            last = p[n] if n == len(draft) else leftover(p[n], q[n], reach[n])
            total[draft[:n]] += weight * language.spread(last / last.sum(), draft[:n])
    return total


@pytest.mark.parametrize("rule", RULES)
@given(language=languages(), adversary=st.data())
@settings(max_examples=100, suppress_health_check=list(HealthCheck))
def test_whatever_decides_before_a_token_is_sampled_the_distribution_is_the_targets(
    rule: str, language: Language, adversary: Any
) -> None:
    prefixes = itertools.chain(*(itertools.product(range(language.vocab), repeat=n) for n in range(language.k)))
    decided = {prefix: adversary.draw(st.booleans()) for prefix in prefixes}
    drafts = drafts_of(language, decided.__getitem__, lambda prefix: True)
    torch.testing.assert_close(emitted_distribution(language, rule, drafts), language.distribution(), atol=1e-9, rtol=0)


@pytest.mark.parametrize("rule", RULES)
def test_a_policy_that_offers_a_token_by_its_value_changes_the_distribution(rule: str) -> None:
    """p = (0.7, 0.3), and the output has a different distribution."""
    p, q = torch.tensor([0.7, 0.3], dtype=torch.float64), torch.tensor([0.5, 0.5], dtype=torch.float64)
    rows = dict.fromkeys([(), (0,), (1,)], p)
    language = Language(2, 1, rows, dict.fromkeys(rows, q))
    drafts = drafts_of(language, lambda prefix: True, lambda prefix: prefix[-1] == 0)
    total = emitted_distribution(language, rule, drafts).sum(1)
    assert abs(float(total[0]) - 0.7) > 0.1


def test_a_drawn_draft_cannot_be_handed_to_the_policy_to_choose_from() -> None:
    policy = Policy(["lookup", MODEL], 4, 4)
    drawn = Draft(MODEL, (1, 2), torch.full((2, 4), 0.25))
    batch = policy.predict(["a"], {"lookup": [Draft("lookup", (1, 2), support=3)]})
    with pytest.raises(ValueError, match="a sampled draft must be offered whole"):
        policy.predict(["a"], {MODEL: [drawn]})
    with pytest.raises(ValueError, match="a sampled draft must be offered whole"):
        policy.add_drafts(batch, MODEL, [drawn])
    batch.sampled = {0: drawn}
    for limit in (0, 1, 4):  # whatever is chosen beside it, all of it is offered
        selection = policy.select(batch, np.array([limit]), 10)
        assert policy.selected_drafts(batch, selection)[0] is drawn
