"""What one island decides on, when each comes at its own moment."""

from __future__ import annotations

from dataclasses import replace

import pytest

from controller.islands import RoundToJoin, as_join, decide_due, view_to_join, view_to_open
from controller.policy import PolicyContext, make_policy
from controller.policy.base import Binding, BudgetView, Decision, FleetView, IslandView, Policy, ServerView
from controller.schema import Action, PolicySpec, Reason

NOW_S = 1000.0
CONTEXT = PolicyContext(min_h=10, max_h=100, seed=0)
QUIET = ServerView(server_id="quiet", node="a", pressure_frac=0.1)
BUSY = ServerView(server_id="busy", node="b", pressure_frac=0.9)
UNKNOWN = ServerView(server_id="unknown", node="b", pressure_frac=None)


def island(slot: int = 0, h: int = 50, **fields: object) -> IslandView:
    base = IslandView(slot=slot, node="a", server_id="quiet", ready=True, inner_steps_since_sync=h)
    return replace(base, **fields)  # type: ignore[arg-type]


def fleet(**fields: object) -> FleetView:
    base = FleetView(
        islands=(island(0), island(1, node="b", server_id="busy")),
        servers=(QUIET, BUSY, UNKNOWN),
        budget=BudgetView(),
        min_h=10,
        max_h=100,
        run_started_s=0.0,
    )
    return replace(base, **fields)  # type: ignore[arg-type]


def joinable(**fields: object) -> RoundToJoin:
    base = RoundToJoin(round=0, opened_s=NOW_S - 10, due_s=NOW_S + 20, expected=frozenset({0, 1}), told=frozenset({1}))
    return replace(base, **fields)  # type: ignore[arg-type]


def gate(threshold: float = 0.5) -> Policy:
    return make_policy(PolicySpec(name="pressure_gate", params={"threshold": threshold}), CONTEXT)


def to_open(view: FleetView, one: IslandView, last_sync_s: float | None = None) -> FleetView:
    servers, num_unready = (
        Binding(view.servers).of(one.node, one.server_id),
        sum(not other.ready for other in view.islands),
    )
    return view_to_open(view, one, servers, costs=None, last_sync_s=last_sync_s, num_unready=num_unready, now_s=NOW_S)


def to_join(view: FleetView, one: IslandView, joins: RoundToJoin, last_sync_s: float | None = None) -> FleetView:
    servers = Binding(view.servers).of(one.node, one.server_id)
    return view_to_join(view, one, servers, joins, costs=None, last_sync_s=last_sync_s)


@pytest.mark.parametrize(
    ("server_id", "node", "expected"),
    [("quiet", "b", (QUIET,)), (None, "a", (QUIET,)), (None, "b", (BUSY, UNKNOWN)), ("gone", "a", ()), (None, "c", ())],
)
def test_an_island_competes_with_the_server_that_it_names_or_with_all_of_its_node(
    server_id: str | None, node: str, expected: tuple[ServerView, ...]
) -> None:
    assert Binding(fleet().servers).of(node, server_id) == expected


def test_each_island_goes_by_the_load_beside_it() -> None:
    view, policy = fleet(), gate()
    quiet, busy = view.islands
    assert policy.decide(to_open(view, quiet), NOW_S).action is Action.SYNC
    decision = policy.decide(to_open(view, busy), NOW_S)
    assert (decision.action, decision.reason) == (Action.DEFER, Reason.PRESSURE_HIGH)
    assert policy.decide(view, NOW_S).action is Action.DEFER


def test_an_island_without_a_server_is_beside_a_full_one() -> None:
    lost = island(server_id="gone")
    assert gate(1.0).decide(to_open(fleet(), lost), NOW_S).action is Action.DEFER


def test_each_island_goes_by_its_own_h() -> None:
    short = island(0, h=9)
    assert gate().decide(to_open(fleet(islands=(short, island(1))), short), NOW_S).reason is Reason.BELOW_MIN_H


def test_a_round_opens_when_all_have_reported_or_one_is_at_its_limit() -> None:
    view = fleet(islands=(island(0), island(1, ready=False)))
    assert gate().decide(to_open(view, island(0)), NOW_S).reason is Reason.ISLANDS_NOT_READY
    assert gate().decide(to_open(view, island(0, h=100)), NOW_S).reason is Reason.MAX_H_REACHED


def test_staleness_is_the_islands_own_but_the_gap_is_the_runs() -> None:
    budget = BudgetView(min_gap_s=100.0, last_sync_s=NOW_S - 50)
    view = fleet(budget=budget)
    within = gate().decide(to_open(view, island(), last_sync_s=NOW_S - 500), NOW_S)
    assert (within.action, within.reason) == (Action.DEFER, Reason.MIN_GAP)
    later = fleet(budget=replace(budget, last_sync_s=NOW_S - 100))
    decision = gate().decide(to_open(later, island(), last_sync_s=NOW_S - 500), NOW_S)
    assert decision.action is Action.SYNC
    assert decision.terms["staleness_s"] == 500.0


def test_no_island_opens_a_round_that_the_budget_cannot_pay() -> None:
    view = fleet(budget=BudgetView(outer_syncs=3, spent=3))
    assert gate().decide(to_open(view, island()), NOW_S).reason is Reason.BUDGET_EXHAUSTED


def test_an_open_round_is_paid_for_and_may_be_joined_whatever_the_budget_says() -> None:
    view = fleet(
        budget=BudgetView(outer_syncs=3, spent=3, min_gap_s=1e6, last_sync_s=NOW_S - 10),
        sync_in_flight=True,
        retry_at_s=NOW_S + 5,
    )
    decision = as_join(gate().decide(to_join(view, island(), joinable()), NOW_S))
    assert (decision.action, decision.reason) == (Action.SYNC, Reason.PRESSURE_LOW)


def test_a_join_waits_for_its_moment_until_the_round_is_due() -> None:
    view, busy = fleet(sync_in_flight=True, expected_sync_s=1.0), island(0, server_id="busy")
    joins = joinable()
    assert as_join(gate().decide(to_join(view, busy, joins), NOW_S)).reason is Reason.PRESSURE_HIGH
    soon = as_join(gate().decide(to_join(view, busy, joins), joins.due_s - 1.0))
    assert (soon.action, soon.reason) == (Action.SYNC, Reason.ROUND_DUE)
    assert not joins.is_due(view, joins.due_s - 0.1)
    assert joins.is_due(view, joins.due_s)
    assert joins.is_due(replace(view, round=1), NOW_S)
    due = decide_due(to_join(view, busy, joins), joins.due_s)
    assert (due.action, due.reason) == (Action.SYNC, Reason.ROUND_DUE)
    assert due.terms["pressure"] == 0.9


@pytest.mark.parametrize(
    ("fields", "ready", "reason"), [({"paused": True}, True, Reason.PAUSED), ({}, False, Reason.ISLANDS_NOT_READY)]
)
def test_nobody_is_told_to_come_who_cannot(fields: dict[str, object], ready: bool, reason: Reason) -> None:
    one = island(ready=ready)
    decision = decide_due(to_join(fleet(**fields), one, joinable()), NOW_S)
    assert (decision.action, decision.reason) == (Action.DEFER, reason)


def test_a_round_is_open_to_those_whom_it_expects_and_who_were_not_told() -> None:
    joins = joinable(expected=frozenset({0, 1}), told=frozenset({1}))
    assert [joins.is_open_to(slot) for slot in (0, 1, 2)] == [True, False, False]


def test_only_the_budget_of_a_join_is_named_after_its_round() -> None:
    decision = Decision(action=Action.SYNC, reason=Reason.MAX_H_REACHED, terms={})
    assert as_join(decision) == decision
    assert as_join(replace(decision, reason=Reason.BUDGET_DUE)).reason is Reason.ROUND_DUE


def test_an_island_joins_those_that_began_by_themselves_unless_it_is_one_of_them() -> None:
    view = fleet(round_to_join=True, sync_in_flight=True)
    policy = gate()
    assert policy.decide(to_open(view, island(h=1)), NOW_S).reason is Reason.JOIN_OPEN_ROUND
    assert policy.decide(to_open(view, island(syncing=True)), NOW_S).reason is Reason.SYNC_IN_FLIGHT
