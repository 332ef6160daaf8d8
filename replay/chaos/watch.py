"""The fleet as it is seen from outside: every agent, controller and synchronizer, asked again and again."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

import httpx
from pydantic import ValidationError

from controller.schema import Fleet as ControllerView
from diloco.schema import AgentStatus, Progress
from replay.chaos.faults import Role
from replay.chaos.measure import Sample
from replay.chaos.members import Fleet, Member
from replay.chaos.procfs import resident_mb

REQUEST_TIMEOUT_S = 2.0
MEMORY_EVERY_S = 1.0


@dataclass(slots=True)
class Seen:
    """What one member said last."""

    answered_s: float
    """When it answered last; at first when it was first asked."""
    answers: bool = False
    """Whether it answered the last question."""
    status: AgentStatus | None = None
    progress: Progress | None = None


@dataclass(slots=True)
class Watch:
    """All that was seen. Times are monotonic seconds since the watch began."""

    fleet: Fleet
    token: str | None = None
    on_workers: Callable[[str, tuple[int, ...]], None] = lambda name, pids: None
    began_s: float = field(default_factory=time.monotonic)
    slots: dict[int, list[Sample]] = field(default_factory=lambda: defaultdict(list))
    """By slot, whenever something changed."""
    epochs: dict[int, int] = field(default_factory=dict)
    seen: dict[str, Seen] = field(default_factory=dict)
    controller: ControllerView | None = None
    """What it said last."""
    controller_s: float = 0.0
    memory: dict[str, list[tuple[float, float]]] = field(default_factory=lambda: defaultdict(list))
    """By process (its name and how often it was started): time, MiB."""
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    @property
    def now_s(self) -> float:
        return time.monotonic() - self.began_s

    @property
    def silent_s(self) -> dict[str, float]:
        """For how long each member has not answered."""
        now_s = self.now_s
        return {name: 0.0 if seen.answers else now_s - seen.answered_s for name, seen in self.seen.items()}

    def holder_of(self, slot: int) -> tuple[Member, AgentStatus] | None:
        """The agent that said last, under the newest epoch, that it has a slot."""
        held = [
            (seen.status.epoch or 0, member.name, member, seen.status)
            for member in self.fleet.members
            if (seen := self.seen.get(member.name)) is not None and seen.status is not None
            if seen.status.slot == slot and seen.answers
        ]
        if not held:
            return None
        _, _, member, status = max(held, key=lambda one: one[:2])
        return member, status

    async def run(self, period_s: float) -> None:
        """Look every ``period_s`` until cancelled."""
        headers = {"Authorization": f"Bearer {self.token}"} if self.token else {}
        async with httpx.AsyncClient(timeout=REQUEST_TIMEOUT_S, trust_env=False, headers=headers) as http:
            asking: dict[str, asyncio.Task[None]] = {}
            measured_s = -MEMORY_EVERY_S
            try:
                while True:
                    # Each at its own pace: one that does not answer must not keep the others from being looked at.
                    for member in self.fleet.members:
                        if member.name not in asking or asking[member.name].done():
                            asking[member.name] = asyncio.create_task(self._look(http, member))
                    if self.now_s - measured_s >= MEMORY_EVERY_S:
                        measured_s = self.now_s
                        self._measure()
                    async with self.changed:
                        self.changed.notify_all()
                    await asyncio.sleep(period_s)
            finally:
                for task in asking.values():
                    task.cancel()
                await asyncio.gather(*asking.values(), return_exceptions=True)

    async def _look(self, http: httpx.AsyncClient, member: Member) -> None:
        seen = self.seen.setdefault(member.name, Seen(answered_s=self.now_s))
        try:
            if member.role is Role.AGENT:
                await self._look_at_agent(http, member, seen)
            elif member.role is Role.CONTROLLER:
                answer = (await http.get(f"{member.url}/v1/fleet")).raise_for_status()
                self.controller, self.controller_s = ControllerView.model_validate_json(answer.content), self.now_s
            else:
                (await http.get(f"{member.url}/healthz")).raise_for_status()
        except (httpx.HTTPError, ValidationError):
            seen.answers = False
            return
        seen.answers, seen.answered_s = True, self.now_s

    async def _look_at_agent(self, http: httpx.AsyncClient, member: Member, seen: Seen) -> None:
        answer = (await http.get(f"{member.url}/v1/status")).raise_for_status()
        status = AgentStatus.model_validate_json(answer.content)
        told = (await http.get(f"{member.url}/v1/progress")).raise_for_status()
        seen.status, seen.progress = status, Progress.model_validate_json(told.content)
        self.on_workers(member.name, status.worker_pids)
        if status.slot is not None and status.worker_pids:
            self._take(status, seen.progress)

    def _take(self, status: AgentStatus, progress: Progress) -> None:
        assert status.slot is not None
        epoch = status.epoch or 0
        if epoch < self.epochs.get(status.slot, 0) and not self._is_latest(status):
            return  # somebody who does not know yet that it lost the slot
        self.epochs[status.slot] = max(epoch, self.epochs.get(status.slot, 0))
        sample = Sample(
            t_s=self.now_s,
            agent_id=status.agent_id,
            instance=status.instance,
            pids=status.worker_pids,
            step=progress.step,
            since_sync=progress.inner_steps_since_sync,
            round=progress.round,
            loss=progress.loss,
        )
        samples = self.slots[status.slot]
        if not samples or _what(samples[-1]) != _what(sample):
            samples.append(sample)

    def _is_latest(self, status: AgentStatus) -> bool:
        samples = self.slots[status.slot or 0]
        return bool(samples) and samples[-1].instance == status.instance

    def _measure(self) -> None:
        now_s = self.now_s
        for member in self.fleet.members:
            if member.pid is not None and (size := resident_mb(member.pid)) is not None:
                self.memory[f"{member.name} start {member.num_starts}"].append((now_s, size))
            status = seen.status if (seen := self.seen.get(member.name)) is not None else None
            if status is not None and seen is not None and seen.answers:
                for rank, pid in enumerate(status.worker_pids):
                    if (size := resident_mb(pid)) is not None:
                        self.memory[f"{member.name} rank {rank} pid {pid}"].append((now_s, size))


def _what(sample: Sample) -> tuple[object, ...]:
    """All but the time, and the loss, which comes with a step."""
    return sample.agent_id, sample.instance, sample.pids, sample.step, sample.since_sync, sample.round
