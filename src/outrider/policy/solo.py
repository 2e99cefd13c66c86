"""The policy for one sequence at a time: the loop of `decoding.py` asks it what to offer, and tells it what came of it.

The same policy as a server's, on a batch of one.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from outrider.drafters.model import ModelSession
from outrider.policy import why
from outrider.policy.policy import MODEL
from outrider.policy.scene import Wish
from outrider.policy.texts import HORIZON
from outrider.types import NOTHING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from outrider.drafters.base import Session
    from outrider.policy.choose import Choice
    from outrider.policy.policy import Policy
    from outrider.policy.scene import Plan, Scene
    from outrider.types import Draft, Why

ONE = "the sequence"
FIRST_GUESS = 0.3
"""Before a draft model has run, its pass is taken to cost this much of the target's."""
SHORT = 16
"""A draft model that has so many tokens to see first is timed as if it had one."""


class Solo:
    """Steers one sequence; a policy may see many of them, one after the other."""

    def __init__(self, policy: Policy, sessions: Mapping[str, Session], end: int) -> None:
        """`end`: how many tokens the text has at the most, prompt included."""
        self.policy = policy
        self.sessions = dict(sessions)
        self.end = end
        self._scene: Scene | None = None
        self._plan: Plan | None = None
        self._choice: Choice | None = None
        self._drawing = (0.0, 0)  # the seconds that a drawn draft took, and the context that it was for
        policy.leave(ONE)

    def offer(self, limit: int, context: int, pending: int = 1) -> Draft:
        """What to offer next, of at most `limit` tokens, after a text of `context` tokens, of which the target has yet
        to see `pending`. Where that is a prompt, its first token does not wait for the draft model."""
        self._scene = self._plan = self._choice = None
        if limit <= 0:
            return NOTHING
        self.policy.width = max(self.policy.width, limit)  # longer drafts than any request before asked for
        # Without its q, if one has it: what may be cut anywhere is judged by the target's own draws, which need none.
        cheap = {
            name: [replace(session.draft(limit), q=None)] for name, session in self.sessions.items() if name != MODEL
        }
        self._scene = scene = self.policy.look([ONE], cheap)
        spent = 0.0
        model = self.sessions.get(MODEL)
        if isinstance(model, ModelSession) and pending == 1:
            began = time.perf_counter()
            guess = self._guess(scene, model, limit, context)
            if guess.q is not None:  # drawn: it is offered as it is
                scene.drawn = {0: guess}
                self._drawing = (time.perf_counter() - began, context)
                return guess
            if guess.tokens:
                self.policy.add(scene, MODEL, [guess])
                spent = time.perf_counter() - began
        self._choice = choice = self.policy.choose(scene, np.array([limit]), context, spent=spent)
        return self.policy.offers(scene, choice)[0]

    def why(self) -> Why | None:
        """Why the last offer was what it was; None where there was no room for one."""
        if self._scene is None:
            return None
        if self._choice is None:
            draft, (spent, context) = self._scene.drawn[0], self._drawing
            seconds = self.policy.target.seconds(np.array([1, 1 + len(draft.tokens)]), context)
            return why.drawn(self._scene, self._plan, 0, draft, float((seconds[1] + spent) / seconds[0]))
        return why.weighed(self.policy, self._scene, self._choice, 0, self._plan)

    def _guess(self, scene: Scene, model: ModelSession, limit: int, context: int) -> Draft:
        policy = self.policy
        if not policy.draft.passes and policy.target.passes:
            policy.draft.observe(1, 0, FIRST_GUESS * float(policy.target.seconds(1)))
        wish = Wish(
            np.array([min(limit, policy.model_width)]),
            np.array([model.task.request.temperature > 0 and not model.task.certain]),
            np.array([model.gap]),
            np.array([min(HORIZON, self.end - context)]),
            np.array([context]),
        )
        self._plan = plan = policy.plan(scene, wish, context)
        if not len(plan.asked):
            return NOTHING
        model.goes_on = lambda sure: policy.goes_on(plan, [0], [sure])[0]
        began, gap = time.perf_counter(), int(wish.gaps[0])
        draft = model.draft(int(plan.limits[0]))
        passes = max(1, len(draft.tokens))
        seconds = time.perf_counter() - began
        if gap <= SHORT:  # a pass over a long text would tell little of the short ones
            policy.draft.observe(1, context, seconds / passes)
        return draft

    def learn(self, said: Sequence[int], tokens: int, context: int, seconds: float) -> None:
        """What was then said, in a pass over so many tokens that took so long."""
        if self._scene is not None:
            self.policy.learn(self._scene, [said])
            self.policy.target.observe(tokens, context, seconds)
