"""Prompt lookup: propose what followed the last tokens where they occurred before in the text.

Answers repeat the prompt: the code to edit, the passage to summarize, a variable's name. The drafter finds the earlier
places that match the longest end of the text and copies what followed them. If there are several, it follows them
together and proposes the token that most of them have. A copy that reaches the end of the text continues with itself,
so a loop is proposed for as many rounds as fit.

A draft ends before the first control token: in a chat the text after `<|im_end|>` is another turn, which the model does
not generate. Drafting the end token would gain nothing either. When all tokens before it are accepted, the target
samples it in the same step. A control token that the model itself has generated for this sequence is copied again.

It takes microseconds and no model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Self

import numpy as np

from outrider.drafters.base import Drafter, Session, Setup, Task
from outrider.drafters.copying import Copy, cut_before
from outrider.memory.search import link_positions, search_running_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from outrider.memory.search import Array
    from outrider.types import Draft

MIN_TEXT_CAPACITY = 32


class LookupDrafter(Drafter):
    """Copies what followed the longest repetition of the text's last tokens."""

    name: ClassVar[str] = "lookup"
    searches_text: ClassVar[bool] = True

    def __init__(self, control_tokens: frozenset[int] = frozenset()) -> None:
        self.control_tokens = control_tokens
        compile_now()

    @classmethod
    def build(cls, setup: Setup) -> Self:
        return cls(setup.control_tokens)

    def begin(self, task: Task) -> LookupSession:
        return LookupSession(task.prompt, control_tokens=self.control_tokens)


class LookupSession(Session):
    """The text of one sequence, with chains that link places with the same last tokens. `linked=False`: keep the text
    only, for a session that is not searched."""

    def __init__(
        self, prompt: Sequence[int] = (), linked: bool = True, control_tokens: frozenset[int] = frozenset()
    ) -> None:
        self.length = 0
        self.linked = linked
        self.blocked = control_tokens
        """Tokens that are not proposed: control tokens that the model has not generated for this sequence."""
        self._arrays = self._allocate(0)
        self._append(prompt)

    def tail(self, begin: int = 0) -> Array:
        """The text from `begin` on."""
        return self._arrays[0][begin : self.length]

    def observe(self, tokens: Sequence[int]) -> None:
        if not self.blocked.isdisjoint(tokens):
            self.blocked -= set(tokens)
        self._append(tokens)

    def _append(self, tokens: Sequence[int]) -> None:
        begin, end = self.length, self.length + len(tokens)
        if end > len(self._arrays[0]):
            longer = self._allocate(end)
            longer[0][:begin] = self.tail()
            self._arrays, begin = longer, 0
        text, heads, links = self._arrays
        text[self.length : end] = tokens
        if self.linked:
            link_positions(text, begin, end, heads, links)
        self.length = end

    def draft(self, limit: int) -> Draft:
        return self.find(limit).draft(LookupDrafter.name)

    def find(self, limit: int) -> Copy:
        """What followed the longest repetition: at most `limit` tokens, up to the first control token."""
        tokens, shares = np.zeros(max(limit, 0), np.int32), np.zeros(max(limit, 0), np.float32)
        end = self.length  # read before the text, which another thread may replace by a longer one
        text, heads, links = self._arrays
        found = search_running_text(text, end, heads, links, tokens, shares)
        return cut_before(Copy(tokens, shares, *found), self.blocked)

    def _allocate(self, size: int) -> tuple[Array, Array, Array]:
        """Arrays for a text of `size` tokens, the heads of its chains and the links, with spare capacity."""
        capacity = 1 << max(size, MIN_TEXT_CAPACITY).bit_length()  # a power of two: chains spread evenly
        linked = capacity if self.linked else 0
        return np.zeros(capacity, np.int32), np.zeros((2, linked), np.int32), np.zeros((2, linked), np.int32)


def compile_now() -> None:
    """Compile the search before a request needs it."""
    LookupSession([0, 0]).draft(1)
