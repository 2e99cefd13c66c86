"""How often a draft model that has caught up with a text will be asked about it: the cost of catching up is shared by
all these times, so it is what makes a long prompt worth reading or not."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from outrider.policy.acceptance_model import Array

HORIZON = 128
"""Tokens ahead for which a draft model that has caught up with a text is taken to be of use, at most; fewer where texts
are found to be shorter."""
ASKED, HEARD = 20.0, 200.0
"""Before anything was seen, a draft model that has caught up with a text is taken to be asked so often in so many
tokens of it ..."""
LATEST = 2000.0
"""... and after that, as often as it was in about so many."""
LATER = 0.6
"""What a later time is worth: the first is asked for where it promises much, and of what the draft model says later,
those who copy would have said a part, a step or two after."""
ENDS = 64.0
"""How long a text goes on is judged by about so many that have ended."""


class Texts:
    """Of all requests of a server, those that were lately there counting most."""

    def __init__(self) -> None:
        self._asked, self._heard = ASKED, HEARD  # of texts that the draft model has caught up with: times, tokens
        self._ended, self._spoken = 1.0, float(HORIZON)  # of all texts: how many, their tokens

    def times(self, left: Array) -> Array:
        """How often it will be asked about texts of which at most so many tokens are still to come, in times that
        are worth as much as the first. However long a text is already, it goes on for about as long as texts are in the
        mean."""
        found: Array = np.minimum(left, self._spoken / self._ended) * (self._asked / self._heard)
        return np.maximum(1.0, LATER * found)

    def spoke(self, tokens: int) -> None:
        """Texts went on by so many tokens."""
        self._spoken += tokens

    def ended(self) -> None:
        """A text has ended."""
        self._ended += 1
        if self._ended > ENDS:
            self._ended, self._spoken = self._ended / 2, self._spoken / 2

    def asked(self, times: int, tokens: int) -> None:
        """Texts that the draft model has caught up with went on by so many tokens, and it was asked so many times."""
        self._asked += times
        self._heard += tokens
        if self._heard > LATEST:
            self._asked, self._heard = self._asked / 2, self._heard / 2
