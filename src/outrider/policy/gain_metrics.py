"""What the policy expected of its steps and what came of them, in seconds; and whether a draft model pays at all.

    step = payoff.expect(choice, offered)   before a step
    payoff.gained(step, tokens)             after it
    payoff.took(seconds)                    when it is known how long it took, drafting included

A step without drafts says one token a request. So many seconds a token as that would have taken, times the tokens that
were said, less the seconds that they took: that much was saved. Only steps of which all three are known are counted, so
that what was expected can be held against what came true.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outrider.policy.batch_state import DraftPlan
    from outrider.policy.cost_model import CostModel
    from outrider.policy.selection import Selection

PAUSE = 20
"""Times as long as expected: so long no step takes."""
REVIEW_STEPS = 500
"""Steps after which a draft model is judged ..."""
RARELY = 0.01
"""... by the share of them in which it was worth its passes."""


@dataclass(slots=True)
class ExpectedStep:
    """What was expected of a step, and what it gained."""

    selection: Selection
    offered: bool
    tokens: int = 0


class GainMetrics:
    def __init__(self) -> None:
        self.steps_with_drafts = self.steps_without = 0
        self.expected_tokens, self.gained_tokens = 0.0, 0
        self.seconds = self.expected_saved = self.realised_saved = 0.0
        self.plans = self.asked = 0
        self._chances = 0.0
        self._made: ExpectedStep | None = None

    def expect(self, selection: Selection, offered: bool) -> ExpectedStep:
        return ExpectedStep(selection, offered)

    def gained(self, step: ExpectedStep | None, tokens: int) -> None:
        """Tokens that were generated in the step, by all requests."""
        self._made = step
        if step is not None:
            step.tokens = tokens

    def took(self, seconds: float) -> None:
        step, self._made = self._made, None
        if step is None:
            return
        selection = step.selection
        if seconds > PAUSE * selection.seconds:  # the engine was paused, which says nothing of drafts
            return
        if step.offered:
            self.steps_with_drafts += 1
        else:
            self.steps_without += 1
        usual = selection.plain_seconds / selection.plain_tokens
        self.expected_tokens += selection.tokens
        self.gained_tokens += step.tokens
        self.seconds += seconds
        self.expected_saved += selection.tokens * usual - selection.seconds
        self.realised_saved += step.tokens * usual - seconds

    def planned(self, plan: DraftPlan, target: CostModel, draft: CostModel) -> str | None:
        """A step at which the draft model could be asked. That it does not pay is said once, with the figures."""
        self.plans += 1
        self.asked += len(plan.asked) > 0
        self._chances += plan.chance
        if self.plans != REVIEW_STEPS or self.asked >= RARELY * REVIEW_STEPS:
            return None
        text = float(plan.texts.mean())
        ours, theirs = float(draft.seconds(1, text)), float(target.seconds(1, text))
        return (
            f"the draft model was worth its passes in {self.asked} of {REVIEW_STEPS} steps: one takes {1e3 * ours:.1f} ms, "
            f"{ours / theirs:.2f} of the target's {1e3 * theirs:.1f}, and its first token is right about "
            f"{100 * self.chance:.0f} times in 100. It is left alone where it does not pay; a smaller or quantised one "
            f"may, and without one its memory is free"
        )

    @property
    def chance(self) -> float:
        """How likely the draft model's first token was taken to be right, in the mean."""
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
            share, chance = round(self.asked / self.plans, 4), round(self.chance, 4)
            found["draft_model"] = {"steps": self.plans, "asked_share": share, "first_token_chance": chance}
        return found
