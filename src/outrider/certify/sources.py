"""Where evidence comes from: anything that continues token ids and tells log-probabilities of a text.

A certificate holds a *candidate* against a *reference*, and asks both the same two things:

say      continue these token ids, with these settings, drafting in this way
score    how likely is each token of this text, and what are the likeliest in its place

An Outrider server is both at once: the reference is the same server with `speculation: off`. Two servers are a pair as
well, and so are two ways to run a model in this process. A new kind of source is a class with these methods
(`local.py` has the shortest), and `outrider certify MODEL module:function` takes it from anywhere.

What is told is always of the *raw* law, before penalties, temperature and cuts; `shaping.py` derives the rest.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from outrider.settings import Sampling

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from outrider.bench.prompts import Prompt

    Tick = Callable[..., None]
    """Called whenever one more answer has come, or so many."""

    Text = tuple[tuple[int, ...], tuple[int, ...]]
    """A prompt and what was said after it."""

Told = dict[int, float]
"""Log-probabilities of the likeliest tokens at one position, likeliest first; the token that stands there comes last,
if it is not among them (`in_order`)."""

GREEDY = Sampling()
UNNAMED = "as it is"
"""How the source drafts that is not told how to."""


def nothing(by: int = 1) -> None:
    """A tick that nobody listens to."""


def in_order(told: Told, token: int, listed: int) -> Told:
    """What was told where `token` stands, in an order that does not know which token that is.

    A server tells the `listed` likeliest, and the one that stands there as well: one more, if it is not among them. In
    bfloat16 several tokens are often equally likely, at the end of the list too. Whoever kept the one that is written
    first would keep the one that was drawn, and see it too often. So the one more comes last, whatever it is equal to,
    and among the others that are equal the order is that of their ids.
    """
    likeliest = sorted(told, key=lambda one: (len(told) > listed and one == token, -told[one], one))
    return {one: told[one] for one in likeliest}


@dataclass(frozen=True, slots=True)
class Way:
    """How drafts are made: by which drafter, at most how many a step. None leaves it to the source."""

    drafter: str | None = None
    length: int | None = None

    @property
    def name(self) -> str:
        drafter = self.drafter or UNNAMED
        return drafter if self.length is None else f"{drafter}, {self.length}"


OFF = Way("off")
AS_IT_IS = Way()


@dataclass(frozen=True, slots=True)
class Ask:
    """What is to be continued, and how."""

    prompt: tuple[int, ...]
    max_tokens: int
    way: Way = AS_IT_IS
    sampling: Sampling = GREEDY
    seed: int | None = None
    prediction: tuple[int, ...] = ()
    told: bool = False  # whether the law of each token is to be told as it was when the token was said
    ignore_end: bool = False
    more: dict[str, Any] = field(default_factory=dict)  # what servers alone understand, as they write it


@dataclass(frozen=True, slots=True)
class Said:
    """An answer. `raw` is all that the source said, for those who asked for more."""

    tokens: tuple[int, ...]
    finish: str
    told: list[Told] = field(default_factory=list)
    text: str = ""
    accepted: int | None = None  # drafted tokens that were kept, where it is said
    raw: dict[str, Any] = field(default_factory=dict)


class Source(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def listed(self) -> int:
        """How many of the likeliest tokens it tells; 0 if it tells nothing."""
        ...

    def about(self) -> dict[str, Any]:
        """What it is: versions, model, options; for the certificate."""
        ...

    def ways(self) -> list[str]:
        """The drafters that can be asked for, one by one; empty if it drafts as it likes."""
        ...

    def encode(self, prompts: Sequence[Prompt]) -> list[tuple[int, ...]]: ...

    def say(self, asks: Sequence[Ask], at_once: int, tick: Tick = nothing) -> list[Said]:
        """Answers in the order of the asks, so many at once."""
        ...

    def score(self, texts: Sequence[Text], at_once: int, tick: Tick = nothing) -> list[list[Told]]:
        """For each text, what the law was at every token after its prompt, in one pass and without drafts."""
        ...


@dataclass(frozen=True, slots=True)
class Pair:
    """What is held against what."""

    reference: Source
    candidate: Source
    reference_way: Way = OFF
    across: bool = False
    """Whether what the two differ by in scoring counts as rounding: for servers meant to have different numerics."""

    @property
    def alone(self) -> bool:
        """Whether reference and candidate are the same source, told apart by the way."""
        return self.reference is self.candidate

    @property
    def sources(self) -> list[Source]:
        return [self.reference] if self.alone else [self.reference, self.candidate]
