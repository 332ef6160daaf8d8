"""What one island's own decision is based on, when each comes to the round at its own moment. Pure.

The same policies decide as for the whole run, on a view in which there is one island:

* its own H, tokens and losses, the servers that it competes with and what a sync costs there, the time since its own
  last sync;
* while no round is open: the run's budget and gaps, for it may open one, which costs the run one sync;
* while a round is open that it is not in: a budget of one sync, until the round is due. That sync is paid for, so what
  the policy chooses is the moment. Whoever is not in by then is told to come (`Reason.ROUND_DUE`), as is everybody who
  is not in when the round's result is there already.

An island that is in, or that became ready after the round had opened, waits for the next.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from controller.policy.base import BudgetView, Decision, FleetView, IslandView, ServerView, summarize
from controller.policy.cost_view import CostView
from controller.policy.rule import common_terms
from controller.schema import Action, Reason


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundToJoin:
    """A round that is open, and for whom."""

    round: int
    opened_s: float
    due_s: float
    """From here on nobody may wait any longer."""
    expected: frozenset[int]
    told: frozenset[int]
    """Slots that have been told to come."""

    def is_due(self, fleet: FleetView, now_s: float) -> bool:
        """Whether those who are not in have no time left: it is late, or its result is there."""
        return now_s >= self.due_s or fleet.round > self.round

    def is_open_to(self, slot: int) -> bool:
        return slot in self.expected and slot not in self.told


def view_to_open(
    fleet: FleetView,
    island: IslandView,
    servers: tuple[ServerView, ...],
    *,
    costs: CostView | None,
    last_sync_s: float | None,
    num_unready: int,
    now_s: float,
) -> FleetView:
    """What the island decides on while no round is open.

    Others of which so many have not reported yet are waited for as in a synchronous run: until ``max_h``.
    """
    waits = island.inner_steps_since_sync < fleet.max_h
    return replace(
        fleet,
        islands=(island,),
        servers=servers,
        costs=costs,
        budget=_with_own_sync(fleet.budget, last_sync_s, now_s),
        slots_missing=fleet.slots_missing + (num_unready if waits else 0),
        round_to_join=fleet.round_to_join and island.ready and not island.syncing,
    )


def view_to_join(
    fleet: FleetView,
    island: IslandView,
    servers: tuple[ServerView, ...],
    joins: RoundToJoin,
    *,
    costs: CostView | None,
    last_sync_s: float | None,
) -> FleetView:
    """What the island decides on while there is a round that it may come to."""
    return replace(
        fleet,
        islands=(island,),
        servers=servers,
        costs=costs,
        budget=BudgetView(
            outer_syncs=1,
            horizon_s=joins.due_s - joins.opened_s,
            started_s=joins.opened_s,
            last_sync_s=last_sync_s,
            spent=0,
        ),
        round=joins.round,
        # The islands of this round have all been there.
        slots_missing=0,
        sync_in_flight=island.syncing,
        round_to_join=False,
        retry_at_s=None,
    )


def as_join(decision: Decision) -> Decision:
    """A decision on a view to join, in terms of the run: what is due is the round, not its budget."""
    if decision.reason is not Reason.BUDGET_DUE:
        return decision
    return replace(decision, reason=Reason.ROUND_DUE)


def decide_due(view: FleetView, now_s: float) -> Decision:
    """Come now, whatever the policy would wait for; a fleet that is paused does not, nor one that is not ready."""
    terms = common_terms(view, summarize(view, now_s), now_s)
    (island,) = view.islands
    if view.paused:
        return Decision(action=Action.DEFER, reason=Reason.PAUSED, terms=terms)
    if not island.ready:
        return Decision(action=Action.DEFER, reason=Reason.ISLANDS_NOT_READY, terms=terms)
    return Decision(action=Action.SYNC, reason=Reason.ROUND_DUE, terms=terms)


def _with_own_sync(budget: BudgetView, last_sync_s: float | None, now_s: float) -> BudgetView:
    """The run's budget as seen from the island: its own last sync, unless the run's is closer than the gap."""
    within_gap = budget.last_sync_s is not None and now_s < budget.last_sync_s + budget.min_gap_s
    return budget if within_gap or last_sync_s is None else replace(budget, last_sync_s=last_sync_s)
