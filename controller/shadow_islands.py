"""Asks a policy in shadow about each island, as `controller.islands_mode` asks the one in force.

Of many islands it asks `MAX_ASKED_PER_TICK` at a tick, in turns.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from controller.islands import as_join, decide_due, view_to_join, view_to_open
from controller.policy.base import Binding, Decision, FleetView, IslandView, Policy, ServerView, ask
from controller.policy.cost_view import CostView
from controller.schema import Action
from controller.shadow import Odometer
from controller.shadow_rounds import IslandsRun, islands_view, with_island_sync, with_round_over
from controller.state import FleetState

MAX_ASKED_PER_TICK = 100
"""Some ten milliseconds, for each of the policies in shadow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One decision of a shadow."""

    slot: int | None
    """The island that it is about; None where there is none."""
    slots: tuple[int, ...]
    """Those that it would direct."""
    decision: Decision
    round: int


class Places:
    """What stands beside the islands at one tick, found once for all shadows."""

    def __init__(self, state: FleetState, fleet: FleetView, now_s: float) -> None:
        self._costs = state.costs
        self._binding = Binding(fleet.servers)
        self._sync_s = fleet.expected_sync_s
        self._now_s = now_s
        self._found: dict[int, tuple[tuple[ServerView, ...], CostView | None]] = {}

    def of(self, island: IslandView) -> tuple[tuple[ServerView, ...], CostView | None]:
        found = self._found.get(island.slot)
        if found is None:
            servers = self._binding.of(island.node, island.server_id)
            names = tuple(server.server_id for server in servers)
            costs = self._costs.view(names, now_s=self._now_s, sync_s=self._sync_s) if names else None
            found = self._found[island.slot] = servers, costs
        return found


def ask_islands(
    policy: Policy,
    run: IslandsRun,
    fleet: FleetView,
    seen: Mapping[int, Odometer],
    places: Places,
    *,
    turn: int,
    join_s: float,
    now_s: float,
) -> tuple[IslandsRun, list[Asked]]:
    """The shadow's past after this tick, and what it decided; who is in the open round already is left out."""
    run = with_round_over(run, {island.slot for island in fleet.islands}, now_s)
    view = islands_view(fleet, run, seen, now_s)
    if not view.islands:
        return run, [Asked(slot=None, slots=(), decision=ask(policy, view, now_s), round=view.round)]
    num_unready = sum(not island.ready for island in view.islands)
    asked = []
    for island in _share(view.islands, turn):
        decision = _decide(policy, run, view, island, places, num_unready=num_unready, now_s=now_s)
        if decision is None:
            continue
        number = view.round if run.open is None else run.open.round
        asked.append(Asked(slot=island.slot, slots=(island.slot,), decision=decision, round=number))
        if decision.action is Action.SYNC:
            run = with_island_sync(run, view, island.slot, seen.get(island.slot), now_s=now_s, join_s=join_s)
    return run, asked


def _decide(
    policy: Policy,
    run: IslandsRun,
    view: FleetView,
    island: IslandView,
    places: Places,
    *,
    num_unready: int,
    now_s: float,
) -> Decision | None:
    servers, costs = places.of(island)
    last_sync_s = run.last_sync_s.get(island.slot)
    if run.open is None:
        opening = view_to_open(
            view, island, servers, costs=costs, last_sync_s=last_sync_s, num_unready=num_unready, now_s=now_s
        )
        return ask(policy, opening, now_s)
    if not run.open.is_open_to(island.slot):
        return None
    joining = view_to_join(view, island, servers, run.open, costs=costs, last_sync_s=last_sync_s)
    return decide_due(joining, now_s) if run.open.is_due(view, now_s) else as_join(ask(policy, joining, now_s))


def _share(islands: Sequence[IslandView], turn: int) -> Sequence[IslandView]:
    num_turns = max(1, math.ceil(len(islands) / MAX_ASKED_PER_TICK))
    return islands[turn % num_turns :: num_turns]
