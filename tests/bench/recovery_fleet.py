"""A training fleet whose processes are killed one after another, each time when all is ready for it (`test_recovery`).

The fleet is that of ``wadiloco chaos``. Times of the phases are those that the controller has on record, from the
moment of the kill, all on this machine's clock; what the islands show is asked for every `POLL_S`.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import httpx

from controller.schema import RecoveryKind, RecoveryPage, RecoveryRecord
from diloco.recovery_schema import ReplicaList
from diloco.schema import AgentStatus, Phase
from replay.chaos.config import ChaosSettings
from replay.chaos.local_fleet import CONTROLLER, LocalFleet
from replay.chaos.measure import Blow, Sample, goodput_frac, longest_gap_s, trains_again_s
from replay.chaos.members import Member, agents
from replay.chaos.procfs import send
from replay.chaos.watch import Watch
from replay.processes import Children

T = TypeVar("T")

POLL_S = 0.05
SETTLE_S = 5.0
"""Undisturbed training before each kill."""
DEADLINE_S = 180.0
NEAR_FRAC = 0.8
"""Of the steps between two syncs: after so many a sync may begin while the kill is on its way."""
AFTER_S = 1.0
"""For which the others may feel it a moment longer."""
PHASES = ("detect", "fence", "fetch", "load", "first step")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ordeal:
    """One kill, and what became of it. Times are seconds since the kill, or long so many seconds."""

    phases: tuple[float, ...]
    """How long each of `PHASES` took; together they are `first_step_s`."""
    first_step_s: float
    """Until the first inner step was done."""
    new_step_s: float
    """Until the slot was seen beyond all steps that it had shown."""
    rung: str
    detail: str
    """What could not be used, and why."""
    steps_lost: int
    """Taken again, or gone, as the agent says."""
    others_gap_s: float | None
    others_normal_gap_s: float | None
    """Longest time between two reports of new steps by other islands: meanwhile, and in an equally long time before."""
    steady_mb: float
    """Resident memory of the worker that died."""
    restored_mb: float | None
    """The most that the next one had when it had taken its first step."""


@dataclass(slots=True)
class RecoveryFleet:
    """Use `running_fleet`."""

    settings: ChaosSettings
    fleet: LocalFleet
    watch: Watch
    http: httpx.AsyncClient
    trained_from_s: float = 0.0
    lost: dict[int, int] = field(default_factory=dict)
    """Steps of each slot that did not count."""

    async def until(self, what: str, condition: Callable[[], Awaitable[T | None]]) -> T:
        """What the condition gives when it gives something."""
        deadline_s = time.monotonic() + DEADLINE_S
        while (found := await condition()) is None:
            assert time.monotonic() < deadline_s, f"{what} did not come true within {DEADLINE_S:g} s"
            await asyncio.sleep(POLL_S)
        return found

    async def settle(self) -> None:
        """Train undisturbed for a while, with workers in reserve where they belong."""

        async def is_ready() -> bool | None:
            for slot in range(self.settings.islands):
                held = self.watch.holder_of(slot)
                if held is None or len(held[1].standby_pids) < self.settings.ranks:
                    return None
                protection = held[1].protection
                if protection is None or protection.step is None:
                    return None
            return True

        await self.until("training with snapshots and workers in reserve", is_ready)
        self.trained_from_s = self.trained_from_s or self.watch.now_s
        await asyncio.sleep(SETTLE_S)

    async def until_spare_keeps(self) -> int:
        """Wait for a parked spare that keeps a replica of a slot since its last sync; returns that slot."""

        async def slot_kept() -> int | None:
            for member in agents(self.fleet):
                seen = self.watch.seen.get(member.name)
                if seen is None or not seen.answers or seen.status is None or seen.status.slot is not None:
                    continue
                if not seen.status.standby_pids:
                    continue
                with contextlib.suppress(httpx.HTTPError):
                    answer = await self.http.get(f"{member.url}/v1/replicas")
                    told = ReplicaList.model_validate_json(answer.raise_for_status().content)
                    kept = [each for each in told.replicas if each.complete]
                    fresh = [each.slot for each in kept if self._is_fresh(each.slot, each.step)]
                    if fresh:
                        return min(fresh)
            return None

        return await self.until("a replica at a spare with a parked worker", slot_kept)

    def _is_fresh(self, slot: int, step: int) -> bool:
        """Whether it is newer than the slot's last sync, and the next one is not near."""
        held = self.watch.holder_of(slot)
        progress = None if held is None else self.watch.seen[held[0].name].progress
        if progress is None or progress.phase is not Phase.INNER:
            return False
        since = progress.inner_steps_since_sync
        return step > progress.step - since and since < NEAR_FRAC * self.settings.sync_every

    async def kill_worker(self, slot: int, *, rank: int = 0, number: signal.Signals = signal.SIGKILL) -> Ordeal:
        """SIGKILL, or SIGSTOP, to one rank worker."""
        await self.settle()
        _, status = self._holder(slot)
        pid = status.worker_pids[rank]
        return await self._follow(slot, status, rank, lambda: send(pid, number), pid=pid)

    async def kill_island(self) -> Ordeal:
        """SIGKILL to the agent of a slot and all that it started, as a host that dies takes them."""
        await self.settle()
        slot = await self.until_spare_keeps()
        member, status = self._holder(slot)
        agent_pid = member.pid
        assert agent_pid is not None

        def kill() -> None:
            for pid in (agent_pid, *status.worker_pids, *status.standby_pids):
                send(pid, signal.SIGKILL)

        return await self._follow(slot, status, 0, kill, instance=status.instance)

    def _holder(self, slot: int) -> tuple[Member, AgentStatus]:
        held = self.watch.holder_of(slot)
        assert held is not None, f"nobody holds slot {slot}"
        return held

    async def _follow(
        self,
        slot: int,
        status: AgentStatus,
        rank: int,
        hit: Callable[[], object],
        *,
        pid: int | None = None,
        instance: str | None = None,
    ) -> Ordeal:
        steady_mb = memory_mb(status.worker_pids[rank], "VmRSS") or 0.0
        since = await self._last_record()
        t_s, at_s = self.watch.now_s, time.time()
        hit()
        blow = Blow(t_s=t_s, over_s=t_s, pid=pid, instance=instance)
        samples: list[Sample] = self.watch.slots[slot]

        async def over() -> float | None:
            return trains_again_s(samples, blow)

        again_s = await self.until(f"slot {slot} trains again", over)
        now_held = self.watch.holder_of(slot)
        restored_mb = None if now_held is None else memory_mb(now_held[1].worker_pids[rank], "VmHWM")

        async def on_record() -> RecoveryRecord | None:
            return await self._record(slot, since)

        record = await self.until(f"the recovery of slot {slot} on record", on_record)
        await asyncio.sleep(AFTER_S)
        lost = record.steps_lost or 0
        self.lost[slot] = self.lost.get(slot, 0) + lost
        gap_s, normal_s = self._others(slot, t_s, again_s + AFTER_S)
        times = [at_s, record.detected_s, record.taken_s, record.fetched_s, record.loaded_s, record.first_step_s]
        known = [each for each in times if each is not None]
        assert len(known) == len(times), record
        phases = tuple(later - earlier for earlier, later in itertools.pairwise(known))
        return Ordeal(
            phases=phases,
            first_step_s=known[-1] - at_s,
            new_step_s=again_s - t_s,
            rung=str(record.rung),
            detail=record.detail,
            steps_lost=lost,
            others_gap_s=gap_s,
            others_normal_gap_s=normal_s,
            steady_mb=steady_mb,
            restored_mb=restored_mb,
        )

    def _others(self, slot: int, since_s: float, until_s: float) -> tuple[float | None, float | None]:
        others = [samples for other, samples in self.watch.slots.items() if other != slot]
        if not others:
            return None, None
        before_s = since_s - min(until_s - since_s, SETTLE_S)
        gap_s = max(longest_gap_s(samples, since_s=since_s, until_s=until_s) for samples in others)
        return gap_s, max(longest_gap_s(samples, since_s=before_s, until_s=since_s) for samples in others)

    async def _page(self, since: int) -> RecoveryPage:
        url = self.fleet.members[CONTROLLER].url
        answer = await self.http.get(f"{url}/v1/recoveries", params={"since": since})
        return RecoveryPage.model_validate_json(answer.raise_for_status().content)

    async def _last_record(self) -> int:
        since = 0
        while (page := await self._page(since)).recoveries:
            since = page.next_since
        return since

    async def _record(self, slot: int, since: int) -> RecoveryRecord | None:
        found = (await self._page(since)).recoveries
        ends = [each for each in found if each.slot == slot and each.kind is RecoveryKind.TRAINS_AGAIN]
        return ends[0] if ends else None

    def goodput_frac(self) -> float:
        """Share of the time since all trained in which steps counted, mean over the slots."""
        slots = sorted(self.watch.slots)
        return goodput_frac(
            [self.watch.slots[slot] for slot in slots],
            since_s=self.trained_from_s,
            until_s=self.watch.now_s,
            lost=[self.lost.get(slot, 0) for slot in slots],
        )


@contextlib.asynccontextmanager
async def running_fleet(settings: ChaosSettings) -> AsyncIterator[RecoveryFleet]:
    """A fleet that is kept up, and watched."""
    (settings.out / "fleet").mkdir(parents=True)
    children = Children()
    try:
        with LocalFleet(settings, with_network=False, with_disks=frozenset(), children=children) as fleet:
            await fleet.start()
            watch = Watch(fleet)
            watch.on_workers = fleet.note_workers
            tasks = [asyncio.create_task(watch.run(POLL_S)), asyncio.create_task(_keep_up(fleet, watch))]
            try:
                async with httpx.AsyncClient(timeout=10.0, trust_env=False) as http:
                    yield RecoveryFleet(settings, fleet, watch, http)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
    finally:
        children.stop()


async def _keep_up(fleet: LocalFleet, watch: Watch) -> None:
    while True:
        await fleet.tend(watch.silent_s)
        await asyncio.sleep(POLL_S)


def memory_mb(pid: int, what: str) -> float | None:
    """A line of the process's status (VmRSS, VmHWM), in MB; None when it is gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return None
    found = [line.split()[1] for line in lines if line.startswith(f"{what}:")]
    return int(found[0]) * 1024 / 1e6 if found else None
