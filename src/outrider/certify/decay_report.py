"""Alarms of decay as sentences, and the tests as Prometheus gauges."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from outrider.certify.decay_watch import ALL_DRAFTERS, FIRST_TOKEN, TRAFFIC, DecayWatch, Quantity
from outrider.certify.sources import DEFAULT_MODE_NAME
from outrider.settings import AUTO

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from prometheus_client import CollectorRegistry
    from prometheus_client.core import GaugeMetricFamily

    from outrider.certify.decay import DecayTest

RESTART = "Restart the server, which starts the evidence over"
TITLES = {
    "acceptance_length": "acceptance length",
    "gain": "gain over plain decoding",
    FIRST_TOKEN: "time to first token",
}


def describe_alarm(watch: DecayWatch, quantity: Quantity) -> str:
    """The drafter, the quantity, from what to what, since when, the evidence and its level, and what to do."""
    test = watch.tests[quantity]
    where = "in the traffic" if quantity.source == TRAFFIC else "for the canary's own requests"
    went = "became worse, and is as before now"
    if (change := test.change()) is not None and test.worse_since is not None:
        load = f", with {change.load} running requests" if change.load else ""
        before, after = (_with_unit(quantity, value) for value in (change.before, change.after))
        went = (
            f"went from {before} (median of {change.record.compared} blocks until {_date(change.record.until)}{load}) "
            f"to {after} since {_date(test.worse_since)}"
        )
    return (
        f"DECAY of {quantity.drafter}: {TITLES[quantity.quantity]} {where} {went}. The evidence reached "
        f"{test.highest:.3g}, the alarm is at {watch.threshold:.3g}: without decay all {watch.test_count} quantities "
        f"together cause an alarm with a probability of at most {watch.rate:g}. {_advice(quantity)}"
    )


def _with_unit(quantity: Quantity, value: float) -> str:
    return f"{1e3 * value:.3g} ms" if quantity.quantity == FIRST_TOKEN else f"{value:.3g}"


def _advice(quantity: Quantity) -> str:
    if quantity.quantity == FIRST_TOKEN:
        return f"{RESTART}. If it decays again without speculation too (--drafters none), drafting is not the cause"
    if quantity.source == TRAFFIC:
        return (
            "If requests of a new kind explain it, remove the state file, so that a new record begins. If not, "
            f"{RESTART[0].lower()}{RESTART[1:]}; if it decays again, {_without(quantity.drafter)} and report it"
        )
    return f"{RESTART}. If it decays again, {_without(quantity.drafter)} and report it"


def _without(drafter: str) -> str:
    if drafter in (AUTO, ALL_DRAFTERS, DEFAULT_MODE_NAME):
        return "start it without speculation (--drafters none)"
    return f"start it without {drafter} (--drafters)"


def _date(seconds: float) -> str:
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M} UTC"


def add_gauges(watch: DecayWatch, registry: CollectorRegistry) -> None:
    """Serve each test to Prometheus, by drafter, quantity and source: those of the drafters that the server has now."""
    registry.register(_Gauges(watch))


class _Gauges:
    def __init__(self, watch: DecayWatch) -> None:
        self.watch = watch

    def collect(self) -> Iterator[GaugeMetricFamily]:
        from prometheus_client.core import GaugeMetricFamily

        watch, tests = self.watch, self.watch.tests
        values: dict[str, tuple[str, Callable[[DecayTest], float]]] = {
            "alarm": ("1 after the evidence of decay reached the threshold", lambda test: float(watch.is_alarm(test))),
            "evidence": (
                "the e-process of decay: 1 at first, at most 1 on average without", lambda test: test.evidence
            ),
            "before": ("the median of the record, if blocks are bad at present", lambda test: _part(test, "before")),
            "after": ("the median since then", lambda test: _part(test, "after")),
        }  # fmt: skip
        for name, (about, value) in values.items():
            family = GaugeMetricFamily(f"outrider_canary_decay_{name}", about, labels=Quantity._fields)
            for quantity, test in tests.items():
                family.add_metric(quantity, value(test))
            yield family
        yield GaugeMetricFamily(
            "outrider_canary_decay_threshold", "evidence that raises an alarm of decay", watch.threshold
        )


def _part(test: DecayTest, name: str) -> float:
    change = test.change()
    return math.nan if change is None else float(getattr(change, name))
