"""The agents of the fleet: slots, leases, epochs.

Every membership change (a slot taken, a lease lost, a process replaced) raises the epoch, which never falls. An agent
that comes back under its id gets its slot back. While one process speaks for an id, another is refused, until the first
left, lost its lease, or was silent for three heartbeats (a kill -9 and restart should not cost a whole lease).

An agent holds the epoch of its own membership (``granted_epoch``) or a later one; a heartbeat with an older one comes
from before its lease was lost, and is refused so that it registers again. Others joining makes nobody's epoch too old.
The slot of a lost agent is kept for it for one more lease, then a spare gets it: the one with the newest replica of the
slot's state, else the longest-waiting. Its next heartbeat is refused by the same rule, and its registration answers
with the slot. Of an agent whose process is known to be gone (`give_up`) nothing is kept.

An operator may take a slot from its holder (`release`): a drained agent stays without one until it is resumed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from pydantic import BaseModel

from controller.live_slots import LiveSlots
from controller.nonsense import Claim, Known, can_go_on
from controller.promises import free_slot_for, next_promotion
from controller.records import AgentRecord, Leaving, Membership
from controller.roster import Roster
from controller.schema import AgentRegistration, ControlAction, Heartbeat
from diloco.schema import Phase, Progress, SyncOutcome
from service.errors import ConflictError, InputError

MAX_AGENTS = 20_000
FORGET_AT_ONCE = 200
"""Where there is no room for a new one: who looks for them looks at all."""
FORGET_AFTER_S = 86400.0
"""After which an agent that is gone, and that nothing depends on, is no longer known."""


class StateStore(Protocol):
    """Where changes are kept (the journal)."""

    def put(self, table: str, key: str | int, value: BaseModel | str) -> None: ...

    def forget(self, table: str, key: str | int) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseTerms:
    num_slots: int
    lease_timeout_s: float
    takeover_after_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A membership or a slot that changed hands."""

    before: AgentRecord | None
    after: AgentRecord


class Registry:
    """Agents by id. Methods take the time; nothing here waits or reads a clock."""

    def __init__(self, store: StateStore, terms: LeaseTerms, *, epoch: int, agents: Iterable[AgentRecord]) -> None:
        self._store = store
        self._terms = terms
        self.epoch = epoch
        self._agents = Roster(agents, num_slots=terms.num_slots, lease_timeout_s=terms.lease_timeout_s)
        self._changes: list[Change] = []
        self._forgotten: list[str] = []
        told = [_told_version(agent.progress) for agent in self._agents.values()]
        self.version = max((version for version in told if version is not None), default=None)
        """Highest version of the global parameters that any agent has told; None before the first."""
        at_it = [agent for agent in self._agents.values() if _told_version(agent.progress) == self.version]
        self._version_told_s = max(
            (agent.progress_told_s for agent in at_it if agent.progress_told_s is not None), default=None
        )
        """When that version was told last."""

    def grace(self, now_s: float) -> None:
        """After a restart of the controller: every lease starts anew, and slots that no longer exist are taken back."""
        for agent in list(self._agents.values()):
            kept = agent.slot if agent.slot is not None and agent.slot < self._terms.num_slots else None
            if agent.membership is not Membership.ACTIVE and kept == agent.slot:
                continue
            # Who trains in a slot that is no more has to notice: its heartbeats are refused until it registers again.
            fence = {} if kept == agent.slot else {"granted_epoch": self._next_epoch()}
            self._set(agent, slot=kept, last_beat_s=now_s, progress_current=False, **fence)
        self._changes.clear()  # nobody lost a slot to anybody: it is no more

    def excuse(self, stood_s: float, *, now_s: float) -> None:
        """The controller itself stood still for so long: nobody's silence was longer for it."""
        for agent in list(self._agents.values()):
            if agent.active or agent.slot is not None:
                self._set(agent, last_beat_s=min(now_s, agent.last_beat_s + stood_s))

    def register(self, request: AgentRegistration, *, now_s: float) -> AgentRecord:
        """Give or renew a lease.

        Raises:
            ConflictError: another process speaks for this id, or another agent holds the slot.
            InputError: the slot does not exist.
        """
        if request.slot is not None and request.slot >= self._terms.num_slots:
            last = self._terms.num_slots - 1
            raise InputError(f"{request.slot} is over the last slot {last}", field="slot", remedy="raise num_slots")
        known = self._agents.get(request.agent_id)
        if known is not None and known.membership is Membership.ACTIVE and known.instance != request.instance:
            self._check_takeover(known, now_s)
        if known is None and len(self._agents) >= MAX_AGENTS and not self._forget(self._gone()[:FORGET_AT_ONCE]):
            raise ConflictError(
                f"{MAX_AGENTS} agents are registered already", field="agent_id", remedy="stop some, or use their ids"
            )
        if known is not None and known.membership is Membership.ACTIVE and known.instance == request.instance:
            slot = known.slot if known.slot is not None else self._choose_slot(request, known, now_s)
            return self._renew(known, request, slot, now_s)
        return self._join(request, known, now_s)

    def _check_takeover(self, known: AgentRecord, now_s: float) -> None:
        wait_s = known.last_beat_s + self._terms.takeover_after_s - now_s
        if wait_s > 0:
            raise ConflictError(
                f"{known.agent_id} is alive as another process",
                field="instance",
                remedy=f"stop it, try again in {wait_s:.1f} s, or give this one another agent_id",
            )

    def _renew(self, known: AgentRecord, request: AgentRegistration, slot: int | None, now_s: float) -> AgentRecord:
        changes = _identity(request) | {"last_beat_s": now_s}
        if slot != known.slot:
            changes |= self._start_of(slot) | {"slot": slot, "last_slot": slot, "granted_epoch": self._next_epoch()}
        return self._set(known, **changes)

    def _join(self, request: AgentRegistration, known: AgentRecord | None, now_s: float) -> AgentRecord:
        slot = self._choose_slot(request, known, now_s)
        start = self._start_of(slot)
        if slot is not None:
            self._vacate(slot, but=request.agent_id)
        granted = self._next_epoch() if slot is not None else self.epoch
        record = AgentRecord(
            **_identity(request),
            agent_id=request.agent_id,
            membership=Membership.ACTIVE,
            slot=slot,
            last_slot=slot if slot is not None else (known.last_slot if known else None),
            granted_epoch=granted,
            registered_s=now_s,
            last_beat_s=now_s,
            drained=known is not None and known.drained,
            leaving=known.leaving if known is not None and slot is not None and slot == known.slot else None,
            **start,
        )
        return self._keep(record)

    def _choose_slot(self, request: AgentRegistration, known: AgentRecord | None, now_s: float) -> int | None:
        if known is not None and known.drained:
            return None
        if request.slot is not None:
            holder = self._holder(request.slot, now_s, besides=request.agent_id)
            if holder is not None:
                raise ConflictError(
                    f"{request.slot} is held by {holder.agent_id}",
                    field="slot",
                    remedy="ask for no slot, or stop that agent",
                )
            return request.slot
        if known is not None:
            for kept in (known.slot, known.last_slot):
                if kept is not None and self._can_take(kept, now_s, agent_id=request.agent_id):
                    return kept
        self._vacate_forfeits(now_s)
        return free_slot_for(self._agents, request.agent_id)

    def _can_take(self, slot: int, now_s: float, *, agent_id: str) -> bool:
        return slot < self._terms.num_slots and self._holder(slot, now_s, besides=agent_id) is None

    def _start_of(self, slot: int | None) -> dict[str, Any]:
        """What a membership begins with: nobody's word but the slot's, so that no old claim can lock its holder out."""
        claim = None if slot is None else self._claim_of_slot(slot)
        return {
            "progress": None,
            "progress_told_s": None,
            "resume": None if claim is None else claim.progress,
            "resume_told_s": None if claim is None else claim.told_s,
        }

    def _claim_of_slot(self, slot: int) -> Claim | None:
        """The furthest that any holder of the slot has reported, of what one can go on from."""
        told = [
            claim
            for agent in self._agents.held_last(slot)
            for claim in (_claim(agent.progress, agent.progress_told_s), _claim(agent.resume, agent.resume_told_s))
            if claim is not None and can_go_on(claim.progress)
        ]
        return max(told, key=lambda claim: claim.progress.step, default=None)

    def known(self, agent: AgentRecord, *, version: int) -> Known:
        """What a heartbeat of this agent is judged by; ``version`` is the run's."""
        return Known(
            own=_claim(agent.progress, agent.progress_told_s),
            slot=_claim(agent.resume, agent.resume_told_s),
            version=version,
            version_told_s=self._version_told_s if version == self.version else None,
        )

    def _holder(self, slot: int, now_s: float, *, besides: str) -> AgentRecord | None:
        """Another agent that holds the slot, or that was lost a short while ago and has it kept."""
        holder = self._agents.holder_of(slot)
        if holder is None or holder.agent_id == besides or self._agents.is_forfeit(holder, now_s):
            return None
        return holder

    def _vacate(self, slot: int, *, but: str) -> None:
        holder = self._agents.holder_of(slot)
        if holder is not None and holder.agent_id != but:
            self._set(holder, slot=None)

    def _vacate_forfeits(self, now_s: float) -> None:
        for agent in self._agents.pop_forfeit(now_s):
            self._set(agent, slot=None)

    def check(self, agent_id: str, instance: str) -> AgentRecord:
        """The active agent that this process speaks for.

        Raises:
            ConflictError: it is unknown, lost its lease, or another process speaks for it.
        """
        agent = self._agents.get(agent_id)
        if agent is None or agent.membership is not Membership.ACTIVE:
            raise ConflictError(f"{agent_id} holds no lease", field="agent_id", remedy="register again")
        if agent.instance != instance:
            raise ConflictError(
                f"another process speaks for {agent_id}", field="instance", remedy="register again, or stop"
            )
        return agent

    def check_epoch(self, agent: AgentRecord, epoch: int) -> None:
        """Raises `ConflictError` when ``epoch`` is from before the agent's membership, or not of this run."""
        if not agent.granted_epoch <= epoch <= self.epoch:
            raise ConflictError(
                f"epoch {epoch} is not within {agent.agent_id}'s membership ({agent.granted_epoch} to {self.epoch})",
                field="epoch",
                remedy="register again",
            )

    def beat(self, agent: AgentRecord, beat: Heartbeat, *, now_s: float) -> AgentRecord:
        """Renew the lease and take over the progress."""
        changes: dict[str, Any] = {"last_beat_s": now_s}
        if beat.progress is not None:
            told = _told_version(beat.progress)
            if told is not None:
                self.version = max(self.version or 0, told)
                if told == self.version:
                    self._version_told_s = now_s
            adopted = [sync.round for sync in beat.syncs if sync.outcome is not SyncOutcome.FAILED]
            current = beat.progress.round > max(adopted, default=-1)
            changes |= {"progress": beat.progress, "progress_told_s": now_s, "progress_current": current}
        elif beat.syncs:
            changes |= {"progress_current": False}
        if beat.replicas is not None:
            changes |= {"replicas": beat.replicas}
        return self._set(agent, **changes)

    def leave(self, agent_id: str, instance: str) -> AgentRecord:
        """A clean stop: the slot is free at once."""
        agent = self.check(agent_id, instance)
        if agent.slot is not None:
            self._next_epoch()
        return self._set(agent, membership=Membership.LEFT, slot=None, replicas=(), **_end_of_order(agent))

    def give_up(self, agent: AgentRecord, *, now_s: float) -> AgentRecord:
        """The process of an active agent is gone for certain: its slot is kept for nobody, and a spare has it now."""
        if agent.slot is not None:
            self._next_epoch()
        ended = {"membership": Membership.GONE, "slot": None, "progress_current": False, "replicas": ()}
        gone = self._set(agent, **ended, **_end_of_order(agent))
        self._promote(now_s)
        return gone

    def expire(self, now_s: float) -> list[AgentRecord]:
        """Take the leases of silent agents, and hand slots that became free to waiting ones; returns the lost ones."""
        lost = []
        for agent in self._agents.pop_silent(now_s):
            if agent.slot is not None:
                self._next_epoch()
            # One that was to leave anyway has its slot kept for nobody.
            slot = agent.slot if agent.leaving is None else None
            changes = {"membership": Membership.LOST, "slot": slot, "progress_current": False}
            lost.append(self._set(agent, **changes, **_end_of_order(agent)))
        self._promote(now_s)
        return lost

    def forget(self, now_s: float) -> int:
        """Drop agents that are gone for long, so that names which nobody uses do not add up; how many."""
        return self._forget([agent for agent in self._gone() if now_s - agent.last_beat_s > FORGET_AFTER_S])

    def take_forgotten(self) -> list[str]:
        """Agents that were forgotten since the last call."""
        forgotten, self._forgotten = self._forgotten, []
        return forgotten

    def _gone(self) -> list[AgentRecord]:
        """Agents that nothing depends on, the longest-silent first.

        One that an operator drained stays known, and so does the one that told most of a slot that it had.
        """
        furthest: dict[int, tuple[int, bool, float, str]] = {}
        for agent in self._agents.values():
            if agent.last_slot is not None:
                mine = (_steps_of(agent), agent.active, agent.last_beat_s, agent.agent_id)
                furthest[agent.last_slot] = max(mine, furthest.get(agent.last_slot, mine))
        needed = {agent_id for _, _, _, agent_id in furthest.values()}
        gone = [agent for agent in self._agents.values() if not agent.active and agent.slot is None]
        free = [agent for agent in gone if not agent.drained and agent.agent_id not in needed]
        return sorted(free, key=lambda agent: agent.last_beat_s)

    def _forget(self, agents: Sequence[AgentRecord]) -> int:
        for agent in agents:
            self._agents.drop(agent.agent_id)
            self._store.forget("agents", agent.agent_id)
        self._forgotten += [agent.agent_id for agent in agents]
        return len(agents)

    def _promote(self, now_s: float) -> None:
        if not self._agents.num_waiting:
            return
        self._vacate_forfeits(now_s)
        while (promotion := next_promotion(self._agents)) is not None:
            self._give(*promotion)

    def _give(self, agent: AgentRecord, slot: int) -> AgentRecord:
        start = self._start_of(slot)
        self._vacate(slot, but=agent.agent_id)
        granted = self._next_epoch()
        return self._set(agent, **start, slot=slot, last_slot=slot, granted_epoch=granted, progress_current=False)

    def order(self, agent: AgentRecord, leaving: Leaving | None) -> AgentRecord:
        """Note down that an agent gives its slot up after its next sync; None takes that back."""
        return self._set(agent, leaving=leaving)

    def release(self, agent: AgentRecord, *, drained: bool, now_s: float) -> AgentRecord:
        """Take the slot of an agent, if it has one, and fence what it still sends; it waits behind all others."""
        changes: dict[str, Any] = {"drained": drained or agent.drained, "leaving": None}
        if agent.slot is not None:
            changes |= {"slot": None, "granted_epoch": self._next_epoch(), "progress_current": False}
            changes |= {"registered_s": now_s}
        return self._set(agent, **changes)

    def hand_over(self, slot: int, to_agent: str) -> AgentRecord | None:
        """Give a slot that has just become free to a waiting agent; None when that cannot take it any more."""
        agent = self._agents.get(to_agent)
        if agent is None or not agent.active or agent.slot is not None or agent.drained:
            return None
        return self._give(agent, slot)

    def readmit(self, agent: AgentRecord) -> AgentRecord:
        """A drained agent may have a slot again, one that is to leave stays."""
        return self._set(agent, drained=False, leaving=None)

    def take_changes(self) -> list[Change]:
        """What changed hands since the last call, oldest first."""
        changes, self._changes = self._changes, []
        return changes

    @property
    def records(self) -> Mapping[str, AgentRecord]:
        """All agents that were ever seen, by id."""
        return self._agents

    @property
    def agents(self) -> list[AgentRecord]:
        return sorted(self._agents.values(), key=lambda agent: agent.agent_id)

    @property
    def islands(self) -> list[AgentRecord]:
        """Active agents with a slot, by slot."""
        active = Membership.ACTIVE  # of a thousand, several times in each tick
        return [agent for agent in self._agents.holders if agent.membership is active]

    @property
    def waiting(self) -> list[AgentRecord]:
        """Active agents that would take a slot, the longest-waiting first."""
        return self._agents.waiting

    def island(self, slot: int) -> AgentRecord | None:
        """The active agent that holds a slot."""
        holder = self._agents.holder_of(slot)
        return holder if holder is not None and holder.active else None

    @property
    def live_slots(self) -> LiveSlots:
        return LiveSlots(self._agents)

    @property
    def slots_missing(self) -> int:
        """Slots that no agent has ever taken."""
        return self._agents.num_never_taken

    def _next_epoch(self) -> int:
        self.epoch += 1
        self._store.put("meta", "epoch", str(self.epoch))
        return self.epoch

    def _set(self, agent: AgentRecord, **changes: Any) -> AgentRecord:
        return self._keep(agent.model_copy(update=changes))

    def _keep(self, agent: AgentRecord) -> AgentRecord:
        self._store.put("agents", agent.agent_id, agent)
        before = self._agents.keep(agent)
        if before is None or _seat(before) != _seat(agent):
            self._changes.append(Change(before=before, after=agent))
        return agent


def _seat(agent: AgentRecord) -> tuple[Membership, int | None, str]:
    return agent.membership, agent.slot, agent.instance


def _end_of_order(agent: AgentRecord) -> dict[str, Any]:
    """What becomes of an order when its agent ends before it is carried out."""
    if agent.leaving is None:
        return {}
    return {"leaving": None, "drained": agent.drained or agent.leaving.action is ControlAction.DRAIN}


def _told_version(progress: Progress | None) -> int | None:
    """What version it says that the run is at: a worker that starts does not know yet."""
    return None if progress is None or progress.phase is Phase.STARTING else progress.round


def _steps_of(agent: AgentRecord) -> int:
    """The furthest that it told of its slot, or was told."""
    return max((claim.step for claim in (agent.progress, agent.resume) if claim is not None), default=-1)


def _claim(progress: Progress | None, told_s: float | None) -> Claim | None:
    return None if progress is None else Claim(progress=progress, told_s=told_s)


def _identity(request: AgentRegistration) -> dict[str, Any]:
    return {
        "instance": request.instance,
        "node": request.node,
        "server_id": request.server_id,
        "url": request.url,
        "num_parameters": request.num_parameters,
        "keeps_replicas": request.keeps_replicas,
        "hands_over": request.hands_over,
        "replicas": request.replicas,
    }
