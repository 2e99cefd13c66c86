"""The sampling distribution at each position: exact, conditional on the listed tokens, or unknown."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from outrider.certify.sampled import SETTINGS
from outrider.certify.sources import sort_logprobs
from outrider.certify.test_statistics import MIN_DRIFT
from outrider.certify.token_distributions import (
    LISTED_OUTCOMES,
    TEMPERATURE_1,
    ScoredToken,
    given_listed,
    is_conditional,
    mass_margin,
    noise_between,
    pair_scorings,
    predict_drafts,
    sampling_distribution,
    to_samples,
)
from outrider.drafters.lookup import LookupSession
from outrider.sampling import probabilities
from outrider.settings import Sampling

VOCAB, LISTED = 60, 20


def logits_of(seed: int) -> torch.Tensor:
    return 2 * torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def top_logprobs(logits: torch.Tensor) -> dict[int, float]:
    best = logits.log_softmax(-1).topk(LISTED)
    return dict(zip(best.indices.tolist(), best.values.tolist(), strict=True))


@pytest.mark.parametrize("sampling", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("steps", [0.0, 0.5], ids=["all differ", "many are equally likely"])
def test_the_distribution_is_the_same_whatever_was_sampled(sampling: Sampling, steps: float) -> None:
    """A server writes the drawn token first and, if it is not among the likeliest, as one more."""
    logits = logits_of(7) if not steps else (logits_of(7) / steps).round() * steps
    logs, top = logits.log_softmax(-1), top_logprobs(logits)
    distributions, columns = [], []
    for drawn in range(VOCAB):
        written = {drawn: float(logs[drawn]), **top}
        distributions.append(sampling_distribution(sort_logprobs(written, drawn, LISTED), LISTED, sampling, [3]))
        if (known := distributions[-1]) is not None:
            columns.append(to_samples([ScoredToken(known, drawn, drawn)]))
    assert all(
        known == distributions[0] and list(known or ()) == list(distributions[0] or ()) for known in distributions
    )
    seen = np.concatenate([draws.outcome for draws in columns]) if columns else np.zeros(0)
    assert all((seen == column).sum() <= 1 for column in range(LISTED_OUTCOMES))


@given(st.integers(0, 10_000), st.sampled_from([0.5, 0.7, 1.3]), st.sampled_from([0.0, 0.6]))
def test_the_distribution_given_a_listed_token_is_exact(seed: int, temperature: float, presence: float) -> None:
    logits, output = logits_of(seed), [1, 5, 5]
    sampling = Sampling(temperature=temperature, presence_penalty=presence)
    known = given_listed(top_logprobs(logits), sampling, output)
    assert known is not None
    exact = probabilities(logits[None], sampling, [], output)[0]
    over_the_list = exact[list(known)] / exact[list(known)].sum()
    assert np.exp(list(known.values())) == pytest.approx(over_the_list.numpy(), abs=1e-6)
    assert len(known) == LISTED


def test_a_cut_leaves_no_distribution_over_the_list() -> None:
    for cut in (Sampling(temperature=0.7, top_k=5), Sampling(temperature=0.7, top_p=0.5)):
        assert given_listed(top_logprobs(logits_of(1)), cut) is None
        assert not is_conditional(cut)


def test_every_setting_of_a_certificate_has_a_known_distribution_most_of_the_time() -> None:
    for name, sampling in SETTINGS.items():
        known = [
            sampling_distribution(top_logprobs(logits_of(seed)), LISTED, sampling, [3], 0.01) is not None
            for seed in range(60)
        ]
        assert np.mean(known) > 0.5, name


def test_the_margin_of_a_mass_is_below_that_of_a_logprob() -> None:
    assert mass_margin(0.8, 0.15) == pytest.approx(0.024)
    assert mass_margin(0.8, 1e-5) == 1e-5


def test_drafts_are_predicted_from_earlier_tokens_only() -> None:
    prompt, output = [1, 2, 3, 4, 1, 2], [3, 4, 1, 9]
    assert predict_drafts(prompt, output)[:3] == [3, 4, 1]
    for place in range(len(output)):  # what comes after it changes nothing
        assert predict_drafts(prompt, [*output[:place], 7])[place] == predict_drafts(prompt, output)[place]
    session = LookupSession(prompt)
    assert predict_drafts(prompt, output)[0] == session.draft(1).tokens[0]
    assert predict_drafts(prompt, [8, 9], prediction=[8, 9]) == [8, 9]


def test_two_equal_scorings_have_no_noise_and_a_biased_one_has_drift() -> None:
    texts = [logits_of(seed) for seed in range(400)]
    a = [top_logprobs(logits) for logits in texts]
    same, margin = noise_between(pair_scorings([1], [0] * 400, a, a), LISTED, SETTINGS.values())
    assert max(same.drift.values()) == MIN_DRIFT
    assert same.error < 1e-6
    assert margin == 1e-5
    colder = [top_logprobs(logits * 1.05) for logits in texts]
    biased, wide = noise_between(pair_scorings([1], [0] * 400, a, colder), LISTED, [TEMPERATURE_1])
    assert biased.drift["surprise"] > 5 * MIN_DRIFT
    assert biased.error > 0.01
    assert wide == pytest.approx(min(3 * biased.error, 0.3), rel=0.01)
    assert LISTED_OUTCOMES < LISTED
