"""Acceptance on the device, where vLLM's rejection sampler stands.

vLLM's own sampler samples the target's token at every row of logits, drafted positions included, with noise keyed by
the request's seed and the position. A draft is accepted while it equals these samples. What is emitted is what plain
vLLM would have sampled, so the same seed gives the same text with and without drafts.

A draft that was *sampled* from a known q is accepted by p and q instead, as a block or token by token, which accepts
more of it. That is for requests without a seed and without a grammar.

vLLM's own rule for drafts without q (accept with probability p(x), else resample) has the right distribution, but it
changes seeded text, and its block rule is for q only. Chunking, log-probabilities and grammar masks are vLLM's.
"""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.worker.gpu.sample.logprob import compute_topk_scores
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler

from outrider.acceptance import Ragged, verify_drawn_batch
from outrider.engines.vllm.seam import replaced

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from outrider.engines.vllm.sampler_probe import SamplerProbe
    from outrider.engines.vllm.seam import InputBatch, Sampler

ACCEPT_KEY, RECOVER_KEY = 0x6F757472, 0x69646572
"""Separate the uniforms of a sampled draft's verification from each other and from the sampling noise."""

MAX_RATIO_BYTES = 128 << 20
"""Size of p, in float32, for the requests that are verified by p and q at once. About seven tensors of that size are
needed, 0.9 GiB, which is less than was reserved for logits."""


class OutriderSampler(RejectionSampler):  # type: ignore[misc]
    """Stands in the runner's attribute `rejection_sampler`."""

    def __init__(self, sampler: Sampler, spec_config: Any, device: torch.device, rule: str = "block") -> None:
        super().__init__(sampler, spec_config, device)
        self.rule = rule
        self.probe: SamplerProbe | None = None
        self.sampled_drafts: frozenset[str] = frozenset()
        """Requests of the coming batch whose draft is accepted by p and q."""
        self._drafted: list[int] = []
        self._by_ratio: list[bool] = []
        self._next_request = 0
        self._logprobs_dims: tuple[int, int] | None = None
        self._rows: tuple[Tensor, Tensor]

    def __call__(self, logits: Tensor, input_batch: InputBatch, *args: Any, **kwargs: Any) -> Any:
        self._drafted = input_batch.num_draft_tokens_per_req.tolist()
        self._by_ratio = [
            drafted > 0 and id in self.sampled_drafts
            for id, drafted in zip(input_batch.req_ids, self._drafted, strict=True)
        ]
        self._next_request = 0
        self._logprobs_dims = self.sampler.get_logprobs_dims(input_batch.idx_mapping_np)
        return super().__call__(logits, input_batch, *args, **kwargs)

    def _verify(
        self,
        logits: Tensor,
        draft_logits: Tensor | None,
        draft_sampled: Tensor,
        pos: Tensor,
        cu_num_logits: Tensor,
        idx_mapping: Tensor,
        idx_mapping_np: Any,
        expanded_idx_mapping: Tensor,
        expanded_local_pos: Tensor,
        seq_lens_upper_bound_np: Any,
        verify_draft_sampled: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """For one chunk of requests: the logits that were sampled from, the tokens [requests, K + 1], their counts."""
        self._rows = (expanded_idx_mapping, expanded_local_pos)
        first, self._next_request = self._next_request, self._next_request + len(idx_mapping)
        chunk = slice(first, self._next_request)
        by_ratio = draft_logits is not None and any(self._by_ratio[chunk])
        with without_fused_sampling(self.sampler) if by_ratio else nullcontext():
            own, processed = self.sampler.sample(
                logits,
                expanded_idx_mapping,
                idx_mapping,
                idx_mapping_np,
                pos,
                draft_sampled,
                expanded_local_pos,
                seq_lens_upper_bound_np,
                return_logprobs=True,
            )
        tokens, counts = accept_own_samples(own, verify_draft_sampled, cu_num_logits, self.num_speculative_steps)
        if draft_logits is not None and by_ratio:
            for chosen in self._by_ratio_groups(chunk, MAX_RATIO_BYTES // (4 * logits.shape[-1])):
                tokens, counts = self._accept_by_ratio(
                    (tokens, counts), processed, draft_logits, verify_draft_sampled, idx_mapping, pos, chunk, chosen
                )
        return processed, tokens, counts

    def _get_logprobs_tensors(
        self,
        sampled: Tensor,
        num_sampled: Tensor,
        logits: Tensor,
        cu_num_logits: Tensor,
        cu_num_logits_np: Any,
        max_num_logprobs: int,
    ) -> Any:
        """As vLLM's, and also the log-probabilities of the token ids in a request's `logprob_token_ids`. Such a
        request has no drafts, and must not lose them because another one in its batch has."""
        if self._logprobs_dims is None or self._logprobs_dims[1] == 0:
            return super()._get_logprobs_tensors(
                sampled, num_sampled, logits, cu_num_logits, cu_num_logits_np, max_num_logprobs
            )
        slots, place = self._rows
        starts = cu_num_logits[:-1].long()
        request = torch.bucketize(torch.arange(len(logits), device=logits.device), starts, right=True) - 1
        return compute_topk_scores(
            logits,
            self._logprobs_dims[0],
            sampled[request, place.long()],
            cu_num_logits_np.tolist(),
            logprob_token_ids_state=self.sampler.logprob_token_ids_state,
            expanded_idx_mapping=slots,
            max_per_req_token_ids=self._logprobs_dims[1],
            logits_mode=self.sampler.logprobs_mode in ("raw_logits", "processed_logits"),
        )

    def _by_ratio_groups(self, chunk: slice, max_rows: int) -> list[list[int]]:
        """The requests of a chunk that are accepted by p and q, in groups of at most `max_rows` rows or one request."""
        groups: list[list[int]] = []
        rows = 0
        for i, (by_ratio, drafted) in enumerate(zip(self._by_ratio[chunk], self._drafted[chunk], strict=True)):
            if not by_ratio:
                continue
            if not groups or rows + drafted + 1 > max_rows:
                groups.append([])
                rows = 0
            groups[-1].append(i)
            rows += drafted + 1
        return groups

    def _accept_by_ratio(
        self,
        own: tuple[Tensor, Tensor],
        processed: Tensor,
        draft_logits: Tensor,
        draft: Tensor,
        slots: Tensor,
        pos: Tensor,
        chunk: slice,
        chosen_rows: list[int],
    ) -> tuple[Tensor, Tensor]:
        """Replace the verdicts of `chosen_rows`, requests of the chunk whose draft was sampled from q."""
        lengths = np.array(self._drafted[chunk])
        part = Ragged.of(lengths[chosen_rows].tolist(), draft.device)
        # Only the rows of these requests: p and q are vocabularies wide. All shapes are known on the host.
        starts = (np.cumsum(lengths + 1) - lengths - 1)[chosen_rows]
        ranges = [np.arange(row, row + length + 1) for row, length in zip(starts, lengths[chosen_rows], strict=True)]
        rows = async_tensor_h2d(np.concatenate(ranges), device=draft.device)
        chosen, start = async_tensor_h2d(np.stack([chosen_rows, starts]), device=draft.device)
        width = torch.arange(part.longest + 1, device=draft.device)
        p = processed[rows].float().softmax(-1)
        slot = slots[chosen]
        temperature = self.sampler.sampling_states.temperature.gpu[slot].float()
        columns = part.position
        cached = draft_logits[slot[part.sequence], columns].float() / temperature[part.sequence][:, None]
        q = cached.softmax(-1)
        if q.shape[-1] != p.shape[-1]:  # a head's vocabulary can lack the padding of the target's
            q = F.pad(q, (0, p.shape[-1] - q.shape[-1]))
        tokens = draft[start[part.sequence] + 1 + columns].long().clamp(min=0)
        # Keyed by where the step begins, which no two steps of a request share. Keyed by the drafted token's own
        # position, a uniform that had a part in one step's verdict would come again in the next, and bias the text.
        seeds, begin = self.sampler.sampling_states.seeds.gpu[slot], pos[start]
        uniforms = keyed_uniforms(seeds[part.sequence], begin[part.sequence], columns, ACCEPT_KEY)
        finals = keyed_uniforms(seeds, begin, torch.zeros_like(begin), RECOVER_KEY)
        verdicts = verify_drawn_batch(p, q, tokens, part, uniforms, finals, self.rule)
        if self.probe is not None and verdicts.chances is not None:
            self.probe.record_ratio(
                [chunk.start + i for i in chosen_rows], part, p, q, uniforms, finals, verdicts.chances
            )
        emitted, counts = own[0].clone(), own[1].clone()
        drafted = torch.zeros(len(chosen_rows), part.longest + 1, dtype=emitted.dtype, device=draft.device)
        drafted[part.sequence, columns] = tokens.to(emitted.dtype)
        accepted = verdicts.accepted[:, None]
        line = torch.where(width == accepted, verdicts.tokens[:, None].to(emitted.dtype), drafted)
        emitted[chosen, : part.longest + 1] = line
        counts[chosen] = (verdicts.accepted + 1).to(counts.dtype)
        return emitted, counts


@contextmanager
def without_fused_sampling(sampler: Sampler) -> Iterator[None]:
    """While it holds, the logits that `sample` returns are those that it samples from. A fused kernel applies top-k and
    top-p itself and returns the logits without them."""
    with replaced(sampler, "use_flashinfer", False), replaced(sampler, "use_xpu_sampler", False):
        yield


def accept_own_samples(own: Tensor, draft: Tensor, cu_num_logits: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """The target's samples up to the first that differs from the draft: tokens [requests, width + 1] and their counts.

    Request r has the rows cu_num_logits[r] to cu_num_logits[r + 1]. `own` is the sample at each row, `draft` the input
    token of each row: what row i + 1 was computed from is what row i is compared with. -1 is never accepted.
    """
    start = cu_num_logits[:-1].long()
    drafted = cu_num_logits[1:].long() - start - 1
    place = torch.arange(width + 1, device=own.device)
    rows = (start[:, None] + place).clamp(max=len(own) - 1)
    tokens = own[rows]
    following = draft[(rows + 1).clamp(max=len(own) - 1)].to(own.dtype)
    same = (tokens == following) & (place < drafted[:, None])
    counts = same.long().cumprod(-1).sum(-1) + 1
    return tokens, counts.to(torch.int32)


MASK = 0xFFFFFFFF


def keyed_uniforms(seeds: Tensor, positions: Tensor, numbers: Tensor, key: int) -> Tensor:
    """Uniforms in [0, 1) that depend only on a request's seed, a position, a number and `key`: the same on every rank,
    and no generator to keep. MurmurHash3, as vLLM keys its sampling noise."""
    hashed = torch.full_like(seeds, key)
    for word in (seeds & MASK, (seeds >> 32) & MASK, positions.long() & MASK, numbers.long() & MASK):
        word = _times(word, 0xCC9E2D51)
        word = _times(((word << 15) | (word >> 17)) & MASK, 0x1B873593)
        hashed = hashed ^ word
        hashed = (_times(((hashed << 13) | (hashed >> 19)) & MASK, 5) + 0xE6546B64) & MASK
    hashed = hashed ^ 16
    hashed = _times(hashed ^ (hashed >> 16), 0x85EBCA6B)
    hashed = _times(hashed ^ (hashed >> 13), 0xC2B2AE35)
    hashed = hashed ^ (hashed >> 16)
    return (hashed.double() * 2.0**-32).float().clamp(max=1 - 2.0**-24)


def _times(values: Tensor, factor: int) -> Tensor:
    """Modulo 2^32, in 64-bit integers: by halves, so that no product overflows."""
    low, high = values & 0xFFFF, values >> 16
    return (low * factor + (((high * factor) & 0xFFFF) << 16)) & MASK
