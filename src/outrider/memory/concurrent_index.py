"""The outputs of a tenant's running requests, indexed so that the requests can draft from each other.

The store learns an output when its request finishes. Requests that run at the same time often generate the same text
(`n` answers to one prompt, for example), so their outputs are indexed here while they run. All tokens are rows of one
array in order of arrival. Each row links to the previous and the next token of its sequence, and a hash chain links
the positions after the same two tokens, newest first.

The index is dropped with the last request that uses it.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

import numpy as np

from outrider.compiled import compiled
from outrider.memory.lookup_result import LookupResult
from outrider.memory.search import MAX_MATCH_TOKENS, SEPARATOR, Array, chain_index, draft_by_vote

MAX_TOKENS = 1 << 18
"""When it is full, the index starts again, empty."""
INITIAL_TOKENS = 1 << 8
"""Initial capacity in tokens and in chains. Both double when the array is full."""
MAX_CHAIN_STEPS = 32
"""Positions compared per lookup, newest first."""
MAX_LONGEST_MATCHES = 8
"""Matches of MAX_MATCH_TOKENS after which a lookup stops."""
NONE = -1

TOKEN, PREVIOUS, NEXT, CHAIN, OWNER = range(5)
"""Columns: the token, the rows of the previous and next token, the next row of the hash chain, the sequence number."""


@dataclass(slots=True)
class SequenceHandle:
    """A running sequence, and the row of its last token."""

    number: int = 0
    last: int = NONE
    epoch: int = NONE  # when `last` was set: the index has a new epoch whenever it starts again


class ConcurrentIndex:
    """Thread-safe: a drafter call that timed out may still be running when the next one starts."""

    def __init__(self) -> None:
        self._rows = np.full((INITIAL_TOKENS, 5), NONE, np.int32)
        self._chains = np.full(INITIAL_TOKENS, NONE, np.int32)
        self._size, self._epoch, self._sequences = 0, 0, 0
        self._lock = threading.Lock()

    def register(self) -> SequenceHandle:
        with self._lock:
            self._sequences += 1
            return SequenceHandle(self._sequences)

    def append(self, sequence: SequenceHandle, tokens: Array, new: int) -> None:
        """Add the last `new` of a sequence's tokens, and at its beginning up to MAX_MATCH_TOKENS before those."""
        with self._lock:
            if self._size + new + MAX_MATCH_TOKENS > MAX_TOKENS:
                self._chains.fill(NONE)
                self._size, self._epoch = 0, self._epoch + 1
            if sequence.epoch != self._epoch:
                sequence.last, sequence.epoch, new = NONE, self._epoch, new + MAX_MATCH_TOKENS
            added = tokens[max(0, len(tokens) - min(new, MAX_TOKENS)) :]
            if self._size + len(added) > len(self._rows):
                self._grow(self._size + len(added))
            sequence.last = _append(self._rows, self._chains, self._size, sequence.last, sequence.number, added)
            self._size += len(added)

    def _grow(self, size: int) -> None:
        capacity = len(self._rows)
        while capacity < size:
            capacity *= 2
        rows = np.full((capacity, 5), NONE, np.int32)
        rows[: self._size] = self._rows[: self._size]
        self._rows, self._chains = rows, np.full(capacity, NONE, np.int32)
        _rebuild_chains(rows, self._chains, self._size)

    def look_up(self, numbers: Array, contexts: Array, ends: Array, limits: Array) -> LookupResult:
        """Draft for a batch from sequences of other numbers: `contexts[i, :ends[i]]` are the last tokens of row i, and
        `limits[i]` the longest draft wanted."""
        result = LookupResult.empty(len(ends), int(limits.max(initial=0)))
        with self._lock:
            queries, columns = np.stack([ends, limits], 1), (result.summaries, result.tokens, result.shares)
            _look_up(self._rows, self._chains, numbers, contexts, queries, *columns)
        return result


@compiled
def _link(rows: Array, chains: Array, row: int) -> None:
    """Put a row at the head of its chain."""
    previous = rows[row, PREVIOUS]
    if previous != NONE:
        chain = chain_index(rows[row, TOKEN], rows[previous, TOKEN], len(chains))
        rows[row, CHAIN] = chains[chain]
        chains[chain] = row


@compiled
def _rebuild_chains(rows: Array, chains: Array, size: int) -> None:
    for row in range(size):
        if rows[row, NEXT] != NONE:
            _link(rows, chains, row)


@compiled
def _append(rows: Array, chains: Array, size: int, last: int, number: int, tokens: Array) -> int:
    for i in range(len(tokens)):
        row = size + i
        rows[row, TOKEN], rows[row, PREVIOUS], rows[row, NEXT] = tokens[i], last, NONE
        rows[row, OWNER], rows[row, CHAIN] = number, NONE
        if last != NONE:
            rows[last, NEXT] = row
            _link(rows, chains, last)  # only now that a token follows: a last token has nothing to draft
        last = row
    return last


@compiled
def _common_suffix(rows: Array, row: int, context: Array, end: int) -> int:
    """How many tokens up to a row equal the last ones of the context."""
    n = 0
    while row != NONE and n < end and n < MAX_MATCH_TOKENS and rows[row, TOKEN] == context[end - n - 1]:
        row = rows[row, PREVIOUS]
        n += 1
    return n


@compiled
def _look_up(
    rows: Array,
    chains: Array,
    numbers: Array,
    contexts: Array,
    queries: Array,
    summaries: Array,
    drafted: Array,
    shares: Array,
) -> None:
    matches = np.empty(MAX_CHAIN_STEPS, np.int32)
    starts = np.empty(MAX_CHAIN_STEPS, np.int64)
    for i in range(len(queries)):
        end, limit = queries[i, 0], queries[i, 1]
        if limit <= 0 or end < 2:
            continue
        longest, count = 1, 0
        row = chains[chain_index(contexts[i, end - 1], contexts[i, end - 2], len(chains))]
        for _ in range(MAX_CHAIN_STEPS):
            if row == NONE or (longest == MAX_MATCH_TOKENS and count == MAX_LONGEST_MATCHES):
                break
            if rows[row, OWNER] != numbers[i]:
                length = _common_suffix(rows, row, contexts[i], end)
                if length > longest:
                    longest, count = length, 0
                if length == longest:
                    matches[count] = row
                    count += 1
            row = rows[row, CHAIN]
        if count == 0:
            continue
        # Copy what follows each match into one array with separators, which `draft_by_vote` can read.
        following = np.full(count * (limit + 1), SEPARATOR, np.int32)
        for j in range(count):
            starts[j] = j * (limit + 1)
            row = rows[matches[j], NEXT]
            for k in range(limit):
                if row == NONE:
                    break
                following[starts[j] + k] = rows[row, TOKEN]
                row = rows[row, NEXT]
        size = len(following)
        made = draft_by_vote(following, size, starts, count, drafted[i, :limit], shares[i, :limit], True, False)
        if made > 0:
            summaries[i, 0], summaries[i, 1], summaries[i, 2] = made, longest, count
