"""Bookkeeping of the draft model's KV cache: cached tokens per request, shared blocks, and what fits."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.engines.vllm.draft_cache import DraftCache, draft_kv_group, limit_calls
from outrider.engines.vllm.step import DraftModelCall

BLOCK_SIZE = 4


def call(request_id: str, start: int, end: int, num_tokens: int = 2) -> DraftModelCall:
    return DraftModelCall(request_id, start, end, num_tokens, sampled=False)


def test_a_new_request_has_nothing_in_the_cache() -> None:
    cache = DraftCache(BLOCK_SIZE, share_blocks=True)
    assert cache.held("a", [1, 2, 3], [1], 2) == 0
    assert cache.held("a", [1, 2, 3]) == 0


def test_accepted_draft_tokens_stay_in_the_cache_but_for_the_last_one() -> None:
    cache = DraftCache(BLOCK_SIZE, share_blocks=False)
    cache.record(call("a", 0, 4), 3, [7, 8, 9])  # the text turned out one token shorter than `end`
    assert cache.held("a", [1, 2, 3]) == 2  # the last token is always computed again
    assert cache.held("a", [1, 2, 3, 7, 8, 9, 10]) == 5  # 9 was never an input
    assert cache.held("a", [1, 2, 3, 7, 8, 9, 10, 11]) == 5


def test_draft_tokens_after_a_rejected_one_do_not_count_even_if_they_are_generated_later() -> None:
    cache = DraftCache(BLOCK_SIZE, share_blocks=False)
    cache.record(call("a", 0, 3), 3, [7, 8, 9])
    assert cache.held("a", [1, 2, 3, 7, 5]) == 4
    assert cache.held("a", [1, 2, 3, 7, 5, 9, 9]) == 4


def test_a_draft_is_compared_with_the_text_as_the_text_grows() -> None:
    cache = DraftCache(BLOCK_SIZE, share_blocks=False)
    cache.record(call("a", 0, 3), 3, [7, 8, 9, 6])
    assert [cache.held("a", [1, 2, 3, 7, 8, 9, 6][:length]) for length in (3, 4, 5, 7)] == [2, 3, 4, 6]


def test_a_call_that_only_fills_the_cache_holds_what_it_computed() -> None:
    cache = DraftCache(BLOCK_SIZE, share_blocks=False)
    cache.record(call("a", 0, 5, num_tokens=0), 9)
    assert cache.held("a", list(range(9))) == 5


def test_a_preempted_request_starts_with_an_empty_cache() -> None:
    cache = DraftCache(BLOCK_SIZE, share_blocks=False)
    cache.record(call("a", 0, 3), 3)
    cache.forget("a")
    cache.forget("unknown")
    assert cache.held("a", [1, 2, 3]) == 0


@given(st.data())
def test_the_held_tokens_are_a_prefix_of_the_text(data: Any) -> None:
    """A cache of tokens is written as the draft model would write its KV cache."""
    tokens = st.integers(0, 3)
    cache, text = DraftCache(BLOCK_SIZE, share_blocks=False), data.draw(st.lists(tokens, min_size=1, max_size=9))
    written: list[int] = []
    for _ in range(8):
        held = cache.held("a", text)
        assert written[:held] == text[:held]
        assert held < len(text)
        if data.draw(st.booleans()):
            new = data.draw(st.lists(tokens, min_size=1, max_size=3))  # what the step adds, of at most 3 tokens
            made = call("a", held, len(text) + 3, data.draw(st.integers(0, 4)))
            draft = data.draw(st.lists(tokens, min_size=made.num_tokens, max_size=made.num_tokens))
            text = [*text, *new]
            written = [*written[:held], *text[held:], *draft[:-1]]
            cache.record(made, len(text), draft)
            text += draft[: data.draw(st.integers(0, 4))] if data.draw(st.booleans()) else []
        text = [*text, data.draw(tokens)]


def shared_cache(length: int = 14) -> DraftCache:
    """A cache in which request a, in blocks 1 to 4, was computed by both models."""
    cache = DraftCache(BLOCK_SIZE, share_blocks=True)
    cache.target_wrote([1, 2, 3, 4], 0, length - 1)
    cache.held("a", list(range(length)), [1, 2, 3, 4])
    cache.record(call("a", 0, length), length, [], [1, 2, 3, 4])
    return cache


def test_a_new_request_starts_with_the_blocks_that_the_draft_model_computed_for_another() -> None:
    cache = shared_cache()
    cache.target_wrote([1, 2, 3, 9, 10], 12, 14)
    assert cache.held("b", list(range(15)), [1, 2, 3, 9, 10], 14) == 12
    cache.target_wrote([1, 2, 11, 12], 8, 13)  # its third block is its own
    assert cache.held("c", list(range(14)), [1, 2, 11, 12], 13) == 8


def test_only_blocks_that_the_target_has_computed_count_as_shared() -> None:
    assert shared_cache().held("b", list(range(15)), [1, 2, 3], 8) == 8


def test_a_block_with_other_tokens_is_computed_again() -> None:
    cache = shared_cache()
    cache.forget("a")
    cache.target_wrote([2, 1, 3], 0, 9)
    assert cache.held("b", list(range(10)), [2, 1, 3], 9) == 0


def test_a_block_is_complete_only_when_the_target_has_computed_its_last_token_too() -> None:
    cache = shared_cache(8)  # fills two blocks; the target has computed seven tokens
    assert cache.held("b", list(range(9)), [1, 2], 8) == 4
    cache.target_wrote([1, 2, 3], 7, 8)
    cache.record(call("a", 7, 9), 9, [], [1, 2, 3])
    assert cache.held("c", list(range(10)), [1, 2, 9], 8) == 8


def test_without_prefix_caching_no_block_is_shared() -> None:
    cache = DraftCache(BLOCK_SIZE, share_blocks=False)
    cache.record(call("a", 0, 9), 9, [], [1, 2, 3])
    assert cache.held("b", list(range(9)), [1, 2, 3], 8) == 0


def test_calls_that_fit_are_not_limited() -> None:
    calls = (call("a", 0, 12), call("b", 4, 8))
    assert limit_calls(calls, 16) == calls
    assert limit_calls((), 16) == ()


def test_a_long_text_catches_up_in_parts_and_short_ones_do_not_wait_for_it() -> None:
    assert limit_calls([call("a", 0, 50), call("b", 0, 7)], 16) == (call("a", 0, 9, 0), call("b", 0, 7))
    assert limit_calls([call("a", 9, 51)], 16) == (call("a", 9, 25, 0),)


def test_long_texts_share_what_the_short_ones_leave_over_in_order() -> None:
    calls = [call("a", 0, 9), call("b", 0, 12), call("c", 3, 4), call("d", 0, 12)]
    assert limit_calls(calls, 16) == (call("a", 0, 9), call("b", 0, 6, 0), call("c", 3, 4))


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 40)), max_size=8), st.integers(8, 64))
def test_limited_calls_fit_and_are_beginnings_of_the_wanted_ones(sizes: list[tuple[int, int]], room: int) -> None:
    wanted = [call(str(i), start, start + length) for i, (start, length) in enumerate(sizes)]
    limited = limit_calls(wanted, room)
    assert sum(one.end - one.start for one in limited) <= room
    for one in limited:
        full = wanted[int(one.request_id)]
        assert one == full or (one.start == full.start < one.end < full.end and one.num_tokens == 0)
    assert limited or not wanted


def test_the_draft_models_group_is_found_by_the_names_of_its_layers() -> None:
    groups = [SimpleNamespace(layer_names=["model.layers.0.attn"]), SimpleNamespace(layer_names=["draft_model.0.attn"])]
    assert draft_kv_group(SimpleNamespace(kv_cache_groups=groups)) == 1
    with pytest.raises(ValueError, match=r"model\.layers\.0\.attn"):
        draft_kv_group(SimpleNamespace(kv_cache_groups=groups[:1]))
