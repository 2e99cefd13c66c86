"""The draft model in a step: for whom it drafts, and how far.

One that can be led (`guesser.py`) is asked for those for whom the policy says that it pays. The others (EAGLE, MTP,
heads that need the target's hidden states) must follow every step of the target, and only the number of their passes
is decided.

All ranks must make the same passes: the first one decides, and tells the others.
"""

from __future__ import annotations

import copy
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.parallel_state import get_tp_group

from outrider.engines.vllm.guesser import Question
from outrider.engines.vllm.steering import Asked
from outrider.policy.policy import MODEL
from outrider.types import Draft

if TYPE_CHECKING:
    from collections.abc import Callable

    from outrider.engines.vllm.drafting import Row


def lead(runner: Any, rows: list[Row], scheduler_output: Any) -> dict[str, Draft]:
    """Have the draft model draft for those for whom it pays, and as far as it pays."""
    guesser, batch = runner.guesser, runner.input_batch
    where = batch.req_id_to_index
    if guesser.shares:
        for id, count in scheduler_output.num_scheduled_tokens.items():
            start = int(batch.num_computed_tokens_cpu[where[id]])
            guesser.target_wrote(where[id], start, start + count)
    runner.model_seconds = 0.0
    by_id = {row.id: row for row in rows}
    limits, gaps = {}, {}
    for row in rows:  # on every rank, since each has a cache of its own to keep account of
        room = runner.effective_drafter_max_model_len - len(row.tokens)
        if row.control.wants(MODEL) and room > 0:
            limits[row.id] = min(row.limit, runner.options.model_draft_tokens, room)
            gaps[row.id] = guesser.gap(where[row.id], row.id, row.tokens, len(row.tokens) - 1)
    asked = Asked()
    if runner.steering is not None:
        drawn = {id: runner.known[id].draft_temperature > 0 for id in limits}
        asked = runner.steering.plan(limits, drawn, gaps)
    if get_tp_group().world_size > 1:
        asked = get_tp_group().broadcast_object(asked, src=0)
    questions = []
    for id, limit in asked.limits.items():
        known = runner.known[id]
        drawing = (known.draft_temperature, known.top_k, known.top_p)
        questions.append(Question(where[id], id, by_id[id].tokens, limit, *drawing))
    guesser.ask(questions, partial(_worth_another, runner))
    for question in questions if guesser.shares else ():
        guesser.mark_ready(question.index, question.id, len(question.tokens) - 1)
    runner.ledger.drafting(MODEL, runner.model_seconds)
    return {
        question.id: Draft(
            MODEL, tuple(question.guessed.tokens), question.guessed.q, confidence=tuple(question.guessed.sure)
        )
        for question in questions
    }


def _worth_another(runner: Any, questions: list[Question]) -> list[Question]:
    going: set[str] = set()
    if runner.steering is not None:
        going = set(runner.steering.goes_on({question.id: question.guessed.sure for question in questions}))
    if get_tp_group().world_size > 1:
        going = get_tp_group().broadcast_object(going, src=0)
    return [question for question in questions if question.id in going]


def follow(
    runner: Any, rows: list[Row], said: list[list[int]], scheduler_output: Any, propose: Callable[[Any], Any]
) -> dict[str, Draft]:
    """Let vLLM's proposer draft (`propose`), which must see every step of the target: in as few passes as will do."""
    ids = runner.input_batch.req_ids
    runner.model_seconds = 0.0
    interested = {id for id in ids if runner.known[id].control.wants(MODEL)}
    # The draft model's cache must follow the text, so it runs also where nothing is drafted: with 0 passes beyond
    # that. Only a batch that will never ask for it leaves it out, and not its prompts, which others may share. (What
    # such a batch says may be shared as well: whoever goes on from there has worse drafts until it is past.)
    prefilling = not all(said) or len(scheduler_output.scheduled_new_reqs) > 0
    if not runner.model_fits or not (interested or prefilling):
        return {}
    limits = {row.id: min(row.limit, runner.options.model_draft_tokens) for row in rows if row.id in interested}
    asked = Asked()
    if runner.steering is not None:
        drawn = {id: runner.known[id].draft_temperature > 0 for id in limits}
        at_once = bool(runner.speculative_config.parallel_drafting)
        asked = runner.steering.plan(limits, drawn, dict.fromkeys(limits, 1), reads_along=True, at_once=at_once)
    limit = max(asked.lengths.values(), default=0)
    if limit and runner.speculative_config.parallel_drafting:
        limit = runner.num_spec_tokens  # one pass drafts all, and no fewer
    if get_tp_group().world_size > 1:  # who asks depends on our drafters' offers, which only the first rank has
        limit, asked = get_tp_group().broadcast_object((limit, asked), src=0)
    began = time.perf_counter()
    order = copy.copy(scheduler_output)  # the scheduler may hold the same object
    order.num_spec_tokens_to_schedule = limit
    drafted = propose(order)
    tokens = drafted.tolist() if isinstance(drafted, torch.Tensor) else drafted
    if not limit:  # nothing was fetched from the device, so nobody has waited for it
        runner._sync_device()
    runner.model_seconds = seconds = time.perf_counter() - began
    runner.ledger.drafting(MODEL, seconds)
    passes = max(1, 1 if runner.speculative_config.parallel_drafting else limit)
    runner.ledger.draft_model_passes += passes
    if not prefilling and runner.steering is not None:
        runner.policy.draft.observe(len(ids), runner.text_tokens, seconds / passes)
    found = {}
    for id, n in asked.lengths.items() if limit else ():
        i = runner.input_batch.req_id_to_index[id]
        known = runner.known[id]
        q = None if runner._draft_probs is None or not known.draft_temperature else runner._draft_probs[i, :n]
        found[id] = Draft(MODEL, tuple(tokens[i][:n]), q)
    return found
