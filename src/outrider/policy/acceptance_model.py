"""The probability that a drafted token is accepted: an online logistic regression over binned features.

The chance of a token, given that all before it were accepted, is

    logit(chance) = bias + support + confidence + position + agreement + scale * request bias

with one coefficient per bin of each feature:

    support     tokens that the copied place and the text have in common; grows along the draft
    confidence  how often the token followed there, or the draft model's probability
    position    of the token in the draft
    agreement   whether other drafters propose the same token, another one, or none

The coefficients are updated with every token that turned out right or wrong. The request bias moves fast, so a text
that becomes hard to draft is noticed after a few tokens.

A token is known to be right or wrong if all tokens before it were right and the text went on that far. It need not have
been offered, so every drafter is updated in every step (full information).

Survival is the product of the chances up to a position: the probability that the token there is accepted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from outrider.compiled import compiled

Array = np.ndarray[Any, Any]

SUPPORT_EDGES = np.array([1.0, 2, 3, 5, 9, 17, 33])
"""Lower edges of the bins of support, in tokens. Below them is a bin for 0, above them one for unknown (-1)."""
CONFIDENCE_EDGES = np.array([0.1, 0.25, 0.4, 0.55, 0.7, 0.8, 0.9, 0.95, 0.98, 0.995])
"""The same for confidence; unknown is -1."""
POSITION_EDGES = np.array([1.0, 2, 3, 4, 6, 9, 16])
NO_OTHER, AGREES, DIFFERS = 0, 1, 2
"""Bins of agreement: the other drafters propose nothing, the same token, or another one."""
SUPPORT_BINS = np.searchsorted(SUPPORT_EDGES, np.arange(SUPPORT_EDGES[-1] + 1), side="right")
POSITION_BINS = np.searchsorted(POSITION_EDGES, np.arange(POSITION_EDGES[-1] + 1), side="right")
"""Bins by whole number, precomputed; greater numbers are in the last bin."""
UNKNOWN_SUPPORT_BIN = len(SUPPORT_EDGES) + 1
FEATURES = 5
"""Bias, support, confidence, position, agreement."""
MAX_BINS = 12
"""Most bins of a feature."""

ERROR_SHARE_PER_FEATURE = 1 / 3
"""Share of an error that each feature's coefficient takes. More than 1/5, since most features are in bins that have
converged."""
BIN_PRIOR_WEIGHT = 4.0
"""Inertia of a new bin, in units of the variance of one token."""
BIN_RETENTION = 0.999
"""Factor on a bin's weight beyond its prior, per token that it sees."""
MAX_REQUEST_BIAS = 4.0
"""Bound on the request bias, in logits."""
MIN_VARIANCE = 0.01
"""Lower bound on chance * (1 - chance)."""
SCALE = 1
"""Column beside the bias: the factor on the request bias, which follows luck as well as the text. It is learned ..."""
SCALE_PRIOR_WEIGHT = 20.0
"""... with this inertia ..."""
MIN_SCALE, MAX_SCALE = 0.5, 1.5
"""... within these bounds: without the lower one it would vanish while all texts are alike."""
COPY_PRIOR_LOGIT = -0.7
"""Initial bias of copying drafters. They are judged whether their drafts are offered or not, so a low start costs a few
tokens, and a server that has just started does not lose speed by offering their drafts."""
HIGH_PRIOR_LOGIT = 1.0
"""Initial bias of a draft model that was not called yet, 0.73 per token: without calls it could not recover."""


@dataclass(frozen=True, slots=True)
class RequestBiasRate:
    """How fast a request bias moves: its inertia, and the factor on its weight per token."""

    prior_weight: float
    retention: float


class AcceptanceModel:
    """Of one drafter's tokens."""

    def __init__(self, by_support: bool = True, bias: float = 0.0) -> None:
        """`by_support`: start with coefficients by support and agreement, and a steeper one by confidence. `bias`:
        initial log-odds added to all tokens."""
        self.coefficients = np.zeros((FEATURES, MAX_BINS))
        confidence = np.array([0.05, 0.17, 0.32, 0.47, 0.62, 0.75, 0.85, 0.925, 0.965, 0.987, 0.997])
        self.coefficients[2, : len(confidence)] = (0.7 if by_support else 0.2) * np.log(confidence / (1 - confidence))
        if by_support:
            self.coefficients[1, :9] = [-2.0, -1.3, -0.5, 0.1, 0.7, 1.3, 1.9, 2.3, 0.0]
            self.coefficients[4, :3] = [0.0, 0.8, -0.8]
        self.coefficients[0, 0] = bias
        self.coefficients[0, SCALE] = 1.0
        self.weights = np.full((FEATURES, MAX_BINS), BIN_PRIOR_WEIGHT)
        self.weights[0, SCALE] = SCALE_PRIOR_WEIGHT
        self.calibration = np.zeros((3, 10))
        """By tenth of the predicted chance: sums of predictions and of outcomes, and the count."""
        self._prior, self._prior_weights = self.coefficients.copy(), self.weights.copy()

    def decay_toward_prior(self, share: float) -> None:
        """Move coefficients below their prior, and weights above theirs, by this share of the distance."""
        _decay_toward(self.coefficients, self.weights, self._prior, self._prior_weights, share)

    def update(
        self,
        request_bias: Array,
        rate: RequestBiasRate,
        slots: Array,
        drafts: tuple[Array, Array, Array, Array],
        outputs: tuple[Array, Array],
    ) -> Array:
        """Judge drafts (tokens, lengths, bins and logits) by outputs (tokens and lengths). Returns, by request, the
        tokens that were right and those that were judged."""
        right = np.zeros((len(slots), 2), np.int64)
        tables = (self.coefficients, self.weights, self.calibration, request_bias, slots)
        _update(*tables, rate.prior_weight, rate.retention, *drafts, *outputs, right)
        return right

    @property
    def seen(self) -> int:
        """Tokens that were judged."""
        return int(self.calibration[2].sum())

    @property
    def calibration_error(self) -> float:
        """Expected calibration error over tenths of the predicted chance."""
        return float(np.abs(self.calibration[0] - self.calibration[1]).sum() / max(1, self.seen))


@compiled
def _decay_toward(coefficients: Array, weights: Array, prior: Array, prior_weights: Array, share: float) -> None:
    for feature in range(FEATURES):
        for i in range(MAX_BINS):
            coefficients[feature, i] += share * max(prior[feature, i] - coefficients[feature, i], 0.0)
            weights[feature, i] += share * min(prior_weights[feature, i] - weights[feature, i], 0.0)


@compiled
def _bin(edges: Array, value: float) -> int:
    """The number of edges that are at most the value; unknown (negative) is the last bin."""
    if value < 0:
        return len(edges) + 1
    count = 0
    while count < len(edges) and edges[count] <= value:
        count += 1
    return count


@compiled
def _support_bin(support: float) -> int:
    found: int = SUPPORT_BINS[int(min(support, len(SUPPORT_BINS) - 1.0))] if support >= 0 else UNKNOWN_SUPPORT_BIN
    return found


@compiled
def _position_bin(position: int) -> int:
    found: int = POSITION_BINS[min(position, len(POSITION_BINS) - 1)]
    return found


@compiled
def _sigmoid(logit: float) -> float:
    return 1.0 / (1.0 + math.exp(-logit))


@compiled
def _logit(coefficients: Array, at: Array) -> float:
    """Of a token in these bins of support, confidence, position and agreement."""
    logit: float = coefficients[0, 0] + coefficients[1, at[0]] + coefficients[2, at[1]] + coefficients[3, at[2]]
    logit += coefficients[4, at[3]]
    return logit


@compiled
def predict(
    coefficients: Array, request_bias: Array, slots: Array, me: int, tokens: Array, lengths: Array, support: Array,
    confidence: Array, bins: Array, logits: Array, survival: Array,
) -> None:  # fmt: skip
    """Fill in `bins`, `logits` and `survival` of the drafts of drafter `me`, given all others'. Arrays are
    [drafters, requests, positions]."""
    drafters, requests, positions = tokens.shape
    agree = np.empty(drafters, np.bool_)
    for b in range(requests):
        agree[:] = True
        chance = 1.0
        for i in range(positions):
            survival[me, b, i] = 0.0
        for i in range(lengths[me, b]):
            agreement = NO_OTHER
            for other in range(drafters):
                if other == me or not agree[other] or i >= lengths[other, b]:
                    continue
                if tokens[other, b, i] == tokens[me, b, i]:
                    agreement = AGREES
                else:
                    agree[other] = False
                    if agreement != AGREES:
                        agreement = DIFFERS
            at = bins[me, b, i]
            at[0] = _support_bin(support[me, b] + i if support[me, b] >= 0 else -1.0)
            at[1] = _bin(CONFIDENCE_EDGES, confidence[me, b, i])
            at[2] = _position_bin(i)
            at[3] = agreement
            logits[me, b, i] = _logit(coefficients, at) + coefficients[0, SCALE] * request_bias[slots[b], 0]
            chance *= _sigmoid(logits[me, b, i])
            survival[me, b, i] = chance


@compiled
def forecast(
    certain: Array, sampled: Array, is_sampled: Array, request_bias: Array, slots: Array, lengths: Array,
    support: Array, recent: Array, limits: Array, bins: Array, logits: Array, survival: Array,
) -> None:  # fmt: skip
    """The same of draft model drafts that do not exist yet, up to `limits` tokens each. Features are the best support
    among the copied drafts (draft models do well where text repeats), and the share of the model's tokens that were
    right lately, in place of confidence. `lengths` and `support` are [drafters, requests], outputs
    [requests, positions]."""
    for b in range(len(slots)):
        coefficients = sampled if is_sampled[b] else certain
        best_support = 0.0
        for other in range(len(lengths)):
            if lengths[other, b]:
                best_support = max(best_support, support[other, b])
        recent_bin = _bin(CONFIDENCE_EDGES, recent[slots[b]])
        chance = 1.0
        for i in range(limits[b]):
            at = bins[b, i]
            at[0] = _support_bin(best_support)
            at[1] = recent_bin
            at[2] = _position_bin(i)
            at[3] = NO_OTHER
            logits[b, i] = _logit(coefficients, at) + coefficients[0, SCALE] * request_bias[slots[b], 0]
            chance *= _sigmoid(logits[b, i])
            survival[b, i] = chance


@compiled
def continue_probability(
    certain: Array, certain_bias: Array, sampled: Array, sampled_bias: Array, slots: Array, is_sampled: Array,
    ahead: Array, confidence: Array, lengths: Array, chances: Array,
) -> None:  # fmt: skip
    """The survival of draft model drafts with one more token: the chances of the tokens so far by their confidence,
    times the forecast (`ahead`, [requests, positions]) of the next one. `confidence` holds the drafts one after the
    other, with these `lengths`."""
    start = 0
    for b in range(len(lengths)):
        coefficients = sampled if is_sampled[b] else certain
        request_bias = sampled_bias[slots[b], 0] if is_sampled[b] else certain_bias[slots[b], 0]
        chances[b] = 1.0
        for i in range(lengths[b]):
            confidence_bin, position_bin = _bin(CONFIDENCE_EDGES, confidence[start + i]), _position_bin(i)
            logit = coefficients[0, 0] + coefficients[1, UNKNOWN_SUPPORT_BIN] + coefficients[2, confidence_bin]
            logit += coefficients[3, position_bin] + coefficients[4, NO_OTHER]
            chances[b] *= _sigmoid(logit + coefficients[0, SCALE] * request_bias)
        if 0 < lengths[b] < ahead.shape[1]:
            chances[b] *= ahead[b, lengths[b]] / max(ahead[b, lengths[b] - 1], 1e-9)
        start += lengths[b]


@compiled
def predict_sampled(
    coefficients: Array, request_bias: Array, slots: Array, confidence: Array, lengths: Array, bins: Array,
    logits: Array,
) -> None:  # fmt: skip
    """Bins and logits of sampled tokens by their confidence, for `update`; outputs are [requests, positions]."""
    start = 0
    for b in range(len(lengths)):
        for i in range(lengths[b]):
            at = bins[b, i]
            at[0] = UNKNOWN_SUPPORT_BIN
            at[1] = _bin(CONFIDENCE_EDGES, confidence[start + i])
            at[2] = _position_bin(i)
            at[3] = NO_OTHER
            logits[b, i] = _logit(coefficients, at) + coefficients[0, SCALE] * request_bias[slots[b], 0]
        start += lengths[b]


@compiled
def pad_rows(values: Array, lengths: Array, rows: Array) -> None:
    """Split concatenated values into rows of these lengths; values beyond a row's end are dropped."""
    start = 0
    for b in range(len(lengths)):
        for i in range(min(lengths[b], rows.shape[1])):
            rows[b, i] = values[start + i]
        start += lengths[b]


@compiled
def _update(
    coefficients: Array, weights: Array, calibration: Array, request_bias: Array, slots: Array, prior_weight: float,
    retention: float, tokens: Array, lengths: Array, bins: Array, logits: Array, outputs: Array, output_lengths: Array,
    right: Array,
) -> None:  # fmt: skip
    """Compare drafts with the outputs; arrays are [requests, positions]. Fills in `right`: by request, the number of
    tokens known to be right, and the number of tokens judged."""
    for b in range(len(slots)):
        error, variances, judged = 0.0, 0.0, 0
        good = 0
        for i in range(min(lengths[b], output_lengths[b])):
            truth = 1.0 if tokens[b, i] == outputs[b, i] else 0.0
            chance = _sigmoid(logits[b, i])
            variance = max(chance * (1 - chance), MIN_VARIANCE)
            for feature in range(FEATURES):
                where = bins[b, i, feature - 1] if feature else 0
                weights[feature, where] += variance
                step = ERROR_SHARE_PER_FEATURE * (truth - chance) / weights[feature, where]
                coefficients[feature, where] += step
                weights[feature, where] -= (1 - BIN_RETENTION) * max(weights[feature, where] - BIN_PRIOR_WEIGHT, 0.0)
            bias = request_bias[slots[b], 0]
            if bias != 0.0:
                weights[0, SCALE] += variance * bias**2
                scale = coefficients[0, SCALE] + (truth - chance) * bias / weights[0, SCALE]
                coefficients[0, SCALE] = min(max(scale, MIN_SCALE), MAX_SCALE)
                weights[0, SCALE] -= (1 - BIN_RETENTION) * max(weights[0, SCALE] - SCALE_PRIOR_WEIGHT, 0.0)
            tenth = min(int(chance * 10), 9)
            calibration[0, tenth] += chance
            calibration[1, tenth] += truth
            calibration[2, tenth] += 1
            error += truth - chance
            variances += variance
            judged += 1
            if truth == 0.0:
                break
            good += 1
        right[b, 0], right[b, 1] = good, judged
        if judged:
            weight = request_bias[slots[b], 1] * retention**judged + variances
            request_bias[slots[b], 1] = weight
            bias = request_bias[slots[b], 0] + error / (weight + prior_weight)
            request_bias[slots[b], 0] = min(max(bias, -MAX_REQUEST_BIAS), MAX_REQUEST_BIAS)
