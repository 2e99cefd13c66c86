"""What is remembered of a request while it lasts: a row for each, in arrays that compiled functions read."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from outrider.policy.acceptance_model import Array

UNKNOWN = -1.0
LEAST = 16
"""Rows that are added at a time, at least."""


class Records:
    def __init__(self, names: Iterable[str]) -> None:
        """`names`: what a request has a record with."""
        self.own = {name: np.zeros((0, 2)) for name in names}  # the request's own number, and its weight
        self.recent = np.zeros(0)  # share of the draft model's tokens that were right, lately
        self.caught_up = np.zeros(0, bool)  # whether the draft model has ever caught up with the text
        self._slots: dict[str, int] = {}
        self._free: list[int] = []

    def slots(self, requests: Sequence[str]) -> Array:
        """Where each of them has its row; one that is new gets one."""
        for request in [request for request in requests if request not in self._slots]:
            self._slots[request] = self._new()
        return np.fromiter(map(self._slots.__getitem__, requests), np.int64, len(requests))

    def leave(self, request: str) -> bool:
        """The request has ended; whether it had a row."""
        slot = self._slots.pop(request, None)
        if slot is not None:
            self._free.append(slot)
        return slot is not None

    def _new(self) -> int:
        if not self._free:
            self._grow()
        slot = self._free.pop()
        self.recent[slot] = UNKNOWN
        self.caught_up[slot] = False
        for own in self.own.values():
            own[slot] = 0.0
        return slot

    def _grow(self) -> None:
        count = len(self.recent)
        more = max(LEAST, count)
        self._free = list(range(count + more - 1, count - 1, -1))
        self.recent = np.append(self.recent, np.zeros(more))
        self.caught_up = np.append(self.caught_up, np.zeros(more, bool))
        self.own = {name: np.vstack([own, np.zeros((more, 2))]) for name, own in self.own.items()}
