"""A policy in shadow: what it would have done, had it been in force (pure).

It sees the fleet as it is, but its own past: a sync that it would have started at t counts as started at t for its own
gap, budget and ``min_h``. With step, tokens and loss of an island now, and at the shadow's last sync (before the first,
at the island's own),

    inner_steps_since_sync = step now - step then          tokens alike; loss_at_sync = loss then

and for the expected duration of a sync it counts as in one. What it cannot know: the loss that the run would have had
under its syncs, steps that islands lose to syncs of the one in force, and rounds that fail.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from controller.budget import view_budget, with_sync_spent, with_sync_started
from controller.policy.base import FleetView, IslandView
from controller.records import AgentRecord
from controller.schema import BudgetStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """Where an island stood at some moment."""

    step: int
    tokens: int
    loss: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Odometer:
    """Where an island stands, and where it stood at its own last sync."""

    now: Mark
    at_sync: Mark


@dataclass(frozen=True, slots=True, kw_only=True)
class VirtualRun:
    """The past of a policy in shadow."""

    budget: BudgetStatus
    """Its own period: the real one's limits, its own spending."""
    marks: Mapping[int, Mark]
    """Slot → where it stood at the shadow's last sync; empty before the first."""
    first_round: int
    """Version of the global parameters when it began; each of its syncs would have made one more."""
    num_syncs: int = 0
    syncing_until_s: float | None = None


def odometers(islands: Iterable[AgentRecord]) -> dict[int, Odometer]:
    """By slot, of the islands that have told their progress."""
    found = {}
    for island in islands:
        progress = island.progress
        if island.slot is None or progress is None:
            continue
        found[island.slot] = Odometer(
            now=Mark(step=progress.step, tokens=progress.tokens, loss=progress.loss),
            at_sync=Mark(
                step=progress.step - progress.inner_steps_since_sync,
                tokens=progress.tokens - progress.tokens_since_sync,
                loss=progress.loss_at_sync,
            ),
        )
    return found


def follow_budget(run: VirtualRun, real: BudgetStatus) -> VirtualRun:
    """A new period of the real budget is a new one of the shadow's; the gap to its own last sync still holds."""
    mine = run.budget
    if (real.spec, real.started_s) == (mine.spec, mine.started_s):
        return run
    fresh = real.model_copy(
        update={"spent": 0, "remaining": real.spec.outer_syncs, "last_sync_s": mine.last_sync_s or real.last_sync_s}
    )
    return replace(run, budget=fresh)


def shadow_view(view: FleetView, run: VirtualRun, seen: Mapping[int, Odometer], now_s: float) -> FleetView:
    """The fleet with the shadow's past in place of the real one."""
    return replace(
        view,
        islands=tuple(_shadow_island(island, run, seen.get(island.slot)) for island in view.islands),
        budget=view_budget(run.budget),
        round=run.first_round + run.num_syncs,
        sync_in_flight=run.syncing_until_s is not None and now_s < run.syncing_until_s,
        round_to_join=False,
        retry_at_s=None,
    )


def _shadow_island(island: IslandView, run: VirtualRun, seen: Odometer | None) -> IslandView:
    if seen is None:
        return island
    mark = run.marks.get(island.slot, seen.at_sync)
    return replace(
        island,
        # Right after a real sync an island is silent for a heartbeat; the shadow's goes on training.
        ready=True,
        # One that was restored from an earlier snapshot has steps to make again.
        inner_steps_since_sync=max(0, seen.now.step - mark.step),
        tokens_since_sync=max(0, seen.now.tokens - mark.tokens),
        loss=seen.now.loss,
        loss_at_sync=mark.loss,
        syncing=False,
    )


def with_sync(run: VirtualRun, seen: Mapping[int, Odometer], *, now_s: float, sync_s: float) -> VirtualRun:
    """The past after a sync that starts now."""
    return replace(
        run,
        budget=with_sync_spent(with_sync_started(run.budget, now_s)),
        marks={slot: odometer.now for slot, odometer in seen.items()},
        num_syncs=run.num_syncs + 1,
        syncing_until_s=now_s + sync_s,
    )
