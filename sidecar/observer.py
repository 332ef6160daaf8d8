"""From scrape results to samples: everything that the sidecar knows about its server.

Reads no clock and does no IO: time comes with the scrape result, so that recorded pages replay through it unchanged.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable

from sidecar.calibrator import BINS, Calibrator, LoadForecast, Phase
from sidecar.config import SidecarSettings
from sidecar.edge_alarm import EdgeAlarm
from sidecar.forecast import HORIZONS_S, BurstForecaster, SmoothingForecaster
from sidecar.learned import LearnedState, objective_text
from sidecar.pressure import pressure
from sidecar.schema import (
    Calibration,
    CalibrationBin,
    EngineState,
    ForecastPoint,
    GateStatus,
    LoadSample,
    Pace,
    SloReport,
    SyncCostPoint,
)
from sidecar.slo import Slo
from sidecar.slo.accounts import SloAccounts
from sidecar.slo.judge import Bounds, judge_interval
from sidecar.source.alarm import ScrapeNews, SignalAlarm
from sidecar.source.snapshot import EngineSnapshot, ScrapeOutcome, ScrapeResult
from sidecar.source.state import EngineStatus, advance, initial_status
from sidecar.source.window import Interval, difference, restarted, same_life

logger = logging.getLogger(__name__)

# One late answer is not news; three in a row are.
STALE_AFTER_SCRAPES = 3
# An interval that is longer (a network that was down) is no longer "now": no difference is taken across it.
MAX_INTERVAL_S = 60.0


class Observer:
    """State, window, forecasts and SLO accounts of one server."""

    def __init__(self, settings: SidecarSettings, *, t_s: float, monotonic_s: float) -> None:
        self._settings = settings
        self.slo: Slo = settings.objective
        self.status: EngineStatus = initial_status(t_s=t_s, monotonic_s=monotonic_s)
        self.snapshot: EngineSnapshot | None = None
        self.sample: LoadSample | None = None
        self.sample_monotonic_s = monotonic_s
        self.num_restarts = 0
        self.slo_requests_total = 0.0
        self.slo_violations_total = 0.0
        self.slo_violations_upper_total = 0.0
        self._samples: deque[tuple[float, LoadSample]] = deque()
        self._accounts = SloAccounts(self.slo)
        self._edge_alarm = EdgeAlarm(self.slo)
        self._arrivals = SmoothingForecaster(tick_s=settings.scrape_interval_s)
        self._in_engine = SmoothingForecaster(tick_s=settings.scrape_interval_s)
        self.calibrator = Calibrator()
        self._bursts = BurstForecaster(tick_s=settings.scrape_interval_s, horizons_s=HORIZONS_S)
        self._alarm = SignalAlarm()
        self._news = ScrapeNews()
        self._was_refused = False
        """Nobody listened at some time since the newest good page."""

    @property
    def missing(self) -> tuple[str, ...]:
        """Signals that the newest good page should have and has not."""
        return self._alarm.missing

    @property
    def method(self) -> str:
        return self._arrivals.method(HORIZONS_S[0])

    @property
    def season_s(self) -> float | None:
        return self._arrivals.season_s

    @property
    def num_observations(self) -> int:
        return self._arrivals.num_observations

    def observe(
        self, result: ScrapeResult, *, interval_s: float | None = None, phase: Phase | None = None
    ) -> LoadSample:
        """Take in one scrape and say what it means.

        ``interval_s`` is the time between scrapes now (left out, the usual one), ``phase`` what the trainers did since
        the last good one; None, when nobody tells, counts as none.
        """
        before, last_page = self.status, self.snapshot
        interval_s = self._settings.scrape_interval_s if interval_s is None else interval_s
        stale_after_s = STALE_AFTER_SCRAPES * max(interval_s, self._settings.scrape_timeout_s)
        self.status = advance(before, result, stale_after_s=stale_after_s)
        self._news.check(result, state=self.status.state, was=before.state)
        self._was_refused = self._was_refused or result.outcome is ScrapeOutcome.REFUSED
        longest_s = max(MAX_INTERVAL_S, STALE_AFTER_SCRAPES * interval_s)
        interval = None if result.snapshot is None else self._take_page(result.snapshot, longest_s=longest_s)
        verdict = self._judge(interval, now_s=result.monotonic_s)
        if verdict is not None and last_page is not None and result.snapshot is not None:
            self._calibrate(last_page, result.snapshot, verdict, phase=phase or Phase.NONE)
        if result.snapshot is not None and self.status.state is EngineState.READY:
            self._learn(result.snapshot, interval)
        self.sample = self._make_sample(result, interval, verdict, phase=phase)
        self.sample_monotonic_s = result.monotonic_s
        self._samples.append((result.monotonic_s, self.sample))
        while self._samples[0][0] < result.monotonic_s - self._settings.window_s:
            self._samples.popleft()
        return self.sample

    def note_gate(self, pace: Pace, gate: GateStatus) -> LoadSample:
        """Add to the newest sample what a trainer beside the server may do after it."""
        assert self.sample is not None
        reason = gate.reason if gate.busy else pace.reason
        update = {"pace": pace.pace, "gate_busy": gate.busy, "gate_reason": reason}
        self.sample = self.sample.model_copy(update=update)
        self._samples[-1] = (self._samples[-1][0], self.sample)
        return self.sample

    def predict(self, horizons_s: Iterable[float] = HORIZONS_S) -> tuple[ForecastPoint, ...]:
        """Forecasts from the last observation on; empty before the first, and while the engine is not READY."""
        if self.status.state is not EngineState.READY:
            return ()
        points = (self._predict_point(horizon_s) for horizon_s in horizons_s)
        return tuple(point for point in points if point is not None)

    def calibration(self, *, sync_duration_s: float) -> Calibration:
        """P(violation) per phase and load, and what a sync would cost from now on."""
        return Calibration(
            slo=str(self.slo),
            sync_duration_s=sync_duration_s,
            phases={phase: self._calibration_bins(phase) for phase in Phase},
            sync_costs=self._sync_costs(self.predict(), duration_s=sync_duration_s),
        )

    def export(self, *, t_s: float) -> LearnedState:
        """What was learned until the Unix time ``t_s``, for `restore` in a later process."""
        return LearnedState(
            t_s=t_s,
            server_id=self._settings.server_id,
            slo=objective_text(self.slo),
            arrivals=self._arrivals.export(),
            in_engine=self._in_engine.export(),
            bursts=self._bursts.export(),
            calibration=self.calibrator.export(),
        )

    def restore(self, learned: LearnedState, *, t_s: float) -> None:
        """Begin with what an earlier process learned; ``t_s`` is the Unix time now.

        Raises:
            ValueError: it was learned about another server, or by another version; nothing was taken over.
        """
        if learned.server_id != self._settings.server_id:
            raise ValueError(f"is about server {learned.server_id}, this sidecar is about {self._settings.server_id}")
        age_s = max(t_s - learned.t_s, 0.0)
        fresh = [SmoothingForecaster(tick_s=self._settings.scrape_interval_s) for _ in range(2)]
        bursts = BurstForecaster(tick_s=self._settings.scrape_interval_s, horizons_s=HORIZONS_S)
        fresh[0].restore(learned.arrivals, age_s=age_s)
        fresh[1].restore(learned.in_engine, age_s=age_s)
        bursts.restore(learned.bursts, age_s=age_s)
        calibrator = Calibrator()
        calibrator.restore(learned.calibration)
        self._arrivals, self._in_engine = fresh
        self._bursts = bursts
        if learned.slo not in (None, objective_text(self.slo)):
            logger.warning("calibration of the state file is about %s, not %s: not taken over", learned.slo, self.slo)
        elif any(calibrator.num_requests(phase) for phase in Phase):
            self.calibrator = calibrator  # what it began with is part of it

    def window(self, *, since_monotonic_s: float) -> tuple[LoadSample, ...]:
        return tuple(sample for seen_s, sample in self._samples if seen_s >= since_monotonic_s)

    def slo_report(self, *, now_s: float) -> SloReport:
        """Attainment over the sliding windows that end at ``now_s`` (monotonic)."""
        return self._accounts.report(now_s=now_s)

    def _calibration_bins(self, phase: Phase) -> tuple[CalibrationBin, ...]:
        return tuple(
            CalibrationBin(
                load_from=low,
                load_below=high,
                probability=estimate.probability,
                low=estimate.low,
                high=estimate.high,
                requests=estimate.requests,
            )
            for (low, high), estimate in zip(BINS, self.calibrator.curve(phase), strict=True)
        )

    def _sync_costs(self, forecast: Iterable[ForecastPoint], *, duration_s: float) -> tuple[SyncCostPoint, ...]:
        """By start time, from now on; empty while there is no forecast."""
        costs = self.calibrator.sync_costs(self._loads_ahead(forecast), duration_s=duration_s)
        return tuple(SyncCostPoint(start_s=cost.start_s, violations=cost.violations) for cost in costs)

    def _loads_ahead(self, forecast: Iterable[ForecastPoint]) -> list[LoadForecast]:
        """Load now and at each horizon; empty when one of the forecasts is unknown."""
        points = [point for point in forecast if point.running is not None]
        if not points or self.snapshot is None or self.snapshot.in_engine is None:
            return []
        now = LoadForecast(0.0, points[0].arrivals_per_s, self.snapshot.in_engine)
        return [now, *(LoadForecast(p.horizon_s, p.arrivals_per_s, p.running or 0.0) for p in points)]

    def _take_page(self, page: EngineSnapshot, *, longest_s: float) -> Interval | None:
        """The interval since the last good page, None when there is none."""
        self._alarm.check(page)
        before, self.snapshot = self.snapshot, page
        was_refused, self._was_refused = self._was_refused, False
        if before is None:
            return None
        if restarted(before, page) or (was_refused and not same_life(before, page)):
            self.num_restarts += 1
            logger.info("engine restarted num_restarts=%d: interval dropped", self.num_restarts)
            return None
        return difference(before, page) if page.monotonic_s - before.monotonic_s <= longest_s else None

    def _judge(self, interval: Interval | None, *, now_s: float) -> Bounds | None:
        if interval is None:
            return None
        verdict = judge_interval(self.slo, interval)
        self._edge_alarm.check(verdict.objectives)
        self._accounts.add(verdict, now_s=now_s)
        bounds = verdict.bounds
        if bounds is not None:
            self.slo_requests_total += bounds.requests
            self.slo_violations_total += bounds.violations
            self.slo_violations_upper_total += bounds.violations_upper
        return bounds

    def _calibrate(self, last_page: EngineSnapshot, page: EngineSnapshot, verdict: Bounds, *, phase: Phase) -> None:
        if last_page.in_engine is not None and page.in_engine is not None:
            self.calibrator.observe(
                load=(last_page.in_engine + page.in_engine) / 2,
                phase=phase,
                requests=verdict.requests,
                violations=verdict.violations,
            )

    def _learn(self, page: EngineSnapshot, interval: Interval | None) -> None:
        if page.in_engine is not None:
            self._in_engine.observe(page.in_engine, now_s=page.monotonic_s)
        if interval is not None and interval.arrivals is not None:
            rate_per_s = interval.arrivals / interval.length_s
            self._arrivals.observe(rate_per_s, now_s=page.monotonic_s)
            self._bursts.observe(
                rate_per_s,
                interval_s=interval.length_s,
                now_s=page.monotonic_s,
                seasonal_mean=self._arrivals.seasonal_mean,
            )

    def _make_sample(
        self, result: ScrapeResult, interval: Interval | None, verdict: Bounds | None, *, phase: Phase | None
    ) -> LoadSample:
        page = result.snapshot
        forecast = self.predict()
        return LoadSample(
            server_id=self._settings.server_id,
            node=self._settings.node,
            t_s=result.t_s,
            interval_s=interval and interval.length_s,
            state=self.status.state,
            running=page and page.running,
            waiting=page and page.waiting,
            waiting_capacity=page and page.waiting_capacity,
            kv_usage_frac=page and page.kv_usage_max_frac,
            arrivals=interval and interval.arrivals,
            finished=interval and interval.finished,
            prompt_tokens=interval and interval.prompt_tokens,
            generation_tokens=interval and interval.generation_tokens,
            preemptions=interval and interval.preemptions,
            rejections=interval and interval.rejections,
            ttft_mean_s=interval and interval.ttft and interval.ttft.mean,
            itl_mean_s=interval and interval.itl and interval.itl.mean,
            e2e_mean_s=interval and interval.e2e and interval.e2e.mean,
            slo_requests=verdict and verdict.requests,
            slo_violations=verdict and verdict.violations,
            slo_violations_upper=verdict and verdict.violations_upper,
            slo_target_frac=self.slo.target_frac,
            pressure_frac=pressure(
                self.status.state, page, forecast=forecast, busy_requests=self._settings.busy_requests
            ),
            trainer_phase=phase and phase.value,
            forecast=forecast,
            sync_cost_per_s=self._past_sync_cost_per_s(page, interval),
            sync_costs_ahead=self._sync_costs(forecast, duration_s=1.0),
        )

    def _past_sync_cost_per_s(self, page: EngineSnapshot | None, interval: Interval | None) -> float | None:
        if page is None or page.in_engine is None or interval is None or interval.arrivals is None:
            return None
        load = LoadForecast(0.0, interval.arrivals / interval.length_s, page.in_engine)
        return self.calibrator.sync_cost(load, duration_s=1.0)

    def _predict_point(self, horizon_s: float) -> ForecastPoint | None:
        arrivals = self._arrivals.predict(horizon_s)
        in_engine = self._in_engine.predict(horizon_s)
        if arrivals is None:
            return None
        burst = self._bursts.predict(horizon_s, seasonal_mean=self._arrivals.seasonal_mean)
        return ForecastPoint(
            horizon_s=horizon_s,
            arrivals_per_s=arrivals.point,
            arrivals_per_s_q10=arrivals.q10,
            arrivals_per_s_q50=arrivals.q50,
            arrivals_per_s_q90=arrivals.q90,
            running=None if in_engine is None else in_engine.point,
            running_q90=None if in_engine is None else in_engine.q90,
            method=self._arrivals.method(horizon_s),
            burst_probability=burst and burst.probability,
            burst_arrivals=burst and burst.level,
        )
