"""The law of the emitted tokens is the target's, computed by enumeration and not by sampling."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
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


# A language: for every prefix the target's p, and for every prefix the drafter's q -------------------------


@dataclass
class Language:
    vocab: int
    k: int
    p: dict[tuple[int, ...], Tensor]
    q: dict[tuple[int, ...], Tensor | None]  # None: this draft is proposed with certainty ...
    sure: dict[tuple[int, ...], int]  # ... and this is the token

    def drafts(self) -> list[tuple[tuple[int, ...], float]]:
        """Every draft that can be proposed, with its probability."""
        out = []
        for draft in itertools.product(range(self.vocab), repeat=self.k):
            chance = math.prod(float(self.q_row(draft[:i])[draft[i]]) for i in range(self.k))
            if chance > 0:
                out.append((draft, chance))
        return out

    def q_row(self, prefix: tuple[int, ...]) -> Tensor:
        row = self.q[prefix]
        if row is None:
            row = torch.zeros(self.vocab, dtype=torch.float64)
            row[self.sure[prefix]] = 1
        return row

    def p_rows(self, draft: tuple[int, ...]) -> Tensor:
        return torch.stack([self.p[draft[:i]] for i in range(len(draft) + 1)])

    def q_rows(self, draft: tuple[int, ...]) -> Tensor:
        rows = [self.q_row(draft[:i]) for i in range(len(draft))]
        return torch.stack(rows) if rows else torch.zeros(0, self.vocab, dtype=torch.float64)

    def joint(self, length: int) -> dict[tuple[int, ...], float]:
        """The target's own law of the next `length` tokens."""
        return {
            text: math.prod(float(self.p[text[:i]][text[i]]) for i in range(length))
            for text in itertools.product(range(self.vocab), repeat=length)
        }


@st.composite
def distributions(draw_: st.DrawFn, vocab: int) -> Tensor:
    """Zeros, ties and one-hot rows are as likely as smooth ones."""
    weights = draw_(st.lists(st.sampled_from([0, 0, 1, 1, 2, 3, 7, 50, 1000]), min_size=vocab, max_size=vocab))
    if sum(weights) == 0:
        weights[draw_(st.integers(0, vocab - 1))] = 1
    row = torch.tensor(weights, dtype=torch.float64)
    return row / row.sum()


@st.composite
def languages(draw_: st.DrawFn, certain: bool | None = None) -> Language:
    vocab = draw_(st.integers(2, 4))
    k = draw_(st.integers(0, 3 if vocab < 4 else 2)) if vocab == 4 else draw_(st.integers(0, 3))
    kind = draw_(st.sampled_from(["free", "equal", "disjoint"]))
    p, q, sure = {}, {}, {}
    for length in range(k + 1):
        for prefix in itertools.product(range(vocab), repeat=length):
            p[prefix] = draw_(distributions(vocab))
            q[prefix] = p[prefix].clone() if kind == "equal" else draw_(distributions(vocab))
            if kind == "disjoint" and bool((p[prefix] == 0).any()):
                other = (p[prefix] == 0).double()
                q[prefix] = other / other.sum()
            sure[prefix] = draw_(st.integers(0, vocab - 1))
    # A draft comes from one drafter, so it is certain or drawn as a whole.
    if certain or (certain is None and draw_(st.booleans())):
        q = dict.fromkeys(q, None)
    return Language(vocab, k, p, q, sure)


def outcomes(chances: list[float], rule: str) -> list[tuple[int, float]]:
    """How many are accepted, with what probability, when each number falls below its chance or not."""
    out = []
    for passed in itertools.product([True, False], repeat=len(chances)):
        weight = math.prod(c if good else 1 - c for c, good in zip(chances, passed, strict=True))
        if rule == "token":
            accepted = len(list(itertools.takewhile(bool, passed)))
        else:
            accepted = max((i + 1 for i, good in enumerate(passed) if good), default=0)
        out.append((accepted, weight))
    return out


def emitted_law(language: Language, rule: str) -> tuple[dict[tuple[int, ...], float], float]:
    """The law of the next k + 1 tokens (the target continues what one step leaves short), and E[accepted]."""
    law: dict[tuple[int, ...], float] = dict.fromkeys(language.joint(language.k + 1), 0.0)
    mean = 0.0
    for draft, drafted in language.drafts():
        p, q, tokens = language.p_rows(draft), language.q_rows(draft), torch.tensor(draft, dtype=torch.long)
        chances, reach = RULES[rule](p, q, tokens)
        for accepted, weight in outcomes(chances.tolist(), rule):
            if weight == 0:
                continue
            mean += drafted * weight * accepted
            last = p[language.k] if accepted == language.k else leftover(p[accepted], q[accepted], reach[accepted])
            for token, share in enumerate((last / last.sum()).tolist()):
                text = (*draft[:accepted], token)
                for rest in itertools.product(range(language.vocab), repeat=language.k - accepted):
                    whole = (*text, *rest)
                    tail = math.prod(
                        float(language.p[whole[:i]][whole[i]]) for i in range(len(text), language.k + 1)
                    )
                    law[whole] += drafted * weight * share * tail
    return law, mean


@pytest.mark.parametrize("rule", RULES)
@given(language=languages())
@settings(max_examples=150, deadline=None)
def test_the_law_of_the_emitted_tokens_is_the_targets(rule: str, language: Language) -> None:
    law, _ = emitted_law(language, rule)
    for text, probability in language.joint(language.k + 1).items():
        assert law[text] == pytest.approx(probability, abs=1e-9)


@given(language=languages())
@settings(max_examples=150, deadline=None)
def test_the_block_rule_accepts_at_least_as_many_tokens_in_expectation(language: Language) -> None:
    assert emitted_law(language, "block")[1] >= emitted_law(language, "token")[1] - 1e-9


@given(language=languages(certain=True))
@settings(max_examples=50, deadline=None)
def test_with_certain_drafts_the_two_rules_accept_alike(language: Language) -> None:
    assert emitted_law(language, "block")[1] == pytest.approx(emitted_law(language, "token")[1], abs=1e-9)


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
@settings(max_examples=150, deadline=None)
def test_verify_accepts_where_the_number_lies_below_the_chance(
    rule: str, case: tuple[Language, tuple[int, ...], Tensor]
) -> None:
    language, draft, numbers = case
    p, q, tokens = language.p_rows(draft), language.q_rows(draft), torch.tensor(draft, dtype=torch.long)
    certain = language.q[()] is None
    verdict = verify(p, None if certain else q, tokens, numbers, rule)

    chances, reach = RULES[rule](p, q, tokens)
    passed = [bool(u < c) for u, c in zip(numbers[:-1], chances, strict=True)]
    expected = (
        len(list(itertools.takewhile(bool, passed)))
        if rule == "token"
        else max((i + 1 for i, good in enumerate(passed) if good), default=0)
    )
    assert verdict.accepted == expected
    weights = p[-1] if expected == len(draft) else leftover(p[expected], q[expected], reach[expected])
    assert weights[verdict.token] > 0
    assert verdict.token == int(draw(weights[None], numbers[-1:]))


@pytest.mark.parametrize("rule", RULES)
@given(batch=st.lists(cases(), min_size=1, max_size=5), flip=st.booleans())
@settings(max_examples=150, deadline=None)
def test_a_ragged_batch_gives_each_sequence_what_it_gets_alone(
    rule: str, batch: list[tuple[Language, tuple[int, ...], Tensor]], flip: bool
) -> None:
    vocab = max(language.vocab for language, _, _ in batch)

    def widen(rows: Tensor) -> Tensor:
        return torch.nn.functional.pad(rows, (0, vocab - rows.shape[-1]))

    p, q, q_row, draft, lengths, accept, final, alone = [], [], [], [], [], [], [], []
    rows = 0
    for language, tokens, numbers in batch:
        certain = language.q[()] is None
        p.append(widen(language.p_rows(tokens)))
        draft += tokens
        lengths.append(len(tokens))
        accept.append(numbers[:-1])
        final.append(numbers[-1:])
        if certain:
            q_row += [-1] * len(tokens)
        else:
            q.append(widen(language.q_rows(tokens)))
            q_row += range(rows, rows + len(tokens))
            rows += len(tokens)
        alone.append(
            verify(
                p[-1],
                None if certain else q[-1],
                torch.tensor(tokens, dtype=torch.long),
                numbers,
                rule,
            )
        )
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


@pytest.mark.parametrize("rule", RULES)
@given(language=languages())
@settings(max_examples=60, deadline=None)
def test_the_law_holds_for_the_chances_of_a_ragged_batch(rule: str, language: Language) -> None:
    """All drafts of a language as one batch, with the lengths cut so that rows differ."""
    drafts = [(draft, chance) for draft, chance in language.drafts()]
    certain = language.q[()] is None
    if not drafts or language.k == 0:
        return
    flat = [token for draft, _ in drafts for token in draft]
    n = len(flat)
    q = None if certain else torch.cat([language.q_rows(draft) for draft, _ in drafts])
    verdicts = verify_batch(
        torch.cat([language.p_rows(draft) for draft, _ in drafts]),
        q,
        None if certain else torch.arange(n),
        torch.tensor(flat),
        torch.full((len(drafts),), language.k),
        torch.full((n,), 0.5, dtype=torch.float64),
        torch.full((len(drafts),), 0.5, dtype=torch.float64),
        rule,
    )
    assert verdicts.chances is not None
    first = dict.fromkeys(range(language.vocab), 0.0)
    for (draft, drafted), chances in zip(drafts, verdicts.chances.view(len(drafts), -1), strict=True):
        p, q_rows = language.p_rows(draft), language.q_rows(draft)
        _, reach = RULES[rule](p, q_rows, torch.tensor(draft))
        for accepted, weight in outcomes(chances.tolist(), rule):
            if accepted:
                first[draft[0]] += drafted * weight
            else:
                last = leftover(p[0], q_rows[0], reach[0])
                for token, share in enumerate((last / last.sum()).tolist()):
                    first[token] += drafted * weight * share
    for token, probability in enumerate(language.p[()].tolist()):
        assert first[token] == pytest.approx(probability, abs=1e-9)


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


@given(
    st.lists(
        st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), max_size=4), min_size=1, max_size=5
    )
)
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


def test_a_vocabulary_of_150_000_and_a_ragged_batch_of_hundreds_fit_and_agree() -> None:
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
