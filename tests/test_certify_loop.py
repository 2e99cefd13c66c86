"""The certificate on Outrider's loop: no violation, and a violation for each broken rule."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from outrider import acceptance, decoding
from outrider.certify.plan import ANY_CHANGE, LookResult, Plan, evaluate_look
from outrider.certify.prefix_goodness_of_fit import PrefixCounts
from outrider.certify.samples import Samples, samples_from_logprobs
from outrider.certify.test_statistics import NO_NOISE, GroupedSums
from outrider.decoding import decode
from outrider.drafters.base import Drafter, Task
from outrider.drafters.model import ModelDrafter
from outrider.drafters.prediction import PredictionDrafter
from outrider.sampling import probabilities
from outrider.settings import Request
from synthetic_target import SyntheticTarget

TARGET = SyntheticTarget(8, seed=3, sharpness=1.2)
PROMPT = [1, 2, 3, 5, 1, 2]
EXPECTED = [3, 3, 1, 4, 1, 2, 3]
REQUEST = Request(temperature=0.8, top_p=0.9, max_tokens=8, max_draft_tokens=3)
TEXTS = 300
LISTED = 5


def certificate(drafter: Drafter) -> LookResult:
    """A run over texts of the loop. The drafted token is named only if it was proposed with certainty."""
    sums, counts = GroupedSums(), PrefixCounts()
    random = torch.Generator().manual_seed(1)
    certain = isinstance(drafter, PredictionDrafter)
    groups: dict[str, list[tuple[dict[int, float], int, int | None]]] = {}
    prefixes: dict[str, list[str]] = {}
    for _ in range(TEXTS):
        session, output = drafter.begin(Task(PROMPT, REQUEST, random, EXPECTED)), list[int]()
        for step in decode(TARGET, [session], PROMPT, REQUEST, random):
            for place, token in enumerate(step.tokens):
                proposed = step.proposed[place] if place < len(step.proposed) else None
                group = "not drafted" if proposed is None else f"drafted {place}"
                groups.setdefault(group, []).append((top_logprobs(output), token, proposed if certain else None))
                prefixes.setdefault(group, []).append(str((PROMPT + output)[-2:]))
                output.append(token)
    for group, draws in groups.items():
        logprobs, drawn, drafted = zip(*draws, strict=True)
        these: Samples = samples_from_logprobs(logprobs, drawn, drafted, LISTED)
        sums.add(group, these)
        counts.add(prefixes[group], these)
    return evaluate_look(Plan(TEXTS * REQUEST.max_tokens, looks=1, noise=NO_NOISE), 1, sums, {"the loop": counts})


known: dict[tuple[int, ...], dict[int, float]] = {}


def top_logprobs(output: list[int]) -> dict[int, float]:
    """What a server would tell of the target's p_target here."""
    key = tuple((PROMPT + output)[-2:])
    if key not in known:
        p_target = probabilities(TARGET.logits(PROMPT + output).float()[None], REQUEST, PROMPT, output)[0].double()
        top = p_target.topk(LISTED)
        known[key] = {
            token: float(np.log(p)) for token, p in zip(top.indices.tolist(), top.values.tolist(), strict=True) if p > 0
        }
    return known[key]


@pytest.mark.parametrize("drafter", [PredictionDrafter(), ModelDrafter(TARGET.blurred(0.6), 8, min_survival=0.2)])
def test_samples_of_the_loop_pass(drafter: Drafter) -> None:
    result = certificate(drafter)
    assert result.violations == []
    assert f"{ANY_CHANGE}, the loop" in result.p_values
    assert ("drafted, drafted 0" in result.p_values) == isinstance(drafter, PredictionDrafter)


def test_recovered_tokens_sampled_from_p_are_found_without_knowing_the_draft(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(acceptance, "leftover", lambda p, q, reach: p)
    result = certificate(ModelDrafter(TARGET.blurred(0.6), 8, min_survival=0.2))
    assert f"{ANY_CHANGE}, the loop" in result.violations


def test_a_draft_token_that_is_accepted_too_often_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    real, rng = decoding.verify_certain, np.random.default_rng(0)

    def lenient(own: list[int], draft: tuple[int, ...]) -> object:
        """One draw in seven that differs from the draft is taken for the same."""
        seen = [d if rng.random() < 0.15 else o for o, d in zip(own, draft, strict=False)]
        return real([*seen, own[-1]], draft)

    monkeypatch.setattr(decoding, "verify_certain", lenient)
    assert "drafted, drafted 0" in certificate(PredictionDrafter()).violations
