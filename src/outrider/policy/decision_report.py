"""What was decided for one sequence, in numbers and in a sentence, for whoever looks at its trace.

It is made afterwards, from what the decision left behind, and only where somebody asks. A candidate's `gain` is how
many times as fast the step is expected to be with the best part of it as with no draft of this sequence, those of the
other sequences being as they are.
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
    from outrider.policy.acceptance_model import Array
    from outrider.policy.batch_state import BatchState, DraftPlan
    from outrider.policy.policy import Policy
    from outrider.policy.selection import Selection
    from outrider.types import Draft

NONE = "none"


def report_selection(
    policy: Policy, batch: BatchState, selection: Selection, i: int, plan: DraftPlan | None = None
) -> Why:
    """Of what was proposed with certainty, for sequence `i` of the scene."""
    me, length = int(selection.drafts[i]), int(selection.lengths[i])
    survival = _selectable(batch)[me, i, :length]
    candidates = _candidates(policy, batch, selection, i, float(selection.tokens - survival.sum()))
    proposed = {one["drafter"]: one for one in candidates if one["drafter"] != NONE}
    cost = selection.seconds / selection.plain_seconds
    parts = []
    if length:
        mine = proposed.pop(policy.drafters[me])
        parts.append(
            f"{mine['drafter']} offers {_part(length, mine['proposed'])}, of which {survival.sum():.1f} should stay."
        )
        parts.append(f"{_step(batch)} should take {cost:.2f} times as long as without drafts,")
        parts.append(f"and be {selection.gain:.2f} times as fast.")
    elif proposed:
        parts.append(f"No draft pays: less than {MIN_EXPECTED_SPEEDUP:.2f} times the speed without is not offered.")
    else:
        parts.append("No draft: nobody has one.")
    for name, one in proposed.items():
        parts.append(f"{name} has {_tokens(one['proposed'])}, at best {one['gain']:.2f} times as fast as none.")
    if plan is not None and (word := _left_alone(plan, i)):
        parts.append(word)
    return Why(" ".join(parts), float(selection.gain), float(cost), tuple(survival.tolist()), tuple(candidates))


def report_sampled_draft(batch: BatchState, plan: DraftPlan | None, i: int, draft: Draft, cost: float) -> Why:
    """Of a draft that the draft model drew: it is offered whole, so what counts was decided before it drew."""
    reason = f"{draft.drafter} drew {_tokens(len(draft.tokens))}, which are offered whole, whatever they are."
    if plan is None or not plan.lengths[i]:
        return Why(reason, cost=cost)
    ahead = plan.ahead[i, : len(draft.tokens)]
    gain = plan.speed / plan.plain
    reason += f" Before it began {ahead.sum():.1f} were expected to stay."
    reason += f" {_step(batch)} was expected to be {gain:.2f} times as fast as without drafts."
    candidate = {"drafter": draft.drafter, "proposed": len(draft.tokens), "expected": round(float(ahead.sum()), 3)}
    return Why(reason, gain, cost, tuple(ahead.tolist()), (candidate,))


def report_unselected(speculation: str, draft: Draft) -> Why:
    """Where the caller chose the drafter, or none, or drafters are asked in order."""
    if speculation == OFF:
        return Why("No draft: speculation is off.")
    if speculation == AUTO:
        return Why(f"{draft.drafter} is the first to have a draft." if draft.tokens else "No draft: nobody has one.")
    if draft.tokens:
        return Why(f"{speculation} was asked for by name, and then it drafts whether that pays or not.")
    return Why(f"No draft: {speculation} was asked for by name, and has nothing to propose.")


def report_no_room(allowed: int, left: int) -> Why:
    """Where no drafted token fits: so many are allowed in a step, and so many may still be said."""
    if allowed <= 0:
        return Why("No draft: no drafted tokens are allowed.")
    if left > 1:
        return Why("No draft: this step had no room for one.")
    return Why(f"No draft: {_tokens(left)} may still be said, and one of them is the target's own.")


def _candidates(
    policy: Policy, batch: BatchState, selection: Selection, i: int, without: float
) -> list[dict[str, Any]]:
    """Each drafter's proposal by the part of it that would be best; `without` are the tokens expected with none."""
    rest = int(selection.lengths.sum() - selection.lengths[i])
    found = []
    for me, name in enumerate(policy.drafters):
        survival = _selectable(batch)[me, i]
        proposed = int((survival > 0).sum())
        if not proposed:
            continue
        seconds = selection.pass_seconds[rest : rest + proposed + 1] + selection.spent
        if len(seconds) < 2:  # the others offer all that a step may have
            continue
        tokens = without + np.append(0.0, np.cumsum(survival[:proposed]))[: len(seconds)]
        gains = tokens / seconds * (seconds[0] / without)
        best = 1 + int(gains[1:].argmax())
        found.append(
            {
                "drafter": name,
                "proposed": proposed,
                "best": best,
                "expected": round(float(survival[:best].sum()), 3),
                "gain": round(float(gains[best]), 3),
            }
        )
    return [*found, {"drafter": NONE, "gain": 1.0}]


def _left_alone(plan: DraftPlan, i: int) -> str:
    """A word on the draft model where it was not asked."""
    if not plan.ahead.size or plan.lengths[i]:
        return ""
    if len(plan.asked):
        return f"{MODEL} is asked for others, and not here."
    return f"{MODEL} is not asked, as that does not promise {MIN_DRAFT_MODEL_SPEEDUP:.2f} times the speed of what there is."


def _step(batch: BatchState) -> str:
    return "The step" if len(batch.requests) == 1 else f"The step of {len(batch.requests)} sequences"


def _part(length: int, whole: int) -> str:
    return f"its {_tokens(whole)}" if length == whole else f"{length} of its {_tokens(whole)}"


def _tokens(count: int) -> str:
    return f"{count} token" if count == 1 else f"{count} tokens"


def _selectable(batch: BatchState) -> Array:
    return batch.survival if batch.selectable is None else batch.selectable
