"""Prometheus metrics of replicas: how far the own slot's buddies are, and what is kept for others."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from diloco.recovery_schema import ReplicaList


class ReplicaCollector(Collector):
    """Read when scraped; what is unknown is absent."""

    def __init__(self, told: Callable[[], ReplicaList]) -> None:
        self._told = told

    def collect(self) -> Iterator[Metric]:
        told = self._told()
        behind = GaugeMetricFamily(
            "wadiloco_island_replica_steps_behind", "Inner steps that a buddy's replica lacks", labels=["buddy"]
        )
        failing = GaugeMetricFamily(
            "wadiloco_island_replica_failing", "1 while the last attempt to send a replica failed", labels=["buddy"]
        )
        sent = CounterMetricFamily("wadiloco_island_replica_sent_bytes", "Sent to a buddy", labels=["buddy"])
        for each in told.sent:
            if each.steps_behind is not None:
                behind.add_metric([each.buddy], each.steps_behind)
            failing.add_metric([each.buddy], float(bool(each.failure)))
            sent.add_metric([each.buddy], each.sent_bytes)
        yield from (behind, failing, sent)
        yield GaugeMetricFamily(
            "wadiloco_island_replicas_kept_bytes", "Memory of replicas of other islands", value=told.allocated_bytes
        )
        yield GaugeMetricFamily(
            "wadiloco_island_replicas_kept", "Generations kept for other islands", value=len(told.replicas)
        )
