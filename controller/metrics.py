"""Prometheus metrics of the controller. Gauges are read from the state at each scrape; what is unknown is absent."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from controller.leadership import Leadership
from service.repeats import Repeats

logger = logging.getLogger(__name__)

PREFIX = "wadiloco_controller"


@dataclass(frozen=True, slots=True, kw_only=True)
class Gauges:
    """The state as of one scrape. None is unknown, and absent."""

    servers_known: int
    servers_unknown: int
    islands_alive: int
    agents_waiting: int
    agents_drained: int
    islands_without_server: int
    epoch: int
    round: int
    paused: bool
    sync_in_flight: bool
    budget_remaining: int | None
    budget_spent: int
    h: int | None
    journal_ok: bool
    journal_queued_rows: int
    journal_failures: int
    journal_dropped_rows: int
    journal_pruned_rows: dict[str, int]
    """Per log."""
    journal_size_bytes: int | None

    def samples(self) -> dict[str, tuple[str, float | None]]:
        """Name → help and value of the plain gauges."""
        return {
            "islands_alive": ("Islands with a slot and a lease.", self.islands_alive),
            "agents_waiting": ("Agents with a lease that wait for a slot.", self.agents_waiting),
            "agents_drained": ("Agents with a lease that an operator drained.", self.agents_drained),
            "islands_without_server": (
                "Islands whose server no sidecar tells of: their load counts as full.",
                self.islands_without_server,
            ),
            "epoch": ("Membership changes so far.", self.epoch),
            "round": ("Version of the global parameters.", self.round),
            "paused": ("1 while the run is paused.", self.paused),
            "sync_in_flight": ("1 while a round is open.", self.sync_in_flight),
            "budget_remaining_syncs": ("Syncs left in the budget; absent without one.", self.budget_remaining),
            "budget_spent_syncs": ("Syncs spent in this budget period.", self.budget_spent),
            "inner_steps_since_sync": ("Least H of the islands; absent while unknown.", self.h),
            "journal_ok": ("1 while the journal can be written.", self.journal_ok),
            "journal_queued_rows": ("Rows waiting to be written.", self.journal_queued_rows),
            "journal_size_bytes": ("What the journal takes on disk, as of the last prune.", self.journal_size_bytes),
        }


class FleetCollector(Collector):
    """Turns `Gauges` into metric families."""

    def __init__(self, read: Callable[[], Gauges | None], leadership: Leadership) -> None:
        self._read = read
        self._leadership = leadership
        self._num_failures = 0
        self._repeats = Repeats(logger)

    def collect(self) -> Iterable[Metric]:
        try:
            gauges = self._read()
        except Exception as exc:  # noqa: BLE001 - counted, and told
            self._num_failures += 1
            self._repeats.error("the state cannot be read for a scrape", exc)
            gauges = None
        yield CounterMetricFamily(
            f"{PREFIX}_scrape_failures", "Scrapes that could not read the state.", value=self._num_failures
        )
        leads = self._leadership.leads
        yield GaugeMetricFamily(f"{PREFIX}_leading", "1 while this controller is the one that decides.", value=leads)
        term = self._leadership.term
        if term is not None:
            yield GaugeMetricFamily(f"{PREFIX}_leader_term", "Number of its lead.", value=term)
        if gauges is not None:
            yield from self._families(gauges)

    def _families(self, gauges: Gauges) -> Iterable[Metric]:
        servers = GaugeMetricFamily(f"{PREFIX}_servers", "Servers by whether their load is known.", labels=["load"])
        servers.add_metric(["known"], gauges.servers_known)
        servers.add_metric(["unknown"], gauges.servers_unknown)
        yield servers
        for name, (text, value) in gauges.samples().items():
            shown = _finite(value)
            if shown is not None:
                yield GaugeMetricFamily(f"{PREFIX}_{name}", text, value=shown)
        yield CounterMetricFamily(
            f"{PREFIX}_journal_errors", "Commits and prunes that failed.", value=gauges.journal_failures
        )
        yield CounterMetricFamily(
            f"{PREFIX}_journal_dropped_rows",
            "Log rows lost while the journal failed.",
            value=gauges.journal_dropped_rows,
        )
        pruned = CounterMetricFamily(
            f"{PREFIX}_journal_pruned_rows", "Log rows dropped because of their age.", labels=["table"]
        )
        for table, num in gauges.journal_pruned_rows.items():
            pruned.add_metric([table], num)
        yield pruned


def _finite(value: float | None) -> float | None:
    """The value as a sample; None when it is unknown or no float can hold it."""
    try:
        return None if value is None or not math.isfinite(value) else float(value)
    except OverflowError:
        return None


def _counter(registry: CollectorRegistry, name: str, text: str, labels: tuple[str, ...] = ()) -> Counter:
    return Counter(f"{PREFIX}_{name}", text, labels, registry=registry)


@dataclass(frozen=True, slots=True)
class Metrics:
    """Counters and histograms that the controller keeps itself."""

    registry: CollectorRegistry = field(default_factory=CollectorRegistry)
    decisions: Counter = field(init=False)
    samples: Counter = field(init=False)
    reports: Counter = field(init=False)
    rounds: Counter = field(init=False)
    leases_lost: Counter = field(init=False)
    recoveries: Counter = field(init=False)
    control_actions: Counter = field(init=False)
    export_rows: Counter = field(init=False)
    refusals: Counter = field(init=False)
    policy_failures: Counter = field(init=False)
    tick_failures: Counter = field(init=False)
    tick_seconds: Histogram = field(init=False)

    def __post_init__(self) -> None:
        made = {
            "decisions": _counter(self.registry, "decisions", "Decisions.", ("policy", "action", "reason")),
            "samples": _counter(self.registry, "samples", "Samples by what became of them.", ("outcome",)),
            "reports": _counter(self.registry, "reports", "Agents' reports by what became of them.", ("outcome",)),
            "rounds": _counter(self.registry, "rounds", "Rounds that closed.", ("outcome",)),
            "recoveries": _counter(self.registry, "recoveries", "What was lost or came back, by kind.", ("kind",)),
            "control_actions": _counter(
                self.registry, "control_actions", "Operators' orders by what became of them.", ("action", "outcome")
            ),
            "export_rows": _counter(self.registry, "export_rows", "Rows exported.", ("table", "format")),
            "refusals": _counter(
                self.registry,
                "refused_requests",
                "Answers of 400 and more by what was asked for.",
                ("family", "status"),
            ),
            "leases_lost": _counter(self.registry, "leases_lost", "Agents that missed their lease."),
            "policy_failures": _counter(self.registry, "policy_failures", "Decisions whose policy raised."),
            "tick_failures": _counter(self.registry, "tick_failures", "Ticks that raised."),
        }
        for name, counter in made.items():
            object.__setattr__(self, name, counter)
        buckets = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0)
        ticks = Histogram(f"{PREFIX}_tick_seconds", "Duration of a tick.", buckets=buckets, registry=self.registry)
        object.__setattr__(self, "tick_seconds", ticks)
