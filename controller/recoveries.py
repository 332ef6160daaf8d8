"""What was lost and how it came back: one record for each thing that becomes known.

A recovery of a slot begins when its holder is lost (or gives it up), goes on when somebody takes it, and ends with the
first inner step that the new holder reports:

    lost_s ─────► detected_s ─────► taken_s ─────► fetched_s ─────► loaded_s ─────► first_step_s
    last sign      the loss is       a living       its state is     its worker      it trains
    of life        seen              holder         on this host     has it          again

Loss, holder and first step are a record each, and the last one has all the times: records are only ever added, so that
a reader that goes by ``since`` misses nothing. What happened between holder and first step its agent tells
(`diloco.schema.Restart`); of an agent that does not, the first step is seen in its progress.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from controller.records import AgentRecord, Membership
from controller.registry import Change
from controller.schema import Recovery, RecoveryKind
from diloco.schema import Phase, Restart


@dataclass(frozen=True, slots=True, kw_only=True)
class Open:
    """A recovery that goes on."""

    number: int
    lost_s: float
    lost_by: str
    detected_s: float | None = None
    taken_s: float | None = None
    from_step: int = 0
    """Steps beyond this one are the new holder's."""


class RecoveryBook:
    """The recoveries that go on, by slot. Methods take the time; nothing here waits or reads a clock."""

    def __init__(self, *, last_number: int, agents: Iterable[AgentRecord] = ()) -> None:
        self.last_number = last_number
        """Of the newest recovery."""
        self._open: dict[int, Open] = {}
        for agent in sorted(agents, key=lambda agent: agent.last_beat_s):
            slot = agent.last_slot if agent.membership is Membership.GONE else agent.slot
            if agent.membership in {Membership.LOST, Membership.GONE} and slot is not None:
                self._open[slot] = Open(number=self._next_number(), lost_s=agent.last_beat_s, lost_by=agent.agent_id)
        for agent in agents:
            if agent.active and agent.slot is not None:
                self._open.pop(agent.slot, None)

    def restarted(self, *, lost_s: float | None, epoch: int, now_s: float) -> Recovery:
        """The controller itself was away."""
        return self._record(
            RecoveryKind.CONTROLLER_RESTARTED,
            None,
            epoch=epoch,
            now_s=now_s,
            lost_s=lost_s,
            taken_s=now_s,
        )

    def follow(self, change: Change, *, epoch: int, now_s: float) -> list[Recovery]:
        """What a change of membership or slot means."""
        before, after = change.before, change.after
        found = []
        gave_up = before is not None and before.active and before.slot is not None
        if gave_up and before is not None and (not after.active or after.slot != before.slot):
            found.append(self._lose(before, after, epoch=epoch, now_s=now_s))
        if after.active and after.slot is not None:
            found += self._take(before, after, epoch=epoch, now_s=now_s)
        return found

    def _lose(self, before: AgentRecord, after: AgentRecord, *, epoch: int, now_s: float) -> Recovery:
        kind = _loss_of(after)
        lost_s = after.last_beat_s if kind in {RecoveryKind.LEASE_LOST, RecoveryKind.AGENT_GONE} else now_s
        assert before.slot is not None
        return self._begin(kind, before.slot, after, lost_s=lost_s, epoch=epoch, now_s=now_s)

    def _take(self, before: AgentRecord | None, after: AgentRecord, *, epoch: int, now_s: float) -> list[Recovery]:
        assert after.slot is not None
        if before is not None and before.active and before.slot == after.slot:
            if before.instance == after.instance:
                return []
            kind = RecoveryKind.PROCESS_REPLACED
            record = self._begin(
                kind, after.slot, after, lost_s=before.last_beat_s, epoch=epoch, now_s=now_s, taken=True
            )
            return [record]
        going_on = self._open.get(after.slot)
        if going_on is None:
            return []  # Nobody was lost: the slot was never taken before.
        returned = going_on.lost_by == after.agent_id
        kind = RecoveryKind.AGENT_RETURNED if returned else RecoveryKind.SPARE_TOOK_SLOT
        going_on = replace(going_on, taken_s=now_s, from_step=_step_of(after))
        self._open[after.slot] = going_on
        return [self._continue(kind, after, going_on, epoch=epoch, now_s=now_s)]

    def hear(
        self, before: AgentRecord, after: AgentRecord, *, epoch: int, now_s: float, ends: bool = True
    ) -> list[Recovery]:
        """What a heartbeat means: its worker was started anew, or takes steps again.

        Without ``ends`` the end is left to what the agent itself tells (`hear_restarts`).
        """
        slot, progress = after.slot, after.progress
        if slot is None or progress is None:
            return []
        found = []
        if before.progress is not None and progress.restarts > before.progress.restarts:
            kind, lost_s = RecoveryKind.WORKER_RESTARTED, before.progress_told_s or before.last_beat_s
            found.append(self._begin(kind, slot, after, lost_s=lost_s, epoch=epoch, now_s=now_s, taken=True))
        going_on = self._open.get(slot)
        if not ends:
            return found
        trains = progress.phase is not Phase.STARTING and going_on is not None and progress.step > going_on.from_step
        if trains and going_on is not None and going_on.taken_s is not None:
            del self._open[slot]
            kind = RecoveryKind.TRAINS_AGAIN
            found.append(self._continue(kind, after, going_on, epoch=epoch, now_s=now_s, first_step_s=now_s))
        return found

    def hear_restarts(
        self, agent: AgentRecord, restarts: Iterable[Restart], *, epoch: int, now_s: float
    ) -> list[Recovery]:
        """What the agent of a slot tells of recoveries that it has been through."""
        if agent.slot is None:
            return []
        return [self._end(agent.slot, agent, restart, epoch=epoch, now_s=now_s) for restart in restarts]

    def _end(self, slot: int, agent: AgentRecord, restart: Restart, *, epoch: int, now_s: float) -> Recovery:
        going_on = self._open.pop(slot, None)
        if going_on is None:
            # Over before anybody else saw it, or begun under a controller that is no more.
            began_s = restart.detected_s if restart.last_sign_s is None else restart.last_sign_s
            going_on = Open(number=self._next_number(), lost_s=began_s, lost_by=agent.agent_id)
        first_step_s = now_s if restart.first_step_s is None else restart.first_step_s
        record = self._continue(
            RecoveryKind.TRAINS_AGAIN, agent, going_on, epoch=epoch, now_s=now_s, first_step_s=first_step_s
        )
        times: dict[str, float | None] = {"fetched_s": restart.fetched_s, "loaded_s": restart.loaded_s}
        if going_on.lost_by == agent.agent_id or going_on.taken_s is None:
            # The death of its own worker the agent saw itself, and it needed nobody's leave to go on.
            lost_s = going_on.lost_s if restart.last_sign_s is None else restart.last_sign_s
            detected_s = restart.detected_s
            times |= {"lost_s": min(lost_s, detected_s), "detected_s": detected_s, "taken_s": detected_s}
        return record.model_copy(
            update={
                **times,
                "rung": restart.rung,
                "generation": restart.generation,
                "step": restart.from_step,
                "steps_lost": restart.steps_repeated + restart.steps_lost,
                "detail": "; ".join(filter(None, (restart.cause, restart.lost, *restart.refused))),
            }
        )

    def _begin(
        self,
        kind: RecoveryKind,
        slot: int,
        agent: AgentRecord,
        *,
        lost_s: float,
        epoch: int,
        now_s: float,
        taken: bool = False,
    ) -> Recovery:
        taken_s = now_s if taken else None
        record = self._record(kind, agent, slot=slot, epoch=epoch, now_s=now_s, lost_s=lost_s, taken_s=taken_s)
        self._open[slot] = Open(
            number=record.recovery,
            lost_s=lost_s,
            lost_by=agent.agent_id,
            detected_s=now_s,
            taken_s=taken_s,
            from_step=_step_of(agent),
        )
        return record

    def _continue(
        self,
        kind: RecoveryKind,
        agent: AgentRecord,
        going_on: Open,
        *,
        epoch: int,
        now_s: float,
        first_step_s: float | None = None,
    ) -> Recovery:
        return self._record(
            kind,
            agent,
            slot=agent.slot,
            number=going_on.number,
            epoch=epoch,
            now_s=now_s,
            from_agent=going_on.lost_by,
            lost_s=going_on.lost_s,
            taken_s=going_on.taken_s,
            first_step_s=first_step_s,
        ).model_copy(update={"detected_s": going_on.detected_s})

    def _next_number(self) -> int:
        self.last_number += 1
        return self.last_number

    def _record(
        self,
        kind: RecoveryKind,
        agent: AgentRecord | None,
        *,
        number: int | None = None,
        epoch: int,
        now_s: float,
        slot: int | None = None,
        from_agent: str | None = None,
        lost_s: float | None = None,
        taken_s: float | None = None,
        first_step_s: float | None = None,
    ) -> Recovery:
        return Recovery(
            t_s=now_s,
            kind=kind,
            slot=slot,
            agent_id=None if agent is None else agent.agent_id,
            from_agent=from_agent,
            epoch=epoch,
            recovery=self._next_number() if number is None else number,
            lost_s=lost_s,
            taken_s=taken_s,
            first_step_s=first_step_s,
        )


def _loss_of(after: AgentRecord) -> RecoveryKind:
    if after.membership is Membership.LOST:
        return RecoveryKind.LEASE_LOST
    if after.membership is Membership.GONE:
        return RecoveryKind.AGENT_GONE
    if after.membership is Membership.LEFT:
        return RecoveryKind.LEFT
    return RecoveryKind.DRAINED if after.drained else RecoveryKind.SWAPPED


def _step_of(agent: AgentRecord) -> int:
    """Where its slot had come to."""
    told = [progress.step for progress in (agent.progress, agent.resume) if progress is not None]
    return max(told, default=0)
