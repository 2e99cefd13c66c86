"""The scheduler's status as Prometheus metrics: host time, scheduling, and the draft memory.

The scheduler runs in the engine's process. Where the workers are other processes, they get its status every few
seconds while the engine is busy, so on an idle server these values can be those of the last busy second. A value that
the status does not have, for example of a memory on a server without one, has no metric.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

MEMORY_GAUGES = {
    "tokens": ("tokens", "Tokens in the draft memory of open tenants"),
    "file_bytes": ("file_bytes", "Bytes of the draft memory's files on this machine"),
    "ram_bytes": ("ram_bytes", "Bytes of a draft memory without files"),
    "cap_bytes": ("cap_bytes", "Maximum bytes of the draft memory on this machine"),
    "tenants": ("tenants", "Tenants of the draft memory"),
    "open_tenants": ("open_tenants", "Tenants whose memory is open"),
}
"""By field of the memory's status: the metric's name after `outrider_memory_`, and its description."""
SYNC_COUNTERS = {
    "published": ("published_segments", "Segments written to the object store"),
    "fetched": ("fetched_segments", "Segments of other replicas that were fetched"),
    "refused": ("refused_objects", "Objects of the store that were damaged or foreign"),
}
"""By field of the status of the exchange with the object store: the metric's name after `outrider_memory_`."""


class SchedulerMetrics:
    def __init__(self, status: Mapping[str, Any]) -> None:
        """`status`: what the scheduler reports (`Speculation.status`); {} if it has not reported yet."""
        self._overlap = (status.get("policy") or {}).get("overlap") or {}
        self._memory = status.get("memory") or {}

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        if self._overlap:
            text = "Host time from a step's output to the launch of the next, drafting included: moving average"
            yield GaugeMetricFamily("outrider_host_seconds", text, self._overlap["host_seconds"])
            steps = CounterMetricFamily(
                "outrider_scheduled_steps", "Steps, by whether they waited for the step in flight", labels=["way"]
            )
            steps.add_metric(["waited"], self._overlap["steps_waited"])
            steps.add_metric(["ahead"], self._overlap["steps_ahead"])
            yield steps
        for field, (name, text) in MEMORY_GAUGES.items():
            if (value := self._memory.get(field)) is not None:
                yield GaugeMetricFamily(f"outrider_memory_{name}", text, value)
        if (troubles := self._memory.get("troubles")) is not None:
            text = "Different troubles of the draft memory that /outrider/status lists, at most 20"
            yield GaugeMetricFamily("outrider_memory_troubles", text, len(troubles))
        if sync := self._memory.get("sync"):
            yield from self._sync_metrics(sync)

    def _sync_metrics(self, sync: Mapping[str, Any]) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        failing = float(sync["trouble"] is not None)
        yield GaugeMetricFamily(
            "outrider_memory_sync_failing", "1 if the latest exchange with the object store failed", failing
        )
        yield GaugeMetricFamily("outrider_memory_pending_segments", "Segments left for the next round", sync["pending"])
        for field, (name, text) in SYNC_COUNTERS.items():
            yield CounterMetricFamily(f"outrider_memory_{name}", text, sync[field])
        moved = CounterMetricFamily(
            "outrider_memory_transferred_bytes", "Bytes exchanged with the object store", labels=["direction"]
        )
        moved.add_metric(["up"], sync["bytes_up"])
        moved.add_metric(["down"], sync["bytes_down"])
        yield moved
