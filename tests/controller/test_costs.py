"""The cost of a sync per second, of servers and of groups of them."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.costs import FORGET_AFTER_S, HISTORY_S, CostBook, ServerCosts, _Group
from sidecar.schema import LoadSample

T0 = 1_700_000_000.0
AHEAD = ({"start_s": 0.0, "violations": 2.0}, {"start_s": 2.0, "violations": 4.0})


def sample(t_s: float, cost: float | None, server: str = "a", *, interval_s: float = 1.0, **fields: Any) -> LoadSample:
    base = {"server_id": server, "node": "n", "t_s": t_s, "state": "ready", "interval_s": interval_s}
    return LoadSample.model_validate({**base, "sync_cost_per_s": cost, **fields})


def book(*servers: str) -> CostBook:
    made = CostBook(stale_after_s=5.0)
    made.follow(servers or ("a",), now_s=T0)
    return made


def test_a_group_costs_what_its_servers_cost_together() -> None:
    costs = book("a", "b")
    for second in range(3):
        costs.offer(sample(T0 + second + 1, 1.0 + second))
        costs.offer(sample(T0 + second + 1, 10.0, "b"))
    assert costs.series(("a", "b"), since_s=T0, until_s=T0 + 4) == (11.0, 12.0, 13.0, None)
    assert costs.series(("a",), since_s=T0 + 1, until_s=T0 + 3) == (2.0, 3.0)


def test_a_second_that_one_server_did_not_tell_about_is_unknown() -> None:
    costs = book("a", "b")
    costs.offer(sample(T0 + 1, 1.0))
    costs.offer(sample(T0 + 1, None, "b"))
    assert costs.series(("a", "b"), since_s=T0, until_s=T0 + 1) == (None,)
    assert costs.series(("a", "nobody"), since_s=T0, until_s=T0 + 1) == (None,)
    assert costs.series((), since_s=T0, until_s=T0 + 2) == (None, None)


def test_intervals_off_the_grid_count_by_their_overlap() -> None:
    costs = book()
    for number, cost in enumerate((4.0, 8.0, 8.0)):
        costs.offer(sample(T0 + 1.25 + number, cost))
    # The first second has three quarters of the first interval.
    assert costs.series(("a",), since_s=T0, until_s=T0 + 3) == pytest.approx((4.0, 0.25 * 4 + 0.75 * 8, 8.0))


def test_short_intervals_are_averaged_within_a_second() -> None:
    costs = book()
    costs.offer(sample(T0 + 0.5, 2.0, interval_s=0.5))
    costs.offer(sample(T0 + 1.0, 6.0, interval_s=0.5))
    assert costs.series(("a",), since_s=T0, until_s=T0 + 1) == (4.0,)


def test_only_half_of_a_second_need_be_known() -> None:
    costs = book()
    costs.offer(sample(T0 + 0.4, 2.0, interval_s=0.4))
    assert costs.series(("a",), since_s=T0, until_s=T0 + 1) == (None,)
    costs.offer(sample(T0 + 0.6, 2.0, interval_s=0.2))
    assert costs.series(("a",), since_s=T0, until_s=T0 + 1) == pytest.approx((2.0,))


def test_the_past_is_forgotten_after_its_time() -> None:
    costs = book()
    for second in range(HISTORY_S + 10):
        costs.offer(sample(T0 + second + 1, float(second)))
    found = costs.series(("a",), since_s=T0, until_s=T0 + HISTORY_S + 10)
    known = [value for value in found if value is not None]
    assert HISTORY_S - 2 <= len(known) <= HISTORY_S
    assert known[-1] == HISTORY_S + 9
    assert found[0] is None


def test_a_long_silence_leaves_nothing_of_the_lap_before() -> None:
    costs = book()
    costs.offer(sample(T0 + 1, 7.0))
    costs.offer(sample(T0 + 1 + HISTORY_S, 1.0))
    assert costs.series(("a",), since_s=T0 + HISTORY_S - 5, until_s=T0 + HISTORY_S + 1) == (*[None] * 5, 1.0)


LENGTHS_S = st.sampled_from([0.3, 1.0, 1.7, 40.0])


@given(
    pieces=st.lists(st.tuples(LENGTHS_S, st.sampled_from([0.0, 0.5, 30.0]), st.booleans()), max_size=60),
    first=st.integers(-50, HISTORY_S + 50),
    count=st.integers(0, 200),
)
def test_many_seconds_at_once_are_the_same_as_one_by_one(
    pieces: list[tuple[float, float, bool]], first: int, count: int
) -> None:
    server, t_s = ServerCosts(), T0 + HISTORY_S - 60
    for interval_s, silence_s, is_known in pieces:
        t_s += interval_s + silence_s
        server.add(sample(t_s, t_s - T0 if is_known else None, interval_s=interval_s))
    seconds = range(int(T0) + first, int(T0) + first + count)
    found = [None if math.isnan(cost) else cost for cost in server.series(seconds)]
    assert found == [server.cost_per_s(second) for second in seconds]


def test_a_server_that_nobody_asked_for_takes_no_memory() -> None:
    costs = CostBook(stale_after_s=5.0)
    costs.offer(sample(T0 + 1, 1.0))
    assert costs.series(("a",), since_s=T0, until_s=T0 + 1) == (None,)
    costs.follow(("a",), now_s=T0)
    costs.forget(T0 + FORGET_AFTER_S + 1)
    costs.offer(sample(T0 + 2, 1.0))
    assert costs.series(("a",), since_s=T0 + 1, until_s=T0 + 2) == (None,)


def play(costs: CostBook, seconds: int, *, cost: float = 2.0, servers: tuple[str, ...] = ("a",)) -> None:
    for second in range(seconds):
        for server in servers:
            costs.offer(sample(T0 + second + 1, cost, server, sync_costs_ahead=AHEAD))
        costs.view(servers, now_s=T0 + second + 1, sync_s=2.0)


def test_a_view_tells_what_a_sync_costs_now_lately_and_ahead() -> None:
    costs = book("a", "b")
    play(costs, 60, servers=("a", "b"))
    view = costs.view(("b", "a"), now_s=T0 + 60.2, sync_s=2.0)
    assert view is not None
    assert len(view.recent_per_s) == 60
    assert view.expected_per_s == pytest.approx(4.0, rel=0.3)
    assert view.ahead_per_s == ((0.0, 4.0), (2.0, 8.0))
    assert view.foreseen_per_s(2.0) == pytest.approx(6.0)


def test_a_tick_without_news_says_the_same_again() -> None:
    costs = book()
    play(costs, 30)
    first, again = (costs.view(("a",), now_s=T0 + 30.0 + later_s, sync_s=2.0) for later_s in (0.1, 0.3))
    assert first is not None
    assert again is not None
    assert (first.expected_per_s, len(first.recent_per_s)) == (again.expected_per_s, len(again.recent_per_s))


def test_the_cost_is_unknown_without_young_samples_of_every_server() -> None:
    costs = book("a", "b")
    assert costs.view((), now_s=T0, sync_s=2.0) is None
    assert costs.view(("a",), now_s=T0, sync_s=2.0) is None
    play(costs, 20)
    assert costs.view(("a",), now_s=T0 + 21, sync_s=2.0) is not None
    assert costs.view(("a", "b"), now_s=T0 + 21, sync_s=2.0) is None
    assert costs.view(("a",), now_s=T0 + 30, sync_s=2.0) is None


def test_an_engine_that_does_not_serve_makes_the_cost_unknown() -> None:
    costs = book()
    play(costs, 20)
    for second in range(20, 23):
        costs.offer(sample(T0 + second + 1, None, interval_s=1.0))
    assert costs.view(("a",), now_s=T0 + 23, sync_s=2.0) is None


def test_a_server_that_joins_brings_its_past_along() -> None:
    costs = book("a", "b")
    for second in range(100):
        for server in ("a", "b"):
            costs.offer(sample(T0 + second + 1, 1.0, server))
    view = costs.view(("a", "b"), now_s=T0 + 100, sync_s=2.0)
    assert view is not None
    assert len(view.recent_per_s) == 100


def test_forecasts_with_other_start_times_do_not_add_up() -> None:
    costs = book("a", "b")
    for second in range(20):
        costs.offer(sample(T0 + second + 1, 1.0, sync_costs_ahead=AHEAD))
        costs.offer(sample(T0 + second + 1, 1.0, "b"))
    view = costs.view(("a", "b"), now_s=T0 + 20, sync_s=2.0)
    assert view is not None
    assert view.ahead_per_s == ()
    assert view.foreseen_per_s(2.0) is None


@pytest.mark.parametrize("heard_s", [1.0, 40.0, HISTORY_S + 60.0])
def test_what_nobody_told_of_before_the_first_question_can_be_skipped(heard_s: float) -> None:
    skips, looks = book("a", "b"), book("a", "b")
    looks._groups["a", "b"] = _Group(next_second=0)
    for number in range(200):
        now_s = T0 + heard_s + number
        for costs in (skips, looks):
            costs.offer(sample(now_s, float(number % 7), interval_s=30.0 if number == 100 else 1.0))
            if number > 2:
                costs.offer(sample(now_s, 1.0 + number % 3, "b"))
    found = [costs.view(("a", "b"), now_s=now_s, sync_s=2.0) for costs in (skips, looks)]
    assert found[0] is not None
    assert found[0] == found[1]
