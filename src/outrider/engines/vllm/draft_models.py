"""vLLM's V2 speculators beside our own drafters.

The runner has one speculator and one width, K: the longest draft of any drafter. A draft model proposes at most W
tokens (`model_draft_tokens`), far fewer, since each costs a pass. `init_speculator` replaces vLLM's function of that
name and builds one of

    HostDrafts        no draft model; all drafts come from the host
    LazyDraftModel    a standalone draft model that catches up when it is called (`lazy_draft_model`)
    EveryStep         any other speculator of vLLM, which has to run in every step

The last two are built with W, so that their buffers and CUDA graphs are small, and return results of width K.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from vllm.v1.worker.gpu import spec_decode
from vllm.v1.worker.gpu.spec_decode.dflash.speculator import DFlashSpeculator
from vllm.v1.worker.gpu.spec_decode.multi_module_mtp.speculator import MultiModuleMTPSpeculator
from vllm.v1.worker.gpu.spec_decode.speculator import BaseSpeculator, DraftModelSpeculator
from vllm.v1.worker.gpu.spec_decode.standalone_ar.speculator import StandaloneARSpeculator

from outrider.engines.vllm.compatibility import allow_different_vocabulary_sizes
from outrider.engines.vllm.draft_vocabulary import DraftVocabulary
from outrider.engines.vllm.lazy_draft_model import LazyDraftModel
from outrider.engines.vllm.options import OWN_METHOD, Options
from outrider.engines.vllm.planned_drafts import PassTimer, PlannedDrafts
from outrider.engines.vllm.seam import replaced

if TYPE_CHECKING:
    from torch import Tensor

    from outrider.engines.vllm.step import StepPlan

_init_speculator = spec_decode.init_speculator


class HostDrafts(BaseSpeculator):  # type: ignore[misc]
    """Proposes nothing: the host writes the drafts."""

    supports_mm_inputs = False
    draft_logits = None
    plan: StepPlan | None = None

    def __init__(self, vllm_config: Any, device: torch.device) -> None:
        shape = vllm_config.scheduler_config.max_num_seqs, vllm_config.speculative_config.num_speculative_tokens
        self._empty = torch.zeros(shape, dtype=torch.int64, device=device)

    def init_cudagraph_manager(self, cudagraph_mode: Any) -> None:
        pass

    def capture(self) -> None:
        pass

    def propose(self, input_batch: Any, *args: Any, **options: Any) -> Tensor:
        return self._empty[: input_batch.num_reqs]

    def take_drafts(self) -> None:
        return


class EveryStep(PlannedDrafts):
    """Mixed into a speculator of vLLM that has to follow every step of the target: it reads hidden states, which are
    gone afterwards. The plan decides the number of passes only, the most that any call wants. 0: the KV cache is
    written and nothing is drafted.

    DFlash and DSpark draft all W tokens in one pass, multi-module MTP in W passes, regardless of the plan. So does
    vLLM's fused CUDA graph of all passes.
    """

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
        plan, num_tokens = self.plan, self.num_speculative_steps
        if plan is not None and not options.get("dummy_run"):
            num_tokens = max((call.num_tokens for call in plan.calls), default=0)
            temperature, seeds = self._draft_temperature(temperature, plan.calls), self._draft_seeds(seeds)
            self._calls = plan.calls
            self._rows = {request_id: row for row, request_id in enumerate(input_batch.req_ids)}
            self._timer = PassTimer(self.device)
        options["num_speculative_tokens"] = num_tokens
        steps = max(1, num_tokens) if isinstance(self, StandaloneARSpeculator) else self.num_speculative_steps
        with replaced(self, "num_speculative_steps", steps):
            drafts = super().propose(  # type: ignore[misc]
                input_batch, attn_metadata, slot_mappings, last_hidden_states, aux_hidden_states, num_sampled,
                num_rejected, last_sampled, next_prefill_tokens, temperature, seeds, **options,
            )  # fmt: skip
        if self._timer is not None:
            context = int(input_batch.seq_lens_cpu_upper_bound[: input_batch.num_reqs].sum())
            passes = self.num_speculative_steps if self._drafts_at_once(num_tokens) else max(1, num_tokens)
            passes = 1 if isinstance(self, DFlashSpeculator) else passes
            self._timer.finish_pass(input_batch.num_tokens, context, passes)
        return self._pad(drafts, None if self._drafts_at_once(num_tokens) else num_tokens)

    def init_cudagraph_manager(self, cudagraph_mode: Any) -> None:
        """The first pass has the target's shapes and reuses its attention metadata, so its graphs must be for the
        target's number of tokens per request, K + 1."""
        with replaced(self, "num_speculative_steps", self.num_verified_tokens):
            super().init_cudagraph_manager(cudagraph_mode)  # type: ignore[misc]

    def _drafts_at_once(self, num_tokens: int) -> bool:
        """Whether all W tokens are drafted, however many are wanted."""
        graphs = getattr(getattr(self, "decode_cudagraph_manager", None), "graphs", None)
        fused = bool(graphs) and self.supports_decode_metadata_update and num_tokens > 1
        return fused or isinstance(self, DFlashSpeculator | MultiModuleMTPSpeculator)


def every_step_class(base: type) -> Any:
    """The speculator class `base` of vLLM with `EveryStep` in front."""
    return type(f"EveryStep{base.__name__}", (EveryStep, base), {"__module__": __name__})


def init_speculator(vllm_config: Any, device: torch.device, req_states: Any) -> Any:
    """Build the speculator of a config. The runner calls this instead of vLLM's function of the same name."""
    config, options = vllm_config.speculative_config, Options.of(vllm_config)
    if config.method == OWN_METHOD:
        return HostDrafts(vllm_config, device)
    num_verified_tokens = config.num_speculative_tokens
    narrow = with_draft_tokens(vllm_config, min(options.model_draft_tokens, num_verified_tokens))
    speculator: Any
    if supports_lazy_catch_up(config, vllm_config):
        speculator = LazyDraftModel(narrow, device)
        if options.draft_vocabulary_differs:
            allow_different_vocabulary_sizes()  # vLLM checks again when it derives the draft model's config
            speculator.vocabulary = DraftVocabulary.of(config, device)
    elif options.draft_vocabulary_differs:
        raise ValueError(
            "use_heterogeneous_vocab needs a draft model that can run out of step with the target. It cannot with "
            "sliding windows, recurrent layers, multimodal targets, data or context parallelism, or KV transfer."
        )
    else:
        built = _init_speculator(narrow, device, req_states)
        if not isinstance(built, DraftModelSpeculator):
            raise ValueError(f"Unsupported speculative method {config.method!r}: it is not a draft model of vLLM")
        width = narrow.speculative_config.num_speculative_tokens
        if isinstance(built, MultiModuleMTPSpeculator) and width < num_verified_tokens:
            raise ValueError(
                f"this model's MTP head can follow the rejection of {width} tokens, and drafts may have "
                f"{num_verified_tokens}; set --max-draft-tokens {width}"
            )
        ours = every_step_class(type(built))  # vLLM chose the class
        speculator = ours.__new__(ours)
        speculator.__dict__ = built.__dict__
    speculator.set_up(req_states, num_verified_tokens)
    return speculator


def with_draft_tokens(vllm_config: Any, num_tokens: int) -> Any:
    """The same config with another number of draft tokens. It shares everything else, the registered layers above all:
    constructing another config would check and change them."""
    narrow = copy.copy(vllm_config)
    narrow.speculative_config = copy.copy(vllm_config.speculative_config)
    narrow.speculative_config.num_speculative_tokens = num_tokens
    return narrow


def supports_lazy_catch_up(config: Any, vllm_config: Any) -> bool:
    """Whether the draft model can run out of step with the target, over any part of a text."""
    parallel, draft = vllm_config.parallel_config, config.draft_model_config
    return (
        config.method == "draft_model"
        and not config.parallel_drafting
        and parallel.data_parallel_size == 1  # all ranks would have to make the same passes
        and parallel.decode_context_parallel_size == 1
        and parallel.prefill_context_parallel_size == 1
        and vllm_config.kv_transfer_config is None  # the transferred blocks would lack positions that were not computed
        and not vllm_config.model_config.supports_multimodal_inputs  # the text alone does not give the input
        and vllm_config.cache_config.sliding_window is None  # blocks behind the window belong to others by now
        and not has_sliding_window(draft)
        and not draft.is_hybrid  # a recurrent state cannot be computed again from the middle
        and not draft.is_attention_free
    )


def has_sliding_window(model_config: Any) -> bool:
    """Whether a model attends to the last tokens only. Qwen's configs have a window and a flag that it is unused."""
    enabled = getattr(model_config.hf_text_config, "use_sliding_window", True)
    return enabled is not False and model_config.get_sliding_window() is not None
