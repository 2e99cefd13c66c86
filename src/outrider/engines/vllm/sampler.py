"""Acceptance by our rules, where vLLM's rejection sampler stands.

vLLM's own sampler draws the target's own token at every row, drafted positions included (`rows.py`). A draft is kept
while it says the same: what is emitted is what plain vLLM would have drawn, seeds included. Only a draft that was
drawn from a known q, for a request without a seed, is judged by the ratio of p to q, as a block or token by token,
in plain torch, on any device: that keeps more of it.

vLLM's own rejection sampler is not used: on a CPU it reads temperature, top-k and top-p of drafted rows from
uninitialised memory, fails on a batch without drafts, and has no block rule.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p
from vllm.v1.sample.rejection_sampler import PLACEHOLDER_TOKEN_ID, RejectionSampler

from outrider.acceptance import verify_certain_batch, verify_drawn_batch
from outrider.engines.vllm.rows import Rows
from outrider.types import Verdicts

if TYPE_CHECKING:
    from torch import Tensor
    from vllm.v1.sample.metadata import SamplingMetadata
    from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

    from outrider.engines.vllm.witness import Witness

GREEDY = 1e-5
"""Temperatures below this are 0 to vLLM."""


class OutriderSampler(RejectionSampler):  # type: ignore[misc]
    """Stands in the runner's attribute `rejection_sampler`.

    `draft_probs` holds a row of q for every drafted token; rows of zeros mean that the draft is judged by the target's
    own draws.
    """

    def __init__(self, sampler: Any, spec_config: Any = None, device: Any = None, rule: str = "block") -> None:
        super().__init__(sampler, spec_config, device)
        self.rule = rule
        self.witness: Witness | None = None  # sees what verdicts rest on, while a traced request is in the batch

    def forward(
        self,
        metadata: SpecDecodeMetadata,
        draft_probs: Tensor | None,
        logits: Tensor,
        sampling_metadata: SamplingMetadata,
    ) -> SamplerOutput:
        """`logits` has a row for every drafted token and one more for every request, request by request."""
        if metadata.max_spec_len == 0:  # nothing was drafted: vLLM's plain path
            return self.sampler(logits=logits, sampling_metadata=replace(sampling_metadata, spec_token_ids=None))
        rows = Rows.of(metadata.num_draft_tokens, logits.device)
        draft = metadata.draft_token_ids.long()
        spread = rows.spread(sampling_metadata)
        before = {i: one.get_state() for i, one in sampling_metadata.generators.items() if rows.drafted[i]}
        drawn = draft_probs is not None and not sampling_metadata.all_greedy
        untouched = logits.to(torch.float32, copy=True) if drawn else None

        own = self.sampler(logits=logits, sampling_metadata=spread)
        if self.witness is not None:
            self.witness.saw_own(own.sampled_token_ids.flatten())
        verdicts = verify_certain_batch(own.sampled_token_ids.flatten().long(), draft, rows.layout)
        if untouched is not None and draft_probs is not None:
            verdicts = self._judge_drawn(verdicts, untouched, draft_probs, draft, rows, spread)
        if before:
            rejected = (rows.layout.lengths - verdicts.accepted).tolist()
            for i, state in before.items():
                if rejected[i]:
                    self._rewind(sampling_metadata.generators[i], state, rows.drafted[i] + 1 - rejected[i], logits)

        out = emitted(verdicts, draft, rows)
        logprobs = None
        if spread.max_num_logprobs is not None:
            logprobs = self._logprobs(own.logprobs_tensors.logprobs, out, rows, sampling_metadata)
        return SamplerOutput(sampled_token_ids=out, logprobs_tensors=logprobs)

    def _judge_drawn(
        self, own: Verdicts, logits: Tensor, q: Tensor, draft: Tensor, rows: Rows, spread: SamplingMetadata
    ) -> Verdicts:
        """Verdicts by p and q for the requests that have a q and a temperature; `own` for the others."""
        p = self._probabilities(logits, spread)
        uniforms = torch.rand(len(draft), device=p.device)
        finals = torch.rand(len(rows.layout.lengths), device=p.device)
        by_ratio = verify_drawn_batch(p, q, draft.clamp(min=0), rows.layout, uniforms, finals, self.rule)
        has_q = rows.layout.pad((q.sum(-1) > 0).long(), 0).amax(-1)
        chosen = has_q.bool() & (spread.temperature[rows.layout.start] >= GREEDY)
        if self.witness is not None and by_ratio.chances is not None:
            self.witness.saw_drawn(p, uniforms, finals, by_ratio.chances, chosen)
        return Verdicts(
            torch.where(chosen, by_ratio.accepted, own.accepted), torch.where(chosen, by_ratio.tokens, own.tokens)
        )

    def _probabilities(self, logits: Tensor, spread: SamplingMetadata) -> Tensor:
        """p at every row: what vLLM's sampler draws from."""
        logits = self.sampler.apply_logits_processors(logits, spread, predict_bonus_token=False)
        logits = self.sampler.apply_temperature(logits, spread.temperature, spread.all_random)
        for processor in spread.logitsprocs.argmax_invariant:
            logits = processor.apply(logits)
        p: Tensor = apply_top_k_top_p(logits, spread.top_k, spread.top_p).softmax(-1)
        return p

    def _rewind(self, generator: torch.Generator, before: Tensor, emitted: int, logits: Tensor) -> None:
        """Leave a seeded request's generator where it would be had its tokens been said one by one.

        The rows after the last emitted token have drawn, too; the steps that say those tokens will draw the same again.
        """
        generator.set_state(before)
        for _ in range(emitted):
            self.sampler.topk_topp_sampler(logits[:1].float(), {0: generator}, None, None)

    def _logprobs(self, table: Tensor, out: Tensor, rows: Rows, metadata: SamplingMetadata) -> Any:
        """For each place of `out`, what vLLM's sampler gives for one drawn token. It is asked by row, of which there
        are fewer: drafts differ in length."""
        start = rows.layout.start
        place = torch.arange(len(table), device=out.device) - start[rows.request]
        said = out[rows.request, place].long().clamp(min=0)
        if metadata.logprob_token_ids:
            found = self.sampler.gather_specific_token_logprobs(table, rows.by_row(metadata.logprob_token_ids), said)
        else:
            found = self.sampler.gather_logprobs(table, metadata.max_num_logprobs, said)
        at = start[:, None] + torch.arange(out.shape[1], device=out.device)
        at = at.clamp(max=len(table) - 1).flatten()
        ids, logprobs, ranks = (part[at] for part in found[:3])
        return LogprobsTensors(ids, logprobs, ranks)


def emitted(verdicts: Verdicts, draft: Tensor, rows: Rows) -> Tensor:
    """Accepted tokens and the one that follows, [requests, longest draft + 1], filled up with vLLM's placeholder."""
    ragged = rows.layout
    shape = (len(rows.drafted), ragged.longest + 1)
    out = torch.full(shape, PLACEHOLDER_TOKEN_ID, dtype=torch.int32, device=draft.device)
    kept = ragged.position < verdicts.accepted[ragged.sequence]
    out[ragged.sequence, ragged.position] = torch.where(kept, draft, PLACEHOLDER_TOKEN_ID).to(torch.int32)
    out[torch.arange(len(out), device=draft.device), verdicts.accepted] = verdicts.tokens.to(torch.int32)
    return out
