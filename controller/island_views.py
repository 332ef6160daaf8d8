"""What policies see of each island, made anew only when the island tells something new."""

from __future__ import annotations

from controller.policy.base import IslandView
from controller.records import AgentRecord
from diloco.schema import Phase


class IslandViews:
    """The newest view by slot; records never change, so that the same record has the same view."""

    def __init__(self) -> None:
        self._made: dict[int, tuple[AgentRecord, IslandView]] = {}

    def of(self, island: AgentRecord) -> IslandView:
        assert island.slot is not None
        made = self._made.get(island.slot)
        if made is None or made[0] is not island:
            made = self._made[island.slot] = (island, _view_island(island))
        return made[1]


def is_syncing(island: AgentRecord, version: int | None = None) -> bool:
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
        syncing=is_syncing(island),
    )
