"""Workers in reserve: processes with all imports done, which wait for the configuration of a dead one's successor.

They are started when the island trains, one after another and at idle priority, and cost memory alone from then on.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping

from diloco.agent.config import IslandSettings
from diloco.agent.process import WorkerProcess, gpu_environment
from diloco.protocol import StandbyEvent, StandbyNeeds
from service.errors import WadilocoError
from service.tasks import wait_for_exit

logger = logging.getLogger(__name__)

PREPARE_S = 300.0
"""At idle priority beside a busy trainer it takes its time."""
RETRY_S = 10.0


class Standbys:
    """So many of them, as far as they are ready."""

    def __init__(self, count: int, *, threads: int, environment: Mapping[str, str], needs: StandbyNeeds) -> None:
        """``needs`` is what each prepares."""
        self._environment = environment
        self._count = count
        self._threads = threads
        self._needs = needs
        self._ready: list[WorkerProcess] = []
        self._preparing: WorkerProcess | None = None
        self._wanted = asyncio.Event()

    @property
    def pids(self) -> tuple[int, ...]:
        return tuple(worker.pid for worker in self._ready)

    def refill(self) -> None:
        """The island trains: there is time to prepare those that are missing."""
        if len(self._ready) < self._count:
            self._wanted.set()

    def take(self) -> WorkerProcess | None:
        """One that is ready and lives."""
        while self._ready:
            worker = self._ready.pop(0)
            if worker.process.returncode is None:
                return worker
        return None

    async def run(self, exit_event: asyncio.Event) -> None:
        """Prepare what is missing whenever that is wanted; at the end none is left behind."""
        try:
            while not exit_event.is_set():
                waiting = [asyncio.create_task(event.wait()) for event in (exit_event, self._wanted)]
                await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for task in waiting:
                    task.cancel()
                self._wanted.clear()
                await self._fill(exit_event)
        finally:
            await self._end()

    async def _fill(self, exit_event: asyncio.Event) -> None:
        while len(self._ready) < self._count and not exit_event.is_set():
            preparing = asyncio.create_task(self._prepare())
            leaving = asyncio.create_task(exit_event.wait())
            await asyncio.wait({preparing, leaving}, return_when=asyncio.FIRST_COMPLETED)
            leaving.cancel()
            if not preparing.done():
                preparing.cancel()
                return
            try:
                preparing.result()
            except (OSError, WadilocoError, TimeoutError) as exc:
                logger.warning("no worker in reserve, trying again error=%s", str(exc) or type(exc).__name__)
                await wait_for_exit(exit_event, RETRY_S)

    async def _prepare(self) -> None:
        worker = self._preparing = await WorkerProcess.spawn(
            "diloco.standby", self._needs.model_dump_json(), threads=self._threads, environment=self._environment
        )
        async with asyncio.timeout(PREPARE_S):
            event = await worker.first_event()
        if not isinstance(event, StandbyEvent):
            await worker.end(0.0)
            raise ChildProcessError("the standby worker ended before it was ready")
        self._preparing = None
        self._ready.append(worker)
        logger.info("worker in reserve pid=%d", worker.pid)

    async def _end(self) -> None:
        left = [*self._ready, *([self._preparing] if self._preparing is not None else [])]
        self._ready, self._preparing = [], None
        for worker in left:
            await worker.end(0.0)


def standbys_of(settings: IslandSettings) -> Standbys:
    """As many as the settings say, else one for each rank."""
    return Standbys(
        settings.standby_workers if settings.standby_workers is not None else settings.ranks,
        threads=settings.threads,
        environment=gpu_environment(settings),
        needs=StandbyNeeds(
            modules=("transformers",) if settings.hf_model is not None else (),
            corpus=settings.data if settings.hf_model is None and settings.workload is None else None,
        ),
    )
