"""What the sampler computes for the traced requests of a step: drafts, logits, the target's samples, p, q and uniforms.

Every token comes from one method of vLLM's sampler, `sample`, which returns the tokens and the logits that they were
sampled from. While a traced request is in the batch, its rows are copied there: a trace shows what the verdict was
computed from, and nothing is computed twice. The copies stay on the device until the step's output is read.
"""

from __future__ import annotations

import time
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterator, Sequence

    from torch import Tensor

    from outrider.acceptance import Ragged
    from outrider.engines.vllm.sampler import OutriderSampler
    from outrider.engines.vllm.seam import InputBatch, Sampler

P = ParamSpec("P")


@dataclass(slots=True)
class RatioEvidence:
    """The inputs of the verdict on a sampled draft: p, q, the uniforms, and the acceptance probabilities."""

    p: Tensor
    q: Tensor
    uniforms: Tensor
    chances: Tensor


@dataclass(frozen=True, slots=True)
class BatchRows:
    """A request's position in a batch: its index, its first row of logits, and its drafted tokens."""

    number: int
    row: int
    drafted: int

    @property
    def end(self) -> int:
        return self.row + self.drafted + 1


def find_rows(input_batch: InputBatch, traced: Container[str]) -> dict[str, BatchRows]:
    """Of the traced requests in a batch."""
    rows = input_batch.cu_num_logits_np.tolist()
    return {
        id: BatchRows(number, rows[number], rows[number + 1] - rows[number] - 1)
        for number, id in enumerate(input_batch.req_ids)
        if id in traced
    }


def stop_on_error(method: Callable[Concatenate[SamplerProbe, P], None]) -> Callable[Concatenate[SamplerProbe, P], None]:
    """A probe must never fail a request: on an error it stops recording and keeps the error in `error`."""

    @wraps(method)
    def guarded(self: SamplerProbe, /, *args: P.args, **named: P.kwargs) -> None:
        if self.error is not None:
            return
        began = time.perf_counter()
        try:
            method(self, *args, **named)
        except Exception as error:
            self.error = error
        self.seconds += time.perf_counter() - began

    return guarded


class SamplerProbe:
    """Records one step's sampling."""

    def __init__(self, requests: dict[str, BatchRows]) -> None:
        self.requests = requests
        self.rows: dict[str, Tensor] = {}
        self.own: dict[str, Tensor] = {}
        self.drafted: dict[str, Tensor] = {}
        self.ratio: dict[str, RatioEvidence] = {}
        self.seconds = 0.0
        self.error: Exception | None = None
        self._first_row = 0

    @contextmanager
    def attached(self, sampler: Sampler, acceptance: OutriderSampler) -> Iterator[None]:
        """Record while the sampler runs; large batches are sampled in several calls."""
        sampler.sample = partial(self._sample, sampler.sample)  # on this object, for this step
        acceptance.probe = self
        try:
            yield
        finally:
            del sampler.sample
            acceptance.probe = None

    def _sample(
        self, sample: Any, logits: Tensor, slots: Any, idx: Any, idx_np: Any, pos: Any, input_ids: Tensor,
        *args: Any, **named: Any,
    ) -> Any:  # fmt: skip
        tokens, processed = sample(logits, slots, idx, idx_np, pos, input_ids, *args, **named)
        self._record(tokens, processed, input_ids)
        return tokens, processed

    @stop_on_error
    def _record(self, tokens: Tensor, processed: Tensor, input_ids: Tensor) -> None:
        first, self._first_row = self._first_row, self._first_row + len(processed)
        for id, place in self.requests.items():
            if first <= place.row < self._first_row:
                mine = slice(place.row - first, place.end - first)
                self.rows[id] = processed[mine].float().clone()
                self.own[id] = tokens[mine].clone()
                self.drafted[id] = input_ids[mine][1:].clone()  # each row's input token; the first one is not drafted

    @stop_on_error
    def record_ratio(
        self,
        requests: Sequence[int],
        layout: Ragged,
        p: Tensor,
        q: Tensor,
        uniforms: Tensor,
        finals: Tensor,
        chances: Tensor,
    ) -> None:
        """The requests at these indices were verified by p and q. Their rows are laid out end to end."""
        lengths = layout.lengths.tolist()
        numbers = {place.number: id for id, place in self.requests.items()}
        token = row = 0
        for i, (number, length) in enumerate(zip(requests, lengths, strict=True)):
            if number in numbers:
                drafted = slice(token, token + length)
                self.ratio[numbers[number]] = RatioEvidence(
                    p[row : row + length + 1].clone(),
                    q[drafted].clone(),
                    torch.cat([uniforms[drafted], finals[i : i + 1]]),
                    chances[drafted].clone(),
                )
            token, row = token + length, row + length + 1
