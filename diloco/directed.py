"""A controller's word for a training loop of one's own: the agent's line to it, on a thread beside the loop.

The loop is its own worker: nobody restarts it, and it takes orders at its step boundaries. All else is as in the agent
(see `diloco.agent`): registration, heartbeats, several controllers, and syncs at the highest H when none answers.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future

from fastapi import FastAPI

from diloco.agent.app import Agent
from diloco.agent.config import IslandSettings
from diloco.agent.metrics import IslandMetrics
from diloco.agent.state import AgentState, Assignment
from diloco.inbox import Inbox
from diloco.protocol import Command, PauseCommand, ResumeCommand, SyncCommand
from diloco.schema import Progress, SyncReport
from service.errors import ConflictError, UnavailableError
from service.tasks import background, wait_for_exit

CLOSE_S = 10.0
"""Longest farewell."""
STATE_POLL_S = 0.2
REPORT_INTERVAL_S = 0.5


class LoopTrainer:
    """What the agent has for a supervisor where the loop is in this process. On the agent's event loop."""

    def __init__(self, state: AgentState, inbox: Inbox, assigned: Future[Assignment]) -> None:
        self._state = state
        self._inbox = inbox
        self._assigned = assigned

    def start_sync(self, command: SyncCommand) -> None:
        self._state.sync_in_flight = command
        self._order(command)

    def refuse_sync(self, command: SyncCommand, detail: str) -> None:
        self._state.fail_sync(command, detail, now_s=time.time())

    def apply_pause(self, paused: bool) -> None:
        self._state.paused = paused
        self._order(PauseCommand() if paused else ResumeCommand())

    async def run(self, exit_event: asyncio.Event) -> None:
        """Tell the loop its slot; another one, or none, ends the island."""
        mine: Assignment | None = None
        while not exit_event.is_set():
            now = self._state.assignment
            if mine is None and now is not None:
                mine = now
                self._assigned.set_result(now)
            elif now != mine:
                self._inbox.request_stop()
                return
            await wait_for_exit(exit_event, STATE_POLL_S)

    def _order(self, command: Command) -> None:
        self._inbox.handle(command.model_dump_json())


class Directed:
    """When a controller wants this island to sync, and what it is told of the island."""

    def __init__(self, settings: IslandSettings, *, num_parameters: int, deadline_s: float) -> None:
        """Register and wait for a slot, until the Unix time ``deadline_s``.

        Raises:
            UnavailableError: no controller gave one until then.
        """
        self._inbox = Inbox()
        self._assigned: Future[Assignment] = Future()
        self._exit: asyncio.Event | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._report_due_s = 0.0
        self._agent = Agent(settings, supervise=self._supervise)
        self._agent.state.num_parameters = num_parameters
        self._thread = threading.Thread(target=self._run, name="controller", daemon=True)
        self._thread.start()
        try:
            self.assignment = self._assigned.result(max(deadline_s - time.time(), 0.0))
        except TimeoutError:
            why = self._agent.state.readiness()
            self.close()
            raise UnavailableError(
                f"{settings.controller} gave no slot in time: {why}",
                field="controller",
                remedy="start it, correct the URL, or give it more slots (--num-slots)",
            ) from None

    @property
    def epoch(self) -> int:
        return self._agent.state.epoch

    def take_due(self) -> SyncCommand | None:
        """The sync that was ordered, once. Waits here while the controller has paused the run.

        Raises:
            ConflictError: the controller has taken the slot back.
        """
        while True:
            if self._inbox.stop.is_set():
                raise ConflictError(
                    f"the controller has taken slot {self.assignment.slot} back",
                    field="slot",
                    remedy="end this process, or make a new Island to take a free slot",
                )
            command = self._inbox.take_due(time.time())
            if command is not None or not self._inbox.paused:
                return command
            self._inbox.wait(STATE_POLL_S)

    def tell(self, progress: Callable[[], Progress]) -> None:
        """Say how far the island is, now and then."""
        if time.monotonic() >= self._report_due_s:
            self._post(self._agent.state.take_progress, progress())
            self._report_due_s = time.monotonic() + REPORT_INTERVAL_S

    @property
    def num_fragments(self) -> int | None:
        """What the controller cuts the model into; None where none has said, and the run's own number counts."""
        lease = self._agent.state.limits_lease
        return None if lease is None else lease.num_fragments

    def joined(self, progress: Progress, *, num_fragments: int) -> None:
        """The loop holds global parameters of a run of so many fragments."""
        self._post(self._agent.state.take_progress, progress)
        self._agent.state.num_fragments = num_fragments
        self._agent.state.worker_ready = True

    def report(self, report: SyncReport) -> None:
        """Say how a sync ended."""
        self._report_due_s = 0.0
        self._post(self._agent.state.take_report, report)

    def close(self) -> None:
        """Say goodbye; a controller that is away is not waited for."""
        if self._loop is not None and self._exit is not None:
            self._post(self._exit.set)
        self._thread.join(CLOSE_S)

    def _post(self, call: Callable[..., object], *arguments: object) -> None:
        assert self._loop is not None
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(call, *arguments)

    def _supervise(self, _: IslandSettings, state: AgentState, __: IslandMetrics) -> LoopTrainer:
        return LoopTrainer(state, self._inbox, self._assigned)

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as exc:
            if self._assigned.done():
                raise
            self._assigned.set_exception(exc)

    async def _serve(self) -> None:
        self._loop, self._exit = asyncio.get_running_loop(), asyncio.Event()
        async with background() as tasks, self._agent.lifespan(FastAPI(), tasks):
            await self._exit.wait()
            await tasks.stop()
