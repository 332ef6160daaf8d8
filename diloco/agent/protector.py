"""Keeps the workers' snapshots, watches for workers that hang, and tells how each came back."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Sequence
from pathlib import Path

from diloco.agent.config import IslandSettings
from diloco.agent.crew import Crew, Exit
from diloco.agent.disk import DiskCopies
from diloco.agent.recovery import Recovery
from diloco.agent.restarts import cause_of
from diloco.agent.state import AgentState
from diloco.agent.vaults import Vaults
from diloco.agent.watchdog import Watchdog, cpu_seconds
from diloco.protocol import (
    AliveEvent,
    Command,
    Event,
    ProgressEvent,
    ProtectionEvent,
    RestoredEvent,
    VaultCommand,
    VaultNeedEvent,
    VaultPlace,
)
from diloco.schema import Protection
from diloco.vault.errors import VaultError
from service.tasks import wait_for_exit

logger = logging.getLogger(__name__)

MAX_FAILED_RESTORES = 2
"""Workers that died in a row before they had restored: the next one does without the snapshot."""


class Protector:
    """Of one agent."""

    def __init__(self, settings: IslandSettings, state: AgentState) -> None:
        self._settings = settings
        self._state = state
        self._vaults = (
            Vaults(
                settings.vault_dir,
                identity=settings.identity,
                num_ranks=settings.ranks,
                instance=state.instance,
            )
            if settings.vault
            else None
        )
        self.recovery: Recovery | None = None
        """What knows of other hosts; None without a controller."""
        self._disk = (
            DiskCopies(settings.snapshot_dir, self._vaults, identity=settings.identity, num_ranks=settings.ranks)
            if settings.snapshot_dir is not None and self._vaults is not None
            else None
        )
        self._has_resumed = False
        self._watchdog: Watchdog | None = None
        self._verdict = ""
        self._failed_restores = 0
        self._has_restored = False
        self._last_sign_s: float | None = None
        self.step = 0
        """Of the last sign of life."""

    @property
    def vaults(self) -> Vaults | None:
        return self._vaults

    @property
    def _run_id(self) -> str:
        lease = self._state.limits_lease
        return "" if lease is None else lease.run_id or ""

    async def take_slot(self, slot: int) -> None:
        """The next workers are for this slot."""
        if self._vaults is not None:
            # Without a controller nothing says which run a vault is of.
            adopt = self._settings.controller is not None or self._settings.resume
            await asyncio.to_thread(self._vaults.take_slot, slot, adopt=adopt, run_id=self._run_id)
            if self._settings.resume and self._disk is not None and not self._has_resumed:
                self._has_resumed = True
                if self._vaults.newest() is None:
                    await asyncio.to_thread(self._disk.bring_back, slot)
            self._state.start_at(self._vaults.newest())

    async def keep_on_disk(self, exit_event: asyncio.Event) -> None:
        """Copy a snapshot to the disk now and then."""
        while self._disk is not None and not await wait_for_exit(exit_event, self._settings.snapshot_every_s):
            await asyncio.to_thread(self._disk.save)

    async def find_state(self, slot: int) -> None:
        """The slot is new here: find what there is of it, on this host or elsewhere, before a worker is started."""
        lease, vaults = self._state.limits_lease, self._vaults
        if lease is None or vaults is None:
            return
        own = vaults.newest()
        if lease.resume is None and own is None and not lease.replicas:
            return  # nobody has trained in it
        book = self._state.restart_book
        book.took_slot(slot, lease.resume)
        if self.recovery is None:
            return
        refused: list[str] = []
        found = await self.recovery.obtain(slot, refused, own=own)
        try:
            if found is not None:
                await asyncio.to_thread(vaults.install, found.paths, verified=found.generation)
        except VaultError as exc:
            refused.append(str(exc))
            found = None
        if own is None or found is not None:
            book.sought(refused)

    async def forget(self) -> None:
        """The slot was another's meanwhile."""
        if self._vaults is not None:
            await asyncio.to_thread(self._vaults.drop)
        self._state.protection = None

    async def close(self) -> None:
        """An orderly end: nobody goes on from these snapshots, but perhaps from the last one's copy."""
        if self._disk is not None:
            await asyncio.to_thread(self._disk.save)
        await self.forget()

    def places(self) -> Sequence[VaultPlace | None]:
        """What the next workers are told, by rank."""
        self._has_restored = False
        if self._vaults is None:
            return [None] * self._settings.ranks
        restore = self._failed_restores < MAX_FAILED_RESTORES
        return self._vaults.places(run_id=self._run_id, epoch=self._state.epoch, restore=restore)

    def take(self, rank: int, event: Event) -> Awaitable[Command] | None:
        """What a worker says; the answer, if it waits for one."""
        if self._watchdog is not None:
            self._watchdog.hear(rank, event if isinstance(event, AliveEvent) else None, now_s=time.monotonic())
        match event:
            case VaultNeedEvent():
                return self._make_vault(rank, event)
            case ProtectionEvent() if rank == 0 or event.reason:
                self._note_protection(event)
            case RestoredEvent() if rank == 0:
                self._has_restored, self._failed_restores = True, 0
                if event.refused and self._state.restart_book.is_open:
                    logger.warning("snapshots refused reasons=%s", "; ".join(event.refused))
                self._state.restart_book.restored(event)
            case ProgressEvent() if rank == 0:
                self.step = event.progress.step
                if self._state.restart_book.trained(event.progress) is not None:
                    self._state.changed.set()
            case AliveEvent() if rank == 0:
                self.step = max(self.step, event.step)
            case _:
                pass
        return None

    async def watch(self, crew: Crew) -> None:
        """Kill a worker that hangs."""
        now_s = time.monotonic()
        watchdog = self._watchdog = Watchdog(len(crew.pids), timeout_s=self._settings.failure_timeout_s, now_s=now_s)
        self._verdict = ""
        while True:
            await asyncio.sleep(watchdog.period_s)
            found = watchdog.tick([_cpu_s(pid) for pid in crew.pids], now_s=time.monotonic())
            if found is not None:
                rank, self._verdict = found
                logger.warning("worker hangs, killing it pid=%d rank=%d reason=%s", crew.pids[rank], rank, found[1])
                crew.kill(rank)

    def noticed(self, rank: int) -> None:
        """A worker has ended: the recovery begins."""
        now_s = time.monotonic()
        watchdog = self._watchdog
        silent_s = 0.0 if watchdog is None else now_s - watchdog.heard_s(rank)
        self._last_sign_s = time.time() - silent_s
        newest = self._vaults.newest() if self._vaults is not None else None
        self._state.restart_book.died(
            self._verdict,
            rank=rank,
            last_sign_s=self._last_sign_s,
            progress=self._state.progress,
            step=max(self.step, newest.step if newest is not None else 0),
        )

    def explain(self, exits: Sequence[Exit], rank: int, message: str) -> None:
        """Why it has ended, as far as that is known now."""
        code = next((each.code for each in exits if each.rank == rank), 0)
        self._state.restart_book.explain(", ".join(filter(None, (self._verdict, cause_of(code), message))))

    def worker_died(self, *, was_ready: bool) -> None:
        """Before the next start: what the slot's progress is now."""
        if self._vaults is not None:
            self._vaults.distrust()
        if not self._has_restored:
            self._failed_restores += 1
        has_snapshot = self._vaults is not None and self._vaults.newest() is not None
        if not has_snapshot or self._failed_restores >= MAX_FAILED_RESTORES:
            self._state.drop_unsynced()

    async def _make_vault(self, rank: int, event: VaultNeedEvent) -> Command:
        assert self._vaults is not None
        path: Path | None = None
        try:
            path = await asyncio.to_thread(self._vaults.make, rank, event.regions, event.record_bytes)
        except (VaultError, OSError) as exc:
            logger.warning("protection degraded, all steps since the last sync at risk reason=%s", exc)
            self._state.protection = Protection(reason=str(exc)[:2000])
        return VaultCommand(path=path)

    def _note_protection(self, event: ProtectionEvent) -> None:
        vaults = self._vaults
        vault = vaults.vault(0) if vaults is not None else None
        self._state.protection = Protection(
            path=str(vault.path) if vault is not None else "",
            num_bytes=vaults.num_bytes if vaults is not None else 0,
            steps_at_risk=event.steps_at_risk,
            overhead=event.overhead,
            reason=event.reason[:2000],
        )

    def protection(self) -> Protection | None:
        """As it is now, with the newest snapshot."""
        protection, newest = self._state.protection, self._vaults.newest() if self._vaults is not None else None
        if protection is None or newest is None:
            return protection
        return protection.model_copy(update={"generation": newest.number, "step": newest.step})


def _cpu_s(pid: int) -> float | None:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return cpu_seconds(stat, ticks_per_s=os.sysconf("SC_CLK_TCK"))
