"""The rank workers of one island as one: they start together, and end together when one of them does."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Self

from diloco.agent.process import WorkerProcess
from diloco.protocol import Command, Event, StopCommand, WorkerConfig

logger = logging.getLogger(__name__)

EXIT_GRACE_S = 1.0
"""Having closed its pipe, a worker only has to leave the interpreter."""
PEERS_GRACE_S = 0.5
"""Time in which the other ranks notice that one is gone, and say how far they were; then they are killed."""


@dataclass(frozen=True, slots=True)
class Exit:
    """How one worker ended."""

    rank: int
    pid: int
    code: int


class Crew:
    """Running workers, by rank. Use `start`."""

    def __init__(self, workers: Sequence[WorkerProcess], take: Callable[[int, Event], None]) -> None:
        self._workers = list(workers)
        self._answers: set[asyncio.Task[None]] = set()
        self._readers = [asyncio.create_task(_read(worker, rank, take)) for rank, worker in enumerate(self._workers)]

    @classmethod
    async def start(
        cls,
        configs: Sequence[WorkerConfig],
        take: Callable[[int, Event], None],
        *,
        hire: Callable[[WorkerConfig], Awaitable[WorkerProcess]] = WorkerProcess.start,
    ) -> Self:
        """Start a worker for each rank; ``take`` gets what they say, with their ranks. ``hire`` starts one.

        Raises:
            OSError: one cannot be started; none is left behind.
        """
        workers: list[WorkerProcess] = []
        try:
            for config in configs:
                workers.append(await hire(config))  # noqa: PERF401 (those that started are needed)
        except BaseException:
            for worker in workers:
                await worker.end(0.0)
            raise
        return cls(workers, take)

    @property
    def pids(self) -> tuple[int, ...]:
        return tuple(worker.pid for worker in self._workers)

    @property
    def has_lost_one(self) -> bool:
        """Whether a worker has ended."""
        return any(reader.done() for reader in self._readers)

    @property
    def first_lost(self) -> int:
        """The rank that has ended; the lowest, if several have."""
        return next((rank for rank, reader in enumerate(self._readers) if reader.done()), 0)

    def kill(self, rank: int) -> None:
        """A worker that cannot be told any more."""
        self._workers[rank].kill()

    def answer(self, rank: int, answer: Awaitable[Command]) -> None:
        """Send one rank what is still to be worked out."""

        async def send() -> None:
            self._workers[rank].send(await answer)

        task = asyncio.create_task(send())
        self._answers.add(task)
        task.add_done_callback(self._answers.discard)

    def send(self, command: Command) -> None:
        """Orders go to the first rank, which leads the others."""
        self._workers[0].send(command)

    async def wait_for_end(self, other: asyncio.Future[None]) -> None:
        """Until a worker ends, or ``other`` is done."""
        await asyncio.wait({*self._readers, other}, return_when=asyncio.FIRST_COMPLETED)

    async def stop(self, timeout_s: float) -> None:
        """Tell all to stop, and give them time to."""
        for worker in self._workers:
            worker.send(StopCommand())
        await self._wait_for_all(timeout_s)
        for worker, reader in zip(self._workers, self._readers, strict=True):
            if not reader.done():
                logger.warning("worker did not stop in time, killing it pid=%d", worker.pid)

    async def end(self) -> list[Exit]:
        """See that all are gone, killed if they are not by themselves, with all that they said taken in."""
        try:
            if self.has_lost_one:
                await self._wait_for_all(PEERS_GRACE_S)
        finally:
            exits = await asyncio.gather(*(self._end_one(rank) for rank in range(len(self._workers))))
        return exits

    async def _end_one(self, rank: int) -> Exit:
        worker, reader = self._workers[rank], self._readers[rank]
        code = await worker.end(EXIT_GRACE_S if reader.done() else 0.0)
        await asyncio.wait({reader}, timeout=EXIT_GRACE_S)
        reader.cancel()
        return Exit(rank=rank, pid=worker.pid, code=code)

    async def _wait_for_all(self, timeout_s: float) -> None:
        await asyncio.wait(self._readers, timeout=timeout_s)


async def _read(worker: WorkerProcess, rank: int, take: Callable[[int, Event], None]) -> None:
    async with contextlib.aclosing(worker.events()) as events:
        async for event in events:
            take(rank, event)
