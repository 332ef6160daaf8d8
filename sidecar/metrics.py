"""The sidecar's own Prometheus metrics. A value that is unknown has no sample."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from sidecar.calibrator import Calibrator, Phase
from sidecar.observer import Observer
from sidecar.push import DropReason, PushOutcome
from sidecar.schema import (
    EngineState,
    ForecastPoint,
    GateStatus,
    LoadSample,
    ObjectiveWindow,
    Pace,
    SloReport,
    SloWindow,
    TrainerStatus,
)
from sidecar.source.signals import NEEDED_SIGNALS
from sidecar.source.snapshot import EngineSnapshot, ScrapeOutcome, ScrapeResult

PREFIX = "wadiloco_sidecar"
SLO_GAUGES = (
    ("attainment_ratio", "Goodput: share of requests that met all", "attainment_frac", "attainment_frac_lower"),
    ("goodput_requests_per_second", "Requests that met all objectives", "goodput_per_s", "goodput_per_s_lower"),
    ("burn_rate", "Violation rate over what the target allows", "burn_rate_upper", "burn_rate"),
    (
        "error_budget_left_ratio",
        "Allowed violations that are left; negative when overspent",
        "error_budget_left_frac",
        "error_budget_left_frac_lower",
    ),
)
"""Name, text, and the fields of a window that hold its upper and lower bound."""
SCRAPE_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)


class SidecarMetrics:
    """Counters of what the sidecar did; what it knows is collected from the observer when asked."""

    def __init__(
        self,
        observer: Observer,
        *,
        pace: Callable[[], Pace],
        num_queued: Callable[[], int],
        gate: Callable[[], GateStatus | None],
        trainers: Callable[[], TrainerStatus | None],
    ) -> None:
        self.registry = CollectorRegistry()
        self._scrapes = Counter(
            f"{PREFIX}_scrapes", "Scrapes of the server by outcome", ["outcome"], registry=self.registry
        )
        self._scrape_s = Histogram(
            f"{PREFIX}_scrape_seconds", "Duration of a scrape", buckets=SCRAPE_BUCKETS_S, registry=self.registry
        )
        self._pushes = Counter(
            f"{PREFIX}_pushes", "Batches sent to the controller by outcome", ["outcome"], registry=self.registry
        )
        self._dropped = Counter(
            f"{PREFIX}_samples_dropped", "Samples that never reached the controller", ["reason"], registry=self.registry
        )
        self._state_failures = Counter(
            f"{PREFIX}_state_write_failures", "Times that the state file could not be written", registry=self.registry
        )
        for scrape_outcome in ScrapeOutcome:
            self._scrapes.labels(scrape_outcome)
        for push_outcome in PushOutcome:
            self._pushes.labels(push_outcome)
        for reason in DropReason:
            self._dropped.labels(reason)
        self._interval_s = Gauge(
            f"{PREFIX}_scrape_interval_seconds",
            "Time between scrapes; longer than configured while the server is slow to answer",
            registry=self.registry,
        )
        self.registry.register(ObserverCollector(observer, pace=pace, num_queued=num_queued))
        self.registry.register(GateCollector(gate, trainers))

    def count_scrape(self, result: ScrapeResult) -> None:
        self._scrapes.labels(result.outcome).inc()
        self._scrape_s.observe(result.duration_s)

    def set_scrape_interval(self, interval_s: float) -> None:
        self._interval_s.set(interval_s)

    def count_internal_failure(self) -> None:
        self._scrapes.labels(ScrapeOutcome.INTERNAL).inc()

    def count_state_failure(self) -> None:
        self._state_failures.inc()

    def count_push(self, outcome: PushOutcome) -> None:
        self._pushes.labels(outcome).inc()

    def count_dropped(self, reason: DropReason, num_samples: int) -> None:
        self._dropped.labels(reason).inc(num_samples)


class ObserverCollector(Collector):
    """Reads the newest sample at the moment of the scrape."""

    def __init__(self, observer: Observer, *, pace: Callable[[], Pace], num_queued: Callable[[], int]) -> None:
        self._observer = observer
        self._pace = pace
        self._num_queued = num_queued

    def collect(self) -> Iterator[Metric]:
        observer = self._observer
        yield _states(observer.status.state)
        yield from _sample_gauges(observer.sample)
        yield from _signals(observer.snapshot)
        yield from _forecast_gauges(observer.predict())
        yield _calibration_counts(observer.calibrator)
        yield _gauge("pace_ratio", "How much the trainer may run", self._pace().pace)
        yield _gauge("push_queue_samples", "Samples that wait for the controller", self._num_queued())
        yield _counter("engine_restarts", "Restarts of the engine that were seen", observer.num_restarts)
        yield _counter("slo_requests", "Requests judged against the SLO", observer.slo_requests_total)
        yield _counter("slo_violations", "Requests that certainly missed an objective", observer.slo_violations_total)
        yield _counter(
            "slo_violations_upper", "Requests that may have missed an objective", observer.slo_violations_upper_total
        )
        yield from _slo_gauges(observer.slo_report(now_s=observer.sample_monotonic_s))


class GateCollector(Collector):
    """What the gate, and the trainers in its folder, said last; nothing without a gate."""

    def __init__(self, gate: Callable[[], GateStatus | None], trainers: Callable[[], TrainerStatus | None]) -> None:
        self._gate = gate
        self._trainers = trainers

    def collect(self) -> Iterator[Metric]:
        yield from _trainer_metrics(self._trainers())
        status = self._gate()
        if status is None:
            return
        yield _gauge("gate_busy", "1 while the trainer waits for the server", status.busy)
        yield _gauge("gate_in_flight_requests", "HTTP requests in flight; absent without middleware", status.in_flight)
        info = GaugeMetricFamily(f"{PREFIX}_gate_state", "1 for what holds", labels=["reason", "source"])
        info.add_metric([status.reason, status.source or "none"], 1.0)
        yield info


def _trainer_metrics(status: TrainerStatus | None) -> Iterator[Metric]:
    if status is None:
        return
    yield _gauge("trainers", "Trainers beside the server that say what they do", status.num_trainers)
    spent = CounterMetricFamily(
        f"{PREFIX}_trainer_phase_seconds", "Time of the trainers beside the server, by what they did", labels=["phase"]
    )
    for phase, seconds in status.phase_seconds_total.items():
        spent.add_metric([phase], seconds)
    yield spent


def _states(current: EngineState) -> Metric:
    family = GaugeMetricFamily(f"{PREFIX}_engine_state", "1 for the state that the engine is in", labels=["state"])
    for state in EngineState:
        family.add_metric([state], float(state is current))
    return family


def _signals(snapshot: EngineSnapshot | None) -> Iterator[Metric]:
    """Nothing before the first good page."""
    if snapshot is None:
        return
    missing = GaugeMetricFamily(
        f"{PREFIX}_signal_missing", "1 for a needed signal that the server does not export", labels=["signal"]
    )
    for signal in NEEDED_SIGNALS:
        missing.add_metric([signal], float(signal in snapshot.missing))
    yield missing
    matched = GaugeMetricFamily(
        f"{PREFIX}_signal_series", "1 for the series that a signal is read from", labels=["signal", "series"]
    )
    for signal, series in snapshot.signals.items():
        if series is not None:
            matched.add_metric([signal, series], 1.0)
    yield matched


def _sample_gauges(sample: LoadSample | None) -> Iterator[Metric]:
    if sample is None:
        return
    rate = sample.arrivals / sample.interval_s if sample.arrivals is not None and sample.interval_s else None
    yield _gauge("running_requests", "Requests that run in the engine", sample.running)
    yield _gauge("waiting_requests", "Requests that wait in the engine", sample.waiting)
    yield _gauge("waiting_capacity_requests", "Requests that wait for room in the engine", sample.waiting_capacity)
    yield _gauge("kv_usage_ratio", "KV cache in use, fullest engine", sample.kv_usage_frac)
    yield _gauge("arrivals_per_second", "Estimated arrival rate of the last interval", rate)
    yield _gauge("pressure_ratio", "Load now and within the next seconds; absent when unknown", sample.pressure_frac)
    yield _gauge("load_unknown", "1 while the load is unknown and counts as full", sample.pressure_frac is None)


def _forecast_gauges(points: tuple[ForecastPoint, ...]) -> Iterator[Metric]:
    arrivals = GaugeMetricFamily(
        f"{PREFIX}_forecast_arrivals_per_second", "Forecast arrival rate", labels=["horizon_s", "level"]
    )
    in_engine = GaugeMetricFamily(
        f"{PREFIX}_forecast_requests", "Forecast requests in the engine", labels=["horizon_s", "level"]
    )
    bursts = GaugeMetricFamily(
        f"{PREFIX}_burst_probability", "Probability that a burst comes within the horizon", labels=["horizon_s"]
    )
    burst_level = GaugeMetricFamily(
        f"{PREFIX}_burst_arrivals", "Arrivals within the horizon that make a burst", labels=["horizon_s"]
    )
    for point in points:
        horizon = f"{point.horizon_s:g}"
        arrivals.add_metric([horizon, "0.1"], point.arrivals_per_s_q10)
        arrivals.add_metric([horizon, "0.5"], point.arrivals_per_s_q50)
        arrivals.add_metric([horizon, "0.9"], point.arrivals_per_s_q90)
        if point.running_q90 is not None:
            in_engine.add_metric([horizon, "0.9"], point.running_q90)
        if point.burst_probability is not None and point.burst_arrivals is not None:
            bursts.add_metric([horizon], point.burst_probability)
            burst_level.add_metric([horizon], point.burst_arrivals)
    yield arrivals
    yield in_engine
    yield bursts
    yield burst_level


def _slo_gauges(report: SloReport) -> Iterator[Metric]:
    """Bounds of each window: equal where judging is exact."""
    yield _gauge("slo_target_ratio", "Share of requests that must meet all objectives", report.target_frac)
    yield _gauge("slo_fast_burn", "1 while five minutes and an hour both burn 14.4 times the budget", report.fast_burn)
    thresholds = GaugeMetricFamily(f"{PREFIX}_slo_objective_seconds", "Threshold of an objective", labels=["metric"])
    for objective in report.objectives:
        thresholds.add_metric([objective.metric], objective.threshold_s)
    yield thresholds
    for name, text, upper, lower in SLO_GAUGES:
        family = GaugeMetricFamily(f"{PREFIX}_slo_{name}", text, labels=["window", "bound"])
        for window in report.windows:
            _add_bounds(family, [f"{window.window_s:g}s"], window, upper=upper, lower=lower)
        yield family
    alone = GaugeMetricFamily(
        f"{PREFIX}_slo_objective_attainment_ratio",
        "Share that met one objective: of requests, of tokens for itl",
        labels=["metric", "window", "bound"],
    )
    for window in report.windows:
        for single in window.objectives:
            labels = [single.metric, f"{window.window_s:g}s"]
            _add_bounds(alone, labels, single, upper="attainment_frac", lower="attainment_frac_lower")
    yield alone


def _add_bounds(
    family: GaugeMetricFamily, labels: list[str], owner: SloWindow | ObjectiveWindow, *, upper: str, lower: str
) -> None:
    for bound, field in (("upper", upper), ("lower", lower)):
        value = getattr(owner, field)
        if value is not None:
            family.add_metric([*labels, bound], value)


def _calibration_counts(calibrator: Calibrator) -> Metric:
    family = GaugeMetricFamily(
        f"{PREFIX}_calibration_requests", "Requests that the calibration rests on, fading", labels=["phase"]
    )
    for phase in Phase:
        family.add_metric([phase], calibrator.num_requests(phase))
    return family


def _gauge(name: str, text: str, value: float | None) -> Metric:
    family = GaugeMetricFamily(f"{PREFIX}_{name}", text)
    if value is not None:
        family.add_metric([], float(value))
    return family


def _counter(name: str, text: str, value: float) -> Metric:
    family = CounterMetricFamily(f"{PREFIX}_{name}", text)
    family.add_metric([], value)
    return family
