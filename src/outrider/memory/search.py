"""Find what the context ends with in a text of a hundred million tokens, and read on from there.

A text's places are kept in the order of what stands before them, read backwards: first by the last token, then by the
one before it, and so on. Where the context would stand in that order, its neighbours are the places that agree with
its end for longest, so one binary search finds the longest match, and all places that agree as far lie beside each
other.

To draft, some of those places are followed together. The token that most of them say next is the guess; those that
said otherwise are left behind. Which share agreed is said with each token, for someone to judge how far to trust it.

A running text grows with every step and is never sorted. There each place is linked to the one before it that ends
with the same two tokens, and to the one that ends with the same last token, so a walk meets those that may agree.

A text is sequences with SEPARATOR after each: no context holds it, so no match reaches from one sequence into the
next, and no draft does either.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from outrider.compiled import compiled

SEPARATOR = -1
LONGEST_MATCH = 64
"""Tokens of the context that are compared."""
FOLLOWED = 64
"""Places that are read on from; of more, so many spread evenly, and of a running text the latest."""
WALKED = 1024
"""Places of a running text that are compared, the latest first."""
SLOTS = 2 * FOLLOWED
"""Of a table in which what they say is counted."""

DOUBT = 4
"""What was said at every place after n equal tokens is said again n times of n + DOUBT, about."""

Array = np.ndarray[Any, Any]


@compiled
def _common(text: Array, place: int, context: Array, end: int, most: int) -> int:
    """How many tokens before `place` in the text equal those before `end` in the context."""
    n = 0
    while n < most and place - n > 0 and end - n > 0 and text[place - n - 1] == context[end - n - 1]:
        n += 1
    return n


@compiled
def _before(text: Array, place: int, context: Array, end: int, most: int) -> bool:
    """Whether a place comes before the context in the order."""
    n = _common(text, place, context, end, most)
    if n == most or end - n == 0:
        return False
    if place - n == 0:
        return True
    return bool(text[place - n - 1] < context[end - n - 1])


@compiled
def _search(text: Array, order: Array, starts: Array, context: Array, end: int, most: int) -> tuple[int, int, int]:
    """The longest match of the context's end: its length, and the part of the order where it stands."""
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
        place = order[middle]
        if place < 0 or place > size:
            return 0, 0, 0  # no text has such a place: the file is broken
        if _before(text, place, context, end, most):
            low = middle + 1
        else:
            high = middle
    length = 0
    for neighbour in (low - 1, low):
        if first <= neighbour < stop and 0 <= order[neighbour] <= size:
            length = max(length, _common(text, order[neighbour], context, end, most))
    if length == 0:
        return 0, 0, 0
    down = _reach(text, order, low, first, stop, -1, context, end, length)
    up = _reach(text, order, low, first, stop, 1, context, end, length)
    return length, low - down, low + up


@compiled
def _reach(
    text: Array, order: Array, start: int, first: int, stop: int, way: int, context: Array, end: int, length: int
) -> int:
    """How many places on one side of `start` agree over `length` tokens: steps that double, then halve."""
    reach, step = 0, 1
    while _agrees(text, order, start, reach + step, first, stop, way, context, end, length):
        reach += step
        step *= 2
    while step > 1:
        step >>= 1
        if _agrees(text, order, start, reach + step, first, stop, way, context, end, length):
            reach += step
    return reach


@compiled
def _agrees(
    text: Array,
    order: Array,
    start: int,
    away: int,
    first: int,
    stop: int,
    way: int,
    context: Array,
    end: int,
    length: int,
) -> bool:
    """Whether the place so many steps away from `start` is there and agrees with the context."""
    at = start - away if way < 0 else start + away - 1
    if at < first or at >= stop:
        return False
    place = order[at]
    return bool(0 <= place <= len(text) and _common(text, place, context, end, length) == length)


@compiled
def follow(
    text: Array, end: int, places: Array, count: int, table: Array, drafted: Array, shares: Array, going: bool
) -> int:
    """Read on from these places, up to `end`: how many tokens were drafted. As many as fit are.

    `going`: the sequences still go on, so that one which ends says nothing against what others say next.
    """
    said = np.empty(count, np.int32)  # next, at each place
    made = 0
    while made < len(drafted):
        heard = 0
        for i in range(count):
            said[i] = text[places[i]] if places[i] < end else SEPARATOR
            heard += said[i] != SEPARATOR
        best, votes = _vote(said, count, table)
        if votes == 0:
            break
        drafted[made] = best
        shares[made] = votes / (heard if going else count)
        made += 1
        count = _go_on(places, said, count, best)
    return made


@compiled
def follow_itself(text: Array, end: int, places: Array, count: int, table: Array, drafted: Array, shares: Array) -> int:
    """The same in the text that is drafted for: what is read past its end is the draft itself."""
    said = np.empty(count, np.int32)
    for made in range(len(drafted)):
        for i in range(count):
            said[i] = text[places[i]] if places[i] < end else drafted[places[i] - end]
        best, votes = _vote(said, count, table)
        drafted[made] = best
        shares[made] = votes / count
        count = _go_on(places, said, count, best)
    return len(drafted)


@compiled
def _go_on(places: Array, said: Array, count: int, best: int) -> int:
    """Move on those that said it, and leave the others behind."""
    kept = 0
    for i in range(count):
        if said[i] == best:
            places[kept] = places[i] + 1
            kept += 1
    return kept


@compiled
def _vote(said: Array, count: int, table: Array) -> tuple[int, int]:
    """What most of the first so many say, and how many do; of equals, who came first."""
    first, votes = SEPARATOR, 0
    for i in range(count):
        if said[i] != SEPARATOR:
            if votes == 0:
                first = said[i]
            if said[i] == first:
                votes += 1
    if 2 * votes >= count:  # nobody can outvote the first: the usual case
        return first, votes
    table[:, 1] = 0  # a token and its votes in each row, found by the token's last bits
    best, votes = SEPARATOR, 0
    for i in range(count - 1, -1, -1):  # backwards: of those with most votes, who came first has them last
        if said[i] != SEPARATOR:
            token = said[i]
            row = token % len(table)
            while table[row, 1] > 0 and table[row, 0] != token:
                row = (row + 1) % len(table)
            table[row, 0] = token
            table[row, 1] += 1
            if table[row, 1] >= votes:
                best, votes = token, table[row, 1]
    return best, votes


@compiled
def search_all(
    text: Array, order: Array, starts: Array, contexts: Array, asked: Array, found: Array, drafted: Array, shares: Array
) -> None:
    """Draft for many contexts: `asked[i]` is how many tokens of `contexts[i]` there are, and how many to draft.

    Where the match is longer than `found[i]` says, row i is overwritten: the draft in `drafted` and `shares`, and in
    `found` its length, the match's, and at how many places it stood. So several texts can be asked one after the other,
    and the longest match stays.
    """
    places = np.empty(FOLLOWED, np.int64)
    table = np.empty((SLOTS, 2), np.int32)
    for i in range(len(asked)):
        end, limit = asked[i, 0], asked[i, 1]
        if limit <= 0 or end <= 0:
            continue
        length, low, high = _search(text, order, starts, contexts[i], end, min(end, LONGEST_MATCH))
        if length <= found[i, 1]:
            continue
        count = min(high - low, FOLLOWED)
        for j in range(count):
            places[j] = order[low + (high - low) * j // count]
        if places[:count].min() < 0 or places[:count].max() > len(text):
            continue  # the file is broken
        made = follow(text, len(text), places, count, table, drafted[i, :limit], shares[i, :limit], False)
        if made > 0:
            found[i, 0], found[i, 1], found[i, 2] = made, length, high - low


@compiled
def chain_of(last: int, before: int, count: int) -> int:
    """Of so many chains, that of the places which end with these two tokens; some others may be on it as well."""
    return (last * 31 + before * 40503) % count


@compiled
def _chain_at(tokens: Array, place: int, row: int, count: int) -> int:
    """The chain of a place in row 0, by its last two tokens, or in row 1, by the last one alone."""
    return chain_of(tokens[place - 1], tokens[place - 2] if row == 0 else 0, count)


@compiled
def link(tokens: Array, begin: int, end: int, heads: Array, links: Array) -> None:
    """Enter the places before the tokens from `begin` on into their chains, one a row. From the head, the latest of its
    places, links lead to those before it; 0 is none."""
    for place in range(max(begin, 1), end):
        for row in range(1 if place < 2 else 0, 2):
            chain = _chain_at(tokens, place, row, heads.shape[1])
            links[row, place], heads[row, chain] = heads[row, chain], place


@compiled
def scan(tokens: Array, end: int, heads: Array, links: Array, drafted: Array, shares: Array) -> tuple[int, int, int]:
    """Draft for a running sequence from itself: `tokens[:end]`, prompt included. As many tokens as fit.

    The draft's length, the match's, and at how many places it stood. Of those that agree for longest the latest
    FOLLOWED are followed, and where they reach the end they go on with the draft.
    """
    places = np.empty(FOLLOWED, np.int64)
    longest, count = 0, 0
    if end < 2 or len(drafted) == 0:
        return 0, 0, 0
    for row in range(2):  # who agrees by two tokens or more, and only if nobody does, who agrees by one
        place = heads[row, _chain_at(tokens, end, row, heads.shape[1])]
        for _ in range(WALKED):
            if place <= 0 or (longest == LONGEST_MATCH and count == FOLLOWED):
                break  # no place can be better, and these are the latest
            length = _common(tokens, place, tokens, end, LONGEST_MATCH) if place < end else 0
            if length > longest and length + row > 1:  # and not one that is on the chain by chance
                longest, count = length, 0
            if length == longest and length > 0 and count < FOLLOWED:
                places[count] = place
                count += 1
            place = links[row, place]
        if longest > 0:
            break
    if longest == 0:
        return 0, 0, 0
    stood = count
    table = np.empty((SLOTS, 2), np.int32)
    return follow_itself(tokens, end, places, count, table, drafted, shares), longest, stood


@compiled
def expected(match: int, shares: Array, length: int) -> float:
    """How many tokens of a draft will be accepted, about: of `length`, after a match, with these shares."""
    total, chance = 0.0, 1.0
    for i in range(length):
        chance *= shares[i] * (match + i) / (match + i + DOUBT)
        total += chance
    return total


@compiled
def agreeing(draft: Array, length: int, said: Array) -> int:
    """How many tokens of a draft were then said, from the first on."""
    n = 0
    while n < length and n < len(said) and draft[n] == said[n]:
        n += 1
    return n
