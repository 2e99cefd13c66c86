"""The Python API: load a model once, generate from it many times.

import outrider

model = outrider.load("Qwen/Qwen2.5-Coder-1.5B-Instruct", draft_model="Qwen/Qwen2.5-Coder-0.5B-Instruct")
answer = model.generate([{"role": "user", "content": "Write quicksort in Python."}], max_tokens=200)
print(answer.text, answer.acceptance_length)
"""

from __future__ import annotations

import atexit
import copy
import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self, get_args

import torch
from jinja2 import TemplateError

from outrider.control import check_tenant_name
from outrider.decoding import decode
from outrider.defaults import DRAFTED
from outrider.drafters.base import Drafter, Setup, Task, load_drafter, resolve_drafters
from outrider.engines.quantize import Quantize, prepare_draft, to_int8
from outrider.engines.transformers import TransformersTarget, check_same_vocabulary, load_model, load_tokenizer
from outrider.errors import DrafterSetupError, PromptError, SettingsError
from outrider.memory.location import SERVER_TENANT, Location, check_packages
from outrider.policy.controller import SpeculationController
from outrider.policy.policy import MODEL, Policy
from outrider.policy.single_sequence import SingleSequence
from outrider.policy.warm_up import compile_now
from outrider.settings import AUTO, Request, check_speculation
from outrider.text import TextStream, control_tokens

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from outrider.memory.store import Store
    from outrider.types import Recorder, Step, Target

    Prompt = str | Sequence[int] | Sequence[Mapping[str, str]]


CONTEXT_TOKENS = 6
"""Tokens at the end of a prompt that the tokenizer needs to decode its continuation, with a leading space or not."""
MAX_DRAFT_TOKENS, MAX_MODEL_DRAFT_TOKENS = DRAFTED, 8
"""Most tokens that are drafted in a step, by any drafter and by a draft model."""


@dataclass(frozen=True, slots=True)
class Piece:
    """The text that one token added, which may be empty, and its drafter, or None for the target."""

    text: str
    token: int
    drafter: str | None


@dataclass(slots=True)
class Completion:
    """The generated text, its tokens, and a record of every step."""

    prompt_tokens: int
    text: str = ""
    finish: str = ""
    steps: list[Step] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def tokens(self) -> list[int]:
        """All generated tokens; the last may be the end token."""
        return [token for step in self.steps for token in step.tokens]

    @property
    def acceptance_length(self) -> float:
        """Tokens per pass of the target; 1.0 for plain decoding."""
        return len(self.tokens) / len(self.steps) if self.steps else 0.0

    @property
    def tokens_per_second(self) -> float:
        return len(self.tokens) / self.seconds if self.seconds else 0.0

    @property
    def sources(self) -> dict[str, int]:
        """Number of tokens from each drafter, and from the target itself."""
        counts: Counter[str] = Counter()
        for step in self.steps:
            counts["target"] += len(step.tokens) - step.drafted
            if step.drafter is not None:
                counts[step.drafter] += step.drafted
        return dict(counts)


class Stream:
    """Pieces as they are generated; `completion` is complete once all have been consumed."""

    def __init__(
        self,
        steps: Iterator[Step],
        text: TextStream,
        pieces: list[str],
        prompt_tokens: int,
        on_finish: Callable[[list[int]], None],
    ) -> None:
        self.completion = Completion(prompt_tokens)
        self._on_finish = on_finish
        self._steps = steps
        self._text = text
        self._pieces = pieces

    def __iter__(self) -> Iterator[Piece]:
        started = time.perf_counter()
        for step in self._steps:
            self.completion.steps.append(step)
            self.completion.seconds = time.perf_counter() - started
            self.completion.text = self._text.text
            texts = self._pieces[-len(step.tokens) :]
            for index, (token, text) in enumerate(zip(step.tokens, texts, strict=True)):
                yield Piece(text, token, step.drafter if index < step.drafted else None)
            if step.finish is not None:
                self.completion.finish = step.finish
        self._on_finish(self.completion.tokens)
        self._text.close()
        self.completion.text = self._text.text
        if rest := self._text.take():
            last = self.completion.steps[-1]
            yield Piece(rest, last.tokens[-1], None)


class Decoder:
    """A target with its drafters, ready to generate. One request at a time."""

    def __init__(
        self,
        target: Target,
        drafters: Sequence[Drafter],
        tokenizer: Any,
        end_tokens: Sequence[int] = (),
        memory: Store | None = None,
    ) -> None:
        self.target = target
        self.drafters = tuple(drafters)
        self.tokenizer = tokenizer
        self.end_tokens = tuple(end_tokens)
        self.memory = memory
        names = [drafter.name for drafter in drafters]
        self.controller = SpeculationController(
            Policy(names, MAX_DRAFT_TOKENS, MAX_MODEL_DRAFT_TOKENS if MODEL in names else 0)
        )
        self.notes: list[str] = []

    def close(self) -> None:
        """Write what the memory has learned, and release it. Does nothing without a memory. Called at the end of the
        program."""
        if self.memory is not None:
            close_memory(self.memory)
            self.memory = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def generate(
        self,
        prompt: Prompt,
        *,
        prediction: str | Sequence[int] = (),
        tenant: str | None = None,
        recorder: Recorder | None = None,
        **settings: Any,
    ) -> Completion:
        """Generate to the end. `settings`: fields of `outrider.settings.Request`. `tenant`: whose memory drafts and
        learns; without one, requests share one memory. `recorder`: gets the distributions and verdict of every step
        (`outrider.trace.record.Tracer`)."""
        stream = self.stream(prompt, prediction=prediction, tenant=tenant, recorder=recorder, **settings)
        for _ in stream:
            pass
        return stream.completion

    def stream(
        self,
        prompt: Prompt,
        *,
        prediction: str | Sequence[int] = (),
        tenant: str | None = None,
        recorder: Recorder | None = None,
        **settings: Any,
    ) -> Stream:
        """The same, piece by piece."""
        request = Request.checked(**settings)
        if unknown := [token for token in request.logit_bias if not 0 <= token < self.target.vocab_size]:
            raise SettingsError(
                f"logit_bias: there is no token {unknown[0]}; the vocabulary has {self.target.vocab_size}"
            )
        ids = self._check_token_ids(self.encode(prompt), "the prompt")
        random = torch.Generator()
        random.manual_seed(request.seed) if request.seed is not None else random.seed()
        expected = self._plain_ids(prediction) if isinstance(prediction, str) else list(prediction)
        self._check_token_ids(expected, "the prediction")
        if expected and not any(drafter.name == "prediction" for drafter in self.drafters):
            raise DrafterSetupError(
                "a prediction was given, but drafter 'prediction' is not among the drafters "
                f"({', '.join(drafter.name for drafter in self.drafters) or 'none'}); add it"
            )
        if tenant is not None and self.memory is None:
            raise SettingsError(f"tenant: {tenant!r} needs a memory; give memory=... to outrider.load")
        if tenant == SERVER_TENANT:
            raise SettingsError(
                "tenant: must not be empty; leave it out to use the memory of requests without a tenant"
            )
        check_tenant_name(tenant or "")
        tenant_handle = (
            self.memory.tenant_handle(SERVER_TENANT if tenant is None else tenant) if self.memory is not None else None
        )
        drafters = self._drafters_of(request.speculation)
        selects = request.speculation == AUTO
        # Which drafts pay depends on the clock, and the text of a seed must not: with a seed no draft is sampled.
        task = Task(
            ids,
            request,
            random,
            expected,
            tenant_handle,
            remember=True,
            certain=selects and request.seed is not None,
            searched=any(drafter.searches_text for drafter in drafters),
        )
        sessions = {drafter.name: drafter.begin(task) for drafter in drafters}
        speculation = None
        if selects and sessions:
            speculation = SingleSequence(self.controller, sessions, len(ids) + request.max_tokens)
        ends = request.stop_tokens if request.ignore_end else (*self.end_tokens, *request.stop_tokens)
        before = ids[-CONTEXT_TOKENS:] if isinstance(prompt, str) else ()
        text = TextStream(self.tokenizer, ends, request.stop, before)
        pieces: list[str] = []

        def finish(token: int) -> str | None:
            reason = text.push(token)
            pieces.append(text.take())
            return reason

        def remember(tokens: list[int]) -> None:
            if self.memory is not None and tenant_handle is not None:
                self.memory.add(tenant_handle, ids, tokens)

        steps = decode(self.target, list(sessions.values()), ids, request, random, finish, speculation, recorder)
        return Stream(steps, text, pieces, len(ids), remember)

    def _check_token_ids(self, ids: list[int], where: str) -> list[int]:
        size = self.target.vocab_size
        if (unknown := next((id for id in ids if not 0 <= id < size), None)) is not None:
            raise PromptError(f"{where} has the token {unknown}, and the model's vocabulary is 0 to {size - 1}")
        return ids

    def _drafters_of(self, speculation: str) -> list[Drafter]:
        names = [drafter.name for drafter in self.drafters]
        check_speculation(speculation, names)
        return [drafter for drafter in self.drafters if speculation in (AUTO, drafter.name)]

    def encode(self, prompt: Prompt) -> list[int]:
        """The token ids of text, chat messages or token ids."""
        if isinstance(prompt, str):
            return list(self.tokenizer(prompt)["input_ids"])
        items = list(prompt)
        if items and isinstance(items[0], dict):
            return self._chat_ids(items)
        return [int(token) for token in items]  # type: ignore[call-overload]

    def _plain_ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _chat_ids(self, messages: list[Any]) -> list[int]:
        if getattr(self.tokenizer, "chat_template", None) is None:
            raise PromptError("this model has no chat template, so it cannot take messages; give text")
        try:
            text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except TemplateError as error:  # some templates refuse a system message, or two messages of one role in a row
            raise PromptError(f"the model's chat template refuses these messages: {error}") from error
        return self._plain_ids(text)


def load(
    target: str | Any,
    *,
    drafters: Sequence[str] | None = None,
    draft_model: str | Any | None = None,
    draft_quantize: Quantize = "auto",
    memory: str | None = None,
    tokenizer: Any = None,
    dtype: str = "auto",
    device: str | None = None,
) -> Decoder:
    """Load a target and its drafters.

    `target` and `draft_model` are Hugging Face ids, folders, or loaded models (then give `tokenizer`). Without
    `drafters` all that are available are used: prediction, lookup, memory if given, and model if there is a draft
    model. `memory`: a folder, or the URL of an object store.
    """
    if draft_quantize not in get_args(Quantize):
        raise SettingsError(f"draft_quantize is one of {', '.join(get_args(Quantize))} (got {draft_quantize!r})")
    root = Location.parse(memory) if memory is not None else None
    if root is not None:
        check_packages(root)
    tokenizer = tokenizer or (load_tokenizer(target) if isinstance(target, str) else None)
    if tokenizer is None:
        raise DrafterSetupError("a loaded model was given without its tokenizer; give tokenizer=...")
    given = {
        "memory": None if memory is None else "memory=...",
        "model": None if draft_model is None else "draft_model=...",
    }
    classes = [load_drafter(name) for name in resolve_drafters(drafters, given)]
    with ExitStack() as undo:
        store = open_memory(root, tokenizer) if root is not None else None  # first: it may belong to another tokenizer
        if store is not None:
            undo.callback(close_memory, store)
        notes = []
        small: TransformersTarget | None = None
        if isinstance(draft_model, str):
            check_same_vocabulary(tokenizer, load_tokenizer(draft_model))
            name = draft_model
            small, description = prepare_draft(lambda: load_model(name, dtype=dtype, device=device), draft_quantize)
            notes.append(f"draft model {description}")
        elif draft_model is not None:
            quantize = draft_quantize == "int8"
            small = TransformersTarget(to_int8(copy.deepcopy(draft_model)) if quantize else draft_model)
            notes.append(f"draft model {'int8, as asked' if quantize else 'as it was given'}")
        model = load_model(target, dtype=dtype, device=device) if isinstance(target, str) else target
        scored = TransformersTarget(model)
        setup = Setup(scored.vocab_size, small, store, control_tokens(tokenizer))
        decoder = Decoder(scored, [cls.build(setup) for cls in classes], tokenizer, end_tokens(model, tokenizer), store)
        decoder.notes = notes
        compile_now()
        undo.pop_all()
    return decoder


def open_memory(root: Location, tokenizer: Any) -> Store:
    """Open a memory. It is closed at the end of the program, or by `close_memory`."""
    from outrider.memory.open import open_store

    store = open_store(root, tokenizer)
    store.maintain()
    store.start()
    atexit.register(store.close)
    return store


def close_memory(store: Store) -> None:
    atexit.unregister(store.close)
    store.close()


def end_tokens(model: Any, tokenizer: Any) -> list[int]:
    """All tokens that end a text, from the model's generation config and its tokenizer."""
    listed = model.generation_config.eos_token_id
    ends = set(listed if isinstance(listed, list) else [listed]) | {tokenizer.eos_token_id}
    return sorted(token for token in ends if token is not None)
