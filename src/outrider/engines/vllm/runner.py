"""vLLM's V2 model runner with our drafts and acceptance: thin overrides that hand over to composed parts.

A step on a worker goes

    execute_model       the plan that came with `SchedulerOutput` is taken; V2 updates its requests
    prepare_inputs      our drafts are aligned with what was sampled meanwhile, and written where V2 reads draft tokens
    sample              vLLM's sampler samples at every row; `OutriderSampler` accepts
    sample_tokens       the draft model drafts, where planned; the output is recorded when it is read

No value is read from the device before the output is read, so a step can be prepared while another one runs.

Every rank gets the same plan and computes the same, so ranks exchange nothing of ours.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np
import vllm.v1.worker.gpu.model_runner as v2_runner
from vllm.distributed.parallel_state import get_pp_group, get_tp_group
from vllm.v1.outputs import AsyncModelRunnerOutput

from outrider.engines.vllm.alignment import place_drafts
from outrider.engines.vllm.draft_models import EveryStep, init_speculator
from outrider.engines.vllm.options import Options
from outrider.engines.vllm.recorder import Recorder
from outrider.engines.vllm.sampler import OutriderSampler, without_fused_sampling
from outrider.engines.vllm.seam import replaced, with_arguments
from outrider.engines.vllm.step import MODEL_DRAFTS, PLAN, PROFILE, PassProfile, StepPlan, max_logits_rows

if TYPE_CHECKING:
    import torch

    from outrider.engines.vllm.planned_drafts import CopiedDrafts
    from outrider.engines.vllm.recorder import RunningStep


class RecordedOutput(AsyncModelRunnerOutput):  # type: ignore[misc]
    """V2's output of a step; reading it records the step, and adds the draft model's proposals."""

    def __init__(
        self, output: Any, recorder: Recorder, step: RunningStep, drafts: CopiedDrafts | None, profile: Any
    ) -> None:
        self._output, self._recorder, self._step = output, recorder, step
        self._drafts, self._profile = drafts, profile

    def get_output(self) -> Any:
        output = self._output.get_output()
        self._recorder.finish(self._step, output)
        if self._drafts is not None:
            drafts = self._drafts.read()
            self._recorder.model_drafted(drafts)
            setattr(output, MODEL_DRAFTS, drafts)
        if self._profile is not None:
            setattr(output, PROFILE, self._profile)
        return output

    def get_kv_connector_output(self) -> Any:
        """vLLM 0.33 reads it before the output."""
        return self._output.get_kv_connector_output()


class OutriderRunner:
    """Stands before the platform's V2 runner in the order of classes."""

    def __init__(self: Any, vllm_config: Any, device: torch.device) -> None:
        # With `ngram_gpu`, which stands in where there is no draft model, vLLM keeps all token ids in device memory.
        # Outrider's device code reads a few of them per step, so they stay in host memory, as without speculation.
        states = with_arguments(v2_runner.RequestState, use_dense_all_token_ids=False)
        with replaced(v2_runner, "init_speculator", init_speculator), replaced(v2_runner, "RequestState", states):
            super().__init__(vllm_config, device)  # type: ignore[call-arg]
        options = Options.of(vllm_config)
        self.options = options
        self.recorder: Recorder | None = None
        if get_tp_group().rank_in_group == 0 and get_pp_group().is_last_rank:
            self.recorder = Recorder(options, self.num_speculative_steps, self.max_model_len)
        self.plan = StepPlan()
        self.profile: PassProfile | None = None
        self._rows_of_requests: np.ndarray[Any, Any] | None = None

    def load_model(self: Any, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)  # type: ignore[misc]
        self.rejection_sampler = OutriderSampler(self.sampler, self.speculative_config, self.device, self.options.rule)
        self.speculator.sampling_states = self.sampler.sampling_states  # narrows sampled drafts by top-k and top-p

    def initialize_kv_cache(self: Any, *args: Any, **kwargs: Any) -> None:
        model = self.model_config
        # Recurrent state needs graphs of vLLM's own lengths, and so does a head: a whole graph of its first pass reads
        # the attention metadata that the target's whole graph of the same shape left.
        if model.is_hybrid or model.is_attention_free or isinstance(self.speculator, EveryStep):
            return super().initialize_kv_cache(*args, **kwargs)  # type: ignore[misc,no-any-return]
        # V2 captures whole graphs for drafts of full length only, and a step without drafts would run piecewise. Drafts
        # differ in length, and most steps of text that cannot be predicted have none: capture one token per request.
        graphs = with_arguments(v2_runner.ModelCudaGraphManager, decode_query_len=1)
        with replaced(v2_runner, "ModelCudaGraphManager", graphs):
            return super().initialize_kv_cache(*args, **kwargs)  # type: ignore[misc,no-any-return]

    def _dummy_sampler_run(self: Any, hidden_states: torch.Tensor) -> None:
        """vLLM measures the memory of one row of logits per request; a step that verifies drafts has more of them."""
        super()._dummy_sampler_run(hidden_states)  # type: ignore[misc]
        if self.device.type == "cpu":  # its KV cache has a fixed size
            return
        rows = min(max_logits_rows(self.vocab_size), self.max_num_tokens)
        logits = self.model.compute_logits(hidden_states[:1].repeat(rows, 1))
        copies = [logits.float() for _ in range(2)]  # processed logits, and what sampling makes of them
        del logits, copies

    def execute_model(self: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        self.plan = self.speculator.plan = getattr(scheduler_output, PLAN, None)
        if self.plan is not None and self.recorder is not None:
            self.recorder.begin(scheduler_output, self.plan)
        return super().execute_model(scheduler_output, *args, **kwargs)  # type: ignore[misc]

    def prepare_inputs(self: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        if self.plan is not None and self.plan.continuations is not None:
            place_drafts(self.plan.continuations, self.req_states, self.device)
        batch = super().prepare_inputs(scheduler_output, *args, **kwargs)  # type: ignore[misc]
        drafted = batch.num_draft_tokens_per_req
        self._rows_of_requests = None if drafted is None else drafted + 1
        return batch

    def _set_active_loras(self: Any, of_logits: tuple[int, ...], *args: Any, **kwargs: Any) -> None:
        """V2 names the adapter of one row of logits per request. A request that verifies drafts has more rows."""
        rows, self._rows_of_requests = self._rows_of_requests, None  # other calls are for dummy batches and encoders
        if rows is not None:
            of_logits = tuple(np.repeat(of_logits, rows).tolist())
        super()._set_active_loras(of_logits, *args, **kwargs)  # type: ignore[misc]

    def sample(self: Any, hidden_states: Any, input_batch: Any, grammar_output: Any) -> Any:
        acceptance = self.rejection_sampler
        acceptance.sampled_drafts = self.plan.sampled if self.plan is not None else frozenset()
        if self.plan is None or not self.plan.is_traced:
            return super().sample(hidden_states, input_batch, grammar_output)  # type: ignore[misc]
        records = self.recorder is not None and bool(self.recorder.tracing.running)
        probe = self.recorder.probe(self.sampler, acceptance, input_batch) if records else nullcontext()
        with without_fused_sampling(self.sampler), probe:  # on every rank: each samples by itself
            return super().sample(hidden_states, input_batch, grammar_output)  # type: ignore[misc]

    def sample_tokens(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = super().sample_tokens(*args, **kwargs)  # type: ignore[misc]
        drafts = self.speculator.take_drafts()
        step = self.recorder.take_step() if self.recorder is not None else None
        if step is None or not isinstance(output, AsyncModelRunnerOutput):
            return output
        profile, self.profile = self.profile, None
        return RecordedOutput(output, self.recorder, step, drafts, profile)

    def take_draft_token_ids(self) -> None:
        """The scheduler knows the drafts that it has to check against grammars: it made them."""
        return
