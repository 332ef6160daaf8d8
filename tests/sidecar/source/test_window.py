"""Differences of snapshots: arrivals without double counting, restarts, unknown ends."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.source.snapshot import EngineSnapshot, Histogram
from sidecar.source.window import difference, estimate_arrivals, histogram_delta, restarted, same_life
from tests.sidecar.helpers import capture, parse


def engine(**values: float | None) -> EngineSnapshot:
    """A snapshot at ``t`` whose TTFT count is ``first_tokens``."""
    t_s = values.pop("t", 0.0)
    first_tokens = values.pop("first_tokens", 0.0)
    assert t_s is not None
    ttft = None if first_tokens is None else counted(first_tokens)
    known: dict[str, float | None] = {"running": 0.0, "waiting": 0.0, "finished": 0.0, "rejections": 0.0, **values}
    return EngineSnapshot(t_s=t_s, monotonic_s=t_s, ttft=ttft, **known)  # type: ignore[arg-type]


def counted(count: float) -> Histogram:
    return Histogram(edges=(1.0, math.inf), cumulative=(0.0, count), total=2.0 * count)


def test_two_pages_of_a_real_server() -> None:
    before, now = parse(capture("busy"), t_s=10.0), parse(capture("busy-1s-later"), t_s=11.0)
    interval = difference(before, now)
    assert interval is not None
    # 12 first tokens; 2 ran before and 1 after, 13 finished: nobody was in prefill at either end.
    assert (interval.arrivals, interval.finished, interval.generation_tokens) == (12, 13, 785)
    assert interval.ttft is not None
    assert interval.ttft.count == 12
    assert interval.length_s == 1.0


ARRIVALS = [
    ("nothing happens", {}, {}, 0),
    ("one arrives and waits", {}, {"waiting": 1}, 1),
    ("one arrives and is in prefill", {}, {"running": 1}, 1),
    ("one arrives and has its first token", {}, {"running": 1, "first_tokens": 1}, 1),
    ("one arrives and finishes within the interval", {}, {"first_tokens": 1, "finished": 1}, 1),
    ("one arrives and is rejected", {}, {"rejections": 1}, 1),
    ("one that waited starts to run", {"waiting": 1}, {"running": 1}, 0),
    ("one that waited gets its first token", {"waiting": 1}, {"running": 1, "first_tokens": 1}, 0),
    ("one in prefill gets its first token", {"running": 1}, {"running": 1, "first_tokens": 1}, 0),
    ("one in decode finishes", {"running": 1, "first_tokens": 1}, {"first_tokens": 1, "finished": 1}, 0),
    ("one in decode is preempted", {"running": 1, "first_tokens": 1}, {"waiting": 1, "first_tokens": 1}, 0),
    ("a preempted one runs again", {"waiting": 1, "first_tokens": 1}, {"running": 1, "first_tokens": 1}, 0),
    ("one in decode hangs up, uncounted", {"running": 1, "first_tokens": 1}, {"first_tokens": 1}, 0),
    (
        "one takes the place of one that finishes",
        {"running": 1, "first_tokens": 1},
        {"running": 1, "first_tokens": 2, "finished": 1},
        1,
    ),
    ("one comes and hangs up between two empty moments", {}, {"first_tokens": 1}, 1),
]


@pytest.mark.parametrize(("before", "now", "arrivals"), [row[1:] for row in ARRIVALS], ids=[row[0] for row in ARRIVALS])
def test_arrivals(before: dict[str, float], now: dict[str, float], arrivals: float) -> None:
    assert estimate_arrivals(engine(**before), engine(**now)) == arrivals


@pytest.mark.parametrize("signal", ["first_tokens", "waiting", "running"])
def test_arrivals_are_unknown_without_a_signal_that_they_are_made_of(signal: str) -> None:
    assert estimate_arrivals(engine(**{signal: None}), engine()) is None
    assert estimate_arrivals(engine(), engine(**{signal: None})) is None


def test_without_rejections_or_finished_the_estimate_goes_on() -> None:
    before = engine(rejections=None, finished=None)
    assert estimate_arrivals(before, engine(first_tokens=3, rejections=None, finished=None)) == 3


@given(st.lists(st.sampled_from(["arrive", "start", "first_token", "finish", "preempt", "reject"]), max_size=60))
def test_without_aborts_arrivals_add_up_whatever_the_engine_does(events: list[str]) -> None:
    waiting, prefill, decode, first_tokens, finished, rejections, arrived = 0, 0, 0, 0, 0, 0, 0
    pages = [engine()]
    for event in events:
        if event == "arrive":
            waiting, arrived = waiting + 1, arrived + 1
        elif event == "start" and waiting:
            waiting, prefill = waiting - 1, prefill + 1
        elif event == "first_token" and prefill:
            prefill, decode, first_tokens = prefill - 1, decode + 1, first_tokens + 1
        elif event == "finish" and decode:
            decode, finished = decode - 1, finished + 1
        elif event == "preempt" and prefill:
            waiting, prefill = waiting + 1, prefill - 1
        elif event == "reject":
            rejections, arrived = rejections + 1, arrived + 1
        pages.append(
            engine(
                running=prefill + decode,
                waiting=waiting,
                first_tokens=first_tokens,
                finished=finished,
                rejections=rejections,
            )
        )
    estimates = [estimate_arrivals(a, b) or 0.0 for a, b in pairwise(pages)]
    assert sum(estimates) == arrived
    assert estimate_arrivals(pages[0], pages[-1]) == arrived


RESTARTS = {
    "a counter fell": ({"finished": 5}, {"finished": 4}),
    "first tokens fell": ({"first_tokens": 5}, {"first_tokens": 4}),
    "a later process start": ({"process_start_s": 100}, {"process_start_s": 200}),
    "counters created later": ({"created_s": 100}, {"created_s": 200}),
}


@pytest.mark.parametrize(("before", "now"), RESTARTS.values(), ids=RESTARTS.keys())
def test_a_restart_drops_the_interval(before: dict[str, float], now: dict[str, float]) -> None:
    assert restarted(engine(**before), engine(t=1, **now))
    assert difference(engine(**before), engine(t=1, **now)) is None


def test_page_and_plugin_count_from_different_moments() -> None:
    page, exact = engine(finished=90, created_s=1.8e9), replace(engine(t=1, finished=3, created_s=77.0), exact=True)
    for before, now in ((page, exact), (exact, replace(page, monotonic_s=2.0))):
        assert not restarted(before, now)
        assert difference(before, now) is None


@pytest.mark.parametrize(
    ("before", "now", "same"),
    [
        ({"process_start_s": 100}, {"process_start_s": 100.02}, True),
        ({"created_s": 100}, {"created_s": 100}, True),
        ({"process_start_s": 100}, {"process_start_s": 200}, False),
        ({"process_start_s": 100}, {}, False),
        ({}, {}, False),
    ],
)
def test_a_life_is_the_same_only_if_the_server_says_so(
    before: dict[str, float], now: dict[str, float], same: bool
) -> None:
    assert same_life(engine(**before), engine(**now)) is same


def test_observations_that_disappear_from_a_bucket_make_the_difference_unknown() -> None:
    before = Histogram(edges=(1.0, math.inf), cumulative=(0.0, 2.0), total=4.0)
    moved = Histogram(edges=(1.0, math.inf), cumulative=(2.0, 3.0), total=5.0)
    assert histogram_delta(before, moved) is None


def test_no_difference_is_taken_between_totals_of_different_writers() -> None:
    both = replace(engine(finished=9.0), writers=frozenset({"api-0", "api-1"}))
    one = replace(engine(t=1, finished=5.0), writers=frozenset({"api-1"}))
    back = replace(engine(t=2, finished=12.0), writers=both.writers)
    assert [difference(both, one), difference(one, back)] == [None, None]
    assert not restarted(both, one)
    assert not restarted(one, back)


def test_writers_that_are_all_new_and_later_are_a_restart() -> None:
    before = replace(engine(created_s=100.0), writers=frozenset({"api-0"}))
    after = replace(engine(t=1, created_s=160.0), writers=frozenset({"api-1"}))
    assert restarted(before, after)


def test_a_clock_correction_of_the_host_is_no_restart() -> None:
    assert not restarted(engine(process_start_s=100.0), engine(process_start_s=100.02))


def test_an_unknown_end_makes_the_difference_unknown() -> None:
    interval = difference(engine(finished=None), engine(t=1, finished=3))
    assert interval is not None
    assert interval.finished is None


def test_no_time_between_two_pages_is_no_interval() -> None:
    assert difference(engine(), engine()) is None


def test_histograms_with_other_edges_have_no_difference() -> None:
    before = counted(1)
    assert histogram_delta(before, replace(before, edges=(2.0, math.inf))) is None
    assert histogram_delta(None, before) is None


def test_the_mean_of_an_interval_without_observations_is_unknown() -> None:
    same = histogram_delta(counted(3), counted(3))
    assert same is not None
    assert same.mean is None
