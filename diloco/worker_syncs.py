"""The syncs of an island's first rank: those for which inner steps stand still, and those that they go on beside."""

from __future__ import annotations

import logging
import time
from concurrent.futures import Future, wait
from dataclasses import dataclass

from diloco.agreement import disagreements
from diloco.boundary import StepBoundary
from diloco.island import Capture
from diloco.phase import PhaseTeller
from diloco.protocol import SkippedEvent, SyncCommand, SyncedEvent
from diloco.schema import Phase, SyncOutcome, SyncReport
from diloco.team import Action
from diloco.trainer_schema import TrainerPhase
from diloco.vault.members import Captured, UnderWay
from diloco.worker_rank import Rank
from diloco.worker_reports import LastSync, Reports
from diloco.worker_steps import Steps

logger = logging.getLogger("diloco.worker")

DUE_POLL_S = 0.02


@dataclass(frozen=True, slots=True)
class OverlappedSync:
    """A sync that is under way while inner steps go on."""

    command: SyncCommand
    end: Future[SyncReport | None]
    started_s: float
    due_step: int | None = None
    """Inner step at whose boundary the result is adopted; None: as soon as it has come."""


class WorkerSyncs:
    """Does one sync at a time, as the agent orders."""

    def __init__(self, rank: Rank, steps: Steps, reports: Reports, phases: PhaseTeller) -> None:
        self._island = rank.island
        self._exchange = rank.exchange
        self._team = rank.team
        self._guard = rank.guard
        self._inbox = rank.inbox
        self._transfers = rank.transfers
        self._emit = rank.emit
        self._steps = steps
        self._reports = reports
        self._phases = phases
        self._boundary = StepBoundary(rank.inbox.stop)
        self.overlapped: OverlappedSync | None = None
        """The sync that is under way while inner steps go on."""
        self._shared_s = 0.0
        """Unix time when the ranks last shared what it adopted."""
        self.begun: tuple[UnderWay, Captured] | None = None
        """The sync that is under way, and what it contributes, as a snapshot has it."""
        self.epoch = rank.config.vault.epoch if rank.config.vault is not None else 0
        self._told: set[str] = set()

    def has_order(self) -> bool:
        """Whether a step that waits for the gate is given up."""
        if self.overlapped is None:
            return self._inbox.has_order(time.time(), step=self._steps.inner.step)
        is_due = self._boundary.is_waiting or self.overlapped.end.done()
        return (is_due and self.overlapped.due_step is None) or self._inbox.paused or self._inbox.stop.is_set()

    def synchronize(self, command: SyncCommand) -> None:
        """Do the sync, or begin it where it goes on beside inner steps."""
        self.epoch = max(self.epoch, command.epoch)
        if command.overlap:
            self._begin_overlapped(command)
            return
        started_s = time.time()
        self._reports.tell(Phase.SYNC)
        captured = self._capture(command, started_s=started_s)
        self.wait_for(command, captured, started_s=started_s)

    def _capture(self, command: SyncCommand, *, started_s: float) -> Capture:
        """Copy what is to be contributed, and have a snapshot know of it before it travels."""
        self._guard.settle()
        self._team.start_sync(self._island.module)
        captured = self._exchange.capture(command)
        fragment = self._exchange.turn_of(command)
        under_way = UnderWay(
            command=command, fragment=fragment, started_s=started_s, due_step=self._due_step_of(command)
        )
        self.begun = (under_way, Captured(fragment, captured))
        self._guard.before_sync()
        return captured

    def _due_step_of(self, command: SyncCommand) -> int | None:
        return None if command.overlap_steps is None else self._steps.inner.step + command.overlap_steps

    def wait_for(self, command: SyncCommand, captured: Capture | None, *, started_s: float) -> None:
        """The sync, while inner steps stand still."""
        self._guard.settle()
        done = self._transfers.call(lambda: self._exchange.run(command, captured=captured))
        self._share()
        # As the inner loop saw it, with the time that an idle thread waits for its core.
        times = {"started_s": started_s, "finished_s": time.time()}
        self._end_sync(command, done.model_copy(update=times) if done is not None else None, now_s=started_s)
        self._reports.tell(Phase.INNER)

    def _begin_overlapped(self, command: SyncCommand) -> None:
        """Copy the parameters, and leave the rest to the transfer thread."""
        started_s, boundary = time.time(), self._boundary
        boundary.blocked_s = 0.0
        # The others only see that they hold what is captured; what is adopted later they get when it is.
        captured = boundary.time(lambda: self._capture(command, started_s=started_s))
        self.overlap(command, captured, started_s=started_s, due_step=self._due_step_of(command))

    def overlap(
        self, command: SyncCommand, captured: Capture | None, *, started_s: float, due_step: int | None
    ) -> None:
        """Let the sync go on beside inner steps; `serve` it from then on."""
        boundary = self._boundary
        end = self._transfers.submit(lambda: self._exchange.run(command, captured=captured, at_boundary=boundary))
        self.overlapped = OverlappedSync(command, end, started_s=started_s, due_step=due_step)

    def serve(self, sync: OverlappedSync) -> None:
        """Do what the sync needs a step boundary for, such as to adopt its result, and report it when it has ended."""
        if sync.due_step is not None:
            if self._steps.inner.step < sync.due_step:
                return
            self._wait_until_due(sync)
        if self._boundary.is_waiting:
            self._adopt_at_boundary()
        if not sync.end.done():
            return
        self.overlapped = None
        report = sync.end.result()
        if report is not None:
            # The transfer thread knows nothing of the time that the ranks need to share what it adopted.
            finished_s = max(report.finished_s, self._shared_s)
            times = {"started_s": sync.started_s, "finished_s": finished_s, "blocked_s": self._boundary.blocked_s}
            report = report.model_copy(update=times)
        self._end_sync(sync.command, report, now_s=sync.started_s)
        self._reports.make_due()  # after the next step: what a report takes is not the sync's

    def _wait_until_due(self, sync: OverlappedSync) -> None:
        """The step at which the result is adopted has come: wait for it."""
        while not sync.end.done() and not self._inbox.stop.is_set():
            if self._boundary.is_waiting:
                self._adopt_at_boundary()
            elif not wait([sync.end], timeout=DUE_POLL_S).done:
                self._team.tell(Action.HOLD)

    def _adopt_at_boundary(self) -> None:
        self._phases.enter(TrainerPhase.SYNC)
        self._guard.settle()
        self._boundary.serve()
        self._boundary.time(self._share)
        self._shared_s = time.time()

    def _share(self) -> None:
        """After a sync all ranks go on from the same parameters."""
        # A transfer that was given up at a stop may still be at work on them.
        if not self._inbox.stop.is_set():
            self._guard.settle()
            self._team.share(self._island.module)

    def _end_sync(self, command: SyncCommand, report: SyncReport | None, *, now_s: float) -> None:
        self.begun = None
        self._guard.after_sync()
        self._tell_disagreements(command, now_s=now_s)
        if report is None:
            logger.info("sync skipped, nothing to do round=%s version=%d", command.round, self._island.version)
            self._emit(SkippedEvent(serial=command.serial))
        else:
            self._note_sync(report, command)

    def _note_sync(self, report: SyncReport, command: SyncCommand) -> None:
        if report.outcome is not SyncOutcome.FAILED:
            self._reports.last_sync = LastSync(at_s=report.finished_s, loss=self._steps.inner.loss)
        self._emit(SyncedEvent(report=report, serial=command.serial))

    def _tell_disagreements(self, command: SyncCommand, *, now_s: float) -> None:
        """Say once what the synchronizer's settings make of the orders that come from elsewhere."""
        if self._exchange.outer_state is None:
            return
        for sentence in disagreements(command, self._exchange.outer_state, now_s=now_s):
            key = sentence.partition(":")[0]
            if key not in self._told:
                self._told.add(key)
                logger.warning("%s", sentence)
