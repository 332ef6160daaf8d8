"""Slots that change hands because an operator says so.

The holder's membership ends first (its epoch is fenced: what it still sends is refused), then it is told to stop; a
spare that is meant to have the slot gets it in the same moment. Whoever takes it goes on from what the slot's holders
have reported.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from enum import StrEnum
from typing import Protocol

from controller.metrics import Metrics
from controller.promises import promised_slots
from controller.records import AgentRecord, Leaving
from controller.schema import ControlAction, ControlStep, ControlWhen, DirectiveKind
from controller.state import FleetState
from diloco.schema import SyncOutcome, SyncReport

logger = logging.getLogger(__name__)


class ControlOutcome(StrEnum):
    """What became of an order. Exported as a metric label."""

    DONE = "done"
    DRY_RUN = "dry_run"
    REFUSED = "refused"
    CANCELLED = "cancelled"
    """It waited for a sync, and when that came there was no spare any more."""


class Fleet(Protocol):
    """What a handover works on (the controller)."""

    metrics: Metrics

    @property
    def state(self) -> FleetState: ...

    def note_recoveries(self, now_s: float) -> None: ...


class Handover:
    """Carries out the steps of `drain`, `swap` and `resume`."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def carry_out(self, step: ControlStep, *, now_s: float) -> None:
        registry = self._fleet.state.registry
        agent = registry.records[step.agent_id]
        if step.change is ControlAction.RESUME:
            registry.readmit(agent)
            return
        leaving = Leaving(action=step.change, to_agent=step.to_agent)
        if step.when is ControlWhen.AFTER_SYNC:
            registry.order(agent, leaving)
        else:
            self._finish(agent, leaving, now_s=now_s)

    def after_syncs(self, agent: AgentRecord, syncs: Iterable[SyncReport], *, now_s: float) -> None:
        """Carry out what waited for a sync of this agent, if one of these is it; a failed one left its steps open."""
        if agent.leaving is not None and any(sync.outcome is not SyncOutcome.FAILED for sync in syncs):
            self._finish(agent, agent.leaving, now_s=now_s)

    def _finish(self, agent: AgentRecord, leaving: Leaving, *, now_s: float) -> None:
        state, slot = self._fleet.state, agent.slot
        heir = self._heir(agent, leaving)
        if leaving.action is ControlAction.SWAP and heir is None:
            state.registry.order(agent, None)
            self._fleet.metrics.control_actions.labels(leaving.action, ControlOutcome.CANCELLED).inc()
            logger.warning("swap cancelled, no spare waits agent=%s slot=%s", agent.agent_id, slot)
            return
        state.registry.release(agent, drained=leaving.action is ControlAction.DRAIN, now_s=now_s)
        if agent.active and slot is not None:
            epoch = state.registry.epoch
            state.mailboxes.write(
                agent.agent_id, DirectiveKind.STOP, epoch=epoch, t_s=now_s, reason=leaving.action.value
            )
        if heir is not None and slot is not None:
            state.registry.hand_over(slot, heir)
        self._fleet.note_recoveries(now_s)
        logger.info("slot given up agent=%s slot=%s why=%s to=%s", agent.agent_id, slot, leaving.action, heir)

    def _heir(self, agent: AgentRecord, leaving: Leaving) -> str | None:
        """The spare that was named while it still waits, else the one that waits longest and is promised to nobody."""
        registry = self._fleet.state.registry
        waiting = [spare.agent_id for spare in registry.waiting if spare.agent_id != agent.agent_id]
        if leaving.to_agent in waiting:
            return leaving.to_agent
        promised = promised_slots(registry.islands, but={agent.agent_id})
        return next((name for name in waiting if name not in promised), None)
