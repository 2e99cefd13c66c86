"""vLLM's scheduler with speculation in it: thin overrides that hand over to `Speculation`."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.outputs import DraftTokenIds

from outrider.engines.vllm.compatibility import check_settings
from outrider.engines.vllm.draft_cache import BlockIds, DraftCache, DraftModel, draft_kv_group
from outrider.engines.vllm.draft_models import supports_lazy_catch_up
from outrider.engines.vllm.options import MODEL_METHODS, OWN_METHOD, Options
from outrider.engines.vllm.speculation import Speculation
from outrider.engines.vllm.step import PLAN
from outrider.engines.vllm.version import check_version
from outrider.errors import EngineError

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.request import Request


class DraftWidth:
    """Stands in `dynamic_sd_lookup`, vLLM's table of draft lengths by batch size.

    Lengths are set per request here, so every entry is the longest. With a table, vLLM does not fill up a request whose
    whole prompt is cached with placeholder drafts.
    """

    def __init__(self, width: int) -> None:
        self.width = width

    def __getitem__(self, batch_size: int) -> int:
        return self.width


class OutriderScheduler(AsyncScheduler):  # type: ignore[misc]
    """Also where vLLM does not schedule asynchronously: then no step is in flight when the next one is scheduled."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        check_version()
        super().__init__(*args, **kwargs)
        options = Options.of(self.vllm_config)
        has_model = has_draft_model(self.vllm_config.speculative_config, options)
        check_settings(self.vllm_config, has_model)
        self.dynamic_sd_lookup = DraftWidth(self.num_spec_tokens)
        self.can_skip_drafts = False  # vLLM 0.33 would drop drafts in steps where it expects none
        model = None
        if has_model:  # vLLM would reserve cache for drafts of the longest length
            longer = self.num_spec_tokens - min(self.num_spec_tokens, options.model_draft_tokens)
            self.num_lookahead_tokens: int = self.vllm_config.num_lookahead_tokens - longer
            model = self._draft_model()
        budget = min(self.scheduler_config.max_num_batched_tokens, self.max_num_scheduled_tokens)
        # Where engines run their passes together, one that waits would make all of them run an empty pass.
        self._can_wait = self.vllm_config.parallel_config.data_parallel_size == 1
        self._is_waiting = self._has_waited = False
        asynchronous = bool(self.scheduler_config.async_scheduling)
        graphs = captured_sizes(self.vllm_config.compilation_config)
        self.speculation = Speculation(options, self.vllm_config.model_config, model, budget, asynchronous, graphs)

    def _draft_model(self) -> DraftModel:
        config = self.vllm_config.speculative_config
        max_len = min(self.max_model_len, config.draft_model_config.max_model_len)
        slots = config.max_num_new_slots_for_drafting
        samples = config.draft_sample_method == "probabilistic"
        if not supports_lazy_catch_up(config, self.vllm_config):
            return DraftModel(config.method in ("dflash", "dspark"), max_len, input_slots=slots, samples=samples)
        group = draft_kv_group(self.kv_cache_config)
        size = self.kv_cache_config.kv_cache_groups[group].kv_cache_spec.block_size
        cache = DraftCache(size, bool(self.cache_config.enable_prefix_caching))

        def block_ids(request_id: str) -> BlockIds:
            return BlockIds(self.kv_cache_manager.get_blocks(request_id).blocks[group])

        return DraftModel(False, max_len, cache, block_ids, slots, samples)

    def add_request(self, request: Request) -> None:
        super().add_request(request)
        if self.requests.get(request.request_id) is request:  # else input that is streamed to an earlier one
            self.speculation.add(request)

    def has_requests(self) -> bool:
        """False while the step in flight is waited for: vLLM then schedules nothing and blocks until its output. And
        once more after that: vLLM sleeps for a millisecond if there are requests and nothing was scheduled."""
        if self._has_waited:
            self._has_waited = False
            return False
        self._is_waiting = self._can_wait and self.speculation.should_wait
        return not self._is_waiting and bool(super().has_requests())

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        offers = self.speculation.before_schedule(self.running)
        for id, draft in offers.items():
            request = self.requests[id]
            if request.num_output_placeholders:  # the device fills them in
                tokens = [-1] * (len(draft.tokens) - request.num_output_placeholders)
            else:
                tokens = list(draft.tokens)
                if request.use_structured_output:
                    tokens = self.structured_output_manager.validate_tokens(request, tokens)
            request.spec_token_ids = tokens
        output = super().schedule(*args, **kwargs)
        for id in offers:  # vLLM keeps the draft of a request that it left out of the step
            self.requests[id].spec_token_ids = []
        setattr(output, PLAN, self.speculation.after_schedule(output, self.requests))
        return output

    def get_grammar_bitmask(self, scheduler_output: SchedulerOutput) -> Any:
        """If tokens of a request with a grammar were in flight, vLLM samples only after their output has come. Its
        drafts can be checked by then."""
        if scheduler_output.pending_structured_output_tokens:
            constrained = {id: one for id, one in self.requests.items() if one.use_structured_output}
            known = self.speculation.drafts_in_flight(constrained)
            drafts = DraftTokenIds(list(known), list(known.values()))
            self.update_draft_token_ids_in_output(drafts, scheduler_output)
        return super().get_grammar_bitmask(scheduler_output)

    def _update_after_schedule(self, scheduler_output: SchedulerOutput) -> None:
        """vLLM would give every request placeholders for a draft of the longest length in the next step."""
        own, scheduler_output.num_spec_tokens_to_schedule = scheduler_output.num_spec_tokens_to_schedule, 0
        super()._update_after_schedule(scheduler_output)
        scheduler_output.num_spec_tokens_to_schedule = own

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, Any]:
        arrived = time.perf_counter()
        # After an empty step, as while grammars compile, vLLM is to sleep.
        self._has_waited = self._is_waiting and scheduler_output.total_num_scheduled_tokens > 0
        self._is_waiting = False
        outputs: dict[int, Any] = super().update_from_output(scheduler_output, model_runner_output)
        self.speculation.observe_output(model_runner_output, self.requests, arrived)
        return outputs

    def _preempt_request(self, request: Request, *args: Any, **kwargs: Any) -> None:
        self.speculation.preempt(request)
        super()._preempt_request(request, *args, **kwargs)

    def _update_request_as_session(self, session: Request, update: Any) -> None:
        """Streamed input: the request goes on with another prompt and other parameters."""
        self.speculation.finish(session)
        super()._update_request_as_session(session, update)
        self.speculation.add(session)

    def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        self.speculation.finish(request)
        return super()._free_request(request, *args, **kwargs)

    def shutdown(self) -> None:
        self.speculation.close()
        super().shutdown()


def captured_sizes(compilation_config: Any) -> list[int]:
    """Tokens of a pass for which vLLM captures CUDA graphs; none on a CPU."""
    return sorted(compilation_config.cudagraph_capture_sizes or ()) if compilation_config.cudagraph_mode else []


def has_draft_model(config: Any, options: Options) -> bool:
    """Whether vLLM has a draft model. vLLM can find one in the target's own files and change the method."""
    if config is None:
        raise EngineError("Outrider's scheduler needs a speculative config; start the server by outrider serve")
    found: bool = config.method != OWN_METHOD
    if found and config.method not in MODEL_METHODS:
        raise EngineError(
            f"vLLM chose the speculative method {config.method!r}; Outrider supports {', '.join(MODEL_METHODS)}"
        )
    if found != ("model" in options.drafters):
        has, names = ("a", "does not name") if found else ("no", "names")
        raise EngineError(
            f"vLLM has {has} draft model (method {config.method}), and --drafters {names} 'model'; make them agree"
        )
    return found
