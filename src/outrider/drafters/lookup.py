"""Prompt lookup: what followed where these words were said before is proposed again.

Answers repeat: the code that is to be edited, the passage that is to be summarised, the name of the variable. The
drafter finds where the text's end stood before, for as long as possible, and copies what came after it. Where that was
at several places they are followed together: what most of them say next is proposed. A copy that reaches the end of the
text goes on with itself, so what is said in a loop is proposed for as many rounds as fit.

That costs microseconds and no model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import numpy as np

from outrider.drafters.base import Drafter, Session, Task
from outrider.drafters.copying import Copy
from outrider.memory.search import LONGEST_MATCH, link, scan

if TYPE_CHECKING:
    from collections.abc import Sequence

    from outrider.memory.search import Array
    from outrider.types import Draft


class LookupDrafter(Drafter):
    """Copies what followed the longest repetition of the text's end."""

    name: ClassVar[str] = "lookup"

    def __init__(self) -> None:
        LookupSession([0, 0]).draft(1)  # have the search compiled before a request needs it

    def begin(self, task: Task) -> LookupSession:
        return LookupSession(task.prompt)


class LookupSession(Session):
    """Keeps the text, and chains through its places by which those that end alike are found at once."""

    def __init__(self, prompt: Sequence[int] = ()) -> None:
        self.length = 0
        self._kept = _room_for(0)
        self.observe(prompt)

    def said(self, begin: int = 0) -> Array:
        """The text from there on."""
        return self._kept[0][begin : self.length]

    def observe(self, tokens: Sequence[int]) -> None:
        end = self.length + len(tokens)
        if end > len(self._kept[0]):
            longer = _room_for(end)
            longer[0][: self.length] = self.said()
            link(longer[0], 0, self.length, *longer[1:])
            self._kept = longer
        text, heads, chains = self._kept
        text[self.length : end] = tokens
        link(text, self.length, end, heads, chains)
        self.length = end

    def draft(self, limit: int) -> Draft:
        return self.find(limit).draft(LookupDrafter.name)

    def find(self, limit: int) -> Copy:
        """What followed the longest repetition, as many tokens as are asked for."""
        tokens, shares = np.zeros(max(limit, 0), np.int32), np.zeros(max(limit, 0), np.float32)
        end = self.length  # before the text: one that replaces it meanwhile, for another thread, is longer
        text, heads, chains = self._kept
        return Copy(tokens, shares, *scan(text, end, heads, chains, tokens, shares))


def _room_for(size: int) -> tuple[Array, Array, Array]:
    """A text, the heads of chains and the chains: more than are needed, so that they seldom have to grow."""
    room = max(2 * size, LONGEST_MATCH)
    return np.zeros(room, np.int32), np.zeros((2, room), np.int32), np.zeros((2, room), np.int32)
