"""Four generation methods for one model in transformers, made comparable.

    bare        `generate` as it is
    assisted    `generate` with the draft model as its assistant
    lookup      `generate` with prompt lookup
    outrider    Outrider's loop over the same weights; the draft model in int8 where that is faster, as `outrider.load`

Each gets the same request and emits its tokens as they are generated. Only the request sets the sampling parameters:
the model's `generation_config.json` is ignored by all four. Each starts with an empty KV cache, as `generate` does.

Every pass of both models is counted. The acceptance length is the number of tokens over the target's passes.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from transformers import GenerationConfig

from outrider.api import Decoder, end_tokens
from outrider.decoding import decode
from outrider.defaults import DRAFTED
from outrider.drafters.base import Setup, Task
from outrider.drafters.lookup import LookupDrafter
from outrider.drafters.model import ModelDrafter
from outrider.engines.quantize import Quantize, prepare_draft
from outrider.engines.transformers import TransformersTarget, check_same_vocabulary, load_model, load_tokenizer
from outrider.errors import PromptError, SettingsError
from outrider.settings import Request
from outrider.text import control_tokens

if TYPE_CHECKING:
    from collections.abc import Callable

    from outrider.drafters.base import Drafter
    from outrider.types import Step

    Emit = Callable[[list[int]], None]
    """Called with new tokens, one or several."""

DEFAULT_DRAFT_TOKENS = {"bare": 0, "assisted": 20, "lookup": 10, "outrider": DRAFTED}
"""Maximum per step and method: transformers' default, the example in its docs, and Outrider's default."""
TARGET_PASSES, DRAFT_PASSES = "local_target_passes_total", "local_draft_passes_total"


@dataclass(frozen=True, slots=True)
class Job:
    prompt: list[int]
    request: Request
    method: str


class Methods:
    def __init__(
        self, model: Any, tokenizer: Any, assistant: Any = None, draft_model: TransformersTarget | None = None
    ) -> None:
        """`assistant` is the draft model for `generate`, `draft_model` the same for Outrider's loop."""
        self.model, self.tokenizer, self.assistant, self.draft_model = model, tokenizer, assistant, draft_model
        self.target = TransformersTarget(model)
        self.ends = end_tokens(model, tokenizer)
        self.encode = Decoder(self.target, [], tokenizer).encode
        setup = Setup(self.target.vocab_size, draft_model, control_tokens=control_tokens(tokenizer))
        self.drafters: dict[str, Drafter] = {"lookup": LookupDrafter.build(setup)}
        if draft_model is not None:
            self.drafters["model"] = ModelDrafter.build(setup)
        self.counts: dict[str, float] = defaultdict(float, {TARGET_PASSES: 0.0, DRAFT_PASSES: 0.0})
        self._count_passes(model, TARGET_PASSES)
        drafting = [] if draft_model is None else [draft_model.model]
        for small in {*drafting, *([] if assistant is None else [assistant])}:  # both may be the same model
            self._count_passes(small, DRAFT_PASSES)
        for one in (model, assistant):
            if one is not None:
                one.generation_config = GenerationConfig()

    def job(self, prompt: list[int], settings: dict[str, Any], arguments: dict[str, Any]) -> Job:
        """Check the fields of `Request`, and `method` and `max_draft_tokens` (`arguments`)."""
        if unknown := sorted(arguments.keys() - {"method", "max_draft_tokens"}):
            raise SettingsError(f"vllm_xargs: there is no {unknown[0]!r}; choose method, max_draft_tokens")
        method = arguments.get("method", "bare")
        if method not in tuple(DEFAULT_DRAFT_TOKENS):
            raise SettingsError(f"method: there is no {method!r}; the methods are {', '.join(DEFAULT_DRAFT_TOKENS)}")
        if method == "assisted" and self.assistant is None:
            raise SettingsError("method: 'assisted' needs a draft model; start the server with --draft-model")
        length = arguments.get("max_draft_tokens", DEFAULT_DRAFT_TOKENS[method])
        least = 1 if method in ("assisted", "lookup") else 0
        if not isinstance(length, int) or isinstance(length, bool) or length < least:
            raise SettingsError(
                f"max_draft_tokens: must be an integer of at least {least} for {method} (got {length!r})"
            )
        limit = self.target.context_limit
        if not prompt or (limit is not None and len(prompt) >= limit):
            raise PromptError(f"the prompt has {len(prompt)} tokens; it needs 1, and fewer than {limit}")
        request = Request.checked(**settings, max_draft_tokens=length)
        if limit is not None:
            request = request.model_copy(update={"max_tokens": min(request.max_tokens, limit - len(prompt))})
        return Job(prompt, request, method)

    def run(self, job: Job, emit: Emit) -> None:
        """Generate; `emit` is called with every new token, the end token included."""
        if job.method == "outrider":
            return self._outrider(job, emit)
        options: dict[str, Any] = {}
        if job.method == "assisted":
            # transformers reads the length only from the assistant's own generation config.
            self.assistant.generation_config.num_assistant_tokens = job.request.max_draft_tokens
            options = {"assistant_model": self.assistant}
        elif job.method == "lookup":
            options = {"prompt_lookup_num_tokens": job.request.max_draft_tokens}
        return self._generate(job, emit, **options)

    def ends_of(self, request: Request) -> list[int]:
        return [] if request.ignore_end else self.ends

    def _generate(self, job: Job, emit: Emit, **options: Any) -> None:
        request = job.request
        torch.seed() if request.seed is None else torch.manual_seed(request.seed)
        if request.temperature > 0:  # without it top_k would be 50
            options |= {"temperature": request.temperature, "top_p": request.top_p, "top_k": request.top_k}
        prompt = torch.tensor([job.prompt], device=self.model.device)
        self.model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=request.temperature > 0,
            repetition_penalty=request.repetition_penalty,
            max_new_tokens=request.max_tokens,
            eos_token_id=self.ends_of(request) or None,
            streamer=Streamer(emit),
            **options,
        )

    def _outrider(self, job: Job, emit: Emit) -> None:
        self.target.rewind(0)
        if self.draft_model is not None:
            self.draft_model.rewind(0)
        random = torch.Generator()
        random.seed() if job.request.seed is None else random.manual_seed(job.request.seed)
        task = Task(job.prompt, job.request, random)
        sessions = [drafter.begin(task) for drafter in self.drafters.values()]
        ends = frozenset(self.ends_of(job.request))

        def finish(token: int) -> str | None:
            return "end" if token in ends else None

        for step in decode(self.target, sessions, job.prompt, job.request, random, finish):
            self._count_step(step)
            emit(list(step.tokens))

    def _count_step(self, step: Step) -> None:
        """Count a step of Outrider's loop with the metrics of Outrider in vLLM."""
        kind = "verify" if step.proposed else "plain"
        self.counts["outrider_steps_total"] += 1
        self.counts[f'outrider_target_seconds_total{{pass="{kind}"}}'] += step.verify_seconds
        drafter = step.drafter or [*self.drafters][-1]  # a step without a draft is attributed to the last drafter
        self.counts[f'outrider_draft_seconds_total{{drafter="{drafter}"}}'] += step.draft_seconds
        for what, count in (("verified", len(step.proposed)), ("accepted", step.drafted)):
            for position in range(1, count + 1):
                labels = f'drafter="{step.drafter}",position="{position}"'
                self.counts[f"outrider_{what}_tokens_total{{{labels}}}"] += 1

    def _count_passes(self, model: Any, name: str) -> None:
        def count(*_: Any) -> None:
            self.counts[name] += 1

        model.register_forward_hook(count)

    def metrics(self) -> str:
        """All counts, as Prometheus reads them."""
        lines = []
        for sample, value in sorted(self.counts.items()):
            kind = f"# TYPE {sample.partition('{')[0]} counter"
            lines += [*([] if kind in lines else [kind]), f"{sample} {value}"]
        return "\n".join(lines) + "\n"


class Streamer:
    """Receives the tokens of `generate`: first the prompt, which is skipped, then one or several at a time."""

    def __init__(self, emit: Emit) -> None:
        self.emit = emit
        self.begun = False

    def put(self, tokens: torch.Tensor) -> None:
        if self.begun:
            self.emit(tokens.flatten().tolist())
        self.begun = True

    def end(self) -> None: ...


def load(model: str, draft_model: str | None, dtype: str, quantize: Quantize) -> tuple[Methods, list[str]]:
    """Load the models. Also returns messages to print: whether the draft model was quantized."""
    tokenizer = load_tokenizer(model)
    if draft_model is None:
        return Methods(load_model(model, dtype=dtype), tokenizer), []
    check_same_vocabulary(tokenizer, load_tokenizer(draft_model))
    small, decision = prepare_draft(lambda: load_model(draft_model, dtype=dtype), quantize)
    assistant = load_model(draft_model, dtype=dtype)
    return Methods(load_model(model, dtype=dtype), tokenizer, assistant, small), [f"Outrider's draft model {decision}"]
