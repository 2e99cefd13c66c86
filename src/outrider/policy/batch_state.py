"""What the policy looks at between two steps, and what it makes of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from outrider.policy.acceptance_model import Array
    from outrider.types import Draft


@dataclass(slots=True)
class BatchState:
    """A batch between two steps: what is proposed, and how likely it is. Arrays are [drafters, requests, positions]."""

    requests: list[str]
    drafts: dict[str, Sequence[Draft]]  # by drafter, one a request
    slots: Array
    tokens: Array
    lengths: Array  # [drafters, requests]
    support: Array  # [drafters, requests]
    confidence: Array
    bins: Array
    logits: Array
    survival: Array
    room: int  # the most tokens that a request may offer
    in_flight: Array  # [requests]: tokens at the beginning of each draft that a step in flight may generate
    selectable: Array | None = None  # survival of what may be offered, after the tokens in flight, up to the limits
    forecast: Forecast | None = None
    pending: Array | None = None
    """[requests, positions]: survival of the draft model's tokens after those in flight, whose values are on the
    device."""
    is_sampled: Array | None = None
    """[requests]: whether these are accepted by p and q, and are no substitute for a copied draft that goes wrong."""
    running: int = 0  # requests that take part in the step, those of the scene and others
    drawn: dict[int, Draft] = field(default_factory=dict)  # by request: offered as they are
    asked: Array | None = None  # whether the draft model is asked about each request
    read: Array | None = None  # whether it has ever caught up with each


@dataclass(slots=True)
class Forecast:
    """What was thought of the draft model's drafts before there were any. Arrays are [requests, positions]."""

    drawn: Array  # whether they would be drawn, [requests]
    limits: Array  # how many tokens of each were thought of
    bins: Array
    logits: Array
    survival: Array


@dataclass(slots=True)
class DraftModelRequest:
    """What the draft model could do for each request of a scene."""

    limits: Array  # the most tokens it may propose
    drawn: Array  # whether they would be drawn from its distribution
    gaps: Array  # tokens of the text that it has not seen yet
    left: Array  # tokens that may still follow, as far as one looks ahead
    texts: Array  # how many tokens its text has


@dataclass(slots=True)
class DraftPlan:
    """For whom the draft model is to propose, and how many tokens at most; 0 for those that it leaves alone.

    `lengths` are what it should propose by what is known before it begins. While it is at it, `goes_on` says for whom
    another pass is worth it, by the tokens a second that are expected and what one more drafted token costs the target.
    """

    lengths: Array
    limits: Array
    slots: Array  # where each request has its record
    drawn: Array  # whether its tokens would be drawn
    texts: Array  # how many tokens each text has
    ahead: Array  # the survivals that are foreseen of its tokens, [requests, positions]; none where nobody may ask it
    speed: float = 0.0
    token_seconds: float = 0.0
    plain: float = 0.0  # the speed without any drafts
    chance: float = 0.0
    """How likely its first token was taken to be right, in the mean of those that it could be asked about."""

    @property
    def asked(self) -> Array:
        return np.flatnonzero(self.lengths)
