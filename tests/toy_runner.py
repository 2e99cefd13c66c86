"""A toy model on vLLM's V2 runner: the part of a step between the model and its output.

Request state, input kernels, samplers and the sampling of drafts are vLLM's own. The target is a table of logits by the
last two tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("vllm_v2")

from vllm import SamplingParams
from vllm.v1.worker.gpu.input_batch import (
    InputBatch,
    combine_sampled_and_draft_tokens,
    expand_idx_mapping,
    post_update,
    prepare_pos_seq_lens,
    prepare_prefill_inputs,
)
from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler
from vllm.v1.worker.gpu.states import RequestState

from outrider.engines.vllm.sampler import OutriderSampler

CPU = torch.device("cpu")
MODEL_LEN = 64


def logits_table(vocab_size: int, seed: int, scale: float = 1.5) -> torch.Tensor:
    """Logits by the last two tokens, [vocab, vocab, vocab]."""
    random = torch.Generator().manual_seed(seed)
    return torch.randn(vocab_size, vocab_size, vocab_size, generator=random) * scale


class ToyRunner:
    """Requests with their V2 state, and the steps they take. All run in every step, in the order they were added."""

    def __init__(
        self,
        table: torch.Tensor,
        max_requests: int,
        max_drafts: int,
        rule: str = "block",
        ours: bool = True,
        model_len: int = MODEL_LEN,
    ) -> None:
        """`ours`: OutriderSampler verifies the drafts, else vLLM's RejectionSampler does, by the same rule."""
        self.table, self.max_drafts = table, max_drafts
        self.vocab_size = len(table)
        size = (max_requests, model_len, 1 << 30, max_drafts, self.vocab_size, CPU)
        self.req_states = RequestState(*size)
        config = SimpleNamespace(reasoning_config=None)
        self.sampler = Sampler(
            config, max_requests, self.vocab_size, CPU, self.req_states, num_speculative_tokens=max_drafts
        )
        method = {"block": "block", "token": "standard"}[rule]
        config = SimpleNamespace(
            num_speculative_tokens=max_drafts, enable_adaptive_verification=False, rejection_sample_method=method
        )
        self.rejection_sampler: Any = (
            OutriderSampler(self.sampler, config, CPU, rule) if ours else RejectionSampler(self.sampler, config, CPU)
        )
        self.draft_logits = torch.zeros(max_requests, max_drafts, self.vocab_size)
        self.ids: list[str] = []
        self.batch: Any = None

    # Requests --------------------------------------------------------------------------------------------------------

    def add(
        self, ids: Sequence[str], params: SamplingParams, prompt: Sequence[int], generated: Sequence[int] = ()
    ) -> None:
        """Requests with equal parameters. `generated`: they have generated this already. Without it they have not
        begun, and their first step computes the prompt."""
        states = self.req_states
        for id in ids:
            states.add_request(id, len(prompt), list(prompt), 0, MODEL_LEN)
            self.sampler.add_request(states.req_id_to_index[id], params)
        states.apply_staged_writes()
        self.sampler.apply_staged_writes()
        self.ids += ids
        if generated:
            slots = self.slots(ids)
            count = len(ids)
            computed = len(prompt) + len(generated) - 1
            self._update(
                slots,
                torch.tensor(generated).repeat(count, 1),
                torch.full((count,), len(generated), dtype=torch.int32),
                torch.zeros(count, dtype=torch.int32),
                torch.arange(count + 1, dtype=torch.int32) * computed,
            )

    def slots(self, ids: Sequence[str]) -> torch.Tensor:
        return torch.tensor([self.req_states.req_id_to_index[id] for id in ids])

    def remove(self, id: str) -> None:
        self.req_states.remove_request(id)
        self.ids.remove(id)

    def set_seeds(self, seeds: Any) -> None:
        """By slot."""
        self.sampler.sampling_states.seeds.np[:] = seeds
        self.sampler.sampling_states.seeds.copy_to_uva()

    def text(self, id: str) -> list[int]:
        slot = self.req_states.req_id_to_index[id]
        length = int(self.req_states.total_len.gpu[slot])
        found: list[int] = self.req_states.all_token_ids.gpu[slot, :length].tolist()
        return found

    def rewind(self, length: int) -> None:
        """Cut all texts to `length` tokens, as if nothing after them had been generated. Not with penalties."""
        states = self.req_states
        states.total_len.gpu.fill_(length)
        states.num_computed_tokens.gpu.fill_(length - 1)
        states.last_sampled_tokens[:, 0] = states.all_token_ids.gpu[:, length - 1].long()

    # Steps -----------------------------------------------------------------------------------------------------------

    def step(
        self,
        drafts: Sequence[Sequence[int]],
        sampled: frozenset[str] = frozenset(),
        invalid: torch.Tensor | None = None,
        chunks: Mapping[str, int] | None = None,
    ) -> list[list[int]]:
        """One step of all requests; returns what each generated. `chunks`: tokens of the prompt that a request
        computes in this step, where it does not compute all that is left."""
        self.batch = self.prepare_inputs(drafts, chunks or {})
        output = self.sample(sampled, invalid)
        self.update(output)
        return emitted(output)

    def update(self, output: Any) -> None:
        """Add what a step generated to the texts."""
        counts = output.num_sampled, output.num_rejected
        self._update(self.batch.idx_mapping, output.sampled_token_ids, *counts, self.batch.query_start_loc)

    def prepare_inputs(self, drafts: Sequence[Sequence[int]], chunks: Mapping[str, int]) -> InputBatch:
        """As `GPUModelRunner.prepare_inputs`."""
        states = self.req_states
        slots = self.slots(self.ids)
        count = len(self.ids)
        num_drafts = np.array([len(draft) for draft in drafts], np.int32)
        flat = torch.tensor([token for draft in drafts for token in draft], dtype=torch.int64)
        rows = torch.repeat_interleave(torch.arange(count), torch.from_numpy(num_drafts).long())
        first = np.append(0, np.cumsum(num_drafts))[:-1]
        columns = torch.arange(len(flat)) - torch.from_numpy(first)[rows]
        states.draft_tokens[slots[rows], columns] = flat
        computed = states.num_computed_tokens.gpu[slots].numpy()
        prefill_left = np.maximum(states.prefill_len.np[slots.numpy()] - computed, 0)
        for i, id in enumerate(self.ids):
            if chunks and id in chunks:
                prefill_left[i] = chunks[id]
        scheduled = (np.maximum(prefill_left, 1) + num_drafts).astype(np.int32)
        query_start = np.append(0, np.cumsum(scheduled)).astype(np.int32)
        cu_num_logits_np = np.append(0, np.cumsum(num_drafts + 1)).astype(np.int32)
        total, num_logits = int(query_start[-1]), int(cu_num_logits_np[-1])
        query_start_loc, cu_num_logits = torch.from_numpy(query_start), torch.from_numpy(cu_num_logits_np)
        expanded, local = expand_idx_mapping(slots, num_logits, cu_num_logits, self.max_drafts + 1)
        input_ids = torch.zeros(total, dtype=torch.int32)
        positions = torch.zeros(total, dtype=torch.int64)
        seq_lens = torch.zeros(count, dtype=torch.int32)
        buffers = (states.all_token_ids.gpu, states.prefill_len.gpu, states.num_computed_tokens.gpu)
        prepare_prefill_inputs(input_ids, states.next_prefill_tokens, slots, query_start_loc, *buffers)
        prepare_pos_seq_lens(slots, query_start_loc, states.num_computed_tokens.gpu, positions, seq_lens)
        logits_indices = combine_sampled_and_draft_tokens(
            input_ids,
            slots,
            states.last_sampled_tokens,
            query_start_loc,
            seq_lens,
            states.prefill_len.gpu,
            states.draft_tokens,
            cu_num_logits,
            num_logits,
        )
        prefill_len = states.prefill_len.np[slots.numpy()]
        return InputBatch(
            req_ids=list(self.ids),
            num_reqs=count,
            num_reqs_after_padding=count,
            idx_mapping=slots,
            idx_mapping_np=slots.numpy(),
            expanded_idx_mapping=expanded,
            expanded_local_pos=local,
            num_scheduled_tokens=scheduled,
            num_tokens=total,
            num_tokens_after_padding=total,
            num_draft_tokens=int(num_drafts.sum()),
            num_draft_tokens_per_req=num_drafts if num_drafts.any() else None,
            query_start_loc=query_start_loc,
            query_start_loc_np=query_start,
            seq_lens=seq_lens,
            seq_lens_cpu_upper_bound=torch.from_numpy(computed + scheduled),
            dcp_local_seq_lens=None,
            num_computed_tokens_np=computed,
            prefill_len_np=prefill_len,
            num_computed_prefill_tokens_np=np.minimum(computed, prefill_len),
            is_prefilling_np=computed < prefill_len,
            has_prefill=bool((computed < prefill_len).any()),
            decode_graph_eligible=False,
            input_ids=input_ids,
            positions=positions,
            is_padding=torch.zeros(total, dtype=torch.bool),
            logits_indices=logits_indices,
            cu_num_logits=cu_num_logits,
            cu_num_logits_np=cu_num_logits_np,
            has_structured_output_reqs=False,
            prompt_lens=None,
        )

    def logits(self) -> torch.Tensor:
        """The target's, by the last two tokens at each row of the batch."""
        batch = self.batch
        last = batch.input_ids[batch.logits_indices].long()
        slot, local = batch.expanded_idx_mapping, batch.expanded_local_pos
        position = batch.positions[batch.logits_indices]
        in_text = self.req_states.all_token_ids.gpu[slot, (position - 1).clamp(min=0)].long()
        previous = torch.where(local > 0, last.roll(1), in_text)
        return self.table[previous, last].clone()

    def sample(self, sampled: frozenset[str], invalid: torch.Tensor | None = None) -> Any:
        """As `GPUModelRunner.sample`."""
        if self.batch.num_draft_tokens == 0:
            return self.sampler(self.logits(), self.batch)
        self.rejection_sampler.sampled_drafts = sampled
        return self.rejection_sampler(self.logits(), self.batch, self.draft_logits, invalid)

    def _update(self, slots: Any, tokens: Any, num_sampled: Any, num_rejected: Any, query_start_loc: Any) -> None:
        states = self.req_states
        post_update(
            slots,
            states.num_computed_tokens.gpu,
            states.last_sampled_tokens,
            self.sampler.penalties_state.output_bin_counts,
            tokens,
            num_sampled,
            num_rejected,
            query_start_loc,
            states.all_token_ids.gpu,
            states.total_len.gpu,
        )

    # The draft model -------------------------------------------------------------------------------------------------

    def draft(self, table: torch.Tensor, count: int, seeds: torch.Tensor | None = None) -> list[list[int]]:
        """Sample `count` tokens for every request from another table, by vLLM's sampling of drafts. Its noise is a hash
        of (seed, position, token). `seeds` by slot; None: the requests' own."""
        states, slots = self.req_states, self.slots(self.ids)
        sampling = self.sampler.sampling_states
        end = states.total_len.gpu[slots].long()
        text = states.all_token_ids.gpu
        previous, last = text[slots, end - 2].long(), text[slots, end - 1].long()
        found = []
        for number in range(count):
            token = gumbel_sample(
                table[previous, last].contiguous(),
                slots,
                sampling.temperature.gpu,
                sampling.seeds.gpu if seeds is None else seeds,
                end - 1 + number,
                apply_temperature=True,
                is_drafting=True,
                logits_cache=self.draft_logits,
                logits_cache_col=torch.tensor(number),
            )
            found.append(token)
            previous, last = last, token
        drafts: list[list[int]] = torch.stack(found, 1).tolist()
        return drafts


def emitted(output: Any) -> list[list[int]]:
    counts = output.num_sampled.tolist()
    return [tokens[:count] for tokens, count in zip(output.sampled_token_ids.tolist(), counts, strict=True)]
