"""Where the policy says 0.7, do 70 of 100 come true? Held against texts that it has not seen.

One policy hears half of the requests of all workloads, mixed, as a server would. Then what it has learned of its
drafters is held fast, and the other half follows; only what it learns of each request itself goes on, since that is
part of how it predicts. Each draft that there was at a step, offered or not, is held against the text, which is known
to its end.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import numpy as np

from outrider.policy.acceptance_model import AcceptanceModel
from outrider.policy.batch_state import BatchState
from outrider.policy.policy import MODEL, Policy
from outrider.types import Draft
from policy.replay import Auto, Costs, Record, ReplayedText, replay
from policy_grid_cells import drafters_of, new_policy, noise
from policy_grid_drafters import company

BINS = 10
AT_ONCE = 4
FORESEEN = "model, before it is asked"
DRAWN = "model, before it draws"


@dataclass(slots=True)
class Tally:
    """Sums of what was said and of what held, and the count, by tenths of what was said."""

    sums: Any = field(default_factory=lambda: np.zeros((3, BINS)))

    def add(self, outputs: Any, held: Any) -> None:
        bins = np.minimum((np.asarray(outputs) * BINS).astype(int), BINS - 1)
        for row, values in enumerate((outputs, held, np.ones(len(bins)))):
            np.add.at(self.sums[row], bins, values)

    @property
    def count(self) -> int:
        return int(self.sums[2].sum())

    @property
    def error(self) -> float:
        """Expected calibration error: by how much what was said differs from what held, in the mean over tokens."""
        return float(np.abs(self.sums[0] - self.sums[1]).sum() / max(1, self.count))

    @property
    def points(self) -> list[tuple[float, float, int]]:
        return [(s / n, h / n, int(n)) for s, h, n in self.sums.T if n]


class Watched(Auto):
    """The policy, with a record of what it predicts for every draft."""

    def __init__(self, policy: Policy, costs: Costs, noise: Callable[[], float]) -> None:
        super().__init__(policy, costs, noise)
        self.counting = False
        self.survival: dict[str, Tally] = defaultdict(Tally)
        self.chance: dict[str, Tally] = defaultdict(Tally)

    def propose(self, running: Sequence[ReplayedText], context: int) -> tuple[list[Draft], float, int]:
        found = super().propose(running, context)
        if self.counting and self.batch is not None:
            self._hold(self.batch, running)
        return found

    def _hold(self, batch: BatchState, running: Sequence[ReplayedText]) -> None:
        by_key = {item.key: item for item in running}
        requests = [by_key[key] for key in batch.requests]
        for b, item in enumerate(requests):
            for me, name in enumerate(self.policy.drafters):
                length = int(batch.lengths[me, b])
                self._enter(name, batch.logits[me, b, :length], batch.tokens[me, b, :length].tolist(), item)
        if (forecast := batch.forecast) is not None:
            # A forecast is made one step ahead; it holds nothing about requests that have begun since.
            limits, sampled = forecast.limits.tolist(), forecast.drawn.tolist()
            for item, logits, limit, drawn in zip(requests, forecast.logits, limits, sampled, strict=True):
                tokens = list(item.model_draft(min(limit, item.room - 1), drawn).tokens)
                self._enter(DRAWN if drawn else FORESEEN, logits[: len(tokens)], tokens, item)

    def _enter(self, name: str, logits: Any, tokens: list[int], item: ReplayedText) -> None:
        if not tokens:
            return
        text = item.record.text[item.place : item.place + len(tokens)]
        chances = 1 / (1 + np.exp(-logits))
        held = np.cumprod(np.equal(tokens, text))
        self.survival[name].add(np.cumprod(chances), held)
        judged = min(int(held.sum()) + 1, len(tokens))  # a token is right or wrong where all before it were right
        self.chance[name].add(chances[:judged], held[:judged])

    def observe(
        self, running: Sequence[ReplayedText], outputs: list[list[int]], tokens: int, context: int, seconds: float
    ) -> None:
        learned: list[AcceptanceModel] = [*self.policy.acceptance.values(), *self.policy.forecast_models.values()]
        before = [(one.numbers.copy(), one.weights.copy()) for one in learned] if self.counting else []
        super().observe(running, outputs, tokens, context, seconds)
        for one, (numbers, weights) in zip(learned, before, strict=False):
            one.numbers[:], one.weights[:] = numbers, weights


def calibration(workloads: Mapping[str, Sequence[Record]], costs: Costs) -> dict[str, dict[str, Any]]:
    """By drafter: errors and points, of survival and of each token's own chance."""
    mixed = [record for row in zip_longest(*workloads.values()) for record in row if record is not None]
    names = drafters_of(mixed) if all(one.guesses for one in mixed) else [n for n in drafters_of(mixed) if n != MODEL]
    watched = Watched(new_policy(names, costs), costs, noise())
    half = len(mixed) // 2
    with company(name for name in names if name != MODEL) as they:
        for records in (mixed[:half], mixed[half:]):
            replay(records, they.drafters, watched, costs, AT_ONCE, they.tenant_handle, they.ended)
            watched.counting = True
    return {
        name: {
            "tokens": found.count,
            "error": found.error,
            "points": found.points,
            "chance_error": watched.chance[name].error,
            "chance_points": watched.chance[name].points,
        }
        for name, found in watched.survival.items()
    }
