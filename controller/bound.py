"""Which servers a sync of the islands burdens (pure)."""

from __future__ import annotations

from controller.policy.base import FleetView


def bound_servers(view: FleetView) -> frozenset[str]:
    """Servers that live islands compete with: the one that an island names, else all of its node."""
    named = {island.server_id for island in view.islands if island.server_id is not None}
    nodes = {island.node for island in view.islands if island.server_id is None}
    return frozenset(server.server_id for server in view.servers if server.node in nodes) | named
