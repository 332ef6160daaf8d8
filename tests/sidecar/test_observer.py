"""From pages to samples: what a restart, a gap or a missing series makes of them."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest

from sidecar.config import SidecarSettings
from sidecar.observer import Observer
from sidecar.schema import EngineState, LoadSample
from sidecar.source.snapshot import ScrapeOutcome
from tests.sidecar.helpers import bad, capture, edited, good, parse, without

DELTAS = ("interval_s", "arrivals", "finished", "generation_tokens", "ttft_mean_s", "slo_requests", "slo_violations")


def make_observer(*, slo: str = "e2e:300ms", window_s: float = 300.0) -> Observer:
    settings = SidecarSettings(vllm="http://127.0.0.1:8000", node="host", slo=slo, window_s=window_s)
    return Observer(settings, t_s=0.0, monotonic_s=0.0)


def observe(observer: Observer, page: str, *, t_s: float) -> LoadSample:
    return observer.observe(good(parse(page, t_s=t_s)))


def test_the_first_page_has_levels_and_no_differences() -> None:
    sample = observe(make_observer(), capture("busy"), t_s=1.0)
    assert (sample.state, sample.running, sample.waiting) == (EngineState.READY, 2, 0)
    assert sample.pressure_frac is not None
    assert [getattr(sample, name) for name in DELTAS] == [None] * len(DELTAS)
    assert sample.forecast == ()


def test_the_second_page_has_differences_and_a_forecast() -> None:
    observer = make_observer()
    observe(observer, capture("busy"), t_s=1.0)
    sample = observe(observer, capture("busy-1s-later"), t_s=2.0)
    assert (sample.interval_s, sample.arrivals, sample.finished) == (1.0, 12, 13)
    assert sample.ttft_mean_s == pytest.approx(0.0148, abs=0.05)
    assert (sample.slo_requests, observer.slo_requests_total) == (13, 13)
    assert [p.horizon_s for p in sample.forecast] == [1, 2, 5, 10, 15, 30, 60]
    assert sample.forecast[0].arrivals_per_s == pytest.approx(12)
    assert sample.forecast[0].running is not None


def test_a_restart_drops_the_interval_and_keeps_the_forecaster() -> None:
    observer = make_observer()
    observe(observer, capture("busy"), t_s=1.0)
    observe(observer, capture("busy-1s-later"), t_s=2.0)
    sample = observe(observer, capture("idle"), t_s=3.0)
    assert [getattr(sample, name) for name in DELTAS] == [None] * len(DELTAS)
    assert sample.state is EngineState.READY
    assert (observer.num_restarts, observer.num_observations) == (1, 1)
    assert sample.forecast[0].arrivals_per_s == pytest.approx(12)


def test_a_restart_that_took_minutes_is_counted() -> None:
    observer = make_observer()
    observe(observer, capture("busy"), t_s=1.0)
    observer.observe(bad(ScrapeOutcome.REFUSED, t_s=2.0))
    sample = observe(observer, capture("idle"), t_s=300.0)
    assert (sample.state, sample.interval_s, observer.num_restarts) == (EngineState.READY, None, 1)


def test_a_failed_scrape_makes_the_load_unknown_at_once() -> None:
    observer = make_observer()
    observe(observer, capture("busy"), t_s=1.0)
    sample = observer.observe(bad(ScrapeOutcome.TIMEOUT, t_s=2.0))
    assert (sample.state, sample.running, sample.pressure_frac) == (EngineState.READY, None, None)


def test_after_time_outs_the_interval_reaches_back_to_the_last_good_page() -> None:
    observer = make_observer()
    observe(observer, capture("busy"), t_s=1.0)
    observer.observe(bad(ScrapeOutcome.TIMEOUT, t_s=2.0))
    sample = observe(observer, capture("busy-1s-later"), t_s=4.0)
    assert (sample.interval_s, sample.arrivals) == (3.0, 12)
    assert sample.forecast[0].arrivals_per_s == pytest.approx(4.0)


def test_no_difference_is_taken_across_a_long_gap() -> None:
    observer = make_observer()
    observe(observer, capture("busy"), t_s=1.0)
    sample = observe(observer, capture("busy-1s-later"), t_s=100.0)
    assert (sample.interval_s, sample.arrivals, observer.num_restarts) == (None, None, 0)


def test_a_server_that_is_not_ready_has_no_forecast_and_no_pressure() -> None:
    observer = make_observer()
    observe(observer, capture("busy"), t_s=1.0)
    observe(observer, capture("busy-1s-later"), t_s=2.0)
    sample = observer.observe(bad(ScrapeOutcome.REFUSED, t_s=3.0))
    assert (sample.state, sample.forecast, sample.pressure_frac) == (EngineState.DOWN, (), None)


def test_a_stalled_engine_teaches_the_forecaster_nothing() -> None:
    observer = make_observer()
    for t_s in range(0, 100, 10):
        sample = observe(observer, capture("busy"), t_s=float(t_s))
    assert sample.state is EngineState.STALLED
    assert observer.num_observations == 5


def test_a_missing_gauge_is_unknown_in_the_sample_and_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    observer = make_observer()
    page = without(capture("busy"), "vllm:num_requests_waiting")
    with caplog.at_level(logging.WARNING):
        for t_s in (1.0, 2.0, 3.0):
            sample = observe(observer, page, t_s=t_s)
    assert (sample.waiting, sample.arrivals, sample.pressure_frac) == (None, None, None)
    assert caplog.text.count("does not export the signals waiting") == 1


def test_an_slo_between_edges_is_warned_of_once_with_the_edges(caplog: pytest.LogCaptureFixture) -> None:
    observer = make_observer(slo="e2e:400ms")
    page = capture("busy")
    with caplog.at_level(logging.WARNING):
        for t_s in (1.0, 2.0, 3.0):
            observe(observer, page, t_s=t_s)
    assert caplog.text.count("between histogram edges 0.3 s and 0.5 s") == 1
    report = observer.slo_report(now_s=3.0)
    assert (report.edges_s, report.exact) == ((0.3, 0.5), False)


def test_an_slo_on_an_edge_is_exact() -> None:
    observer = make_observer()
    observe(observer, capture("busy"), t_s=1.0)
    observe(observer, capture("busy-1s-later"), t_s=2.0)
    report = observer.slo_report(now_s=2.5)
    assert (report.edges_s, report.exact, report.metric) == ((0.3, 0.3), True, "e2e")
    assert [w.requests for w in report.windows] == [13, 13, 13]
    assert all(w.violations == w.violations_upper for w in report.windows)


def test_an_slo_past_the_last_edge_has_no_edge_above() -> None:
    observer = make_observer(slo="itl:3600s")
    observe(observer, capture("busy"), t_s=1.0)
    observe(observer, capture("busy-1s-later"), t_s=2.0)
    assert observer.slo_report(now_s=2.5).edges_s == (80.0, None)


def test_the_window_is_bounded_in_time() -> None:
    observer = make_observer(window_s=10.0)
    for t_s in range(100):
        observe(observer, capture("idle"), t_s=float(t_s))
    assert len(observer.window(since_monotonic_s=0.0)) == 11
    assert [s.t_s for s in observer.window(since_monotonic_s=97.0)] == [97, 98, 99]


def test_intervals_are_measured_on_the_clock_that_never_jumps() -> None:
    observer = make_observer()
    observe(observer, capture("busy"), t_s=1.0)
    jumped = replace(parse(capture("busy-1s-later"), t_s=2.0), t_s=0.5)
    sample = observer.observe(good(jumped))
    assert (sample.t_s, sample.interval_s) == (0.5, 1.0)


def test_pressure_sees_a_full_engine() -> None:
    page = edited(capture("busy"), {"vllm:num_requests_waiting": 30})
    assert observe(make_observer(), page, t_s=1.0).pressure_frac == 1.0
