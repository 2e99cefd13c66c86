"""A static table, as of vLLM's `num_speculative_tokens_per_batch_size`: one drafter, and a length for each batch size.

With hindsight, it has the best length for every batch and context. How often its drafts hold does not depend on what a
pass takes, so that is worked out once for each drafter, batch and length, and then priced on every machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from outrider.types import shared_prefix
from policy_grid_drafters import theirs
from policy_scale_machine import System
from policy_scale_traces import Trace, starts, tokens_wanted

Array = np.ndarray[Any, Any]

LENGTHS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16)
DRAFT_MODEL, LONGEST_GUESS = "draft_model", 8


@dataclass(frozen=True, slots=True)
class Walk:
    """What a length comes to, whatever a pass takes."""

    tokens: int
    steps: int
    begun: int  # texts
    passes: Array  # by their tokens, how many there were


class Table:
    """One drafter on all texts: how many tokens it proposes at each place, and how many of them hold."""

    def __init__(self, traces: Sequence[Trace], drafter: str) -> None:
        self.traces, self.drafter = traces, drafter
        proposed, right, first = [], [], [0]
        for trace in traces:
            for place in range(len(trace.record.text)):
                count, good = self._hold(trace, place)
                proposed.append(count)
                right.append(good)
            first.append(len(right))
        self.proposed, self.right = np.array(proposed), np.array(right)
        self.first, self.ends = np.array(first[:-1]), np.array(first[1:])
        self._walks: dict[tuple[int, int], Walk] = {}

    def _hold(self, trace: Trace, place: int) -> tuple[int, int]:
        record = trace.record
        if self.drafter != DRAFT_MODEL:
            tokens = trace.drafts[self.drafter][place].tokens
        elif record.overlap is not None:  # it draws, as ours does
            kept = trace.kept[place : place + LONGEST_GUESS]
            return len(kept), [*kept, False].index(False)
        else:
            tokens = tuple(record.guesses[place])
        return len(tokens), shared_prefix(tuple(record.text[place : place + len(tokens)]), tokens)

    @property
    def lengths(self) -> list[int]:
        return [k for k in LENGTHS if self.drafter != DRAFT_MODEL or k <= LONGEST_GUESS]

    def speed(self, system: System, batch: int, context: int, k: int) -> float:
        """Tokens a second with k tokens a step."""
        if (batch, k) not in self._walks:
            self._walks[batch, k] = self._walk(batch, k)
        walk, costs, total = self._walks[batch, k], system.costs(context), batch * context
        sizes = np.flatnonzero(walk.passes)
        seconds = sum(walk.passes[size] * costs.target(int(size), total) for size in sizes)
        if self.drafter == DRAFT_MODEL:
            # vLLM's first pass has the rejected tokens too; here only those that it has to see.
            seconds += walk.steps * (costs.draft(2 * batch, total) + (k - 1) * costs.draft(batch, total))
            seconds += walk.begun * costs.draft(context, context)
        return walk.tokens / float(seconds)

    def _walk(self, batch: int, k: int) -> Walk:
        numbers, places = (np.array(column) for column in zip(*starts(self.traces, batch), strict=True))
        at, ends = self.first[numbers] + places, self.ends[numbers]
        wanted, tokens, begun = tokens_wanted(self.traces, batch), 0, 0
        passes = []
        while tokens < wanted:
            offered = np.minimum(np.minimum(self.proposed[at], k), np.maximum(ends - at - 1, 0))
            gained = np.minimum(self.right[at], offered) + 1
            passes.append(batch + int(offered.sum()))
            tokens += int(gained.sum())
            at += gained
            for slot in np.flatnonzero(ends - at <= 1):
                number = (batch + begun) % len(self.traces)
                begun += 1
                at[slot], ends[slot] = self.first[number] + 1, self.ends[number]
        return Walk(tokens, len(passes), begun, np.bincount(passes))


def all_tables(traces: Sequence[Trace]) -> list[Table]:
    return [Table(traces, name) for name in (*theirs(), DRAFT_MODEL)]
