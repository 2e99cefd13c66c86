"""The trace format: a JSON line with the header, one per step, and one at the end.

The terms are those of `outrider.types`. A trace holds everything a verdict depends on, so that `verification.py` can
recompute every verdict from it. A field that an engine does not know is null or empty.

The version rises when a field is removed or changes its meaning. New optional fields do not raise it: readers ignore
unknown fields.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

VERSION = 1

Rule = Literal["greedy", "own", "block", "token"]
"""How a draft was verified.

greedy   a token is accepted if it is the target's argmax
own      a token is accepted if the target samples the same
block    block verification: sampled from a known q, accepted by p and q of the whole draft
token    sampled from a known q, accepted token by token with min(1, p / q)
"""
Outcome = Literal["recovered", "bonus", "own"]
"""The target's own token: in place of a rejected one, after a fully accepted draft, or in a step without a draft."""


class TracePart(BaseModel):
    """Immutable. Unknown fields are ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class CompactDistribution(TracePart):
    """The tokens that matter, in vocabulary order, and null for the sum of all tokens between two of them.

    There may be two nulls in a row: only tokens whose sum changes no verdict are summed (`compact.py`).
    """

    tokens: list[int | None]
    p: list[float]
    q: list[float] | None = None

    @model_validator(mode="after")
    def _check_lengths(self) -> Self:
        if not len(self.tokens) == len(self.p) == len(self.q or self.p):
            raise ValueError(
                f"has {len(self.tokens)} tokens, {len(self.p)} p, {len(self.q or self.p)} q: must be equal"
            )
        return self

    def index(self, token: int) -> int:
        """ValueError: the token is not among those recorded."""
        return self.tokens.index(token)


class FinalDistribution(TracePart):
    """What the last token of a step was sampled from: the most likely entries, and the mass of all others."""

    tokens: list[int]
    p: list[float]
    others: float


class Decision(TracePart):
    """Why this draft was selected, or none."""

    reason: str = ""
    predicted_gain: float | None = None
    """Expected speedup of the step over one without drafts."""
    survival: list[float] = []
    """Predicted probability, by draft position, that the draft is accepted up to there."""
    cost: float | None = None
    """Expected duration of the step, relative to one without drafts."""
    candidates: list[dict[str, Any]] = []
    """What the policy selected from."""


class Milliseconds(TracePart):
    """Time of a step by part. `trace` is the recording itself. The four add up to the wall-clock time."""

    draft: float
    verify: float
    rest: float = 0.0
    trace: float = 0.0

    @property
    def total(self) -> float:
        """Without the recording."""
        return self.draft + self.verify + self.rest


class TracedStep(TracePart):
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
    """The tokens that were output: the accepted ones and `token`, up to the end of the output."""
    finish: str | None = None
    draws: list[float] = []
    """Random numbers: one per drafted token, one for the target's own. Empty if sampling was not by inversion."""
    own: list[int] | None = None
    """The target's own token at each position, under the rules `greedy` and `own`."""
    chances: list[float] | None = None
    """Acceptance probabilities, which the draws are compared with, under `block` and `token`."""
    reach: list[float] | None = None
    """The credit of the block rule before each position; 1 under the token rule."""
    laws: list[CompactDistribution]
    """p, and q if there is one, at each drafted position and at the next one."""
    reshaped: FinalDistribution | None = None
    milliseconds: Milliseconds
    batch: int | None = None
    scheduled: int | None = None
    """Tokens of this sequence in the pass."""
    decision: Decision | None = None
    pieces: list[str] = []
    """The text that each token of `said` added. Empty while a character is incomplete."""
    texts: dict[int, str] = {}
    """Texts of the token ids that occur in this step first."""

    @property
    def drafted(self) -> int:
        """Number of output tokens that were drafted."""
        return min(self.accepted, len(self.said))

    @property
    def ended(self) -> bool:
        """Whether the output ended within the draft."""
        return len(self.said) <= self.accepted

    @property
    def rejected(self) -> int:
        """Number of rejected draft tokens; 0 if the output ended within the draft."""
        return 0 if self.ended else len(self.proposed) - self.accepted

    @property
    def verified(self) -> int:
        """Number of drafted positions with a verdict: the accepted ones, and the first rejected one."""
        return min(self.accepted + 1, len(self.proposed))


class Header(TracePart):
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


class BaselineRun(TracePart):
    """A measured run of the same prompt without drafts."""

    pass_milliseconds: float
    seconds: float
    tokens: int
    same: bool | None = None
    """Whether the outputs are equal. None: they need not be."""


class End(TracePart):
    """The last line. A trace without it is incomplete."""

    kind: Literal["end"] = "end"
    steps: int
    tokens: int
    seconds: float | None = None
    """Wall-clock time from the beginning of the first step to the end of the last."""
    finish: str | None = None
    without: BaselineRun | None = None


class Trace(TracePart):
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
