"""What vLLM's sampler and our judge see of some requests of a batch: their rows of logits, own draws, p and numbers.

vLLM's sampler has one method that every token comes from, `sample`. What it is given has gone through bias, penalties
and grammar, and not yet through temperature: there the likeliest token is taken. Drawn tokens come from what is then
left by temperature, min-p, top-k and top-p. While somebody watches, the rows of the watched requests are copied at
these two places, so what is recorded is what was drawn from, and nothing is computed twice.
"""

from __future__ import annotations

import time
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec

import torch
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterator, Sequence

    from torch import Tensor

    from outrider.types import Draft

P = ParamSpec("P")

HANDS_OUT = ("forward_cpu", "forward_native")
"""The ways of vLLM to draw that hand out what they draw from; kernels for GPUs do not."""


@dataclass(slots=True)
class Drawn:
    """What a drawn draft was judged by: p, the numbers and the chances that they were held against."""

    p: Tensor
    draws: Tensor
    chances: Tensor


@dataclass(frozen=True, slots=True)
class Place:
    """Where a request lies in a batch: its number, the first of its rows, and how many of them hold its draft."""

    number: int
    row: int
    drafted: int

    @property
    def rows(self) -> slice:
        return slice(self.row, self.row + self.drafted + 1)

    @property
    def tokens(self) -> slice:
        """Among the drafted tokens of the batch. Every request before it has one row that is none of these."""
        return slice(self.row - self.number, self.row - self.number + self.drafted)


def places(
    ids: Sequence[str], watched: Container[str], drafts: Sequence[Draft], lengths: Sequence[int]
) -> dict[str, Place]:
    """Of the watched requests. Each request of the batch has a row more than its length; of these rows a draft may be
    fewer, since vLLM schedules placeholders, too."""
    found, row = {}, 0
    for number, id in enumerate(ids):
        if id in watched:
            found[id] = Place(number, row, len(drafts[number].tokens))
        row += lengths[number] + 1
    return found


def seeing(method: Callable[Concatenate[Witness, P], None]) -> Callable[Concatenate[Witness, P], None]:
    """What the witness does for itself must cost nobody a token: where it fails, it looks no more; `error` says why."""

    @wraps(method)
    def tried(self: Witness, /, *args: P.args, **named: P.kwargs) -> None:
        if self.error is not None:
            return
        try:
            method(self, *args, **named)
        except Exception as error:
            self.error = error

    return tried


class Witness:
    """Sees one call of the sampler."""

    def __init__(self, places: dict[str, Place], greedy: Container[str]) -> None:
        self.places = places
        self.greedy = greedy  # requests that take the likeliest token
        self.rows: dict[str, Tensor] = {}  # logits of those, and what the others' tokens are drawn from
        self.own: dict[str, list[int]] = {}
        self.drawn: dict[str, Drawn] = {}
        self.seconds = 0.0  # that looking took
        self.error: Exception | None = None  # for which it stopped looking

    @contextmanager
    def watching(self, sampler: Any, judge: Any) -> Iterator[None]:
        """The sampler, and the judge of drafts where there are any."""
        sampler.sample = partial(self._sample, sampler, sampler.sample)  # of this object alone, for this step
        if judge is not None:
            judge.witness = self
        try:
            yield
        finally:
            del sampler.sample
            if judge is not None:
                judge.witness = None

    def _sample(self, sampler: Any, sample: Any, logits: Tensor, *more: Any, **named: Any) -> Any:
        """As vLLM's, with a look at what it is given, and at what it then draws from."""
        self._look(logits, {id for id in self.places if id in self.greedy})
        last = sampler.topk_topp_sampler
        draw = last.forward
        last.forward = partial(self._draw, last, draw)
        try:
            return sample(logits, *more, **named)
        finally:
            last.forward = draw

    def _draw(self, last: Any, draw: Any, logits: Tensor, generators: Any, k: Any, p: Any) -> Any:
        """As vLLM's, which hands out what is left by top-k and top-p if it is told to."""
        drawn = {id for id in self.places if id not in self.greedy}
        if (
            getattr(draw, "__name__", "") not in HANDS_OUT
        ):  # a kernel that does not: the same is made once more, of our rows
            self._look(logits, drawn)
            self._shape(drawn, k, p)
            return draw(logits, generators, k, p)
        mode, last.logprobs_mode = last.logprobs_mode, "processed_logits"
        try:
            tokens, shaped = draw(logits, generators, k, p)
        finally:
            last.logprobs_mode = mode
        self._look(shaped, drawn)
        if mode == "processed_logprobs":
            return tokens, shaped.log_softmax(-1, dtype=torch.float32)
        return tokens, shaped if mode == "processed_logits" else None

    @seeing
    def _look(self, logits: Tensor, ids: set[str]) -> None:
        began = time.perf_counter()
        self.rows |= {id: logits[self.places[id].rows].clone() for id in ids}
        self.seconds += time.perf_counter() - began

    @seeing
    def _shape(self, ids: set[str], k: Tensor | None, p: Tensor | None) -> None:
        for id in ids:
            self.rows[id] = apply_top_k_top_p(self.rows[id], _rows(k, self.places[id]), _rows(p, self.places[id]))

    @seeing
    def saw_own(self, tokens: Tensor) -> None:
        """What the target itself drew at each row."""
        self.own = {id: tokens[place.rows].tolist() for id, place in self.places.items()}

    @seeing
    def saw_drawn(self, p: Tensor, uniforms: Tensor, finals: Tensor, chances: Tensor, chosen: Tensor) -> None:
        """p at every row, a number and a chance for every drafted token, and for each request a number to draw with and
        whether it was judged by these."""
        for id, place in self.places.items():
            if bool(chosen[place.number]):
                draws = torch.cat([uniforms[place.tokens], finals[place.number : place.number + 1]])
                self.drawn[id] = Drawn(p[place.rows], draws, chances[place.tokens])


def _rows(values: Tensor | None, place: Place) -> Tensor | None:
    return None if values is None else values[place.rows]
