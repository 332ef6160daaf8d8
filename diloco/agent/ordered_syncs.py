"""The syncs that the workers are ordered to do: each ends in a report, whatever becomes of the workers meanwhile."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from diloco.agent.metrics import IslandMetrics
from diloco.agent.outer_log import log_outer_step
from diloco.agent.state import AgentState
from diloco.protocol import SyncCommand, SyncedEvent
from diloco.schema import SyncReport

logger = logging.getLogger("diloco.agent.supervisor")


class OrderedSyncs:
    """Passes orders on, and takes in their reports."""

    def __init__(self, state: AgentState, metrics: IslandMetrics, *, send: Callable[[SyncCommand], None]) -> None:
        """``send`` tells the workers, if there are any."""
        self._state = state
        self._metrics = metrics
        self._send = send

    def start(self, command: SyncCommand) -> None:
        """Pass a sync on, as soon as a worker has joined the run: the other islands of the round wait for it."""
        command = self._state.begin_sync(command)
        if self._state.worker_ready:
            self._send(command)

    def refuse(self, command: SyncCommand, detail: str) -> None:
        """Report at once that a sync which was ordered will not be."""
        logger.warning("sync refused round=%s detail=%s", command.round, detail)
        self._report_failed(command, detail)

    def catch_up(self, version: int) -> None:
        """Take a worker that has just joined at ``version`` through the sync that came while there was none."""
        pending = self._state.sync_in_flight
        if pending is None:
            return
        if time.time() >= pending.deadline_s or (pending.round is not None and pending.round < version):
            self._report_failed(pending, "the round was over before a worker had joined the run")
        else:
            self.start(pending)

    def worker_ended(self) -> None:
        """Nobody is left to report the sync in flight."""
        if self._state.sync_in_flight is not None:
            self._report_failed(self._state.sync_in_flight, "the worker ended during the sync")

    def take(self, event: SyncedEvent) -> None:
        """A worker's report."""
        self._state.take_report(event.report, serial=event.serial)
        self._note(event.report)

    def _report_failed(self, command: SyncCommand, detail: str) -> None:
        self._note(self._state.fail_sync(command, detail, now_s=time.time()))

    def _note(self, report: SyncReport) -> None:
        self._metrics.take_sync(report)
        log_outer_step(report, loss=self._state.progress.loss)
