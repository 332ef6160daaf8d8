"""Background tasks of a process: one owner, an exit event with a deadline, and a health that names a dead task."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable

logger = logging.getLogger(__name__)

STOP_DEADLINE_S = 5.0


class Background:
    """The long-running tasks of one process.

    A task that raises is logged and stays in `failures`, which turns ``/healthz`` to 503; the others go on.
    """

    def __init__(self) -> None:
        self.exit = asyncio.Event()
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def start(self, name: str, body: Callable[[], Awaitable[None]]) -> None:
        """Run ``body()`` as the task ``name``; it should return soon after `exit` is set."""
        self._tasks[name] = asyncio.create_task(self._guard(name, body), name=name)

    @property
    def failures(self) -> dict[str, str]:
        """Names of tasks that ended although the process goes on, with the reason."""
        if self.exit.is_set():
            return {}
        return {name: _outcome(task) for name, task in self._tasks.items() if task.done()}

    async def stop(self) -> None:
        """Set `exit`, give the tasks `STOP_DEADLINE_S` to return, then cancel them."""
        self.exit.set()
        if not self._tasks:
            return
        _, pending = await asyncio.wait(self._tasks.values(), timeout=STOP_DEADLINE_S)
        for task in pending:
            logger.warning("task did not stop in time, cancelled task=%s", task.get_name())
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def _guard(self, name: str, body: Callable[[], Awaitable[None]]) -> None:
        try:
            await body()
        except Exception:
            logger.exception("task died task=%s", name)
            raise


@contextlib.asynccontextmanager
async def background() -> AsyncIterator[Background]:
    """A `Background` that is stopped when the block ends."""
    tasks = Background()
    try:
        yield tasks
    finally:
        await tasks.stop()


async def wait_for_exit(exit_event: asyncio.Event, timeout_s: float) -> bool:
    """Wait until ``exit_event`` is set, at most ``timeout_s`` seconds; say whether it is. All others run meanwhile."""
    if timeout_s <= 0:
        await asyncio.sleep(0)
    elif not exit_event.is_set():
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(exit_event.wait(), timeout_s)
    return exit_event.is_set()


async def first_of(*events: asyncio.Event) -> None:
    """Wait until one of the events is set."""
    tasks = [asyncio.create_task(event.wait()) for event in events]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()


async def every(period_s: float, exit_event: asyncio.Event, tick: Callable[[], Awaitable[None]]) -> None:
    """Call ``tick()`` every ``period_s`` seconds until ``exit_event``; an overrun is logged and skips missed ticks."""
    due = time.monotonic()
    while not exit_event.is_set():
        await tick()
        due += period_s
        late_s = time.monotonic() - due
        if late_s > period_s:
            logger.warning("tick overran its period period_s=%.3f late_s=%.3f", period_s, late_s)
            due = time.monotonic()
        await wait_for_exit(exit_event, due - time.monotonic())


def _outcome(task: asyncio.Task[None]) -> str:
    if task.cancelled():
        return "cancelled"
    error = task.exception()
    return f"{type(error).__name__}: {error}" if error else "returned"
