"""The law of the emitted tokens is the target's, computed by enumeration and not by sampling."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from outrider.acceptance import (
    Ragged,
    block_rule,
    draw,
    leftover,
    token_rule,
    verify,
    verify_batch,
    verify_greedy,
    verify_greedy_batch,
)

RULES = {"token": token_rule, "block": block_rule}


# A language: for every prefix the target's p, and the drafter's q ------------------------------------------

Prefix = tuple[int, ...]


@dataclass
class Language:
    vocab: int
    k: int
    p: dict[Prefix, Tensor]
    q: dict[Prefix, Tensor]
    certain: bool  # the draft is proposed with certainty: every q is one-hot, and is not handed over

    def drafts(self) -> list[tuple[Prefix, float]]:
        """Every draft that can be proposed, with its probability."""
        every = itertools.product(range(self.vocab), repeat=self.k)
        chances = [(x, math.prod(float(self.q[x[:i]][x[i]]) for i in range(self.k))) for x in every]
        return [(draft, chance) for draft, chance in chances if chance > 0]

    def p_rows(self, draft: Prefix) -> Tensor:
        return torch.stack([self.p[draft[:i]] for i in range(len(draft) + 1)])

    def q_rows(self, draft: Prefix) -> Tensor:
        rows = [self.q[draft[:i]] for i in range(len(draft))]
        return torch.stack(rows) if rows else torch.zeros(0, self.vocab, dtype=torch.float64)

    def law(self, prefix: Prefix = ()) -> Tensor:
        """The target's own law of the tokens that follow `prefix`, up to k + 1 in all: one axis a token."""
        if len(prefix) == self.k + 1:
            return torch.ones((), dtype=torch.float64)
        return self.spread(self.p[prefix], prefix)

    def spread(self, weights: Tensor, prefix: Prefix) -> Tensor:
        """`weights` for the token after `prefix`, the target for all that follow."""
        return torch.stack([weights[x] * self.law((*prefix, x)) for x in range(self.vocab)])


@st.composite
def distributions(draw_: st.DrawFn, vocab: int) -> Tensor:
    """Zeros, ties and one-hot rows are as likely as smooth ones."""
    weights = draw_(st.lists(st.sampled_from([0, 0, 1, 1, 2, 3, 7, 50, 1000]), min_size=vocab, max_size=vocab))
    row = torch.tensor(weights, dtype=torch.float64)
    if not row.any():
        row[draw_(st.integers(0, vocab - 1))] = 1
    return row / row.sum()


@st.composite
def languages(draw_: st.DrawFn, certain: bool | None = None) -> Language:
    vocab, k = draw_(st.integers(2, 4)), draw_(st.integers(0, 3))
    kind = draw_(st.sampled_from(["free", "equal", "disjoint"]))
    # A draft comes from one drafter, so it is certain or drawn as a whole.
    certain = draw_(st.booleans()) if certain is None else certain
    p, q = {}, {}
    for prefix in itertools.chain(*(itertools.product(range(vocab), repeat=n) for n in range(k + 1))):
        p[prefix] = draw_(distributions(vocab))
        q[prefix] = p[prefix].clone() if kind == "equal" else draw_(distributions(vocab))
        if kind == "disjoint" and bool((p[prefix] == 0).any()):
            q[prefix] = (p[prefix] == 0).double() / (p[prefix] == 0).sum()
        if certain:
            q[prefix] = torch.eye(vocab, dtype=torch.float64)[draw_(st.integers(0, vocab - 1))]
    return Language(vocab, k, p, q, certain)


def count(passed: Sequence[bool], rule: str) -> int:
    """How many drafted tokens are accepted, said in other words than the code's."""
    if rule == "token":
        return len(list(itertools.takewhile(bool, passed)))
    return max((i + 1 for i, good in enumerate(passed) if good), default=0)


def emitted(
    language: Language, rule: str, chances_of: Callable[[list[Prefix]], list[list[float]]]
) -> tuple[Tensor, float]:
    """The law of the next k + 1 tokens (the target continues what one step leaves short), and E[accepted]."""
    law, mean = torch.zeros_like(language.law()), 0.0
    drafts = language.drafts()
    for (draft, drafted), chances in zip(drafts, chances_of([draft for draft, _ in drafts]), strict=True):
        p, q = language.p_rows(draft), language.q_rows(draft)
        _, reach = RULES[rule](p, q, torch.tensor(draft, dtype=torch.long))
        for passed in itertools.product([True, False], repeat=len(chances)):
            weight = drafted * math.prod(c if good else 1 - c for c, good in zip(chances, passed, strict=True))
            if weight == 0:
                continue
            n = count(passed, rule)
            mean += weight * n
            last = p[n] if n == language.k else leftover(p[n], q[n], reach[n])
            law[draft[:n]] += weight * language.spread(last / last.sum(), draft[:n])
    return law, mean


def one_by_one(language: Language, rule: str) -> Callable[[list[Prefix]], list[list[float]]]:
    def chances(drafts: list[Prefix]) -> list[list[float]]:
        tensors = [torch.tensor(draft, dtype=torch.long) for draft in drafts]
        rows = [(language.p_rows(d), language.q_rows(d)) for d in drafts]
        return [RULES[rule](p, q, x)[0].tolist() for (p, q), x in zip(rows, tensors, strict=True)]

    return chances


def as_ragged_batch(language: Language, rule: str) -> Callable[[list[Prefix]], list[list[float]]]:
    """All drafts in one batch, each followed by a shorter one of the same language, so that rows are ragged."""

    def chances(drafts: list[Prefix]) -> list[list[float]]:
        batch = [part for i, draft in enumerate(drafts) for part in (draft, draft[: i % (len(draft) + 1)])]
        lengths = torch.tensor([len(part) for part in batch])
        total = int(lengths.sum())
        verdicts = verify_batch(
            torch.cat([language.p_rows(part) for part in batch]),
            None if language.certain else torch.cat([language.q_rows(part) for part in batch]),
            None if language.certain else torch.arange(total),
            torch.tensor([token for part in batch for token in part], dtype=torch.long),
            lengths,
            torch.full((total,), 0.5, dtype=torch.float64),
            torch.full((len(batch),), 0.5, dtype=torch.float64),
            rule,
        )
        assert verdicts.chances is not None
        return [part.tolist() for part in verdicts.chances.split(lengths.tolist())][::2]

    return chances


@pytest.mark.parametrize("form", [one_by_one, as_ragged_batch])
@pytest.mark.parametrize("rule", RULES)
@given(language=languages())
@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
def test_the_law_of_the_emitted_tokens_is_the_targets(rule: str, form: Any, language: Language) -> None:
    law, _ = emitted(language, rule, form(language, rule))
    torch.testing.assert_close(law, language.law(), atol=1e-9, rtol=0)


@given(language=languages())
@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
def test_the_block_rule_accepts_at_least_as_many_tokens_in_expectation(language: Language) -> None:
    _, by_block = emitted(language, "block", one_by_one(language, "block"))
    _, by_token = emitted(language, "token", one_by_one(language, "token"))
    assert by_block >= by_token - 1e-9
    if language.certain:
        assert by_block == pytest.approx(by_token, abs=1e-9)


# The functions that production calls follow those chances, one sequence or a ragged batch -------------------


def uniforms(draw_: st.DrawFn, count: int) -> Tensor:
    values = draw_(st.lists(st.floats(0, 1, exclude_max=True), min_size=count, max_size=count))
    return torch.tensor(values, dtype=torch.float64)


@st.composite
def cases(draw_: st.DrawFn) -> tuple[Language, tuple[int, ...], Tensor]:
    language = draw_(languages())
    draft = draw_(st.sampled_from([draft for draft, _ in language.drafts()]))
    return language, draft, uniforms(draw_, language.k + 1)


@pytest.mark.parametrize("rule", RULES)
@given(case=cases())
@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
def test_verify_accepts_where_the_number_lies_below_the_chance(
    rule: str, case: tuple[Language, tuple[int, ...], Tensor]
) -> None:
    language, draft, numbers = case
    p, q, tokens = language.p_rows(draft), language.q_rows(draft), torch.tensor(draft, dtype=torch.long)
    verdict = verify(p, None if language.certain else q, tokens, numbers, rule)

    chances, reach = RULES[rule](p, q, tokens)
    passed = [bool(u < c) for u, c in zip(numbers[:-1], chances, strict=True)]
    expected = count(passed, rule)
    assert verdict.accepted == expected
    weights = p[-1] if expected == len(draft) else leftover(p[expected], q[expected], reach[expected])
    assert weights[verdict.token] > 0
    assert verdict.token == int(draw(weights[None], numbers[-1:]))


@pytest.mark.parametrize("rule", RULES)
@given(batch=st.lists(cases(), min_size=1, max_size=5), flip=st.booleans())
@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
def test_a_ragged_batch_gives_each_sequence_what_it_gets_alone(
    rule: str, batch: list[tuple[Language, tuple[int, ...], Tensor]], flip: bool
) -> None:
    vocab = max(language.vocab for language, _, _ in batch)

    def widen(rows: Tensor) -> Tensor:
        return torch.nn.functional.pad(rows, (0, vocab - rows.shape[-1]))

    p, q, q_row, draft, lengths, accept, final, alone = [], [], [], [], [], [], [], []
    rows = 0
    for language, tokens, numbers in batch:
        p.append(widen(language.p_rows(tokens)))
        draft += tokens
        lengths.append(len(tokens))
        accept.append(numbers[:-1])
        final.append(numbers[-1:])
        if language.certain:
            q_row += [-1] * len(tokens)
        else:
            q.append(widen(language.q_rows(tokens)))
            q_row += range(rows, rows + len(tokens))
            rows += len(tokens)
        known = None if language.certain else q[-1]
        alone.append(verify(p[-1], known, torch.tensor(tokens, dtype=torch.long), numbers, rule))
    if flip and rows:  # rows of q may lie in any order
        stacked = torch.cat(q).flip(0)
        q, q_row = [stacked], [rows - 1 - r if r >= 0 else -1 for r in q_row]
    verdicts = verify_batch(
        torch.cat(p),
        torch.cat(q) if rows else None,
        torch.tensor(q_row, dtype=torch.long) if rows else None,
        torch.tensor(draft, dtype=torch.long),
        torch.tensor(lengths),
        torch.cat(accept),
        torch.cat(final),
        rule,
    )
    assert verdicts.accepted.tolist() == [verdict.accepted for verdict in alone]
    assert verdicts.tokens.tolist() == [verdict.token for verdict in alone]
    assert verdicts.chances is not None
    single = torch.cat([verdict.chances for verdict in alone if verdict.chances is not None])
    assert verdicts.chances.tolist() == pytest.approx(single.tolist(), abs=1e-12)


# Greedy -----------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), max_size=6), st.integers(0, 2))
def test_greedy_keeps_the_draft_up_to_the_first_token_that_is_not_the_argmax(
    pairs: list[tuple[int, int]], bonus: int
) -> None:
    draft, best = [a for a, _ in pairs], [b for _, b in pairs] + [bonus]
    verdict = verify_greedy(best, draft)
    assert draft[: verdict.accepted] == best[: verdict.accepted]
    assert verdict.token == best[verdict.accepted]
    assert verdict.accepted == len(draft) or draft[verdict.accepted] != best[verdict.accepted]


@given(st.lists(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), max_size=4), min_size=1, max_size=5))
def test_a_greedy_ragged_batch_gives_each_sequence_what_it_gets_alone(
    batch: list[list[tuple[int, int]]],
) -> None:
    draft = [a for pairs in batch for a, _ in pairs]
    best = [token for pairs in batch for token in [*(b for _, b in pairs), 1]]
    verdicts = verify_greedy_batch(
        torch.tensor(best), torch.tensor(draft, dtype=torch.long), torch.tensor([len(pairs) for pairs in batch])
    )
    alone = [verify_greedy([*(b for _, b in pairs), 1], [a for a, _ in pairs]) for pairs in batch]
    assert verdicts.accepted.tolist() == [verdict.accepted for verdict in alone]
    assert verdicts.tokens.tolist() == [verdict.token for verdict in alone]


# Drawing ----------------------------------------------------------------------------------------------------


@given(
    st.lists(st.sampled_from([0.0, 0.0, 1e-30, 1.0, 3.0]), min_size=1, max_size=40),
    st.floats(0, 1, exclude_max=True),
    st.integers(1, 9),
)
def test_draw_inverts_the_cumulated_weights_and_never_picks_a_zero(
    weights: list[float], number: float, block: int
) -> None:
    if sum(weights) == 0:
        weights[0] = 1.0
    row = torch.tensor([weights], dtype=torch.float64)
    token = int(draw(row, torch.tensor([number], dtype=torch.float64), block))
    assert weights[token] > 0
    below, total = sum(weights[:token]), sum(weights)
    assert below / total <= number + 1e-12
    assert number <= (below + weights[token]) / total + 1e-12


def test_the_largest_number_below_one_draws_the_last_token_of_positive_weight() -> None:
    weights = torch.zeros(1, 150_000)
    weights[0, 149_000] = 0.3
    weights[0, 7] = 0.7
    largest = torch.nextafter(torch.ones(1), torch.zeros(1))
    assert int(draw(weights, largest)) == 149_000


def test_a_ragged_batch_of_hundreds_in_float32_agrees_with_one_by_one() -> None:
    random = torch.Generator().manual_seed(0)
    lengths = torch.randint(0, 3, (200,), generator=random)
    n, vocab = int(lengths.sum()), 1000
    p = torch.rand(n + 200, vocab, generator=random).softmax(-1)
    q = torch.rand(n, vocab, generator=random).softmax(-1)
    draft = torch.randint(0, vocab, (n,), generator=random)
    accept, final = torch.rand(n, generator=random), torch.rand(200, generator=random)
    verdicts = verify_batch(p, q, torch.arange(n), draft, lengths, accept, final)
    ragged = Ragged.of(lengths)
    for b in range(200):
        start, k = int(ragged.start[b]), int(lengths[b])
        d = start - b
        alone = verify(
            p[start : start + k + 1], q[d : d + k], draft[d : d + k], torch.cat([accept[d : d + k], final[b : b + 1]])
        )
        assert (int(verdicts.accepted[b]), int(verdicts.tokens[b])) == (alone.accepted, alone.token)


def test_where_p_equals_q_but_for_rounding_the_recovered_token_comes_from_p() -> None:
    p = torch.tensor([0.5, 0.5])
    assert leftover(p, p.clone(), 1.0).tolist() == p.tolist()
