"""Keeps the rank workers of the assigned slot running: starts them, sees a death at once, starts again where they were.

When one of several ranks dies, all start again together. What they go on from is the protector's to say.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from enum import StrEnum

from diloco.agent.config import IslandSettings
from diloco.agent.crew import Crew
from diloco.agent.failures import Deaths, Failure
from diloco.agent.metrics import IslandMetrics
from diloco.agent.ordered_syncs import OrderedSyncs
from diloco.agent.parking import Parking
from diloco.agent.process import WorkerProcess
from diloco.agent.protector import Protector
from diloco.agent.rendezvous import RankStore
from diloco.agent.standby import standbys_of
from diloco.agent.state import AgentState, Assignment
from diloco.agent.worker_config import parked_configs, worker_config
from diloco.corpus import CorpusWatch
from diloco.parked_config import ParkedConfig
from diloco.protocol import (
    Event,
    FailedEvent,
    PauseCommand,
    ProgressEvent,
    ReadyEvent,
    ResumeCommand,
    SkippedEvent,
    SyncCommand,
    SyncedEvent,
    WorkerConfig,
)
from diloco.schema import Phase
from service.deadline import unless
from service.errors import InputError, WadilocoError
from service.tasks import first_of, wait_for_exit

logger = logging.getLogger(__name__)


class Ended(StrEnum):
    """Why a worker is gone."""

    STOPPED = "stopped"
    REASSIGNED = "reassigned"
    DIED = "died"


class Supervisor:
    """Runs one worker per rank at a time for whatever the state assigns."""

    def __init__(
        self, settings: IslandSettings, state: AgentState, metrics: IslandMetrics, *, store: RankStore | None = None
    ) -> None:
        """``store`` is where several ranks meet."""
        self._settings = settings
        self._state = state
        self._metrics = metrics
        self._store = store
        self._crew: Crew | None = None
        self._group_epoch = 0
        """Grows with each start: ranks of different starts never meet."""
        self._failure = Failure()
        self._ever_ready = False
        self._is_held = False
        """Told to wait, whether or not the run is paused."""
        self._corpus = CorpusWatch(settings.data)
        self._protector = Protector(settings, state)
        self._syncs = OrderedSyncs(state, metrics, send=self._send_sync)
        self._standbys = standbys_of(settings)
        self._parking = Parking(self._parked_configs)
        state.standby_pids = lambda: self._standbys.pids + self._parking.pids
        state.newest_snapshot = self._protector.protection

    def start_sync(self, command: SyncCommand) -> None:
        """Pass a sync on, as soon as a worker has joined the run: the other islands of the round wait for it."""
        self._syncs.start(command)

    def refuse_sync(self, command: SyncCommand, detail: str) -> None:
        """Report at once that a sync which was ordered will not be."""
        self._syncs.refuse(command, detail)

    @property
    def protector(self) -> Protector:
        return self._protector

    def hold(self) -> None:
        """End the step, take a snapshot of where that is, and wait."""
        self._is_held = True
        if self._crew is not None:
            self._crew.send(PauseCommand(snapshot=True))

    def let_go(self) -> None:
        """Go on, unless the run is paused."""
        if self._is_held:
            self._is_held = False
            self.apply_pause(self._state.paused)

    def held_generation(self) -> tuple[int, int] | None:
        """Number and step of the snapshot of where the workers wait; None until it is there."""
        progress = self._state.progress
        vaults = self._protector.vaults
        newest = vaults.newest() if vaults is not None and self._state.worker_ready else None
        if not self._is_held or progress.phase is not Phase.PAUSED or newest is None or newest.step != progress.step:
            return None
        return newest.number, newest.step

    def apply_pause(self, paused: bool) -> None:
        """Hold or continue the inner steps."""
        self._state.paused = paused
        if self._crew is not None and not self._is_held:
            self._crew.send(PauseCommand() if paused else ResumeCommand())

    async def run(self, exit_event: asyncio.Event) -> None:
        """Supervise until ``exit_event``; if no worker can be started, note why in the state and end the process."""
        beside = [
            asyncio.create_task(self._standbys.run(exit_event)),
            asyncio.create_task(self._parking.run(exit_event)),
            asyncio.create_task(self._protector.keep_on_disk(exit_event)),
        ]
        try:
            await self._supervise(exit_event)
        finally:
            for task in beside:
                task.cancel()
            await asyncio.wait(beside)
            await self._protector.close()

    async def _supervise(self, exit_event: asyncio.Event) -> None:
        deaths = Deaths()
        last_slot: int | None = None
        while not exit_event.is_set():
            assignment = await self._next_assignment(exit_event)
            if assignment is None:
                return
            is_new = last_slot != assignment.slot or self._state.slot_lost
            if is_new:
                if last_slot is not None:
                    await self._protector.forget()
                self._state.start_slot(assignment.slot)
            last_slot = assignment.slot
            await self._protector.take_slot(assignment.slot)
            if is_new:
                await unless(exit_event, self._protector.find_state(assignment.slot))
                if self._state.assignment != assignment or exit_event.is_set():
                    continue
            started_s = time.monotonic()
            try:
                await asyncio.to_thread(self._corpus.check)
                ended = await self._run_one(assignment, exit_event)
            except OSError as exc:
                logger.warning("cannot start a worker error=%s", exc)
                ended = Ended.DIED
            except InputError as exc:
                self._end_process(exc)
                return
            if ended is not Ended.DIED:
                continue
            self._state.restarts += 1
            self._protector.worker_died(was_ready=self._ever_ready)
            lived_s = time.monotonic() - started_s
            deaths.note(was_ready=self._ever_ready, lived_s=lived_s, step=self._protector.step)
            fatal = self._failure.reason_to_give_up(deaths.start_failures, start_attempts=self._settings.start_attempts)
            if fatal is not None:
                self._end_process(fatal)
                return
            self._metrics.restarts.inc()
            pause_s = deaths.pause_s(
                first_s=self._settings.restart_backoff_s, longest_s=self._settings.restart_backoff_max_s
            )
            logger.warning("restarting the worker step=%d pause_s=%.1f", self._state.progress.step, pause_s)
            await wait_for_exit(exit_event, pause_s)

    def _end_process(self, reason: WadilocoError) -> None:
        self._state.fatal = reason
        # The signal ends the server loop; the entry point then raises the reason.
        signal.raise_signal(signal.SIGTERM)

    async def _next_assignment(self, exit_event: asyncio.Event) -> Assignment | None:
        while not exit_event.is_set():
            self._state.assigned.clear()
            if self._state.assignment is not None:
                return self._state.assignment
            await first_of(exit_event, self._state.assigned)
        return None

    async def _run_one(self, assignment: Assignment, exit_event: asyncio.Event) -> Ended:
        """The life of the workers of one start, until the last event that they wrote."""
        self._failure, self._ever_ready = Failure(), False
        self._group_epoch += 1
        configs = [
            worker_config(
                self._settings,
                self._state,
                assignment,
                rank=rank,
                store=self._store,
                group_epoch=self._group_epoch,
                vault=vault,
            )
            for rank, vault in enumerate(self._protector.places())
        ]
        crew = self._crew = await Crew.start(configs, self._take, hire=self._hire)
        watch = asyncio.create_task(self._protector.watch(crew))
        self._state.worker_pids = crew.pids
        for rank, pid in enumerate(crew.pids):
            step = self._state.progress.step
            logger.info("worker started pid=%d rank=%d slot=%d step=%d", pid, rank, assignment.slot, step)
        stopping = asyncio.create_task(first_of(exit_event, self._state.assigned))
        ended = Ended.STOPPED
        try:
            await crew.wait_for_end(stopping)
            ended = Ended.DIED if crew.has_lost_one else Ended.STOPPED if exit_event.is_set() else Ended.REASSIGNED
            if ended is not Ended.DIED:
                await crew.stop(self._settings.stop_timeout_s)
        finally:
            stopping.cancel()
            watch.cancel()
            lost = crew.first_lost
            if ended is Ended.DIED:
                self._protector.noticed(lost)
            exits = await crew.end()
            self._crew = None
            self._state.worker_ended()
            if ended is not Ended.DIED:
                self._syncs.worker_ended()
        if ended is Ended.DIED:
            self._protector.explain(exits, lost, self._failure.message)
        for each in exits:
            logger.log(
                logging.WARNING if ended is Ended.DIED else logging.INFO,
                "worker ended pid=%d rank=%d code=%d why=%s message=%s",
                each.pid,
                each.rank,
                each.code,
                ended,
                self._failure.message,
            )
        return ended

    def _send_sync(self, command: SyncCommand) -> None:
        if self._crew is not None:
            self._crew.send(command)

    async def _hire(self, config: WorkerConfig) -> WorkerProcess:
        """A worker that is ready, where there is one; a new one otherwise."""
        worker = self._parking.take(config.rank) or self._standbys.take()
        if worker is None:
            return await WorkerProcess.start(config)
        worker.configure(config)
        return worker

    def _parked_configs(self) -> list[ParkedConfig] | None:
        """Those of workers that are to be parked; None: those that are there are about to be needed."""
        state = self._state
        if state.assignment is not None:
            return None if self._crew is None else []
        return parked_configs(self._settings, state)

    def _take(self, rank: int, event: Event) -> None:
        answer = self._protector.take(rank, event)
        if answer is not None and self._crew is not None:
            self._crew.answer(rank, answer)
        if isinstance(event, FailedEvent):
            self._failure.note(event)
        elif rank == 0:
            self._take_progress(event)

    def _take_progress(self, event: Event) -> None:
        match event:
            case ReadyEvent():
                self._ever_ready = self._state.worker_ready = True
                self._state.num_parameters = event.num_parameters
                self._state.num_fragments = event.num_fragments
                self.apply_pause(self._state.paused)
                if not event.resumes_sync:
                    self._syncs.catch_up(event.version)
            case ProgressEvent():
                before = self._state.progress
                self._state.take_progress(event.progress)
                self._metrics.take_steps(event.step_times_s, tokens=event.progress.tokens - before.tokens)
                if event.progress.phase is Phase.INNER and event.step_times_s:
                    self._standbys.refill()
            case SyncedEvent():
                self._syncs.take(event)
            case SkippedEvent():
                self._state.end_sync(event.serial)
            case _:
                pass
