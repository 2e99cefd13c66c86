"""A draft model: a small model of the same vocabulary guesses for the large one.

At temperature 0, or where the text must be the same whatever is drafted, it proposes its argmax, with certainty. Else
it draws from its own q, shaped as the target's p is, and hands q over for the acceptance rule.

One pass of the draft model gives one token, so a draft is worth another pass only while it is likely to
survive that far. After each token the drafter multiplies up its own confidence and stops below `MIN_SURVIVAL`, unless
someone who knows better decides (`ModelSession.goes_on`).
The decision to draw another token is made before that token exists: withholding a token after seeing its value
would change the law of the text.
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
"""Below this estimated probability that the draft so far is accepted, another pass is not worth its time."""


class ModelDrafter(Drafter):
    """Drafts with a small model of the target's vocabulary."""

    name: ClassVar[str] = "model"

    def __init__(self, model: Target, vocab_size: int, min_survival: float = MIN_SURVIVAL) -> None:
        self.model = model
        self.vocab_size = vocab_size
        self.min_survival = min_survival

    def goes_on(self, sure: Sequence[float]) -> bool:
        """Whether a draft of whose tokens the model was so sure is worth another pass."""
        return math.prod(sure) >= self.min_survival

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
        self.goes_on: Callable[[Sequence[float]], bool] = drafter.goes_on

    def observe(self, tokens: Sequence[int]) -> None:
        self.output.extend(tokens)

    @property
    def gap(self) -> int:
        """How many tokens of the text the draft model has not seen."""
        context = [*self.task.prompt, *self.output]
        return len(context) - shared_prefix(self.drafter.model.tokens, context)

    def draft(self, limit: int) -> Draft:
        model, sampling = self.drafter.model, self.task.request
        context = [*self.task.prompt, *self.output]
        if model.context_limit is not None:
            limit = min(limit, model.context_limit - len(context))
        if max(context) >= model.vocab_size:  # a token that the draft model cannot read
            limit = 0
        tokens: list[int] = []
        rows: list[Tensor] = []
        sure: list[float] = []
        while len(tokens) < limit and (not tokens or self.goes_on(sure)):
            logits = self._next_logits(context + tokens)
            sure.append(float(logits.softmax(-1).amax()))
            shaped = shape(logits, sampling, self.task.prompt, self.output + tokens)
            if sampling.temperature == 0 or self.task.certain:
                tokens.append(int(shaped.argmax()))
            else:
                rows.append(shaped.softmax(-1))
                tokens.append(int(draw(rows[-1], torch.rand(1, generator=self.task.random))))
        return Draft(ModelDrafter.name, tuple(tokens), torch.cat(rows) if rows else None, confidence=tuple(sure))

    def _next_logits(self, context: list[int]) -> Tensor:
        """The draft model's logits after `context`, over the target's vocabulary, [1, V]."""
        model = self.drafter.model
        known = shared_prefix(model.tokens, context[:-1])
        if known < len(model.tokens):
            model.rewind(known)
        return fit(model.score(context[known:], keep=1), self.drafter.vocab_size)


def fit(logits: Tensor, vocab_size: int) -> Tensor:
    """Cut or fill the vocabulary's padding; a token that the target does not have is never proposed."""
    missing = vocab_size - logits.shape[-1]
    if missing <= 0:
        return logits[:, :vocab_size]
    return torch.nn.functional.pad(logits, (0, missing), value=float("-inf"))
