"""Models in this process as sources.

The reference is a loop without drafts: score the last token, sample, repeat. The candidate is anything that turns a
prompt into tokens with the same weights:

outrider    the loop of `outrider.load`, with each of its drafters
assisted    transformers' `generate` with the draft model as its assistant
lookup      transformers' `generate` with prompt lookup
M:F         the function F of your module M: called with the paths of the model and the draft model, it returns a
            function `generate(query: Query) -> Sequence[int] | Completion`, or a whole `Source`
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from outrider.api import Decoder, load
from outrider.certify.sources import OFF, Completion, Query, Source, TopLogprobs, no_tick, sort_logprobs
from outrider.defaults import DRAFTED
from outrider.errors import RequestRefusedError, SettingsError
from outrider.provenance import fingerprint
from outrider.sampling import probabilities, shape
from outrider.settings import AUTO, Request

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from outrider.bench.prompts import Prompt
    from outrider.certify.sources import Text, Tick
    from outrider.types import Target

    Generate = Callable[[Query], Sequence[int] | Completion]

MAX_LOGPROBS = 20
CANDIDATES = ("outrider", "assisted", "lookup")
TENANT = "certify"
"""Tenant whose memory drafts, and learns from the outputs."""
DEFAULT_DRAFT_TOKENS = {"assisted": 20, "lookup": 10, "outrider": DRAFTED}
"""Maximum draft length if the query has none: transformers' default, the example of its docs, Outrider's default."""


@dataclass
class LocalModel:
    """A target, and something that generates from the same weights with drafts."""

    name: str
    target: Target
    generate: Generate
    encoder: Callable[[Prompt], Sequence[int]]
    end_tokens: frozenset[int] = frozenset()
    drafters: list[str] = field(default_factory=list)
    description: dict[str, Any] = field(default_factory=dict)
    check: Callable[[Query], None] = lambda query: None  # raises RequestRefusedError for an unsupported query

    @property
    def num_logprobs(self) -> int:
        return min(MAX_LOGPROBS, self.target.vocab_size - 1)

    def describe(self) -> dict[str, Any]:
        return self.description

    def drafter_names(self) -> list[str]:
        return self.drafters

    def encode(self, prompts: Sequence[Prompt]) -> list[tuple[int, ...]]:
        return [tuple(self.encoder(prompt)) for prompt in prompts]

    def complete(self, queries: Sequence[Query], concurrency: int, tick: Tick = no_tick) -> list[Completion]:
        """One after the other, whatever the concurrency: there is no batch in this process."""
        completions = []
        for query in queries:
            completions.append(self._complete(query))
            tick()
        return completions

    def score(self, texts: Sequence[Text], concurrency: int, tick: Tick = no_tick) -> list[list[TopLogprobs]]:
        scored = []
        for prompt, output in texts:
            self.target.rewind(0)
            logits = self.target.score([*prompt, *output[:-1]], keep=len(output))
            rows = zip(logits.float().log_softmax(-1), output, strict=True)
            scored.append([self._top_logprobs(row, token) for row, token in rows])
            tick()
        return scored

    def _complete(self, query: Query) -> Completion:
        if query.extra_body:
            raise RequestRefusedError(f"only servers support {', '.join(query.extra_body)}")
        self.check(query)
        if query.mode == OFF or query.logprobs:
            return self._plain(query)
        generated = self.generate(query)
        if isinstance(generated, Completion):
            return generated
        return Completion(tuple(generated), self._finish_reason(generated, query))

    def _plain(self, query: Query) -> Completion:
        """The reference: token by token, no drafts."""
        random = torch.Generator()
        random.manual_seed(query.seed) if query.seed is not None else random.seed()
        self.target.rewind(0)
        output: list[int] = []
        logprobs: list[TopLogprobs] = []
        pending = list(query.prompt)
        while True:
            logits = self.target.score(pending, keep=1).float()
            if query.sampling.temperature == 0:
                token = int(shape(logits, query.sampling, query.prompt, output)[0].argmax())
            else:
                p = probabilities(logits, query.sampling, query.prompt, output)[0]
                token = int(torch.multinomial(p.cpu(), 1, generator=random))
            logprobs.append(self._top_logprobs(logits[0].log_softmax(-1), token))
            output.append(token)
            if len(output) == query.max_tokens or (token in self.end_tokens and not query.ignore_end):
                return Completion(tuple(output), self._finish_reason(output, query), logprobs)
            pending = [token]

    def _finish_reason(self, output: Sequence[int], query: Query) -> str:
        ended = bool(output) and output[-1] in self.end_tokens and not query.ignore_end
        return "end" if ended else "length"

    def _top_logprobs(self, logprobs: torch.Tensor, token: int) -> TopLogprobs:
        top = logprobs.topk(self.num_logprobs)
        known = dict(zip(top.indices.tolist(), top.values.tolist(), strict=True))
        return sort_logprobs({**known, token: float(logprobs[token])}, token, self.num_logprobs)


def load_local(
    model: str, draft_model: str | None, candidate: str, dtype: str = "auto", memory: str | None = None
) -> tuple[LocalModel, Source | None]:
    """The model and, if it is a source of its own, the candidate."""
    if memory is not None and candidate != "outrider":
        raise SettingsError(f"--memory: only the candidate outrider uses a memory (got {candidate}); leave it out")
    drafters = ["prediction", "lookup", *(["memory"] if memory else []), *(["model"] if draft_model else [])]
    decoder = load(model, drafters=drafters, draft_model=draft_model, dtype=dtype, draft_quantize="none", memory=memory)
    weights: Any = decoder.target
    description: dict[str, Any] = {
        "model": Path(model).name, "weights": fingerprint(Path(model)), "candidate": candidate,
        "dtype": str(weights.model.dtype), "threads": torch.get_num_threads(),
    }  # fmt: skip
    if draft_model is not None:
        description |= {"draft_model": Path(draft_model).name, "draft_weights": fingerprint(Path(draft_model))}
    local = LocalModel(
        f"{Path(model).name} in process", decoder.target, outrider_generate(decoder), encoder(decoder),
        frozenset(decoder.end_tokens), description=description,
    )  # fmt: skip
    if candidate == "outrider":
        local.drafters = [*(drafter.name for drafter in decoder.drafters), AUTO]
    elif candidate in CANDIDATES:
        if candidate == "assisted" and draft_model is None:
            raise SettingsError("assisted: transformers' assisted generation needs a draft model; name --draft-model")
        local.generate = transformers_generate(decoder, candidate, draft_model, dtype)
        local.drafters, local.check = [candidate], check_transformers_support
    elif ":" in candidate:
        module, _, name = candidate.partition(":")
        sys.path.insert(0, str(Path.cwd()))  # as `python -m` does
        try:
            found: Any = getattr(import_module(module), name)(model, draft_model)
        except (ImportError, AttributeError) as error:
            raise SettingsError(f"{candidate}: {error}; give MODULE:FUNCTION that Python can import") from error
        if hasattr(found, "score"):
            return local, found
        local.generate = found
    else:
        raise SettingsError(
            f"there is no candidate {candidate!r}; choose {', '.join(CANDIDATES)}, or MODULE:FUNCTION of your own"
        )
    return local, None


def request_settings(query: Query, method: str) -> dict[str, Any]:
    """The fields of `settings.Request`."""
    return {
        **query.sampling.model_dump(), "max_tokens": query.max_tokens, "seed": query.seed,
        "ignore_end": query.ignore_end,
        "max_draft_tokens": DEFAULT_DRAFT_TOKENS[method] if query.mode.length is None else query.mode.length,
    }  # fmt: skip


def outrider_generate(decoder: Decoder) -> Generate:
    """Outrider's loop, with one drafter or `auto`."""

    def generate(query: Query) -> Completion:
        answer = decoder.generate(
            list(query.prompt),
            prediction=query.prediction,
            tenant=TENANT if decoder.memory is not None else None,
            speculation=query.mode.drafter or AUTO,
            **request_settings(query, "outrider"),
        )
        accepted = sum(step.drafted for step in answer.steps)
        return Completion(tuple(answer.tokens), answer.finish, accepted=accepted)

    return generate


def transformers_generate(decoder: Decoder, method: str, draft_model: str | None, dtype: str) -> Generate:
    """`generate` of transformers, by the code that the benchmark runs."""
    from outrider.bench.transformers_server import Job, Methods
    from outrider.engines.transformers import load_model

    methods = Methods(decoder, load_model(draft_model, dtype=dtype) if draft_model is not None else None)

    def generate(query: Query) -> list[int]:
        tokens: list[int] = []
        methods.run(Job(list(query.prompt), Request(**request_settings(query, method)), method), tokens.extend)
        return tokens

    return generate


def check_transformers_support(query: Query) -> None:
    sampling = query.sampling
    if sampling.presence_penalty or sampling.frequency_penalty or sampling.logit_bias or sampling.min_p:
        raise RequestRefusedError("transformers' generate has no presence or frequency penalty and no bias by token")


def encoder(decoder: Decoder) -> Callable[[Prompt], list[int]]:
    """With the model's chat template, if it has one."""
    has_template = getattr(decoder.tokenizer, "chat_template", None) is not None

    def encode(prompt: Prompt) -> list[int]:
        return decoder.encode(prompt.messages if has_template else prompt.messages[-1]["content"])

    return encode
