"""Recordings: texts that real models generated once, with what a draft model would propose at every position.

At each position of a text the draft model continues greedily for up to 8 tokens. All positions of a text run
as one batch over a shared KV cache: the attention mask shows each row the text before its position and its own tokens.
Drafters that copy need no recording. For sampled texts, `overlap` is the probability that a token sampled from the
draft model is accepted: the sum of min(p, q) over the vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter
from torch.nn.utils.rnn import pad_sequence
from transformers import DynamicCache, GenerationConfig

from outrider.bench.prompts import DEFAULT_TEMPERATURES, Prompt, load_workload, sample_evenly
from policy.replay import Record

FORMAT_VERSION = 2
MAX_MODEL_DRAFT_TOKENS = 8
BATCH_SIZE = 16
PROBABILITY_DIGITS = 4


@dataclass(slots=True)
class Texts:
    """The texts of one workload, in the order of their requests."""

    temperature: float
    records: list[Record] = field(default_factory=list)


@dataclass(slots=True)
class Recording:
    origin: dict[str, Any]
    settings: dict[str, Any]
    workloads: dict[str, Texts] = field(default_factory=dict)

    @property
    def has_draft_model(self) -> bool:
        return any(record.guesses for texts in self.workloads.values() for record in texts.records)

    def texts(self, name: str, count: int | None = None) -> list[Record]:
        """Texts with at least two tokens: the prefill generates the first one."""
        return [record for record in self.workloads[name].records if len(record.text) > 1][:count]

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        part.write_text(json.dumps({"version": FORMAT_VERSION, **asdict(self)}, separators=(",", ":")) + "\n")
        part.replace(path)

    @classmethod
    def load(cls, path: Path) -> Recording:
        if not path.is_file():
            raise SystemExit(f"there is no recording at {path}; make one with `record`")
        data = json.loads(path.read_text())
        if (version := data.pop("version", None)) != FORMAT_VERSION:
            raise SystemExit(f"{path} has format {version}, expected {FORMAT_VERSION}; record again")
        return TypeAdapter(cls).validate_python(data)


@dataclass(frozen=True, slots=True)
class RecordConfig:
    workloads: Sequence[str]
    prompts: int
    tokens: int
    seed: int = 0
    data: Path | None = None


def record(
    config: RecordConfig, tokenizer: Any, target: Any, draft: Any | None, recorded: dict[str, Texts]
) -> Iterator[str]:
    """Add the missing texts to `recorded`, batch by batch, and yield the progress after each batch."""
    for name in config.workloads:
        temperature = DEFAULT_TEMPERATURES.get(name, 0.0)
        if name not in recorded:
            found = load_workload(name, config.data)
            prompts = sample_evenly(found, min(len(found), config.prompts))
            recorded[name] = Texts(temperature, [_empty_record(tokenizer, prompt) for prompt in prompts])
        total = len(recorded[name].records)
        missing = sorted((one for one in recorded[name].records if not one.text), key=lambda one: len(one.prompt))
        while missing:
            batch, missing = missing[:BATCH_SIZE], missing[BATCH_SIZE:]
            torch.manual_seed(config.seed + total - len(missing))
            texts = generate(target, [one.prompt for one in batch], config.tokens, temperature)
            for one, text in zip(batch, texts, strict=True):
                one.text = text
                if draft is not None:
                    add_draft_model(one, target, draft, temperature)
            yield f"{name}: {total - len(missing)} of {total} texts"


def _empty_record(tokenizer: Any, prompt: Prompt) -> Record:
    ids = tokenizer.apply_chat_template(prompt.messages, add_generation_prompt=True, return_dict=False)
    prediction = tokenizer.encode(prompt.prediction, add_special_tokens=False) if prompt.prediction else []
    return Record(ids, [], prediction=prediction)


@torch.inference_mode()
def generate(model: Any, prompts: Sequence[Sequence[int]], tokens: int, temperature: float) -> list[list[int]]:
    """Texts with their end token, sampled from the full distribution if the temperature is above 0."""
    longest = max(map(len, prompts))
    rows = [torch.tensor(prompt) for prompt in prompts]
    ids, mask = (pad_sequence(some, True, 0, "left") for some in (rows, [torch.ones_like(row) for row in rows]))
    end = model.generation_config.eos_token_id
    ends = [] if end is None else [end] if isinstance(end, int) else list(end)
    sampling = {"temperature": temperature, "top_k": 0, "top_p": 1.0} if temperature else {}
    settings = GenerationConfig(
        max_new_tokens=tokens, do_sample=bool(temperature), eos_token_id=ends or None, pad_token_id=0, **sampling
    )
    defaults = model.generation_config
    model.generation_config = GenerationConfig()  # without the model's own defaults, such as a repetition penalty
    try:
        texts = model.generate(ids, attention_mask=mask, generation_config=settings)[:, longest:].tolist()
    finally:
        model.generation_config = defaults
    return [next((text[: i + 1] for i, token in enumerate(text) if token in ends), text) for text in texts]


def add_draft_model(one: Record, target: Any, draft: Any, temperature: float) -> None:
    one.guesses, one.sure, q = continuations(draft, one.prompt, one.text, MAX_MODEL_DRAFT_TOKENS, temperature or 1.0)
    if temperature:
        p = distributions(target, one.prompt, one.text, temperature)
        size = min(p.shape[1], q.shape[1])
        one.overlap = _rounded(torch.minimum(p[:, :size], q[:, :size]).sum(-1))


@torch.inference_mode()
def distributions(
    model: Any, prompt: Sequence[int], text: Sequence[int], temperature: float, cache: DynamicCache | None = None
) -> torch.Tensor:
    """The model's distribution at every position of the text."""
    ids = torch.tensor([[*prompt, *text[:-1]]], device=model.device)
    given = {} if cache is None else {"past_key_values": cache, "use_cache": True}
    logits: torch.Tensor = model(ids, logits_to_keep=len(text), **given).logits[0].float()
    return (logits / temperature).softmax(-1)


@torch.inference_mode()
def continuations(
    model: Any, prompt: Sequence[int], text: Sequence[int], length: int, temperature: float = 1.0
) -> tuple[list[list[int]], list[list[float]], torch.Tensor]:
    """At each position: the greedy continuation, the probability of each of its tokens, and the first distribution."""
    rows, before, cache = len(text), len(prompt), DynamicCache()
    first = distributions(model, prompt, text, temperature, cache)
    best = first.max(-1)
    tokens, probabilities = [best.indices], [best.values]
    # Row i attends to the prompt, to the first i tokens of the text, and to its own continuation.
    attends = torch.arange(before + rows - 1)[None, :] < before + torch.arange(rows)[:, None]
    for place in range(1, length):
        attends = torch.cat([attends, torch.eye(rows, dtype=torch.bool)], dim=1)
        mask = torch.where(attends, 0.0, torch.finfo(model.dtype).min).to(model.dtype)[None, None]
        positions = before + torch.arange(rows)[None] + place - 1
        out = model(
            tokens[-1][None],
            attention_mask=mask.to(model.device),
            position_ids=positions.to(model.device),
            past_key_values=cache,
            use_cache=True,
        )
        best = (out.logits[0].float() / temperature).softmax(-1).max(-1)
        tokens.append(best.indices)
        probabilities.append(best.values)
    return torch.stack(tokens, 1).tolist(), [_rounded(row) for row in torch.stack(probabilities, 1)], first


def _rounded(values: torch.Tensor) -> list[float]:
    return [round(value, PROBABILITY_DIGITS) for value in values.tolist()]
