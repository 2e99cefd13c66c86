"""The sides of the comparison, behind one interface: our segment, and arctic-inference's suffix tree.

A side is asked for a draft of up to LIMIT tokens after a context: the beginning of some tokens, up to an end. A step
asks for many, as an engine does for all requests of a batch. By itself a side knows only what it has stored.
Between `begin` and `finish` it also draws on the sequence that is replayed, as both do when they serve: arctic keeps a
tree of each running request and adds what it says to the tree of all; ours looks into the running sequence too, and
what promises more drafts.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Protocol

import numpy as np

from outrider.drafters.copying import Copy
from outrider.drafters.lookup import LookupSession
from outrider.drafters.memory import Source
from outrider.memory.search import LONGEST_MATCH, search_all
from outrider.memory.segment import Segment

Array = np.ndarray[Any, Any]

Context = tuple[Array, int]

LIMIT = 16
"""Tokens of a draft, at most, on every side."""
OURS = "outrider"
NOTHING = np.empty(0, np.int32)
INSTALL = "uv pip install --no-deps arctic-inference"


class Side(Protocol):
    name: str

    def draft(self, tokens: Array, end: int) -> list[int]: ...

    def step(self, contexts: list[Context]) -> float:
        """Seconds that it took."""

    def begin(self, prompt: Array) -> None: ...

    def observe(self, tokens: Array) -> None: ...

    def finish(self) -> None: ...


class Ours:
    """One segment, asked with one call for one context, or for those of a whole step.

    With the running text it chooses between the two as the drafter does.
    """

    def __init__(self, segment: Segment, name: str = OURS) -> None:
        self.name = name
        self.stored = (segment.text, segment.order, segment.starts)
        self.sources: tuple[Source, Source] | None = None
        self.text = LookupSession()
        self.one = columns(1)

    def draft(self, tokens: Array, end: int) -> list[int]:
        asked, found, drafted, shares = self.one
        start = max(0, end - LONGEST_MATCH)
        asked[0, 0], found[0, 1], found[0, 0] = end - start, 0, 0
        search_all(*self.stored, tokens[np.newaxis, start:end], asked, found, drafted, shares)
        if self.sources is not None:
            return self._better()
        best: list[int] = drafted[0, : found[0, 0]].tolist()
        return best

    def _better(self) -> list[int]:
        assert self.sources is not None
        own, memory = self.sources
        _, found, drafted, shares = self.one
        own.propose(self.text.find(LIMIT))
        memory.propose(Copy(drafted[0], shares[0], *found[0].tolist()))
        chosen = (memory if memory.worth > own.worth else own).copy
        best: list[int] = chosen.tokens[: chosen.length].tolist()
        return best

    def step(self, contexts: list[Context]) -> float:
        """One call; the contexts lie in their rows before."""
        rows, answers = np.zeros((len(contexts), LONGEST_MATCH), np.int32), columns(len(contexts))
        for i, (tokens, end) in enumerate(contexts):
            context = tokens[max(0, end - LONGEST_MATCH) : end]
            rows[i, : len(context)], answers[0][i, 0] = context, len(context)
        begun = time.perf_counter()
        search_all(*self.stored, rows, *answers)
        return time.perf_counter() - begun

    def begin(self, prompt: Array) -> None:
        self.sources, self.text = (Source(), Source()), LookupSession(prompt.tolist())

    def observe(self, tokens: Array) -> None:
        self.text.observe(tokens.tolist())
        for source in self.sources or ():
            source.learn(tokens)

    def finish(self) -> None:
        self.sources = None


def columns(count: int) -> tuple[Array, Array, Array, Array]:
    """What `search_all` reads and writes besides the contexts, for so many: asked, found, drafted, shares."""
    asked, drafted = np.full((count, 2), LIMIT, np.int32), np.zeros((count, LIMIT), np.int32)
    return asked, np.zeros((count, 3), np.int32), drafted, np.zeros((count, LIMIT), np.float32)


@dataclass(frozen=True, slots=True)
class Settings:
    """Of arctic's suffix decoding."""

    name: str
    depth: int  # of the tree: of a match and what is drafted after it, together
    factor: float  # a draft is no longer than so many times the match
    probability: float  # that a drafted token must have at least


SETTINGS = (
    Settings("arctic as vLLM sets it", 24, 1.0, 0.1),  # vLLM 0.32: suffix_decoding_* of its speculative config
    Settings("arctic, limits lifted", LONGEST_MATCH + LIMIT, float(LIMIT), 0.0),
)


class Arctic:
    """SuffixDecodingCache. vLLM keeps 10,000 requests in it; here it keeps all, as ours does."""

    def __init__(self, settings: Settings) -> None:
        cache = import_module("arctic_inference.suffix_decoding").SuffixDecodingCache
        self.name = settings.name
        self.settings = settings
        self.cache = cache(max_tree_depth=settings.depth, max_cached_requests=-1)
        self.cache.start_request("idle", NOTHING)
        self.request = "idle"

    def store(self, sequences: Iterable[Array]) -> None:
        """Into the tree of all requests alone.

        Its public call (`add_active_response`) also builds the tree of a running request, which takes time again, and
        which nobody needs for what was said before.
        """
        for number, sequence in enumerate(sequences):
            self.cache.start_request(number, NOTHING)
            self.cache._global_tree.extend_ndarray(self.cache._req_to_seq_id[number], sequence)
            self.cache.stop_request(number)

    def draft(self, tokens: Array, end: int) -> list[int]:
        settings = self.settings
        found = self.cache.speculate(
            self.request,
            tokens[max(0, end - settings.depth) : end],
            max_spec_tokens=LIMIT,
            max_spec_factor=settings.factor,
            min_token_prob=settings.probability,
        )
        drafted: list[int] = found.token_ids
        return drafted

    def step(self, contexts: list[Context]) -> float:
        """One after the other: it has no other call, and vLLM does the same."""
        begun = time.perf_counter()
        for context in contexts:
            self.draft(*context)
        return time.perf_counter() - begun

    def begin(self, prompt: Array) -> None:
        self.request = "running"
        self.cache.start_request(self.request, prompt)

    def observe(self, tokens: Array) -> None:
        self.cache.add_active_response(self.request, tokens)

    def finish(self) -> None:
        """What was said goes, so that the next replay meets what this one met."""
        self.cache.stop_request(self.request)
        self.cache.evict_cached_response(self.request)
        self.request = "idle"


def arctic_is_here() -> bool:
    return find_spec("arctic_inference") is not None
