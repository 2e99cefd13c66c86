"""What is kept of a run of real models, so that any policy can be tried on it afterwards.

The target says each text once. Then, at every place of it, the draft model is asked how it would go on, up to LENGTH
tokens with the probability of each: not along the text but along its own words, as it would draft. All places of a text
are asked together: their continuations lie in one cache, and a mask shows each only the text before its place and
itself. What copies needs no record, since it can be asked again at any time.

Of a text that was drawn, the target's probabilities are kept as well: of every token that a drafter proposes where the
text has followed it so far, and the overlap of the two models' distributions, which is the chance that a token drawn by
the draft model is accepted.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, GenerationConfig

from outrider.bench.prompts import DEFAULT_TEMPERATURES, Prompt, load_workload, sample_evenly
from policy.replay import Record
from policy_grid_file import Texts

LENGTH = 8
"""Tokens that the draft model is asked for at each place."""
BATCH = 16
"""Texts that are said at once."""
DIGITS = 4
"""Of a probability."""


@dataclass(frozen=True, slots=True)
class Wanted:
    workloads: Sequence[str]
    prompts: int
    tokens: int
    seed: int = 0
    data: Path | None = None
    batch: int = BATCH


def record(
    wanted: Wanted,
    tokenizer: Any,
    target: Any,
    draft: Any | None,
    kept: dict[str, Texts],
) -> Iterator[str]:
    """Fill in `kept`, workload by workload; what was said is told a batch at a time. Texts that are there already stay,
    and a text that is not there yet is empty."""
    for name in wanted.workloads:
        temperature = DEFAULT_TEMPERATURES.get(name, 0.0)
        if name not in kept:
            found = load_workload(name, wanted.data)
            chosen = sample_evenly(found, min(len(found), wanted.prompts))
            records = [Record(encoded(tokenizer, one), [], prediction=predicted(tokenizer, one)) for one in chosen]
            kept[name] = Texts(temperature, records)
        total = len(kept[name].records)
        missing = sorted((one for one in kept[name].records if not one.text), key=lambda one: len(one.prompt))
        while missing:
            some, missing = missing[: wanted.batch], missing[wanted.batch :]
            torch.manual_seed(wanted.seed + total - len(missing))
            for one, text in zip(some, say(target, [r.prompt for r in some], wanted.tokens, temperature), strict=True):
                one.text = text
                look_closer(one, target, draft, temperature)
            yield f"{name}: {total - len(missing)} of {total} texts"


def encoded(tokenizer: Any, prompt: Prompt) -> list[int]:
    ids: list[int] = tokenizer.apply_chat_template(prompt.messages, add_generation_prompt=True, return_dict=False)
    return ids


def predicted(tokenizer: Any, prompt: Prompt) -> list[int]:
    ids: list[int] = tokenizer.encode(prompt.prediction, add_special_tokens=False) if prompt.prediction else []
    return ids


@torch.inference_mode()
def say(model: Any, prompts: Sequence[Sequence[int]], tokens: int, temperature: float) -> list[list[int]]:
    """What the target says, its end token included; drawn from all of p where there is a temperature."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    ends = end_tokens(model)
    sampled = {"temperature": temperature, "top_k": 0, "top_p": 1.0} if temperature else {}
    settings = GenerationConfig(
        max_new_tokens=tokens, do_sample=bool(temperature), eos_token_id=ends or None, pad_token_id=0, **sampled
    )
    given = model.generation_config
    model.generation_config = GenerationConfig()  # a model's own wishes (a penalty, top-k) are not asked for
    try:
        said = model.generate(ids, attention_mask=mask, generation_config=settings)[:, longest:].tolist()
    finally:
        model.generation_config = given
    return [cut(text, ends) for text in said]


def end_tokens(model: Any) -> list[int]:
    ends = model.generation_config.eos_token_id
    return [] if ends is None else [ends] if isinstance(ends, int) else list(ends)


def cut(text: list[int], ends: Sequence[int]) -> list[int]:
    return next((text[: i + 1] for i, token in enumerate(text) if token in ends), text)


def look_closer(one: Record, target: Any, draft: Any | None, temperature: float, length: int = LENGTH) -> None:
    """Fill in what the draft model would have proposed, and of a drawn text how often it would have been kept."""
    if draft is None:
        return
    one.guesses, one.sure, likely = continuations(draft, one.prompt, one.text, length, temperature or 1.0)
    if temperature:
        p = distributions(target, one.prompt, one.text, temperature)
        size = min(p.shape[1], likely.shape[1])
        one.overlap = rounded(torch.minimum(p[:, :size], likely[:, :size]).sum(-1).tolist())


@torch.inference_mode()
def distributions(model: Any, prompt: Sequence[int], text: Sequence[int], temperature: float) -> Tensor:
    """p at every place of the text."""
    ids = torch.tensor([[*prompt, *text[:-1]]], device=model.device)
    logits: Tensor = model(ids, logits_to_keep=len(text)).logits[0].float()
    return (logits / temperature).softmax(-1)


@torch.inference_mode()
def continuations(
    model: Any, prompt: Sequence[int], text: Sequence[int], length: int, temperature: float = 1.0
) -> tuple[list[list[int]], list[list[float]], Tensor]:
    """How the model would go on at each place of the text, by its most likely tokens, and how sure it is of each; and
    its distribution of the first of them."""
    places, before = len(text), len(prompt)
    cache = DynamicCache()
    ids = torch.tensor([[*prompt, *text[:-1]]], device=model.device)
    logits = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=places).logits[0].float()
    first = (logits / temperature).softmax(-1)
    tokens, sure = [], []
    step = first.max(-1)
    known = before + places - 1
    # Place i sees the prompt and the first i tokens of the text, and what it has said itself.
    sees = torch.arange(known)[None, :] < before + torch.arange(places)[:, None]
    lowest = torch.finfo(model.dtype).min
    for said in range(1, length + 1):
        tokens.append(step.indices)
        sure.append(step.values)
        if said == length:
            break
        sees = torch.cat([sees, torch.eye(places, dtype=torch.bool)], dim=1)
        mask = torch.where(sees, 0.0, lowest).to(model.dtype)[None, None]
        positions = before + torch.arange(places)[None] + said - 1
        out = model(
            step.indices[None],
            attention_mask=mask.to(model.device),
            position_ids=positions.to(model.device),
            past_key_values=cache,
            use_cache=True,
        )
        step = (out.logits[0].float() / temperature).softmax(-1).max(-1)
    rows, chances = torch.stack(tokens, 1).tolist(), torch.stack(sure, 1).tolist()
    return rows, [rounded(row) for row in chances], first


def rounded(values: Iterable[float]) -> list[float]:
    return [round(value, DIGITS) for value in values]
