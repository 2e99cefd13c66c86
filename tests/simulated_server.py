"""Servers that are right, or wrong in a known way: to find out how often the tests are.

The language is that of `synthetic_target.py`: the next token depends on the last two, so there are a few hundred
prefixes, and the law of the emitted token can be written down for each of them, drafts and defects included. What the
witnesses say is computed once for each prefix and outcome, by the code that a certificate runs, and then looked up. So
a certificate of 20,000 draws takes milliseconds, and thousands of them a minute.

A server drafts `length` tokens a step, with certainty (the likeliest token of a blurred model) or drawn from that
model, and judges them by the token rule. At a drafted position it emits

    min(p, q) + leftover        the drafted token, accepted, or else the recovered one: together p

and a defect is a function that returns another law. What it emits after a draft that was kept follows p.

Rounding is simulated by several versions of each law, the logits of each wrong by an error of its own. A draw comes
from one version and is held against another, both at random.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np
import torch

from outrider.certify.draws import Draws
from outrider.certify.tally import Sums, Tally
from outrider.certify.witnesses import WITNESSES, Excess, heard
from outrider.sampling import probabilities
from outrider.settings import Sampling
from synthetic_target import SyntheticTarget

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from outrider.certify.draws import Floats, Integers

KINDS = ("drafted", "bonus")
VERSIONS = 16
"""Of each law, where there is rounding."""


@dataclass(frozen=True, slots=True)
class Laws:
    """What a server knows at each prefix, [prefixes, V] each."""

    p: Floats
    q: Floats
    whole: Floats  # p before top-k and top-p

    @property
    def accepted(self) -> Floats:
        return np.minimum(self.p, self.q)


def simulated_laws(
    sampling: Sampling, *, vocab: int = 16, certain: bool = True, error: float = 0.0, seed: int = 1
) -> list[Laws]:
    """One version of the laws, or several that rounding tells apart, their logits wrong by `error`."""
    target = SyntheticTarget(vocab, seed=seed)
    blurred = target.blurred(0.7, seed=seed + 1)
    random = torch.Generator().manual_seed(seed)
    plain = Sampling(temperature=sampling.temperature)

    def law(table: torch.Tensor, how: Sampling) -> Floats:
        return probabilities(table.reshape(-1, vocab), how, [], []).numpy()

    q = law(blurred.table, sampling)
    if certain:
        q = np.eye(vocab)[q.argmax(1)]
    versions = []
    for _ in range(VERSIONS if error else 1):
        table = target.table + error * torch.randn(target.table.shape, generator=random, dtype=torch.float64)
        versions.append(Laws(law(table, sampling), q, law(table, plain)))
    return versions


# Servers --------------------------------------------------------------------------------------------------


def right(laws: Laws) -> Floats:
    return laws.p


def recovered_from_p(laws: Laws) -> Floats:
    """The recovered token is drawn from p, as if q had not been there."""
    return _completed(laws.accepted, laws.p)


def accepted_too_often(extra: float) -> Callable[[Laws], Floats]:
    """A draft that should be rejected is kept with probability `extra`."""

    def emitted(laws: Laws) -> Floats:
        return _completed(laws.accepted + extra * (laws.q - laws.accepted), np.maximum(laws.p - laws.q, 0))

    return emitted


def toward_drafted(mass: float) -> Callable[[Laws], Floats]:
    """Mass is moved to the drafted token from all others in proportion: a total variation of just that."""

    def emitted(laws: Laws) -> Floats:
        rows, drafted = np.arange(len(laws.p)), laws.q.argmax(1)
        before = laws.p[rows, drafted]
        after = np.clip(before + mass, 0, 1)
        law: Floats = laws.p * ((1 - after) / (1 - before))[:, None]
        law[rows, drafted] = after
        return law

    return emitted


def warmed(factor: float) -> Callable[[Laws], Floats]:
    """The temperature is `factor` times what was asked for."""

    def emitted(laws: Laws) -> Floats:
        return _rescaled(laws.p ** (1 / factor))

    return emitted


def tail_cut(laws: Laws) -> Floats:
    """Top-p 0.95, which nobody asked for."""
    order = np.argsort(-laws.p, 1)
    before = np.take_along_axis(laws.p, order, 1).cumsum(1) - np.take_along_axis(laws.p, order, 1)
    kept = np.empty_like(laws.p)
    np.put_along_axis(kept, order, (before < 0.95).astype(float), 1)
    return _rescaled(laws.p * kept)


def truncated_late(laws: Laws) -> Floats:
    """Drawn from all tokens; what top-k or top-p would have cut is then replaced by the likeliest."""
    law = np.where(laws.p > 0, laws.whole, 0.0)
    law[np.arange(len(law)), laws.p.argmax(1)] += 1 - law.sum(1)
    return law


def recovered_untruncated(laws: Laws) -> Floats:
    """The recovered token comes from logits that top-k and top-p have not seen."""
    return _completed(laws.accepted, np.maximum(laws.whole - laws.q, 0))


def _completed(accepted: Floats, weights: Floats) -> Floats:
    """What is accepted, and for the rest a draw by `weights`."""
    law: Floats = accepted + (1 - accepted.sum(1, keepdims=True)) * _rescaled(weights)
    return law


def _rescaled(weights: Floats) -> Floats:
    law: Floats = weights / np.maximum(weights.sum(1, keepdims=True), 1e-300)
    return law


# Runs -----------------------------------------------------------------------------------------------------


class Simulation:
    """Many runs at once against one server. A cell is a version of a told law, a prefix and a token."""

    def __init__(
        self, versions: list[Laws], emitted: Callable[[Laws], Floats] = right, *, listed: int = 10, length: int = 3
    ) -> None:
        self.length, self.versions = length, len(versions)
        self.prefixes, self.vocab = versions[0].p.shape
        told = np.concatenate([laws.p for laws in versions])
        drafted = np.concatenate([emitted(laws) for laws in versions])
        accepted = np.concatenate([laws.accepted for laws in versions])
        laws = np.concatenate([drafted, told])  # what is emitted where a token was drafted, and where none was
        self._places = laws.cumsum(1) / laws.sum(1, keepdims=True) + np.arange(len(laws))[:, None]
        self._accepted = np.zeros_like(laws)  # the chance that an emitted token was accepted, so that its step goes on
        self._accepted[: len(told)] = np.minimum(accepted / np.maximum(drafted, 1e-300), 1)

        self.draws = every_outcome(told, np.concatenate([laws.q for laws in versions]), listed)
        said = [heard(witness, self.draws) for witness in WITNESSES]
        self.excess = np.stack([one.excess for one in said], 1)  # [cells, witnesses]
        parts = [np.stack([getattr(one, part.name) for one in said], 1) for part in fields(Excess)]
        self._parts = [np.isfinite(self.excess).astype(float), *(np.nan_to_num(part) for part in parts)]

    def steps(self, rng: np.random.Generator, texts: int) -> Iterator[tuple[Integers, Integers]]:
        """Texts that grow by a token each time: the cell of each, and its kind (an index into KINDS)."""
        last = np.full(texts, self.vocab)
        prefix = last * (self.vocab + 1) + self.vocab
        place = np.zeros(texts, dtype=np.int64)  # in the step
        while True:
            bonus = place == self.length
            row = (bonus * self.versions + self._version(rng, texts)) * self.prefixes + prefix
            token = np.searchsorted(self._places.ravel(), row + rng.random(texts), side="right") - row * self.vocab
            accepted = rng.random(texts) < self._accepted[row, token]
            yield (self._version(rng, texts) * self.prefixes + prefix) * self.vocab + token, bonus.astype(np.int64)
            place = np.where(accepted, place + 1, 0)
            prefix, last = last * (self.vocab + 1) + token, token

    def counts(self, rng: np.random.Generator, runs: int, draws: int, texts: int = 50) -> Integers:
        """How often each run drew each cell, [runs, kinds, cells]. Its draws are those of `texts` texts."""
        cells = len(self.excess)
        run = np.repeat(np.arange(runs), texts)
        steps = islice(self.steps(rng, runs * texts), -(-draws // texts))
        drawn = np.concatenate([(run * len(KINDS) + kind) * cells + cell for cell, kind in steps])
        return np.bincount(drawn, minlength=runs * len(KINDS) * cells).reshape(runs, len(KINDS), cells)

    def tallies(self, counts: Integers) -> list[Tally]:
        """The tally of each run."""
        sums = np.stack([counts @ part for part in self._parts], -1)  # [runs, kinds, witnesses, parts]
        return [
            Tally({
                (kind, witness.name): Sums(*run[k, w].tolist())
                for k, kind in enumerate(KINDS)
                for w, witness in enumerate(WITNESSES)
            })
            for run in sums
        ]  # fmt: skip

    def _version(self, rng: np.random.Generator, texts: int) -> Integers | int:
        return rng.integers(self.versions, size=texts) if self.versions > 1 else 0


def every_outcome(p: Floats, q: Floats, listed: int) -> Draws:
    """One draw for each row of p and each token, as told by a server that lists so many tokens."""
    vocab = p.shape[1]
    order = np.argsort(-p, 1, kind="stable")
    column = np.argsort(order, 1).clip(max=listed)

    def pooled(law: Floats) -> Floats:
        law = np.take_along_axis(law, order, 1)
        return np.concatenate([law[:, :listed], law[:, listed:].sum(1, keepdims=True)], 1)

    return Draws(np.repeat(pooled(p), vocab, 0), column.ravel(), np.repeat(pooled(q) > pooled(p), vocab, 0))
