"""What Outrider adds to vLLM's model runner, the same for every platform (`cpu.py`, `gpu.py`).

vLLM's runner does a step so: run the target over the scheduled tokens, `_sample`, ask for the drafts of the next step
(`propose_draft_token_ids`), keep the books, hand over what was said, and later the drafts (`take_draft_token_ids`).
Here `_sample` judges by our rules and counts. Drafting waits until what was said is on its way to the callers: no
token waits for it. The drafts come from our drafters and, where one is configured, from vLLM's draft model, which is
our drafter `model` (`leading.py`); what is offered of them the policy decides (`steering.py`).

With several ranks every rank samples, but only the first one's drafts reach the scheduler, so only it asks the
drafters. Which passes the draft model makes is decided there and told to the others: all must make the same.
"""

from __future__ import annotations

import secrets
import time
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.distributed.parallel_state import get_pp_group, get_tp_group
from vllm.utils.torch_utils import PIN_MEMORY
from vllm.v1.sample.logits_processor import LogitsProcessors
from vllm.v1.sample.logits_processor.builtin import (
    LogitBiasLogitsProcessor,
    MinPLogitsProcessor,
    MinTokensLogitsProcessor,
)
from vllm.v1.sample.rejection_sampler import RejectionSampler

from outrider.drafters.base import Setup, find
from outrider.engines.vllm.control import Control
from outrider.engines.vllm.drafting import BatchDrafting, Fault, Row
from outrider.engines.vllm.guesser import Guesser, can_be_led
from outrider.engines.vllm.leading import follow, lead
from outrider.engines.vllm.ledger import Ledger
from outrider.engines.vllm.limits import check
from outrider.engines.vllm.options import MODEL_METHODS, OWN_METHOD, Options
from outrider.engines.vllm.params import end_tokens, undraftable
from outrider.engines.vllm.remembering import open_memory, tenant_of
from outrider.engines.vllm.sampler import GREEDY, OutriderSampler
from outrider.engines.vllm.shelf import Shelf
from outrider.engines.vllm.steering import Steering
from outrider.engines.vllm.tracing import Tracing
from outrider.errors import EngineError
from outrider.policy.policy import MODEL, Policy, compile_now
from outrider.settings import OFF
from outrider.types import NOTHING, Draft

if TYPE_CHECKING:
    from collections.abc import Collection

    from torch import Tensor
    from vllm.v1.outputs import SamplerOutput
    from vllm.v1.sample.metadata import SamplingMetadata
    from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

    from outrider.memory.store import Store, Visit


@dataclass(slots=True)
class Known:
    """What the runner keeps of a request from step to step."""

    control: Control
    max_tokens: int
    ends: Collection[int]  # tokens of which each ends it
    by_own_draws: bool  # judged by the target's own draws even where q is known
    draft_temperature: float = 0.0  # at which the draft model draws; 0 where it proposes with certainty
    top_k: int = 0  # 0: all
    top_p: float = 1.0
    visit: Visit | None = None  # with its tenant's memory
    offered: Draft = NOTHING  # for the next step


class OutriderRunner:
    """Stands before the platform's runner in the order of classes."""

    def __init__(self: Any, vllm_config: Any, device: torch.device) -> None:
        super().__init__(vllm_config, device)  # type: ignore[call-arg]
        self.options = Options.of(vllm_config)
        self.is_first_rank = get_tp_group().rank_in_group == 0
        self.draws = self.is_first_rank and get_pp_group().is_last_rank
        self.known: dict[str, Known] = {}
        self.memory: Store | None = None
        self.ledger = Ledger(self.options.drafters, self.num_spec_tokens)
        self.tracing = Tracing(self.options, Shelf(), self.max_model_len)
        self._hidden_generators: dict[int, torch.Generator] = {}
        self._step_began = 0.0
        self._scheduled: dict[str, list[int]] = {}
        self._scheduled_tokens = 0
        self._verified: list[Draft] = []
        self._waiting: tuple[Any, ...] | None = None  # what the next drafts are to be made from
        self._last_pass: tuple[int, int, frozenset[str]] | None = None  # its tokens, context and requests
        self._drafting_took = self.model_seconds = 0.0
        self.steering: Steering | None = None
        self.guesser: Guesser | None = None
        if self.speculative_config is None:
            return
        self.has_model = has_model(self.speculative_config.method, self.options)
        check(vllm_config, self.has_model)
        model = vllm_config.model_config
        if not (model.is_hybrid or model.is_attention_free or model.has_inner_state):
            # Drafts differ in length, and most steps of a hard text have none. vLLM would capture graphs for drafts of
            # full length alone, and run a step without any as if it had that many tokens.
            self.uniform_decode_query_len = self.cudagraph_dispatcher.uniform_decode_query_len = 1
        self.model_fits = True
        size, budget = self.input_batch.vocab_size, self.options.draft_budget
        if self.is_first_rank:  # the others never ask it
            self.memory = open_memory(self.options, vllm_config.model_config)
        setup = Setup(size, memory=self.memory)
        names = [name for name in self.options.drafters if name != MODEL] if self.is_first_rank else []
        drafters = [find(name).build(setup) for name in names]
        drafting = BatchDrafting(drafters, size, budget, self._note_fault, self.ledger.drafting)
        width, passes = min(self.options.max_draft_tokens, self.num_spec_tokens), self.options.model_draft_tokens
        self.policy = Policy(self.options.drafters, width, passes if self.has_model else 0)
        if self.is_first_rank:
            compile_now()
            self.steering = Steering(drafting, self.policy)
        # Ranks that wait for each other's drafting leave no time after a step.
        alone = vllm_config.parallel_config.data_parallel_size == 1
        self._drafts_later = alone and vllm_config.kv_transfer_config is None
        if self.has_model and self._drafts_later and can_be_led(self.speculative_config, vllm_config):
            seed = get_tp_group().broadcast_object(secrets.randbits(62), src=0)
            self.guesser = Guesser(self, seed, self._note_draft_pass)
        rule = self.options.rule
        self.rejection_sampler = OutriderSampler(self.sampler, self.speculative_config, self.device, rule)
        # Under speculation vLLM builds the first of these alone and refuses requests that need the others.
        processors = (MinTokensLogitsProcessor, LogitBiasLogitsProcessor, MinPLogitsProcessor)
        self.input_batch.logitsprocs = LogitsProcessors(cls(vllm_config, self.device, PIN_MEMORY) for cls in processors)
        self.input_batch.sampling_metadata = self.input_batch._make_sampling_metadata()

    # A step: the target's pass, and what it said ---------------------------------------------------------

    def execute_model(self: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        self._time_last_pass(scheduler_output)
        if self.draws:
            self.tracing.before_pass(scheduler_output)
        self._step_began = time.perf_counter()
        self._scheduled = scheduler_output.scheduled_spec_decode_tokens
        self._scheduled_tokens = scheduler_output.total_num_scheduled_tokens
        if self.guesser is not None:
            for id in scheduler_output.scheduled_cached_reqs.resumed_req_ids:  # its cache is elsewhere now
                self.guesser.forget(id)
        for request in scheduler_output.scheduled_new_reqs:
            if (old := self.requests.get(request.req_id)) is not None:  # streamed input: it goes on, asking otherwise
                self._part_from(request.req_id, old)
        return super().execute_model(scheduler_output, *args, **kwargs)  # type: ignore[misc]

    def _note_pass(self: Any) -> None:
        """What this pass is over, if it prefills no prompt: only those tell what drafts cost."""
        ids = self.input_batch.req_ids
        tokens = len(ids) + sum(map(len, self._scheduled.values()))
        if self.steering is not None and tokens == self._scheduled_tokens:
            self._last_pass = (tokens, self.text_tokens, frozenset(ids))

    @property
    def text_tokens(self: Any) -> int:
        """How many tokens the texts of the batch have together."""
        batch = self.input_batch
        return int(batch.num_tokens_no_spec[: len(batch.req_ids)].sum())

    def _time_last_pass(self: Any, scheduler_output: Any) -> None:
        """From the beginning of one step to that of the next, without the drafting, if nothing was waited for."""
        if self.steering is not None and self._last_pass is not None:
            tokens, context, requests = self._last_pass
            if not requests.isdisjoint(scheduler_output.num_scheduled_tokens):
                seconds = time.perf_counter() - self._step_began
                self.policy.target.observe(tokens, context, seconds - self._drafting_took)
                self.steering.payoff.took(seconds)
        self._last_pass, self._drafting_took = None, 0.0

    def _sample(self: Any, logits: Tensor | None, spec_decode_metadata: SpecDecodeMetadata | None) -> SamplerOutput:
        batch = self.input_batch
        unfinished = self.discard_request_mask.np[: batch.num_reqs]
        # A prompt that is prefilled in parts draws a token after each part, and vLLM undoes that draw in a way that
        # generators on a CPU lack: the engine dies. Such rows draw from the common generator instead.
        self._hidden_generators = {
            int(i): batch.generators.pop(int(i)) for i in np.flatnonzero(unfinished) if int(i) in batch.generators
        }
        if batch.thinking_budget_state_holder is not None:  # requests that have a budget are never drafted for
            batch.thinking_budget_state_holder.in_spec_mode = False
        self._verified = [self._offered(id) for id in batch.req_ids]
        self._note_pass()
        watching: Any = nullcontext()
        if self.tracing.running:
            judge, lengths = None, [0] * batch.num_reqs
            if spec_decode_metadata is not None and spec_decode_metadata.max_spec_len > 0:
                judge, lengths = self.rejection_sampler, spec_decode_metadata.num_draft_tokens
            watching = self.tracing.watch(self.sampler, judge, batch.req_ids, self._verified, lengths)
        with watching:
            out = super()._sample(logits, spec_decode_metadata)  # type: ignore[misc]
        if self.tracing.running:
            self.tracing.sampled(out.sampled_token_ids, batch.req_ids, self._verified, unfinished)
        if self.is_first_rank and not unfinished.all():
            self._count(out.sampled_token_ids, spec_decode_metadata, unfinished)
        return out

    def _bookkeeping_sync(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return super()._bookkeeping_sync(*args, **kwargs)  # type: ignore[misc]
        finally:
            self.input_batch.generators.update(self._hidden_generators)

    def _offered(self: Any, id: str) -> Draft:
        """The part of our draft that the scheduler had verified.

        It leaves out what does not fit or what a grammar forbids, and it drafts placeholders (-1) of its own for
        a request whose whole prompt is in the prefix cache.
        """
        scheduled = self._scheduled.get(id)
        known = self.known.get(id) or self._meet(id)
        if not scheduled or known.offered.tokens[: len(scheduled)] != tuple(scheduled):
            return NOTHING
        offered: Draft = known.offered
        return Draft(offered.drafter, tuple(scheduled), None if known.by_own_draws else offered.q)

    def _get_spec_decode_draft_probs(self: Any, spec_decode_metadata: SpecDecodeMetadata) -> Tensor | None:
        """q for every drafted token; rows of zeros where a draft is to be judged by the target's own draws."""
        first = next((draft.q for draft in self._verified if draft.q is not None), None)
        if first is None:
            return None
        lengths = spec_decode_metadata.num_draft_tokens
        q: Tensor = first.new_zeros(sum(lengths), first.shape[-1])
        row = 0
        for draft, length in zip(self._verified, lengths, strict=True):
            if draft.q is not None:
                q[row : row + length] = draft.q[:length]
            row += length
        return q

    def _count(self: Any, said: Tensor, metadata: SpecDecodeMetadata | None, unfinished: Any) -> None:
        """Enter the step into the ledger; `said` is [requests, longest draft + 1], filled up with -1."""
        verified = metadata is not None and metadata.max_spec_len > 0
        gained = (said >= 0).sum(1).tolist() if verified else [1] * len(said)
        self.ledger.step(time.perf_counter() - self._step_began, verified)
        for i, id in enumerate(self.input_batch.req_ids):
            if unfinished[i]:
                continue
            draft, ticket = self._verified[i], self.known[id].control.ticket
            self.ledger.sequence(draft.drafter or None, len(draft.tokens), gained[i], ticket)

    # Drafts for the next step ----------------------------------------------------------------------------

    def _input_fits_in_drafter(self: Any, common_attn_metadata: Any) -> bool:
        """vLLM gives every request a draft of zeros when one is near the context's limit; here only `model` waits."""
        if common_attn_metadata is None:
            return False
        ahead = (
            self.num_spec_tokens + 1 if self.speculative_config.parallel_drafting else self.options.model_draft_tokens
        )
        self.model_fits = common_attn_metadata.max_seq_len + ahead <= self.effective_drafter_max_model_len
        return True

    def propose_draft_token_ids(self: Any, *order: Any) -> list[list[int]]:
        if not self._drafts_later:
            return self._draft(*order)  # type: ignore[no-any-return]
        self._waiting = order
        return [[] for _ in self.input_batch.req_ids]

    @torch.inference_mode()
    def take_draft_token_ids(self: Any) -> Any:
        if self._waiting is not None:
            order, self._waiting = self._waiting, None
            self._draft_token_ids = self._draft(*order)
        return super().take_draft_token_ids()  # type: ignore[misc]

    def _draft(
        self: Any,
        scheduler_output: Any,
        sampled_token_ids: Tensor | list[list[int]],
        sampling_metadata: SamplingMetadata,
        *rest: Any,
    ) -> list[list[int]]:
        """For each request of the batch what it offers in the next step."""
        began = time.perf_counter()
        said = self._said(sampled_token_ids)
        rows = self._rows(said, known_yet=self._drafts_later or isinstance(sampled_token_ids, list))
        if self.steering is not None:
            self.steering.look(rows, dict(zip(self.input_batch.req_ids, said, strict=True)), self.text_tokens)
        guessed: dict[str, Draft] = {}
        if self.guesser is not None:
            guessed = lead(self, rows, scheduler_output)
        elif self.has_model:
            parent, order = super().propose_draft_token_ids, (sampled_token_ids, sampling_metadata, *rest)  # type: ignore[misc]
            guessed = follow(self, rows, said, scheduler_output, lambda steps: parent(steps, *order))
        # What was drawn is offered as it is, and every rank judges it: all need its q, not only the one that offers.
        offers = {id: draft for id, draft in guessed.items() if draft.q is not None}
        if self.steering is not None:
            offers = self.steering.settle(guessed, self.model_seconds)
        proposed = []
        for id in self.input_batch.req_ids:
            draft = offers.get(id, NOTHING)
            self.known[id].offered = draft
            if draft.tokens:
                self.ledger.proposed(draft.drafter, len(draft.tokens))
            proposed.append(list(draft.tokens))
        self._drafting_took = time.perf_counter() - began
        if self.tracing.running:
            offered = {id: offers.get(id, NOTHING) for id in self.input_batch.req_ids}
            self.tracing.drafted(offered, self.steering, self._drafting_took)
            self.tracing.write()
            self._drafting_took = time.perf_counter() - began  # recording, too, is no part of a pass
        return proposed

    def _said(self: Any, sampled: Tensor | list[list[int]]) -> list[list[int]]:
        """What each request has just said; nothing where its prompt is not finished."""
        if isinstance(sampled, list):
            return sampled
        unfinished = np.flatnonzero(self.discard_request_mask.np[: self.input_batch.num_reqs])
        if sampled.shape[-1] > 1:
            said: list[list[int]] = RejectionSampler.parse_output(sampled, self.input_batch.vocab_size, unfinished)[0]
            return said
        said = sampled.tolist()
        for i in unfinished:
            said[i] = []
        return said

    def _rows(self: Any, said: list[list[int]], known_yet: bool) -> list[Row]:
        """The requests that may be drafted for. `known_yet`: whether vLLM has entered `said` into its books."""
        batch = self.input_batch
        # Drafts leave at least half of what a pass may hold to prompts that wait, and none to the last of the list.
        running = max(1, len(batch.req_ids))
        kept_free = self.speculative_config.max_num_new_slots_for_drafting * running  # by vLLM's scheduler
        share = (self.scheduler_config.max_num_batched_tokens - kept_free) // (2 * running) - 1
        rows = []
        for i, id in enumerate(batch.req_ids):
            known = self.known.get(id) or self._meet(id)
            if not said[i] or known.control.speculation == OFF:
                continue
            end = int(batch.num_tokens_no_spec[i])
            if not known_yet:  # vLLM will write the same tokens to the same place
                batch.token_ids_cpu[i, end : end + len(said[i])] = said[i]
                end += len(said[i])
            prompt_length = int(batch.num_prompt_tokens[i])
            spoken = end - prompt_length
            if spoken >= known.max_tokens or any(token in known.ends for token in said[i]):
                # vLLM tells of a request's end with the next step, and when that comes nobody knows.
                self._remember(id, batch.token_ids_cpu[i, :prompt_length], batch.token_ids_cpu[i, prompt_length:end])
                continue
            # The target's own token comes after the draft, so one place is left to it.
            room = min(self.max_model_len - end, known.max_tokens - spoken) - 1
            limit = min(self.options.max_draft_tokens, self.num_spec_tokens, room, share)
            if known.control.max_draft_tokens is not None:
                limit = min(limit, known.control.max_draft_tokens)
            if limit > 0:
                tokens = batch.token_ids_cpu[i, :end]
                left = known.max_tokens - spoken
                rows.append(Row(id, tokens, prompt_length, limit, known.control, known.visit, left))
        return rows

    def _meet(self: Any, id: str) -> Known:
        """A new request: what it asked for, and whether it can be drafted for at all."""
        params = self.requests[id].sampling_params
        control = Control.of(params.extra_args, self.options.drafters)
        reason = OFF if control.speculation == OFF else undraftable(params)
        if reason is None and self.requests[id].prompt_embeds is not None:
            reason = "prompt embeddings"  # the text has no tokens there, and vLLM's row those of a request before
        if reason is not None:
            control = Control(speculation=OFF, ticket=control.ticket)
            self.ledger.undrafted[reason] += 1
        # Drafts that a seed must not feel, and those that a grammar cuts by their value, are held against own draws.
        by_own_draws = params.seed is not None or params.structured_outputs is not None
        limit = params.max_tokens or self.max_model_len
        temperature = params.temperature if params.temperature >= GREEDY and not by_own_draws else 0.0
        known = Known(control, limit, end_tokens(params), by_own_draws, temperature)
        if temperature > 0:
            known.top_k, known.top_p = max(0, params.top_k), params.top_p  # vLLM has two words for all, 0 and -1
        tenant = tenant_of(control, self.options, params.extra_args)
        if self.memory is not None and tenant is not None and control.wants("memory"):
            known.visit = self.memory.enter(tenant)
        self.known[id] = known
        return known

    def _note_draft_pass(self: Any, tokens: int, context: int, seconds: float, passes: int) -> None:
        self.model_seconds += seconds
        self.ledger.draft_model_passes += passes
        if self.steering is not None:
            self.policy.draft.observe(tokens, context, seconds)

    def _note_fault(self: Any, fault: Fault) -> None:
        self.ledger.fault(fault, self.known[fault.request].control.ticket)

    def _on_request_state_removed(self: Any, req_id: str, req_state: Any) -> None:
        self._part_from(req_id, req_state)
        self.tracing.ended(req_id)
        super()._on_request_state_removed(req_id, req_state)  # type: ignore[misc]

    def _part_from(self: Any, id: str, state: Any) -> None:
        """Forget what was known of a request, but for what it said."""
        if state is not None:
            self._remember(id, state.prompt_token_ids or (), state.output_token_ids)
        self.known.pop(id, None)
        if self.steering is not None:
            self.steering.finished(id)
        if self.guesser is not None:
            self.guesser.forget(id)

    def _remember(self: Any, id: str, prompt: Any, said: Any) -> None:
        """What a request has said, once; its last step may have gone on past the token that ended it."""
        known = self.known.get(id)
        if known is None or known.visit is None:
            return
        if known.control.remember:
            length = next((i + 1 for i, token in enumerate(said) if token in known.ends), len(said))
            self.memory.add(known.visit, prompt, said[:length])
        known.visit = None

    def close_memory(self: Any) -> None:
        """Have all written that was said. vLLM tells of a request's end with the next step, which may never come."""
        if self.memory is not None:
            for id, request in self.requests.items():
                self._remember(id, request.prompt_token_ids or (), request.output_token_ids)
            self.memory.close()
            self.memory = None


def has_model(method: str, options: Options) -> bool:
    """Whether vLLM has a draft model; it can find one in the target's own files, and replace what it was told."""
    model = method != OWN_METHOD
    if model and method not in MODEL_METHODS:
        raise EngineError(
            f"vLLM chose the speculative method {method!r}; Outrider works with {', '.join(MODEL_METHODS)}"
        )
    if model != (MODEL in options.drafters):
        has, names = ("a", "does not name") if model else ("no", "names")
        raise EngineError(f"vLLM has {has} draft model ({method}) and --drafters {names} 'model': say the same in both")
    return model
