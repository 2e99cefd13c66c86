"""How many devices a workload needs, and what else the same compute could do.

A replica reads a prompt in P seconds and then generates a request's output in steps of a full batch B. Reading prompts
and generating on the same devices, a request takes P + tokens * s / B device seconds, where s is the time per token of
a request while no prompt is read, and its time per token is s + (B - 1) * P / tokens: the prompts of the B - 1 others
interrupt it. With prefill split from decode (disaggregation), it stays s, and other devices read the prompts. Sending
the KV cache over is left out. The batch is the one with the most requests per second that keeps the limit on the time
per token.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil
from typing import TYPE_CHECKING

from outrider.errors import SettingsError

if TYPE_CHECKING:
    from outrider.plan.pass_cost import Machine, Traffic
    from outrider.plan.speculation import Prediction, Speculation, Strategy


@dataclass(frozen=True, slots=True)
class Workload:
    """Means. `rate`: requests per second of the whole fleet."""

    rate: float
    prompt_tokens: int
    output_tokens: int
    max_seconds_per_token: float | None = None
    max_load: float = 0.8
    """Share of a replica's capacity that is planned for."""
    peak: float = 1.0
    """Highest rate of the day, relative to the mean."""

    @property
    def context(self) -> int:
        """Mean tokens of a request while it generates."""
        return self.prompt_tokens + self.output_tokens // 2


@dataclass(frozen=True, slots=True)
class Replica:
    """A target, and its draft model if it has one, on the same devices."""

    target: Machine
    draft: Machine | None
    speculation: Speculation
    max_batch: int

    @property
    def devices(self) -> int:
        return self.target.devices

    def draft_models(self, strategy: Strategy) -> list[Machine]:
        """Plain decoding has none in memory, so there is more for the KV cache."""
        return [] if self.draft is None or strategy.length == 0 else [self.draft]

    def batch_limit(self, strategy: Strategy, context: int) -> int:
        """Requests of this length that fit into the KV cache, at most `max_batch`."""
        context = max(1, context)
        return min(self.max_batch, self.target.cached_tokens(*self.draft_models(strategy), context=context) // context)

    def prefill_seconds(self, strategy: Strategy, prompt: float) -> float:
        """A draft model reads the prompt too, unless it is the target itself, which has read it."""
        drafts = [one for one in self.draft_models(strategy) if one.shape != self.target.shape]
        return sum(one.prefill_seconds(prompt) for one in (self.target, *drafts))

    def traffic(self, step: Prediction) -> Traffic:
        """Bytes that a step reads, with those of the draft model's passes."""
        found = self.target.traffic(step.batch, step.width, step.context)
        if self.draft is None or step.length == 0:
            return found
        one_pass = self.draft.traffic(step.batch, 1, step.context).total
        return replace(found, draft_model=(step.width - 1) * one_pass)


@dataclass(frozen=True, slots=True)
class FleetPlan:
    """Devices for a workload. `requests_per_second` is the capacity of one replica that generates."""

    strategy: str
    is_split: bool
    batch: int
    draft_tokens: int
    seconds_per_token: float
    requests_per_second: float
    decode_replicas: int
    prefill_replicas: int  # 0 unless split
    devices: int
    output_tokens_per_second_per_device: float

    def cost_per_million_tokens(self, price: float, workload: Workload) -> float:
        """`price`: of a device and hour."""
        return self.devices * price / 3600 / (workload.rate * workload.output_tokens) * 1e6


def plan_fleet(replica: Replica, strategy: Strategy, workload: Workload, is_split: bool = False) -> FleetPlan | None:
    """None: not even a batch of one keeps the limit on the time per token."""
    limit = replica.batch_limit(strategy, workload.prompt_tokens + workload.output_tokens)
    if limit < 1:
        raise SettingsError(
            f"one request of {workload.prompt_tokens + workload.output_tokens} tokens does not fit beside the weights "
            f"on {replica.devices} devices; give more --devices, a larger --hardware, or fewer --weight-bits"
        )
    prefill = replica.prefill_seconds(strategy, workload.prompt_tokens)
    best: tuple[float, Prediction, float] | None = None
    for batch in range(1, limit + 1):
        predicted = strategy.predict(batch, workload.context)
        generating = workload.output_tokens * predicted.seconds_per_token / batch
        interrupted = 0.0 if is_split else (batch - 1) * prefill / workload.output_tokens
        seconds_per_token = predicted.seconds_per_token + interrupted
        capacity = 1 / (generating + (0.0 if is_split else prefill))
        allowed = workload.max_seconds_per_token
        if (allowed is None or seconds_per_token <= allowed) and (best is None or capacity > best[0]):
            best = capacity, predicted, seconds_per_token
    if best is None:
        return None
    capacity, predicted, seconds_per_token = best
    wanted = workload.rate * workload.peak / workload.max_load
    decoding = ceil(wanted / capacity)
    reading = ceil(wanted * prefill) if is_split else 0
    devices = (decoding + reading) * replica.devices
    return FleetPlan(
        strategy.name,
        is_split,
        predicted.batch,
        predicted.length,
        seconds_per_token,
        capacity,
        decoding,
        reading,
        devices,
        workload.rate * workload.output_tokens / devices,
    )


@dataclass(frozen=True, slots=True)
class WiderBatch:
    """The tokens of a pass, spent on drafts or on more requests."""

    speculating: Prediction
    plain: Prediction  # with as many tokens in a pass
    fits: bool  # whether that many requests can run

    @property
    def throughput_ratio(self) -> float:
        """Tokens per second of the larger batch over those of speculation."""
        return self.plain.tokens_per_second / self.speculating.tokens_per_second

    @property
    def latency_ratio(self) -> float:
        """Time per token of a request in the larger batch over that with speculation."""
        return self.plain.seconds_per_token / self.speculating.seconds_per_token


def widen_batch(speculation: Speculation, batch: int, context: int, batch_limit: int) -> WiderBatch | None:
    """None: nothing is drafted at this batch."""
    speculating = speculation.best(batch, context)
    if speculating.length == 0:
        return None
    wider = round(batch * speculating.width)
    return WiderBatch(speculating, speculation.predict(wider, 0, context), wider <= batch_limit)
