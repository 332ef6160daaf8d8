"""Parked workers: while the agent waits for a slot, its rank workers are started, and have done all that needs none.

One per rank (see `diloco.parked`). They take the slot as soon as there is one; one that ends before that is started
again after a while.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass

from diloco.agent.process import WorkerProcess, gpu_environment
from diloco.parked_config import ParkedConfig
from diloco.protocol import FailedEvent, ParkedEvent
from service.tasks import wait_for_exit

logger = logging.getLogger(__name__)

LOOK_S = 0.2
RETRY_S = 10.0
EXIT_GRACE_S = 1.0


@dataclass(slots=True)
class Place:
    """One rank's."""

    worker: WorkerProcess
    reader: asyncio.Task[None]
    is_built: bool = False
    versions: tuple[int, ...] = ()
    """Of the global parameters that it holds."""


class Parking:
    """Those of one agent."""

    def __init__(self, configs: Callable[[], list[ParkedConfig] | None]) -> None:
        """``configs`` makes one per rank that is to be parked now; None leaves everything as it is."""
        self._configs = configs
        self._places: dict[int, Place] = {}
        self._retry_s = 0.0

    @property
    def pids(self) -> tuple[int, ...]:
        """Of those whose models are built."""
        return tuple(place.worker.pid for place in self._places.values() if place.is_built)

    @property
    def versions(self) -> tuple[int, ...]:
        """Of the global parameters that the first rank holds, by fragment."""
        place = self._places.get(0)
        return () if place is None else place.versions

    def take(self, rank: int) -> WorkerProcess | None:
        """The parked worker of a rank, if it lives; it goes on with a slot as soon as its model is built."""
        place = self._places.pop(rank, None)
        if place is None:
            return None
        place.reader.cancel()
        return place.worker if place.worker.process.returncode is None else None

    async def run(self, exit_event: asyncio.Event) -> None:
        """Park and renew until ``exit_event``; at the end none is left behind."""
        try:
            while not await wait_for_exit(exit_event, LOOK_S):
                try:
                    await self._look()
                except OSError as exc:
                    logger.warning("no worker can be parked, trying again error=%s", exc)
                    await wait_for_exit(exit_event, RETRY_S)
        finally:
            for rank in list(self._places):
                await self._end(rank)

    async def _look(self) -> None:
        configs = self._configs()
        if configs is None:
            return
        now_s = asyncio.get_running_loop().time()
        for rank, place in list(self._places.items()):
            if place.worker.process.returncode is not None or rank >= len(configs):
                ended = place.worker.process.returncode
                await self._end(rank)
                if ended:
                    logger.warning("a parked worker ended rank=%d code=%s", rank, ended)
                    self._retry_s = now_s + RETRY_S
        if now_s < self._retry_s:
            return
        for rank, config in enumerate(configs):
            if rank not in self._places:
                await self._park(rank, config)

    async def _park(self, rank: int, config: ParkedConfig) -> None:
        worker = await WorkerProcess.spawn(
            "diloco.worker", threads=config.config.threads, environment=gpu_environment(config.config)
        )
        worker.configure(config)
        place = self._places[rank] = Place(worker, asyncio.create_task(self._read(rank, worker)))
        logger.info("worker to be parked pid=%d rank=%d", place.worker.pid, rank)

    async def _read(self, rank: int, worker: WorkerProcess) -> None:
        async with contextlib.aclosing(worker.events()) as events:
            async for event in events:
                place = self._places.get(rank)
                if place is None or place.worker is not worker:
                    return
                if isinstance(event, ParkedEvent):
                    if not place.is_built:
                        logger.info("worker parked pid=%d rank=%d", worker.pid, rank)
                    place.is_built, place.versions = True, event.versions
                elif isinstance(event, FailedEvent):
                    logger.warning("a parked worker failed rank=%d message=%s", rank, event.message)

    async def _end(self, rank: int) -> None:
        place = self._places.pop(rank)
        place.reader.cancel()
        place.worker.hang_up()
        await place.worker.end(EXIT_GRACE_S)
