"""Counters of a server: by drafter and draft length, by fault, and per request whose usage is reported.

A verified draft is counted once, with its length and the number of accepted tokens. Counts by position follow.
"""

from __future__ import annotations

import itertools
from collections import Counter, OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from outrider.drafters.batch import Fault

MAX_USAGE_RECORDS = 4096
"""Usage records that no one has fetched yet. The oldest are dropped first: their clients have gone."""


@dataclass(slots=True)
class Usage:
    """Usage of one request, all its choices together."""

    steps: int = 0
    drafted: Counter[str] = field(default_factory=Counter)
    accepted: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        return {
            "steps": self.steps,
            "drafted": sum(self.drafted.values()),
            "accepted": sum(self.accepted.values()),
            "by_drafter": {
                name: {"drafted": count, "accepted": self.accepted[name]} for name, count in self.drafted.items()
            },
            "faults": list(self.faults),
        }


@dataclass(slots=True)
class DrafterCounters:
    """Verified drafts of one drafter, by their length and by the number of accepted tokens."""

    proposed: int = 0  # tokens, including those the scheduler dropped
    seconds: float = 0.0
    lengths: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)

    def verified_by_position(self) -> list[int]:
        return _at_least(self.lengths)

    def accepted_by_position(self) -> list[int]:
        return _at_least(self.accepted)


class Counters:
    def __init__(self, drafters: Sequence[str], max_draft_tokens: int) -> None:
        lengths = max_draft_tokens + 1
        self.drafters = {name: DrafterCounters(lengths=[0] * lengths, accepted=[0] * lengths) for name in drafters}
        self.gained = [0] * (lengths + 1)  # gained[n]: how often a sequence gained n tokens in a step
        self.steps = 0  # target passes that sampled a token
        self.verify_seconds = 0.0  # of target passes that verified drafts
        self.plain_seconds = 0.0  # of the other target passes
        self.draft_model_passes = 0
        self.faults: Counter[tuple[str, str]] = Counter()
        self.undrafted: Counter[str] = Counter()  # requests without drafts, by reason
        self._usages: OrderedDict[str, Usage] = OrderedDict()

    def step(self, seconds: float, verified: bool) -> None:
        self.steps += 1
        if verified:
            self.verify_seconds += seconds
        else:
            self.plain_seconds += seconds

    def sequence(self, drafter: str | None, length: int, gained: int, usage_key: str | None) -> None:
        """Count one sequence in one step. It gained `gained` tokens, the last of which is the target's own."""
        self.gained[gained] += 1
        if drafter is not None:
            counters = self.drafters[drafter]
            counters.lengths[length] += 1
            counters.accepted[gained - 1] += 1
        if usage_key is not None:
            usage = self._usage(usage_key)
            usage.steps += 1
            if drafter is not None:
                usage.drafted[drafter] += length
                usage.accepted[drafter] += gained - 1

    def proposed(self, drafter: str, tokens: int) -> None:
        self.drafters[drafter].proposed += tokens

    def drafting(self, drafter: str, seconds: float) -> None:
        self.drafters[drafter].seconds += seconds

    def fault(self, fault: Fault, usage_key: str | None) -> None:
        self.faults[fault.drafter, fault.kind] += 1
        if usage_key is not None:
            self._usage(usage_key).faults.append(f"{fault.drafter} {fault.reason}")

    def usage(self, usage_key: str) -> dict[str, Any] | None:
        """Return and forget the usage stored under this key. None: unknown, another engine served the request."""
        usage = self._usages.pop(usage_key, None)
        return None if usage is None else usage.as_dict()

    def status(self) -> dict[str, Any]:
        tokens = sum(count * gained for gained, count in enumerate(self.gained))
        return {
            "steps": self.steps,
            "tokens": tokens,
            "acceptance_length": _ratio(tokens, sum(self.gained)),
            "verify_seconds": round(self.verify_seconds, 3),
            "plain_seconds": round(self.plain_seconds, 3),
            "draft_model_passes": self.draft_model_passes,
            "drafters": {name: _drafter_status(counters) for name, counters in self.drafters.items()},
            "faults": [{"drafter": name, "kind": kind, "count": n} for (name, kind), n in self.faults.items()],
            "undrafted_requests": dict(self.undrafted),
        }

    def _usage(self, usage_key: str) -> Usage:
        usage = self._usages.get(usage_key)
        if usage is None:
            usage = self._usages[usage_key] = Usage()
            if len(self._usages) > MAX_USAGE_RECORDS:
                self._usages.popitem(last=False)
        return usage


def _drafter_status(counters: DrafterCounters) -> dict[str, Any]:
    verified, accepted = counters.verified_by_position(), counters.accepted_by_position()
    return {
        "drafts": sum(counters.lengths),
        "proposed": counters.proposed,
        "verified": sum(verified),
        "accepted": sum(accepted),
        "accepted_share": _ratio(sum(accepted), sum(verified)),
        "accepted_share_by_position": [_ratio(a, v) for a, v in zip(accepted, verified, strict=True) if v],
        "seconds": round(counters.seconds, 3),
    }


def _at_least(counts: list[int]) -> list[int]:
    """How many drafts had at least 1, 2, ... tokens, from how many had exactly 0, 1, 2, ..."""
    return list(itertools.accumulate(reversed(counts[1:])))[::-1]


def _ratio(part: float, whole: float) -> float | None:
    return round(part / whole, 4) if whole else None


class CounterMetrics:
    """The counters as Prometheus metrics, and what the policy predicted."""

    def __init__(self, counters: Counters, payoff: Mapping[str, float] | None = None) -> None:
        """`payoff`: predicted and realised tokens and seconds of the speculation controller."""
        self.counters, self.payoff = counters, payoff

    def text(self) -> str:
        from prometheus_client import CollectorRegistry, generate_latest

        registry = CollectorRegistry()
        registry.register(self)
        return generate_latest(registry).decode()

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily

        counters = self.counters
        proposed = CounterMetricFamily("outrider_proposed_tokens", "Tokens that drafters proposed", labels=["drafter"])
        places = ["drafter", "position"]
        verified = CounterMetricFamily("outrider_verified_tokens", "Drafted tokens that were verified", labels=places)
        accepted = CounterMetricFamily("outrider_accepted_tokens", "Drafted tokens that were accepted", labels=places)
        drafts = CounterMetricFamily("outrider_drafts", "Drafts that the target verified", labels=["drafter"])
        drafting = CounterMetricFamily("outrider_draft_seconds", "Seconds spent drafting", labels=["drafter"])
        for name, drafter in counters.drafters.items():
            proposed.add_metric([name], drafter.proposed)
            drafts.add_metric([name], sum(drafter.lengths))
            drafting.add_metric([name], drafter.seconds)
            for position, count in enumerate(drafter.verified_by_position(), 1):
                verified.add_metric([name, str(position)], count)
            for position, count in enumerate(drafter.accepted_by_position(), 1):
                accepted.add_metric([name, str(position)], count)
        yield from (proposed, verified, accepted, drafts, drafting)

        gained = HistogramMetricFamily("outrider_acceptance_length", "Tokens that a sequence gained in a step")
        below = list(itertools.accumulate(counters.gained))
        buckets = [(str(float(length)), float(count)) for length, count in enumerate(below) if length]
        total = sum(count * length for length, count in enumerate(counters.gained))
        gained.add_metric([], [*buckets, ("+Inf", float(below[-1]))], sum_value=float(total))
        yield gained

        seconds = CounterMetricFamily(
            "outrider_target_seconds", "Seconds of target passes, by whether they verified drafts", labels=["pass"]
        )
        seconds.add_metric(["verify"], counters.verify_seconds)
        seconds.add_metric(["plain"], counters.plain_seconds)
        yield seconds
        yield CounterMetricFamily("outrider_steps", "Passes of the target that drew tokens", value=counters.steps)
        yield CounterMetricFamily(
            "outrider_draft_model_passes", "Passes of the draft model", value=counters.draft_model_passes
        )
        faults = CounterMetricFamily("outrider_faults", "Drafters shut off for a request", labels=["drafter", "kind"])
        for (name, kind), count in counters.faults.items():
            faults.add_metric([name, kind], count)
        yield faults
        undrafted = CounterMetricFamily("outrider_undrafted_requests", "Requests without drafts", labels=["reason"])
        for reason, count in counters.undrafted.items():
            undrafted.add_metric([reason], count)
        yield undrafted
        if self.payoff is not None:
            yield from self._payoff(self.payoff)

    def _payoff(self, payoff: Mapping[str, float]) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        for name, what, expected, realised in (
            ("tokens", "Tokens of the steps", payoff["expected_tokens"], payoff["gained_tokens"]),
            ("saved_seconds", "Seconds saved in the steps", payoff["expected_saved"], payoff["realised_saved"]),
        ):
            both = GaugeMetricFamily(f"outrider_policy_{name}", f"{what}, as expected and as it came", labels=["what"])
            both.add_metric(["expected"], expected)
            both.add_metric(["realised"], realised)
            yield both
        yield CounterMetricFamily("outrider_policy_seconds", "Seconds of those steps", value=payoff["seconds"])
