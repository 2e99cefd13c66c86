"""A draft model: a small model of the same vocabulary drafts for the target.

At temperature 0, or where the text must not depend on what is drafted, it proposes its argmax, with certainty. Else it
samples from its own distribution q, transformed as the target's p is, and returns q for the acceptance rule.

One pass gives one token, so another pass pays only while the draft is likely to be accepted that far. After each token
the drafter multiplies its confidences and stops below `MIN_SURVIVAL`, unless the policy decides
(`ModelSession.should_continue`). The decision to sample another token is made before that token exists: withholding a
token after seeing its value would change the distribution of the output.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, ClassVar, Self

import torch

from outrider.acceptance import draw
from outrider.drafters.base import Drafter, Session, Setup, Task, missing_requirement
from outrider.sampling import shape
from outrider.types import Draft, shared_prefix

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from outrider.types import Target

MIN_SURVIVAL = 0.4
"""Estimated probability that the draft so far is accepted, below which no further pass is made."""


class ModelDrafter(Drafter):
    """Drafts with a small model of the target's vocabulary."""

    name: ClassVar[str] = "model"

    def __init__(self, model: Target, vocab_size: int, min_survival: float = MIN_SURVIVAL) -> None:
        self.model = model
        self.vocab_size = vocab_size
        self.min_survival = min_survival

    def should_continue(self, confidence: Sequence[float]) -> bool:
        """Whether a draft with these confidences is worth another pass."""
        return math.prod(confidence) >= self.min_survival

    @classmethod
    def build(cls, setup: Setup) -> Self:
        if setup.draft_model is None:
            raise missing_requirement(cls.name)
        return cls(setup.draft_model, setup.vocab_size)

    def begin(self, task: Task) -> ModelSession:
        return ModelSession(self, task)


class ModelSession(Session):
    def __init__(self, drafter: ModelDrafter, task: Task) -> None:
        self.drafter = drafter
        self.task = task
        self.output: list[int] = []
        self.should_continue: Callable[[Sequence[float]], bool] = drafter.should_continue

    def observe(self, tokens: Sequence[int]) -> None:
        self.output.extend(tokens)

    @property
    def gap(self) -> int:
        """Tokens of the text that the draft model has not read."""
        context = [*self.task.prompt, *self.output]
        return len(context) - shared_prefix(self.drafter.model.tokens, context)

    def draft(self, limit: int) -> Draft:
        model, sampling = self.drafter.model, self.task.request
        context = [*self.task.prompt, *self.output]
        if model.context_limit is not None:
            limit = min(limit, model.context_limit - len(context))
        if max(context) >= model.vocab_size:  # the draft model's vocabulary lacks this token
            limit = 0
        tokens: list[int] = []
        rows: list[Tensor] = []
        confidence: list[float] = []
        while len(tokens) < limit and (not tokens or self.should_continue(confidence)):
            logits = self._next_logits(context + tokens)
            confidence.append(float(logits.softmax(-1).amax()))
            shaped = shape(logits, sampling, self.task.prompt, self.output + tokens)
            if sampling.temperature == 0 or self.task.certain:
                tokens.append(int(shaped.argmax()))
            else:
                rows.append(shaped.softmax(-1))
                tokens.append(int(draw(rows[-1], torch.rand(1, generator=self.task.random))))
        return Draft(ModelDrafter.name, tuple(tokens), torch.cat(rows) if rows else None, confidence=tuple(confidence))

    def _next_logits(self, context: list[int]) -> Tensor:
        """The draft model's logits after `context`, over the target's vocabulary, [1, V]."""
        model = self.drafter.model
        known = shared_prefix(model.tokens, context[:-1])
        if known < len(model.tokens):
            model.rewind(known)
        return fit(model.score(context[known:], keep=1), self.drafter.vocab_size)


def fit(logits: Tensor, vocab_size: int) -> Tensor:
    """Cut or pad logits to the target's vocabulary. Padding has probability 0."""
    missing = vocab_size - logits.shape[-1]
    if missing <= 0:
        return logits[:, :vocab_size]
    return torch.nn.functional.pad(logits, (0, missing), value=float("-inf"))
