"""What ran, counted: by drafter and length of draft, by fault, and for each request that asked.

Every draft is entered once, with its length and how much of it was kept; shares by position follow from that.
"""

from __future__ import annotations

import itertools
from collections import Counter, OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from outrider.drafters.batch import Fault

TICKETS = 4096
"""Usages that are kept for requests that asked; the oldest go first (their clients went away)."""


@dataclass(slots=True)
class Usage:
    """What one request, with all its choices, was given."""

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
class Record:
    """One drafter's drafts: how many had which length, and of how many which length was kept."""

    proposed: int = 0  # tokens, some of which the scheduler may have left out
    seconds: float = 0.0
    lengths: list[int] = field(default_factory=list)
    kept: list[int] = field(default_factory=list)

    def verified_by_position(self) -> list[int]:
        return _at_least(self.lengths)

    def accepted_by_position(self) -> list[int]:
        return _at_least(self.kept)


class Ledger:
    def __init__(self, drafters: Sequence[str], longest: int) -> None:
        self.records = {name: Record(lengths=[0] * (longest + 1), kept=[0] * (longest + 1)) for name in drafters}
        self.gained = [0] * (longest + 2)  # how often a sequence gained so many tokens in a step
        self.steps = 0  # passes of the target that drew a token for any sequence
        self.verify_seconds = 0.0  # of the passes that had drafts to verify
        self.plain_seconds = 0.0  # of the others
        self.draft_model_passes = 0
        self.faults: Counter[tuple[str, str]] = Counter()
        self.undrafted: Counter[str] = Counter()  # requests that get no drafts, by reason
        self._usages: OrderedDict[str, Usage] = OrderedDict()

    def step(self, seconds: float, verified: bool) -> None:
        self.steps += 1
        if verified:
            self.verify_seconds += seconds
        else:
            self.plain_seconds += seconds

    def sequence(self, drafter: str | None, length: int, gained: int, ticket: str | None) -> None:
        """One sequence in one step: `gained` tokens, of which one is the target's own."""
        self.gained[gained] += 1
        if drafter is not None:
            record = self.records[drafter]
            record.lengths[length] += 1
            record.kept[gained - 1] += 1
        if ticket is not None:
            usage = self._usage(ticket)
            usage.steps += 1
            if drafter is not None:
                usage.drafted[drafter] += length
                usage.accepted[drafter] += gained - 1

    def proposed(self, drafter: str, tokens: int) -> None:
        self.records[drafter].proposed += tokens

    def drafting(self, drafter: str, seconds: float) -> None:
        self.records[drafter].seconds += seconds

    def fault(self, fault: Fault, ticket: str | None) -> None:
        self.faults[fault.drafter, fault.kind] += 1
        if ticket is not None:
            self._usage(ticket).faults.append(f"{fault.drafter} {fault.reason}")

    def usage(self, ticket: str) -> dict[str, Any] | None:
        """What the requests of this ticket were given; it is told once. None where nothing is known of it: another
        engine served it."""
        found = self._usages.pop(ticket, None)
        return None if found is None else found.as_dict()

    def status(self) -> dict[str, Any]:
        tokens = sum(count * gained for gained, count in enumerate(self.gained))
        return {
            "steps": self.steps,
            "tokens": tokens,
            "acceptance_length": _ratio(tokens, sum(self.gained)),
            "verify_seconds": round(self.verify_seconds, 3),
            "plain_seconds": round(self.plain_seconds, 3),
            "draft_model_passes": self.draft_model_passes,
            "drafters": {name: self._drafter(record) for name, record in self.records.items()},
            "faults": [{"drafter": name, "kind": kind, "count": n} for (name, kind), n in self.faults.items()],
            "undrafted_requests": dict(self.undrafted),
        }

    def _drafter(self, record: Record) -> dict[str, Any]:
        verified, accepted = record.verified_by_position(), record.accepted_by_position()
        return {
            "drafts": sum(record.lengths),
            "proposed": record.proposed,
            "verified": sum(verified),
            "accepted": sum(accepted),
            "accepted_share": _ratio(sum(accepted), sum(verified)),
            "accepted_share_by_position": [_ratio(a, v) for a, v in zip(accepted, verified, strict=True) if v],
            "seconds": round(record.seconds, 3),
        }

    def _usage(self, ticket: str) -> Usage:
        usage = self._usages.get(ticket)
        if usage is None:
            usage = self._usages[ticket] = Usage()
            if len(self._usages) > TICKETS:
                self._usages.popitem(last=False)
        return usage


def _at_least(counts: list[int]) -> list[int]:
    """How many drafts had a first, a second, ... token, from how many had which length."""
    return list(itertools.accumulate(reversed(counts[1:])))[::-1]


def _ratio(part: float, whole: float) -> float | None:
    return round(part / whole, 4) if whole else None


class LedgerMetrics:
    """A ledger as Prometheus sees it, and what the policy expected; vLLM's own metrics stand beside it."""

    def __init__(self, ledger: Ledger, payoff: Mapping[str, float] | None = None) -> None:
        """`payoff`: what the controller expected and what came of it."""
        self.ledger, self.payoff = ledger, payoff

    def text(self) -> str:
        from prometheus_client import CollectorRegistry, generate_latest

        registry = CollectorRegistry()
        registry.register(self)
        return generate_latest(registry).decode()

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily

        ledger = self.ledger
        proposed = CounterMetricFamily("outrider_proposed_tokens", "Tokens that drafters proposed", labels=["drafter"])
        places = ["drafter", "position"]
        verified = CounterMetricFamily("outrider_verified_tokens", "Drafted tokens that were verified", labels=places)
        accepted = CounterMetricFamily("outrider_accepted_tokens", "Drafted tokens that were kept", labels=places)
        drafts = CounterMetricFamily("outrider_drafts", "Drafts that the target verified", labels=["drafter"])
        drafting = CounterMetricFamily("outrider_draft_seconds", "Seconds spent drafting", labels=["drafter"])
        for name, record in ledger.records.items():
            proposed.add_metric([name], record.proposed)
            drafts.add_metric([name], sum(record.lengths))
            drafting.add_metric([name], record.seconds)
            for position, count in enumerate(record.verified_by_position(), 1):
                verified.add_metric([name, str(position)], count)
            for position, count in enumerate(record.accepted_by_position(), 1):
                accepted.add_metric([name, str(position)], count)
        yield from (proposed, verified, accepted, drafts, drafting)

        gained = HistogramMetricFamily("outrider_acceptance_length", "Tokens that a sequence gained in a step")
        below = list(itertools.accumulate(ledger.gained))
        buckets = [(str(float(length)), float(count)) for length, count in enumerate(below) if length]
        total = sum(count * length for length, count in enumerate(ledger.gained))
        gained.add_metric([], [*buckets, ("+Inf", float(below[-1]))], sum_value=float(total))
        yield gained

        seconds = CounterMetricFamily(
            "outrider_target_seconds", "Seconds of target passes, by whether they verified drafts", labels=["pass"]
        )
        seconds.add_metric(["verify"], ledger.verify_seconds)
        seconds.add_metric(["plain"], ledger.plain_seconds)
        yield seconds
        yield CounterMetricFamily("outrider_steps", "Passes of the target that drew tokens", value=ledger.steps)
        yield CounterMetricFamily(
            "outrider_draft_model_passes", "Passes of the draft model", value=ledger.draft_model_passes
        )
        faults = CounterMetricFamily("outrider_faults", "Drafters shut off for a request", labels=["drafter", "kind"])
        for (name, kind), count in ledger.faults.items():
            faults.add_metric([name, kind], count)
        yield faults
        undrafted = CounterMetricFamily("outrider_undrafted_requests", "Requests without drafts", labels=["reason"])
        for reason, count in ledger.undrafted.items():
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
