"""The frozen view of the fleet that policies decide on."""

from __future__ import annotations

from controller.budget import view_budget
from controller.policy.base import FleetView, IslandView, ServerView, bound_servers
from controller.policy.cost_view import CostView
from controller.records import AgentRecord
from controller.state import FleetState
from diloco.schema import Phase


def build_view(state: FleetState, now_s: float) -> FleetView:
    settings = state.settings
    islands = state.registry.islands
    # What islands say now, not the highest ever told: a synchronizer that lost its state starts again from 0.
    told = [island.progress.round for island in islands if island.progress is not None and island.progress_current]
    version = max(told, default=state.version)
    views = tuple(_view_island(island) for island in islands)
    servers = state.samples.views_beside(((island.node, island.server_id) for island in islands), now_s)
    return FleetView(
        islands=views,
        servers=servers,
        budget=view_budget(state.budget),
        min_h=settings.min_h,
        max_h=settings.max_h,
        run_started_s=state.run_started_s,
        round=version,
        slots_missing=state.registry.slots_missing,
        paused=state.paused,
        sync_in_flight=state.rounds.open is not None or any(_is_syncing(island) for island in islands),
        round_to_join=(
            state.rounds.open is None
            and any(_is_syncing(island, version) for island in islands)
            and any(view.ready and not view.syncing for view in views)
        ),
        retry_at_s=state.rounds.retry_at_s(),
        expected_sync_s=state.rounds.expected_sync_s(),
        last_transfer_s=state.rounds.last_transfer_s(),
        reaction_s=settings.tick_s + settings.heartbeat_interval_s,
        costs=view_costs(state, views, servers, now_s),
    )


def view_costs(
    state: FleetState, islands: tuple[IslandView, ...], servers: tuple[ServerView, ...], now_s: float
) -> CostView | None:
    """What a sync of these islands together costs; None while that of one of their servers is unknown."""
    bound, unbound = bound_servers(islands, servers)
    if unbound or not bound:
        return None
    names = tuple(server.server_id for server in bound)
    return state.costs.view(names, now_s=now_s, sync_s=state.rounds.expected_sync_s())


def _is_syncing(island: AgentRecord, version: int | None = None) -> bool:
    """Whether it is in a sync, of this version if one is given: one that is behind only adopts what it missed."""
    progress = island.progress
    if progress is None or not island.progress_current or progress.phase is not Phase.SYNC:
        return False
    return version is None or progress.round == version


def _view_island(island: AgentRecord) -> IslandView:
    assert island.slot is not None
    progress = island.progress
    if progress is None or not island.progress_current:
        return IslandView(slot=island.slot, node=island.node, server_id=island.server_id, ready=False)
    return IslandView(
        slot=island.slot,
        node=island.node,
        server_id=island.server_id,
        ready=True,
        inner_steps_since_sync=progress.inner_steps_since_sync,
        tokens_since_sync=progress.tokens_since_sync,
        tokens=progress.tokens,
        loss=progress.loss,
        loss_at_sync=progress.loss_at_sync,
        step_time_s=progress.step_time_s,
        syncing=_is_syncing(island),
    )
