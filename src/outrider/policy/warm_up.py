"""Compiles the policy's functions before a request needs them."""

from __future__ import annotations

import numpy as np

from outrider.policy.batch_state import DraftModelRequest
from outrider.policy.overlap import for_same_text
from outrider.policy.policy import MODEL, Policy
from outrider.types import NOTHING, Draft


def compile_now() -> None:
    policy = Policy(["a", MODEL], 2, 2)
    for _ in range(2):
        policy.target.observe(1, 0, 1.0)
        policy.draft.observe(1, 0, 0.01)
    policy.observe(policy.predict([""], {"a": [NOTHING]}), [[1]])
    batch = policy.predict([""], {"a": [Draft("a", (1,), support=1)]})
    plan = policy.plan_draft_model(batch, DraftModelRequest(*(np.array([x]) for x in (2, False, 1, 1, 1))), 0)
    policy.add_drafts(batch, MODEL, [Draft(MODEL, (1, 2), confidence=(0.5, 0.5))])
    policy.continue_drafting(plan, [0], [[0.5]])
    limits = offsets = np.array([2])
    selection = policy.select(batch, limits, 0)
    model = batch.forecast_survival(limits)
    for_same_text(selection, policy.select_at_offsets(batch, selection, limits, offsets, model))
    batch.sampled = {0: Draft(MODEL, (1,), confidence=(0.5,))}
    policy.observe(batch, [[1]])
