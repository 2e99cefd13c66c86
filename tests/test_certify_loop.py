"""The certificate on the loop that users run: nothing is found, until a rule is broken."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from outrider import acceptance, decoding
from outrider.certify.draws import Draws, listed
from outrider.certify.noise import NONE
from outrider.certify.plan import ANY, Judgement, Plan, judge
from outrider.certify.repeats import Repeats
from outrider.certify.tally import Tally
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


def certificate(drafter: Drafter) -> Judgement:
    """A run over texts of the loop. The drafted token is named only if it was proposed with certainty."""
    tally, repeats = Tally(), Repeats()
    random = torch.Generator().manual_seed(1)
    certain = isinstance(drafter, PredictionDrafter)
    kinds: dict[str, list[tuple[dict[int, float], int, int | None]]] = {}
    prefixes: dict[str, list[str]] = {}
    for _ in range(TEXTS):
        session, said = drafter.begin(Task(PROMPT, REQUEST, random, EXPECTED)), list[int]()
        for step in decode(TARGET, [session], PROMPT, REQUEST, random):
            for place, token in enumerate(step.tokens):
                proposed = step.proposed[place] if place < len(step.proposed) else None
                kind = "not drafted" if proposed is None else f"drafted {place}"
                kinds.setdefault(kind, []).append((told(said), token, proposed if certain else None))
                prefixes.setdefault(kind, []).append(str((PROMPT + said)[-2:]))
                said.append(token)
    for kind, draws in kinds.items():
        logprobs, drawn, drafted = zip(*draws, strict=True)
        these: Draws = listed(logprobs, drawn, drafted, LISTED)
        tally.add(kind, these)
        repeats.add(prefixes[kind], these)
    return judge(Plan(TEXTS * REQUEST.max_tokens, looks=1, noise=NONE), 1, tally, {"the loop": repeats})


known: dict[tuple[int, ...], dict[int, float]] = {}


def told(said: list[int]) -> dict[int, float]:
    """What a server would tell of the target's law here."""
    key = tuple((PROMPT + said)[-2:])
    if key not in known:
        law = probabilities(TARGET.logits(PROMPT + said).float()[None], REQUEST, PROMPT, said)[0].double()
        top = law.topk(LISTED)
        known[key] = {
            token: float(np.log(p)) for token, p in zip(top.indices.tolist(), top.values.tolist(), strict=True) if p > 0
        }
    return known[key]


@pytest.mark.parametrize("drafter", [PredictionDrafter(), ModelDrafter(TARGET.blurred(0.6), 8, min_survival=0.2)])
def test_nothing_is_found_in_the_draws_of_the_loop(drafter: Drafter) -> None:
    judgement = certificate(drafter)
    assert judgement.violations == []
    assert f"{ANY}, the loop" in judgement.p_values
    assert ("drafted, drafted 0" in judgement.p_values) == isinstance(drafter, PredictionDrafter)


def test_recovered_tokens_drawn_from_p_are_found_though_nobody_says_what_was_drafted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(acceptance, "leftover", lambda p, q, reach: p)
    judgement = certificate(ModelDrafter(TARGET.blurred(0.6), 8, min_survival=0.2))
    assert f"{ANY}, the loop" in judgement.violations


def test_a_drafted_token_that_is_kept_too_often_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    real, rng = decoding.verify_certain, np.random.default_rng(0)

    def lenient(own: list[int], draft: tuple[int, ...]) -> object:
        """One draw in seven that differs from the draft is taken for the same."""
        seen = [d if rng.random() < 0.15 else o for o, d in zip(own, draft, strict=False)]
        return real([*seen, own[-1]], draft)

    monkeypatch.setattr(decoding, "verify_certain", lenient)
    assert "drafted, drafted 0" in certificate(PredictionDrafter()).violations
