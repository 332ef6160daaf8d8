"""The past of a policy in shadow where each island comes to a round at its own moment (pure).

As in `controller.shadow`, and the rules are those of `controller.islands`: the island that would sync first opens a
virtual round and spends one sync of the shadow's budget; the others are asked for their own moment until the round is
due, and are told to come then. An island's own marks are set when it comes. The round is over once all who are still
there have come and the last one's sync has taken its time: whom a quorum would leave behind is waited for.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from controller.budget import with_sync_spent, with_sync_started
from controller.islands import RoundToJoin
from controller.policy.base import FleetView, IslandView
from controller.shadow import Odometer, VirtualRun, shadow_view


@dataclass(frozen=True, slots=True, kw_only=True)
class IslandsRun(VirtualRun):
    """The past of a policy that decides for each island."""

    open: RoundToJoin | None = None
    last_sync_s: Mapping[int, float] = field(default_factory=dict)
    """Slot → when it came last."""
    syncing_until: Mapping[int, float] = field(default_factory=dict)
    """Slot → when it was, or will be, through with that."""


def islands_view(view: FleetView, run: IslandsRun, seen: Mapping[int, Odometer], now_s: float) -> FleetView:
    """The fleet with the shadow's past, island by island, in place of the real one."""
    islands = tuple(_with_sync(island, run, now_s) for island in shadow_view(view, run, seen, now_s).islands)
    told = shadow_view(replace(view, islands=()), run, seen, now_s)
    return replace(
        told,
        islands=islands,
        round=run.first_round + run.num_syncs - (run.open is not None),
        sync_in_flight=run.open is not None or any(island.syncing for island in islands),
    )


def _with_sync(island: IslandView, run: IslandsRun, now_s: float) -> IslandView:
    return replace(island, syncing=True) if now_s < run.syncing_until.get(island.slot, now_s) else island


def with_island_sync(
    run: IslandsRun, fleet: FleetView, slot: int, seen: Odometer | None, *, now_s: float, join_s: float
) -> IslandsRun:
    """The past after an island that comes now: to the open round, or to one that opens with it."""
    if run.open is None:
        opened = RoundToJoin(
            round=fleet.round,
            opened_s=now_s,
            due_s=now_s + join_s,
            expected=frozenset(island.slot for island in fleet.islands if island.ready),
            told=frozenset(),
        )
        budget = with_sync_spent(with_sync_started(run.budget, now_s))
        run = replace(run, budget=budget, num_syncs=run.num_syncs + 1, open=opened)
    assert run.open is not None
    return replace(
        run,
        open=replace(run.open, told=run.open.told | {slot}),
        marks=run.marks if seen is None else {**run.marks, slot: seen.now},
        last_sync_s={**run.last_sync_s, slot: now_s},
        syncing_until={**run.syncing_until, slot: now_s + fleet.expected_sync_s},
    )


def with_round_over(run: IslandsRun, live: Collection[int], now_s: float) -> IslandsRun:
    """The past, without the open round once nobody is to come any more."""
    if run.open is None or any(slot in live for slot in run.open.expected - run.open.told):
        return run
    if any(now_s < run.syncing_until[slot] for slot in run.open.told):
        return run
    return replace(run, open=None)
