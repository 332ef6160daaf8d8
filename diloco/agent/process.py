"""One rank worker as a child process: commands in, events out."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass

from pydantic import ValidationError

from diloco.agent.config import IslandSettings
from diloco.parked_config import ParkedConfig
from diloco.protocol import EVENTS, Command, Event, WorkerConfig
from service.child import module_command, module_environment

logger = logging.getLogger(__name__)

MAX_LINE_BYTES = 1 << 20
KILL_WAIT_S = 2.0
BELOW_NORMAL = "1"
"""Of the priorities of MPS clients."""


@dataclass(slots=True)
class WorkerProcess:
    """A running worker. Use `start`."""

    process: asyncio.subprocess.Process

    @classmethod
    async def start(cls, config: WorkerConfig) -> WorkerProcess:
        """Start a worker with its configuration."""
        worker = await cls.spawn("diloco.worker", threads=config.threads, environment=gpu_environment(config))
        worker.configure(config)
        return worker

    @classmethod
    async def spawn(cls, module: str, *arguments: str, threads: int, environment: Mapping[str, str]) -> WorkerProcess:
        """Start a process that reads its configuration from the pipe, so that the token is in no process list."""
        environment = {
            **os.environ,
            **module_environment(),
            "OMP_NUM_THREADS": str(threads),
            # Otherwise OpenMP threads spin on the core of the engine while the trainer is descheduled.
            "OMP_WAIT_POLICY": "PASSIVE",
            "PYTHONUNBUFFERED": "1",
            **environment,
        }
        process = await asyncio.create_subprocess_exec(
            *module_command(module),
            *arguments,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=MAX_LINE_BYTES,
            env=environment,
            # Ctrl-C in a terminal goes to the agent alone, which stops the worker in order.
            start_new_session=True,
        )
        return cls(process)

    def configure(self, config: WorkerConfig | ParkedConfig) -> None:
        """Tell it what to be, once; a parked one, first that it is."""
        self._write(config.model_dump_json())

    def hang_up(self) -> None:
        """Nothing more will be said to it."""
        if self.process.stdin is not None:
            self.process.stdin.close()

    @property
    def pid(self) -> int:
        return self.process.pid

    def send(self, command: Command) -> None:
        self._write(command.model_dump_json())

    async def events(self) -> AsyncGenerator[Event, None]:
        """What the worker says, until its end of the pipe is closed."""
        assert self.process.stdout is not None
        async for line in self.process.stdout:
            try:
                yield EVENTS.validate_json(line)
            except ValidationError as exc:
                logger.warning("dropped a line that is no event pid=%d error=%s", self.pid, exc.errors()[0]["msg"])

    async def first_event(self) -> Event | None:
        """The next thing that it says; None when it says nothing any more."""
        async with contextlib.aclosing(self.events()) as events:
            async for event in events:
                return event
        return None

    def kill(self) -> None:
        """At once, also where it is stopped or hangs."""
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()

    async def end(self, grace_s: float) -> int:
        """See that it is gone, killed if it is not by itself within ``grace_s``; returns its exit code."""
        try:
            return await asyncio.wait_for(self.process.wait(), grace_s)
        except (TimeoutError, asyncio.CancelledError):
            self.kill()
            return await self._wait_killed()

    async def _wait_killed(self) -> int:
        """A killed process that runs at idle priority on a busy host takes its time to leave; it computes no more."""
        try:
            return await asyncio.wait_for(self.process.wait(), KILL_WAIT_S)
        except TimeoutError:
            logger.warning("killed worker has not left yet pid=%d", self.pid)
            return -signal.SIGKILL

    def _write(self, line: str) -> None:
        assert self.process.stdin is not None
        if not self.process.stdin.is_closing():
            self.process.stdin.write(line.encode() + b"\n")


def gpu_environment(config: WorkerConfig | IslandSettings) -> dict[str, str]:
    """What CUDA reads when a process first uses it. Without an MPS daemon it changes nothing."""
    chosen = (
        {"CUDA_MPS_CLIENT_PRIORITY": os.environ.get("CUDA_MPS_CLIENT_PRIORITY", "1")} if config.idle_priority else {}
    )
    if config.mps_thread_percentage is not None:
        chosen["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] = str(config.mps_thread_percentage)
    return chosen
