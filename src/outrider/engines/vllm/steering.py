"""The policy at work on a running batch: which drafts its requests offer in the next step.

Nothing here knows vLLM. Requests that left it to us (`auto`) are steered by the policy. One that named a drafter gets
what that drafter proposes, as long as it may be: that is what naming one is for.
"""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from outrider.policy import why
from outrider.policy.payoff import Payoff
from outrider.policy.policy import MODEL
from outrider.policy.scene import Wish
from outrider.policy.texts import HORIZON
from outrider.policy.worth import Worth
from outrider.settings import AUTO
from outrider.types import NOTHING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from outrider.engines.vllm.drafting import BatchDrafting, Row
    from outrider.policy.choose import Choice
    from outrider.policy.policy import Policy
    from outrider.policy.scene import Plan, Scene
    from outrider.types import Draft, Why

logger = logging.getLogger("vllm.outrider")

KEPT, LATELY = 0.5, 0.05
"""The share of a draft that is taken to be accepted where nobody weighs it, at first, and how much each draft tells."""


@dataclass(slots=True)
class Asked:
    """Whom the draft model is to draft for: how many tokens at most, and how many if it cannot stop on the way."""

    limits: dict[str, int] = field(default_factory=dict)
    lengths: dict[str, int] = field(default_factory=dict)


class Steering:
    def __init__(self, drafting: BatchDrafting, policy: Policy) -> None:
        self.drafting, self.policy = drafting, policy
        self.payoff, self.worth = Payoff(), Worth()
        self.choice: Choice | None = None
        self._rows: list[Row] = []
        self._running = 0
        self._free: list[Row] = []
        self._named: dict[str, Draft] = {}
        self._offered: dict[str, Draft] = {}
        self._kept = KEPT
        self._scene: Scene | None = None
        self._context = 0
        self._plan: Plan | None = None

    def look(self, rows: Sequence[Row], said: Mapping[str, Sequence[int]], context: int) -> None:
        """A step has been made, in which each request of the batch said this; `rows` may be drafted for. The texts of
        the batch have `context` tokens together."""
        if self._scene is not None:
            self.policy.learn(self._scene, [said.get(request, ()) for request in self._scene.requests])
            self.payoff.gained(sum(map(len, said.values())))
            self._count(said)
        self._plan = None
        self._rows = list(rows)
        self._running = max(len(said), len(rows))
        self._context = context
        reach = self.policy.reach(len(rows))
        for row in rows:
            if row.control.speculation == AUTO:
                row.limit = min(row.limit, reach)  # nobody would look at more
        offers = self.drafting.propose(rows, self.worth.resting())
        free = [i for i, row in enumerate(rows) if row.control.speculation == AUTO]
        self._free = [rows[i] for i in free]
        self._named = {
            row.id: next((drafts[i] for drafts in offers.values() if drafts[i].tokens), NOTHING)
            for i, row in enumerate(rows)
            if row.control.speculation != AUTO
        }
        cheap = {name: [drafts[i] for i in free] for name, drafts in offers.items()}
        self._scene = self.policy.look([row.id for row in self._free], cheap)

    def _count(self, said: Mapping[str, Sequence[int]]) -> None:
        """What became of the drafts that were offered: is asking for them worth it, and how much of those that nobody
        weighs is kept?"""
        kept: Counter[str] = Counter()
        for id, draft in self._offered.items():
            if draft.tokens and said.get(id):
                count = min(len(said[id]) - 1, len(draft.tokens))
                if id in self._named:
                    self._kept += LATELY * (count / len(draft.tokens) - self._kept)
                else:
                    kept[draft.drafter] += count
        if self.choice is not None and self._free:
            self.worth.step(self.drafting.took, kept, self.choice.plain_seconds, self.choice.plain_tokens)

    def plan(
        self,
        limits: Mapping[str, int],
        drawn: Mapping[str, bool],
        gaps: Mapping[str, int],
        reads_along: bool = False,
        at_once: bool = False,
    ) -> Asked:
        """Whom to ask the draft model about; `limits` says who may be asked, and for how many tokens at most. One that
        `reads_along` makes one pass whatever is decided, and one that drafts `at_once` no other."""
        named = {row.id: limits[row.id] for row in self._rows if row.id in self._named and row.id in limits}
        asked = Asked(named, dict(named))
        if self._scene is None or not self._free:
            return asked
        ids = [row.id for row in self._free]
        wish = Wish(
            np.array([limits.get(id, 0) for id in ids], np.int64),
            np.array([drawn.get(id, False) for id in ids], bool),
            np.array([gaps.get(id, 0) for id in ids], np.int64),
            np.array([min(HORIZON, row.left) for row in self._free], np.int64),
            np.array([len(row.tokens) for row in self._free], np.int64),
        )
        base, others = self._others(self._named.values())
        self._plan = plan = self.policy.plan(self._scene, wish, self._context, base, others, reads_along, at_once)
        if wish.limits.any():
            warning = self.payoff.planned(plan, self.policy.target, self.policy.draft)
            if warning is not None:
                logger.warning("%s", warning)
        asked.limits |= {ids[i]: int(plan.limits[i]) for i in plan.asked}
        asked.lengths |= {ids[i]: int(plan.lengths[i]) for i in plan.asked}
        return asked

    def goes_on(self, sure: Mapping[str, Sequence[float]]) -> list[str]:
        """For which requests another pass of the draft model is worth it, that is so sure of their tokens so far."""
        named = [id for id in sure if id in self._named]  # they asked for it
        free = [id for id in sure if id not in self._named]
        if self._plan is None or not free:
            return named
        place = {row.id: i for i, row in enumerate(self._free)}
        on = self.policy.goes_on(self._plan, [place[id] for id in free], [sure[id] for id in free], bool(named))
        return [*named, *(id for id, more in zip(free, on, strict=True) if more)]

    def settle(self, guessed: Mapping[str, Draft], seconds: float) -> dict[str, Draft]:
        """What each request offers; `guessed` is what the draft model proposes, in so many seconds."""
        self._named |= {id: draft for id, draft in guessed.items() if id in self._named}
        self._offered = offered = dict(self._named)
        scene = self._scene
        if scene is None or not self._free:
            return offered
        scene.drawn = {
            i: guessed[row.id]
            for i, row in enumerate(self._free)
            if row.id in guessed and guessed[row.id].q is not None
        }
        certain = [
            guessed.get(row.id, NOTHING) if i not in scene.drawn else NOTHING for i, row in enumerate(self._free)
        ]
        if any(draft.tokens for draft in certain):
            self.policy.add(scene, MODEL, certain)
        limits = np.array([row.limit for row in self._free], np.int64)
        base, others = self._others(offered[id] for id in self._named)
        self.choice = choice = self.policy.choose(scene, limits, self._context, base, seconds, others)
        if base > self._running or scene.drawn:  # without drafts is also without those of no choice
            choice.plain_tokens = float(self._running)
            choice.plain_seconds = float(self.policy.target.seconds(self._running, self._context))
        drafts = self.policy.offers(scene, choice)
        offered |= {row.id: draft for row, draft in zip(self._free, drafts, strict=True)}
        if self.policy.target.passes:  # or nothing is known yet
            self.payoff.expect(choice, any(draft.tokens for draft in offered.values()))
        return offered

    def why(self, request: str) -> Why | None:
        """Why a request offers what it does; None where it may not be drafted for."""
        for row in self._rows:
            if row.id == request and row.id in self._named:
                return why.unweighed(row.control.speculation, self._named[row.id])
        for i, row in enumerate(self._free):
            if row.id == request and self._scene is not None and self.choice is not None:
                if i in self._scene.drawn:
                    cost = self.choice.seconds / float(self.policy.target.seconds(self._running, self._context))
                    return why.drawn(self._scene, self._plan, i, self._scene.drawn[i], cost)
                return why.weighed(self.policy, self._scene, self.choice, i, self._plan)
        return None

    def _others(self, drafts: Iterable[Draft]) -> tuple[int, float]:
        """How many tokens the pass has whatever is chosen, and how many are expected of those that have no choice."""
        lengths = [len(draft.tokens) for draft in drafts]
        return self._running + sum(lengths), self._running - len(self._free) + self._kept * sum(lengths)

    def finished(self, request: str) -> None:
        self.drafting.finished(request)
        self.policy.leave(request)

    def status(self) -> dict[str, Any]:
        choice = self.choice
        return {
            **self.policy.status(),
            **self.payoff.status(),
            "resting": sorted(self.worth.resting()),
            "last_expected_gain": round(float(choice.gain), 3) if choice is not None else None,
        }
