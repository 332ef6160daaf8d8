"""The agents of the fleet: slots, leases, epochs.

Every membership change (a slot taken, a lease lost, a process replaced) raises the epoch, which never falls. An agent
that comes back under its id gets its slot back. While one process speaks for an id, another is refused, until the first
left, lost its lease, or was silent for three heartbeats (a kill -9 and restart should not cost a whole lease).

An agent holds the epoch of its own membership (``granted_epoch``) or a later one; a heartbeat with an older one comes
from before its lease was lost, and is refused so that it registers again. Others joining makes nobody's epoch too old.
The slot of a lost agent is kept for it for one more lease, then the longest-waiting spare gets it: its next heartbeat
is refused by the same rule, and its registration answers with the slot.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from pydantic import BaseModel

from controller.nonsense import Claim, Known, can_go_on
from controller.records import AgentRecord, Membership
from controller.schema import AgentRegistration, Heartbeat
from diloco.schema import Phase, Progress, SyncOutcome
from service.errors import ConflictError, InputError

MAX_AGENTS = 20_000


class StateStore(Protocol):
    """Where changes are kept (the journal)."""

    def put(self, table: str, key: str | int, value: BaseModel | str) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseTerms:
    num_slots: int
    lease_timeout_s: float
    takeover_after_s: float


class Registry:
    """Agents by id. Methods take the time; nothing here waits or reads a clock."""

    def __init__(self, store: StateStore, terms: LeaseTerms, *, epoch: int, agents: Iterable[AgentRecord]) -> None:
        self._store = store
        self._terms = terms
        self.epoch = epoch
        self._agents = {agent.agent_id: agent for agent in agents}
        told = [_told_version(agent.progress) for agent in self._agents.values()]
        self.version = max((version for version in told if version is not None), default=None)
        """Highest version of the global parameters that any agent has told; None before the first."""

    def grace(self, now_s: float) -> None:
        """After a restart of the controller: every lease starts anew, and slots that no longer exist are taken back."""
        for agent in list(self._agents.values()):
            kept = agent.slot if agent.slot is not None and agent.slot < self._terms.num_slots else None
            if agent.membership is Membership.ACTIVE or kept != agent.slot:
                self._set(agent, slot=kept, last_beat_s=now_s, progress_current=False)

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
        if known is None and len(self._agents) >= MAX_AGENTS:
            raise ConflictError(f"{MAX_AGENTS} agents are registered already", field="agent_id")
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
            **start,
        )
        return self._keep(record)

    def _choose_slot(self, request: AgentRegistration, known: AgentRecord | None, now_s: float) -> int | None:
        holders = self._holders(now_s, besides=request.agent_id)
        if request.slot is not None:
            holder = holders.get(request.slot)
            if holder is not None:
                raise ConflictError(
                    f"{request.slot} is held by {holder}", field="slot", remedy="ask for no slot, or stop that agent"
                )
            return request.slot
        if known is not None:
            for kept in (known.slot, known.last_slot):
                if kept is not None and kept < self._terms.num_slots and kept not in holders:
                    return kept
        return min((slot for slot in range(self._terms.num_slots) if slot not in holders), default=None)

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
            for agent in self._agents.values()
            if agent.last_slot == slot
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
        )

    def _holders(self, now_s: float, *, besides: str | None = None) -> dict[int, str]:
        """Slots that are held, or kept for an agent that was lost a short while ago."""
        return {
            agent.slot: agent.agent_id
            for agent in self._agents.values()
            if agent.slot is not None and agent.agent_id != besides and not self._is_forfeit(agent, now_s)
        }

    def _is_forfeit(self, agent: AgentRecord, now_s: float) -> bool:
        return agent.membership is not Membership.ACTIVE and now_s > agent.last_beat_s + 2 * self._terms.lease_timeout_s

    def _vacate(self, slot: int, *, but: str) -> None:
        for agent in list(self._agents.values()):
            if agent.slot == slot and agent.agent_id != but:
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
            adopted = [sync.round for sync in beat.syncs if sync.outcome is not SyncOutcome.FAILED]
            current = beat.progress.round > max(adopted, default=-1)
            changes |= {"progress": beat.progress, "progress_told_s": now_s, "progress_current": current}
        elif beat.syncs:
            changes |= {"progress_current": False}
        return self._set(agent, **changes)

    def leave(self, agent_id: str, instance: str) -> AgentRecord:
        """A clean stop: the slot is free at once."""
        agent = self.check(agent_id, instance)
        if agent.slot is not None:
            self._next_epoch()
        return self._set(agent, membership=Membership.LEFT, slot=None)

    def expire(self, now_s: float) -> list[AgentRecord]:
        """Take the leases of silent agents, and hand slots that became free to waiting ones; returns the lost ones."""
        lost = []
        for agent in list(self._agents.values()):
            silent_s = now_s - agent.last_beat_s
            if agent.membership is Membership.ACTIVE and silent_s > self._terms.lease_timeout_s:
                if agent.slot is not None:
                    self._next_epoch()
                lost.append(self._set(agent, membership=Membership.LOST, progress_current=False))
        self._promote(now_s)
        return lost

    def _promote(self, now_s: float) -> None:
        waiting = [a for a in self._agents.values() if a.membership is Membership.ACTIVE and a.slot is None]
        if not waiting:
            return
        holders = self._holders(now_s)
        free = [slot for slot in range(self._terms.num_slots) if slot not in holders]
        for slot, agent in zip(free, sorted(waiting, key=lambda a: (a.registered_s, a.agent_id)), strict=False):
            start = self._start_of(slot)
            self._vacate(slot, but=agent.agent_id)
            self._set(
                agent,
                **start,
                slot=slot,
                last_slot=slot,
                granted_epoch=self._next_epoch(),
                progress_current=False,
            )

    @property
    def agents(self) -> list[AgentRecord]:
        return sorted(self._agents.values(), key=lambda agent: agent.agent_id)

    @property
    def islands(self) -> list[AgentRecord]:
        """Active agents with a slot, by slot."""
        held = [a for a in self._agents.values() if a.membership is Membership.ACTIVE and a.slot is not None]
        return sorted(held, key=lambda agent: agent.slot or 0)

    @property
    def slots_missing(self) -> int:
        """Slots that no agent has ever taken."""
        taken = {agent.last_slot for agent in self._agents.values() if agent.last_slot is not None}
        return sum(slot not in taken for slot in range(self._terms.num_slots))

    def _next_epoch(self) -> int:
        self.epoch += 1
        self._store.put("meta", "epoch", str(self.epoch))
        return self.epoch

    def _set(self, agent: AgentRecord, **changes: Any) -> AgentRecord:
        return self._keep(agent.model_copy(update=changes))

    def _keep(self, agent: AgentRecord) -> AgentRecord:
        self._store.put("agents", agent.agent_id, agent)
        self._agents[agent.agent_id] = agent
        return agent


def _told_version(progress: Progress | None) -> int | None:
    """What version it says that the run is at: a worker that starts does not know yet."""
    return None if progress is None or progress.phase is Phase.STARTING else progress.round


def _claim(progress: Progress | None, told_s: float | None) -> Claim | None:
    return None if progress is None else Claim(progress=progress, told_s=told_s)


def _identity(request: AgentRegistration) -> dict[str, Any]:
    return {
        "instance": request.instance,
        "node": request.node,
        "server_id": request.server_id,
        "url": request.url,
        "num_parameters": request.num_parameters,
    }
