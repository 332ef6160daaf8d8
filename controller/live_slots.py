"""The slots in which islands live, always as of now."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from controller.roster import Roster


class LiveSlots(Mapping[int, "int | None"]):
    """Slots of live islands, and the version that each trains from (None while it has not said). Always the present."""

    def __init__(self, agents: Roster) -> None:
        self._agents = agents

    def __getitem__(self, slot: int) -> int | None:
        agent = self._agents.holder_of(slot)
        if agent is None or not agent.active:
            raise KeyError(slot)
        return agent.progress.round if agent.progress is not None and agent.progress_current else None

    def __iter__(self) -> Iterator[int]:
        return (agent.slot for agent in self._agents.holders if agent.active and agent.slot is not None)

    def __len__(self) -> int:
        return sum(1 for _ in self)
