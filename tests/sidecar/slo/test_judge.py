"""Judging: exact on an edge and request by request, else bounds that always hold the truth."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.slo import Slo, parse_slo
from sidecar.slo.judge import Bounds, judge, judge_interval, judge_request, nearest_edges
from sidecar.source.snapshot import Judged
from sidecar.source.window import Interval, difference
from tests.sidecar.helpers import capture, parse
from tests.sidecar.slo.helpers import EDGES, REQUESTS, Request, histogram, page_at

SLOS = st.sampled_from(
    [
        "ttft:250ms",
        "e2e:1s",
        "e2e:700ms",
        "itl:50ms",
        "tpot:250ms,e2e:2s",
        "itl:100ms,e2e:1500ms",
        "ttft:250ms,e2e:1s",
        "ttft:300ms,tpot:60ms",
        "ttft:500ms,itl:100ms,tpot:300ms,e2e:2s",
    ]
).map(parse_slo)


def interval_of(requests: list[Request], start_s: float, end_s: float) -> Interval:
    interval = difference(page_at(requests, start_s), page_at(requests, end_s))
    assert interval is not None
    return interval


def truth(slo: Slo, requests: list[Request], start_s: float, end_s: float) -> Bounds:
    """The requests that are judged between two moments, and how many of them violate."""
    at_first_token = [o.metric for o in slo.objectives] == ["ttft"]
    moments = [(request, request.first_token_s if at_first_token else request.end_s) for request in requests]
    judged = [r for r, at_s in moments if start_s < at_s <= end_s and (at_first_token or not r.aborted)]
    violations = sum(judge_request(slo, request.latencies_s)[0] for request in judged)
    return Bounds(len(judged), violations, violations)


def test_on_an_edge_the_count_is_exact() -> None:
    verdict = judge(histogram([0.05, 0.25, 0.3, 0.9, 5.0]), 0.25)
    assert verdict == (5, 3, 3, (0.25, 0.25))
    assert verdict.exact


@pytest.mark.parametrize(
    ("threshold_s", "violations", "upper", "edges_s"),
    [(0.4, 2, 3, (0.25, 0.5)), (0.01, 3, 4, (0.0, 0.1)), (7.0, 0, 1, (2.0, math.inf))],
)
def test_between_edges_the_count_is_bounded_by_its_neighbours(
    threshold_s: float, violations: int, upper: int, edges_s: tuple[float, float]
) -> None:
    verdict = judge(histogram([0.05, 0.3, 0.9, 5.0]), threshold_s)
    assert verdict == (4, violations, upper, edges_s)
    assert not verdict.exact
    assert nearest_edges(EDGES, threshold_s) == edges_s


@given(
    st.lists(st.floats(0.0, 20.0), max_size=50),
    st.floats(0.001, 15.0),
    st.sets(st.floats(0.001, 10.0), min_size=1, max_size=8),
)
def test_the_truth_about_one_objective_lies_within_the_bounds(
    latencies_s: list[float], threshold_s: float, edges: set[float]
) -> None:
    verdict = judge(histogram(latencies_s, (*sorted(edges), math.inf)), threshold_s)
    violations = sum(latency > threshold_s for latency in latencies_s)
    assert 0 <= verdict.violations <= violations <= verdict.violations_upper <= verdict.observed
    if threshold_s in edges:
        assert verdict.violations == violations == verdict.violations_upper


@given(SLOS, REQUESTS, st.floats(0, 20), st.floats(0.01, 10))
def test_the_truth_about_all_objectives_lies_within_the_bounds(
    slo: Slo, requests: list[Request], start_s: float, length_s: float
) -> None:
    verdict = judge_interval(slo, interval_of(requests, start_s, start_s + length_s))
    true = truth(slo, requests, start_s, start_s + length_s)
    assert verdict.bounds is not None
    assert verdict.bounds.requests == true.requests
    assert 0 <= verdict.bounds.violations <= true.violations <= verdict.bounds.violations_upper <= true.requests
    if verdict.exact:
        assert verdict.bounds == true


@given(SLOS, REQUESTS)
def test_an_engine_that_was_empty_at_both_ends_leaves_frechets_bounds(slo: Slo, requests: list[Request]) -> None:
    requests = [request._replace(aborted=False) for request in requests]
    verdict = judge_interval(slo, interval_of(requests, -1.0, 1000.0))
    assert verdict.bounds is not None
    singles = [single for single in verdict.objectives if single is not None]
    if not any(objective.metric == "itl" for objective in slo.objectives):
        assert verdict.bounds.violations == max(single.violations for single in singles)
        assert verdict.bounds.violations_upper == min(len(requests), sum(s.violations_upper for s in singles))


@pytest.mark.parametrize(
    ("latencies_s", "violated", "may_have"),
    [
        ((0.2, 0.05, 1.0), False, False),
        ((0.21, 0.05, 1.0), True, True),
        ((0.2, 0.051, 1.0), True, True),
        ((0.2, 0.05, 1.1), True, True),
        ((0.2, math.inf, 1.0), True, True),
        ((math.nan, 0.05, 1.0), False, True),
        ((math.nan, 0.05, 1.1), True, True),
    ],
)
def test_a_request_must_meet_all_objectives(
    latencies_s: tuple[float, float, float], violated: bool, may_have: bool
) -> None:
    assert judge_request(parse_slo("ttft:200ms,itl:50ms,e2e:1s"), latencies_s) == (violated, may_have)


BUSY = [Request(0.0, 0.25, 1.0, 5), Request(0.0, 0.5, 0.25, 2), Request(2.0, 0.125, 4.0, 9)]


@pytest.mark.parametrize(
    ("missing", "slo", "bounds"),
    [
        (("ttft",), "ttft:250ms", None),
        (("e2e",), "e2e:1s", None),
        (("tpot",), "itl:50ms", None),
        (("itl",), "itl:50ms", (2, 2, 2)),
        (("ttft",), "ttft:250ms,e2e:1s", (2, 1, 2)),
        (("tpot",), "itl:50ms,e2e:1s", (2, 1, 2)),
        (("tpot", "e2e"), "ttft:250ms,e2e:1s,tpot:1s", None),
    ],
)
def test_what_is_missing_is_unknown_or_may_have_been_missed_by_all(
    missing: tuple[str, ...], slo: str, bounds: tuple[float, float, float] | None
) -> None:
    unknown: dict[str, Any] = dict.fromkeys(missing)
    interval = replace(interval_of(BUSY, -1.0, 3.0), **unknown)
    assert judge_interval(parse_slo(slo), interval).bounds == bounds


def test_an_unknown_number_in_the_engine_leaves_the_other_objectives() -> None:
    interval = interval_of(BUSY, -1.0, 3.0)
    slo = parse_slo("ttft:250ms,e2e:1s")
    assert judge_interval(slo, interval).bounds == (2, 1, 2)
    assert judge_interval(slo, replace(interval, in_engine_before=None)).bounds == (2, 1, 2)
    assert judge_interval(parse_slo("ttft:100ms,e2e:100s"), interval).bounds == (2, 2, 2)
    unknown = replace(interval, in_engine_before=None)
    assert judge_interval(parse_slo("ttft:100ms,e2e:100s"), unknown).bounds == (2, 0, 2)


def test_requests_known_one_by_one_go_before_histograms_except_for_ttft_alone() -> None:
    interval = replace(interval_of(BUSY, -1.0, 3.0), judged=Judged(2.0, 1.0, 1.0))
    several = judge_interval(parse_slo("ttft:100ms,e2e:1500ms"), interval)
    assert (several.bounds, several.exact) == ((2, 1, 1), True)
    early = judge_interval(parse_slo("ttft:250ms"), interval)
    assert (early.bounds, early.exact) == ((3, 1, 1), True)


def test_a_real_interval_is_judged_by_the_edges_of_its_page() -> None:
    interval = difference(parse(capture("busy"), t_s=0), parse(capture("busy-1s-later"), t_s=1))
    assert interval is not None
    exact = judge_interval(parse_slo("e2e:300ms"), interval)
    assert exact.exact
    assert exact.bounds is not None
    assert exact.bounds.requests == 13
    below = judge_interval(parse_slo("e2e:200ms"), interval)
    assert below.bounds == (13, exact.bounds.violations, 13)
    together = judge_interval(parse_slo("ttft:100ms,tpot:50ms,e2e:300ms"), interval)
    assert together.bounds is not None
    assert together.bounds.requests == 13
    assert exact.bounds.violations <= together.bounds.violations <= together.bounds.violations_upper
