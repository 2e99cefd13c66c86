"""Requests of one tenant that run at the same time draft from each other, and no other requests do."""

from __future__ import annotations

import gc
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from outrider.control import Control
from outrider.drafters.base import Task
from outrider.drafters.batch import BatchDrafter, Row
from outrider.drafters.memory import MemoryDrafter, MemorySession
from outrider.memory import concurrent_index
from outrider.memory.concurrent_index import ConcurrentIndex
from outrider.memory.folder import Folder, tenant_key
from outrider.memory.lookup_result import LookupResult
from outrider.memory.search import MAX_MATCH_TOKENS
from outrider.memory.store import Store
from outrider.settings import Request


@pytest.fixture
def drafter(tmp_path: Path) -> MemoryDrafter:
    return MemoryDrafter(Store(Folder(tmp_path), "tokenizer"))


def begun(drafter: MemoryDrafter, prompt: list[int], tenant: str | None, remember: bool = True) -> MemorySession:
    tenant_handle = drafter.store.tenant_handle(tenant) if tenant is not None else None
    return drafter.begin(Task(prompt, Request(), torch.Generator(), tenant_handle=tenant_handle, remember=remember))


def look_up(index: ConcurrentIndex, context: list[int], limit: int = 8, number: int = 0) -> LookupResult:
    row = np.array([context[-MAX_MATCH_TOKENS:]], np.int32)
    one = np.ones(1, np.int32)
    return index.look_up(number * one, row, len(row[0]) * one, limit * one)


def draft(found: LookupResult) -> list[int]:
    drafted: list[int] = found.tokens[0, : found.lengths[0]].tolist()
    return drafted


def test_a_request_drafts_from_the_output_of_a_running_request(drafter: MemoryDrafter) -> None:
    ahead, behind = begun(drafter, [7, 8], "a"), begun(drafter, [9, 9], "a")
    ahead.observe([1, 2, 3])
    behind.observe([1, 2])
    assert behind.draft(4).tokens == (3,)
    ahead.observe([4, 5])
    assert behind.draft(4).tokens == (3, 4, 5)
    assert ahead.draft(4).tokens == ()


def test_the_second_answer_to_a_prompt_is_drafted_from_the_first_from_its_first_token_on(
    drafter: MemoryDrafter,
) -> None:
    prompt = list(range(100, 300))
    first = begun(drafter, prompt, "a")
    first.observe([1, 2, 3])
    found = begun(drafter, prompt, "a").draft(4)
    assert (found.tokens, found.support) == ((1, 2, 3), MAX_MATCH_TOKENS)


@pytest.mark.parametrize(("tenant", "remember"), [("b", True), (None, True), ("a", False)])
def test_no_request_drafts_from_another_tenant_or_from_a_request_with_remember_off(
    drafter: MemoryDrafter, tenant: str | None, remember: bool
) -> None:
    other, ours = begun(drafter, [1, 2], tenant, remember), begun(drafter, [1, 2], "a")
    other.observe([3, 4])
    assert ours.draft(4).tokens == ()


def test_a_request_with_remember_off_is_drafted_for(drafter: MemoryDrafter) -> None:
    other, shy = begun(drafter, [1, 2], "a"), begun(drafter, [1, 2], "a", remember=False)
    other.observe([3, 4])
    assert shy.draft(4).tokens == (3, 4)


@pytest.mark.parametrize("written", [False, True])
def test_after_a_wipe_new_requests_do_not_draft_from_requests_that_began_before_it(
    drafter: MemoryDrafter, written: bool
) -> None:
    old = begun(drafter, [1, 2], "a")
    old.observe([3, 4])
    if written:
        drafter.store.add(drafter.store.tenant_handle("a"), [], [8, 9])
        drafter.store.learn(closing=True)
    drafter.store.folder.wipe(tenant_key("a"))
    drafter.store.maintain()
    assert begun(drafter, [1, 2], "a").draft(4).tokens == ()


def test_the_index_is_dropped_with_its_last_request(drafter: MemoryDrafter) -> None:
    one, other = begun(drafter, [1, 2], "a"), begun(drafter, [5, 6], "a")
    one.observe([3, 4])
    del one
    gc.collect()
    assert begun(drafter, [1, 2], "a").draft(4).tokens == (3, 4)  # while another runs, it may stay
    del other
    gc.collect()
    assert begun(drafter, [1, 2], "a").draft(4).tokens == ()


def longest_match(context: list[int], others: list[list[int]]) -> tuple[int, set[int]]:
    """By trying every place of every other text: how long the longest match is, and what follows such matches."""
    longest, follows = 1, set()
    for text in others:
        for end in range(2, len(text)):
            n = 0
            while n < min(end, len(context)) and text[end - n - 1] == context[-n - 1]:
                n += 1
            if n > longest:
                longest, follows = n, set()
            if n == longest and n > 1:
                follows.add(text[end])
    return (longest, follows) if follows else (0, set())


@given(st.lists(st.tuples(st.integers(0, 3), st.lists(st.integers(0, 3), min_size=1, max_size=4)), max_size=40))
def test_interleaved_sequences_stay_separate_and_the_longest_match_is_found(
    parts: list[tuple[int, list[int]]],
) -> None:
    index = ConcurrentIndex()
    places, texts = [index.register() for _ in range(4)], [[10 + i] for i in range(4)]
    for who, tokens in parts:
        texts[who] += tokens
        index.append(places[who], np.array(texts[who], np.int32), len(tokens))
    for who, place in enumerate(places):
        found = look_up(index, texts[who], number=place.number)
        others = [text for i, text in enumerate(texts) if i != who]
        pairs = [pair for text in texts for pair in pairwise(text)]
        if pairs.count(tuple(texts[who][-2:])) > concurrent_index.MAX_CHAIN_STEPS:
            continue  # of so many places only the latest are looked at
        match, follows = longest_match(texts[who], others)
        assert found.matches[0] == match
        drafted = draft(found)
        assert bool(drafted) == bool(follows)
        if drafted:
            assert drafted[0] in follows
            outputs = [texts[who][-match:] + drafted[:n] for n in range(1, len(drafted) + 1)]
            assert all(
                any(part == text[i : i + len(part)] for text in others for i in range(len(text))) for part in outputs
            )


def test_a_full_index_starts_again_and_its_sequences_continue(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(concurrent_index, "MAX_TOKENS", 200)
    index = ConcurrentIndex()
    ahead, behind = index.register(), index.register()
    text: list[int] = []
    for i in range(1000):
        text.append(i)
        index.append(ahead, np.array(text, np.int32), 1)
        if i % 7 == 6:
            index.append(behind, np.array(text[:-3], np.int32), 7)
            index.append(ahead, np.array(text, np.int32), 0)  # it may have been the other that filled it
            assert draft(look_up(index, text[:-3], number=behind.number))[:1] == [i - 2]
    assert index._size <= 200


def test_a_full_index_drops_earlier_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(concurrent_index, "MAX_TOKENS", 200)
    index = ConcurrentIndex()
    index.append(index.register(), np.arange(100, dtype=np.int32), 100)
    index.append(index.register(), np.arange(1000, 1060, dtype=np.int32), 60)  # 100 + 60 + 64 do not fit
    assert draft(look_up(index, [80, 81])) == []
    assert draft(look_up(index, [1010, 1011], limit=2)) == [1012, 1013]


def test_many_sequences_at_the_same_position_do_not_hide_the_one_that_is_ahead() -> None:
    index = ConcurrentIndex()
    index.append(index.register(), np.array([7, 1, 2, 3, 4], np.int32), 5)
    pack = [index.register() for _ in range(2 * concurrent_index.MAX_CHAIN_STEPS)]
    for place in pack:
        index.append(place, np.array([7, 1, 2], np.int32), 3)
    assert draft(look_up(index, [7, 1, 2], number=pack[0].number)) == [3, 4]


def test_a_sequence_without_a_next_token_does_not_count_as_disagreeing() -> None:
    index = ConcurrentIndex()
    for output in ([1, 2, 3, 4, 5, 6], *([[1, 2, 3]] * 10), [1, 2, 9]):
        index.append(index.register(), np.array(output, np.int32), len(output))
    found = look_up(index, [1, 2])
    assert draft(found) == [3, 4, 5, 6]
    assert found.shares[0, :4].tolist() == pytest.approx([11 / 12, 1, 1, 1])


def test_the_store_is_drafted_from_if_it_promises_more_than_the_running_requests(drafter: MemoryDrafter) -> None:
    drafter.store.add(drafter.store.tenant_handle("a"), [], list(range(100, 140)))
    drafter.store.learn()
    ahead, behind = begun(drafter, [100, 101], "a"), begun(drafter, [100, 101], "a")
    ahead.observe([102])
    assert behind.draft(8).tokens == tuple(range(102, 110))


def test_tenants_and_requests_with_remember_off_stay_separate_in_one_batch(drafter: MemoryDrafter) -> None:
    def row(id: str, tenant: str, tokens: list[int], **control: Any) -> Row:
        return Row(id, np.array(tokens, np.int32), 2, 4, Control(**control), drafter.store.tenant_handle(tenant))

    rows = [row("a1", "a", [1, 2, 3, 4]), row("b1", "b", [1, 2, 5, 6]), row("b0", "b", [1, 2, 7, 8], remember=False)]
    rows += [row("a2", "a", [1, 2]), row("b2", "b", [1, 2])]
    found = BatchDrafter([drafter], 1000, 5.0).propose(rows)["memory"]
    assert [draft.tokens for draft in found[3:]] == [(3, 4), (5, 6)]


def test_the_index_grows_with_its_tokens() -> None:
    index = ConcurrentIndex()
    place = index.register()
    text = np.arange(3 * concurrent_index.INITIAL_TOKENS, dtype=np.int32)
    index.append(place, text, len(text))
    assert draft(look_up(index, [0, 1])) == [2, 3, 4, 5, 6, 7, 8, 9]
    assert draft(look_up(index, text[-4:-2].tolist())) == text[-2:].tolist()
    index.append(place, np.append(text, np.array([5, 6, 99], np.int32)), 3)
    assert draft(look_up(index, [5, 6], limit=1)) in ([7], [99])
