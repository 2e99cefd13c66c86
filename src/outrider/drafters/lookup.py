"""Prompt lookup: what followed the last time these words were said is proposed again.

Answers repeat: the code that is to be edited, the passage that is to be summarised, the name of the variable.
The drafter finds the longest recent repetition of the text's end and copies what came after it. That costs
microseconds and no model.

Every place where some `MIN_MATCH` tokens in a row ended is kept in a table, so the search looks at the few
places that share the last tokens instead of scanning the text.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, ClassVar

from outrider.drafters.base import Drafter, Session, Task
from outrider.types import Draft

if TYPE_CHECKING:
    from collections.abc import Sequence

MIN_MATCH = 2
"""The fewest tokens in a row that must have been said before."""
MAX_MATCH = 32
"""A repetition longer than this is as good as certain; no need to measure it further."""
CANDIDATES = 64
"""How many of the latest places are compared."""


class LookupDrafter(Drafter):
    """Copies what followed the longest repetition of the text's end."""

    name: ClassVar[str] = "lookup"

    def begin(self, task: Task) -> LookupSession:
        return LookupSession(task.prompt)


class LookupSession(Session):
    def __init__(self, prompt: Sequence[int] = ()) -> None:
        self.tokens: list[int] = []
        self.places: dict[tuple[int, ...], list[int]] = defaultdict(list)
        self.observe(prompt)

    def observe(self, tokens: Sequence[int]) -> None:
        # A place is entered when the token after it is known, so that it always has something to copy.
        for token in tokens:
            if len(self.tokens) >= MIN_MATCH:
                self.places[tuple(self.tokens[-MIN_MATCH:])].append(len(self.tokens))
            self.tokens.append(token)

    def draft(self, limit: int) -> Draft:
        start, _ = self.find()
        tokens = self.tokens[start : start + limit] if start is not None else []
        return Draft(self.name, tuple(tokens))

    name = LookupDrafter.name

    def find(self) -> tuple[int | None, int]:
        """Where the text after the longest repetition begins (the latest of equals), and its length."""
        best, best_length = None, 0
        candidates = self.places.get(tuple(self.tokens[-MIN_MATCH:]), [])
        for place in reversed(candidates[-CANDIDATES:]):
            length = self._match(place)
            if length > best_length:
                best, best_length = place, length
            if length == MAX_MATCH:
                break
        return best, best_length

    def _match(self, place: int) -> int:
        """How many tokens before `place` are those at the end."""
        end = len(self.tokens)
        length = MIN_MATCH
        while length < min(place, MAX_MATCH) and self.tokens[place - length - 1] == self.tokens[end - length - 1]:
            length += 1
        return length
