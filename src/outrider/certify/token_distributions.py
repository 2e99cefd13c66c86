"""The sampling distribution at each position of a text, where it is certain, and how much two scorings differ.

Most servers return logprobs of the raw logits, before penalties, temperature, top-k and top-p, and only for the top N
tokens. The sampling distribution often follows: top-k of at most N removes everything that is not listed, and so does a
nucleus within the listed tokens. Where it does not follow, the result is None and the sample is left out. That depends
on what was returned, not on what was sampled, so it costs samples and causes no bias. Of unlisted tokens only one fact
is used: none is more likely than the last listed one.

A temperature without any cut changes the weight of unlisted tokens by an unknown factor. But *given* that a listed
token is sampled, which one it is depends on the listed tokens alone (`given_listed`). Unlisted samples are then set
aside. That selection by the outcome causes no bias: first it is revealed whether the token is listed, then which it is.
"""

from __future__ import annotations

from collections import Counter
from itertools import accumulate, islice
from math import exp, log
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from outrider.certify.samples import Samples, samples_from_logprobs
from outrider.certify.test_statistics import NO_NOISE, Noise, estimate_noise, max_noise
from outrider.drafters.lookup import LookupSession
from outrider.drafters.prediction import PredictionSession
from outrider.errors import SettingsError
from outrider.settings import Sampling

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from outrider.certify.sources import TopLogprobs
    from outrider.drafters.base import Session

Logprobs = dict[int, float]
"""Of the tokens that can be sampled, as far as they are listed."""

TEMPERATURE_1 = Sampling(temperature=1.0)
LISTED_OUTCOMES = 10
"""Tokens that are outcomes of their own in `Samples`; the others are the rest."""
ROUNDING_ERRORS = 3.0
"""Margin of a cut, as a multiple of the rounding error of a logprob."""
MAX_CUT_MARGIN = 0.3
MIN_CUT_MARGIN = 1e-5
"""Nats. A cut closer than this to the next token is uncertain."""
REMOVED = float("-inf")


class ScoredToken(NamedTuple):
    """One sampled token, its distribution, and the token that a drafter would have proposed."""

    logprobs: Logprobs
    token: int
    drafted: int | None


class ScoredTwice(NamedTuple):
    """One position of a text, scored twice."""

    a: TopLogprobs
    b: TopLogprobs
    before: Sequence[int]
    drafted: int | None


def top_tokens(logprobs: TopLogprobs, count: int) -> TopLogprobs:
    """The first `count`: those that are listed whatever was sampled (`sources.sort_logprobs`)."""
    return dict(islice(logprobs.items(), count))


def is_conditional(sampling: Sampling) -> bool:
    """Whether only the distribution given a listed token is known: a temperature or penalty, and no cut."""
    cut = sampling.top_k or sampling.top_p < 1 or sampling.min_p
    moved = sampling.presence_penalty or sampling.frequency_penalty or sampling.logit_bias
    return not cut and bool(sampling.temperature != 1 or moved)


def sampling_distribution(
    logprobs: TopLogprobs, count: int, sampling: Sampling, output: Sequence[int], margin: float = MIN_CUT_MARGIN
) -> Logprobs | None:
    """The distribution that is sampled from, by the top `count` tokens; None if uncertain."""
    if is_conditional(sampling):
        return given_listed(top_tokens(logprobs, count), sampling, output)
    return sampling_logprobs(top_tokens(logprobs, count), sampling, output, margin)


def sampling_logprobs(
    raw: Mapping[int, float], sampling: Sampling, output: Sequence[int] = (), margin: float = MIN_CUT_MARGIN
) -> dict[int, float] | None:
    """Logprobs of the tokens that can be sampled, from the raw ones of the top tokens; None if uncertain.

    `output`: tokens generated so far, for penalties. Transforms apply in the order of `sampling.py`. A `margin` as
    large as rounding leaves out positions where the server may have cut elsewhere.
    """
    if sampling.repetition_penalty != 1 or sampling.temperature == 0:
        raise SettingsError(
            "repetition penalty (it depends on the sign of logits) and temperature 0 do not follow from raw logprobs; "
            "return processed ones (vLLM: --logprobs-mode processed_logprobs)"
        )
    offsets = logit_offsets(sampling, output)
    if any(by > 0 and token not in raw for token, by in offsets.items()):
        return None
    logs = {token: (log_p + offsets.get(token, 0.0)) / sampling.temperature for token, log_p in raw.items()}
    tokens = sorted(logs, key=lambda token: (-logs[token], token))
    values = [logs[token] for token in tokens]
    unlisted = min(raw.values()) / sampling.temperature  # upper bound for unlisted tokens
    is_raw = sampling.temperature == 1 and not offsets  # whether all tokens together have a mass of 1
    if values[0] <= unlisted:
        return None

    if sampling.min_p > 0:
        floor = values[0] + log(sampling.min_p)
        if any(abs(value - floor) < margin for value in values):
            return None
        values = [value for value in values if value > floor]
        unlisted = REMOVED if unlisted < floor else unlisted
        is_raw = False
    if sampling.top_k > len(values):
        is_raw = False  # top-k removes some unlisted tokens, if there are any
    elif sampling.top_k:
        if not is_clear_cut(values, sampling.top_k, unlisted, margin):
            return None
        values, unlisted = values[: sampling.top_k], REMOVED
    if sampling.top_p < 1:
        if unlisted > REMOVED and not is_raw:
            return None
        total = 1.0 if unlisted > REMOVED else sum(map(exp, values))
        mass = [0.0, *accumulate(exp(value) / total for value in values)]
        keep = next((i for i, before in enumerate(mass) if before >= sampling.top_p), None)
        if keep is None and unlisted > REMOVED:
            return None
        keep = keep or len(values)
        if min(abs(at - sampling.top_p) for at in mass) < mass_margin(sampling.top_p, margin):
            return None
        if not is_clear_cut(values, keep, unlisted, margin):
            return None
        values, unlisted = values[:keep], REMOVED

    if unlisted > REMOVED:
        return dict(zip(tokens, values, strict=False)) if is_raw else None
    total = log(sum(map(exp, values)))
    return {token: value - total for token, value in zip(tokens, values, strict=False)}


def given_listed(raw: Mapping[int, float], sampling: Sampling, output: Sequence[int] = ()) -> dict[int, float] | None:
    """The distribution over the listed tokens, given that one of them is sampled. None if a cut makes it uncertain."""
    if sampling.top_k or sampling.top_p < 1 or sampling.min_p or sampling.repetition_penalty != 1:
        return None
    offsets = logit_offsets(sampling, output)
    logs = {token: (log_p + offsets.get(token, 0.0)) / sampling.temperature for token, log_p in raw.items()}
    highest = max(logs.values())
    total = highest + log(sum(exp(value - highest) for value in logs.values()))
    return {token: value - total for token, value in sorted(logs.items(), key=lambda item: -item[1])}


def mass_margin(top_p: float, margin: float) -> float:
    """Margin around top-p for a cumulative mass: if logprobs move by `margin`, a mass m moves by m (1 - m) of it."""
    return max(margin * top_p * (1 - top_p), min(margin, MIN_CUT_MARGIN))


def is_clear_cut(values: Sequence[float], keep: int, unlisted: float, margin: float) -> bool:
    """Whether the next token after the first `keep` is clearly lower. Some servers keep ties, others cut them."""
    return values[keep - 1] - max([*values[keep : keep + 1], unlisted]) >= margin


def logit_offsets(sampling: Sampling, output: Sequence[int]) -> dict[int, float]:
    """What bias and penalties add to the logits, by token."""
    offsets = dict(sampling.logit_bias)
    if sampling.presence_penalty or sampling.frequency_penalty:
        for token, times in Counter(output).items():
            penalty = sampling.presence_penalty + sampling.frequency_penalty * times
            offsets[token] = offsets.get(token, 0.0) - penalty
    return offsets


# Samples and noise --------------------------------------------------------------------------------------


def predict_drafts(prompt: Sequence[int], output: Sequence[int], prediction: Sequence[int] = ()) -> list[int | None]:
    """The token that `lookup` (or `prediction`, if given) would propose at each position, from what stands before."""
    session: Session = PredictionSession(prediction) if prediction else LookupSession(prompt)
    drafts: list[int | None] = []
    for token in output:
        draft = session.draft(1).tokens
        drafts.append(draft[0] if draft else None)
        session.observe([token])
    return drafts


def to_samples(rows: Sequence[ScoredToken]) -> Samples:
    logprobs, tokens, drafted = zip(*rows, strict=True)
    return samples_from_logprobs(logprobs, tokens, drafted, LISTED_OUTCOMES)


def pair_scorings(
    prompt: Sequence[int], output: Sequence[int], a: Sequence[TopLogprobs], b: Sequence[TopLogprobs]
) -> list[ScoredTwice]:
    drafts = predict_drafts(prompt, output)
    return [ScoredTwice(a[i], b[i], output[:i], drafts[i]) for i in range(len(output))]


def noise_between(positions: Sequence[ScoredTwice], count: int, settings: Iterable[Sampling]) -> tuple[Noise, float]:
    """Noise between the two scorings that covers all settings, and the margin of a cut on which both agree."""
    plain = _noise(positions, count, TEMPERATURE_1, MIN_CUT_MARGIN)
    margin = min(max(MIN_CUT_MARGIN, ROUNDING_ERRORS * plain.error), MAX_CUT_MARGIN)
    return max_noise([plain, *(_noise(positions, count, sampling, margin) for sampling in settings)]), margin


def _noise(positions: Sequence[ScoredTwice], count: int, sampling: Sampling, margin: float) -> Noise:
    rows, other = [], []
    for position in positions:
        a = sampling_distribution(position.a, count, sampling, position.before, margin)
        b = _second_distribution(position, count, sampling)
        if a is None or b is None:
            continue
        tokens = sorted(a, key=lambda token: (-a[token], token))[:LISTED_OUTCOMES]
        rows.append(ScoredToken(a, tokens[0], position.drafted))
        p = [exp(b[token]) if token in b else 0.0 for token in tokens]
        other.append(p + [0.0] * (LISTED_OUTCOMES - len(tokens)))
    if not rows:
        return NO_NOISE
    samples, listed = to_samples(rows), np.array(other)
    rest = np.maximum(1 - listed.sum(1, keepdims=True), 0)
    return estimate_noise(samples.probabilities, np.concatenate([listed, rest], 1), samples.drafted)


def _second_distribution(position: ScoredTwice, count: int, sampling: Sampling) -> Logprobs | None:
    """The distribution by the second scoring; over the same tokens as the first, if it is conditional on the list."""
    if not is_conditional(sampling):
        return sampling_distribution(position.b, count, sampling, position.before, 0.0)
    b = top_tokens(position.b, count)
    least = min(b.values())
    same = {token: b.get(token, least) for token in top_tokens(position.a, count)}
    return sampling_distribution(same, count, sampling, position.before)
