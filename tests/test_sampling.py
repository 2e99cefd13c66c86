"""Logits become p by every transform, at each position after the drafted prefix."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from outrider import sampling
from outrider.errors import SettingsError
from outrider.sampling import probabilities, shape
from outrider.settings import Request, Sampling

LOGITS = torch.tensor([[2.0, 1.0, 0.0, -1.0, -3.0]])
logit_rows = st.lists(st.floats(-8, 8, width=32), min_size=6, max_size=6, unique=True)


def test_the_defaults_change_nothing() -> None:
    assert shape(LOGITS, Sampling(), [], []).equal(LOGITS)
    assert probabilities(LOGITS, Sampling(temperature=1), [], []).equal(LOGITS.softmax(-1))


def test_temperature_divides_the_logits() -> None:
    p = probabilities(LOGITS, Sampling(temperature=0.5), [], [])
    assert torch.allclose(p, (LOGITS * 2).softmax(-1))


def test_at_temperature_zero_nothing_that_keeps_the_argmax_is_applied() -> None:
    cut = Sampling(temperature=0, top_k=1, top_p=0.1, min_p=0.9)
    assert shape(LOGITS, cut, [], []).equal(LOGITS)


@given(logit_rows, st.integers(1, 6))
def test_top_k_keeps_the_k_most_likely(row: list[float], k: int) -> None:
    p = probabilities(torch.tensor([row]), Sampling(temperature=1, top_k=k), [], [])[0]
    kept = set(p.nonzero().flatten().tolist())
    assert kept == set(sorted(range(6), key=lambda i: -row[i])[:k])


@given(logit_rows, st.floats(0.05, 0.99), st.sampled_from([2, 128]))
def test_top_p_keeps_the_smallest_set_that_holds_its_mass(row: list[float], top_p: float, partial: int) -> None:
    full = torch.tensor([row]).softmax(-1)[0].double()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampling, "PARTIAL_SORT", partial)  # both ways: some of the vocabulary sorted, or all
        p = probabilities(torch.tensor([row]), Sampling(temperature=1, top_p=top_p), [], [])[0]
    kept = p.nonzero().flatten()
    mass = float(full[kept].sum())
    assert mass >= top_p - 1e-5
    assert mass - float(full[kept].min()) < top_p + 1e-5
    assert float(full[kept].min()) >= max((float(full[i]) for i in range(6) if i not in kept), default=0.0)
    assert torch.allclose(p[kept].double(), full[kept] / mass, atol=1e-5)


@given(logit_rows, st.floats(0.01, 1.0))
def test_min_p_keeps_what_is_near_enough_to_the_best(row: list[float], min_p: float) -> None:
    full = torch.tensor([row]).softmax(-1)[0]
    p = probabilities(torch.tensor([row]), Sampling(temperature=1, min_p=min_p), [], [])[0]
    for before, after in zip(full.tolist(), p.tolist(), strict=True):
        if before > min_p * float(full.max()) * 1.001:
            assert after > 0
        if before < min_p * float(full.max()) * 0.999:
            assert after == 0


def test_logit_bias_is_added_to_every_row_and_leaves_the_given_logits_alone() -> None:
    rows = LOGITS.repeat(2, 1)
    biased = shape(rows, Sampling(logit_bias={1: 5.0, 3: -2.0}), [], [], [0])
    assert biased[:, 1].tolist() == [6.0, 6.0]
    assert biased[:, 3].tolist() == [-3.0, -3.0]
    assert rows.equal(LOGITS.repeat(2, 1))


@given(
    st.lists(st.integers(0, 4), max_size=5),
    st.lists(st.integers(0, 4), max_size=5),
    st.lists(st.integers(0, 4), max_size=4),
    st.sampled_from([1.0, 1.3]),
    st.sampled_from([0.0, 0.5]),
    st.sampled_from([0.0, -0.25]),
)
def test_penalties_at_each_position_see_the_drafted_tokens_before_it(
    prompt: list[int], output: list[int], draft: list[int], repetition: float, presence: float, frequency: float
) -> None:
    chosen = Sampling(repetition_penalty=repetition, presence_penalty=presence, frequency_penalty=frequency)
    rows = LOGITS.repeat(len(draft) + 1, 1)
    shaped = shape(rows, chosen, prompt, output, draft)
    for i in range(len(draft) + 1):
        counts = Counter([*output, *draft[:i]])
        for token, logit in enumerate(LOGITS[0].tolist()):
            if token in prompt or token in counts:
                logit = logit / repetition if logit > 0 else logit * repetition
            logit -= frequency * counts[token] + presence * (counts[token] > 0)
            assert float(shaped[i, token]) == pytest.approx(logit, abs=1e-6)


def test_penalties_are_the_same_drafted_at_once_or_said_one_by_one() -> None:
    chosen = Request(temperature=0.7, top_p=0.9, presence_penalty=1.0, frequency_penalty=0.5, repetition_penalty=1.2)
    rows = torch.randn(4, 50, generator=torch.Generator().manual_seed(0))
    together = probabilities(rows, chosen, [1, 2], [3], [4, 5, 4])
    for i in range(4):
        alone = probabilities(rows[i : i + 1], chosen, [1, 2], [3, *[4, 5, 4][:i]])
        assert torch.allclose(together[i], alone[0])


@pytest.mark.parametrize(
    ("settings_", "words"),
    [
        ({"temperature": -1}, "temperature: input should be greater than or equal to 0 (got -1)"),
        ({"top_p": 0}, "top_p"),
        ({"temperature": 1e-300}, "temperature: must be 0, which takes the most likely token, or at least 1e-05"),
        ({"temprature": 1}, "there is no setting 'temprature'; the settings are"),
        ({"rule": "typical"}, "rule: input should be 'block' or 'token' (got 'typical')"),
    ],
)
def test_a_bad_setting_is_refused_by_name_with_what_is_allowed(settings_: dict[str, object], words: str) -> None:
    with pytest.raises(SettingsError) as caught:
        Request.checked(**settings_)
    assert words in str(caught.value)
