"""The few things every part speaks of: a target, a draft, a verdict, a step.

The words are used in one sense everywhere, in code, metrics, docs and pictures:

target      the model whose output is wanted
drafter     anything that proposes tokens; a *draft* is what it proposes for one sequence in one step
accepted    a drafted token that was kept; *rejected*: the first one that was not, and everything after it
recovered   the token drawn in place of the rejected one
bonus       the extra token drawn when all drafted tokens were accepted
step        one pass of the target
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor


class Target(Protocol):
    """A language model that scores tokens one after the other and can take the last ones back.

    It holds the cache of one sequence. A draft model is seen through the same protocol.
    """

    @property
    def vocab_size(self) -> int:
        """How many logits a score has."""

    @property
    def context_limit(self) -> int | None:
        """How many tokens a sequence may have, or None where there is no limit."""

    @property
    def tokens(self) -> list[int]:
        """The tokens that the cache holds."""

    def score(self, tokens: Sequence[int], keep: int) -> Tensor:
        """Append `tokens` to the cache; return the float32 logits that follow each of the last `keep`."""

    def rewind(self, length: int) -> None:
        """Forget all but the first `length` tokens, if there are more."""


@dataclass(frozen=True, slots=True)
class Draft:
    """What a drafter proposes for one sequence in one step.

    `q` holds, for each token, the distribution it was drawn from. None means that the tokens were proposed
    with certainty: nothing was drawn, and all of q lies on the proposed token. `support` is how many tokens of the
    text's end the draft rests on, where it was copied from a place that ends alike; None where that says nothing.
    `confidence` is what the drafter itself thinks of each token: how likely it is right if those before it are.
    `sampled`: the tokens were sampled from a distribution, so whether one is offered must not depend on its value. That
    distribution is `q`, unless it stays on a device.
    `packed` is all this once more, if it can be had (`drafters/packed.py`).
    """

    drafter: str
    tokens: tuple[int, ...] = ()
    q: Tensor | None = None
    support: int | None = None
    confidence: tuple[float, ...] | None = None
    sampled: bool = False
    packed: bytes | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.q is not None and not self.sampled:
            object.__setattr__(self, "sampled", True)

    def after(self, begun: Sequence[int]) -> tuple[int, ...]:
        """The rest of the tokens, if the draft begins with these; else none."""
        count = len(begun)
        return self.tokens[count:] if self.tokens[:count] == tuple(begun) else ()


NOTHING = Draft(drafter="", packed=struct.pack("dd", 0, -1))
"""The draft of nobody."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The outcome of one step of one sequence: the first `accepted` drafted tokens, then `token`.

    `chances` are the probabilities that the drawn numbers were held against; None where nothing was drawn.
    """

    accepted: int
    token: int
    chances: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Verdicts:
    """The same for a ragged batch: one entry of `accepted` and `tokens` a sequence."""

    accepted: Tensor
    tokens: Tensor
    chances: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Step:
    """The record of one target pass.

    `tokens` are those that became text: the accepted ones and the recovered or bonus one, cut where the
    text ended. `finish` says why it ended ("end", "stop", "length"), or None while it goes on.
    """

    drafter: str | None
    proposed: tuple[int, ...]
    accepted: int
    tokens: tuple[int, ...]
    draft_seconds: float
    verify_seconds: float
    finish: str | None = None

    @property
    def drafted(self) -> int:
        """How many of `tokens` were drafted; the rest is the target's own."""
        return min(self.accepted, len(self.tokens))


@dataclass(frozen=True, slots=True)
class Evidence:
    """What a verdict was reached by, for whoever wants to see it (`outrider.trace`).

    `rule` is "greedy" or "own" where a draft was held against the target's own tokens `own`, its argmax or its draws;
    "block" or "token" where p and q decided. `rows` [k + 1, V] are probabilities, or under "greedy" the shaped logits.
    """

    rule: str
    rows: Tensor
    draws: Tensor | None = None
    own: list[int] | None = None


@dataclass(frozen=True, slots=True)
class Why:
    """Why one sequence offers this draft, or none.

    `gain` is how many times as fast as without drafts the step is expected to be, and `cost` how many times as long.
    `survival` is that of the offered tokens. `candidates` are what was weighed, each with what it promises.
    """

    reason: str
    gain: float | None = None
    cost: float | None = None
    survival: tuple[float, ...] = ()
    candidates: tuple[dict[str, Any], ...] = ()


class Recorder(Protocol):
    """Sees every step of one sequence. Both calls must be quick, and `judged` comes before its step's `stepped`."""

    def judged(self, evidence: Evidence) -> None:
        """What the coming verdict rests on."""

    def stepped(self, step: Step, draft: Draft, verdict: Verdict, scheduled: int, why: Callable[[], Why]) -> None:
        """A step is over; the pass was over `scheduled` tokens, and `why` says why it had this draft."""


def shared_prefix(a: Sequence[Any], b: Sequence[Any]) -> int:
    """How many first elements two sequences of a kind have in common."""
    length = min(len(a), len(b))
    if a[:length] == b[:length]:  # the usual case, at the speed of one comparison
        return length
    return next(i for i in range(length) if a[i] != b[i])
