"""What was lost and what came back, as the registry shows it from one look to the next (pure).

It knows of nothing before the process's start, but what is lost now: agents that are found without a lease at the first
look are told of then.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from controller.dashboard.schema import RecoveryKind, RecoveryRow
from controller.records import AgentRecord, Membership

MAX_ROWS = 200


class RecoveryLog:
    """Compares the agents of two looks; whoever keeps recoveries on disk can take its place behind `rows`."""

    def __init__(self) -> None:
        self._rows: deque[RecoveryRow] = deque(maxlen=MAX_ROWS)
        self._agents: dict[str, AgentRecord] = {}
        self._holders: dict[int, str] = {}
        """Who trained in each slot last."""
        self._last_id = 0

    def look(self, agents: Iterable[AgentRecord], now_s: float) -> None:
        """Note what happened to each agent since the last look."""
        for agent in agents:
            before = self._agents.get(agent.agent_id)
            if before is not agent:
                self._compare(before, agent, now_s)
                self._agents[agent.agent_id] = agent

    def rows(self) -> list[RecoveryRow]:
        """Oldest first."""
        return list(self._rows)

    def _compare(self, before: AgentRecord | None, agent: AgentRecord, now_s: float) -> None:
        was = before.membership if before is not None else Membership.ACTIVE
        if agent.membership is Membership.LOST and was is not Membership.LOST:
            silent_s = max(0.0, now_s - agent.last_beat_s)
            self._note(RecoveryKind.LEASE_LOST, agent, now_s, f"silent for {silent_s:.1f} s")
        elif agent.membership is Membership.LEFT and was is Membership.ACTIVE and before is not None:
            self._note(RecoveryKind.LEFT, before, now_s)
        elif agent.membership is Membership.ACTIVE and agent.slot is not None:
            self._compare_slot(before, agent, now_s)
        self._compare_restarts(before, agent, now_s)

    def _compare_slot(self, before: AgentRecord | None, agent: AgentRecord, now_s: float) -> None:
        assert agent.slot is not None
        holder, self._holders[agent.slot] = self._holders.get(agent.slot), agent.agent_id
        if holder is not None and holder != agent.agent_id:
            self._note(RecoveryKind.SLOT_TAKEN, agent, now_s, f"from {holder}")
        elif before is not None and before.membership is not Membership.ACTIVE:
            self._note(RecoveryKind.CAME_BACK, agent, now_s)
        elif before is not None and before.instance != agent.instance:
            self._note(RecoveryKind.CAME_BACK, agent, now_s, "as a new process")

    def _compare_restarts(self, before: AgentRecord | None, agent: AgentRecord, now_s: float) -> None:
        if before is None or before.progress is None or agent.progress is None or before.instance != agent.instance:
            return
        if agent.progress.restarts > before.progress.restarts:
            self._note(RecoveryKind.WORKER_RESTARTED, agent, now_s, f"{agent.progress.restarts} in all")

    def _note(self, kind: RecoveryKind, agent: AgentRecord, now_s: float, detail: str = "") -> None:
        self._last_id += 1
        slot = agent.slot if agent.slot is not None else agent.last_slot
        row = RecoveryRow(id=self._last_id, t_s=now_s, kind=kind, agent_id=agent.agent_id, slot=slot, detail=detail)
        self._rows.append(row)
