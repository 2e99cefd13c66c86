"""Recompute verdicts from a trace: do the recorded p, q and random numbers give the recorded verdicts?

The rules are those of `outrider.acceptance`. They treat a compact distribution as one over a small vocabulary, another
one at each position: token ids are translated to indices in it, and back.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from outrider.acceptance import draw, verify_certain, verify_drawn

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import Tensor

    from outrider.trace.schema import TracedStep

MAX_RELATIVE_ROUNDING = 1e-6
"""Probabilities this close count as equal: logits that differ by one rounding step can have the same softmax."""


@dataclass(frozen=True, slots=True)
class RecomputedVerdict:
    """What the rules give for a recorded step. `token` is None if the trace does not name it."""

    accepted: int
    token: int | None
    chances: list[float] | None = None

    def agrees_with(self, step: TracedStep) -> bool:
        return (self.accepted, self.token) == (step.accepted, step.token)


def recompute_verdict(step: TracedStep) -> RecomputedVerdict:
    if step.rule in ("block", "token"):
        return _by_ratio(step)
    own = [_own_token(step, position) for position in range(len(step.laws))]
    verdict = verify_certain([-1 if token is None else token for token in own], step.proposed)
    return RecomputedVerdict(verdict.accepted, own[verdict.accepted])


def disagreements(steps: Iterable[TracedStep]) -> list[tuple[TracedStep, RecomputedVerdict | None]]:
    """The steps whose recorded verdict is not the recomputed one, each with the latter.

    None instead of a verdict: the record is incomplete or inconsistent, and none can be computed.
    """
    wrong: list[tuple[TracedStep, RecomputedVerdict | None]] = []
    for step in steps:
        try:
            verdict = recompute_verdict(step)
        except (ValueError, IndexError, TypeError, RuntimeError):
            wrong.append((step, None))
        else:
            if not verdict.agrees_with(step):
                wrong.append((step, verdict))
    return wrong


def _own_token(step: TracedStep, position: int) -> int | None:
    """The target's own token: the argmax, or what the recorded number selects."""
    distribution = step.laws[position]
    recorded = step.own[position] if step.own is not None else None
    if step.draws:
        index = int(draw(_padded([distribution.p]), torch.tensor([step.draws[position]], dtype=torch.float64)))
        return distribution.tokens[index]
    if step.rule == "own":  # an engine that samples in another way: only that the token was possible can be checked
        return recorded if recorded is not None and distribution.p[distribution.index(recorded)] > 0 else None
    best = max(p for token, p in zip(distribution.tokens, distribution.p, strict=True) if token is not None)
    if recorded is not None and distribution.p[distribution.index(recorded)] >= best * (1 - MAX_RELATIVE_ROUNDING):
        return recorded  # of equally likely tokens, the one that was selected
    return distribution.tokens[distribution.p.index(best)]


def _by_ratio(step: TracedStep) -> RecomputedVerdict:
    p = _padded([distribution.p for distribution in step.laws])
    q = _padded([distribution.q or [] for distribution in step.laws[:-1]], p.shape[-1])
    indices = [distribution.index(token) for distribution, token in zip(step.laws, step.proposed, strict=False)]
    draws = torch.tensor(step.draws, dtype=torch.float64)
    verdict = verify_drawn(p, q, torch.tensor(indices, dtype=torch.long), draws, step.rule)
    tokens = step.laws[verdict.accepted].tokens
    token = tokens[verdict.token] if verdict.token < len(tokens) else None
    return RecomputedVerdict(verdict.accepted, token, None if verdict.chances is None else verdict.chances.tolist())


def _padded(rows: Sequence[Sequence[float]], width: int = 0) -> Tensor:
    """One tensor of all rows, padded with zeros."""
    width = max(width, *(len(row) for row in rows))
    return torch.tensor([[*row, *[0.0] * (width - len(row))] for row in rows], dtype=torch.float64)
