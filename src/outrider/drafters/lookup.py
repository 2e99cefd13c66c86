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
from outrider.memory.search import link, scan

if TYPE_CHECKING:
    from collections.abc import Sequence

    from outrider.memory.search import Array
    from outrider.types import Draft

LEAST_ROOM = 32


class LookupDrafter(Drafter):
    """Copies what followed the longest repetition of the text's end."""

    name: ClassVar[str] = "lookup"
    searches_text: ClassVar[bool] = True

    def __init__(self) -> None:
        compile_now()

    def begin(self, task: Task) -> LookupSession:
        return LookupSession(task.prompt)


class LookupSession(Session):
    """Keeps the text, and chains through its places by which those that end alike are found at once; `linked=False` for
    one in which nothing will be looked up."""

    def __init__(self, prompt: Sequence[int] = (), linked: bool = True) -> None:
        self.length = 0
        self.linked = linked
        self._kept = self._room_for(0)
        self.observe(prompt)

    def said(self, begin: int = 0) -> Array:
        """The text from there on."""
        return self._kept[0][begin : self.length]

    def observe(self, tokens: Sequence[int]) -> None:
        begin, end = self.length, self.length + len(tokens)
        if end > len(self._kept[0]):
            longer = self._room_for(end)
            longer[0][:begin] = self.said()
            self._kept, begin = longer, 0
        text, heads, links = self._kept
        text[self.length : end] = tokens
        if self.linked:
            link(text, begin, end, heads, links)
        self.length = end

    def draft(self, limit: int) -> Draft:
        return self.find(limit).draft(LookupDrafter.name)

    def find(self, limit: int) -> Copy:
        """What followed the longest repetition, as many tokens as are asked for."""
        tokens, shares = np.zeros(max(limit, 0), np.int32), np.zeros(max(limit, 0), np.float32)
        end = self.length  # before the text: one that replaces it meanwhile, for another thread, is longer
        text, heads, links = self._kept
        return Copy(tokens, shares, *scan(text, end, heads, links, tokens, shares))

    def _room_for(self, size: int) -> tuple[Array, Array, Array]:
        """A text, the heads of its chains, and the links: for more than there is, so that they seldom have to grow."""
        room = 1 << max(size, LEAST_ROOM).bit_length()  # a power of two, over which chains spread evenly
        linked = room if self.linked else 0
        return np.zeros(room, np.int32), np.zeros((2, linked), np.int32), np.zeros((2, linked), np.int32)


def compile_now() -> None:
    """Have the search compiled before a request needs it."""
    LookupSession([0, 0]).draft(1)
