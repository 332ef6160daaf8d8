"""``wa_forecast``: the cost of now against what may still be expected of the chances before the deadline."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.policy import make_policy
from controller.policy.base import BudgetView, Decision, FleetView, summarize
from controller.policy.wa_forecast import DEFAULT_DEADLINE_S, due_in, tie_share
from controller.schema import Action, PolicySpec, Reason
from tests.controller.policy.views import CONTEXT, costs, fleet, island

NOW_S = 1000.0
RECENT = [float(value) for value in range(100)]


def decide(view: FleetView, now_s: float = NOW_S, **params: float) -> Decision:
    return make_policy(PolicySpec(name="wa_forecast", params=params), CONTEXT).decide(view, now_s)


def with_cost(now: float, **fields: object) -> FleetView:
    """H is 50 of at most 100 and a step takes a second; a chance takes 3 s, a sync 2 s: the quantile is 1/11."""
    return replace(fleet(), costs=costs(now, RECENT, **fields))


def test_a_cost_within_the_quantile_is_taken() -> None:
    low, high = decide(with_cost(8.5)), decide(with_cost(9.5))
    assert (low.action, low.reason) == (Action.SYNC, Reason.COST_LOW)
    assert (high.action, high.reason) == (Action.DEFER, Reason.COST_HIGH)


def test_a_decision_carries_what_it_was_made_of() -> None:
    view = replace(with_cost(9.5, ahead_per_s=((0.0, 4.0), (10.0, 3.0))), expected_sync_s=2.0)
    terms = decide(view).terms
    expected = {
        "due_in_s": 50.0,
        "decorrelation_s": 3.0,
        "chances_left": 10.0,
        "quantile": 1 / 11,
        "cheaper_frac": 0.1,
        "same_frac": 0.0,
        "sync_cost": 19.0,
        "price": 18.0,
        "sync_cost_ahead": 6.0,
    }
    assert {name: terms[name] for name in expected} == pytest.approx(expected)


def test_as_the_deadline_nears_higher_costs_are_taken() -> None:
    taken = []
    for h in range(50, 100):
        view = replace(fleet(island(h)), costs=costs(40.0, RECENT))
        taken.append(decide(view).action is Action.SYNC)
    # 40 % cost less: taken from 1.5 chances before the deadline on, and never passed again.
    assert taken.index(True) == 50 - math.floor(1.5 * 5)
    assert all(taken[taken.index(True) :])


def test_at_the_deadline_the_guard_syncs_whatever_it_costs() -> None:
    view = replace(fleet(island(100)), costs=costs(1e9, RECENT))
    assert decide(view).reason is Reason.MAX_H_REACHED


@pytest.mark.parametrize(
    ("view", "reason"),
    [
        (fleet(), Reason.COST_UNKNOWN),
        (replace(fleet(), costs=costs(0.0, [0.0] * 9)), Reason.COST_HISTORY_SHORT),
    ],
)
def test_what_is_unknown_waits_for_the_deadline(view: FleetView, reason: Reason) -> None:
    decision = decide(view)
    assert (decision.action, decision.reason) == (Action.DEFER, reason)
    assert decision.terms["due_in_s"] == 50.0


def test_a_much_lower_cost_ahead_is_waited_for() -> None:
    ahead = ((0.0, 4.0), (10.0, 1.7), (60.0, 0.0))
    assert decide(with_cost(3.0, ahead_per_s=ahead)).reason is Reason.LOWER_COST_AHEAD
    assert decide(with_cost(3.0, ahead_per_s=ahead), ahead_frac=0.4).reason is Reason.COST_LOW
    # What lies behind the deadline, or within the time in which nothing changes, does not count.
    assert decide(with_cost(3.0, ahead_per_s=((0.0, 4.0), (2.0, 1.0), (60.0, 0.0)))).reason is Reason.COST_LOW


def test_without_a_season_a_flat_forecast_changes_nothing() -> None:
    assert decide(with_cost(3.0, ahead_per_s=((0.0, 4.0), (10.0, 4.0)))).reason is Reason.COST_LOW


def test_the_deadline_is_the_earliest_of_all() -> None:
    budget = BudgetView(outer_syncs=4, horizon_s=400.0, started_s=900.0, spent=0)

    def due(view: FleetView) -> float:
        return due_in(view, summarize(view, NOW_S), NOW_S)

    by_steps = fleet()
    assert due(by_steps) == 50.0
    by_budget = replace(by_steps, max_h=10_000, budget=budget, expected_sync_s=4.0)
    # The rest must start 5 s before the end, and three cycles of 5 s + 12.5 s before that; four share what is left.
    assert due(by_budget) == pytest.approx((1300.0 - 5.0 - 3 * 17.5 - NOW_S) / 4)
    by_deferral = replace(by_budget, budget=replace(budget, max_defer_s=110.0))
    assert due(by_deferral) == pytest.approx(10.0)
    by_rate = replace(by_steps, max_h=10_000, budget=BudgetView(syncs_per_hour=36.0, started_s=950.0))
    assert due(by_rate) == pytest.approx(50.0)
    assert due(replace(by_steps, islands=(island(50, step_time_s=None),))) == DEFAULT_DEADLINE_S


def test_a_sync_that_was_not_made_raises_the_price_of_the_next() -> None:
    budget = BudgetView(outer_syncs=8, horizon_s=600.0, started_s=900.0)
    view = replace(with_cost(30.0), max_h=10_000, budget=budget)
    prices = [decide(replace(view, budget=replace(budget, spent=spent))).terms["price"] for spent in range(8)]
    assert prices == sorted(prices, reverse=True)
    assert prices[0] > prices[-1]


@given(same=st.floats(0.001, 1.0), chances=st.floats(0, 1000))
def test_among_equal_moments_the_share_is_a_probability(same: float, chances: float) -> None:
    assert 0 < tie_share(same, chances=chances) <= 1


def test_equal_moments_are_spared_only_while_others_are_sure_to_come() -> None:
    assert tie_share(1.0, chances=9.0) == pytest.approx(0.1)
    assert tie_share(0.75, chances=3.0) == 1.0
    assert tie_share(0.1, chances=40.0) == 1.0
    assert tie_share(0.75, chances=100.0) < 0.02


def test_on_constant_costs_the_start_is_drawn_evenly() -> None:
    """One sync within 50 draws: each of them is as likely, as with random deferral."""
    firsts = []
    for seed in range(150):
        policy = make_policy(PolicySpec(name="wa_forecast", params={"seed": seed}), CONTEXT)
        view = fleet(island(50, step_time_s=None), costs=costs(1.0, [1.0] * 100))
        for tick in range(500):
            budget = BudgetView(outer_syncs=1, horizon_s=252.5, started_s=NOW_S)
            decision = policy.decide(replace(view, budget=budget), NOW_S + tick / 2)
            if decision.action is Action.SYNC:
                firsts.append(tick / 2)
                break
    assert len(firsts) == 150
    thirds = [sum(low <= start < low + 250 / 3 for start in firsts) for low in (0, 250 / 3, 500 / 3)]
    assert all(30 <= count <= 70 for count in thirds)


@given(
    h=st.integers(0, 200),
    now=st.floats(-10, 200),
    recent=st.lists(st.floats(0, 100), max_size=50),
    spent=st.integers(0, 5),
    elapsed_s=st.floats(0, 700),
)
def test_limits_hold_whatever_the_costs(h: int, now: float, recent: list[float], spent: int, elapsed_s: float) -> None:
    budget = BudgetView(outer_syncs=4, horizon_s=600.0, started_s=NOW_S, spent=spent, min_gap_s=5.0)
    decision = decide(replace(fleet(island(h)), costs=costs(now, recent), budget=budget), NOW_S + elapsed_s)
    if h < 10 or spent >= 4 or elapsed_s >= 600:
        assert decision.action is Action.DEFER
    elif h >= 100:
        assert decision.action is Action.SYNC
    assert all(math.isfinite(value) for value in decision.terms.values())
