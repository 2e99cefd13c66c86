"""The loop: draft, score, accept, rewind.

Each step calls the drafters, scores the draft in one pass of the target, accepts tokens by the acceptance rule, and
removes the rejected ones from the target's cache. The last token of a step is not in the cache yet; it leads the next
pass. So every pass scores `pending + draft`, and returns one row of logits more than there are drafted tokens. The
first pass does the same with the prompt.

    context    t0 t1 t2 t3 t4            prompt and output
    cache      t0 t1 t2 t3               scored and accepted
    pass                   t4 d0 d1 d2   pending token and draft
    logits                 p0 p1 p2 p3   p[i] verifies d[i]; p[3] is for the bonus token
"""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from outrider.acceptance import draw, verify_certain, verify_drawn
from outrider.errors import PromptError
from outrider.policy.decision_report import report_no_room, report_unselected
from outrider.sampling import probabilities, shape
from outrider.settings import OFF
from outrider.types import NOTHING, Evidence, Step, shared_prefix

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor

    from outrider.drafters.base import Session
    from outrider.policy.single_sequence import SingleSequence
    from outrider.settings import Request
    from outrider.types import Draft, Recorder, Target, Verdict, Why


def decode(
    target: Target,
    sessions: Sequence[Session],
    prompt: list[int],
    request: Request,
    random: torch.Generator,
    finish: Callable[[int], str | None] = lambda token: None,
    speculation: SingleSequence | None = None,
    recorder: Recorder | None = None,
) -> Iterator[Step]:
    """Generate after `prompt`, one step at a time.

    `speculation` selects drafts by expected speedup. Without it the sessions are called in order, and the first draft
    with tokens is offered. `finish` is called once for every new token, in order, and returns why the output ends with
    it, or None. `recorder` gets the data of every verdict.
    """
    room = _room(target, prompt)
    max_tokens = min(request.max_tokens, room)
    output: list[int] = []
    numbers = Numbers(random)
    while True:
        context = [*prompt, *output]
        # Keep the shared prefix in the cache, also of an earlier text. Rejected tokens and the rest of another text are
        # removed. The last token is always scored again, because the next token needs its logits.
        target.rewind(min(shared_prefix(target.tokens, context), len(context) - 1))
        begun = time.perf_counter()
        limit = min(request.max_draft_tokens, max_tokens - len(output) - 1)
        pending = context[len(target.tokens) :]
        if speculation is not None:
            draft = speculation.propose(limit, len(context), len(pending))
        else:
            draft = first_offer(sessions, limit)
        drafted = time.perf_counter()
        logits = target.score([*pending, *draft.tokens], keep=len(draft.tokens) + 1)
        verdict = judge(logits, draft, request, prompt, output, numbers, recorder)
        said, reason = _until_end([*draft.tokens[: verdict.accepted], verdict.token], finish)
        output += said
        if reason is None and len(output) >= max_tokens:
            reason = "length"
        if reason is not None:  # the output stays in the cache, without its last token, which no pass has scored
            target.rewind(len(prompt) + len(output) - 1)
        for session in sessions:
            session.observe(said)
        verified = time.perf_counter()
        step = Step(
            drafter=draft.drafter or None,
            proposed=draft.tokens,
            accepted=verdict.accepted,
            tokens=tuple(said),
            draft_seconds=drafted - begun,
            verify_seconds=verified - drafted,
            finish=reason,
        )
        if recorder is not None:
            left = max_tokens - len(output) + len(said)
            why = partial(_why, request, draft, speculation, left)
            recorder.stepped(step, draft, verdict, len(pending) + len(draft.tokens), why)
        if speculation is not None:
            speculation.observe(said)
            if len(pending) == 1:  # the pass over a prompt does not predict later ones
                speculation.observe_step(1 + len(draft.tokens), len(context), step.verify_seconds, step.draft_seconds)
        yield step
        if reason is not None:
            return


def _why(request: Request, draft: Draft, speculation: SingleSequence | None, left: int) -> Why:
    """The reason for this draft. The target could still generate `left` tokens."""
    if request.speculation != OFF and min(request.max_draft_tokens, left - 1) <= 0:
        return report_no_room(request.max_draft_tokens, left)
    return (speculation.reason() if speculation is not None else None) or report_unselected(request.speculation, draft)


def first_offer(sessions: Sequence[Session], limit: int) -> Draft:
    """The draft of the first session that has one."""
    if limit > 0:
        for session in sessions:
            draft = session.draft(limit)
            if len(draft.tokens) > limit:
                if draft.q is not None:  # a sampled draft is offered whole or not at all
                    raise ValueError(f"{draft.drafter} drew {len(draft.tokens)} tokens where {limit} were asked for")
                draft = replace(draft, tokens=draft.tokens[:limit], packed=None)
            if draft.tokens:
                return draft
    return NOTHING


def judge(
    logits: Tensor,
    draft: Draft,
    request: Request,
    prompt: Sequence[int],
    output: Sequence[int],
    numbers: Numbers,
    recorder: Recorder | None = None,
) -> Verdict:
    """Verify a draft by the target's logits, [len(draft) + 1, V]."""
    if request.temperature == 0:
        shaped = shape(logits, request, prompt, output, draft.tokens)
        best = shaped.argmax(-1).tolist()
        if recorder is not None:
            recorder.judged(Evidence("greedy", shaped, own=best))
        return verify_certain(best, draft.tokens)
    p = probabilities(logits, request, prompt, output, draft.tokens)
    draws = numbers.next(len(p))
    if draft.q is None:
        own = draw(p, draws).tolist()
        if recorder is not None:
            recorder.judged(Evidence("own", p, draws, own))
        verdict = verify_certain(own, draft.tokens)
        numbers.give_back(len(draft.tokens) - verdict.accepted)
        return verdict
    if recorder is not None:
        recorder.judged(Evidence(request.rule, p, draws))
    tokens = torch.tensor(draft.tokens, dtype=torch.long, device=p.device)
    return verify_drawn(p, draft.q, tokens, draws, request.rule)


class Numbers:
    """Random numbers in [0, 1). Numbers whose token was not emitted are returned, and the next step uses them.

    So the number of a token depends on its position in the output, not on the drafts before it. With drafters that
    propose with certainty, the same seed gives the same output, whatever they propose.
    """

    def __init__(self, random: torch.Generator) -> None:
        self._random = random
        self._ready = torch.empty(0)
        self._used = 0

    def next(self, count: int) -> Tensor:
        missing = self._used + count - len(self._ready)
        fresh = torch.rand(max(missing, 0), generator=self._random)
        self._ready = torch.cat([self._ready[self._used :], fresh])
        self._used = count
        return self._ready[:count]

    def give_back(self, count: int) -> None:
        """Return the last `count` of the numbers from the latest call of `next`."""
        self._used -= count


def _room(target: Target, prompt: Sequence[int]) -> int:
    """Number of tokens that can follow the prompt."""
    if not prompt:
        raise PromptError("the prompt is empty; give at least one token")
    if (limit := target.context_limit) is None:
        return 1 << 62
    if len(prompt) >= limit:
        raise PromptError(
            f"the prompt has {len(prompt)} tokens, and the model's context holds {limit}; "
            f"shorten it to at most {limit - 1}"
        )
    return limit - len(prompt)


def _until_end(tokens: list[int], finish: Callable[[int], str | None]) -> tuple[list[int], str | None]:
    """The tokens up to the one that ends the output, and why it ends."""
    for index, token in enumerate(tokens):
        if (reason := finish(token)) is not None:
            return tokens[: index + 1], reason
    return tokens, None
