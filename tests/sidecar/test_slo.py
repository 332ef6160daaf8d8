"""Objectives and their accounts: exact on an edge, bounds between edges, sliding windows."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.errors import InputError
from sidecar.slo import Slo, SloAccounts, SloMetric, Verdict, judge, nearest_edges, parse_slo
from sidecar.source.snapshot import Histogram
from sidecar.source.window import difference
from tests.sidecar.helpers import capture, parse

EDGES = (0.1, 0.25, 0.5, 1.0, math.inf)


def histogram(latencies_s: list[float], edges: tuple[float, ...] = EDGES) -> Histogram:
    cumulative = tuple(float(sum(latency <= edge for latency in latencies_s)) for edge in edges)
    return Histogram(edges=edges, cumulative=cumulative, total=sum(latencies_s))


@pytest.mark.parametrize(
    ("text", "slo"),
    [
        ("e2e:200ms", Slo(SloMetric.E2E, 0.2)),
        ("ttft:0.5s", Slo(SloMetric.TTFT, 0.5)),
        ("itl:50ms", Slo(SloMetric.ITL, 0.05)),
        (" E2E:1S ", Slo(SloMetric.E2E, 1.0)),
        ("ttft:.25s", Slo(SloMetric.TTFT, 0.25)),
        ("e2e:3600s", Slo(SloMetric.E2E, 3600.0)),
        ("itl:0.001ms", Slo(SloMetric.ITL, 1e-6)),
    ],
)
def test_an_objective_is_read_and_written_back(text: str, slo: Slo) -> None:
    assert parse_slo(text) == slo
    assert parse_slo(str(slo)).threshold_s == pytest.approx(slo.threshold_s, abs=1e-9)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not an objective"),
        ("e2e", "not an objective"),
        ("e2e:", "not an objective"),
        ("e2e:-5ms", "not an objective"),
        ("e2e:nan", "not an objective"),
        ("e2e:200", "unit is missing"),
        ("e2e:200m", "unit is 'm'"),
        ("tpot:50ms", "metric 'tpot' is not one of ttft, itl, e2e"),
        ("e2e:0ms", "between a microsecond and a day"),
        ("e2e:100000s", "between a microsecond and a day"),
    ],
)
def test_what_is_no_objective_is_refused_with_the_remedy(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message) as refused:
        parse_slo(text)
    assert refused.value.field == "slo"
    assert "e2e:200ms" in (refused.value.remedy or "")


def test_on_an_edge_the_count_is_exact() -> None:
    verdict = judge(histogram([0.05, 0.25, 0.3, 0.9, 5.0]), 0.25)
    assert (verdict.requests, verdict.violations, verdict.violations_upper) == (5, 3, 3)
    assert verdict.exact


def test_between_edges_the_count_is_bounded_by_its_neighbours() -> None:
    verdict = judge(histogram([0.05, 0.3, 0.9, 5.0]), 0.4)
    assert (verdict.violations, verdict.violations_upper) == (2, 3)
    assert verdict.edges_s == (0.25, 0.5)
    assert not verdict.exact


@pytest.mark.parametrize(("threshold_s", "edges_s"), [(0.01, (0.0, 0.1)), (7.0, (1.0, math.inf)), (0.1, (0.1, 0.1))])
def test_nearest_edges(threshold_s: float, edges_s: tuple[float, float]) -> None:
    assert nearest_edges(EDGES, threshold_s) == edges_s


def test_past_the_last_edge_nothing_is_certain() -> None:
    verdict = judge(histogram([5.0, 50.0]), 7.0)
    assert (verdict.violations, verdict.violations_upper) == (0, 2)


@given(
    st.lists(st.floats(0.0, 20.0), max_size=50),
    st.floats(0.001, 15.0),
    st.sets(st.floats(0.001, 10.0), min_size=1, max_size=8),
)
def test_the_truth_lies_within_the_bounds(latencies_s: list[float], threshold_s: float, edges: set[float]) -> None:
    verdict = judge(histogram(latencies_s, (*sorted(edges), math.inf)), threshold_s)
    truth = sum(latency > threshold_s for latency in latencies_s)
    assert 0 <= verdict.violations <= truth <= verdict.violations_upper <= verdict.requests
    if verdict.exact and verdict.edges_s[0] == threshold_s:
        assert verdict.violations == truth


def test_a_real_interval_is_judged_by_the_edges_of_its_page() -> None:
    interval = difference(parse(capture("busy"), t_s=0), parse(capture("busy-1s-later"), t_s=1))
    assert interval is not None
    assert interval.e2e is not None
    assert interval.ttft is not None
    on_edge = judge(interval.e2e, 0.3)
    assert on_edge.exact
    assert on_edge.requests == 13
    below = judge(interval.e2e, 0.2)
    assert (below.violations, below.violations_upper) == (on_edge.violations, 13)
    assert judge(interval.ttft, 0.1).exact


def test_windows_slide() -> None:
    accounts = SloAccounts()
    for t_s in range(400):
        accounts.add(Verdict(2.0, 1.0, 2.0, (0.25, 0.5)), now_s=float(t_s))
    minute, five, hour = accounts.windows(now_s=399.5)
    assert (minute.requests, minute.violations, minute.violations_upper) == (120, 60, 120)
    assert (five.requests, hour.requests) == (600, 800)
    assert minute.attainment_frac == 0.5


def test_an_hour_later_nothing_is_left_and_attainment_is_unknown() -> None:
    accounts = SloAccounts()
    accounts.add(Verdict(2.0, 1.0, 2.0, (0.5, 0.5)), now_s=0.0)
    assert [w.attainment_frac for w in accounts.windows(now_s=3700.0)] == [None, None, None]


def test_memory_is_bounded_by_the_longest_window() -> None:
    accounts = SloAccounts()
    for tick in range(80_000):
        accounts.add(Verdict(1.0, 0.0, 0.0, (0.5, 0.5)), now_s=tick * 0.1)
    assert accounts.windows(now_s=8000.0)[-1].requests == pytest.approx(36_000, abs=20)
    assert len(accounts._bins) <= 3602
