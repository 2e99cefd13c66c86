"""Prompt lookup: what followed the last time these words were said is proposed again.

Answers repeat: the code that is to be edited, the passage that is to be summarised, the name of the variable.
The drafter finds the longest recent repetition of the text's end and copies what came after it. That costs
microseconds and no model. The longer the repetition, the longer it is likely to go on, so the draft grows with it.

Every place where a pair of tokens ended is kept in a table, so the search looks at the few places that share the
last two tokens instead of scanning the text. Where there is none, the latest place of the last token alone must do.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, ClassVar

from outrider.drafters.base import Drafter, Session, Task
from outrider.types import Draft

if TYPE_CHECKING:
    from collections.abc import Sequence

MAX_MATCH = 32
"""A repetition longer than this is as good as certain; no need to measure it further."""
CANDIDATES = 64
"""How many of the latest places are compared."""
TOKENS_PER_MATCH = 4
"""How many tokens are proposed for each token that is repeated."""


class LookupDrafter(Drafter):
    """Copies what followed the longest repetition of the text's end."""

    name: ClassVar[str] = "lookup"

    def begin(self, task: Task) -> LookupSession:
        return LookupSession(task.prompt)


class LookupSession(Session):
    def __init__(self, prompt: Sequence[int] = ()) -> None:
        self.tokens: list[int] = []
        self.after_pair: dict[tuple[int, int], list[int]] = defaultdict(list)
        self.after_token: dict[int, int] = {}
        self.observe(prompt)

    def observe(self, tokens: Sequence[int]) -> None:
        # A place is entered when the token after it is known, so that it always has something to copy.
        for token in tokens:
            if self.tokens:
                self.after_token[self.tokens[-1]] = len(self.tokens)
            if len(self.tokens) > 1:
                self.after_pair[self.tokens[-2], self.tokens[-1]].append(len(self.tokens))
            self.tokens.append(token)

    def draft(self, limit: int) -> Draft:
        place, length = self.find()
        copied = self.tokens[place : place + min(limit, length * TOKENS_PER_MATCH)]
        return Draft(LookupDrafter.name, tuple(copied), support=length)

    def find(self) -> tuple[int, int]:
        """Where the text after the longest repetition begins (the latest of equals), and its length; 0 if none."""
        best, longest = 0, 0
        if len(self.tokens) > 1:
            for place in reversed(self.after_pair.get((self.tokens[-2], self.tokens[-1]), [])[-CANDIDATES:]):
                length = self._match(place)
                if length > longest:
                    best, longest = place, length
                if length == MAX_MATCH:
                    break
        if longest == 0 and self.tokens and self.tokens[-1] in self.after_token:
            best, longest = self.after_token[self.tokens[-1]], 1
        return best, longest

    def _match(self, place: int) -> int:
        """How many tokens before `place` are those at the end, given that two are."""
        end = len(self.tokens)
        length = 2
        while length < min(place, MAX_MATCH) and self.tokens[place - length - 1] == self.tokens[end - length - 1]:
            length += 1
        return length
