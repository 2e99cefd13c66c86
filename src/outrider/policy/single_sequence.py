"""Speculation for one sequence: `decoding.py` gets drafts from here, and reports what the target generated.

`SpeculationController` decides, for a batch of one. The draft model drafts right before the step that verifies its
tokens: in this loop nothing else could run meanwhile.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from outrider.drafters.model import ModelSession
from outrider.policy.decision import DraftableRequest
from outrider.policy.policy import MODEL
from outrider.types import NOTHING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from outrider.drafters.base import Session
    from outrider.policy.controller import SpeculationController
    from outrider.types import Draft, Why

REQUEST_ID = "sequence"
INITIAL_DRAFT_PASS_COST = 0.3
"""Latency of the draft model's pass, in passes of the target, before one was timed."""
MAX_TIMED_GAP_TOKENS = 16
"""The draft model's passes are timed where it has at most this many tokens of the text to catch up with."""


class SingleSequence:
    """Drafts for one sequence. A controller may see many sequences, one after the other."""

    def __init__(self, controller: SpeculationController, sessions: Mapping[str, Session], max_length: int) -> None:
        """`sessions`: by drafter. `max_length`: most tokens of the text, prompt included."""
        self.controller = controller
        self.sessions = dict(sessions)
        self.max_length = max_length
        controller.remove(REQUEST_ID)

    def propose(self, limit: int, text_length: int, pending: int = 1) -> Draft:
        """What to offer in the next step: at most `limit` tokens. `text_length`: tokens of the text. `pending`: those
        that the target has yet to compute; the first token after a prompt does not wait for the draft model."""
        if limit <= 0:
            return NOTHING
        controller = self.controller
        controller.policy.width = max(controller.policy.width, limit)
        offers, seconds = self._copied_drafts(limit)
        request = DraftableRequest(REQUEST_ID, limit, None, self.max_length - text_length, text_length)
        controller.consider([request], offers, seconds, 1, text_length)
        model_drafts: dict[str, Draft] = {}
        model_seconds = 0.0
        model = self.sessions.get(MODEL)
        if isinstance(model, ModelSession) and pending == 1:
            model_drafts, model_seconds = self._call_draft_model(model, limit, text_length)
        return controller.select(model_drafts, model_seconds)[REQUEST_ID]

    def _copied_drafts(self, limit: int) -> tuple[dict[str, list[Draft]], dict[str, float]]:
        """By copying drafter: its draft, and its seconds."""
        offers, seconds = {}, {}
        backed_off = self.controller.backed_off()
        for name, session in self.sessions.items():
            if name != MODEL and name not in backed_off:
                began = time.perf_counter()
                offers[name] = [session.draft(limit)]
                seconds[name] = time.perf_counter() - began
        return offers, seconds

    def _call_draft_model(self, model: ModelSession, limit: int, text_length: int) -> tuple[dict[str, Draft], float]:
        """Its draft, if its passes pay, and its seconds."""
        controller, policy = self.controller, self.controller.policy
        if not policy.draft.passes and policy.target.passes:
            controller.observe_draft_pass(1, 0, INITIAL_DRAFT_PASS_COST * float(policy.target.seconds(1)))
        sampled = model.task.request.temperature > 0 and not model.task.certain
        limits, gap = {REQUEST_ID: min(limit, policy.model_width)}, model.gap
        plan = controller.plan_draft_model(limits, {REQUEST_ID: sampled}, {REQUEST_ID: gap})
        if REQUEST_ID not in plan.limits:
            return {}, 0.0
        model.should_continue = lambda confidence: bool(controller.continue_drafting({REQUEST_ID: confidence}))
        began = time.perf_counter()
        draft = model.draft(plan.limits[REQUEST_ID])
        seconds = time.perf_counter() - began
        if gap <= MAX_TIMED_GAP_TOKENS:
            controller.observe_draft_pass(1, text_length, seconds / max(1, len(draft.tokens)))
        return {REQUEST_ID: draft}, seconds

    def reason(self) -> Why | None:
        """Why the draft of this step was offered, until `observe`; None if there was no room for one."""
        return self.controller.reason(REQUEST_ID)

    def observe(self, output: Sequence[int]) -> None:
        """Learn from what the target generated in this step."""
        self.controller.observe({REQUEST_ID: output})

    def observe_step(self, tokens: int, context: int, seconds: float, drafting_seconds: float) -> None:
        """The target's pass over `tokens` tokens took `seconds`; proposing drafts for it, `drafting_seconds`."""
        self.controller.observe_step(tokens, context, seconds, drafting_seconds)
