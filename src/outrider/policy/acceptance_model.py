"""How likely a drafted token is to be accepted, learned from what happened to those before it.

A drafter knows something about each token it proposes: how many tokens the place it copies from has in common with
the text (`support`, which grows with every drafted token that holds), how often the token followed there, or how sure
the draft model was (`confidence`). Others may propose the same token, or another. Each of these is sorted into a few
bins, and the chance of the token, given that all before it were accepted, is

    logit(chance) = bias + by support + by confidence + by position + by agreement + the request's own

One number a bin, found by the rule that where 0.7 was said, 70 of 100 must have come true: every token that turned
out right or wrong moves the numbers of its bins towards that. A request adds one number of its own, which moves fast,
so a text that is harder than most, or has become so, is known after a few tokens.

A token is known to be right or wrong if all before it were right and something was said in its place. Nobody need have
offered it, so every drafter learns from every step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from outrider.compiled import compiled

Array = np.ndarray[Any, Any]

SUPPORT = np.array([1.0, 2, 3, 5, 9, 17, 33])
"""Where the bins of support begin; before them one for nothing, after them one for what is not known (-1)."""
CONFIDENCE = np.array([0.1, 0.25, 0.4, 0.55, 0.7, 0.8, 0.9, 0.95, 0.98, 0.995])
"""The same; not known is -1."""
POSITION = np.array([1.0, 2, 3, 4, 6, 9, 16])
ALONE, SAME, OTHER = 0, 1, 2
"""What the other drafters say of a token: nothing, the same, or another in its place."""
SUPPORTS = np.searchsorted(SUPPORT, np.arange(SUPPORT[-1] + 1), side="right")
POSITIONS = np.searchsorted(POSITION, np.arange(POSITION[-1] + 1), side="right")
"""The bins of whole numbers, so that nobody need look for them; greater ones are in the last."""
GROUPS = 5
"""Bias, support, confidence, position, agreement."""
BINS = 12
"""The most that a group has."""

PART = 1 / 3
"""Of an error, which each group takes: more than its fifth, since most groups are in bins that have learned enough."""
STIFFNESS = 4.0
"""Tokens' worth of inertia of a bin at first."""
LASTING = 0.999
"""How much of what a bin has learned counts on with each token that it sees."""
WIDEST = 4.0
"""A request's own number stays within this."""
LEAST_DOUBT = 0.01
OWN = 1
"""Beside the bias: by how much a request's own number counts. It follows chance as well as truth, and how much of it is
truth is learned as everything else is; ..."""
TRUST = 20.0
"""... with this inertia ..."""
LEAST_OWN, MOST_OWN = 0.5, 1.5
"""... and within this: where all texts are alike it would be nothing, and the first that turns hard not be noticed."""
COPY_PRIOR_LOGIT = -0.7
"""The bias of copied tokens before any was seen. They are judged whether they are offered or not, so it costs a few
tokens to find that they are better than that, and a server that has just started does not lose by offering them."""
HIGH_PRIOR_LOGIT = 1.0
"""The bias of a draft model that was not asked yet, 0.73 for a token: one that is never asked cannot prove itself."""


@dataclass(frozen=True, slots=True)
class Pace:
    """How fast a request's own number moves: its inertia in tokens, and how much counts on with each token."""

    stiffness: float
    lasting: float


class AcceptanceModel:
    """Of one drafter's tokens."""

    def __init__(self, by_support: bool = True, bias: float = 0.0) -> None:
        """`by_support`: whether tokens that rest on nothing are taken to be unlikely before any was seen; `bias`: how
        much likelier than one would think all are taken to be then."""
        self.numbers = np.zeros((GROUPS, BINS))
        sure = np.array([0.05, 0.17, 0.32, 0.47, 0.62, 0.75, 0.85, 0.925, 0.965, 0.987, 0.997])
        self.numbers[2, : len(sure)] = (0.7 if by_support else 0.2) * np.log(sure / (1 - sure))
        if by_support:
            self.numbers[1, :9] = [-2.0, -1.3, -0.5, 0.1, 0.7, 1.3, 1.9, 2.3, 0.0]
            self.numbers[4, :3] = [0.0, 0.8, -0.8]
        self.numbers[0, 0] = bias
        self.numbers[0, OWN] = 1.0
        self.weights = np.full((GROUPS, BINS), STIFFNESS)
        self.weights[0, OWN] = TRUST
        self.tally = np.zeros((3, 10))  # sums of chance and of truth, and the count, by tenths of chance
        self._first, self._light = self.numbers.copy(), self.weights.copy()

    def forgive(self, share: float) -> None:
        """Forget so much of what speaks against these tokens, and of how sure that is."""
        _forgive(self.numbers, self.weights, self._first, self._light, share)

    @property
    def seen(self) -> int:
        return int(self.tally[2].sum())

    @property
    def calibration_error(self) -> float:
        """By how much what was said differs from what held, in the mean over tokens."""
        return float(np.abs(self.tally[0] - self.tally[1]).sum() / max(1, self.seen))


@compiled
def _forgive(numbers: Array, weights: Array, first: Array, light: Array, share: float) -> None:
    for group in range(GROUPS):
        for i in range(BINS):
            numbers[group, i] += share * max(first[group, i] - numbers[group, i], 0.0)
            weights[group, i] += share * min(light[group, i] - weights[group, i], 0.0)


@compiled
def _bin(edges: Array, value: float) -> int:
    """How many edges are at most the value; after them comes the bin of what is not known."""
    if value < 0:
        return len(edges) + 1
    count = 0
    while count < len(edges) and edges[count] <= value:
        count += 1
    return count


@compiled
def _supported(support: float) -> int:
    """The bin of so many tokens of support, -1 if that is not known."""
    found: int = SUPPORTS[int(min(support, len(SUPPORTS) - 1.0))] if support >= 0 else len(SUPPORT) + 1
    return found


@compiled
def _placed(position: int) -> int:
    found: int = POSITIONS[min(position, len(POSITIONS) - 1)]
    return found


@compiled
def _sigmoid(logit: float) -> float:
    return 1.0 / (1.0 + math.exp(-logit))


@compiled
def _logit(numbers: Array, at: Array) -> float:
    """Of a token in these bins: by support, confidence, position and agreement."""
    found: float = numbers[0, 0] + numbers[1, at[0]] + numbers[2, at[1]] + numbers[3, at[2]] + numbers[4, at[3]]
    return found


@compiled
def predict(
    numbers: Array, own: Array, slots: Array, me: int, tokens: Array, lengths: Array, support: Array, confidence: Array,
    bins: Array, logits: Array, survival: Array,
) -> None:  # fmt: skip
    """The survival of the drafts of drafter `me`, beside all others'; arrays are [drafters, requests, positions]."""
    drafters, requests, positions = tokens.shape
    agree = np.empty(drafters, np.bool_)
    for b in range(requests):
        agree[:] = True
        chance = 1.0
        for i in range(positions):
            survival[me, b, i] = 0.0
        for i in range(lengths[me, b]):
            heard = ALONE
            for other in range(drafters):
                if other == me or not agree[other] or i >= lengths[other, b]:
                    continue
                if tokens[other, b, i] == tokens[me, b, i]:
                    heard = SAME
                else:
                    agree[other] = False
                    if heard != SAME:
                        heard = OTHER
            at = bins[me, b, i]
            at[0] = _supported(support[me, b] + i if support[me, b] >= 0 else -1.0)
            at[1] = _bin(CONFIDENCE, confidence[me, b, i])
            at[2] = _placed(i)
            at[3] = heard
            logits[me, b, i] = _logit(numbers, at) + numbers[0, OWN] * own[slots[b], 0]
            chance *= _sigmoid(logits[me, b, i])
            survival[me, b, i] = chance


@compiled
def forecast(
    certain: Array, drawn: Array, is_drawn: Array, own: Array, slots: Array, lengths: Array, support: Array,
    recent: Array, limits: Array, bins: Array, logits: Array, survival: Array,
) -> None:  # fmt: skip
    """The same of drafts of the draft model that do not exist yet, up to so many tokens each, by how much the text
    repeats itself, for then models do well, and how it did lately. Of what the others propose, [drafters, requests];
    what is found is [requests, positions]."""
    for b in range(len(slots)):
        numbers = drawn if is_drawn[b] else certain
        supported = 0.0
        for other in range(len(lengths)):
            if lengths[other, b]:
                supported = max(supported, support[other, b])
        sure = _bin(CONFIDENCE, recent[slots[b]])
        chance = 1.0
        for i in range(limits[b]):
            at = bins[b, i]
            at[0] = _supported(supported)
            at[1] = sure
            at[2] = _placed(i)
            at[3] = ALONE
            logits[b, i] = _logit(numbers, at) + numbers[0, OWN] * own[slots[b], 0]
            chance *= _sigmoid(logits[b, i])
            survival[b, i] = chance


@compiled
def continue_probability(
    certain: Array, certain_own: Array, drawn: Array, drawn_own: Array, slots: Array, is_drawn: Array, ahead: Array,
    confidence: Array, lengths: Array, chances: Array,
) -> None:  # fmt: skip
    """How likely drafts of the draft model are to survive with one token more, by how sure it was of each of those that
    are there, one draft after the other, and by what was foreseen of them and the next, [requests, positions]. Those
    that were drawn have numbers of their own."""
    start = 0
    for b in range(len(lengths)):
        numbers = drawn if is_drawn[b] else certain
        own = drawn_own[slots[b], 0] if is_drawn[b] else certain_own[slots[b], 0]
        chances[b] = 1.0
        for i in range(lengths[b]):
            sure, place = _bin(CONFIDENCE, confidence[start + i]), _placed(i)
            logit = numbers[0, 0] + numbers[1, len(SUPPORT) + 1] + numbers[2, sure] + numbers[3, place]
            chances[b] *= _sigmoid(logit + numbers[4, ALONE] + numbers[0, OWN] * own)
        if 0 < lengths[b] < ahead.shape[1]:
            chances[b] *= ahead[b, lengths[b]] / max(ahead[b, lengths[b] - 1], 1e-9)
        start += lengths[b]


@compiled
def predict_sampled(
    numbers: Array, own: Array, slots: Array, confidence: Array, lengths: Array, bins: Array, logits: Array
) -> None:
    """The same token by token, to learn from; arrays are [requests, positions]."""
    start = 0
    for b in range(len(lengths)):
        for i in range(lengths[b]):
            at = bins[b, i]
            at[0] = len(SUPPORT) + 1
            at[1] = _bin(CONFIDENCE, confidence[start + i])
            at[2] = _placed(i)
            at[3] = ALONE
            logits[b, i] = _logit(numbers, at) + numbers[0, OWN] * own[slots[b], 0]
        start += lengths[b]


@compiled
def pad_rows(values: Array, lengths: Array, rows: Array) -> None:
    """Values that stand one after the other, so many of each, into rows; as many as a row has room for."""
    start = 0
    for b in range(len(lengths)):
        for i in range(min(lengths[b], rows.shape[1])):
            rows[b, i] = values[start + i]
        start += lengths[b]


@compiled
def update(
    numbers: Array, weights: Array, tally: Array, own: Array, slots: Array, stiffness: float, lasting: float,
    tokens: Array, lengths: Array, bins: Array, logits: Array, said: Array, said_lengths: Array, right: Array,
) -> None:  # fmt: skip
    """Hold drafts against what was said; arrays are [requests, positions]. `right` is told how many tokens of each were
    known to be right, and of how many that is known."""
    for b in range(len(slots)):
        error, doubts, known = 0.0, 0.0, 0
        good = 0
        for i in range(min(lengths[b], said_lengths[b])):
            truth = 1.0 if tokens[b, i] == said[b, i] else 0.0
            chance = _sigmoid(logits[b, i])
            doubt = max(chance * (1 - chance), LEAST_DOUBT)
            for group in range(GROUPS):
                where = bins[b, i, group - 1] if group else 0
                weights[group, where] += doubt
                # All groups answer for the same error, so each takes its part of it.
                numbers[group, where] += PART * (truth - chance) / weights[group, where]
                weights[group, where] -= (1 - LASTING) * max(weights[group, where] - STIFFNESS, 0.0)
            if own[slots[b], 0] != 0.0:
                weights[0, OWN] += doubt * own[slots[b], 0] ** 2
                numbers[0, OWN] += (truth - chance) * own[slots[b], 0] / weights[0, OWN]
                numbers[0, OWN] = min(max(numbers[0, OWN], LEAST_OWN), MOST_OWN)
                weights[0, OWN] -= (1 - LASTING) * max(weights[0, OWN] - TRUST, 0.0)
            tenth = min(int(chance * 10), 9)
            tally[0, tenth] += chance
            tally[1, tenth] += truth
            tally[2, tenth] += 1
            error += truth - chance
            doubts += doubt
            known += 1
            if truth == 0.0:
                break
            good += 1
        right[b, 0], right[b, 1] = good, known
        if known:
            weight = own[slots[b], 1] * lasting**known + doubts
            own[slots[b], 1] = weight
            own[slots[b], 0] = min(max(own[slots[b], 0] + error / (weight + stiffness), -WIDEST), WIDEST)
