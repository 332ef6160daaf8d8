"""The rules that stand in front of every policy that syncs.

First, a round that islands began by themselves is joined (`joins_open_round`). Then, in this order: nothing while
paused, without islands, before all slots have been filled once and all islands report, or while a round is open;
nothing when the budget is spent or its horizon is over, ahead of its rate, within the minimum gap, or under ``min_h``;
then a sync *must* come when the budget is due, at its longest deferral, and at ``max_h``. Between these the policy is
free.

A budget of N syncs until a horizon is due when the remaining r ones would otherwise no longer fit:

    cycle  = max(min_gap, sync + min_h * step time) + reaction
    due_s  = horizon end - (sync + reaction) - (r - 1) * cycle

with ``sync`` the observed duration of a round and ``reaction`` the lag of reports and ticks.

A budget that is a rate has a period P = 3600 s / rate. Its k-th sync (from 0) comes within the k-th period, so that the
count stays within one of rate * time, whatever the policy:

    earliest = begin + k P        due = max(begin + (k + 1) P, last sync + P / 2)

The second term of ``due`` keeps a run that was paused from making up for all of the pause at once.
"""

from __future__ import annotations

from controller.policy.base import FleetView, Group
from controller.schema import Action, Reason

Verdict = tuple[Action, Reason]

# Rounds and steps beside bursty traffic take longer than their recent average; too late would leave a sync unspent.
SAFETY = 1.25


def guard(view: FleetView, group: Group, now_s: float) -> Verdict | None:
    """What must happen whatever the policy says; None when the policy decides."""
    if joins_open_round(view, now_s):
        return Action.SYNC, Reason.JOIN_OPEN_ROUND
    obstacle = _obstacle(view, group) or _limit(view, group, now_s)
    if obstacle is not None:
        return Action.DEFER, obstacle
    due_s = budget_due_s(view, group)
    if due_s is not None and now_s >= due_s:
        return Action.SYNC, Reason.BUDGET_DUE
    deferred_until_s = defer_until_s(view)
    if deferred_until_s is not None and now_s >= deferred_until_s:
        return Action.SYNC, Reason.MAX_DEFER_REACHED
    if group.h_max >= view.max_h:
        return Action.SYNC, Reason.MAX_H_REACHED
    return None


def joins_open_round(view: FleetView, now_s: float) -> bool:
    """Whether the islands that are not yet in the open round come in now.

    Not while paused, nor right after a round that failed: the one that is seen may be its end.
    """
    waits = view.retry_at_s is not None and now_s < view.retry_at_s
    return view.round_to_join and not view.paused and not waits


def _obstacle(view: FleetView, group: Group) -> Reason | None:
    if view.paused:
        return Reason.PAUSED
    if not view.islands:
        return Reason.NO_ISLANDS
    ready = [island.ready for island in view.islands]
    # One island that cannot start must not hold up the others for ever: at max_h they go on without it.
    if view.slots_missing or not any(ready) or (not all(ready) and group.h_max < view.max_h):
        return Reason.ISLANDS_NOT_READY
    return Reason.SYNC_IN_FLIGHT if view.sync_in_flight else None


def _limit(view: FleetView, group: Group, now_s: float) -> Reason | None:
    budget = view.budget
    if budget.remaining == 0 or (budget.horizon_s is not None and now_s >= budget.started_s + budget.horizon_s):
        return Reason.BUDGET_EXHAUSTED
    if budget.period_s is not None and now_s < budget.started_s + budget.spent * budget.period_s:
        return Reason.AHEAD_OF_RATE
    if budget.last_sync_s is not None and now_s < budget.last_sync_s + budget.min_gap_s:
        return Reason.MIN_GAP
    if view.retry_at_s is not None and now_s < view.retry_at_s:
        return Reason.MIN_GAP
    return Reason.BELOW_MIN_H if group.h < view.min_h else None


def budget_due_s(view: FleetView, group: Group) -> float | None:
    """When the next sync must start for the rest of the budget to fit; None without a horizon and without a rate."""
    budget = view.budget
    if budget.period_s is not None:
        due_s = budget.started_s + (budget.spent + 1) * budget.period_s
        return due_s if budget.last_sync_s is None else max(due_s, budget.last_sync_s + budget.period_s / 2)
    if budget.remaining is None or budget.horizon_s is None:
        return None
    sync_s = SAFETY * view.expected_sync_s
    cycle_s = max(budget.min_gap_s, sync_s + SAFETY * view.min_h * group.step_time_s) + view.reaction_s
    end_s = budget.started_s + budget.horizon_s
    return end_s - (sync_s + view.reaction_s) - (budget.remaining - 1) * cycle_s


def defer_until_s(view: FleetView) -> float | None:
    """When the budget allows no further deferral; None where it sets no bound."""
    budget = view.budget
    if budget.max_defer_s is None:
        return None
    since_s = max(budget.started_s, view.run_started_s) if budget.last_sync_s is None else budget.last_sync_s
    return since_s + budget.max_defer_s
