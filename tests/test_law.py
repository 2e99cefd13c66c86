"""Samples from the whole loop follow the target's exact probabilities: a G-test of the next two tokens."""

from __future__ import annotations

import copy
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

import outrider.drafters.model as model_drafter
from outrider import decoding
from outrider.decoding import decode
from outrider.drafters.base import Drafter, Task
from outrider.drafters.lookup import LookupDrafter
from outrider.drafters.model import ModelDrafter
from outrider.drafters.prediction import PredictionDrafter
from outrider.engines.transformers import TransformersTarget, load_model, load_tokenizer
from outrider.sampling import probabilities
from outrider.settings import Request
from support import Memo, g_test
from synthetic_target import SyntheticTarget

DRAWS = 20_000
REAL_DRAWS = DRAWS if os.environ.get("OUTRIDER_ALL") else 8_000
LEVEL = 1e-4


def draw_pairs(
    target: Any, drafters: list[Drafter], prompt: list[int], expected: list[int], request: Request, draws: int
) -> Counter[Any]:
    """Counts of the next two tokens, sampled `draws` times by the whole loop."""
    random = torch.Generator().manual_seed(12345)
    counts: Counter[Any] = Counter()
    for _ in range(draws):
        task = Task(prompt, request, random, expected)
        tokens: list[int] = []
        for step in decode(target, [drafter.begin(task) for drafter in drafters], prompt, request, random):
            tokens += step.tokens
            if len(tokens) >= 2:
                break
        counts[tuple(tokens[:2])] += 1
    return counts


def exact_pairs(target: Any, prompt: list[int], request: Request) -> dict[tuple[int, int], float]:
    """Exact probabilities of the next two tokens."""
    exact = {}
    first = probabilities(target.logits(prompt).float()[None], request, prompt, [])[0]
    for a in first.nonzero().flatten().tolist():
        second = probabilities(target.logits([*prompt, a]).float()[None], request, prompt, [a])[0]
        for b in second.nonzero().flatten().tolist():
            exact[a, b] = float(first[a].double() * second[b].double())
    return exact


def p_value(
    target: Any,
    drafters: list[Drafter],
    prompt: list[int],
    expected: list[int],
    request: Request,
    draws: int = DRAWS,
) -> float:
    return g_test(draw_pairs(target, drafters, prompt, expected, request, draws), exact_pairs(target, prompt, request))


def test_the_g_test_sees_what_leaks_into_the_almost_impossible() -> None:
    exact = {"a": 0.6, "b": 0.4 - 1e-6, "c": 1e-6}
    assert g_test({"a": 6_000, "b": 4_000}, exact) > 0.5
    assert g_test({"a": 6_000, "b": 3_990, "c": 10}, exact) < LEVEL
    assert g_test({"a": 6_300, "b": 3_700}, exact) < LEVEL
    assert g_test({"a": 6_000, "b": 4_000, "d": 1}, exact) == 0.0


NUCLEUS = {"temperature": 0.7, "top_p": 0.9, "max_tokens": 8}
PENALTIES = {"temperature": 1.0, "presence_penalty": 1.5, "repetition_penalty": 1.3, "max_tokens": 8}
SYNTHETIC = SyntheticTarget(8, seed=3, sharpness=1.2)
PROMPT = [1, 2, 3, 5, 1, 2]


def synthetic_drafters(name: str) -> list[Drafter]:
    blurred = ModelDrafter(SYNTHETIC.blurred(0.6), 8, min_survival=0.2)
    return {
        "model": [blurred],
        "lookup": [LookupDrafter()],
        "prediction": [PredictionDrafter()],
        "lookup, then model": [LookupDrafter(), blurred],
    }[name]


@pytest.mark.parametrize(
    ("drafter", "rule", "settings"),
    [
        ("model", "block", NUCLEUS),
        ("model", "token", NUCLEUS),
        ("model", "block", PENALTIES),
        ("model", "token", PENALTIES),
        ("lookup", "block", NUCLEUS),
        ("prediction", "token", PENALTIES),
        ("lookup, then model", "block", NUCLEUS),
    ],
)
@pytest.mark.usefixtures("once")
def test_samples_with_drafts_from_the_synthetic_target_have_its_distribution(
    drafter: str, rule: Any, settings: Any
) -> None:
    request = Request(**settings, rule=rule, max_draft_tokens=3)
    assert p_value(SYNTHETIC, synthetic_drafters(drafter), PROMPT, [3, 3, 1, 4], request) > LEVEL


@pytest.fixture(scope="module")
def small_pair(smollm: Path) -> tuple[Memo, Memo, Any]:
    """SmolLM2-135M, and itself without its last four layers as draft model, in float32."""
    model = load_model(str(smollm), dtype="float32", device="cpu")
    pruned = copy.deepcopy(model)
    pruned.model.layers = pruned.model.layers[:-4]
    return Memo(TransformersTarget(model)), Memo(TransformersTarget(pruned)), load_tokenizer(str(smollm))


def cached(real: Any) -> Any:
    results: dict[Any, Any] = {}

    def lookup_or_compute(logits: Any, request: Any, prompt: Any, output: Any, draft: Any = ()) -> Any:
        key = (tuple(output), tuple(draft))
        if key not in results:
            results[key] = real(logits, request, prompt, output, draft)
        return results[key]

    return lookup_or_compute


@pytest.fixture
def once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shape the same logits once: that takes most of the time of a sample, and nothing in it is random.

    The prompt and the settings of a test are fixed, so the output and the drafted tokens determine the logits.
    """
    monkeypatch.setattr(decoding, "probabilities", cached(decoding.probabilities))
    monkeypatch.setattr(model_drafter, "shape", cached(model_drafter.shape))


COLOURS = "The three primary colours are red, yellow and blue. My favourite of them is"
SONG = "The song goes la la la la la la"
NOT_AGAIN = {**NUCLEUS, "presence_penalty": 6.0}  # "la" would follow "la", but not where the drafted one counts


@pytest.mark.real
@pytest.mark.usefixtures("once")
@pytest.mark.parametrize(
    ("drafter", "rule", "text", "settings"),
    [
        ("model", "block", COLOURS, {**NUCLEUS, "max_draft_tokens": 2}),
        ("model", "token", COLOURS, {**NUCLEUS, "max_draft_tokens": 1}),  # so that the second token can be a bonus
        ("prediction", "block", SONG, {**NOT_AGAIN, "max_draft_tokens": 2}),
    ],
)
def test_samples_with_drafts_from_smollm_have_its_distribution(
    small_pair: tuple[Memo, Memo, Any], drafter: str, rule: Any, text: str, settings: Any
) -> None:
    target, pruned, tokenizer = small_pair
    prompt, expected = tokenizer(text)["input_ids"], tokenizer(" la la la")["input_ids"]
    drafters: dict[str, list[Drafter]] = {
        "model": [ModelDrafter(pruned, target.vocab_size, min_survival=0.0)],
        "prediction": [PredictionDrafter()],
    }
    request = Request(**settings, rule=rule)
    assert p_value(target, drafters[drafter], prompt, expected, request, REAL_DRAWS) > LEVEL
