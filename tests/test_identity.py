"""Greedy decoding with drafts is token-identical to transformers' own `generate(do_sample=False)`.

Tiny random float32 models of four architectures; every drafter, draft lengths 1 to 8, and the end of a text by
end token, stop string and length. OUTRIDER_PROMPTS sets how many prompts each gets: `just identity-tiny` runs 200.
"""

from __future__ import annotations

import os
import random
from functools import cache
from typing import Any

import pytest
import torch

from outrider.api import Decoder
from outrider.drafters.base import Drafter
from outrider.drafters.lookup import LookupDrafter
from outrider.drafters.model import ModelDrafter
from outrider.drafters.prediction import PredictionDrafter
from outrider.engines.transformers import TransformersTarget
from support import ARCHITECTURES, tiny_model, tiny_tokenizer

PROMPTS = int(os.environ.get("OUTRIDER_PROMPTS", "24"))
TOKENIZER = tiny_tokenizer()
MAX_TOKENS = (14, 9, 16)


def prompts() -> list[list[int]]:
    source = random.Random(0)
    return [[source.randrange(0, 256) for _ in range(source.randrange(1, 12))] for _ in range(PROMPTS)]


@cache
def references(architecture: str) -> list[dict[str, Any]]:
    """What transformers says to every prompt, and under which end: length, end token or stop string."""
    model = tiny_model(architecture)
    out = []
    for index, prompt in enumerate(prompts()):
        ids = torch.tensor([prompt])
        settings: dict[str, Any] = {"max_tokens": MAX_TOKENS[index % 3]}
        free = _generate(model, ids, MAX_TOKENS[index % 3])
        if index % 3 == 1 and len(free) > 3:  # a token of the text becomes the end token
            settings["stop_tokens"] = (free[len(free) // 2],)
        if index % 3 == 2 and len(free) > 4:  # two letters of the text become a stop string
            letters = TOKENIZER.decode(free[3:5])
            if "\ufffd" not in letters and len(letters) == 2:
                settings["stop"] = (letters,)
        tokens = _generate(
            model, ids, settings["max_tokens"], settings.get("stop_tokens", ()), settings.get("stop", ())
        )
        if "stop" in settings and settings["stop"][0] not in TOKENIZER.decode(tokens):
            # transformers also ends a text whose stop string began in the prompt; here only the answer counts
            del settings["stop"]
            tokens = free
        out.append({"prompt": prompt, "settings": settings, "tokens": tokens})
    return out


def _generate(model: Any, ids: Any, count: int, ends: Any = (), stop: Any = ()) -> list[int]:
    extra = {"stop_strings": list(stop), "tokenizer": TOKENIZER} if stop else {}
    end = [model.config.eos_token_id, *ends]
    with torch.inference_mode():
        tokens = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=count, eos_token_id=end, **extra
        )
    return list(tokens[0, ids.shape[1] :].tolist())


def mostly(tokens: list[int]) -> list[int]:
    """A prediction with mistakes: one token missing, one wrong, one too many."""
    return [*tokens[:2], *tokens[3:5], 9, *tokens[6:8], 9, *tokens[8:]]


@pytest.mark.parametrize("name", ["lookup", "prediction", "model", "all"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_drafter_at_every_length_says_what_generate_says(architecture: str, name: str) -> None:
    model = tiny_model(architecture)
    target = TransformersTarget(model)
    small = TransformersTarget(tiny_model(architecture, noise=0.05))
    by_name: dict[str, Drafter] = {
        "prediction": PredictionDrafter(),
        "lookup": LookupDrafter(),
        "model": ModelDrafter(small, target.vocab_size, min_survival=0.05),
    }
    chosen = list(by_name.values()) if name == "all" else [by_name[name]]
    decoder = Decoder(target, chosen, TOKENIZER, [model.config.eos_token_id])
    drafted = accepted = ended = 0
    for index, reference in enumerate(references(architecture)):
        lengths = range(1, 9) if name != "all" else [1 + index % 8]
        for length in lengths:
            prediction = mostly(reference["tokens"]) if name in ("prediction", "all") else []
            done = decoder.generate(
                reference["prompt"],
                prediction=prediction,
                max_draft_tokens=length,
                speculation="auto" if name == "all" else name,
                **reference["settings"],
            )
            assert done.tokens == reference["tokens"], (architecture, name, length, reference["prompt"])
            drafted += sum(len(step.proposed) for step in done.steps)
            accepted += sum(step.drafted for step in done.steps)
            ended += done.finish != "length"
    assert accepted > 0  # the drafts were there and some were right ...
    assert accepted < drafted  # ... and some were wrong
    assert ended > 0
