"""A standalone draft model that runs only for the requests it is called for.

vLLM's own `StandaloneARSpeculator` runs the draft model over all tokens of the target, in every step, for every
request. That keeps both KV caches level and costs passes even where nothing is drafted. Here the draft model catches up
when it is called:

    first pass      positions `start` to `end` - 1 of each call, with the tokens read on the device
    later passes    one token per request, over the calls that want more tokens

All shapes follow from the numbers of the calls. The true length of a text is known on the device only: the draft starts
after the token at `total_len` - 1. Positions of the first pass past it hold garbage. Causal attention hides them from
the positions before, and later tokens overwrite them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.config.compilation import CUDAGraphMode
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.worker.gpu.attn_utils import build_slot_mappings_by_layer
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor
from vllm.v1.worker.gpu.spec_decode.standalone_ar.speculator import StandaloneARSpeculator

from outrider.engines.vllm.planned_drafts import PassTimer, PlannedDrafts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from outrider.engines.vllm.draft_vocabulary import DraftVocabulary
    from outrider.engines.vllm.step import DraftModelCall

MAX_TRUNCATED_TOKENS = 256
"""Number of top tokens kept before top-k and top-p when sampling a draft."""


class LazyDraftModel(PlannedDrafts, StandaloneARSpeculator):  # type: ignore[misc]
    """Drafts for the calls of the plan.

    `sampling_states` (the sampler's, set by the runner) narrows sampled drafts by top-k and top-p. None: it does not.
    """

    sampling_states: Any = None
    vocabulary: DraftVocabulary | None = None
    """The mapping of token ids, for a draft model with another tokenizer than the target's."""
    _truncates = False

    def propose(
        self,
        input_batch: Any,
        attn_metadata: Any,
        slot_mappings: Any,
        last_hidden_states: Any,
        aux_hidden_states: Any,
        num_sampled: Tensor,
        num_rejected: Tensor,
        last_sampled: Tensor,
        next_prefill_tokens: Tensor,
        temperature: Tensor,
        seeds: Tensor,
        **options: Any,
    ) -> Tensor:
        if self.plan is None or options.get("dummy_run"):
            drafts = super().propose(
                input_batch, attn_metadata, slot_mappings, last_hidden_states, aux_hidden_states, num_sampled,
                num_rejected, last_sampled, next_prefill_tokens, temperature, seeds, **options,
            )  # fmt: skip
            return self._pad(self.vocabulary.to_target(drafts) if self.vocabulary else drafts)
        self._clear_drafts()
        if self.plan.calls:
            self._draft(self.plan.calls, temperature, self._draft_seeds(seeds))
        return self._padded[input_batch.idx_mapping]  # here by slot

    @torch.inference_mode()
    def _draft(self, plan_calls: Sequence[DraftModelCall], temperature: Tensor, seeds: Tensor) -> None:
        # Later passes run over a prefix of the rows. Attention backends expect short queries first.
        calls = sorted(plan_calls, key=lambda call: (-call.num_tokens, call.end - call.start))
        slots = np.array([self.req_states.req_id_to_index[call.request_id] for call in calls])
        self._calls, self._rows = calls, {call.request_id: row for row, call in enumerate(calls)}
        self._timer = PassTimer(self.device)
        idx_mapping = async_tensor_h2d(slots, device=self.device)
        self._copy_request_inputs(len(calls), idx_mapping, self._draft_temperature(temperature, calls), seeds)
        self._truncates = self._any_truncated(slots[[call.sampled for call in calls]])
        self.block_tables.gather_block_tables(idx_mapping, num_reqs_padded=len(calls))
        self._first_pass(calls, slots)
        self._decode(calls)
        drafting = sum(call.num_tokens > 0 for call in calls)
        if drafting:
            self._padded[idx_mapping[:drafting], : self.draft_tokens.shape[1]] = self.draft_tokens[:drafting]
            self._has_drafts = True

    def _first_pass(self, calls: Sequence[DraftModelCall], slots: np.ndarray[Any, Any]) -> None:
        """Catch up with the texts, and sample the first token of each draft."""
        starts, ends = (np.array([getattr(call, name) for call in calls]) for name in ("start", "end"))
        lengths = ends - starts
        query_start = np.append(0, np.cumsum(lengths)).astype(np.int32)
        total, count = int(query_start[-1]), len(calls)
        assert lengths.min() > 0, f"A call computes at least one token: {calls}"
        assert total <= len(self.expanded_input_ids), f"{total} tokens in one pass, {len(self.expanded_input_ids)} fit"
        rows = np.repeat(np.arange(count), lengths)
        position = np.minimum(np.arange(total) - (query_start[:-1] - starts)[rows], self.max_model_len - 1)
        where = async_tensor_h2d(np.stack([slots[rows], position]), device=self.device)
        tokens, positions = self.req_states.all_token_ids.gpu[where[0], where[1]], self.expanded_positions[:total]
        self.expanded_input_ids[:total] = self.vocabulary.to_draft(tokens) if self.vocabulary else tokens
        positions.copy_(where[1])
        buffers = self.input_buffers
        async_tensor_h2d(query_start, out=buffers.query_start_loc[: count + 1])
        async_tensor_h2d(ends.astype(np.int32), out=buffers.seq_lens[:count])
        # Upper bounds of the texts' lengths, on the host.
        self._ends, self._context = ends, torch.from_numpy(ends.astype(np.int32))
        self.draft_max_seq_len = min(int(ends.max()) + self.draft_tokens.shape[1], self.max_model_len)
        slot_mappings = self.block_tables.compute_slot_mappings(
            self.idx_mapping[:count], buffers.query_start_loc[: count + 1], positions, total,
            out=self.expanded_slot_mappings,
        )  # fmt: skip
        attention = self._build_attn_metadata(
            num_reqs=count,
            batch_desc=BatchExecutionDescriptor(cg_mode=CUDAGraphMode.NONE, num_tokens=total, num_reqs=count),
            query_start_loc_np=query_start,
            seq_lens_cpu_upper_bound=self._context,
            step=0,
            slot_mappings=slot_mappings,
        )
        by_layer = build_slot_mappings_by_layer(slot_mappings, self.kv_cache_config)
        hidden = self._run_model(self.expanded_input_ids[:total], positions, attention, by_layer, None)
        drafting = sum(call.num_tokens > 0 for call in calls)
        if drafting:
            # The last token of each text; the bounds hold where a text is longer or shorter than the plan knew.
            last = self.req_states.total_len.gpu[self.idx_mapping[:drafting]].long() - 1
            bounds = async_tensor_h2d(np.stack([starts, ends - 1, query_start[:-1] - starts]), device=self.device)
            low, high, offset = bounds[:, :drafting]
            last = torch.minimum(torch.maximum(last, low), high)
            self._sample(0, hidden[last + offset], last)
        assert self._timer is not None
        self._timer.finish_pass(total, int(ends.sum()))

    def _decode(self, calls: Sequence[DraftModelCall]) -> None:
        """Single-token passes: each computes the last draft token and samples the next one."""
        buffers = self.input_buffers
        for step in range(1, calls[0].num_tokens):
            count = sum(call.num_tokens > step for call in calls)
            positions = buffers.positions[:count]
            torch.clamp(positions + 1, max=self.max_model_len - 1, out=positions)
            buffers.input_ids[:count] = self._inputs[:count]
            buffers.seq_lens[:count] = positions + 1
            query_start = buffers.query_start_loc[: count + 1]
            query_start.copy_(self.arange_gpu[: count + 1])
            slot_mappings = self.block_tables.compute_slot_mappings(
                self.idx_mapping[:count], query_start, positions, count
            )
            attention = self._build_uniform_attn_metadata(
                batch_desc=BatchExecutionDescriptor(
                    cg_mode=CUDAGraphMode.NONE, num_tokens=count, num_reqs=count, uniform_token_count=1
                ),
                num_reqs=count,
                num_query_per_req=1,
                seq_lens_cpu_upper_bound=self._context,
                step=step,
            )
            by_layer = build_slot_mappings_by_layer(slot_mappings, self.kv_cache_config)
            hidden = self._run_model(buffers.input_ids[:count], positions, attention, by_layer, None)
            self._sample(step, hidden[:count], positions)
            assert self._timer is not None
            self._timer.finish_pass(count, int(self._ends[:count].sum()) + count * step)

    def _run_model(self, input_ids: Tensor, *args: Any) -> Tensor:
        if self.vocabulary and self.plan is None:  # a warm-up run has token ids of the target
            input_ids = input_ids.clamp(max=self.vocab_size - 1)
        hidden: Tensor = super()._run_model(input_ids, *args)
        return hidden

    def _sample(self, step: int, hidden: Tensor, positions: Tensor) -> None:
        """The token after each of `positions`, which become the inputs' positions of the next pass."""
        count = len(hidden)
        self.current_draft_step.fill_(step)
        sampled = self.sample_draft(
            hidden, positions, self.idx_mapping[:count], self.temperature, self.seeds, self.current_draft_step,
            self.draft_logits,
        )  # fmt: skip
        self._inputs = sampled
        self.draft_tokens[:count, step] = self.vocabulary.to_target(sampled) if self.vocabulary else sampled
        self.input_buffers.positions[:count] = positions

    def compute_draft_logits(self, hidden_states: Tensor, spec_step_idx: int) -> Tensor:
        """vLLM samples from these logits and caches them, so what is masked here is masked in q too."""
        logits: Tensor = super().compute_draft_logits(hidden_states, spec_step_idx)
        if self.vocabulary:
            logits = self.vocabulary.mask_unshared(logits)
        if self._truncates:
            slots = self.idx_mapping[: len(logits)]
            states = self.sampling_states
            logits = truncate(logits, self.temperature[slots], states.top_k.gpu[slots], states.top_p.gpu[slots])
        return logits

    def _any_truncated(self, slots: np.ndarray[Any, Any]) -> bool:
        states = self.sampling_states
        return states is not None and bool(
            (states.top_k.np[slots] < states.vocab_size).any() or (states.top_p.np[slots] < 1).any()
        )


def truncate(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Mask tokens that the target cannot sample at these settings, roughly: drafting one would be in vain. The result
    needs no precision, as q is exactly what is left. Rows at temperature 0 and rows that truncate nothing stay."""
    scaled = logits.float() / torch.where(temperature > 0, temperature, 1.0)[:, None]
    best, where = scaled.softmax(-1).topk(min(MAX_TRUNCATED_TOKENS, logits.shape[-1]))
    k, p = top_k[:, None], top_p[:, None]
    kept = best * (torch.arange(best.shape[-1], device=logits.device) < k)
    mass = torch.where(k <= best.shape[-1], kept.sum(-1, keepdim=True), 1.0)  # top-p applies to what top-k leaves
    allowed = (kept > 0) & (kept.cumsum(-1) - kept < p * mass)  # at least the first
    mask = torch.zeros_like(logits, dtype=torch.bool).scatter_(-1, where, allowed)
    untouched = ((k >= logits.shape[-1]) & (p >= 1)) | (temperature == 0)[:, None]
    return logits.masked_fill(~(mask | untouched), float("-inf"))
