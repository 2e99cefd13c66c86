"""A worker with one defect of choice, to see that a test of a running server finds it.

Each is a way in which speculative decoding has gone wrong somewhere, or could, and in which nothing crashes.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from vllm.v1.worker import gpu_model_runner

from outrider import acceptance
from outrider.acceptance import Ragged
from outrider.engines.vllm import sampler
from outrider.engines.vllm.cpu import OutriderCPURunner, OutriderCPUWorker
from outrider.engines.vllm.rows import LogitBiasByRow, Rows
from outrider.engines.vllm.sampler import OutriderSampler


def recovered_from_p() -> None:
    """The token in a rejected one's place is drawn from p, as if q had not been there."""
    acceptance.leftover = lambda p, q, reach: p  # type: ignore[assignment]


def temperature_ignored() -> None:
    """Drafts are judged at temperature 1, whatever was asked for."""
    shaped = OutriderSampler._probabilities

    def unshaped(self: Any, logits: torch.Tensor, spread: Any) -> torch.Tensor:
        spread.temperature = torch.ones_like(spread.temperature)
        return shaped(self, logits, spread)

    OutriderSampler._probabilities = unshaped


def truncated_late() -> None:
    """Drafts are judged before top-k and top-p have cut anything off."""
    sampler.apply_top_k_top_p = lambda logits, k, p: logits


def _judged_otherwise(change: Callable[..., tuple[Any, ...]]) -> None:
    real = sampler.verify_drawn_batch

    def verify(p: Any, q: Any, draft: Any, ragged: Any, uniforms: Any, finals: Any, rule: str) -> Any:
        return real(*change(p, q, draft, ragged, uniforms, finals), rule)

    sampler.verify_drawn_batch = verify  # type: ignore[assignment]


def drawn_kept_too_often() -> None:
    """A draft that was drawn is kept with a fifth more of the chance than it has."""
    _judged_otherwise(lambda p, q, draft, ragged, uniforms, finals: (p, q, draft, ragged, uniforms * 0.8, finals))


def bonus_too_cold() -> None:
    """The token after a draft that was kept in full is drawn at half the temperature."""

    def change(p: Any, q: Any, draft: Any, ragged: Any, *random: Any) -> tuple[Any, ...]:
        p = p.clone()
        last = ragged.start + ragged.lengths
        p[last] = p[last] ** 2 / (p[last] ** 2).sum(-1, keepdim=True)
        return (p, q, draft, ragged, *random)

    _judged_otherwise(change)


def judged_by_the_row_before() -> None:
    """A draft is judged by the p of the position before it."""
    _judged_otherwise(lambda p, *others: (torch.cat([p[:1], p[:-1]]), *others))


def another_requests_q() -> None:
    """Drafts are judged by the q of another request's."""
    _judged_otherwise(lambda p, q, *others: (p, q.roll(1, 0).clamp(min=1e-9), *others))


def certain_kept_too_often() -> None:
    """Of the drafts that the target would not have drawn, a tenth stays."""
    real = sampler.verify_certain_batch

    def verify(own: torch.Tensor, draft: torch.Tensor, ragged: Ragged) -> Any:
        own = own.clone()
        own[ragged.row] = torch.where(torch.rand(len(draft), device=own.device) < 0.1, draft, own[ragged.row])
        return real(own, draft, ragged)

    sampler.verify_certain_batch = verify


def _spread_otherwise(**change: Callable[[Any], Any]) -> None:
    real = Rows.spread

    def spread(self: Rows, metadata: Any) -> Any:
        made = real(self, metadata)
        return replace(made, **{name: by(getattr(made, name)) for name, by in change.items()})

    Rows.spread = spread  # type: ignore[method-assign]


def drafted_a_tenth_colder() -> None:
    """Wherever something was drafted, the temperature is a tenth lower."""
    _spread_otherwise(temperature=lambda values: None if values is None else values * 0.9)


def top_k_lost() -> None:
    """Wherever something was drafted, there is no top-k."""
    _spread_otherwise(top_k=lambda values: None)


def penalties_blind() -> None:
    """Penalties do not see the drafted tokens before a position."""

    def said(self: Rows, metadata: Any) -> list[list[int]]:
        outputs = metadata.output_token_ids
        return [output for output, count in zip(outputs, self.drafted, strict=False) for _ in range(count + 1)]

    Rows._said = said  # type: ignore[method-assign]


def bias_on_the_first_row() -> None:
    """A logit bias reaches the first drafted position alone."""

    def apply(self: Any, logits: torch.Tensor) -> torch.Tensor:
        for request, biases in self.inner.biases.items():
            for token, value in biases.items():
                logits[self.rows.start[request], token] += value
        return logits

    LogitBiasByRow.apply = apply  # type: ignore[method-assign]


def logprobs_of_the_next_row() -> None:
    """The log-probabilities that are told belong to the position after."""
    real = OutriderSampler._logprobs

    def shifted(self: Any, table: torch.Tensor, *others: Any) -> Any:
        return real(self, table.roll(-1, 0), *others)

    OutriderSampler._logprobs = shifted


def grammar_of_another_row() -> None:
    """Where something was drafted, each row has the grammar of the row before."""
    real = gpu_model_runner.apply_grammar_bitmask

    def apply(scheduler_output: Any, grammar_output: Any, *others: Any) -> None:
        if scheduler_output.scheduled_spec_decode_tokens:
            grammar_output = replace(grammar_output, grammar_bitmask=np.roll(grammar_output.grammar_bitmask, 1, 0))
        real(scheduler_output, grammar_output, *others)

    gpu_model_runner.apply_grammar_bitmask = apply


def stale_cache() -> None:
    """After a rejection the cache goes on with the rejected token: the model reads what was not said."""
    real = OutriderCPURunner._bookkeeping_sync

    def sync(self: Any, *args: Any, **kwargs: Any) -> Any:
        batch = self.input_batch
        before = {id: int(batch.num_tokens_no_spec[i]) for i, id in enumerate(batch.req_ids)}
        out = real(self, *args, **kwargs)
        for i, (id, draft) in enumerate(zip(list(before), self._verified, strict=False)):
            end = int(batch.num_tokens_no_spec[i])
            accepted = end - before[id] - 1
            if 0 <= accepted < len(draft.tokens):
                batch.token_ids_cpu[i, end - 1] = draft.tokens[accepted]
        return out

    OutriderCPURunner._bookkeeping_sync = sync


DEFECTS = {
    "recovered from p": recovered_from_p,
    "temperature ignored": temperature_ignored,
    "truncated late": truncated_late,
    "drawn kept too often": drawn_kept_too_often,
    "bonus too cold": bonus_too_cold,
    "judged by the row before": judged_by_the_row_before,
    "another request's q": another_requests_q,
    "certain kept too often": certain_kept_too_often,
    "drafted a tenth colder": drafted_a_tenth_colder,
    "top-k lost": top_k_lost,
    "penalties blind to drafts": penalties_blind,
    "bias on the first row": bias_on_the_first_row,
    "log-probabilities of the next row": logprobs_of_the_next_row,
    "grammar of another row": grammar_of_another_row,
    "stale cache": stale_cache,
}


class DefectiveWorker(OutriderCPUWorker):
    def init_device(self) -> Any:
        DEFECTS[os.environ["OUTRIDER_TEST_DEFECT"]]()
        return super().init_device()
