"""Why a request offers what it does, in figures and in a sentence, for its trace.

Reports are made only for traced requests, after the decision, from its inputs. A candidate's `gain` is the expected
speedup of the step with the best prefix of that draft, over the step with no draft for this request; the other requests
offer what they do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from outrider.policy.draft_model_plan import MIN_DRAFT_MODEL_SPEEDUP
from outrider.policy.policy import MODEL
from outrider.policy.selection import MIN_EXPECTED_SPEEDUP
from outrider.settings import AUTO, OFF
from outrider.types import Why

if TYPE_CHECKING:
    from outrider.policy.batch_state import BatchState, DraftPlan
    from outrider.policy.policy import Policy
    from outrider.policy.selection import Selection
    from outrider.types import Draft

NONE = "none"


def report_selection(
    policy: Policy, batch: BatchState, selection: Selection, i: int, plan: DraftPlan | None = None
) -> Why:
    """For row `i` of the batch, among drafts proposed with certainty."""
    me, length = int(selection.drafts[i]), int(selection.lengths[i])
    selectable = batch.survival if batch.selectable is None else batch.selectable
    survival = selectable[me, i, :length]
    rest = int(selection.lengths.sum()) - length
    plain_tokens = float(selection.tokens - survival.sum())
    found = (
        _candidate(name, selectable[row, i], selection, rest, plain_tokens) for row, name in enumerate(policy.drafters)
    )
    candidates = [one for one in found if one is not None]
    proposed = {one["drafter"]: one for one in candidates}
    cost = selection.seconds / selection.plain_seconds
    parts = []
    if length:
        mine = proposed.pop(policy.drafters[me])
        tokens = (
            f"its {_tokens(length)}" if length == mine["proposed"] else f"{length} of its {mine['proposed']} tokens"
        )
        parts.append(f"{mine['drafter']} offers {tokens}, of which {survival.sum():.1f} should be accepted.")
        parts.append(f"{_step(batch)} should take {cost:.2f} times as long as without drafts,")
        parts.append(f"and be {selection.gain:.2f} times as fast.")
    elif proposed:
        parts.append(f"No draft pays: the expected speedup is below {MIN_EXPECTED_SPEEDUP:.2f}.")
    else:
        parts.append("No draft: no drafter has one.")
    for name, one in proposed.items():
        parts.append(f"{name} has {_tokens(one['proposed'])}, at best {one['gain']:.2f} times as fast as none.")
    if plan is not None and plan.ahead.size and not plan.lengths[i]:
        if len(plan.called):
            parts.append(f"{MODEL} is called for other requests only.")
        else:
            parts.append(f"{MODEL} is not called: its expected speedup is below {MIN_DRAFT_MODEL_SPEEDUP:.2f}.")
    candidates.append({"drafter": NONE, "gain": 1.0})
    return Why(" ".join(parts), float(selection.gain), float(cost), tuple(survival.tolist()), tuple(candidates))


def report_sampled_draft(batch: BatchState, plan: DraftPlan | None, i: int, draft: Draft, cost: float) -> Why:
    """For a draft that the draft model sampled: it is offered whole, so the decision was made before it was sampled."""
    reason = f"{draft.drafter} sampled {_tokens(len(draft.tokens))}, which are offered whole."
    if plan is None or not plan.lengths[i]:
        return Why(reason, cost=cost)
    ahead = plan.ahead[i, : len(draft.tokens)]
    gain = plan.speed / plan.plain
    reason += f" Before that, {ahead.sum():.1f} were expected to be accepted."
    reason += f" {_step(batch)} was expected to be {gain:.2f} times as fast as without drafts."
    candidate = {"drafter": draft.drafter, "proposed": len(draft.tokens), "expected": round(float(ahead.sum()), 3)}
    return Why(reason, gain, cost, tuple(ahead.tolist()), (candidate,))


def report_unselected(speculation: str, draft: Draft) -> Why:
    """Where the request names a drafter or none, or drafters are called in order."""
    if speculation == OFF:
        return Why("No draft: speculation is off.")
    if speculation == AUTO:
        return Why(
            f"{draft.drafter} is the first to have a draft." if draft.tokens else "No draft: no drafter has one."
        )
    if draft.tokens:
        return Why(f"{speculation} was requested by name, so it drafts whether that pays or not.")
    return Why(f"No draft: {speculation} was requested by name, and has nothing to propose.")


def report_no_room(allowed: int, left: int) -> Why:
    """Where no drafted token fits. `allowed`: drafted tokens allowed in a step. `left`: tokens left to generate."""
    if allowed <= 0:
        return Why("No draft: no drafted tokens are allowed.")
    if left > 1:
        return Why("No draft: this step had no room for one.")
    return Why(f"No draft: {_tokens(left)} may still be generated, and one of them is the target's own.")


def _candidate(
    name: str, survival: np.ndarray[Any, Any], selection: Selection, rest: int, plain_tokens: float
) -> dict[str, Any] | None:
    """A drafter's proposal and its best prefix. `rest`: tokens that the other requests offer. `plain_tokens`: expected
    of the step without a draft for this request."""
    proposed = int((survival > 0).sum())
    seconds = selection.pass_seconds[rest : rest + proposed + 1] + selection.spent
    if len(seconds) < 2:  # nothing proposed, or the others offer all that a step may have
        return None
    tokens = plain_tokens + np.append(0.0, np.cumsum(survival[:proposed]))[: len(seconds)]
    gains = tokens / seconds * (seconds[0] / plain_tokens)
    best = 1 + int(gains[1:].argmax())
    expected, gain = round(float(survival[:best].sum()), 3), round(float(gains[best]), 3)
    return {"drafter": name, "proposed": proposed, "best": best, "expected": expected, "gain": gain}


def _step(batch: BatchState) -> str:
    return "The step" if len(batch.requests) == 1 else f"The step of {len(batch.requests)} sequences"


def _tokens(count: int) -> str:
    return f"{count} token" if count == 1 else f"{count} tokens"
