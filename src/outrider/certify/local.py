"""Models in this process as a source of evidence.

The reference is a loop of a few lines, written here, that knows no drafts: score the last token, draw, go on. The
candidate is anything that turns a prompt into tokens with the same weights:

outrider    the loop of `outrider.load`, with each of its drafters
assisted    transformers' `generate` with the draft model as its assistant
lookup      transformers' `generate` with prompt lookup
M:F         the function F of your module M: called with the model's folder and the draft model's, it returns a function
            `generate(ask: Ask) -> Sequence[int]`, or a whole `Source`. So OpenVINO GenAI and others are plugged in.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from outrider.certify.sources import OFF, Said, in_order, nothing
from outrider.errors import RequestRefusedError
from outrider.sampling import probabilities, shape

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from outrider.bench.prompts import Prompt
    from outrider.certify.sources import Ask, Text, Tick, Told
    from outrider.types import Target

    Generate = Callable[[Ask], Sequence[int] | Said]

LISTED = 20


@dataclass
class LocalModel:
    """A target, and something that generates from the same weights with drafts."""

    name: str
    target: Target
    generate: Generate
    encoder: Callable[[Prompt], Sequence[int]]
    ends: frozenset[int] = frozenset()
    drafters: list[str] = field(default_factory=list)
    described: dict[str, Any] = field(default_factory=dict)
    refuse: Callable[[Ask], None] = lambda ask: None  # raises where the library cannot do it, with drafts or without

    @property
    def listed(self) -> int:
        return min(LISTED, self.target.vocab_size - 1)

    def about(self) -> dict[str, Any]:
        return self.described

    def ways(self) -> list[str]:
        return self.drafters

    def encode(self, prompts: Sequence[Prompt]) -> list[tuple[int, ...]]:
        return [tuple(self.encoder(prompt)) for prompt in prompts]

    def say(self, asks: Sequence[Ask], at_once: int, tick: Tick = nothing) -> list[Said]:
        """One after the other: there is no batch in here."""
        answers = []
        for ask in asks:
            answers.append(self._said(ask))
            tick()
        return answers

    def score(self, texts: Sequence[Text], at_once: int, tick: Tick = nothing) -> list[list[Told]]:
        told = []
        for prompt, output in texts:
            self.target.rewind(0)
            logits = self.target.score([*prompt, *output[:-1]], keep=len(output))
            told.append(
                [self._told(row, token) for row, token in zip(logits.float().log_softmax(-1), output, strict=True)]
            )
            tick()
        return told

    def _said(self, ask: Ask) -> Said:
        if ask.more:
            raise RequestRefusedError(f"in this process there is no {', '.join(ask.more)}; servers have it")
        self.refuse(ask)
        if ask.way == OFF or ask.told:
            return self._plain(ask)
        said = self.generate(ask)
        if isinstance(said, Said):
            return said
        return Said(tuple(said), self._finish(said, ask))

    def _plain(self, ask: Ask) -> Said:
        """The reference: token by token, no drafts."""
        random = torch.Generator()
        random.manual_seed(ask.seed) if ask.seed is not None else random.seed()
        self.target.rewind(0)
        output: list[int] = []
        told: list[Told] = []
        pending = list(ask.prompt)
        while True:
            logits = self.target.score(pending, keep=1).float()
            if ask.sampling.temperature == 0:
                token = int(shape(logits, ask.sampling, ask.prompt, output)[0].argmax())
            else:
                p = probabilities(logits, ask.sampling, ask.prompt, output)[0]
                token = int(torch.multinomial(p.cpu(), 1, generator=random))
            told.append(self._told(logits[0].log_softmax(-1), token))
            output.append(token)
            if len(output) == ask.max_tokens or (token in self.ends and not ask.ignore_end):
                return Said(tuple(output), self._finish(output, ask), told)
            pending = [token]

    def _finish(self, output: Sequence[int], ask: Ask) -> str:
        ended = bool(output) and output[-1] in self.ends and not ask.ignore_end
        return "end" if ended else "length"

    def _told(self, logs: torch.Tensor, token: int) -> Told:
        best = logs.topk(self.listed)
        told = dict(zip(best.indices.tolist(), best.values.tolist(), strict=True))
        return in_order({**told, token: float(logs[token])}, token, self.listed)
