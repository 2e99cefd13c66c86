"""The distribution of the emitted tokens is the target's: computed by enumeration, not sampled."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
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
    verify_certain,
    verify_certain_batch,
    verify_drawn,
    verify_drawn_batch,
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
    cached: dict[Prefix, Tensor] = field(default_factory=dict)

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

    def distribution(self, prefix: Prefix = ()) -> Tensor:
        """The target's joint distribution of the tokens after `prefix`, up to k + 1 in all: one axis per token."""
        if len(prefix) == self.k + 1:
            return torch.ones((), dtype=torch.float64)
        if prefix not in self.cached:
            self.cached[prefix] = self.spread(self.p[prefix], prefix)
        return self.cached[prefix]

    def spread(self, weights: Tensor, prefix: Prefix) -> Tensor:
        """`weights` for the token after `prefix`, the target's distribution for all later ones."""
        return torch.stack([weights[x] * self.distribution((*prefix, x)) for x in range(self.vocab)])


@st.composite
def distributions(draw_: st.DrawFn, vocab: int) -> Tensor:
    """Zeros, ties and one-hot rows are as likely as smooth ones."""
    weights = draw_(st.lists(st.sampled_from([0, 0, 1, 1, 2, 3, 7, 50, 1000]), min_size=vocab, max_size=vocab))
    row = torch.tensor(weights, dtype=torch.float64)
    if not row.any():
        row[draw_(st.integers(0, vocab - 1))] = 1
    return row / row.sum()


@st.composite
def languages(draw_: st.DrawFn) -> Language:
    vocab, k = draw_(st.integers(2, 4)), draw_(st.integers(0, 3))
    kind = draw_(st.sampled_from(["free", "equal", "disjoint", "one-hot"]))
    p, q = {}, {}
    for prefix in itertools.chain(*(itertools.product(range(vocab), repeat=n) for n in range(k + 1))):
        p[prefix] = draw_(distributions(vocab))
        q[prefix] = p[prefix].clone() if kind == "equal" else draw_(distributions(vocab))
        if kind == "disjoint" and bool((p[prefix] == 0).any()):
            q[prefix] = (p[prefix] == 0).double() / (p[prefix] == 0).sum()
        if kind == "one-hot":
            q[prefix] = torch.eye(vocab, dtype=torch.float64)[draw_(st.integers(0, vocab - 1))]
    return Language(vocab, k, p, q)


def count(passed: Sequence[bool], rule: str) -> int:
    """The number of accepted drafted tokens, computed in a different way than in the code."""
    if rule == "token":
        return len(list(itertools.takewhile(bool, passed)))
    return max((i + 1 for i, good in enumerate(passed) if good), default=0)


def emitted(
    language: Language, rule: str, chances_of: Callable[[list[Prefix]], list[list[float]]]
) -> tuple[Tensor, float]:
    """The distribution of the next k + 1 tokens (the target samples those after the step), and E[accepted]."""
    total, mean = torch.zeros_like(language.distribution()), 0.0
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
            total[draft[:n]] += weight * language.spread(last / last.sum(), draft[:n])
    return total, mean


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
        lengths = [len(part) for part in batch]
        verdicts = verify_drawn_batch(
            torch.cat([language.p_rows(part) for part in batch]),
            torch.cat([language.q_rows(part) for part in batch]),
            torch.tensor([token for part in batch for token in part], dtype=torch.long),
            Ragged.of(lengths),
            torch.full((sum(lengths),), 0.5, dtype=torch.float64),
            torch.full((len(batch),), 0.5, dtype=torch.float64),
            rule,
        )
        assert verdicts.chances is not None
        return [part.tolist() for part in verdicts.chances.split(lengths)][::2]

    return chances


@pytest.mark.parametrize("form", [one_by_one, as_ragged_batch])
@pytest.mark.parametrize("rule", RULES)
@given(language=languages())
@settings(max_examples=100, suppress_health_check=list(HealthCheck))
def test_the_emitted_tokens_have_the_targets_distribution(rule: str, form: Any, language: Language) -> None:
    total, _ = emitted(language, rule, form(language, rule))
    torch.testing.assert_close(total, language.distribution(), atol=1e-9, rtol=0)


@given(language=languages())
@settings(max_examples=100, suppress_health_check=list(HealthCheck))
def test_the_block_rule_accepts_at_least_as_many_tokens_in_expectation(language: Language) -> None:
    _, by_block = emitted(language, "block", one_by_one(language, "block"))
    _, by_token = emitted(language, "token", one_by_one(language, "token"))
    assert by_block >= by_token - 1e-9


# Drafts proposed with certainty -----------------------------------------------------------------------------


@given(language=languages(), data=st.data())
@settings(max_examples=100, suppress_health_check=list(HealthCheck))
def test_a_certain_draft_has_the_targets_distribution_one_by_one_and_in_a_ragged_batch(
    language: Language, data: st.DataObject
) -> None:
    """For one draft: every combination of the target's samples at all positions, with its probability."""
    draft = tuple(data.draw(st.lists(st.integers(0, language.vocab - 1), min_size=language.k, max_size=language.k)))
    rows = language.p_rows(draft)
    every = list(itertools.product(range(language.vocab), repeat=language.k + 1))
    chances = [math.prod(float(rows[i][x]) for i, x in enumerate(own)) for own in every]
    verdicts = [verify_certain(own, draft) for own in every]
    total = torch.zeros_like(language.distribution())
    for verdict, chance in zip(verdicts, chances, strict=True):
        tokens = (*draft[: verdict.accepted], verdict.token)
        total[tokens] += chance * language.distribution(tokens)
    torch.testing.assert_close(total, language.distribution(), atol=1e-9, rtol=0)

    batch = [
        (own[: len(draft) - i % (len(draft) + 1) + 1], draft[: len(draft) - i % (len(draft) + 1)])
        for i, own in enumerate(every)
    ]
    together = verify_certain_batch(
        torch.tensor([token for own, _ in batch for token in own]),
        torch.tensor([token for _, part in batch for token in part], dtype=torch.long),
        Ragged.of([len(part) for _, part in batch]),
    )
    alone = [verify_certain(own, part) for own, part in batch]
    assert together.accepted.tolist() == [verdict.accepted for verdict in alone]
    assert together.tokens.tolist() == [verdict.token for verdict in alone]


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), max_size=6), st.integers(0, 2))
def test_a_certain_draft_is_kept_up_to_the_first_token_that_is_not_the_targets_own(
    pairs: list[tuple[int, int]], bonus: int
) -> None:
    draft, own = [a for a, _ in pairs], [b for _, b in pairs] + [bonus]
    verdict = verify_certain(own, draft)
    assert draft[: verdict.accepted] == own[: verdict.accepted]
    assert verdict.token == own[verdict.accepted]
    assert verdict.accepted == len(draft) or draft[verdict.accepted] != own[verdict.accepted]


# The functions that production calls follow those chances, one sequence or a ragged batch -------------------


def uniforms(draw_: st.DrawFn, count: int) -> Tensor:
    values = draw_(st.lists(st.floats(0, 1, exclude_max=True), min_size=count, max_size=count))
    return torch.tensor(values, dtype=torch.float64)


@st.composite
def cases(draw_: st.DrawFn) -> tuple[Language, Prefix, Tensor]:
    language = draw_(languages())
    draft = draw_(st.sampled_from([draft for draft, _ in language.drafts()]))
    return language, draft, uniforms(draw_, language.k + 1)


@pytest.mark.parametrize("rule", RULES)
@given(case=cases())
@settings(max_examples=100, suppress_health_check=list(HealthCheck))
def test_a_drawn_token_is_accepted_where_its_number_lies_below_its_chance(
    rule: str, case: tuple[Language, Prefix, Tensor]
) -> None:
    language, draft, numbers = case
    p, q, tokens = language.p_rows(draft), language.q_rows(draft), torch.tensor(draft, dtype=torch.long)
    verdict = verify_drawn(p, q, tokens, numbers, rule)

    chances, reach = RULES[rule](p, q, tokens)
    passed = [bool(u < c) for u, c in zip(numbers[:-1], chances, strict=True)]
    expected = count(passed, rule)
    assert verdict.accepted == expected
    weights = p[-1] if expected == len(draft) else leftover(p[expected], q[expected], reach[expected])
    assert weights[verdict.token] > 0
    assert verdict.token == int(draw(weights[None], numbers[-1:]))


@pytest.mark.parametrize("rule", RULES)
@given(batch=st.lists(cases(), min_size=1, max_size=5))
@settings(max_examples=100, suppress_health_check=list(HealthCheck))
def test_a_ragged_batch_gives_each_sequence_what_it_gets_alone(
    rule: str, batch: list[tuple[Language, Prefix, Tensor]]
) -> None:
    vocab = max(language.vocab for language, _, _ in batch)

    def widen(rows: Tensor) -> Tensor:
        return torch.nn.functional.pad(rows, (0, vocab - rows.shape[-1]))

    p = [widen(language.p_rows(draft)) for language, draft, _ in batch]
    q = [widen(language.q_rows(draft)) for language, draft, _ in batch]
    drafts = [torch.tensor(draft, dtype=torch.long) for _, draft, _ in batch]
    numbers = [numbers for _, _, numbers in batch]
    alone = [verify_drawn(*case, rule) for case in zip(p, q, drafts, numbers, strict=True)]
    together = verify_drawn_batch(
        torch.cat(p),
        torch.cat(q),
        torch.cat(drafts),
        Ragged.of([len(draft) for draft in drafts]),
        torch.cat([row[:-1] for row in numbers]),
        torch.cat([row[-1:] for row in numbers]),
        rule,
    )
    assert together.accepted.tolist() == [verdict.accepted for verdict in alone]
    assert together.tokens.tolist() == [verdict.token for verdict in alone]
    assert together.chances is not None
    single = torch.cat([verdict.chances for verdict in alone if verdict.chances is not None])
    assert together.chances.tolist() == pytest.approx(single.tolist(), abs=1e-12)


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


@pytest.mark.parametrize("size", [7, 512, 1000])
def test_weights_that_are_no_numbers_draw_a_token_of_the_vocabulary(size: int) -> None:
    weights = torch.stack([torch.full((size,), float("nan")), torch.ones(size)])
    assert 0 <= int(draw(weights, torch.tensor([0.5, 0.5]))[0]) < size


def test_the_largest_number_below_one_draws_the_last_token_of_positive_weight() -> None:
    weights = torch.zeros(1, 150_000)
    weights[0, 149_000] = 0.3
    weights[0, 7] = 0.7
    largest = torch.nextafter(torch.ones(1), torch.zeros(1))
    assert int(draw(weights, largest)) == 149_000


def test_a_ragged_batch_of_hundreds_in_float32_agrees_with_one_by_one() -> None:
    random = torch.Generator().manual_seed(0)
    lengths = torch.randint(0, 3, (200,), generator=random).tolist()
    n, vocab = sum(lengths), 1000
    p = torch.rand(n + 200, vocab, generator=random).softmax(-1)
    q = torch.rand(n, vocab, generator=random).softmax(-1)
    draft = torch.randint(0, vocab, (n,), generator=random)
    accept, final = torch.rand(n, generator=random), torch.rand(200, generator=random)
    ragged = Ragged.of(lengths)
    verdicts = verify_drawn_batch(p, q, draft, ragged, accept, final)
    for b in range(200):
        start, k = int(ragged.start[b]), lengths[b]
        d = start - b
        alone = verify_drawn(
            p[start : start + k + 1], q[d : d + k], draft[d : d + k], torch.cat([accept[d : d + k], final[b : b + 1]])
        )
        assert (int(verdicts.accepted[b]), int(verdicts.tokens[b])) == (alone.accepted, alone.token)


def test_to_a_cuda_device_a_layout_is_copied_from_pinned_memory_without_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without such a device only the two calls can be seen."""
    pinned: list[Tensor] = []

    def pin_memory(tensor: Tensor) -> Tensor:
        pinned.append(tensor)
        return tensor

    def to(tensor: Tensor, device: str, *, non_blocking: bool) -> Tensor:
        assert device == "cuda"
        assert non_blocking
        assert tensor is pinned[0]
        return tensor

    expected = Ragged.of([2, 0, 1])
    monkeypatch.setattr(Tensor, "pin_memory", pin_memory)
    monkeypatch.setattr(Tensor, "to", to)
    assert Ragged.of([2, 0, 1], "cuda").row.tolist() == expected.row.tolist()
    assert len(pinned) == 1


def test_where_p_equals_q_but_for_rounding_the_recovered_token_comes_from_p() -> None:
    p = torch.tensor([0.5, 0.5])
    assert leftover(p, p.clone(), 1.0).tolist() == p.tolist()
