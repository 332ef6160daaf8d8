"""From pages to samples: what a restart, a gap or a missing series makes of them."""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from sidecar.config import SidecarSettings
from sidecar.edge_alarm import MAX_PAIRS
from sidecar.observer import Observer
from sidecar.schema import EngineState, LoadSample
from sidecar.source.ring import RingSource, overlay
from sidecar.source.snapshot import ScrapeOutcome
from sidecar.vllm_plugin.recorder import StepRecorder
from sidecar.vllm_plugin.step_ring import StepRing
from tests.sidecar.helpers import bad, capture, edited, good, parse, without

DELTAS = ("interval_s", "arrivals", "finished", "generation_tokens", "ttft_mean_s", "slo_requests", "slo_violations",
          "slo_violations_upper")  # fmt: skip


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


def test_a_sample_says_what_a_sync_would_have_cost_and_what_it_will() -> None:
    observer = make_observer()
    first = observe(observer, capture("busy"), t_s=1.0)
    assert (first.sync_cost_per_s, first.sync_costs_ahead) == (None, ())
    sample = observe(observer, capture("busy-1s-later"), t_s=2.0)
    ahead = observer.calibration(sync_duration_s=1.0).sync_costs
    assert sample.sync_costs_ahead == ahead
    assert [cost.start_s for cost in ahead] == [0, 1, 2, 5, 10, 15, 30, 60]
    assert sample.sync_cost_per_s == pytest.approx(ahead[0].violations)


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


FAULTS = [o for o in ScrapeOutcome if o not in (ScrapeOutcome.OK, ScrapeOutcome.REFUSED, ScrapeOutcome.TIMEOUT)]


def told(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str]]:
    """Level and message of what was logged since the last call."""
    lines = [(record.levelname, record.getMessage()) for record in caplog.records]
    caplog.clear()
    return lines


@pytest.mark.parametrize("outcome", FAULTS)
def test_a_server_that_cannot_be_scraped_is_warned_of_once_per_change(
    caplog: pytest.LogCaptureFixture, outcome: ScrapeOutcome
) -> None:
    observer = make_observer()
    fails = replace(bad(outcome, t_s=1.0), detail="what failed", remedy="what to do")
    with caplog.at_level(logging.INFO):
        for t_s in (1.0, 1.5, 2.0):
            observer.observe(replace(fails, monotonic_s=t_s))
        ((level, message),) = told(caplog)
        assert (level, f"={outcome} " in message, message.endswith("what failed; what to do")) == (
            "WARNING",
            True,
            True,
        )
        observe(observer, capture("busy"), t_s=2.5)
        assert [level for level, _ in told(caplog)] == ["INFO"]
        observer.observe(replace(fails, monotonic_s=3.0))
        assert [level for level, _ in told(caplog)] == ["WARNING"]


def test_a_start_and_an_end_are_told_apart(caplog: pytest.LogCaptureFixture) -> None:
    observer = make_observer()
    refused = bad(ScrapeOutcome.REFUSED, t_s=1.0)
    with caplog.at_level(logging.INFO):
        observer.observe(refused)
        observer.observe(replace(refused, monotonic_s=2.0))
        assert told(caplog) == [("INFO", "first scrape outcome=refused engine=starting")]
        observe(observer, capture("busy"), t_s=3.0)
        assert told(caplog) == [("INFO", "engine state=ready was=starting scrape=ok")]
        observer.observe(bad(ScrapeOutcome.TIMEOUT, t_s=4.0))
        assert told(caplog) == [("INFO", "scrapes end otherwise was=ok outcome=timeout engine=ready")]
        observer.observe(bad(ScrapeOutcome.TIMEOUT, t_s=40.0))
        assert told(caplog) == [("WARNING", "engine state=stale was=ready scrape=timeout")]
        observer.observe(bad(ScrapeOutcome.REFUSED, t_s=41.0))
        assert told(caplog) == [("WARNING", "engine state=down was=stale scrape=refused")]


def test_a_stalled_engine_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    observer = make_observer()
    with caplog.at_level(logging.WARNING):
        for t_s in (0.0, 30.0, 60.0, 90.0):
            observe(observer, capture("busy"), t_s=t_s)
    assert told(caplog) == [("WARNING", "engine state=stalled was=ready scrape=ok")]


def test_a_page_that_fails_behind_the_plugin_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    observer = make_observer()
    exact = replace(parse(capture("busy"), t_s=2.0), exact=True)
    with caplog.at_level(logging.INFO):
        observer.observe(overlay(good(parse(capture("busy"), t_s=1.0)), exact))
        told(caplog)
        for t_s in (2.0, 3.0):
            fails = replace(bad(ScrapeOutcome.HTTP_ERROR, t_s=t_s), detail="HTTP 404", remedy="look")
            assert observer.observe(overlay(fails, replace(exact, monotonic_s=t_s))).state is EngineState.READY
    said = "scrapes end otherwise was=ok outcome=http_error engine=ready detail=HTTP 404; look"
    assert told(caplog) == [("WARNING", said)]


def test_a_signal_that_stays_missing_is_told_again_and_its_return_too(caplog: pytest.LogCaptureFixture) -> None:
    observer = make_observer()
    page = without(capture("busy"), "vllm:kv_cache_usage_perc")
    with caplog.at_level(logging.INFO):
        for t_s in (1.0, 300.0, 602.0):
            observe(observer, page, t_s=t_s)
        assert observer.missing == ("kv_usage",)
        observe(observer, capture("busy"), t_s=603.0)
        observe(observer, page, t_s=604.0)
    assert caplog.text.count("does not export the signals kv_usage") == 2
    assert caplog.text.count("exports all signals again") == 1


def test_a_restart_that_counters_cannot_show_is_seen_by_the_refusal() -> None:
    observer = make_observer()
    observe(observer, capture("multiprocess-idle"), t_s=1.0)
    observer.observe(bad(ScrapeOutcome.REFUSED, t_s=2.0))
    sample = observe(observer, capture("multiprocess-busy"), t_s=3.0)
    assert (sample.interval_s, sample.arrivals, observer.num_restarts) == (None, None, 1)


def test_a_refusal_within_one_life_is_no_restart() -> None:
    observer = make_observer()
    observe(observer, capture("busy"), t_s=1.0)
    observer.observe(bad(ScrapeOutcome.REFUSED, t_s=2.0))
    sample = observe(observer, capture("busy-1s-later"), t_s=3.0)
    assert (sample.arrivals, observer.num_restarts) == (12, 0)


def test_staleness_is_measured_in_the_intervals_that_hold() -> None:
    for interval_s, state in ((1.0, EngineState.STALE), (5.0, EngineState.READY)):
        observer = make_observer()
        observer.observe(good(parse(capture("busy"), t_s=1.0)), interval_s=interval_s)
        sample = observer.observe(bad(ScrapeOutcome.TIMEOUT, t_s=7.0), interval_s=interval_s)
        assert sample.state is state


def test_a_slow_cadence_does_not_change_rates() -> None:
    observer = make_observer()
    observer.observe(good(parse(capture("busy"), t_s=1.0)), interval_s=4.0)
    sample = observer.observe(good(parse(capture("busy-1s-later"), t_s=5.0)), interval_s=4.0)
    assert (sample.interval_s, sample.arrivals) == (4.0, 12)
    assert sample.forecast[0].arrivals_per_s == pytest.approx(3.0)


def test_a_draining_server_has_no_known_load() -> None:
    observer = make_observer()
    drains = replace(good(parse(capture("busy"), t_s=1.0)), accepts=False)
    sample = observer.observe(drains)
    assert (sample.state, sample.running, sample.pressure_frac) == (EngineState.DRAINING, 2, None)


def test_a_change_between_page_and_plugin_drops_the_interval_and_is_no_restart() -> None:
    observer = make_observer()
    observe(observer, capture("busy"), t_s=1.0)
    exact = replace(parse(capture("idle"), t_s=2.0), exact=True)
    assert observer.observe(good(exact)).interval_s is None
    assert observe(observer, capture("busy-1s-later"), t_s=3.0).interval_s is None
    assert observer.num_restarts == 0


def test_an_slo_between_edges_is_warned_of_once_per_objective_with_the_edges(caplog: pytest.LogCaptureFixture) -> None:
    observer = make_observer(slo="e2e:400ms,ttft:100ms,tpot:60ms")
    with caplog.at_level(logging.WARNING):
        for t_s in (1.0, 2.0, 3.0):
            observe(observer, capture("busy"), t_s=t_s)
    assert caplog.text.count("slo=e2e:400ms is between histogram edges 0.3 s and 0.5 s") == 1
    assert caplog.text.count("slo=tpot:60ms is between histogram edges 0.05 s and 0.075 s") == 1
    assert caplog.text.count("histogram edges") == 2
    objectives = observer.slo_report(now_s=3.0).objectives
    assert [(o.metric, o.exact) for o in objectives] == [("e2e", False), ("ttft", True), ("tpot", False)]


def test_edges_that_change_without_end_are_told_of_a_few_times(caplog: pytest.LogCaptureFixture) -> None:
    observer = make_observer(slo="e2e:400ms,itl:60ms")
    with caplog.at_level(logging.WARNING):
        for number in range(6 * MAX_PAIRS):
            # Twice each: there is no difference between pages of different edges.
            page = capture("busy").replace('le="0.5"', f'le="0.5{number // 2:03}"')
            observe(observer, page, t_s=1.0 + number)
    told = [record.getMessage() for record in caplog.records]
    assert [sum(objective in line for line in told) for objective in ("slo=e2e:400ms", "slo=itl:60ms")] == [
        MAX_PAIRS + 1,
        1,
    ]
    assert told[-1].startswith(f"slo=e2e:400ms was between {MAX_PAIRS} pairs of histogram edges: further ones are not")


def test_an_slo_on_an_edge_is_exact() -> None:
    observer = make_observer()
    observe(observer, capture("busy"), t_s=1.0)
    sample = observe(observer, capture("busy-1s-later"), t_s=2.0)
    report = observer.slo_report(now_s=2.5)
    assert (report.slo, report.exact, report.objectives[0].edges_s) == ("e2e:300ms@99%", True, (0.3, 0.3))
    assert [w.requests for w in report.windows] == [13, 13, 13]
    assert all(w.violations == w.violations_upper == sample.slo_violations for w in report.windows)


def test_an_slo_past_the_last_edge_has_no_edge_above() -> None:
    observer = make_observer(slo="itl:3600s")
    observe(observer, capture("busy"), t_s=1.0)
    observe(observer, capture("busy-1s-later"), t_s=2.0)
    assert observer.slo_report(now_s=2.5).objectives[0].edges_s == (80.0, None)


def test_several_objectives_from_pages_are_bounded_together() -> None:
    observer = make_observer(slo="ttft:10ms,itl:50ms,e2e:300ms@90%")
    observe(observer, capture("busy"), t_s=1.0)
    sample = observe(observer, capture("busy-1s-later"), t_s=2.0)
    window = observer.slo_report(now_s=2.5).windows[0]
    assert sample.slo_requests == window.requests == 13
    assert (sample.slo_violations, sample.slo_violations_upper) == (window.violations, window.violations_upper)
    ttft, itl, e2e = window.objectives
    # A token's account is its own; two requests were in decode as the interval began.
    assert (ttft.observed, itl.observed, e2e.observed) == (12, 773, 13)
    assert ttft.violations is not None
    assert e2e.violations is not None
    assert window.violations == max(ttft.violations - 1, e2e.violations)


def test_objectives_together_are_exact_through_the_plugin(tmp_path: Path) -> None:
    observer = make_observer(slo="ttft:100ms,itl:20ms,e2e:1s@90%")
    ring = StepRing(tmp_path, engine=0)
    recorder = StepRecorder(None, ring)
    source = RingSource(tmp_path, observer.slo)
    start_s = time.monotonic()

    def look(t_s: float, page: str | None) -> LoadSample:
        ring.beat()
        exact = source.read(t_s=t_s, monotonic_s=time.monotonic())
        assert exact is not None
        exact = replace(exact, monotonic_s=start_s + t_s)
        result = bad(ScrapeOutcome.TIMEOUT, t_s=start_s + t_s)
        if page is not None:
            result = good(replace(parse(page), monotonic_s=start_s + t_s))
        return observer.observe(overlay(result, exact))

    look(1.0, capture("busy"))
    requests = [(0.05, 0.01, 0.5), (0.2, 0.01, 0.5), (0.05, 0.03, 0.5), (0.05, 0.01, 1.5), (0.2, 0.03, 1.5)]
    finished = [
        SimpleNamespace(e2e_latency=e2e_s, decode_time=e2e_s - ttft_s, mean_time_per_output_token=tpot_s)
        for ttft_s, tpot_s, e2e_s in requests
    ]
    recorder.record(None, SimpleNamespace(finished_requests=finished))
    sample = look(2.0, capture("busy-1s-later"))
    assert (sample.slo_requests, sample.slo_violations, sample.slo_violations_upper) == (5, 4, 4)
    sample = look(3.0, None)
    assert (sample.slo_requests, sample.slo_violations, sample.slo_violations_upper) == (0, 0, 0)
    report = observer.slo_report(now_s=start_s + 3.0)
    assert report.exact
    assert (report.windows[0].requests, report.windows[0].violations, report.windows[0].covered_s) == (5, 4, 2.0)
    assert report.windows[0].burn_rate == pytest.approx(8.0)
    source.close()
    ring.close()


def test_a_restart_and_a_gap_leave_the_accounts_as_they_were() -> None:
    observer = make_observer()
    observe(observer, capture("busy"), t_s=1.0)
    observe(observer, capture("busy-1s-later"), t_s=2.0)
    before = observer.slo_report(now_s=3.0)
    observe(observer, capture("idle"), t_s=3.0)
    assert observer.slo_report(now_s=3.0) == before
    sample = observer.observe(bad(ScrapeOutcome.REFUSED, t_s=4.0))
    assert (sample.slo_requests, sample.slo_violations, sample.slo_violations_upper) == (None, None, None)
    assert observer.slo_report(now_s=3.0) == before


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
