"""The frozen view of the fleet that policies decide on."""

from __future__ import annotations

from controller.budget import view_budget
from controller.island_views import is_syncing
from controller.policy.base import FleetView, IslandView, ServerView, bound_servers
from controller.policy.cost_view import CostView
from controller.state import FleetState


def build_view(state: FleetState, now_s: float, *, with_costs: bool = True) -> FleetView:
    """``with_costs``: whether somebody asks what a sync of all islands costs, which takes long in a large fleet."""
    settings = state.settings
    islands = state.registry.islands
    # What islands say now, not the highest ever told: a synchronizer that lost its state starts again from 0.
    told = [island.progress.round for island in islands if island.progress is not None and island.progress_current]
    version = max(told, default=state.version)
    views = tuple(map(state.island_views.of, islands))
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
        sync_in_flight=state.rounds.open is not None or any(view.syncing for view in views),
        round_to_join=(
            state.rounds.open is None
            and any(is_syncing(island, version) for island in islands)
            and any(view.ready and not view.syncing for view in views)
        ),
        retry_at_s=state.rounds.retry_at_s(),
        expected_sync_s=state.rounds.expected_sync_s(),
        last_transfer_s=state.rounds.last_transfer_s(),
        reaction_s=settings.tick_s + settings.heartbeat_interval_s,
        costs=view_costs(state, views, servers, now_s) if with_costs else None,
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
