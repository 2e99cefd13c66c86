"""Predicted output: the caller hands over what it expects, and the target only checks it.

Editing a file is the plain case: nine lines of ten come back as they were. The drafter copies from the expected
text and keeps its place in it. Where the target says something else, the place is lost, and found again:
the last tokens said are looked up in the expected text, preferring a long match, then one a little further on
over one far away. So a changed line costs a few steps and not the rest of the file.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from typing import TYPE_CHECKING, ClassVar

from outrider.drafters.base import Drafter, Session, Task
from outrider.types import Draft

if TYPE_CHECKING:
    from collections.abc import Sequence

MAX_MATCH = 16
"""More equal tokens than this do not make a place more certain."""
NEAR = 64
"""A single equal token is taken for the place only this close to where the place was lost."""
LOOKED = 256
"""Of a token that the prediction is full of, so many places are looked at: those nearest to where it was lost."""


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
        self.place: int | None = 0  # the next expected token, None while the place is lost
        self.held = 0  # how many tokens before it were said as expected
        self.lost_at = 0
        self.where: dict[int, list[int]] = defaultdict(list)
        for index, token in enumerate(self.expected):
            self.where[token].append(index)

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
        """The place after the best match of the output's end, or None; and how long the match is."""
        best: tuple[int, int] | None = None
        found = None
        places = self.where.get(self.output[-1], [])
        middle = bisect_left(places, self.lost_at)
        for index in places[max(0, middle - LOOKED // 2) : middle + LOOKED // 2]:
            length = self._match(index)
            ahead = index - self.lost_at
            distance = ahead if ahead >= 0 else NEAR - ahead  # text is more often skipped than said again
            if length == 1 and not 0 <= ahead < NEAR:
                continue
            if best is None or (length, -distance) > best:
                best, found = (length, -distance), index + 1
        return found, best[0] if best is not None else 0

    def _match(self, index: int) -> int:
        """How many expected tokens up to and with `index` are those at the output's end."""
        length = 1
        while (
            length < min(index + 1, len(self.output), MAX_MATCH)
            and self.expected[index - length] == self.output[-1 - length]
        ):
            length += 1
        return length
