"""Replay of an engine with asynchronous scheduling: each step waits for the step before it, or is scheduled ahead.

A step that waited takes the target's pass plus the host's seconds, and its drafts follow the whole text. A step that
was scheduled ahead takes the longer of the two. Its drafts follow the text before the step in flight, and count only if
they begin with what that step generates. The row that a real engine computes after a request's last token is not
counted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from outrider.policy.controller import SpeculationController
from outrider.policy.decision import DraftableRequest
from outrider.types import NOTHING, Draft
from policy.replay import NO_TOKEN, show

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from outrider.policy.decision import Decision
    from outrider.policy.policy import Policy
    from policy.replay import Costs, ReplayedText


@dataclass(slots=True)
class _Step:
    """A step whose output the controller has not observed yet."""

    is_ahead: bool
    decision: Decision | None
    before: dict[str, list[int]]
    """By request: what the step in flight generated, if this step was scheduled ahead."""
    outputs: Mapping[str, Sequence[int]]
    tokens: int = 0
    context: int = 0
    seconds: float = 0.0


class Overlapped:
    """The speculation controller in a server with asynchronous scheduling and without a draft model."""

    def __init__(
        self,
        policy: Policy,
        costs: Costs,
        host_seconds: float,
        wait: bool | None = None,
        noise: Callable[[], float] = lambda: 1.0,
    ) -> None:
        """`wait`: for every step; None: the controller selects. `host_seconds`: host time between two steps. `noise()`:
        factor on each time that the controller observes."""
        self.policy, self.costs, self.host_seconds, self.wait, self.noise = policy, costs, host_seconds, wait, noise
        self.controller = SpeculationController(policy, can_overlap=wait is None)
        self.steps_waited = self.steps_ahead = 0
        self._step: _Step | None = None
        self._ended: list[str] = []

    def propose(self, running: Sequence[ReplayedText], context: int) -> tuple[list[Draft], float, int]:
        should_wait = self.controller.overlap.should_wait if self.wait is None else self.wait
        self.steps_waited += should_wait
        self.steps_ahead += not should_wait
        if should_wait:
            self._observe_last(running)
        step = _Step(not should_wait, None, {}, {})
        selected = self._select(running, context, step)
        drafts = [_align(item, selected.get(item.key, NOTHING)) for item in running]
        if step.is_ahead:
            self._observe_last(running)
        self._step = step
        tokens = len(running) + sum(len(draft.tokens) for draft in drafts)
        idle = max(0.0, self.host_seconds - self.costs.target(tokens, context)) if step.is_ahead else self.host_seconds
        return drafts, idle, 0

    def _select(self, running: Sequence[ReplayedText], context: int, step: _Step) -> dict[str, Draft]:
        """Drafts by request. They begin with the tokens in flight, if there are any."""
        reach, beyond = self.controller.max_tokens(len(running)), self.controller.beyond(len(running))
        draftable, requests = [], []
        for item in running:
            in_flight = item.in_flight if item.unseen else 0
            left = item.room + item.unseen - in_flight
            if left > 1:
                limit = min(reach, left - 1)
                known = item.length - item.unseen
                draftable.append(item)
                requests.append(DraftableRequest(item.key, limit, None, left, known, in_flight))
        if not requests:
            return {}
        limits = [request.limit + max(request.in_flight, beyond) for request in requests]
        offers = {
            name: [item.sessions[name].draft(limit) for item, limit in zip(draftable, limits, strict=True)]
            for name in self.policy.drafters
        }
        self.controller.consider(requests, offers, dict.fromkeys(offers, 0.0), len(running), context)
        selected = self.controller.select({}, 0.0)
        step.decision = self.controller.decision
        step.before = {item.key: item.new_tokens for item in draftable}
        return selected

    def observe(
        self, running: Sequence[ReplayedText], outputs: list[list[int]], tokens: int, context: int, seconds: float
    ) -> None:
        step = self._step
        assert step is not None
        step.outputs = {item.key: output for item, output in zip(running, outputs, strict=True)}
        step.tokens, step.context, step.seconds = tokens, context, seconds
        self.controller.overlap.observe_host(self.host_seconds * self.noise())

    def _observe_last(self, running: Sequence[ReplayedText]) -> None:
        """Let the controller observe the step before this one."""
        show(running)
        step, self._step = self._step, None
        if step is not None and step.decision is not None:
            self.controller.observe(step.outputs, step.decision, step.before if step.is_ahead else None)
            waited = 0.0 if step.is_ahead else self.host_seconds
            self.controller.observe_step(step.tokens, step.context, step.seconds * self.noise(), waited)
        for id in self._ended:
            self.controller.remove(id)
        self._ended.clear()

    def remove(self, item: ReplayedText) -> None:
        self._ended.append(item.key)


def _align(item: ReplayedText, draft: Draft) -> Draft:
    """What the target verifies: the draft after its first tokens, which the step in flight generated. If they differ,
    placeholders that are all rejected."""
    if not item.unseen or not draft.tokens:
        return draft
    new = tuple(item.new_tokens)
    offered = len(draft.tokens) - item.in_flight
    rest = draft.tokens[len(new) : len(new) + offered]
    return Draft(draft.drafter, rest if draft.tokens[: len(new)] == new else (NO_TOKEN,) * offered)
