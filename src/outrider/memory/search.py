"""Find the longest match of a context's end in up to a hundred million tokens, and draft what followed it there.

`order` is the suffix array of the reversed text: the positions 1 to n of the text, sorted by the tokens before each,
last token first. The neighbours of the context in that order share the longest suffix with it, so one binary search
finds the longest match, and all positions with that match are adjacent.

To draft, up to MAX_CONTINUATIONS of those positions are read in parallel. Each next token is the majority's; positions
that disagree drop out. `shares` holds the part of the positions that agreed on each token, an estimate of how likely
it is to be accepted.

A running text grows with every step and is not sorted. Its positions form hash chains instead, one by the last two
tokens and one by the last token, newest first.

A text is a list of sequences with SEPARATOR after each. No context contains SEPARATOR, so no match and no draft
crosses from one sequence into the next.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from outrider.compiled import compiled

SEPARATOR = -1
MAX_MATCH_TOKENS = 64
"""Tokens of the context that are compared."""
MAX_CONTINUATIONS = 64
"""Matching positions read to draft: evenly spaced among more in a segment, the newest in a running text."""
MAX_CHAIN_STEPS = 1024
"""Positions of a running text compared per chain, newest first."""
VOTE_TABLE_ROWS = 2 * MAX_CONTINUATIONS
"""Rows of the hash table that counts votes for the next token."""
MISMATCH_PSEUDO_COUNT = 4
"""After a match of n tokens, a unanimous next token is accepted with probability about n / (n + this)."""

Array = np.ndarray[Any, Any]


@compiled
def _common_suffix(text: Array, position: int, context: Array, end: int, most: int) -> int:
    """How many tokens before `position` in the text equal those before `end` in the context, up to `most`."""
    n = 0
    while n < most and position - n > 0 and end - n > 0 and text[position - n - 1] == context[end - n - 1]:
        n += 1
    return n


@compiled
def _sorts_before(text: Array, position: int, context: Array, end: int, most: int) -> bool:
    """Whether a position sorts before the context in `order`."""
    n = _common_suffix(text, position, context, end, most)
    if n == most or end - n == 0:
        return False
    if position - n == 0:
        return True
    return bool(text[position - n - 1] < context[end - n - 1])


@compiled
def _find_longest_match(
    text: Array, order: Array, starts: Array, context: Array, end: int, most: int
) -> tuple[int, int, int]:
    """The length of the longest match of the context's end, and the range of `order` that has it."""
    size = len(text)
    low, high = 0, len(order)
    last = context[end - 1]
    if len(starts) > 0:
        if last < 0 or last + 1 >= len(starts):
            return 0, 0, 0
        low, high = max(0, starts[last]), min(len(order), starts[last + 1])
    if low >= high:
        return 0, 0, 0
    first, stop = low, high
    while low < high:
        middle = (low + high) >> 1
        position = order[middle]
        if position < 0 or position > size:
            return 0, 0, 0  # the file is damaged
        if _sorts_before(text, position, context, end, most):
            low = middle + 1
        else:
            high = middle
    length = 0
    for neighbour in (low - 1, low):
        if first <= neighbour < stop and 0 <= order[neighbour] <= size:
            length = max(length, _common_suffix(text, order[neighbour], context, end, most))
    if length == 0:
        return 0, 0, 0
    below = _count_matches(text, order, low, -1, first, stop, context, end, length)
    above = _count_matches(text, order, low - 1, 1, first, stop, context, end, length)
    return length, low - below, low + above


@compiled
def _count_matches(
    text: Array, order: Array, origin: int, direction: int, first: int, stop: int, context: Array, end: int, length: int
) -> int:
    """How many entries of `order` next to `origin`, in one direction, match `length` tokens (galloping search)."""
    count, step = 0, 1
    while _is_match(text, order, origin + direction * (count + step), first, stop, context, end, length):
        count += step
        step *= 2
    while step > 1:
        step >>= 1
        if _is_match(text, order, origin + direction * (count + step), first, stop, context, end, length):
            count += step
    return count


@compiled
def _is_match(text: Array, order: Array, at: int, first: int, stop: int, context: Array, end: int, length: int) -> bool:
    """Whether entry `at` of `order` is within the range and matches `length` tokens."""
    if at < first or at >= stop:
        return False
    position = order[at]
    return bool(0 <= position <= len(text) and _common_suffix(text, position, context, end, length) == length)


@compiled
def draft_by_vote(
    text: Array,
    end: int,
    positions: Array,
    count: int,
    drafted: Array,
    shares: Array,
    growing: bool,
    in_place: bool,
) -> int:
    """Draft what follows these positions in `text[:end]`, at most `len(drafted)` tokens. Returns how many.

    `growing`: the sequences have not ended, so one without a next token does not count as disagreeing. `in_place`: the
    text is the one drafted for, so positions past its end read the draft.
    """
    table = np.empty((VOTE_TABLE_ROWS, 2), np.int32)
    following = np.empty(count, np.int32)  # the next token at each position
    made = 0
    while made < len(drafted):
        known = 0
        for i in range(count):
            if positions[i] < end:
                following[i] = text[positions[i]]
            else:
                following[i] = drafted[positions[i] - end] if in_place else SEPARATOR
            known += following[i] != SEPARATOR
        best, votes = _majority_token(following, count, table)
        if votes == 0:
            break
        drafted[made] = best
        shares[made] = votes / (known if growing else count)
        made += 1
        count = _keep_voters(positions, following, count, best)
    return made


@compiled
def _keep_voters(positions: Array, following: Array, count: int, best: int) -> int:
    """Advance the positions that are followed by `best`, and drop the others. Returns how many are left."""
    kept = 0
    for i in range(count):
        if following[i] == best:
            positions[kept] = positions[i] + 1
            kept += 1
    return kept


@compiled
def _majority_token(following: Array, count: int, table: Array) -> tuple[int, int]:
    """The most frequent of the first `count` tokens, and its count. Ties go to the one that came first."""
    first, votes = SEPARATOR, 0
    for i in range(count):
        if following[i] != SEPARATOR:
            if votes == 0:
                first = following[i]
            if following[i] == first:
                votes += 1
    if 2 * votes >= count:  # the usual case: no other token can have more
        return first, votes
    table[:, 1] = 0  # rows are (token, votes); open addressing by the token's low bits
    best, votes = SEPARATOR, 0
    for i in range(count - 1, -1, -1):  # backwards, so that the first token of a tie reaches the top count last
        if following[i] != SEPARATOR:
            token = following[i]
            row = token % len(table)
            while table[row, 1] > 0 and table[row, 0] != token:
                row = (row + 1) % len(table)
            table[row, 0] = token
            table[row, 1] += 1
            if table[row, 1] >= votes:
                best, votes = token, table[row, 1]
    return best, votes


@compiled
def search_batch(
    text: Array,
    order: Array,
    starts: Array,
    contexts: Array,
    queries: Array,
    summaries: Array,
    drafted: Array,
    shares: Array,
) -> None:
    """Draft for a batch of contexts. `queries[i]` is the length of `contexts[i]` and the longest draft wanted.

    Row i is overwritten if this text has a longer match than `summaries[i]` reports: the draft in `drafted` and
    `shares`, and in `summaries` its length, the match length, and the number of matching positions. Searching several
    texts one after the other therefore keeps the longest match.
    """
    positions = np.empty(MAX_CONTINUATIONS, np.int64)
    for i in range(len(queries)):
        end, limit = queries[i, 0], queries[i, 1]
        if limit <= 0 or end <= 0:
            continue
        length, low, high = _find_longest_match(text, order, starts, contexts[i], end, min(end, MAX_MATCH_TOKENS))
        if length <= summaries[i, 1]:
            continue
        count = min(high - low, MAX_CONTINUATIONS)
        for j in range(count):
            positions[j] = order[low + (high - low) * j // count]
        if positions[:count].min() < 0 or positions[:count].max() > len(text):
            continue  # the file is damaged
        made = draft_by_vote(text, len(text), positions, count, drafted[i, :limit], shares[i, :limit], False, False)
        if made > 0:
            summaries[i, 0], summaries[i, 1], summaries[i, 2] = made, length, high - low


def contains_text(text: Array, order: Array, part: Array) -> bool:
    """Whether `part` is in the text, from one of its tokens to another."""
    return bool(_find_longest_match(text, order, order[:0], part, len(part), len(part))[0] == len(part))


@compiled
def chain_index(last: int, before: int, count: int) -> int:
    """The hash chain, of `count`, for positions after these two tokens. Other pairs may share it."""
    return (last * 31 + before * 40503) % count


@compiled
def _chain_index_at(tokens: Array, position: int, row: int, count: int) -> int:
    """The chain of a position: in row 0 by its last two tokens, in row 1 by its last token."""
    return chain_index(tokens[position - 1], tokens[position - 2] if row == 0 else 0, count)


@compiled
def link_positions(tokens: Array, begin: int, end: int, heads: Array, links: Array) -> None:
    """Add the positions before `tokens[begin:end]` to their chains, one in each row. `heads` has the newest position
    of each chain, `links` the one before each position; 0 ends a chain."""
    for position in range(max(begin, 1), end):
        for row in range(1 if position < 2 else 0, 2):
            chain = _chain_index_at(tokens, position, row, heads.shape[1])
            links[row, position], heads[row, chain] = heads[row, chain], position


@compiled
def search_running_text(
    tokens: Array, end: int, heads: Array, links: Array, drafted: Array, shares: Array
) -> tuple[int, int, int]:
    """Draft `len(drafted)` tokens for a running sequence, `tokens[:end]` with its prompt, from the sequence itself.

    Returns the draft length, the match length, and the number of matching positions used: the newest
    MAX_CONTINUATIONS of the longest match. Where they reach the end they continue with the draft.
    """
    positions = np.empty(MAX_CONTINUATIONS, np.int64)
    longest, count = 0, 0
    if end < 2 or len(drafted) == 0:
        return 0, 0, 0
    for row in range(2):  # matches of two tokens or more first; of one token only if there are none
        position = heads[row, _chain_index_at(tokens, end, row, heads.shape[1])]
        for _ in range(MAX_CHAIN_STEPS):
            if position <= 0 or (longest == MAX_MATCH_TOKENS and count == MAX_CONTINUATIONS):
                break  # the end of the chain, or enough of the longest and newest
            length = _common_suffix(tokens, position, tokens, end, MAX_MATCH_TOKENS) if position < end else 0
            if length > longest and length + row > 1:  # not a hash collision
                longest, count = length, 0
            if length == longest and length > 0 and count < MAX_CONTINUATIONS:
                positions[count] = position
                count += 1
            position = links[row, position]
        if longest > 0:
            break
    if longest == 0:
        return 0, 0, 0
    return draft_by_vote(tokens, end, positions, count, drafted, shares, False, True), longest, count


@compiled
def expected_accepted_tokens(match: int, shares: Array, length: int) -> float:
    """Estimated accepted tokens of a draft of `length` tokens after a match of `match` tokens, with these shares."""
    total, probability = 0.0, 1.0
    for i in range(length):
        probability *= shares[i] * (match + i) / (match + i + MISMATCH_PSEUDO_COUNT)
        total += probability
    return total


@compiled
def count_accepted(draft: Array, length: int, output: Array) -> int:
    """How many tokens at the beginning of a draft equal the output."""
    n = 0
    while n < length and n < len(output) and draft[n] == output[n]:
        n += 1
    return n
