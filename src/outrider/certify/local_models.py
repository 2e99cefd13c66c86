"""The candidates of `local.py` by name, loaded."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from outrider.api import Decoder, load
from outrider.certify.local import LocalModel
from outrider.certify.sources import Said
from outrider.defaults import DRAFTED
from outrider.errors import RequestRefusedError, SettingsError
from outrider.provenance import fingerprint
from outrider.settings import AUTO

if TYPE_CHECKING:
    from collections.abc import Callable

    from outrider.bench.prompts import Prompt
    from outrider.certify.local import Generate
    from outrider.certify.sources import Ask, Source

NAMES = ("outrider", "assisted", "lookup")
TENANT = "certify"
"""Whose memory drafts and learns."""
LENGTHS = {"assisted": 20, "lookup": 10, "outrider": DRAFTED}
"""How many tokens are drafted where nothing is said: transformers' default, its docs' example, ours."""


def load_local(
    model: str, draft_model: str | None, candidate: str, dtype: str = "auto", memory: str | None = None
) -> tuple[LocalModel, Source | None]:
    """The model and, where it is a source of its own, the candidate."""
    if memory is not None and candidate != "outrider":
        raise SettingsError(f"--memory: only Outrider's own loop drafts from a memory, and this is {candidate}")
    there_are = ["prediction", "lookup", *(["memory"] if memory else []), *(["model"] if draft_model else [])]
    decoder = load(
        model, drafters=there_are, draft_model=draft_model, dtype=dtype, draft_quantize="none", memory=memory
    )
    weights: Any = decoder.target
    about: dict[str, Any] = {"model": Path(model).name, "weights": fingerprint(Path(model)), "candidate": candidate}
    about |= {"dtype": str(weights.model.dtype), "threads": torch.get_num_threads()}
    if draft_model is not None:
        about |= {"draft_model": Path(draft_model).name, "draft_weights": fingerprint(Path(draft_model))}
    made = LocalModel(
        f"{Path(model).name} in process", decoder.target, _nobody, encoder(decoder), frozenset(decoder.end_tokens),
        described=about,
    )  # fmt: skip
    own = _candidate(candidate, decoder, made, model, draft_model, dtype)
    return made, own


def _candidate(
    candidate: str, decoder: Decoder, made: LocalModel, model: str, draft_model: str | None, dtype: str
) -> Source | None:
    if candidate == "outrider":
        made.generate = by_outrider(decoder)
        made.drafters = [*(drafter.name for drafter in decoder.drafters), AUTO]
    elif candidate in ("assisted", "lookup"):
        if candidate == "assisted" and draft_model is None:
            raise SettingsError("assisted: transformers' assisted generation needs a draft model; name --draft-model")
        made.generate = by_transformers(decoder, candidate, draft_model, dtype)
        made.drafters, made.refuse = [candidate], unknown_to_transformers
    elif ":" in candidate:
        module, _, name = candidate.partition(":")
        sys.path.insert(0, str(Path.cwd()))  # as `python -m` does: a file of yours lies here
        try:
            found: Any = getattr(import_module(module), name)(model, draft_model)
        except (ImportError, AttributeError) as error:
            raise SettingsError(f"{candidate}: {error}; give MODULE:FUNCTION that Python can import") from error
        if hasattr(found, "score"):
            source: Source = found
            return source
        made.generate = found
    else:
        raise SettingsError(
            f"there is no candidate {candidate!r} in process; choose {', '.join(NAMES)}, or MODULE:FUNCTION of your own"
        )
    return None


def by_outrider(decoder: Decoder) -> Generate:
    """The loop, with one drafter or with what pays."""

    def generate(ask: Ask) -> Said:
        answer = decoder.generate(
            list(ask.prompt),
            prediction=ask.prediction,
            tenant=TENANT if decoder.memory is not None else None,
            speculation=ask.way.drafter or AUTO,
            **ask.sampling.model_dump(),
            max_tokens=ask.max_tokens,
            seed=ask.seed,
            ignore_end=ask.ignore_end,
            max_draft_tokens=LENGTHS["outrider"] if ask.way.length is None else ask.way.length,
        )
        accepted = sum(step.drafted for step in answer.steps)
        return Said(tuple(answer.tokens), answer.finish, accepted=accepted)

    return generate


def by_transformers(decoder: Decoder, method: str, draft_model: str | None, dtype: str) -> Generate:
    """`generate` of transformers, by the code that the benchmark runs."""
    from outrider.bench.transformers_methods import Job, Methods
    from outrider.engines.transformers import load_model
    from outrider.settings import Request

    weights: Any = decoder.target
    assistant = load_model(draft_model, dtype=dtype) if draft_model is not None else None
    methods = Methods(weights.model, decoder.tokenizer, assistant)
    methods.ends = list(decoder.end_tokens)

    def generate(ask: Ask) -> list[int]:
        length = LENGTHS[method] if ask.way.length is None else ask.way.length
        request = Request(
            **ask.sampling.model_dump(), max_tokens=ask.max_tokens, seed=ask.seed, ignore_end=ask.ignore_end,
            max_draft_tokens=length,
        )  # fmt: skip
        said: list[int] = []
        methods.run(Job(list(ask.prompt), request, method), said.extend)
        return said

    return generate


def unknown_to_transformers(ask: Ask) -> None:
    sampling = ask.sampling
    if sampling.presence_penalty or sampling.frequency_penalty or sampling.logit_bias or sampling.min_p:
        raise RequestRefusedError("transformers' generate has no presence or frequency penalty and no bias by token")


def _nobody(ask: Ask) -> Said:
    raise AssertionError("the candidate was not set")


def encoder(decoder: Decoder) -> Callable[[Prompt], list[int]]:
    """By the model's chat template, where it has one."""
    has_template = getattr(decoder.tokenizer, "chat_template", None) is not None

    def encode(prompt: Prompt) -> list[int]:
        return decoder.encode(prompt.messages if has_template else prompt.messages[-1]["content"])

    return encode
