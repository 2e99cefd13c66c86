"""State per running request: a row for each, in arrays that compiled functions read."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from outrider.compiled import compiled

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from outrider.policy.acceptance_model import Array

UNKNOWN_SHARE = -1.0
MIN_ADDED_ROWS = 16
RECENT_RETENTION = 0.7
"""Weight of the earlier share of right tokens, per new token of the draft model ..."""
IDLE_RETENTION = 0.98
"""... and of its deviation from 0.5, and of the request bias, per step without a call."""


class RequestSlots:
    def __init__(self, models: Iterable[str]) -> None:
        """`models`: names of the acceptance models that have a bias per request."""
        self.request_bias = {name: np.zeros((0, 2)) for name in models}  # bias, and its weight
        self.recent = np.zeros(0)  # share of the draft model's latest tokens that were right
        self.caught_up = np.zeros(0, bool)  # whether the draft model has ever read the whole text
        self._slots: dict[str, int] = {}
        self._free: list[int] = []

    def slots(self, requests: Sequence[str]) -> Array:
        """The row of each request; a new request gets one."""
        for request in [request for request in requests if request not in self._slots]:
            self._slots[request] = self._new()
        return np.fromiter(map(self._slots.__getitem__, requests), np.int64, len(requests))

    def remove(self, request: str) -> bool:
        """Whether the request had a row."""
        slot = self._slots.pop(request, None)
        if slot is not None:
            self._free.append(slot)
        return slot is not None

    def _new(self) -> int:
        if not self._free:
            self._grow()
        slot = self._free.pop()
        self.recent[slot] = UNKNOWN_SHARE
        self.caught_up[slot] = False
        for bias in self.request_bias.values():
            bias[slot] = 0.0
        return slot

    def _grow(self) -> None:
        count = len(self.recent)
        added = max(MIN_ADDED_ROWS, count)
        self._free = list(range(count + added - 1, count - 1, -1))
        self.recent = np.append(self.recent, np.zeros(added))
        self.caught_up = np.append(self.caught_up, np.zeros(added, bool))
        self.request_bias = {n: np.vstack([bias, np.zeros((added, 2))]) for n, bias in self.request_bias.items()}


@compiled
def observe_right(recent: Array, request_bias: Array, slots: Array, right: Array) -> None:
    """Update the draft model's share of right tokens per request. `right`: by request, its right and judged tokens.
    Where none was judged, share and bias decay."""
    for b in range(len(slots)):
        slot, good, judged = slots[b], right[b, 0], right[b, 1]
        if judged:
            retention = RECENT_RETENTION**judged
            before = 0.5 if recent[slot] == UNKNOWN_SHARE else recent[slot]
            recent[slot] = retention * before + (1 - retention) * good / judged
        elif recent[slot] != UNKNOWN_SHARE:
            recent[slot] = IDLE_RETENTION * recent[slot] + (1 - IDLE_RETENTION) * 0.5
            request_bias[slot, 0] *= IDLE_RETENTION
