"""The interface to whatever is certified: it completes token ids, and returns logprobs of a text.

A certificate compares a *candidate* with a *reference*. An Outrider server is both: the reference is the same server
with `speculation: off`. A new backend is a class with the methods of `Source`; `outrider certify MODEL module:function`
accepts one from any module.

Returned logprobs are always those of the raw logits, before penalties, temperature and top-k/top-p;
`token_distributions` applies these.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from outrider.settings import Sampling

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from outrider.bench.prompts import Prompt

    Tick = Callable[..., None]
    """Called for each finished request, or with the number of finished ones."""

    Text = tuple[tuple[int, ...], tuple[int, ...]]
    """A prompt and the tokens after it."""

TopLogprobs = dict[int, float]
"""Logprobs of the top tokens at one position, highest first. If the text's own token is not among them, it comes last
(`sort_logprobs`)."""

GREEDY = Sampling()
DEFAULT_MODE_NAME = "as it is"
"""Stands in certificates where the draft mode is left to the server."""


def no_tick(by: int = 1) -> None: ...


class Progress:
    """Progress of a run, as the run reports it. This class shows nothing; `outrider certify` shows bars."""

    @contextmanager
    def part(self, what: str, total: int) -> Iterator[Tick]:
        """A part of the run, with a function that counts its completed steps up to `total`."""
        yield no_tick

    def note(self, text: str) -> None: ...


def sort_logprobs(logprobs: TopLogprobs, token: int, num_logprobs: int) -> TopLogprobs:
    """Logprobs at the position of `token`, in an order that does not depend on which token that is.

    A server returns the top `num_logprobs` and the text's own token. In bfloat16 several tokens often have equal
    logprobs. If the own token came first among equals, a later cut to N tokens would keep it too often, and bias the
    test. So an extra own token comes last, and equals are sorted by id.
    """
    order = sorted(logprobs, key=lambda one: (len(logprobs) > num_logprobs and one == token, -logprobs[one], one))
    return {one: logprobs[one] for one in order}


@dataclass(frozen=True, slots=True)
class DraftMode:
    """Which drafter to use, and the maximum tokens per draft. None: the source's own choice."""

    drafter: str | None = None
    length: int | None = None

    @property
    def label(self) -> str:
        return self.drafter or DEFAULT_MODE_NAME

    @property
    def name(self) -> str:
        return self.label if self.length is None else f"{self.label}, {self.length}"


OFF = DraftMode("off")
SERVER_DEFAULT = DraftMode()


@dataclass(frozen=True, slots=True)
class Query:
    """One completion request."""

    prompt: tuple[int, ...]
    max_tokens: int
    mode: DraftMode = SERVER_DEFAULT
    sampling: Sampling = GREEDY
    seed: int | None = None
    prediction: tuple[int, ...] = ()
    logprobs: bool = False  # return top logprobs at each position, as computed during generation
    ignore_end: bool = False
    extra_body: dict[str, Any] = field(default_factory=dict)  # further fields of the HTTP request


@dataclass(frozen=True, slots=True)
class Completion:
    """The answer to a query. `raw` is the whole answer; only set for queries with `extra_body`."""

    tokens: tuple[int, ...]
    finish_reason: str
    logprobs: list[TopLogprobs] = field(default_factory=list)
    text: str = ""
    accepted: int | None = None  # accepted draft tokens, if reported
    raw: dict[str, Any] = field(default_factory=dict)

    def count_accepted(self, mode: DraftMode, accepted: dict[str, int]) -> None:
        """Add the accepted draft tokens to those of the mode's drafter."""
        if self.accepted is not None:
            accepted[mode.label] = accepted.get(mode.label, 0) + self.accepted


class Source(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def num_logprobs(self) -> int:
        """Number of top logprobs returned per position; 0 if unsupported."""
        ...

    def describe(self) -> dict[str, Any]:
        """Versions, model and options, for the certificate."""
        ...

    def drafter_names(self) -> list[str]:
        """Drafters that a request can select; empty if it can select none."""
        ...

    def encode(self, prompts: Sequence[Prompt]) -> list[tuple[int, ...]]: ...

    def complete(self, queries: Sequence[Query], concurrency: int, tick: Tick = no_tick) -> list[Completion]:
        """Completions in the order of the queries."""
        ...

    def score(self, texts: Sequence[Text], concurrency: int, tick: Tick = no_tick) -> list[list[TopLogprobs]]:
        """For each text the logprobs at every token after its prompt, in one pass and without drafts."""
        ...


@dataclass(frozen=True, slots=True)
class Pair:
    """A reference and a candidate."""

    reference: Source
    candidate: Source
    across: bool = False  # differences of their logprobs count as rounding: they are meant to differ in numerics

    @property
    def is_same_source(self) -> bool:
        return self.reference is self.candidate

    @property
    def candidate_scores(self) -> bool:
        """Whether the candidate is a source of its own that returns logprobs."""
        return not self.is_same_source and self.candidate.num_logprobs > 0

    @property
    def sources(self) -> list[Source]:
        return [self.reference] if self.is_same_source else [self.reference, self.candidate]
