"""Doing it, and taking it back: each fault to one process, that was started here or that the given fleet names."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from replay.chaos.config import ChaosSettings
from replay.chaos.corrupt import files_of, flip_bytes
from replay.chaos.disk import fill_disk, free_disk
from replay.chaos.faults import HELD, Fault, FaultKind, Role
from replay.chaos.members import Fleet, Member, one
from replay.chaos.network import Network
from replay.chaos.probe import probe_journal
from replay.chaos.procfs import is_below, send
from replay.chaos.watch import Watch
from replay.processes import Children
from service.child import module_environment
from service.errors import UnavailableError

logger = logging.getLogger(__name__)

SLOW_PERIOD_S = 0.2
HOG_DEADLINE_S = 60.0

Undo = Callable[[], None]


@dataclass(slots=True)
class Applied:
    """A fault that was injected."""

    fault: Fault
    member: Member
    t_s: float
    """Of the watch."""
    pid: int | None
    """Of the process that was hit; None where it was not the process itself."""
    instance: str | None
    """Of the agent, where it was the agent."""
    detail: str
    undo: Undo | None
    undone_s: float | None = None
    failed_copy: str | None = None
    """What was wrong with a controller on a corrupt copy of the journal; None: nothing, or no such thing was tried."""


class MissedError(UnavailableError):
    """What was to be hit is not there now."""


class Injector:
    """Injects faults, and knows how to take back those that last."""

    def __init__(
        self, settings: ChaosSettings, fleet: Fleet, watch: Watch, children: Children, network: Network | None
    ) -> None:
        self._settings = settings
        self._fleet = fleet
        self._watch = watch
        self._children = children
        self._network = network
        self._open: list[Applied] = []
        self.unplugged: set[str] = set()
        """Members that nobody can reach now."""

    async def apply(self, fault: Fault) -> Applied:
        """Raises `MissedError` when the target is not there, `UnavailableError` when it cannot be done here."""
        member, pid = self._find(fault)
        status = seen.status if (seen := self._watch.seen.get(member.name)) is not None else None
        hits_process = fault.kind not in {FaultKind.DISK, FaultKind.MEMORY}
        is_agent = fault.role is Role.AGENT and hits_process
        applied = Applied(
            fault=fault,
            member=member,
            t_s=self._watch.now_s,
            pid=pid if hits_process else None,
            instance=status.instance if is_agent and status is not None else None,
            detail="",
            undo=None,
        )
        await self._do(applied, pid)
        logger.info("injected kind=%s target=%s pid=%s detail=%s", fault.kind, fault.target, pid, applied.detail)
        self._open.append(applied)
        return applied

    def take_back(self, applied: Applied) -> None:
        """End a fault that lasts; one that was taken back already stays so."""
        if applied in self._open:
            self._open.remove(applied)
            applied.undone_s = self._watch.now_s
            if applied.undo is not None:
                applied.undo()

    def take_all_back(self) -> None:
        for applied in list(self._open):
            with contextlib.suppress(UnavailableError):
                self.take_back(applied)

    def _find(self, fault: Fault) -> tuple[Member, int]:
        if fault.slot is None:
            member = one(self._fleet, fault.role)
            if member.pid is None:
                raise MissedError(f"the {fault.role} is not running", field="at")
            return member, member.pid
        held = self._watch.holder_of(fault.slot)
        if held is None or held[0].pid is None:
            raise MissedError(f"nobody holds slot {fault.slot}", field="at")
        member, status = held
        if fault.role is Role.AGENT:
            return member, held[0].pid
        rank = fault.rank or 0
        if rank >= len(status.worker_pids):
            raise MissedError(f"{member.name} has no worker of rank {rank}", field="at")
        pid = status.worker_pids[rank]
        if not is_below(pid, held[0].pid) or (member.own and not is_below(pid, os.getpid())):
            raise MissedError(f"process {pid} is not one of {member.name}", field="at")
        return member, pid

    async def _do(self, applied: Applied, pid: int) -> None:
        fault, member = applied.fault, applied.member
        match fault.kind:
            case FaultKind.KILL:
                _signal(pid, signal.SIGKILL)
            case FaultKind.STOP:
                _signal(pid, signal.SIGSTOP)
                applied.undo = lambda: _resume(pid)
            case FaultKind.FREEZE:
                _signal(pid, signal.SIGSTOP)
                # For ever it would be there; what somebody else started is theirs to end.
                applied.undo = (lambda: _end(pid)) if member.own else (lambda: _resume(pid))
            case FaultKind.SLOW:
                applied.undo = self._slow(pid)
            case FaultKind.PARTITION:
                applied.undo = self._unplug(member)
            case FaultKind.CORRUPT:
                await self._corrupt(applied, pid)
            case FaultKind.DISK:
                applied.undo = lambda: free_disk(member.directory)
                written = await asyncio.to_thread(fill_disk, member.directory)
                applied.detail = f"{written >> 20} MiB filled {member.directory}"
            case FaultKind.MEMORY:
                applied.undo = await self._hog()
                applied.detail = f"{self._settings.memory_mb} MiB taken"

    def _slow(self, pid: int) -> Undo:
        run_s = SLOW_PERIOD_S * self._settings.slow_frac

        async def duty() -> None:
            while send(pid, signal.SIGSTOP):
                await asyncio.sleep(SLOW_PERIOD_S - run_s)
                send(pid, signal.SIGCONT)
                await asyncio.sleep(run_s)

        task = asyncio.create_task(duty())

        def undo() -> None:
            task.cancel()
            send(pid, signal.SIGCONT)

        return undo

    def _unplug(self, member: Member) -> Undo:
        network, plug = self._network, member.plug
        if network is None or plug is None:
            raise UnavailableError(
                "the fleet has no network of its own", field="kinds", remedy="let the fleet be started here"
            )
        network.pull(plug)
        self.unplugged.add(member.name)

        def undo() -> None:
            self.unplugged.discard(member.name)
            network.put_back(plug)

        return undo

    async def _corrupt(self, applied: Applied, pid: int) -> None:
        fault, member, settings = applied.fault, applied.member, self._settings
        if fault.role is Role.CONTROLLER:
            # Its own journal is all that there is of the run: what a controller makes of a bad one is tried on a copy.
            journal = self._one_file(member, "**/*.sqlite")
            found = await probe_journal(
                journal, settings.out / f"journal-{fault.seed}", settings=settings, seed=fault.seed
            )
            applied.detail, applied.failed_copy = found.detail, None if found.ok else found.detail
            applied.pid = None  # the process itself was left alone
            return
        files = self._files(member, "**/*")
        path, offsets = await asyncio.to_thread(flip_bytes, files, num_bytes=settings.corrupt_bytes, seed=fault.seed)
        applied.detail = f"{len(offsets)} bytes of {path}, from {offsets[0]} to {offsets[-1]}"
        applied.t_s = self._watch.now_s
        _signal(pid, signal.SIGKILL)

    def _files(self, member: Member, pattern: str) -> list[Path]:
        return files_of(member.vaults or member.directory, self._settings.corrupt_files.get(member.role, pattern))

    def _one_file(self, member: Member, pattern: str) -> Path:
        files = self._files(member, pattern)
        if not files:
            raise UnavailableError("there is no journal to copy", field="corrupt_files", remedy="give controller=GLOB")
        return files[0]

    async def _hog(self) -> Undo:
        log = self._settings.out.absolute() / "fleet" / "hog.log"
        log.unlink(missing_ok=True)
        command = [sys.executable, "-P", "-m", "replay.chaos.hog", str(self._settings.memory_mb)]
        child = self._children.start("hog", command, log=log, env=module_environment())

        def undo() -> None:
            self._children.stop([child], deadline_s=1.0)

        deadline_s = self._watch.now_s + HOG_DEADLINE_S
        while not (log.exists() and log.read_text()):
            if child.exit_code is not None or self._watch.now_s > deadline_s:
                undo()
                raise UnavailableError(
                    f"{self._settings.memory_mb} MiB could not be taken", field="memory_mb", remedy="take less"
                )
            await asyncio.sleep(0.05)
        return undo


def lasts(fault: Fault) -> bool:
    """Whether it ends after its ``hold_s``."""
    return fault.kind in HELD


def _signal(pid: int, number: signal.Signals) -> None:
    if not send(pid, number):
        raise MissedError(f"process {pid} has just ended", field="at")


def _resume(pid: int) -> None:
    send(pid, signal.SIGCONT)


def _end(pid: int) -> None:
    send(pid, signal.SIGKILL)
