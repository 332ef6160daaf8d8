"""What the controller does about losses beside deciding: records, directives to whom a slot has come, buddies, and
slots whose holders hand over.
"""

from __future__ import annotations

import logging
from typing import Any, Protocol

from controller.handover import Handover
from controller.metrics import Metrics
from controller.records import AgentRecord
from controller.recovery_metrics import RecoveryMetrics
from controller.registry import Change
from controller.schema import DirectiveKind, Heartbeat, Recovery
from controller.state import FleetState
from controller.takers import replica_places

logger = logging.getLogger(__name__)


class Fleet(Protocol):
    """What it works on (the controller)."""

    metrics: Metrics

    @property
    def state(self) -> FleetState: ...

    def remember_recovery(self, record: Recovery) -> None: ...

    def note_recoveries(self, now_s: float) -> None: ...


class RecoveryDesk:
    """Methods take the time; nothing here waits."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._metrics = RecoveryMetrics(fleet.metrics.registry)
        self.handover = Handover(fleet)

    def note_changes(self, now_s: float) -> None:
        """Journal what the latest changes of membership mean, and tell those who got a slot without asking for it."""
        state = self._fleet.state
        for change in state.registry.take_changes():
            state.buddies.is_due = True
            for record in state.recoveries.follow(change, epoch=state.registry.epoch, now_s=now_s):
                self.note(record)
            if _was_given_slot(change):
                # It is over when a heartbeat would have told it anyway.
                state.mailboxes.write(
                    change.after.agent_id,
                    DirectiveKind.RENEW,
                    epoch=state.registry.epoch,
                    t_s=now_s,
                    deadline_s=now_s + state.settings.lease_timeout_s,
                    reason=f"slot {change.after.slot}",
                )

    def note(self, record: Recovery) -> None:
        """Keep, count and tell one record."""
        self._fleet.state.keep_recovery(record)
        self._fleet.remember_recovery(record)
        self._fleet.metrics.recoveries.labels(record.kind).inc()
        spans = self._metrics.take(record)
        logger.info(
            "recovery kind=%s slot=%s agent=%s epoch=%d%s%s",
            record.kind,
            record.slot,
            record.agent_id,
            record.epoch,
            "".join(f" {name}_s={span_s:.3f}" for name, span_s in spans.items()),
            "" if record.rung is None else _told(record),
        )

    def hear(self, before: AgentRecord, agent: AgentRecord, beat: Heartbeat, *, now_s: float) -> None:
        """What a heartbeat that was accepted means."""
        state = self._fleet.state
        epoch = state.registry.epoch
        # A restart that has just become known begins what the report of it ends.
        is_told = bool(beat.restarts)
        for record in state.recoveries.hear(before, agent, ends=not is_told, epoch=epoch, now_s=now_s):
            self.note(record)
        for record in state.recoveries.hear_restarts(agent, beat.restarts, epoch=epoch, now_s=now_s):
            self.note(record)
        self.handover.after_syncs(agent, beat.syncs, now_s=now_s)
        if beat.handed_over is not None:
            self.handover.hear(state.registry.records[agent.agent_id], beat.handed_over, now_s=now_s)

    def on_tick(self, now_s: float) -> None:
        state = self._fleet.state
        self.handover.end_overdue(now_s)
        state.buddies.refresh(state.registry.records)

    def lease_extras(self, agent: AgentRecord) -> dict[str, Any]:
        """Fields of a lease: the agent's buddies, where its slot's state is, and what it keeps for others."""
        registry = self._fleet.state.registry
        places = () if agent.slot is None else replica_places(registry.agents, agent.slot)
        return self.reply_extras(agent) | {"replicas": places}

    def reply_extras(self, agent: AgentRecord) -> dict[str, Any]:
        """Fields of the answer to a heartbeat."""
        buddies, agents = self._fleet.state.buddies, self._fleet.state.registry.records
        return {"buddies": buddies.of(agent.slot), "keeps_slots": buddies.kept_by(agent, agents)}


def _was_given_slot(change: Change) -> bool:
    before, after = change.before, change.after
    waited = before is not None and before.active and before.slot is None and before.instance == after.instance
    return waited and after.active and after.slot is not None


def _told(record: Recovery) -> str:
    more = f" detail={record.detail}" if record.detail else ""
    return f" rung={record.rung} generation={record.generation} steps_lost={record.steps_lost}{more}"
