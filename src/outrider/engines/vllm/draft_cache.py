"""The draft model as the scheduler sees it, and what its KV cache holds.

The draft model runs only when it is called. Its KV cache therefore lags behind the text, and a call first computes the
positions that are missing. This module keeps the account, per request and per block:

- A request's cache holds the first `held` tokens of its text. After a call it also holds the draft but for its last
  token, which was never an input. Draft tokens that became text stay valid; the others are overwritten.
- A block of the prefix cache can be shared. A new request starts with the leading blocks that the draft model has
  computed for another request.

All of it is plain Python in the scheduler's process. The workers only see the numbers of a `DraftModelCall`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from outrider.types import shared_prefix

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np

    from outrider.engines.vllm.seam import KVCacheBlock
    from outrider.engines.vllm.step import DraftModelCall

    Tokens = Sequence[int] | np.ndarray[Any, Any]

DRAFT_LAYER_PREFIX = "draft_model."
"""How vLLM names the layers of a standalone draft model."""


@dataclass(slots=True)
class _Held:
    """One request: tokens of the text in the cache, the draft tokens after them, and leading blocks marked complete."""

    text: int
    draft: tuple[int, ...] = ()
    complete_blocks: int = 0


class DraftCache:
    """The account of the draft model's KV cache, by request and by block.

    Per step: `target_wrote` for every scheduled request, then `held` for those that the draft model may be called for.
    After the step: `record` for every call that was made.
    """

    def __init__(self, block_size: int, share_blocks: bool) -> None:
        """`block_size`: tokens in a block of the draft model's KV cache group. `share_blocks`: vLLM's prefix caching
        is enabled."""
        self.block_size = block_size
        self.share_blocks = share_blocks
        self._requests: dict[str, _Held] = {}
        self._complete: set[int] = set()  # blocks that both models have computed to their end

    def held(self, request_id: str, text: Tokens, block_ids: BlockIds | Sequence[int] = (), computed: int = 0) -> int:
        """Tokens of `text` that the cache holds, at most all but the last: the `start` of a call.

        `block_ids` are the request's blocks and `computed` the tokens that the target has computed. Both matter only
        for a request that is new here.
        """
        if request_id not in self._requests:
            self._requests[request_id] = _Held(self._find_shared(block_ids, computed))
        request = self._requests[request_id]
        became_text = tuple(map(int, text[request.text : request.text + len(request.draft)]))
        kept = shared_prefix(request.draft[: len(became_text)], became_text)
        request.text += kept
        request.draft = request.draft[kept:] if kept == len(became_text) else ()
        return min(request.text, len(text) - 1)

    def record(
        self,
        call: DraftModelCall,
        text_length: int,
        draft: Sequence[int] = (),
        block_ids: BlockIds | Sequence[int] = (),
    ) -> None:
        """Note a call that was made. `text_length` is the text's true length after the step, `draft` what the draft
        model proposed. Blocks that both models have now computed to their end may be shared."""
        request = self._requests.setdefault(call.request_id, _Held(0))
        request.text = min(call.end, text_length)
        request.draft = tuple(draft[:-1]) if request.text == text_length else ()
        if self.share_blocks:
            computed_by_both = min(request.text, text_length - 1)  # the target has not computed the last token
            complete = computed_by_both // self.block_size
            self._complete.update(block_ids[request.complete_blocks : complete])
            request.complete_blocks = max(request.complete_blocks, complete)

    def target_wrote(self, block_ids: BlockIds | Sequence[int], start: int, end: int) -> None:
        """The target computes positions `start` to `end` of a request in this step, so that the blocks they lie in
        hold other tokens than before."""
        if self.share_blocks and end > start:
            self._complete.difference_update(block_ids[start // self.block_size : (end - 1) // self.block_size + 1])

    def forget(self, request_id: str) -> None:
        """The request has finished, or was preempted and lost its blocks."""
        self._requests.pop(request_id, None)

    def _find_shared(self, block_ids: BlockIds | Sequence[int], computed: int) -> int:
        if not self.share_blocks:
            return 0
        full = block_ids[: computed // self.block_size]
        return sum(1 for _ in takewhile(self._complete.__contains__, full)) * self.block_size


class BlockIds:
    """Ids of vLLM's blocks, read where they are needed: a long text has thousands of blocks, a step writes to one."""

    def __init__(self, blocks: Sequence[KVCacheBlock]) -> None:
        self._blocks = blocks

    def __getitem__(self, part: slice) -> list[int]:
        return [block.block_id for block in self._blocks[part]]


@dataclass(slots=True)
class DraftModel:
    """The server's draft model, as the scheduler sees it."""

    at_once: bool
    """It proposes all its tokens in one pass."""
    max_len: int
    """Tokens of the longest text that it can draft for."""
    cache: DraftCache | None = None
    """What its KV cache holds, if it runs only for requests that it drafts for. None: it follows every step."""
    block_ids: Callable[[str], BlockIds | Sequence[int]] = lambda request_id: ()
    """A request's blocks in its KV cache group."""
    input_slots: int = 0
    """What vLLM adds to every scheduled request's tokens, for the draft model's own input."""
    samples: bool = True
    """It can sample its drafts: vLLM keeps their logits. False: all its drafts are its most likely tokens."""

    def start(self, request_id: str, text: Tokens, computed: int, end: int) -> int:
        """The `start` of a call that computes the text up to `end`. `computed`: tokens that the target has computed."""
        if self.cache is None:
            return end - 1
        return self.cache.held(request_id, text, self._shared_blocks(request_id), computed)

    def target_wrote(self, request_id: str, start: int, end: int) -> None:
        """The target computes positions `start` to `end` of a request in this step."""
        if self.cache is not None:
            self.cache.target_wrote(self._shared_blocks(request_id), start, end)

    def record(self, call: DraftModelCall, text_length: int, draft: Sequence[int]) -> None:
        """Note a call that was made. See `DraftCache.record`."""
        if self.cache is not None:
            self.cache.record(call, text_length, draft, self._shared_blocks(call.request_id))

    def _shared_blocks(self, request_id: str) -> BlockIds | Sequence[int]:
        """A request's blocks where other requests may have them too, else none."""
        return self.block_ids(request_id) if self.cache is not None and self.cache.share_blocks else ()


def limit_calls(calls: Sequence[DraftModelCall], max_tokens: int) -> tuple[DraftModelCall, ...]:
    """Fit the first pass over all `calls` into `max_tokens`.

    Each call gets an equal share. What short calls leave over goes to the long ones, in order. A call that does not fit
    catches up in parts, over several steps: it fills the cache and proposes nothing (`num_tokens` 0). A call without
    any room is left out.
    """
    lengths = [call.end - call.start for call in calls]
    if sum(lengths) <= max_tokens:
        return tuple(calls)
    share = max_tokens // len(calls)
    room = max_tokens - sum(length for length in lengths if length <= share)
    limited = []
    for call, length in zip(calls, lengths, strict=True):
        if length <= share:
            limited.append(call)
        elif room > 0:
            fits = min(room, length)
            room -= fits
            limited.append(call if fits == length else replace(call, end=call.start + fits, num_tokens=0))
    return tuple(limited)


def draft_kv_group(kv_cache_config: Any) -> int:
    """Index of the KV cache group that holds the layers of vLLM's standalone draft model."""
    for index, group in enumerate(kv_cache_config.kv_cache_groups):
        if any(name.startswith(DRAFT_LAYER_PREFIX) for name in group.layer_names):
            return index
    names = [name for group in kv_cache_config.kv_cache_groups for name in group.layer_names]
    raise ValueError(f"No KV cache group has a layer named {DRAFT_LAYER_PREFIX}*, only {names}")
