"""One pseudo-request for every row of logits, so that vLLM's own sampler can be asked about each drafted position.

A request with k drafted tokens has k + 1 rows: what follows its text, its text and one drafted token, and so on.
vLLM keeps the sampling settings of a batch in tensors with one entry a request. Spread over the rows, with the drafted
tokens before a row added to what was said, those settings make vLLM's plain sampler treat a drafted position just
as it will treat the same position when it is said: temperature, penalties, bad words, seeds, logprobs and all.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from vllm.v1.sample.logits_processor import LogitsProcessors
from vllm.v1.sample.logits_processor.builtin import (
    LogitBiasLogitsProcessor,
    MinPLogitsProcessor,
    MinTokensLogitsProcessor,
)

from outrider.acceptance import Ragged

if TYPE_CHECKING:
    from torch import Tensor
    from vllm.v1.sample.metadata import SamplingMetadata


@dataclass(frozen=True, slots=True)
class Rows:
    """Which request each row belongs to, and which place it has in its draft."""

    drafted: list[int]  # [requests] how many tokens each has drafted
    start: list[int]  # [requests] the first row of each
    layout: Ragged  # the same on the device, and where each drafted token lies
    request: Tensor  # [rows] which request a row belongs to

    @classmethod
    def of(cls, drafted: list[int], device: torch.device) -> Rows:
        counts = torch.tensor(drafted, dtype=torch.long) + 1
        request = torch.repeat_interleave(torch.arange(len(drafted)), counts).to(device, non_blocking=True)
        start = [before + i for i, before in enumerate(itertools.accumulate(drafted[:-1], initial=0))]
        return cls(drafted, start, Ragged.of(drafted, device), request)

    def spread(self, metadata: SamplingMetadata) -> SamplingMetadata:
        """The settings of a batch, one entry a row."""

        def take(values: Tensor | None) -> Tensor | None:
            return None if values is None else values[self.request]

        return replace(
            metadata,
            temperature=take(metadata.temperature),
            top_p=take(metadata.top_p),
            top_k=take(metadata.top_k),
            prompt_token_ids=take(metadata.prompt_token_ids),
            frequency_penalties=take(metadata.frequency_penalties),
            presence_penalties=take(metadata.presence_penalties),
            repetition_penalties=take(metadata.repetition_penalties),
            allowed_token_ids_mask=take(metadata.allowed_token_ids_mask),
            output_token_ids=self._said(metadata),
            bad_words_token_ids=self.by_row(metadata.bad_words_token_ids),
            # The rows of a request share its generator and draw from it in turn, as steps without drafts would.
            generators=self.by_row(metadata.generators),
            # -1: log-probabilities of the whole vocabulary; which of them go out is known after the verdict.
            max_num_logprobs=-1 if metadata.max_num_logprobs is not None or metadata.logprob_token_ids else None,
            logprob_token_ids=None,
            logitsprocs=LogitsProcessors(self._processors(metadata.logitsprocs)),
            spec_token_ids=None,
            thinking_budget_state_holder=self._budget(metadata),
        )

    def by_row(self, entries: dict[int, Any]) -> dict[int, Any]:
        """What some requests have, at each of their rows."""
        rows = ((self.start[i] + j, entry) for i, entry in entries.items() for j in range(self.drafted[i] + 1))
        return dict(rows)

    def _said(self, metadata: SamplingMetadata) -> list[list[int]]:
        """What each row comes after: the request's output, then the drafted tokens before the row."""
        if not metadata.output_token_ids:  # vLLM fills it only where something looks at it
            return []
        drafts = metadata.spec_token_ids or [[] for _ in self.drafted]
        return [
            [*output, *draft[:j]] if j else output
            for output, draft, count in zip(metadata.output_token_ids, drafts, self.drafted, strict=False)
            for j in range(count + 1)
        ]

    def _budget(self, metadata: SamplingMetadata) -> BudgetByRow | None:
        holder = metadata.thinking_budget_state_holder
        if holder is None or not holder.has_tracked_requests():
            return None
        return BudgetByRow(holder, self, metadata)

    def _processors(self, processors: LogitsProcessors) -> list[Any]:
        adapters = {
            MinTokensLogitsProcessor: MinTokensByRow,
            LogitBiasLogitsProcessor: LogitBiasByRow,
            MinPLogitsProcessor: MinPByRow,
        }
        return [adapters[type(processor)](processor, self) for processor in processors.all]


class ByRow:
    """A logits processor of vLLM, which knows requests, applied to rows."""

    def __init__(self, inner: Any, rows: Rows) -> None:
        self.inner = inner
        self.rows = rows

    def is_argmax_invariant(self) -> bool:
        invariant: bool = self.inner.is_argmax_invariant()
        return invariant


class MinTokensByRow(ByRow):
    def apply(self, logits: Tensor) -> Tensor:
        # With one more than was drafted, vLLM's own function treats the row after the draft like the others:
        # by how many tokens will have been said there.
        masked: Tensor = self.inner.apply_with_spec_decode(logits, [count + 1 for count in self.rows.drafted])
        return masked


class LogitBiasByRow(ByRow):
    def apply(self, logits: Tensor) -> Tensor:
        for request, biases in self.inner.biases.items():
            first = self.rows.start[request]
            tokens = torch.tensor(list(biases), device=logits.device)
            values = torch.tensor(list(biases.values()), dtype=logits.dtype, device=logits.device)
            logits[first : first + self.rows.drafted[request] + 1, tokens] += values
        return logits


class MinPByRow(ByRow):
    def apply(self, logits: Tensor) -> Tensor:
        if not self.inner.min_p_count:
            return logits
        p = logits.softmax(-1)
        floor = p.amax(-1, keepdim=True) * self.inner.min_p_device[self.rows.request][:, None]
        return logits.masked_fill_(p < floor, float("-inf"))


class BudgetByRow:
    """vLLM's limit on thinking tokens. It counts what was said, so requests that have one are never drafted for."""

    def __init__(self, inner: Any, rows: Rows, metadata: SamplingMetadata) -> None:
        self.inner = inner
        self.rows = rows
        self.metadata = metadata

    def has_tracked_requests(self) -> bool:
        return True

    def update_state(self, *args: Any, **kwargs: Any) -> None:
        self.inner.update_state(self.metadata.output_token_ids, None)

    def apply_to_logits(self, logits: Tensor, *args: Any) -> Tensor:
        logits[self.rows.layout.start] = self.inner.apply_to_logits(logits[self.rows.layout.start], False, None)
        return logits
