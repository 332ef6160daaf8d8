"""The rules in front of every policy."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.policy import PolicyContext, make_policy
from controller.policy.base import BudgetView, Decision, FleetView, IslandView, ServerView, summarize
from controller.policy.guard import budget_due_s, guard
from controller.policy.rule import fall_back
from controller.schema import Action, PolicySpec, Reason

NOW_S = 1000.0
CONTEXT = PolicyContext(min_h=10, max_h=100, seed=0)
SYNCING_POLICIES = (
    "fixed_h",
    "adaptive_tokens",
    "pressure_gate",
    "random_deferral",
    "wa_diloco",
    "wa_calibrated",
    "wa_forecast",
)


def island(slot: int = 0, h: int = 50, *, ready: bool = True) -> IslandView:
    return IslandView(
        slot=slot, node=f"n{slot}", server_id=None, ready=ready, inner_steps_since_sync=h, step_time_s=0.1
    )


def fleet(*islands: IslandView, budget: BudgetView | None = None) -> FleetView:
    return FleetView(
        islands=islands or (island(),),
        servers=(ServerView(server_id="s0", node="n0", pressure_frac=0.2),),
        budget=budget or BudgetView(),
        min_h=10,
        max_h=100,
        run_started_s=0.0,
    )


def judge(view: FleetView, now_s: float = NOW_S) -> tuple[Action, Reason] | None:
    return guard(view, summarize(view, now_s), now_s)


@pytest.mark.parametrize(
    ("view", "reason"),
    [
        (replace(fleet(), paused=True), Reason.PAUSED),
        (replace(fleet(), islands=()), Reason.NO_ISLANDS),
        (replace(fleet(), slots_missing=1), Reason.ISLANDS_NOT_READY),
        (fleet(island(0), island(1, ready=False)), Reason.ISLANDS_NOT_READY),
        (replace(fleet(), sync_in_flight=True), Reason.SYNC_IN_FLIGHT),
        (fleet(budget=BudgetView(outer_syncs=2, spent=2)), Reason.BUDGET_EXHAUSTED),
        (fleet(budget=BudgetView(outer_syncs=2, horizon_s=900.0)), Reason.BUDGET_EXHAUSTED),
        (fleet(budget=BudgetView(min_gap_s=10.0, last_sync_s=991.0)), Reason.MIN_GAP),
        (replace(fleet(), retry_at_s=1001.0), Reason.MIN_GAP),
        (fleet(budget=BudgetView(syncs_per_hour=36.0, started_s=901.0, spent=1)), Reason.AHEAD_OF_RATE),
        (fleet(island(0, 50), island(1, 9)), Reason.BELOW_MIN_H),
    ],
)
def test_an_obstacle_defers_and_says_which(view: FleetView, reason: Reason) -> None:
    assert judge(view) == (Action.DEFER, reason)


def test_between_the_limits_the_policy_is_free() -> None:
    assert judge(fleet()) is None


def test_max_h_syncs() -> None:
    assert judge(fleet(island(0, 100), island(1, 60))) == (Action.SYNC, Reason.MAX_H_REACHED)


def test_at_max_h_an_island_that_cannot_start_is_left_behind() -> None:
    assert judge(fleet(island(0, 100), island(1, ready=False))) == (Action.SYNC, Reason.MAX_H_REACHED)


def test_max_h_does_not_override_the_budget_or_the_gap() -> None:
    assert judge(fleet(island(0, 200), budget=BudgetView(outer_syncs=0))) == (Action.DEFER, Reason.BUDGET_EXHAUSTED)
    gap = BudgetView(min_gap_s=10.0, last_sync_s=995.0)
    assert judge(fleet(island(0, 200), budget=gap)) == (Action.DEFER, Reason.MIN_GAP)


def test_a_budget_is_due_when_the_rest_would_no_longer_fit() -> None:
    budget = BudgetView(outer_syncs=3, horizon_s=100.0, started_s=950.0, min_gap_s=20.0, spent=1)
    view = replace(fleet(budget=budget), expected_sync_s=4.0, reaction_s=1.0)
    # End at 1050; the last takes 5 s + 1 s reaction; one more cycle of 20 s + 1 s before it.
    due_s = 1050.0 - 6.0 - 21.0
    assert budget_due_s(view, summarize(view, NOW_S)) == pytest.approx(due_s)
    assert judge(view, due_s - 0.01) is None
    assert judge(view, due_s) == (Action.SYNC, Reason.BUDGET_DUE)


def test_a_budget_counts_the_steps_that_min_h_needs() -> None:
    budget = BudgetView(outer_syncs=2, horizon_s=100.0, started_s=950.0)
    view = replace(fleet(budget=budget), expected_sync_s=4.0)
    # A cycle is a sync and ten steps of 0.1 s, with a safety factor of 1.25.
    assert budget_due_s(view, summarize(view, NOW_S)) == pytest.approx(1050.0 - 5.0 - (5.0 + 1.25))


def test_a_rate_allows_one_sync_per_period_and_is_due_at_its_end() -> None:
    budget = BudgetView(syncs_per_hour=36.0, started_s=800.0, spent=2)
    assert judge(fleet(budget=budget), 999.9) == (Action.DEFER, Reason.AHEAD_OF_RATE)
    assert judge(fleet(budget=budget), 1000.0) is None
    assert judge(fleet(budget=budget), 1099.9) is None
    assert judge(fleet(budget=budget), 1100.0) == (Action.SYNC, Reason.BUDGET_DUE)


def test_a_rate_makes_up_for_a_pause_at_twice_its_pace_at_most() -> None:
    budget = BudgetView(syncs_per_hour=36.0, started_s=0.0, spent=2, last_sync_s=960.0)
    assert judge(fleet(budget=budget), 1009.9) is None
    assert judge(fleet(budget=budget), 1010.0) == (Action.SYNC, Reason.BUDGET_DUE)


def test_the_longest_deferral_ends_the_waiting() -> None:
    since_sync = BudgetView(max_defer_s=30.0, last_sync_s=970.0)
    assert judge(fleet(budget=since_sync), 999.9) is None
    assert judge(fleet(budget=since_sync), 1000.0) == (Action.SYNC, Reason.MAX_DEFER_REACHED)
    since_start = BudgetView(max_defer_s=30.0, started_s=980.0)
    assert judge(fleet(budget=since_start), 1009.9) is None
    assert judge(fleet(budget=since_start), 1010.0) == (Action.SYNC, Reason.MAX_DEFER_REACHED)
    assert judge(fleet(island(0, 9), budget=since_sync), 1000.0) == (Action.DEFER, Reason.BELOW_MIN_H)


def test_without_a_horizon_nothing_is_due() -> None:
    view = fleet(budget=BudgetView(outer_syncs=3))
    assert budget_due_s(view, summarize(view, NOW_S)) is None


def test_the_fallback_waits_for_max_h() -> None:
    assert fall_back(fleet(), NOW_S).reason is Reason.POLICY_FAILED
    assert fall_back(fleet(island(0, 100)), NOW_S).action is Action.SYNC


maybe = st.one_of(st.none(), st.floats(0, 10))
views = st.builds(
    FleetView,
    islands=st.lists(
        st.builds(
            IslandView,
            slot=st.integers(0, 3),
            node=st.sampled_from(["a", "b"]),
            server_id=st.sampled_from([None, "s0", "gone"]),
            ready=st.booleans(),
            inner_steps_since_sync=st.integers(0, 200),
            tokens_since_sync=st.integers(0, 10**7),
            loss=maybe,
            loss_at_sync=maybe,
            step_time_s=maybe,
        ),
        max_size=3,
    ).map(tuple),
    servers=st.lists(
        st.builds(
            ServerView,
            server_id=st.sampled_from(["s0", "s1"]),
            node=st.sampled_from(["a", "b"]),
            pressure_frac=st.one_of(st.none(), st.floats(0, 1)),
        ),
        max_size=2,
    ).map(tuple),
    budget=st.builds(
        BudgetView,
        outer_syncs=st.one_of(st.none(), st.integers(0, 10)),
        horizon_s=st.one_of(st.none(), st.floats(1, 1000)),
        min_gap_s=st.floats(0, 50),
        started_s=st.floats(0, 1000),
        spent=st.integers(0, 12),
        last_sync_s=st.one_of(st.none(), st.floats(0, 1000)),
    ),
    min_h=st.just(10),
    max_h=st.just(100),
    run_started_s=st.just(0.0),
    round=st.integers(0, 100),
    slots_missing=st.integers(0, 1),
    paused=st.booleans(),
    sync_in_flight=st.booleans(),
    last_transfer_s=st.one_of(st.none(), st.floats(0, 100)),
)


def check_limits(view: FleetView, decision: Decision) -> None:
    group = summarize(view, NOW_S)
    if decision.action is Action.DEFER:
        return
    budget = view.budget
    assert not view.paused
    assert not view.sync_in_flight
    assert group.h >= view.min_h
    assert budget.remaining is None or budget.remaining > 0
    assert budget.last_sync_s is None or budget.last_sync_s + budget.min_gap_s <= NOW_S
    assert budget.horizon_s is None or budget.started_s + budget.horizon_s > NOW_S


@given(view=views, name=st.sampled_from(SYNCING_POLICIES))
def test_no_policy_ever_breaks_a_limit(view: FleetView, name: str) -> None:
    decision = make_policy(PolicySpec(name=name), CONTEXT).decide(view, NOW_S)
    check_limits(view, decision)
    assert {"h", "h_max", "pressure", "unknown_servers", "tokens", "staleness_s"} <= decision.terms.keys()


@given(view=views, name=st.sampled_from(SYNCING_POLICIES))
def test_a_decision_depends_on_the_view_alone(view: FleetView, name: str) -> None:
    policy = make_policy(PolicySpec(name=name), CONTEXT)
    assert policy.decide(view, NOW_S) == policy.decide(view, NOW_S)


@given(view=views)
def test_no_sync_never_syncs(view: FleetView) -> None:
    decision = make_policy(PolicySpec(name="no_sync"), CONTEXT).decide(view, NOW_S)
    assert (decision.action, decision.reason) == (Action.DEFER, Reason.NO_SYNC_POLICY)
