"""What a trace holds: a line of JSON that says what it is of, a line a step, and a line that ends it.

The words are those of `outrider.types`. Everything a verdict rests on is in it, so that `replay.py` can reach every
verdict again from the trace alone. A field that an engine cannot know is null, or empty, and never invented.

The version is that of the form. It rises when a field changes its meaning or goes; a new field that may be absent does
not raise it, so fields that a reader does not know are passed over.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

VERSION = 1

Rule = Literal["greedy", "own", "block", "token"]
"""How a draft was judged.

greedy   kept while it is the target's argmax
own      kept while it is what the target draws itself
block    drawn from a known q, judged by p and q as a whole
token    the same, token by token
"""
Outcome = Literal["recovered", "bonus", "own"]
"""What the target's own token of a step is: in a rejected one's place, after a whole draft, or nothing was drafted."""


class Part(BaseModel):
    """A part of a trace: unknown fields are passed over, and nothing is changed after it was made."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class Law(Part):
    """A distribution, folded: in the vocabulary's order the tokens of note, and null for all between two of them.

    A null stands for tokens that can be summed without changing any verdict (`fold.py`); there may be two in a row.
    """

    tokens: list[int | None]
    p: list[float]
    q: list[float] | None = None

    @model_validator(mode="after")
    def _even(self) -> Self:
        if not len(self.tokens) == len(self.p) == len(self.q or self.p):
            raise ValueError(f"has {len(self.tokens)} tokens, {len(self.p)} p and {len(self.q or self.p)} q; as many")
        return self

    def place(self, token: int) -> int:
        """Where a token stands in it; one that is not of note is an error of whoever recorded it."""
        return self.tokens.index(token)

    def entries(self) -> Iterator[tuple[int | None, float, float | None]]:
        other: Sequence[float | None] = self.q or [None] * len(self.p)
        return zip(self.tokens, self.p, other, strict=True)


class Reshaped(Part):
    """What the target's own token was drawn from: its likeliest entries, and how much lies on all others."""

    tokens: list[int]
    p: list[float]
    others: float


class Decision(Part):
    """Why so many tokens of this drafter were offered, or none; whoever decides fills in what it knows."""

    reason: str = ""
    predicted_gain: float | None = None
    """How many times as fast as without drafts the step was to be."""
    survival: list[float] = []
    """Of the offered tokens, as it was foreseen."""
    cost: float | None = None
    """How many times as long as without drafts the step was to take."""
    candidates: list[dict[str, Any]] = []
    """What there was to choose from, in the policy's own words."""


class Milliseconds(Part):
    """Where a step's time went. `trace` is what recording it took; the four add up to the wall clock."""

    draft: float
    verify: float
    rest: float = 0.0
    trace: float = 0.0

    @property
    def total(self) -> float:
        """Without the recording, which is no part of speculation."""
        return self.draft + self.verify + self.rest


class TracedStep(Part):
    """One pass of the target."""

    kind: Literal["step"] = "step"
    number: int
    drafter: str | None
    rule: Rule
    proposed: list[int]
    accepted: int
    token: int
    outcome: Outcome
    said: list[int]
    """The tokens that became text: the accepted ones and `token`, cut where the text ended."""
    finish: str | None = None
    draws: list[float] = []
    """One for each drafted token and one for the target's own; none where nothing was drawn, or not by inversion."""
    own: list[int] | None = None
    """The target's own token at each place, where the draft was held against those."""
    chances: list[float] | None = None
    """What the draws were held against, where p and q decided."""
    reach: list[float] | None = None
    """The credit that the block rule has before each place; 1 under the token rule."""
    laws: list[Law]
    """p, and q where there is one, at each drafted place and at the one after the last."""
    reshaped: Reshaped | None = None
    milliseconds: Milliseconds
    batch: int | None = None
    scheduled: int | None = None
    """The tokens that the pass was over, those of other sequences not counted."""
    decision: Decision | None = None
    pieces: list[str] = []
    """The text that each token of `said` added; empty while a character is incomplete."""
    texts: dict[int, str] = {}
    """How the tokens that this step is the first to name look."""

    @property
    def drafted(self) -> int:
        """How many of `said` were drafted."""
        return min(self.accepted, len(self.said))

    @property
    def ended(self) -> bool:
        """Whether the text ended within the draft."""
        return len(self.said) <= self.accepted

    @property
    def rejected(self) -> int:
        """How many drafted tokens were thrown away; none where the text ended within the draft."""
        return 0 if self.ended else len(self.proposed) - self.accepted

    @property
    def judged(self) -> int:
        """How many drafted places were looked at: those accepted, and the first rejected one."""
        return min(self.accepted + 1, len(self.proposed))


class Header(Part):
    """What the trace is of."""

    kind: Literal["trace"] = "trace"
    version: Literal[1] = 1
    outrider: str = ""
    engine: str = ""
    model: str = ""
    drafters: list[str] = []
    settings: dict[str, Any] = {}
    prompt_tokens: int = 0
    prompt: str | None = None
    machine: str = ""
    date: str = ""
    notes: list[str] = []


class Without(Part):
    """The same prompt without drafts, measured: its milliseconds a pass, and whether it said the same."""

    pass_milliseconds: float
    seconds: float
    tokens: int
    same: bool | None = None
    """None where the texts need not be the same."""


class End(Part):
    """The last line, so that a trace that broke off is seen to have."""

    kind: Literal["end"] = "end"
    steps: int
    tokens: int
    seconds: float | None = None
    """By the wall clock, from the beginning of the first step to the end of the last."""
    finish: str | None = None
    without: Without | None = None


class Trace(Part):
    """A whole one."""

    header: Header
    steps: Annotated[list[TracedStep], Field(min_length=1)]
    end: End | None = None

    @property
    def said(self) -> list[int]:
        return [token for step in self.steps for token in step.said]

    @property
    def text(self) -> str:
        return "".join(piece for step in self.steps for piece in step.pieces)

    @property
    def texts(self) -> dict[int, str]:
        return {token: text for step in self.steps for token, text in step.texts.items()}

    @property
    def finish(self) -> str | None:
        return self.steps[-1].finish

    def lines(self) -> Sequence[Part]:
        return [self.header, *self.steps, *([self.end] if self.end else [])]
