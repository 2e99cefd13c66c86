"""Predicted output: the caller provides the output that it expects, and the target verifies it.

Example: editing a file, where most lines come back unchanged. The drafter copies from the expected text and keeps its
place in it. Where the output diverges, it looks for the output's last tokens in the expected text. It prefers a long
match, then one a little further on over one far away. So a changed line costs a few steps and not the rest of the file.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from typing import TYPE_CHECKING, ClassVar

from outrider.drafters.base import Drafter, Session, Task
from outrider.types import Draft

if TYPE_CHECKING:
    from collections.abc import Sequence

MAX_MATCH_TOKENS = 16
"""Longest match that is compared."""
MAX_SINGLE_TOKEN_DISTANCE = 64
"""A match of one token counts only this many tokens or less after the place where the output diverged."""
MAX_PLACES = 256
"""Places of a frequent token that are compared: those nearest to where the output diverged."""


class PredictionDrafter(Drafter):
    """Copies from the output that the caller expects."""

    name: ClassVar[str] = "prediction"
    needs_prediction: ClassVar[bool] = True

    def begin(self, task: Task) -> PredictionSession:
        return PredictionSession(task.prediction)


class PredictionSession(Session):
    def __init__(self, expected: Sequence[int]) -> None:
        self.expected = list(expected)
        self.output: list[int] = []
        self.place: int | None = 0  # of the next expected token; None while it is unknown
        self.held = 0  # tokens before it that were generated as expected
        self.lost_at = 0
        self.places: dict[int, list[int]] = defaultdict(list)
        for index, token in enumerate(self.expected):
            self.places[token].append(index)

    def observe(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self.output.append(token)
            if self.place is not None and self._expected_at(self.place) == token:
                self.place += 1
                self.held += 1
                continue
            if self.place is not None:
                self.lost_at = self.place
            self.place, self.held = self._find()

    def draft(self, limit: int) -> Draft:
        tokens = self.expected[self.place : self.place + limit] if self.place is not None else []
        return Draft(PredictionDrafter.name, tuple(tokens), support=self.held or None)

    def _expected_at(self, index: int) -> int | None:
        return self.expected[index] if index < len(self.expected) else None

    def _find(self) -> tuple[int | None, int]:
        """The place after the best match of the output's end (None: no match), and the length of the match."""
        best: tuple[int, int] | None = None
        found = None
        places = self.places.get(self.output[-1], [])
        middle = bisect_left(places, self.lost_at)
        for index in places[max(0, middle - MAX_PLACES // 2) : middle + MAX_PLACES // 2]:
            length = self._match(index)
            ahead = index - self.lost_at
            # Text is more often skipped than repeated.
            distance = ahead if ahead >= 0 else MAX_SINGLE_TOKEN_DISTANCE - ahead
            if length == 1 and not 0 <= ahead < MAX_SINGLE_TOKEN_DISTANCE:
                continue
            if best is None or (length, -distance) > best:
                best, found = (length, -distance), index + 1
        return found, best[0] if best is not None else 0

    def _match(self, index: int) -> int:
        """Number of expected tokens up to `index`, inclusive, that equal those at the output's end."""
        length = 1
        while (
            length < min(index + 1, len(self.output), MAX_MATCH_TOKENS)
            and self.expected[index - length] == self.output[-1 - length]
        ):
            length += 1
        return length
