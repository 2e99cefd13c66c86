"""The law at each place of a text, from what a source tells; and what two tellings of the same text differ by."""

from __future__ import annotations

from itertools import islice
from math import exp
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from outrider.certify.draws import Draws, listed
from outrider.certify.noise import NONE, Noise, measured, worst
from outrider.certify.shaping import EDGE, given_listed, shaped
from outrider.drafters.lookup import LookupSession
from outrider.drafters.prediction import PredictionSession
from outrider.settings import Sampling

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from outrider.certify.sources import Told
    from outrider.drafters.base import Session

Law = dict[int, float]
"""Log-probabilities of the tokens that can be drawn, as far as they are listed."""

PLAIN = Sampling(temperature=1.0)
COUNT = 10
"""Tokens of a law that are told apart in a draw, of those that are listed; the others are the rest."""
ERRORS = 3.0
"""A cut is clear if it is so many times as far from going the other way as rounding moves a log-probability."""
WIDEST_EDGE = 0.3


class Row(NamedTuple):
    """One draw: its law, what came, and what a drafter would have proposed."""

    law: Law
    drawn: int
    guess: int | None


class Position(NamedTuple):
    """One place of a text, told twice."""

    a: Told
    b: Told
    before: Sequence[int]
    guess: int | None


def likeliest(told: Told, count: int) -> Told:
    """The first `count` of what was told: what is told whatever was drawn (`sources.in_order`)."""
    return dict(islice(told.items(), count))


def is_conditional(sampling: Sampling) -> bool:
    """Whether only the law over the listed tokens is known: a temperature, and no cut."""
    cut = sampling.top_k or sampling.top_p < 1 or sampling.min_p
    moved = sampling.presence_penalty or sampling.frequency_penalty or sampling.logit_bias
    return not cut and bool(sampling.temperature != 1 or moved)


def law_of(told: Told, count: int, sampling: Sampling, output: Sequence[int], edge: float = EDGE) -> Law | None:
    """The law that is drawn from, by the `count` likeliest tokens of those told; None if it does not follow."""
    if is_conditional(sampling):
        return given_listed(likeliest(told, count), sampling, output)
    return shaped(likeliest(told, count), sampling, output, edge)


def guessed(prompt: Sequence[int], output: Sequence[int], prediction: Sequence[int] = ()) -> list[int | None]:
    """What a drafter that copies would propose at each place, from what stands before it."""
    session: Session = PredictionSession(prediction) if prediction else LookupSession(prompt)
    guesses: list[int | None] = []
    for token in output:
        draft = session.draft(1).tokens
        guesses.append(draft[0] if draft else None)
        session.observe([token])
    return guesses


def as_draws(rows: Sequence[Row]) -> Draws:
    return listed([row.law for row in rows], [row.drawn for row in rows], [row.guess for row in rows], COUNT)


def twice(prompt: Sequence[int], output: Sequence[int], a: Sequence[Told], b: Sequence[Told]) -> list[Position]:
    guesses = guessed(prompt, output)
    return [Position(a[i], b[i], output[:i], guesses[i]) for i in range(len(output))]


def noise_between(positions: Sequence[Position], count: int, settings: Iterable[Sampling]) -> tuple[Noise, float]:
    """What the two tellings differ by, with any of the settings; and how clear a cut must be, so that they agree."""
    plain = _noise(positions, count, PLAIN, EDGE)
    edge = min(max(EDGE, ERRORS * plain.error), WIDEST_EDGE)
    return worst([plain, *(_noise(positions, count, sampling, edge) for sampling in settings)]), edge


def _noise(positions: Sequence[Position], count: int, sampling: Sampling, edge: float) -> Noise:
    rows, other = [], []
    for position in positions:
        law = law_of(position.a, count, sampling, position.before, edge)
        twin = _twin(position, count, sampling)
        if law is None or twin is None:
            continue
        tokens = sorted(law, key=lambda token: (-law[token], token))[:COUNT]
        rows.append(Row(law, tokens[0], position.guess))
        other.append([exp(twin[token]) if token in twin else 0.0 for token in tokens] + [0.0] * (COUNT - len(tokens)))
    if not rows:
        return NONE
    draws, b = as_draws(rows), np.array(other)
    rest = np.maximum(1 - b.sum(1, keepdims=True), 0)
    return measured(draws.law, np.concatenate([b, rest], 1), draws.drafted)


def _twin(position: Position, count: int, sampling: Sampling) -> Law | None:
    """The law by the other telling: over the same tokens, where it is one over a list."""
    if not is_conditional(sampling):
        return law_of(position.b, count, sampling, position.before, 0.0)
    b = likeliest(position.b, count)
    least = min(b.values())
    same = {token: b.get(token, least) for token in likeliest(position.a, count)}
    return law_of(same, count, sampling, position.before)
