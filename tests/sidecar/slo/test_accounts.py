"""Accounts over sliding windows: bounds that hold over any chain of scrapes, and what the counts mean."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.schema import SloReport, SloWindow
from sidecar.slo import Slo, parse_slo
from sidecar.slo.accounts import WINDOWS_S, SloAccounts
from sidecar.slo.judge import IntervalVerdict, Joint, judge_interval, judge_request
from sidecar.source.window import difference
from tests.sidecar.slo.helpers import REQUESTS, Request, page_at

ONE = parse_slo("e2e:1s@90%")


def counted(
    requests: float, violations: float, upper: float | None = None, *, length_s: float = 1.0
) -> IntervalVerdict:
    joint = Joint(requests, violations, violations if upper is None else upper)
    return IntervalVerdict(length_s, joint, 0.0, exact=True, ttft_apart=False, objectives=(None,))


def unknown(*, length_s: float = 1.0) -> IntervalVerdict:
    return IntervalVerdict(length_s, None, math.inf, exact=False, ttft_apart=False, objectives=(None,))


def report_of(verdicts: dict[float, IntervalVerdict], *, now_s: float, slo: Slo = ONE) -> SloReport:
    accounts = SloAccounts(slo)
    for t_s, verdict in verdicts.items():
        accounts.add(verdict, now_s=t_s)
    return accounts.report(now_s=now_s)


def minute(report: SloReport) -> SloWindow:
    return report.windows[0]


def test_windows_slide() -> None:
    report = report_of({float(t_s): counted(2, 1, 2) for t_s in range(400)}, now_s=399.5)
    assert [w.requests for w in report.windows] == [120, 600, 800]
    assert [w.violations for w in report.windows] == [60, 300, 400]
    assert [w.covered_s for w in report.windows] == [60, 300, 400]


def test_what_the_counts_mean() -> None:
    window = minute(report_of({1.0: counted(40, 3, 5, length_s=4.0)}, now_s=1.0))
    assert (window.requests, window.violations, window.violations_upper) == (40, 3, 5)
    rates = (window.attainment_frac, window.attainment_frac_lower, window.goodput_per_s, window.goodput_per_s_lower)
    assert rates == pytest.approx((0.925, 0.875, 37 / 4, 35 / 4))
    # Ten percent of forty may violate: three leave a quarter of the budget, five overspend it.
    budget = (window.burn_rate, window.burn_rate_upper, window.error_budget_left_frac)
    assert budget == pytest.approx((0.75, 1.25, 0.25))
    assert window.error_budget_left_frac_lower == pytest.approx(-0.25)


def test_before_anything_was_judged_all_is_unknown() -> None:
    report = report_of({}, now_s=5.0)
    assert report == report_of({1.0: unknown()}, now_s=5.0)
    assert (report.fast_burn, report.exact, report.objectives[0].edges_s) == (None, False, None)
    for window in report.windows:
        known = {name for name, value in window if value is not None}
        assert known == {"window_s", "covered_s", "objectives"}
        assert window.objectives[0].observed is None


def test_without_requests_counts_are_zero_and_rates_unknown() -> None:
    window = minute(report_of({1.0: counted(0, 0)}, now_s=1.0))
    assert (window.covered_s, window.requests, window.violations, window.goodput_per_s) == (1.0, 0, 0, 0.0)
    assert (window.attainment_frac, window.burn_rate, window.error_budget_left_frac) == (None, None, None)


def test_a_gap_is_not_covered_and_an_hour_later_nothing_is_left() -> None:
    verdicts = {1.0: counted(4, 1), 2.0: unknown(), 30.0: counted(4, 0)}
    assert minute(report_of(verdicts, now_s=30.0)).goodput_per_s == pytest.approx(3.5)
    assert minute(report_of(verdicts, now_s=70.0)).requests == 4
    assert [w.requests for w in report_of(verdicts, now_s=3700.0).windows] == [None, None, None]


@pytest.mark.parametrize(
    ("early", "late", "fast_burn"),
    [(0, 0, False), (100, 0, False), (0, 100, False), (100, 100, True)],
)
def test_fast_burn_needs_both_windows(early: int, late: int, fast_burn: bool) -> None:
    slo = parse_slo("e2e:1s@99%")
    hour = {60.0 * i: counted(100, early if i % 5 == 0 else 0, length_s=60.0) for i in range(40)}
    recent = {2400.0 + 60 * i: counted(10, late / 10, length_s=60.0) for i in range(5)}
    assert report_of(hour | recent, now_s=2650.0, slo=slo).fast_burn is fast_burn


def test_objectives_have_accounts_of_their_own() -> None:
    requests = [Request(0.0, 0.25, 1.0, 5), Request(0.0, 0.5, 0.25, 2), Request(2.0, 0.125, 4.0, 9)]
    slo = parse_slo("ttft:250ms,itl:200ms,e2e:700ms")
    report = report_of({3.0: _between(slo, requests, -1.0, 3.0)}, now_s=3.0, slo=slo)
    ttft, itl, e2e = minute(report).objectives
    assert (ttft.observed, ttft.violations) == (3, 1)
    assert ttft.attainment_frac == pytest.approx(2 / 3)
    assert (itl.observed, itl.violations, itl.violations_upper) == (5, 0, 5)
    assert (e2e.observed, e2e.violations, e2e.violations_upper) == (2, 1, 2)
    assert [(o.metric, o.counts, o.edges_s, o.exact) for o in report.objectives] == [
        ("ttft", "requests", (0.25, 0.25), True),
        ("itl", "tokens", (0.1, 0.25), False),
        ("e2e", "requests", (0.5, 1.0), False),
    ]


@given(
    st.sampled_from(["ttft:250ms,e2e:1s", "ttft:300ms,tpot:60ms,e2e:2s", "ttft:250ms", "itl:50ms"]).map(parse_slo),
    REQUESTS,
    st.lists(st.tuples(st.integers(1, 64 * 3), st.booleans()), min_size=2, max_size=60),
)
def test_over_any_chain_of_scrapes_the_truth_lies_within_the_bounds(
    slo: Slo, requests: list[Request], steps: list[tuple[int, bool]]
) -> None:
    """Some intervals are not seen: what happened in them is neither judged nor allowed to blur the rest."""
    accounts = SloAccounts(slo)
    times_s = [0.0, *itertools.accumulate(ticks / 64 for ticks, _ in steps)]
    judged = violations = 0
    for (start_s, end_s), (_, seen) in zip(itertools.pairwise(times_s), steps, strict=True):
        if seen:
            accounts.add(_between(slo, requests, start_s, end_s), now_s=end_s)
            for request in requests:
                at_s = request.first_token_s if slo.main.metric == "ttft" else request.end_s
                if start_s < at_s <= end_s and (slo.main.metric == "ttft" or not request.aborted):
                    judged += 1
                    violations += judge_request(slo, request.latencies_s)[0]
    window = accounts.report(now_s=times_s[-1]).windows[-1]
    assert window.window_s == WINDOWS_S[-1]
    if not any(seen for _, seen in steps):
        assert window.requests is None
        return
    assert window.violations is not None
    assert window.violations_upper is not None
    assert window.requests == judged
    assert 0 <= window.violations <= violations <= window.violations_upper <= judged


def test_a_first_token_that_came_unseen_may_have_been_late() -> None:
    """Between the scrapes at 1 s and 3.5 s; all of this is one bin of the hour's window, several of the minute's."""
    requests = [Request(0.0, 0.125, 0.5, 5), Request(2.0, 1.0, 0.75, 5)]
    slo = parse_slo("ttft:250ms,e2e:2s")
    seen = {1.0: _between(slo, requests, -1.0, 1.0), 6.0: _between(slo, requests, 3.5, 6.0)}
    windows = report_of(seen, now_s=6.0, slo=slo).windows
    assert [(w.requests, w.violations, w.violations_upper) for w in windows] == [(2, 0, 1)] * 3


def test_the_error_of_ttft_with_e2e_does_not_grow_with_the_number_of_scrapes() -> None:
    """Two requests are always in decode; every tenth misses its TTFT."""
    requests = [Request(i / 4, 0.5 if i % 10 == 0 else 0.125, 0.5, 5) for i in range(160)]
    slo = parse_slo("ttft:250ms,e2e:100s")
    accounts = SloAccounts(slo)
    for start_s, end_s in itertools.pairwise(i / 2 for i in range(100)):
        accounts.add(_between(slo, requests, start_s, end_s), now_s=end_s)
    window = accounts.report(now_s=49.5).windows[0]
    assert (window.requests, window.violations, window.violations_upper) == (160, 15, 17)


def _between(slo: Slo, requests: list[Request], start_s: float, end_s: float) -> IntervalVerdict:
    interval = difference(page_at(requests, start_s), page_at(requests, end_s))
    assert interval is not None
    return judge_interval(slo, interval)
