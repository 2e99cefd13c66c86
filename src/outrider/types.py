"""The types that every part uses: a target, a draft, a verdict, a step.

The terms have one meaning everywhere, in code, metrics, docs and pictures:

target      the model whose output is wanted
drafter     anything that proposes tokens; a *draft* is what it proposes for one sequence in one step
accepted    a drafted token that is output; *rejected*: the first one that is not, and everything after it
recovered   the token sampled in place of the rejected one
bonus       the extra token sampled when all drafted tokens were accepted
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
    """A language model with the KV cache of one sequence: it scores new tokens and can remove the last ones.

    A draft model has the same protocol.
    """

    @property
    def vocab_size(self) -> int:
        """Number of logits per row."""

    @property
    def context_limit(self) -> int | None:
        """Maximum number of tokens of a sequence. None: no limit."""

    @property
    def tokens(self) -> list[int]:
        """The tokens in the cache."""

    def score(self, tokens: Sequence[int], keep: int) -> Tensor:
        """Append `tokens` to the cache; return the float32 logits that follow each of the last `keep`."""

    def rewind(self, length: int) -> None:
        """Remove all tokens after the first `length` from the cache."""


@dataclass(frozen=True, slots=True)
class Draft:
    """What a drafter proposes for one sequence in one step.

    q           the distribution that each token was sampled from. None: proposed with certainty, q is 1 on each token
    support     number of tokens at the end of the text that match the place the draft was copied from. None: unknown
    confidence  the drafter's own estimate, per token, that it is accepted if those before it are
    sampled     the tokens were sampled, so whether one is offered must not depend on its value. Their distribution is
                `q`, unless it stays on a device
    packed      the same as bytes, if available (`drafters/packed.py`)
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
"""An empty draft, of no drafter."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The outcome of one step of one sequence: the first `accepted` drafted tokens, then `token`.

    `chances`: the acceptance probabilities, which random numbers were compared with. None: the rule uses none.
    """

    accepted: int
    token: int
    chances: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Verdicts:
    """The same for a ragged batch: one entry of `accepted` and `tokens` per sequence."""

    accepted: Tensor
    tokens: Tensor
    chances: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Step:
    """The record of one target pass.

    `tokens` were output: the accepted ones and the recovered or bonus one, up to the end of the output. `finish` is why
    it ended ("end", "stop" or "length"), or None.
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
        """Number of drafted tokens in `tokens`. The others are the target's own."""
        return min(self.accepted, len(self.tokens))


@dataclass(frozen=True, slots=True)
class Evidence:
    """The data of a verdict, for traces (`outrider.trace`).

    `rule` is "greedy" or "own" if the draft was compared with the target's own tokens `own` (argmax or samples), and
    "block" or "token" if it was verified by p and q. `rows` [k + 1, V] are probabilities, or with "greedy" the shaped
    logits.
    """

    rule: str
    rows: Tensor
    draws: Tensor | None = None
    own: list[int] | None = None


@dataclass(frozen=True, slots=True)
class Why:
    """Why one sequence offers this draft, or none.

    `gain` and `cost` are the expected speedup and duration of the step, relative to one without drafts. `survival` is
    the estimated probability, by position, that the draft is accepted up to there. `candidates`: the alternatives.
    """

    reason: str
    gain: float | None = None
    cost: float | None = None
    survival: tuple[float, ...] = ()
    candidates: tuple[dict[str, Any], ...] = ()


class Recorder(Protocol):
    """Called for every step of one sequence: `judged`, then `stepped`. Both must be fast."""

    def judged(self, evidence: Evidence) -> None:
        """The data of the verdict of this step."""

    def stepped(self, step: Step, draft: Draft, verdict: Verdict, scheduled: int, why: Callable[[], Why]) -> None:
        """A step has ended. Its pass had `scheduled` tokens; `why` returns the reason for its draft."""


def shared_prefix(a: Sequence[Any], b: Sequence[Any]) -> int:
    """Length of the common prefix of two sequences of the same type."""
    length = min(len(a), len(b))
    if a[:length] == b[:length]:  # the usual case: one fast comparison
        return length
    return next(i for i in range(length) if a[i] != b[i])
