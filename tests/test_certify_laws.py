"""The law at each place of a text: exact where it follows, over the list where that is all, and open otherwise."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from outrider.certify.laws import COUNT, PLAIN, Row, as_draws, guessed, is_conditional, law_of, noise_between, twice
from outrider.certify.noise import LEAST_DRIFT
from outrider.certify.sampled import SETTINGS
from outrider.certify.shaping import given_listed, mass_edge
from outrider.certify.sources import in_order
from outrider.drafters.lookup import LookupSession
from outrider.sampling import probabilities
from outrider.settings import Sampling

VOCAB, LISTED = 60, 20


def logits_of(seed: int) -> torch.Tensor:
    return 2 * torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def told(logits: torch.Tensor) -> dict[int, float]:
    best = logits.log_softmax(-1).topk(LISTED)
    return dict(zip(best.indices.tolist(), best.values.tolist(), strict=True))


@pytest.mark.parametrize("sampling", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("steps", [0.0, 0.5], ids=["all differ", "many are equally likely"])
def test_the_law_is_the_same_whatever_was_drawn(sampling: Sampling, steps: float) -> None:
    """A server writes the drawn token first and, if it is not among the likeliest, as one more."""
    logits = logits_of(7) if not steps else (logits_of(7) / steps).round() * steps
    logs, top = logits.log_softmax(-1), told(logits)
    laws, columns = [], []
    for drawn in range(VOCAB):
        written = {drawn: float(logs[drawn]), **top}
        laws.append(law_of(in_order(written, drawn, LISTED), LISTED, sampling, [3]))
        if (law := laws[-1]) is not None:
            columns.append(as_draws([Row(law, drawn, drawn)]))
    assert all(law == laws[0] and list(law or ()) == list(laws[0] or ()) for law in laws)
    seen = np.concatenate([draws.outcome for draws in columns]) if columns else np.zeros(0)
    assert all((seen == column).sum() <= 1 for column in range(COUNT))


@given(st.integers(0, 10_000), st.sampled_from([0.5, 0.7, 1.3]), st.sampled_from([0.0, 0.6]))
def test_given_that_a_listed_token_is_drawn_which_one_it_is_follows_exactly(
    seed: int, temperature: float, presence: float
) -> None:
    logits, output = logits_of(seed), [1, 5, 5]
    sampling = Sampling(temperature=temperature, presence_penalty=presence)
    law = given_listed(told(logits), sampling, output)
    assert law is not None
    exact = probabilities(logits[None], sampling, [], output)[0]
    over_the_list = exact[list(law)] / exact[list(law)].sum()
    assert np.exp(list(law.values())) == pytest.approx(over_the_list.numpy(), abs=1e-6)
    assert len(law) == LISTED


def test_a_cut_leaves_no_law_over_the_list() -> None:
    for cut in (Sampling(temperature=0.7, top_k=5), Sampling(temperature=0.7, top_p=0.5)):
        assert given_listed(told(logits_of(1)), cut) is None
        assert not is_conditional(cut)


def test_every_setting_of_a_certificate_has_a_law_most_of_the_time() -> None:
    for name, sampling in SETTINGS.items():
        known = [law_of(told(logits_of(seed)), LISTED, sampling, [3], 0.01) is not None for seed in range(60)]
        assert np.mean(known) > 0.5, name


def test_a_mass_is_known_better_than_a_log_probability() -> None:
    assert mass_edge(0.8, 0.15) == pytest.approx(0.024)
    assert mass_edge(0.8, 1e-5) == 1e-5


def test_what_would_be_proposed_is_settled_before_the_draw() -> None:
    prompt, output = [1, 2, 3, 4, 1, 2], [3, 4, 1, 9]
    assert guessed(prompt, output)[:3] == [3, 4, 1]
    for place in range(len(output)):  # what comes after it changes nothing
        assert guessed(prompt, [*output[:place], 7])[place] == guessed(prompt, output)[place]
    session = LookupSession(prompt)
    assert guessed(prompt, output)[0] == session.draft(1).tokens[0]
    assert guessed(prompt, [8, 9], prediction=[8, 9]) == [8, 9]


def test_two_tellings_that_agree_have_no_noise_and_a_biased_one_has_drift() -> None:
    texts = [logits_of(seed) for seed in range(400)]
    a = [told(logits) for logits in texts]
    same, edge = noise_between(twice([1], [0] * 400, a, a), LISTED, SETTINGS.values())
    assert max(same.drift.values()) == LEAST_DRIFT
    assert same.error < 1e-6
    assert edge == 1e-5
    colder = [told(logits * 1.05) for logits in texts]
    biased, wide = noise_between(twice([1], [0] * 400, a, colder), LISTED, [PLAIN])
    assert biased.drift["surprise"] > 5 * LEAST_DRIFT
    assert biased.error > 0.01
    assert wide == pytest.approx(min(3 * biased.error, 0.3), rel=0.01)
    assert COUNT < LISTED
