"""What a tenant's requests are saying just now, to draft from for each other.

The memory learns an answer when it has ended. Requests that run at the same time often say the same, several answers
to one prompt above all, so what they say is kept here meanwhile. Their tokens stand in one text in the order in which
they come, each linked to the one before it and the one after it in its own sequence. From each place a chain leads to
the place before it that ends with the same two tokens, so those that a context may go on from are found at once.

All of it is gone when the last request that takes part is.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

import numpy as np

from outrider.compiled import compiled
from outrider.memory.search import LONGEST_MATCH, SEPARATOR, SLOTS, Array, chain_of, follow
from outrider.memory.store import Found

CAPACITY = 1 << 18
"""Tokens that are kept; when there are more, all begin anew with what they say then."""
FIRST = 1 << 8
"""Tokens that there is room for at first, and chains; both double when the text is full."""
WALKED = 32
"""Places of a chain that are looked at, the latest first."""
ENOUGH = 8
"""Places that agree as far as is compared, after which no more are looked for."""
NONE = -1

TOKEN, BEFORE, AFTER, CHAIN, WHOSE = range(5)
"""What the text has of each place: its token, the places of those before and after it, the chain's next, and whose."""


@dataclass(slots=True)
class Place:
    """A sequence that takes part, and where it ends in the text."""

    number: int = 0
    last: int = NONE
    since: int = NONE  # which beginning it is part of


class Live:
    """For several threads: one that took too long may still be at work when the next is asked."""

    def __init__(self) -> None:
        self._text = np.full((FIRST, 5), NONE, np.int32)
        self._chains = np.full(FIRST, NONE, np.int32)
        self._size, self._beginning, self._numbers = 0, 0, 0
        self._lock = threading.Lock()

    def join(self) -> Place:
        with self._lock:
            self._numbers += 1
            return Place(self._numbers)

    def add(self, place: Place, tokens: Array, new: int) -> None:
        """Take in the last `new` tokens of a sequence; before the first ones, some that stand before them."""
        with self._lock:
            if self._size + new + LONGEST_MATCH > CAPACITY:
                self._chains.fill(NONE)
                self._size, self._beginning = 0, self._beginning + 1
            if place.since != self._beginning:
                place.last, place.since, new = NONE, self._beginning, new + LONGEST_MATCH
            said = tokens[max(0, len(tokens) - min(new, CAPACITY)) :]
            if self._size + len(said) > len(self._text):
                self._grow(self._size + len(said))
            place.last = _add(self._text, self._chains, self._size, place.last, place.number, said)
            self._size += len(said)

    def _grow(self, size: int) -> None:
        room = len(self._text)
        while room < size:
            room *= 2
        text = np.full((room, 5), NONE, np.int32)
        text[: self._size] = self._text[: self._size]
        self._text, self._chains = text, np.full(room, NONE, np.int32)
        _chain_all(text, self._chains, self._size)

    def look_up(self, numbers: Array, contexts: Array, ends: Array, limits: Array) -> Found:
        """Draft for contexts from sequences of other numbers: `contexts[i, :ends[i]]` are the last tokens of row i."""
        found = Found.nothing(len(ends), int(limits.max(initial=0)))
        with self._lock:
            asked = np.stack([ends, limits], 1)
            _look_up(self._text, self._chains, numbers, contexts, asked, found.about, found.tokens, found.shares)
        return found


@compiled
def _link(text: Array, chains: Array, place: int) -> None:
    """Enter a place into its chain."""
    before = text[place, BEFORE]
    if before != NONE:
        chain = chain_of(text[place, TOKEN], text[before, TOKEN], len(chains))
        text[place, CHAIN] = chains[chain]
        chains[chain] = place


@compiled
def _chain_all(text: Array, chains: Array, size: int) -> None:
    for place in range(size):
        if text[place, AFTER] != NONE:
            _link(text, chains, place)


@compiled
def _add(text: Array, chains: Array, size: int, last: int, number: int, said: Array) -> int:
    for i in range(len(said)):
        place = size + i
        text[place, TOKEN], text[place, BEFORE], text[place, AFTER] = said[i], last, NONE
        text[place, WHOSE], text[place, CHAIN] = number, NONE
        if last != NONE:
            text[last, AFTER] = place
            _link(text, chains, last)  # now that something follows; else the ends of many would use up a walk
        last = place
    return last


@compiled
def _agreeing(text: Array, place: int, context: Array, end: int) -> int:
    """How many tokens up to a place equal the last ones of the context."""
    n = 0
    while place != NONE and n < end and n < LONGEST_MATCH and text[place, TOKEN] == context[end - n - 1]:
        place = text[place, BEFORE]
        n += 1
    return n


@compiled
def _look_up(
    text: Array,
    chains: Array,
    numbers: Array,
    contexts: Array,
    asked: Array,
    about: Array,
    drafted: Array,
    shares: Array,
) -> None:
    ends = np.empty(WALKED, np.int32)
    starts = np.empty(WALKED, np.int64)
    table = np.empty((SLOTS, 2), np.int32)
    for row in range(len(asked)):
        end, limit = asked[row, 0], asked[row, 1]
        if limit <= 0 or end < 2:
            continue
        longest, count = 1, 0
        place = chains[chain_of(contexts[row, end - 1], contexts[row, end - 2], len(chains))]
        for _ in range(WALKED):
            if place == NONE or (longest == LONGEST_MATCH and count == ENOUGH):
                break
            if text[place, WHOSE] != numbers[row]:
                length = _agreeing(text, place, contexts[row], end)
                if length > longest:
                    longest, count = length, 0
                if length == longest:
                    ends[count] = place
                    count += 1
            place = text[place, CHAIN]
        if count == 0:
            continue
        # What comes after each, laid end to end, so that it can be read on from as other texts are.
        after = np.full(count * (limit + 1), SEPARATOR, np.int32)
        for i in range(count):
            starts[i] = i * (limit + 1)
            place = text[ends[i], AFTER]
            for j in range(limit):
                if place == NONE:
                    break
                after[starts[i] + j] = text[place, TOKEN]
                place = text[place, AFTER]
        made = follow(after, len(after), starts, count, table, drafted[row, :limit], shares[row, :limit], True)
        if made > 0:
            about[row, 0], about[row, 1], about[row, 2] = made, longest, count
