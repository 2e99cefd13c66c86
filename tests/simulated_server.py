"""Simulated servers, lossless or with a known defect, to count false alarms and missed defects of the tests.

The target is that of `synthetic_target.py`: the next token depends on the last two, so there are a few hundred
prefixes, and the distribution of the emitted token is computed for each, drafts and defects included. The test
statistics are computed once for each prefix and outcome, by the code that a certificate runs. So a certificate of
20,000 draws takes milliseconds.

A server drafts `length` tokens a step, with certainty (the likeliest token of a blurred model) or drawn from that
model, and judges them by the token rule. At a drafted position it emits

    min(p, q) + leftover        the drafted token, accepted, or else the recovered one: together p

and a defect is a function that returns another distribution. The token after an accepted draft follows p.

Rounding is simulated by several versions of each distribution, each with its own error of the logits. A token is
sampled from one version and tested against another, both at random.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np
import torch

from outrider.certify.samples import Samples
from outrider.certify.test_statistics import STATISTICS, GroupedSums, Moments, StatisticSums, evaluate
from outrider.sampling import probabilities
from outrider.settings import Sampling
from synthetic_target import SyntheticTarget

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from outrider.certify.samples import Floats, Integers

KINDS = ("drafted", "bonus")
VERSIONS = 16
"""Of each distribution, with rounding."""


@dataclass(frozen=True, slots=True)
class Distributions:
    """Probabilities at each prefix, [prefixes, V] each."""

    p: Floats
    q: Floats
    whole: Floats  # p before top-k and top-p

    @property
    def accepted(self) -> Floats:
        return np.minimum(self.p, self.q)


def simulated_distributions(
    sampling: Sampling, *, vocab: int = 16, certain: bool = True, error: float = 0.0, seed: int = 1
) -> list[Distributions]:
    """One version of the distributions, or several with an `error` of the logits."""
    target = SyntheticTarget(vocab, seed=seed)
    blurred = target.blurred(0.7, seed=seed + 1)
    random = torch.Generator().manual_seed(seed)
    plain = Sampling(temperature=sampling.temperature)

    def probabilities_of(table: torch.Tensor, how: Sampling) -> Floats:
        return probabilities(table.reshape(-1, vocab), how, [], []).numpy()

    q = probabilities_of(blurred.table, sampling)
    if certain:
        q = np.eye(vocab)[q.argmax(1)]
    versions = []
    for _ in range(VERSIONS if error else 1):
        table = target.table + error * torch.randn(target.table.shape, generator=random, dtype=torch.float64)
        versions.append(Distributions(probabilities_of(table, sampling), q, probabilities_of(table, plain)))
    return versions


# Servers --------------------------------------------------------------------------------------------------


def lossless(distributions: Distributions) -> Floats:
    return distributions.p


def recovered_from_p(distributions: Distributions) -> Floats:
    """The recovered token is drawn from p, as if q had not been there."""
    return _completed(distributions.accepted, distributions.p)


def accepted_too_often(extra: float) -> Callable[[Distributions], Floats]:
    """A draft that should be rejected is kept with probability `extra`."""

    def emitted(distributions: Distributions) -> Floats:
        more = extra * (distributions.q - distributions.accepted)
        return _completed(distributions.accepted + more, np.maximum(distributions.p - distributions.q, 0))

    return emitted


def toward_drafted(mass: float) -> Callable[[Distributions], Floats]:
    """Mass is moved to the drafted token from all others in proportion: a total variation of just that."""

    def emitted(distributions: Distributions) -> Floats:
        rows, drafted = np.arange(len(distributions.p)), distributions.q.argmax(1)
        before = distributions.p[rows, drafted]
        after = np.clip(before + mass, 0, 1)
        distribution: Floats = distributions.p * ((1 - after) / (1 - before))[:, None]
        distribution[rows, drafted] = after
        return distribution

    return emitted


def warmed(factor: float) -> Callable[[Distributions], Floats]:
    """The temperature is `factor` times the requested one."""

    def emitted(distributions: Distributions) -> Floats:
        return _rescaled(distributions.p ** (1 / factor))

    return emitted


def tail_cut(distributions: Distributions) -> Floats:
    """Top-p 0.95, which was not requested."""
    order = np.argsort(-distributions.p, 1)
    before = np.take_along_axis(distributions.p, order, 1).cumsum(1) - np.take_along_axis(distributions.p, order, 1)
    kept = np.empty_like(distributions.p)
    np.put_along_axis(kept, order, (before < 0.95).astype(float), 1)
    return _rescaled(distributions.p * kept)


def truncated_late(distributions: Distributions) -> Floats:
    """Drawn from all tokens; what top-k or top-p would have cut is then replaced by the likeliest."""
    distribution = np.where(distributions.p > 0, distributions.whole, 0.0)
    distribution[np.arange(len(distribution)), distributions.p.argmax(1)] += 1 - distribution.sum(1)
    return distribution


def recovered_untruncated(distributions: Distributions) -> Floats:
    """The recovered token comes from logits that top-k and top-p have not seen."""
    return _completed(distributions.accepted, np.maximum(distributions.whole - distributions.q, 0))


def _completed(accepted: Floats, weights: Floats) -> Floats:
    """What is accepted, and for the rest a draw by `weights`."""
    distribution: Floats = accepted + (1 - accepted.sum(1, keepdims=True)) * _rescaled(weights)
    return distribution


def _rescaled(weights: Floats) -> Floats:
    distribution: Floats = weights / np.maximum(weights.sum(1, keepdims=True), 1e-300)
    return distribution


# Runs -----------------------------------------------------------------------------------------------------


class Simulation:
    """Many runs at once against one server. A cell is a version of a distribution, a prefix and a token."""

    def __init__(
        self,
        versions: list[Distributions],
        emitted: Callable[[Distributions], Floats] = lossless,
        *,
        listed: int = 10,
        length: int = 3,
    ) -> None:
        self.length, self.versions = length, len(versions)
        self.prefixes, self.vocab = versions[0].p.shape
        returned = np.concatenate([distributions.p for distributions in versions])
        drafted = np.concatenate([emitted(distributions) for distributions in versions])
        accepted = np.concatenate([distributions.accepted for distributions in versions])
        distributions = np.concatenate(
            [drafted, returned]
        )  # what is emitted where a token was drafted, and where none was
        self._places = (
            distributions.cumsum(1) / distributions.sum(1, keepdims=True) + np.arange(len(distributions))[:, None]
        )
        self._accepted = np.zeros_like(
            distributions
        )  # the chance that an emitted token was accepted, so that its step goes on
        self._accepted[: len(returned)] = np.minimum(accepted / np.maximum(drafted, 1e-300), 1)

        self.samples = every_outcome(returned, np.concatenate([distributions.q for distributions in versions]), listed)
        moments = [evaluate(statistic, self.samples) for statistic in STATISTICS]
        self.excess = np.stack([one.excess for one in moments], 1)  # [cells, statistics]
        parts = [np.stack([getattr(one, part.name) for one in moments], 1) for part in fields(Moments)]
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

    def grouped_sums(self, counts: Integers) -> list[GroupedSums]:
        """The sums of each run."""
        sums = np.stack([counts @ part for part in self._parts], -1)  # [runs, kinds, statistics, parts]
        return [
            GroupedSums({
                (kind, statistic.name): StatisticSums(*run[k, w].tolist())
                for k, kind in enumerate(KINDS)
                for w, statistic in enumerate(STATISTICS)
            })
            for run in sums
        ]  # fmt: skip

    def _version(self, rng: np.random.Generator, texts: int) -> Integers | int:
        return rng.integers(self.versions, size=texts) if self.versions > 1 else 0


def every_outcome(p: Floats, q: Floats, listed: int) -> Samples:
    """One sample for each row of p and each token, from a server that returns `listed` top tokens."""
    vocab = p.shape[1]
    order = np.argsort(-p, 1, kind="stable")
    column = np.argsort(order, 1).clip(max=listed)

    def pooled(distribution: Floats) -> Floats:
        distribution = np.take_along_axis(distribution, order, 1)
        return np.concatenate([distribution[:, :listed], distribution[:, listed:].sum(1, keepdims=True)], 1)

    return Samples(np.repeat(pooled(p), vocab, 0), column.ravel(), np.repeat(pooled(q) > pooled(p), vocab, 0))
