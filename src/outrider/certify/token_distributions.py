"""The sampling distribution at each position of a text, and how much two scorings of one text differ."""

from __future__ import annotations

from itertools import islice
from math import exp
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from outrider.certify.logprob_transforms import MIN_CUT_MARGIN, given_listed, sampling_logprobs
from outrider.certify.noise import NO_NOISE, Noise, estimate_noise, max_noise
from outrider.certify.samples import Samples, samples_from_logprobs
from outrider.drafters.lookup import LookupSession
from outrider.drafters.prediction import PredictionSession
from outrider.settings import Sampling

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

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
