"""Prometheus metrics of the event stream."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge

PREFIX = "wadiloco_controller_events"


class EventMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        self.clients = Gauge(f"{PREFIX}_clients", "Clients that follow the events.", registry=registry)
        self.refused = Counter(f"{PREFIX}_refused", "Clients over the limit.", registry=registry)
        self.skipped = Counter(
            f"{PREFIX}_skipped", "Times that a slow client got a snapshot for what it missed.", registry=registry
        )
        self.dropped = Counter(
            f"{PREFIX}_dropped", "Clients that stopped reading, and were dropped.", registry=registry
        )
        self.failures = Counter(f"{PREFIX}_failures", "Ticks whose picture could not be made.", registry=registry)
