"""What the agent knows: its lease, the worker's progress, and reports that the controller has not confirmed."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from controller.schema import AgentLease
from diloco.agent.config import IslandSettings
from diloco.agent.restarts import RestartBook
from diloco.protocol import SyncCommand
from diloco.recovery_schema import HandoverReport, Peer, ReplicaNotice
from diloco.schema import MAX_DETAIL, AgentStatus, Phase, Progress, Protection, SyncOutcome, SyncReport
from diloco.vault.layout import Generation
from service.errors import WadilocoError

MAX_UNACKNOWLEDGED = 1000
"""As many as one heartbeat may carry; of a longer silence the oldest reports are lost."""


NO_SYNCHRONIZER = "no synchronizer is known: give --synchronizer here, or --synchronizer-url to the controller"


def no_progress() -> Progress:
    return Progress(step=0, inner_steps_since_sync=0, tokens=0, tokens_since_sync=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """What a worker is started for; another one needs another worker."""

    slot: int
    synchronizer_url: str


@dataclass(slots=True)
class AgentState:
    """Written by the agent's tasks, all on one event loop."""

    settings: IslandSettings
    instance: str = field(default_factory=lambda: secrets.token_hex(16))
    lease: AgentLease | None = None
    limits_lease: AgentLease | None = None
    """The newest lease that there was, also when it has lapsed: its limits go on to hold."""
    controller_seen_s: float = field(default_factory=time.monotonic)
    """Monotonic time of the controller's last answer (at first: of the start)."""
    controller_reachable: bool = False
    controller_failed_s: float | None = None
    """Monotonic time of the last attempt to reach it that failed."""
    syncs_alone: int = 0
    """Syncs begun without it since its last answer."""
    progress: Progress = field(default_factory=no_progress)
    reports: deque[SyncReport] = field(default_factory=lambda: deque(maxlen=MAX_UNACKNOWLEDGED))
    num_parameters: int | None = None
    num_fragments: int | None = None
    """Of the run that the worker has joined; None before."""
    worker_pids: tuple[int, ...] = ()
    """Of the running workers, by rank."""
    worker_ready: bool = False
    restarts: int = 0
    paused: bool = False
    sync_in_flight: SyncCommand | None = None
    """The newest that was begun, until the word of its end."""
    syncs_begun: int = 0
    epoch: int = 0
    """Newest epoch heard of: what contributions are fenced with."""
    protection: Protection | None = None
    newest_snapshot: Callable[[], Protection | None] = lambda: None
    """`protection` with the newest snapshot in it."""
    restart_book: RestartBook = field(default_factory=RestartBook)
    standby_pids: Callable[[], tuple[int, ...]] = tuple
    fatal: WadilocoError | None = None
    """Why the agent gave up."""
    assignment: Assignment | None = None
    slot_lost: bool = False
    """It was without a slot since the last worker started: others may have brought the slot further meanwhile."""
    url: str | None = None
    """Where others reach this agent."""
    replicas: Callable[[], tuple[ReplicaNotice, ...]] | None = None
    """What it keeps of other slots; None: it keeps nothing."""
    hands_over: bool = False
    buddies: tuple[Peer, ...] = ()
    """Who keeps replicas of the own slot."""
    keeps_slots: tuple[int, ...] | None = None
    """Slots whose replicas this agent keeps; None: the controller has not said."""
    handed_over: HandoverReport | None = None
    """To be told with the next heartbeat."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when there is something to tell the controller at once, or a new assignment."""
    assigned: asyncio.Event = field(default_factory=asyncio.Event)

    def take_lease(self, lease: AgentLease) -> None:
        """Work under this lease. A slot that it does not give is no longer ours."""
        self.lease = self.limits_lease = lease
        self.hear_epoch(lease.epoch)
        self.paused = lease.paused
        self.hear_buddies(lease.buddies, lease.keeps_slots)
        self.assign(lease.slot, self.settings.synchronizer or lease.synchronizer_url)

    def assign(self, slot: int | None, synchronizer_url: str | None) -> None:
        wanted = (
            Assignment(slot=slot, synchronizer_url=synchronizer_url)
            if slot is not None and synchronizer_url is not None
            else None
        )
        if wanted != self.assignment:
            self.slot_lost = self.slot_lost or wanted is None
            self.assignment = wanted
            self.assigned.set()

    def start_slot(self, slot: int) -> None:
        """Go on where the slot was when its last holder reported; at the beginning if none did."""
        lease = self.limits_lease
        resume = lease.resume if lease is not None and lease.slot == slot else None
        self.progress = resume or no_progress()
        self.slot_lost = False
        self.drop_unsynced()

    def hear_buddies(self, buddies: tuple[Peer, ...], keeps_slots: tuple[int, ...]) -> None:
        self.buddies, self.keeps_slots = buddies, keeps_slots

    def start_at(self, newest: Generation | None) -> None:
        """A snapshot is there that an earlier agent left: the slot is at least so far."""
        if newest is not None and newest.step > self.progress.step:
            known = {"step": newest.step, "tokens": newest.tokens, "skipped_steps": newest.skipped}
            self.progress = self.progress.model_copy(update=known)

    def hear_epoch(self, epoch: int) -> None:
        self.epoch = max(self.epoch, epoch)

    def begin_sync(self, command: SyncCommand) -> SyncCommand:
        """The command with a serial of its own, in flight from now on."""
        self.syncs_begun += 1
        self.sync_in_flight = command.model_copy(update={"serial": self.syncs_begun})
        return self.sync_in_flight

    def end_sync(self, serial: int) -> None:
        """The sync of that serial has ended; a newer one is still in flight."""
        if self.sync_in_flight is not None and self.sync_in_flight.serial == serial:
            self.sync_in_flight = None

    def fail_sync(self, command: SyncCommand, detail: str, *, now_s: float) -> SyncReport:
        """Report a sync that no worker can report, so that the controller need not wait for its deadline."""
        report = SyncReport(
            round=self.progress.round if command.round is None else command.round,
            outcome=SyncOutcome.FAILED,
            started_s=now_s,
            finished_s=now_s,
            bytes_pushed=0,
            bytes_pulled=0,
            inner_steps=0,
            tokens=0,
            autonomous=command.autonomous,
            detail=detail[:MAX_DETAIL],
        )
        self.take_report(report, serial=command.serial)
        return report

    def take_report(self, report: SyncReport, *, serial: int) -> None:
        """``serial`` is that of the command which it is the report of."""
        self.end_sync(serial)
        self.reports.append(report)
        self.changed.set()

    def heard_controller(self) -> None:
        self.controller_seen_s = time.monotonic()
        self.controller_reachable = True
        self.syncs_alone = 0

    def missed_controller(self) -> None:
        self.controller_failed_s = time.monotonic()
        self.controller_reachable = False

    def take_progress(self, progress: Progress) -> None:
        self.progress = progress.model_copy(update={"restarts": self.restarts})

    def worker_ended(self) -> None:
        self.worker_pids, self.worker_ready, self.num_fragments = (), False, None

    def drop_unsynced(self) -> None:
        """The next worker of this slot goes on from the global parameters: steps since the last sync are lost."""
        lost = {"inner_steps_since_sync": 0, "tokens_since_sync": 0, "update_norm": None, "residual_norm": None}
        self.progress = self.progress.model_copy(update={**lost, "phase": Phase.STARTING, "restarts": self.restarts})

    def readiness(self) -> str | None:
        if self.assignment is None:
            if self.lease is None:
                return "not registered with a controller yet"
            return "no free slot yet" if self.lease.slot is None else NO_SYNCHRONIZER
        return None if self.worker_ready else "the worker has not joined the run yet"

    def status(self) -> AgentStatus:
        lease = self.lease
        return AgentStatus(
            agent_id=self.settings.identity,
            instance=self.instance,
            node=self.settings.node,
            slot=self.assignment.slot if self.assignment else None,
            epoch=self.epoch if self.limits_lease else None,
            run_id=lease.run_id if lease else None,
            controller_reachable=self.controller_reachable if self.settings.controller else None,
            synchronizer_url=self.assignment.synchronizer_url if self.assignment else None,
            worker_pid=self.worker_pids[0] if self.worker_pids else None,
            worker_pids=self.worker_pids,
            worker_ready=self.worker_ready,
            num_parameters=self.num_parameters,
            num_fragments=self.num_fragments,
            codec=self.settings.codec,
            restarts=self.restarts,
            protection=self.newest_snapshot(),
            last_restart=self.restart_book.last,
            standby_pids=self.standby_pids(),
            unacknowledged_syncs=len(self.reports),
        )
