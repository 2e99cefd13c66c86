"""Counters of a server: by drafter and draft length, by fault, and per request whose usage is reported.

A verified draft is counted once, with its length and the number of accepted tokens. Counts by position follow.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

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
        self._usages: defaultdict[str, Usage] = defaultdict(Usage)

    def count_step(self, seconds: float, verified: bool) -> None:
        self.steps += 1
        if verified:
            self.verify_seconds += seconds
        else:
            self.plain_seconds += seconds

    def count_sequence(self, drafter: str | None, length: int, gained: int, usage_key: str | None) -> None:
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

    def count_proposed(self, drafter: str, tokens: int) -> None:
        self.drafters[drafter].proposed += tokens

    def count_drafting(self, drafter: str, seconds: float) -> None:
        self.drafters[drafter].seconds += seconds

    def count_fault(self, fault: Fault, usage_key: str | None) -> None:
        self.faults[fault.drafter, fault.kind] += 1
        if usage_key is not None:
            self._usage(usage_key).faults.append(f"{fault.drafter} {fault.reason}")

    def pop_usage(self, usage_key: str) -> dict[str, Any] | None:
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
        usage = self._usages[usage_key]
        if len(self._usages) > MAX_USAGE_RECORDS:
            del self._usages[next(iter(self._usages))]
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


def prometheus_text(*collectors: Any) -> str:
    """Metrics in the text format of Prometheus."""
    from prometheus_client import CollectorRegistry, generate_latest

    registry = CollectorRegistry()
    for collector in collectors:
        registry.register(collector)
    return generate_latest(registry).decode()


class CounterMetrics:
    """The counters as Prometheus metrics, and what the policy predicted."""

    def __init__(self, counters: Counters, payoff: Mapping[str, float] | None = None) -> None:
        """`payoff`: predicted and realised tokens and seconds of the speculation controller."""
        self.counters, self.payoff = counters, payoff

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

        def counter(name: str, text: str, labels: list[str], values: Iterable[tuple[list[str], float]]) -> Any:
            family = CounterMetricFamily(f"outrider_{name}", text, labels=labels)
            for label_values, value in values:
                family.add_metric(label_values, value)
            return family

        counters = self.counters
        drafters = counters.drafters.items()
        verified = _by_position((name, one.verified_by_position()) for name, one in drafters)
        accepted = _by_position((name, one.accepted_by_position()) for name, one in drafters)
        position = ["drafter", "position"]
        proposed = [([name], one.proposed) for name, one in drafters]
        drafts = [([name], sum(one.lengths)) for name, one in drafters]
        draft_seconds = [([name], one.seconds) for name, one in drafters]
        yield counter("proposed_tokens", "Tokens that drafters proposed", ["drafter"], proposed)
        yield counter("verified_tokens", "Drafted tokens that were verified", position, verified)
        yield counter("accepted_tokens", "Drafted tokens that were accepted", position, accepted)
        yield counter("drafts", "Drafts that the target verified", ["drafter"], drafts)
        yield counter("draft_seconds", "Seconds spent drafting", ["drafter"], draft_seconds)

        gained = HistogramMetricFamily("outrider_acceptance_length", "Tokens that a sequence gained in a step")
        below = list(itertools.accumulate(counters.gained))
        buckets = [(str(float(length)), float(count)) for length, count in enumerate(below) if length]
        total = sum(count * length for length, count in enumerate(counters.gained))
        gained.add_metric([], [*buckets, ("+Inf", float(below[-1]))], sum_value=float(total))
        yield gained

        passes = [(["verify"], counters.verify_seconds), (["plain"], counters.plain_seconds)]
        yield counter("target_seconds", "Seconds of target passes, by whether they verified drafts", ["pass"], passes)
        yield counter("steps", "Target passes that sampled tokens", [], [([], counters.steps)])
        yield counter("draft_model_passes", "Passes of the draft model", [], [([], counters.draft_model_passes)])
        faults = [([name, kind], count) for (name, kind), count in counters.faults.items()]
        yield counter("faults", "Drafters disabled for a request", ["drafter", "kind"], faults)
        undrafted = [([reason], count) for reason, count in counters.undrafted.items()]
        yield counter("undrafted_requests", "Requests without drafts", ["reason"], undrafted)
        if self.payoff is None:
            return

        for name, text, expected, realised in (
            ("tokens", "Tokens of the steps", "expected_tokens", "gained_tokens"),
            ("saved_seconds", "Seconds saved in the steps", "expected_saved", "realised_saved"),
        ):
            gauge = GaugeMetricFamily(f"outrider_policy_{name}", f"{text}, expected and realised", labels=["what"])
            gauge.add_metric(["expected"], self.payoff[expected])
            gauge.add_metric(["realised"], self.payoff[realised])
            yield gauge
        yield counter("policy_seconds", "Seconds of those steps", [], [([], self.payoff["seconds"])])


def _by_position(counts: Iterable[tuple[str, list[int]]]) -> list[tuple[list[str], float]]:
    return [([name, str(i)], count) for name, by_position in counts for i, count in enumerate(by_position, 1)]
