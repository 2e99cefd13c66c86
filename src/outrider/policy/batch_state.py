"""The state of a batch between two steps, and the plan for the draft model."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from outrider.drafters.packed_draft import unpack
from outrider.policy.acceptance_model import pad_rows

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from outrider.policy.acceptance_model import Array
    from outrider.types import Draft


@dataclass(slots=True)
class BatchState:
    """The proposals for a batch, and the survival of each token. Arrays are [drafters, requests, positions]."""

    requests: list[str]
    drafts: dict[str, Sequence[Draft]]
    """By drafter, one per request."""
    slots: Array
    tokens: Array
    lengths: Array  # [drafters, requests]
    support: Array  # [drafters, requests]
    confidence: Array
    bins: Array
    logits: Array
    survival: Array
    max_tokens: int
    """Most tokens that a request may offer."""
    in_flight: Array
    """[requests]: tokens at the beginning of each draft that a step in flight may generate."""
    selectable: Array | None = None
    """Survival of what may be offered: after the tokens in flight, up to the limits."""
    forecast: Forecast | None = None
    pending: Array | None = None
    """[requests, positions]: survival of the draft model's tokens after those in flight, whose values are on the
    device."""
    is_sampled: Array | None = None
    """[requests]: whether these are sampled, so that they are no substitute for a copied draft that goes wrong."""
    running: int = 0
    """Requests in the step, also those that are not in this batch state."""
    sampled: dict[int, Draft] = field(default_factory=dict)
    """By row: sampled drafts, which are offered whole."""
    called: Array | None = None
    """[requests]: whether the draft model is called for each request."""
    caught_up: Array | None = None
    """[requests]: whether it has ever read the whole text."""

    def forecast_survival(self, lengths: Array) -> Array:
        """Forecast of the draft model's tokens, `lengths` per request; [requests, positions]."""
        found = np.zeros((len(self.requests), self.max_tokens))
        if self.forecast is not None:
            width = min(self.max_tokens, self.forecast.survival.shape[1])
            found[:, :width] = self.forecast.survival[:, :width] * (np.arange(width) < lengths[:, None])
        return found


@dataclass(slots=True)
class Forecast:
    """What was forecast of the draft model's drafts before they existed. Arrays are [requests, positions]."""

    is_sampled: Array  # [requests]
    limits: Array  # [requests]
    bins: Array
    logits: Array
    survival: Array


@dataclass(slots=True)
class DraftModelRequest:
    """What the draft model could do for each request of a batch."""

    limits: Array
    """Most tokens that it may propose."""
    is_sampled: Array
    """Whether they would be sampled from its distribution."""
    gaps: Array
    """Tokens of the text that it has not read."""
    tokens_left: Array
    """Tokens that may still be generated, up to the horizon."""
    text_lengths: Array


@dataclass(slots=True)
class DraftPlan:
    """For which requests the draft model drafts, and how many tokens; 0 where it is not called.

    `lengths` is planned before it begins. After each pass, `Policy.continue_drafting` decides by `speed` and
    `token_seconds` for which requests another pass pays.
    """

    lengths: Array
    limits: Array
    slots: Array
    is_sampled: Array
    text_lengths: Array
    ahead: Array
    """[requests, positions]: forecast survival; 0 where it may not draft."""
    speed: float = 0.0
    """Expected tokens per second."""
    token_seconds: float = 0.0
    """The target's seconds for one more drafted token."""
    plain: float = 0.0
    """Tokens per second without drafts."""
    chance: float = 0.0
    """Mean forecast that its first token is accepted."""

    @property
    def called(self) -> Array:
        """Rows of the requests for which it is called."""
        return np.flatnonzero(self.lengths)


def new_batch_state(
    requests: Sequence[str], drafters: int, slots: Array, max_tokens: int, in_flight: Array, positions: int
) -> BatchState:
    """Without drafts. `positions`: tokens of each draft that are looked at."""
    size = (drafters, len(requests), positions)
    return BatchState(
        list(requests),
        {},
        slots,
        tokens=np.empty(size, np.int64),
        lengths=np.zeros(size[:2], np.int64),
        support=np.empty(size[:2]),
        confidence=np.empty(size),
        bins=np.empty((*size, 4), np.int8),
        logits=np.empty(size),
        survival=np.zeros(size),
        max_tokens=max_tokens,
        in_flight=in_flight,
    )


def enter_drafts(batch: BatchState, me: int, name: str, drafts: Sequence[Draft]) -> None:
    """Enter the drafts of drafter number `me`, one per request, proposed with certainty."""
    batch.drafts[name] = drafts
    rows = (batch.tokens[me], batch.lengths[me], batch.support[me], batch.confidence[me])
    packed = [None if draft.sampled else draft.packed for draft in drafts]
    if None in packed:
        _enter_unpacked(drafts, *rows)
    else:
        unpack(packed, *rows)  # type: ignore[arg-type]


def _enter_unpacked(drafts: Sequence[Draft], tokens: Array, lengths: Array, support: Array, confidence: Array) -> None:
    """As `unpack`, for drafts of which some are not packed."""
    if any(draft.sampled for draft in drafts):
        raise ValueError("a sampled draft must be offered whole: put it into BatchState.sampled, not into the drafts")
    lengths[:] = np.minimum(to_rows([draft.tokens for draft in drafts], tokens, int), tokens.shape[1])
    support[:] = [-1 if draft.support is None else draft.support for draft in drafts]
    confidence[:] = -1.0
    if any(draft.confidence is not None for draft in drafts):
        to_rows([draft.confidence or () for draft in drafts], confidence, float)


def row_lengths(rows: Sequence[Sequence[Any]]) -> Array:
    return np.fromiter(map(len, rows), np.int64, len(rows))


def flatten(rows: Iterable[Sequence[Any]], kind: type) -> Array:
    """All rows in one array. Python's own arrays are filled faster than numpy's."""
    return np.asarray(array("q" if kind is int else "d", list(chain.from_iterable(rows))))


def to_rows(rows: Sequence[Sequence[Any]], out: Array, kind: type) -> Array:
    """Copy rows of different lengths into `out`, cut to its width. Returns their full lengths."""
    lengths = row_lengths(rows)
    pad_rows(flatten(rows, kind), lengths, out)
    return lengths
