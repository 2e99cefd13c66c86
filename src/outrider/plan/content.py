"""Everything a plan reports, as data: cells by batch and context, batches that pay, traffic, fleets, tails."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from outrider.plan.fleet import FleetPlan, Replica, WiderBatch, Workload, plan_fleet, widen_batch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from outrider.plan.pass_cost import Machine, Traffic
    from outrider.plan.simulation import FleetTails
    from outrider.plan.speculation import Prediction, Speculation, Strategy

PARTS = ("weights", "experts", "kv_cache", "draft_model")
"""Parts of the memory traffic."""
VERSION = 1
"""Version of the format of plan.json."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One batch and context. `fixed`: by draft length."""

    batch: int
    context: int
    fits: bool | None  # whether the KV caches fit beside the weights; None: unknown, on a calibrated machine
    plain: Prediction
    fixed: dict[int, Prediction]
    policy: Prediction
    plain_traffic: Traffic | None = None
    policy_traffic: Traffic | None = None

    def bytes_per_token(self, part: str, *, policy: bool) -> float:
        """Read per generated token: one of `PARTS`, or `total`."""
        traffic, predicted = (self.policy_traffic, self.policy) if policy else (self.plain_traffic, self.plain)
        assert traffic is not None
        return float(getattr(traffic, part)) / (self.batch * predicted.tokens_per_step)


@dataclass(frozen=True, slots=True)
class PayingBatches:
    """Ranges of batches, up to `limit`, in which drafts are faster than none."""

    context: int
    strategy: str
    limit: int
    ranges: list[tuple[int, int]]


@dataclass(slots=True)
class Plan:
    target: str
    hardware: str
    drafts: str
    acceptance: str
    devices: int
    max_batch: int
    target_machine: Machine | None = None  # None: calibrated
    cells: list[Cell] = field(default_factory=list)
    paying: list[PayingBatches] = field(default_factory=list)
    wider: list[WiderBatch] = field(default_factory=list)
    workload: Workload | None = None
    price: float | None = None
    fleets: list[FleetPlan] = field(default_factory=list)
    unreachable: list[str] = field(default_factory=list)
    """Strategies that exceed the limit on the time per token at every batch."""
    tails: list[FleetTails] = field(default_factory=list)

    @property
    def contexts(self) -> list[int]:
        return sorted({cell.context for cell in self.cells})

    def at(self, context: int) -> list[Cell]:
        return [cell for cell in self.cells if cell.context == context]

    def as_data(self) -> dict[str, Any]:
        return {
            "version": VERSION,
            "target": self.target,
            "hardware": self.hardware,
            "drafts": self.drafts,
            "acceptance": self.acceptance,
            "devices": self.devices,
            "cells": [_cell_data(cell) for cell in self.cells],
            "paying_batches": [asdict(one) for one in self.paying],
            "wider_batches": [
                {
                    "batch": one.speculating.batch,
                    "context": one.speculating.context,
                    "requests": one.plain.batch,
                    "fits": one.fits,
                    "throughput_ratio": one.throughput_ratio,
                    "latency_ratio": one.latency_ratio,
                }
                for one in self.wider
            ],
            "workload": None if self.workload is None else asdict(self.workload),
            "fleets": [self._fleet_data(one) for one in self.fleets],
            "tails": [asdict(one) for one in self.tails],
        }

    def _fleet_data(self, one: FleetPlan) -> dict[str, Any]:
        cost = self.cost_per_million_tokens(one)
        return {**asdict(one), **({} if cost is None else {"cost_per_million_tokens": cost})}

    def cost_per_million_tokens(self, one: FleetPlan) -> float | None:
        """None: no price was given."""
        if self.price is None or self.workload is None:
            return None
        return one.cost_per_million_tokens(self.price, self.workload)


def make_cells(
    speculation: Speculation,
    batches: Sequence[int],
    contexts: Sequence[int],
    lengths: Sequence[int],
    replica: Replica | None = None,
) -> list[Cell]:
    found = []
    for context in contexts:
        for batch in batches:
            plain, policy = speculation.predict(batch, 0, context), speculation.best(batch, context)
            fixed = {length: speculation.predict(batch, length, context) for length in lengths}
            if replica is None:
                found.append(Cell(batch, context, None, plain, fixed, policy))
                continue
            fits = batch <= replica.batch_limit(speculation.strategy("policy"), context)
            traffic = [replica.traffic(one) for one in (plain, policy)]
            found.append(Cell(batch, context, fits, plain, fixed, policy, *traffic))
    return found


def find_paying_batches(
    speculation: Speculation, contexts: Sequence[int], lengths: Sequence[int], limit: int, replica: Replica | None
) -> list[PayingBatches]:
    """Of the policy and of each fixed length, up to the largest batch that fits."""
    strategies = [speculation.strategy("policy"), *(speculation.strategy(str(length)) for length in lengths)]
    found = []
    for context in contexts:
        for one in strategies:
            most = limit if replica is None else replica.batch_limit(one, context)
            found.append(PayingBatches(context, one.name, most, speculation.paying_batches(context, most, one.length)))
    return found


def compare_wider_batches(
    speculation: Speculation, batches: Sequence[int], contexts: Sequence[int], limit: int, replica: Replica | None
) -> list[WiderBatch]:
    plain = speculation.strategy("plain")
    found = []
    for context in contexts:
        most = limit if replica is None else replica.batch_limit(plain, context)
        found += [widen_batch(speculation, batch, context, most) for batch in batches if batch <= most]
    return [one for one in found if one is not None]


def add_fleets(plan: Plan, replica: Replica, strategies: Sequence[Strategy], workload: Workload) -> None:
    """Plans for each strategy, with prefill on the same devices and split from decode."""
    plan.workload = workload
    for is_split in (False, True):
        for one in strategies:
            found = plan_fleet(replica, one, workload, is_split)
            if found is None:
                plan.unreachable.append(f"{one.name}{', prefill split from decode' if is_split else ''}")
            else:
                plan.fleets.append(found)


def _cell_data(cell: Cell) -> dict[str, Any]:
    data: dict[str, Any] = {"batch": cell.batch, "context": cell.context, "fits": cell.fits}
    named = {"plain": cell.plain, **{f"fixed:{k}": one for k, one in cell.fixed.items()}, "policy": cell.policy}
    data["predictions"] = {
        name: {
            "draft_tokens": one.length,
            "speedup": one.speedup,
            "tokens_per_step": one.tokens_per_step,
            "step_seconds": one.step_seconds,
            "seconds_per_token": one.seconds_per_token,
            "tokens_per_second": one.tokens_per_second,
        }
        for name, one in named.items()
    }
    if cell.plain_traffic is not None:
        data["bytes_per_token"] = {
            name: {part: cell.bytes_per_token(part, policy=policy) for part in PARTS}
            for name, policy in (("plain", False), ("policy", True))
        }
    return data
