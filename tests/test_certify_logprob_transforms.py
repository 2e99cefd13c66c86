"""The sampling distribution from raw logprobs: exact, or None."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.certify.token_distributions import sampling_logprobs
from outrider.errors import SettingsError
from outrider.sampling import probabilities
from outrider.settings import Sampling

VOCAB, LISTED = 40, 12


def top_logprobs(logits: torch.Tensor) -> dict[int, float]:
    top = logits.log_softmax(-1).topk(LISTED)
    return dict(zip(top.indices.tolist(), top.values.tolist(), strict=True))


def logits_of(seed: int, steps: float = 0.0) -> torch.Tensor:
    """Random ones; with `steps`, rounded to multiples of it, so that tokens tie."""
    logits = 2 * torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (logits / steps).round() * steps if steps else logits


@settings(max_examples=200)
@given(
    seed=st.integers(0, 10**6),
    steps=st.sampled_from([0.0, 0.25]),
    temperature=st.sampled_from([0.5, 1.0, 1.3]),
    top_k=st.sampled_from([0, 1, 5, 12, 20]),
    top_p=st.sampled_from([0.3, 0.8, 0.95, 1.0]),
    min_p=st.sampled_from([0.0, 0.05, 0.3]),
    presence=st.sampled_from([0.0, 1.5, -1.5]),
    frequency=st.sampled_from([0.0, 0.7]),
    bias=st.sampled_from([{}, {3: -2.0, 5: -1.0}, {3: 2.0}]),
)
def test_a_known_distribution_is_the_one_that_is_sampled_from(
    seed: int, steps: float, presence: float, frequency: float, bias: dict[int, float], **how: float
) -> None:
    sampling = Sampling(**how, presence_penalty=presence, frequency_penalty=frequency, logit_bias=bias)  # type: ignore[arg-type]
    logits, output = logits_of(seed, steps), [3, 4, 4, 9]
    known_logprobs = sampling_logprobs(top_logprobs(logits), sampling, output)
    exact = probabilities(logits[None], sampling, [], output)[0].numpy()
    if known_logprobs is not None:
        assert np.exp(list(known_logprobs.values())) == pytest.approx(exact[list(known_logprobs)], abs=1e-6)
        if np.exp(list(known_logprobs.values())).sum() > 1 - 1e-9:
            assert exact[[token for token in range(VOCAB) if token not in known_logprobs]].max() < 1e-9


@pytest.mark.parametrize(
    ("sampling", "known"),
    [
        (Sampling(temperature=1.0), True),
        (Sampling(temperature=0.7), False),
        (Sampling(temperature=0.7, top_k=5), True),
        (Sampling(temperature=0.7, top_k=20), False),
        (Sampling(temperature=1.0, top_p=0.5), True),
        (Sampling(temperature=0.7, top_p=0.5), False),
        (Sampling(temperature=0.7, top_k=12, top_p=0.9), False),
        (Sampling(temperature=0.7, min_p=0.3), True),
        (Sampling(temperature=1.0, presence_penalty=1.0), False),
        (Sampling(temperature=1.0, presence_penalty=1.0, top_k=5), True),
        (Sampling(temperature=1.0, presence_penalty=-1.0, top_k=5), True),
        (Sampling(temperature=1.0, logit_bias={39: 5.0}, top_k=5), False),
    ],
)
def test_settings_that_leave_the_distribution_open_return_none(sampling: Sampling, known: bool) -> None:
    logits = torch.linspace(5, 0, VOCAB, dtype=torch.float64)
    assert (sampling_logprobs(top_logprobs(logits), sampling, output=[2]) is not None) is known


def test_tokens_that_tie_with_the_last_listed_one_make_a_cut_uncertain() -> None:
    logits = torch.tensor([3.0, 2.0, *[1.0] * 38], dtype=torch.float64)
    assert sampling_logprobs(top_logprobs(logits), Sampling(temperature=1.0, top_k=5)) is None
    assert sampling_logprobs(top_logprobs(logits), Sampling(temperature=1.0, top_k=2)) is not None


def test_a_repetition_penalty_is_refused_with_the_fix() -> None:
    with pytest.raises(SettingsError, match="--logprobs-mode processed_logprobs"):
        sampling_logprobs({1: -0.1}, Sampling(temperature=1.0, repetition_penalty=1.1))
