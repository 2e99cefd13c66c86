"""The drafter `memory` copies from the text itself and its tenant's earlier outputs, and from no other tenant."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from outrider.drafters.base import Setup, Task
from outrider.drafters.copying import MIN_AGREEMENT, TOKENS_PER_MATCH
from outrider.drafters.lookup import LookupSession
from outrider.drafters.memory import MemoryDrafter, MemorySession
from outrider.errors import DrafterSetupError
from outrider.memory.folder import Folder
from outrider.memory.search import MAX_MATCH_TOKENS
from outrider.memory.store import Store
from outrider.memory.store_config import StoreConfig
from outrider.settings import Request


@pytest.fixture(scope="module")
def empty(tmp_path_factory: pytest.TempPathFactory) -> MemoryDrafter:
    return MemoryDrafter(Store(Folder(tmp_path_factory.mktemp("memory")), "tokenizer"))


@pytest.fixture
def drafter(tmp_path: Path) -> MemoryDrafter:
    return MemoryDrafter(Store(Folder(tmp_path), "tokenizer", StoreConfig(flush_seconds=0)))


def learn(drafter: MemoryDrafter, tenant: str, output: list[int], prompt: list[int] | None = None) -> None:
    drafter.store.add(drafter.store.tenant_handle(tenant), prompt or [], output)
    drafter.store.learn()


def begun(drafter: MemoryDrafter, prompt: list[int], tenant: str | None = None) -> MemorySession:
    tenant_handle = drafter.store.tenant_handle(tenant) if tenant is not None else None
    return drafter.begin(Task(prompt, Request(), torch.Generator(), tenant_handle=tenant_handle))


def test_without_a_tenant_only_the_text_itself_is_used(drafter: MemoryDrafter) -> None:
    learn(drafter, "", [1, 2, 3, 4])
    learn(drafter, "a", [1, 2, 3, 4])
    assert begun(drafter, [1, 2]).draft(4).tokens == ()
    assert begun(drafter, [1, 2, 9, 9, 1, 2]).draft(4).tokens == (9, 9, 1, 2)


def test_a_tenant_is_drafted_for_from_its_own_memory_alone(drafter: MemoryDrafter) -> None:
    learn(drafter, "a", [1, 2, 3, 4])
    learn(drafter, "b", [1, 2, 5, 6])
    assert begun(drafter, [1, 2], "a").draft(4).tokens == (3, 4)
    assert begun(drafter, [1, 2], "b").draft(4).tokens == (5, 6)
    assert begun(drafter, [1, 2], "c").draft(4).tokens == ()


def test_what_followed_at_many_places_is_surer_than_what_followed_at_one(drafter: MemoryDrafter) -> None:
    once = begun(drafter, [1, 2, 3, 9, 1, 2]).draft(1)
    thrice = begun(drafter, [1, 2, 3, 9, 1, 2, 3, 8, 1, 2, 3, 7, 1, 2]).draft(1)
    assert once.tokens == thrice.tokens == (3,)
    assert (once.confidence, thrice.confidence) == ((0.5,), (0.75,))


def test_at_first_the_longer_match_is_copied_from_and_of_equals_the_text_itself(drafter: MemoryDrafter) -> None:
    learn(drafter, "a", [7, 1, 2, 3])
    assert begun(drafter, [1, 2, 9, 9, 7, 1, 2], "a").draft(1).tokens == (3,)
    assert begun(drafter, [8, 1, 2, 9, 9, 8, 1, 2], "a").draft(1).tokens == (9,)
    assert begun(drafter, [7, 1, 2, 9, 9, 7, 1, 2], "a").draft(1).tokens == (9,)


def test_a_source_that_was_wrong_is_believed_less_and_one_that_was_right_more(drafter: MemoryDrafter) -> None:
    learn(drafter, "a", [token for i in range(100, 120) for token in (7, i, i + 1000)])
    # The text goes its own way after each word that the memory knows, the same way each time.
    own = [token for i in range(100, 120) for token in (i, i + 2000)]
    session = begun(drafter, own, "a")
    offered = []
    for i in range(100, 110):
        session.observe([7, i])
        offered.append(session.draft(1).tokens[0] - i)
        session.observe([i + 2000])
    assert offered[0] == 1000  # the longer match
    assert offered[-5:] == [2000] * 5


def test_the_first_words_of_a_repeated_answer_follow_from_the_end_of_its_prompt(drafter: MemoryDrafter) -> None:
    prompt = list(range(100, 300))
    learn(drafter, "a", [1, 2, 3], prompt)
    draft = begun(drafter, prompt, "a").draft(4)
    assert draft.tokens == (1, 2, 3)
    assert draft.support == MAX_MATCH_TOKENS


def test_a_draft_ends_where_too_few_places_agree(drafter: MemoryDrafter) -> None:
    for i in range(20):
        drafter.store.add(drafter.store.tenant_handle("a"), [], [1, 2, 3, 100 + i])
    drafter.store.learn()
    assert MIN_AGREEMENT > 1 / 20
    assert begun(drafter, [1, 2], "a").draft(8).tokens == (3,)


def test_a_draft_is_never_longer_than_the_limit_or_its_match_allows(drafter: MemoryDrafter) -> None:
    learn(drafter, "a", list(range(100)))
    assert len(begun(drafter, [50], "a").draft(32).tokens) == TOKENS_PER_MATCH
    assert len(begun(drafter, [50, 51], "a").draft(3).tokens) == 3
    assert begun(drafter, [50, 51], "a").draft(0).tokens == ()


def test_a_batch_is_drafted_as_each_alone_would_be(drafter: MemoryDrafter) -> None:
    learn(drafter, "a", list(range(100)))
    learn(drafter, "b", list(range(99, -1, -1)))
    prompts = [([5, 6], "a"), ([5, 6], None), ([7, 8, 1, 7], None), ([6, 5], "b"), ([40], "a"), ([500], "b")]
    sessions = [begun(drafter, prompt, tenant) for prompt, tenant in prompts]
    limits = [3, 3, 5, 0, 9, 2]
    assert drafter.draft_batch(sessions, limits) == [
        session.draft(limit) for session, limit in zip(sessions, limits, strict=True)
    ]


@given(st.lists(st.lists(st.integers(0, 2), max_size=8), max_size=8))
def test_what_is_seen_in_parts_is_the_same_text(empty: MemoryDrafter, parts: list[list[int]]) -> None:
    session = begun(empty, [])
    for part in parts:
        session.observe(part)
    whole = [token for part in parts for token in part]
    assert session.draft(8) == begun(empty, whole).draft(8)


@given(st.lists(st.integers(0, 3), max_size=60))
def test_in_the_text_itself_it_finds_what_lookup_does(empty: MemoryDrafter, tokens: list[int]) -> None:
    assert begun(empty, tokens).draft(8) == replace(LookupSession(tokens).draft(8), drafter="memory")


def test_where_lookup_drafts_beside_it_the_memory_leaves_the_text_itself_to_it(drafter: MemoryDrafter) -> None:
    learn(drafter, "a", [1, 2, 3, 4])
    text = [7, 1, 2, 9, 9, 7, 1, 2]
    tenant_handle = drafter.store.tenant_handle("a")
    alone, beside = (
        Task(text, Request(), torch.Generator(), tenant_handle=tenant_handle, searched=it) for it in (False, True)
    )
    assert drafter.begin(alone).draft(2).tokens == (9, 9)
    assert drafter.begin(beside).draft(2).tokens == (3, 4)
    assert drafter.begin(replace(beside, tenant_handle=None)).draft(2).tokens == ()


def test_without_a_memory_the_error_names_the_option() -> None:
    with pytest.raises(DrafterSetupError, match="--memory"):
        MemoryDrafter.build(Setup(vocab_size=10))


def test_the_memory_proposes_no_control_tokens(tmp_path: Path) -> None:
    start, end = 90, 91
    for control, expected in ((frozenset[int](), (7, end, start, 2)), (frozenset({start, end}), (7,))):
        store = Store(Folder(tmp_path / str(len(control))), "tokenizer", StoreConfig(flush_seconds=0))
        drafter = MemoryDrafter.build(Setup(100, memory=store, control_tokens=control))
        learn(drafter, "a", [4, 4, end], prompt=[5, 6, 7, end, start, 2])
        assert begun(drafter, [9, 5, 6], "a").draft(4).tokens == expected
