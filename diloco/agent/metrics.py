"""Prometheus metrics of an island. What is unknown has no sample."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from diloco.agent.state import AgentState
from diloco.schema import STALENESS_BUCKETS, Progress, Protection, Restart, SyncOutcome, SyncReport

STEP_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.0, 5.0, 10.0, 30.0)
SYNC_BUCKETS_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


class IslandMetrics:
    """Counters and histograms fed by events; gauges are read from the state when scraped."""

    def __init__(self, registry: CollectorRegistry, state: AgentState) -> None:
        self._inner_steps = Counter(
            "wadiloco_island_inner_steps_total", "Inner steps taken by the workers of this agent", registry=registry
        )
        self._tokens = Counter("wadiloco_island_tokens_total", "Tokens trained on", registry=registry)
        self._step_seconds = Histogram(
            "wadiloco_island_step_seconds", "Wall time of an inner step", buckets=STEP_BUCKETS_S, registry=registry
        )
        self._syncs = Counter("wadiloco_island_syncs_total", "Outer syncs by outcome", ["outcome"], registry=registry)
        for outcome in SyncOutcome:
            self._syncs.labels(outcome.value)
        self._sync_seconds = Histogram(
            "wadiloco_island_sync_seconds",
            "Wall time that a sync kept the rank from inner steps",
            buckets=SYNC_BUCKETS_S,
            registry=registry,
        )
        self._staleness = Histogram(
            "wadiloco_island_staleness_versions",
            "Versions that contributions were behind when they were taken in",
            buckets=STALENESS_BUCKETS,
            registry=registry,
        )
        self._sync_bytes = Counter(
            "wadiloco_island_sync_bytes_total", "Bytes exchanged in syncs, as encoded", ["direction"], registry=registry
        )
        self._state_mismatches = Counter(
            "wadiloco_island_state_mismatches_total",
            "Global parameters made from deltas that were not the synchronizer's, and were pulled whole",
            registry=registry,
        )
        self.restarts = Counter(
            "wadiloco_island_worker_restarts_total", "Restarts of a worker that had died", registry=registry
        )
        self.heartbeat_failures = Counter(
            "wadiloco_island_controller_failures_total", "Requests to the controller that failed", registry=registry
        )
        registry.register(StateCollector(state))

    def take_steps(self, step_times_s: Iterable[float], *, tokens: int) -> None:
        for step_time_s in step_times_s:
            self._inner_steps.inc()
            self._step_seconds.observe(step_time_s)
        # A restarted worker starts from the last report, so the sum never counts a token twice.
        self._tokens.inc(max(0, tokens))

    def take_sync(self, report: SyncReport) -> None:
        self._syncs.labels(report.outcome.value).inc()
        self._sync_seconds.observe(report.kept_from_steps_s)
        if report.staleness_weight is not None:
            self._staleness.observe(report.staleness)
        self._sync_bytes.labels("push").inc(report.bytes_pushed)
        self._sync_bytes.labels("pull").inc(report.bytes_pulled)
        self._state_mismatches.inc(report.state_mismatches)


class StateCollector(Collector):
    """Gauges of the island, absent while unknown."""

    def __init__(self, state: AgentState) -> None:
        self._state = state

    def collect(self) -> Iterator[Metric]:
        state, progress = self._state, self._state.progress
        trained = progress.step > 0
        yield from _gauges(
            ("loss", "Smoothed training loss in nats per token", progress.loss),
            ("update_norm", "L2 norm of the pseudo-gradient so far", progress.update_norm),
            ("residual_norm", "L2 norm of what the codec left out and owes", progress.residual_norm),
            ("step_time_seconds", "Median wall time of the recent inner steps", progress.step_time_s),
            ("inner_steps_since_sync", "H so far", progress.inner_steps_since_sync if trained else None),
            ("round", "Outer steps applied, on all fragments together", progress.round if state.worker_ready else None),
            ("last_sync_timestamp_seconds", "Unix time of the last outer step", progress.last_sync_at_s),
            ("parameters", "Parameters of the model", state.num_parameters),
            ("fragments", "Parts of the parameters that sync in turn", state.num_fragments),
            ("slot", "Place in the run", state.assignment.slot if state.assignment else None),
            ("ranks", "Rank workers that take its steps together", state.settings.ranks),
            ("worker_up", "The worker has joined the run", float(state.worker_ready)),
            (
                "controller_up",
                "The controller answered the last request",
                float(state.controller_reachable) if state.settings.controller else None,
            ),
            ("unacknowledged_syncs", "Sync reports not yet confirmed by the controller", len(state.reports)),
            ("standby_workers", "Workers in reserve that are ready", len(state.standby_pids())),
        )
        yield from _vault_metrics(state.newest_snapshot(), state.restart_book.last)
        yield InfoMetricFamily(
            "wadiloco_island_codec", "How contributions are encoded", value={"codec": state.settings.codec}
        )
        yield CounterMetricFamily(
            "wadiloco_island_skipped_steps", "Steps whose loss or gradients were not finite", progress.skipped_steps
        )
        if progress.yielded_s is not None:
            yield from _gate_metrics(progress)


def _vault_metrics(protection: Protection | None, restart: Restart | None) -> Iterator[Metric]:
    if protection is not None:
        yield from _gauges(
            ("vault_bytes", "Memory of the snapshots of all ranks", protection.num_bytes),
            ("steps_at_risk", "Inner steps from one snapshot to the next", protection.steps_at_risk),
            ("snapshot_overhead_ratio", "Share of the time that snapshots take", protection.overhead),
            ("snapshot_step", "Inner step of the newest snapshot", protection.step),
            ("protection_degraded", "1 while there are no snapshots", float(bool(protection.reason))),
        )
    if restart is not None and restart.first_step_s is not None:
        recovery_s = max(restart.first_step_s - restart.detected_s, 0.0)
        yield from _gauges(("recovery_seconds", "From the last death to the first step after it", recovery_s))


def _gate_metrics(progress: Progress) -> Iterator[Metric]:
    yield CounterMetricFamily(
        "wadiloco_island_yielded_seconds", "Time that the worker waited for the server's gate", progress.yielded_s
    )
    yield CounterMetricFamily(
        "wadiloco_island_abandoned_steps", "Steps given up for an order that came meanwhile", progress.abandoned_steps
    )
    yielding = GaugeMetricFamily(
        "wadiloco_island_yielding", "1 while the worker waits for the server's gate", labels=["reason"]
    )
    if progress.yield_reason is not None:
        yielding.add_metric([progress.yield_reason], 1.0)
    yield yielding


def _gauges(*rows: tuple[str, str, float | None]) -> Iterator[Metric]:
    for name, text, value in rows:
        if value is not None:
            yield GaugeMetricFamily(f"wadiloco_island_{name}", text, value=value)
