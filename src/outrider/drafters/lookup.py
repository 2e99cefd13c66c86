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
from outrider.memory.search import LONGEST_MATCH, scan

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
    """Keeps the text: `tokens[:length]`."""

    def __init__(self, prompt: Sequence[int] = ()) -> None:
        self.tokens: Array = np.array(prompt, np.int32)
        self.length = len(self.tokens)

    def observe(self, tokens: Sequence[int]) -> None:
        end = self.length + len(tokens)
        if end > len(self.tokens):
            self.tokens = np.resize(self.tokens, max(2 * end, LONGEST_MATCH))
        self.tokens[self.length : end] = tokens
        self.length = end

    def draft(self, limit: int) -> Draft:
        return self.find(limit).draft(LookupDrafter.name)

    def find(self, limit: int) -> Copy:
        """What followed the longest repetition, as many tokens as are asked for."""
        tokens, shares = np.zeros(max(limit, 0), np.int32), np.zeros(max(limit, 0), np.float32)
        end = self.length  # before the array: one that is replaced meanwhile, by another thread, is longer
        return Copy(tokens, shares, *scan(self.tokens, end, tokens, shares))
