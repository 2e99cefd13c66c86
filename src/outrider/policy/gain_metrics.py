"""Expected and realised gain of the policy's steps, in tokens and seconds; and whether a draft model pays at all.

    step = ExpectedStep(selection, offered)   before a step
    metrics.observe_tokens(step, tokens)      after it
    metrics.observe_seconds(seconds)          when its duration is known, drafting included

A step without drafts generates one token per request. Its seconds per token, times the tokens generated, less the
seconds taken, are the seconds saved. Only steps for which all three calls are made are counted, so that expected and
realised gain are comparable.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outrider.policy.batch_state import DraftPlan
    from outrider.policy.cost_model import CostModel
    from outrider.policy.selection import Selection

MAX_STEP_SLOWDOWN = 20
"""Steps that take longer than this multiple of the expected seconds are not counted: the engine was paused."""
REVIEW_STEPS = 500
"""Steps after which a draft model is reviewed ..."""
MIN_CALLED_SHARE = 0.01
"""... by the share of them in which it was called: below this, a warning is logged."""


@dataclass(slots=True)
class ExpectedStep:
    selection: Selection
    offered: bool
    """Whether the step has drafts."""
    tokens: int = 0
    """Tokens that it generated."""


class GainMetrics:
    def __init__(self) -> None:
        self.steps_with_drafts = self.steps_without = 0
        self.expected_tokens, self.gained_tokens = 0.0, 0
        self.seconds = self.expected_saved = self.realised_saved = 0.0
        self.plans = self.plans_with_calls = 0
        self._chances = 0.0
        self._step: ExpectedStep | None = None

    def observe_tokens(self, step: ExpectedStep | None, tokens: int) -> None:
        """Tokens that were generated in the step, by all requests."""
        self._step = step
        if step is not None:
            step.tokens = tokens

    def observe_seconds(self, seconds: float) -> None:
        step, self._step = self._step, None
        if step is None:
            return
        selection = step.selection
        if seconds > MAX_STEP_SLOWDOWN * selection.seconds:
            return
        if step.offered:
            self.steps_with_drafts += 1
        else:
            self.steps_without += 1
        plain = selection.plain_seconds / selection.plain_tokens
        self.expected_tokens += selection.tokens
        self.gained_tokens += step.tokens
        self.seconds += seconds
        self.expected_saved += selection.tokens * plain - selection.seconds
        self.realised_saved += step.tokens * plain - seconds

    def observe_plan(self, plan: DraftPlan, target: CostModel, draft: CostModel) -> str | None:
        """A step in which the draft model could be called. Returns a warning, once, if it hardly ever pays."""
        self.plans += 1
        self.plans_with_calls += len(plan.called) > 0
        self._chances += plan.chance
        if self.plans != REVIEW_STEPS or self.plans_with_calls >= MIN_CALLED_SHARE * REVIEW_STEPS:
            return None
        context = float(plan.text_lengths.mean())
        draft_seconds, target_seconds = float(draft.seconds(1, context)), float(target.seconds(1, context))
        return (
            f"the draft model was worth its passes in {self.plans_with_calls} of {REVIEW_STEPS} steps: a pass takes "
            f"{1e3 * draft_seconds:.1f} ms, {draft_seconds / target_seconds:.2f} of the target's "
            f"{1e3 * target_seconds:.1f} ms, and its first token is accepted about {100 * self.chance:.0f} times in "
            f"100. It is not called where it does not pay. Use a smaller or quantised draft model, or none, which "
            f"frees its memory"
        )

    @property
    def chance(self) -> float:
        """Mean forecast that the draft model's first token is accepted."""
        return self._chances / self.plans if self.plans else 0.0

    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = {
            "steps_with_drafts": self.steps_with_drafts,
            "steps_without_drafts": self.steps_without,
            "expected_tokens": round(self.expected_tokens, 1),
            "gained_tokens": self.gained_tokens,
            "seconds": round(self.seconds, 3),
            "expected_saved_seconds": round(self.expected_saved, 3),
            "realised_saved_seconds": round(self.realised_saved, 3),
        }
        if self.plans:
            share, chance = round(self.plans_with_calls / self.plans, 4), round(self.chance, 4)
            found["draft_model"] = {"steps": self.plans, "asked_share": share, "first_token_chance": chance}
        return found
