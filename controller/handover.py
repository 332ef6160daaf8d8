"""Slots that change hands because an operator says so.

A holder that can is told to hand over first: it ends its step, sends its state to the spare that is meant to have the
slot (to its buddies, where nobody waits) and says so, until a deadline at the latest. Then its membership ends (its
epoch is fenced: what it still sends is refused), and it is told to stop; a spare that is meant to have the slot gets it
in the same moment. Whoever takes it goes on from that state; without any, from what the slot's holders have reported.
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
from controller.takers import NONE, newest, peer_of
from diloco.recovery_schema import HandoverReport, Peer
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
        self._fleet.state.buddies.is_due = True
        if step.change is ControlAction.RESUME:
            stopped = agent.leaving is not None and agent.leaving.deadline_s is not None
            registry.readmit(agent)
            if stopped:
                self._let_go_on(agent, now_s=now_s)
            return
        leaving = Leaving(action=step.change, to_agent=step.to_agent)
        if step.when is ControlWhen.AFTER_SYNC:
            registry.order(agent, leaving)
        else:
            self._begin(agent, leaving, now_s=now_s)

    def after_syncs(self, agent: AgentRecord, syncs: Iterable[SyncReport], *, now_s: float) -> None:
        """Carry out what waited for a sync of this agent, if one of these is it; a failed one left its steps open."""
        waits = agent.leaving is not None and agent.leaving.deadline_s is None
        if waits and agent.leaving is not None and any(sync.outcome is not SyncOutcome.FAILED for sync in syncs):
            self._begin(agent, agent.leaving, now_s=now_s)

    def hear(self, agent: AgentRecord, report: HandoverReport, *, now_s: float) -> None:
        """The holder has stopped: the slot moves, if it is still to."""
        leaving = agent.leaving
        if leaving is None or leaving.deadline_s is None or agent.slot != report.slot:
            logger.info("handover of nothing agent=%s slot=%d", agent.agent_id, report.slot)
            return
        logger.info(
            "handed over agent=%s slot=%d generation=%d step=%d kept_by=%s",
            *(agent.agent_id, report.slot, report.generation, report.step, ",".join(report.kept_by) or "nobody"),
        )
        self._finish(agent, leaving, now_s=now_s)

    def end_overdue(self, now_s: float) -> None:
        """Move the slots of holders that have not handed over in time, with what is replicated of them."""
        for agent in self._fleet.state.registry.islands:
            leaving = agent.leaving
            if leaving is not None and leaving.deadline_s is not None and now_s >= leaving.deadline_s:
                told = None if agent.progress is None else agent.progress.step
                logger.warning(
                    "not handed over in time, the slot moves with what is replicated agent=%s slot=%s holder_step=%s"
                    " replicated_step=%d",
                    *(agent.agent_id, agent.slot, told, self._replicated_step(agent)),
                )
                self._finish(agent, leaving, now_s=now_s)

    def _replicated_step(self, holder: AgentRecord) -> int:
        agents = self._fleet.state.registry.agents
        slot = -1 if holder.slot is None else holder.slot
        return max((newest(agent.replicas, slot) for agent in agents if agent.active), default=NONE)[1]

    def _begin(self, agent: AgentRecord, leaving: Leaving, *, now_s: float) -> None:
        """Tell a holder to hand over, if there is somebody to hand over to; else its slot is given up at once."""
        state = self._fleet.state
        if agent.leaving is not None and agent.leaving.deadline_s is not None:
            return  # told already
        taker = self._taker(agent, leaving)
        can = agent.active and agent.slot is not None and agent.hands_over and state.buddies.is_in_use
        if not can or not (taker or state.buddies.of(agent.slot)):
            self._finish(agent, leaving, now_s=now_s)
            return
        deadline_s = now_s + state.settings.lease_timeout_s
        to_agent = leaving.to_agent if taker is None else taker.agent_id
        state.registry.order(agent, leaving.model_copy(update={"deadline_s": deadline_s, "to_agent": to_agent}))
        state.mailboxes.write(
            agent.agent_id,
            DirectiveKind.HAND_OVER,
            epoch=state.registry.epoch,
            t_s=now_s,
            deadline_s=deadline_s,
            taker=taker,
            reason=leaving.action.value,
        )
        logger.info("to hand over agent=%s slot=%s taker=%s", agent.agent_id, agent.slot, taker and taker.agent_id)

    def _taker(self, agent: AgentRecord, leaving: Leaving) -> Peer | None:
        """Who is to have the slot, where it can be reached."""
        heir = self._heir(agent, leaving)
        record = None if heir is None else self._fleet.state.registry.records[heir]
        return peer_of(record) if record is not None and record.keeps_replicas else None

    def _finish(self, agent: AgentRecord, leaving: Leaving, *, now_s: float) -> None:
        state, slot = self._fleet.state, agent.slot
        heir = self._heir(agent, leaving)
        if leaving.action is ControlAction.SWAP and heir is None:
            state.registry.order(agent, None)
            self._fleet.metrics.control_actions.labels(leaving.action, ControlOutcome.CANCELLED).inc()
            logger.warning("swap cancelled, no spare waits agent=%s slot=%s", agent.agent_id, slot)
            if leaving.deadline_s is not None:
                self._let_go_on(agent, now_s=now_s)
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

    def _let_go_on(self, agent: AgentRecord, *, now_s: float) -> None:
        """A holder that has stopped for a handover trains on."""
        state = self._fleet.state
        kind = DirectiveKind.PAUSE if state.paused else DirectiveKind.RESUME
        state.mailboxes.write(agent.agent_id, kind, epoch=state.registry.epoch, t_s=now_s, reason="swap cancelled")

    def _heir(self, agent: AgentRecord, leaving: Leaving) -> str | None:
        """The spare that was named while it still waits, else the one that waits longest and is promised to nobody."""
        registry = self._fleet.state.registry
        waiting = [spare.agent_id for spare in registry.waiting if spare.agent_id != agent.agent_id]
        if leaving.to_agent in waiting:
            return leaving.to_agent
        promised = promised_slots(registry.islands, but={agent.agent_id})
        return next((name for name in waiting if name not in promised), None)
