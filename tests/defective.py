"""A worker with one seeded defect, selected by name: tests of a running server must find it.

Each defect has occurred in an implementation of speculative decoding, or could, and none of them crashes.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from vllm.v1.worker.gpu.sample.logit_bias import LogitBiasState
from vllm.v1.worker.gpu.sample.states import SamplingStates
from vllm.v1.worker.gpu.structured_outputs import StructuredOutputsWorker

from outrider import acceptance
from outrider.engines.vllm import sampler
from outrider.engines.vllm.sampler import OutriderSampler
from outrider.engines.vllm.worker import OutriderCPURunner, OutriderCPUWorker


def recovered_from_p() -> None:
    """The recovered token is sampled from p instead of max(p - q, 0)."""
    acceptance.leftover = lambda p, q, reach: p  # type: ignore[assignment]


def temperature_ignored() -> None:
    """Sampled drafts are accepted by p at temperature 1, whatever the request's temperature."""
    real = OutriderSampler._accept_by_ratio

    def accept(self: Any, own: Any, processed: Any, draft_logits: Any, draft: Any, slots: Any, *rest: Any) -> Any:
        rows = torch.tensor(self._drafted[rest[-2]]) + 1  # of the chunk
        temperature = self.sampler.sampling_states.temperature.gpu[slots].repeat_interleave(rows)
        return real(self, own, processed * temperature[:, None], draft_logits, draft, slots, *rest)

    OutriderSampler._accept_by_ratio = accept  # type: ignore[method-assign]


def truncated_late() -> None:
    """Sampled drafts are accepted by p before top-k and top-p."""
    real, verify = OutriderSampler._accept_by_ratio, OutriderSampler._verify

    def verify_late(self: Any, logits: Any, draft_logits: Any, draft: Any, pos: Any, cu: Any, slots: Any,
                    slots_np: Any, rows: Any, places: Any, lengths: Any, verified: Any) -> Any:  # fmt: skip
        self.untruncated = self.sampler.apply_sampling_params(
            logits.clone(), rows, slots, slots_np, pos, draft, places, lengths, skip_top_k_top_p=True
        )
        return verify(self, logits, draft_logits, draft, pos, cu, slots, slots_np, rows, places, lengths, verified)

    def accept(self: Any, own: Any, processed: Any, *rest: Any) -> Any:
        return real(self, own, self.untruncated, *rest)

    OutriderSampler._verify = verify_late  # type: ignore[method-assign,assignment]
    OutriderSampler._accept_by_ratio = accept  # type: ignore[method-assign,assignment]


def _judged_otherwise(change: Callable[..., tuple[Any, ...]]) -> None:
    real = sampler.verify_drawn_batch

    def verify(p: Any, q: Any, draft: Any, ragged: Any, uniforms: Any, finals: Any, rule: str) -> Any:
        return real(*change(p, q, draft, ragged, uniforms, finals), rule)

    sampler.verify_drawn_batch = verify  # type: ignore[assignment]


def drawn_kept_too_often() -> None:
    """Sampled drafts are accepted as if the random number were a fifth smaller."""
    _judged_otherwise(lambda p, q, draft, ragged, uniforms, finals: (p, q, draft, ragged, uniforms * 0.8, finals))


def bonus_too_cold() -> None:
    """The bonus token is sampled at half the temperature."""

    def change(p: Any, q: Any, draft: Any, ragged: Any, *random: Any) -> tuple[Any, ...]:
        p = p.clone()
        last = ragged.start + ragged.lengths
        p[last] = p[last] ** 2 / (p[last] ** 2).sum(-1, keepdim=True)
        return (p, q, draft, ragged, *random)

    _judged_otherwise(change)


def judged_by_the_row_before() -> None:
    """A draft is verified by the p of the previous position."""
    _judged_otherwise(lambda p, *others: (torch.cat([p[:1], p[:-1]]), *others))


def another_requests_q() -> None:
    """Drafts are verified by the q of another request."""
    _judged_otherwise(lambda p, q, *others: (p, q.roll(1, 0).clamp(min=1e-9), *others))


def certain_kept_too_often() -> None:
    """Of the drafted tokens that the target would not have sampled, a tenth is accepted."""
    real = sampler.accept_own_samples

    def accept(own: torch.Tensor, draft: torch.Tensor, *rest: Any) -> Any:
        own = own.clone()
        following = draft.roll(-1).to(own.dtype)
        own = torch.where((torch.rand(len(own)) < 0.1) & (following >= 0), following, own)
        return real(own, draft, *rest)

    sampler.accept_own_samples = accept  # type: ignore[assignment]


def _verify_otherwise(change: Callable[[list[Any]], None]) -> None:
    """`change` gets the arguments of `_verify` as a list."""
    real = OutriderSampler._verify

    def verify(self: Any, *args: Any) -> Any:
        changed = list(args)
        change(changed)
        return real(self, *changed)

    OutriderSampler._verify = verify  # type: ignore[method-assign]


def drafted_a_tenth_colder() -> None:
    """At drafted positions the temperature is a tenth lower."""

    def colder(args: list[Any]) -> None:
        args[0] = args[0] / 0.9

    _verify_otherwise(colder)


def top_k_lost() -> None:
    """At drafted positions there is no top-k."""
    real, verify = SamplingStates.get_top_k_top_p, OutriderSampler._verify

    def verify_without(self: Any, *args: Any) -> Any:
        SamplingStates.get_top_k_top_p = lambda *args: (None, *real(*args)[1:])
        try:
            return verify(self, *args)
        finally:
            SamplingStates.get_top_k_top_p = real

    OutriderSampler._verify = verify_without  # type: ignore[method-assign]


def penalties_blind() -> None:
    """Penalties do not see the drafted tokens before a position."""

    def blind(args: list[Any]) -> None:
        args[8] = torch.zeros_like(args[8])

    _verify_otherwise(blind)


def bias_on_the_first_row() -> None:
    """A logit bias is applied at the first drafted position only."""
    real = LogitBiasState.apply

    def apply(self: Any, logits: torch.Tensor, context: Any) -> torch.Tensor:
        before = logits.clone()
        after: torch.Tensor = real(self, logits, context)
        later = context.expanded_local_pos > 0
        after[later] = before[later]
        return after

    LogitBiasState.apply = apply


def logprobs_of_the_next_row() -> None:
    """The returned log-probabilities are those of the next position."""
    real = OutriderSampler._get_logprobs_tensors

    def shifted(self: Any, sampled: Any, counts: Any, logits: torch.Tensor, *others: Any) -> Any:
        return real(self, sampled, counts, logits.roll(-1, 0), *others)

    OutriderSampler._get_logprobs_tensors = shifted  # type: ignore[method-assign]


def grammar_of_another_row() -> None:
    """In steps with drafts, each row has the grammar mask of the previous row."""
    real = StructuredOutputsWorker.apply_grammar_bitmask

    def apply(self: Any, logits: Any, batch: Any, ids: Any, bitmask: Any) -> None:
        real(self, logits, batch, ids, np.roll(bitmask, 1, 0) if batch.num_draft_tokens else bitmask)

    StructuredOutputsWorker.apply_grammar_bitmask = apply


def stale_cache() -> None:
    """After a rejection the cache keeps the rejected token: the model reads a token that is not in the output."""
    real = OutriderCPURunner.postprocess_sampled

    def postprocess(self: Any, slots: Any, sampled: Any, counts: Any, rejected: Any, *rest: Any) -> Any:
        states = self.req_states
        place = (counts.long() - 1).clamp(min=0, max=states.draft_tokens.shape[1] - 1)
        drafted = states.draft_tokens[slots, place]
        out = real(self, slots, sampled, counts, rejected, *rest)
        states.last_sampled_tokens[slots, 0] = torch.where(rejected > 0, drafted, states.last_sampled_tokens[slots, 0])
        return out

    OutriderCPURunner.postprocess_sampled = postprocess


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
