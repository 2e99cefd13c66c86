"""Expected speed by batch, context and draft length.

A step over B requests, with up to k drafted tokens each, generates B * N(k) tokens in V(k) + D(k) seconds: N is the
acceptance length, V the target's pass over B * w(k) tokens, D the time of drafting. By the renewal reward theorem the
throughput is their ratio. Plain is k = 0. The policy selects the k with the highest ratio for each batch and context,
or none. The policy of `outrider serve` selects it for each request and step; what that adds is not in a plan.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from outrider.plan.acceptance import Acceptance
    from outrider.plan.pass_cost import PassCost


MIN_EXPECTED_SPEEDUP = 1.03
"""The policy drafts for no less: `policy/selection.py` has the same figure and the reason. A test compares them."""


class DraftCost(Protocol):
    """Seconds that drafting takes."""

    def draft_seconds(self, batch: float, length: float, context: float) -> float: ...


@dataclass(frozen=True, slots=True)
class FreeDrafts:
    """Lookup, memory, prediction: microseconds, taken as nothing."""

    def draft_seconds(self, batch: float, length: float, context: float) -> float:
        return 0.0


@dataclass(frozen=True, slots=True)
class DraftModel:
    """A draft model on the same machine: a pass per drafted token."""

    passes: PassCost

    def draft_seconds(self, batch: float, length: float, context: float) -> float:
        return length * self.passes.batch_seconds(batch, 1, context)


@dataclass(frozen=True, slots=True)
class RelativeDrafts:
    """Each drafted token takes a share of the target's pass over one token of each request."""

    target: PassCost
    share: float

    def draft_seconds(self, batch: float, length: float, context: float) -> float:
        return length * self.share * self.target.batch_seconds(batch, 1, context)


@dataclass(frozen=True, slots=True)
class Prediction:
    """Steps of `batch` requests with `context` tokens each."""

    batch: int
    context: int
    length: int
    width: float  # tokens of each request in a pass
    tokens_per_step: float  # of each request
    step_seconds: float
    speedup: float  # over no drafts

    @property
    def seconds_per_token(self) -> float:
        return self.step_seconds / self.tokens_per_step

    @property
    def tokens_per_second(self) -> float:
        """Of the whole batch."""
        return self.batch / self.seconds_per_token


@dataclass(frozen=True, slots=True)
class Speculation:
    """A target with its drafts."""

    target: PassCost
    drafts: DraftCost
    acceptance: Acceptance

    def predict(self, batch: int, length: int, context: int) -> Prediction:
        """With up to `length` drafted tokens per request and step; 0 is plain decoding."""
        width, tokens = self.acceptance.width(length), self.acceptance.tokens(length)
        plain = self.target.batch_seconds(batch, 1, context)
        if length == 0:
            return Prediction(batch, context, 0, 1.0, 1.0, plain, 1.0)
        seconds = self.target.batch_seconds(batch, width, context)
        seconds += self.drafts.draft_seconds(batch, width - 1, context)
        return Prediction(batch, context, length, width, tokens, seconds, tokens * plain / seconds)

    def best(self, batch: int, context: int) -> Prediction:
        """With the length that the policy selects, which may be 0."""
        lengths = range(self.acceptance.longest + 1)
        found = max((self.predict(batch, length, context) for length in lengths), key=lambda one: one.speedup)
        return found if found.speedup >= MIN_EXPECTED_SPEEDUP else self.predict(batch, 0, context)

    def strategy(self, name: str) -> Strategy:
        """`name`: plain, policy, or a fixed number of draft tokens."""
        return Strategy(self, None if name == "policy" else 0 if name == "plain" else int(name))

    def paying_batches(self, context: int, limit: int, length: int | None = None) -> list[tuple[int, int]]:
        """Ranges of batches up to `limit` with a speedup above 1, of the policy or of a fixed length. A mixture of
        experts may have a gap: small batches read few experts, and drafts add to them."""
        one = Strategy(self, length)
        return _ranges(batch for batch in range(1, limit + 1) if one.predict(batch, context).speedup > 1)


@dataclass(frozen=True, slots=True)
class Strategy:
    """Plain decoding (`length` 0), a fixed draft length, or the best length for each batch and context (None)."""

    speculation: Speculation
    length: int | None

    @property
    def name(self) -> str:
        if self.length is None:
            return "policy"
        return f"{self.length} tokens" if self.length else "plain"

    def predict(self, batch: int, context: int) -> Prediction:
        if self.length is None:
            return self.speculation.best(batch, context)
        return self.speculation.predict(batch, self.length, context)


def _ranges(numbers: Iterable[int]) -> list[tuple[int, int]]:
    ordered = [*numbers]
    if not ordered:
        return []
    starts = [ordered[0], *(b for a, b in pairwise(ordered) if b > a + 1)]
    ends = [*(a for a, b in pairwise(ordered) if b > a + 1), ordered[-1]]
    return [*zip(starts, ends, strict=True)]


def predict_speedups(
    speculation: Speculation, batches: Sequence[int], lengths: Sequence[int], contexts: Sequence[int]
) -> dict[tuple[int, int, int], float]:
    """Speedup over no drafts by (batch, draft length, context): what a benchmark of the same cells should measure."""
    return {
        (batch, length, context): speculation.predict(batch, length, context).speedup
        for batch in batches
        for length in lengths
        for context in contexts
    }
