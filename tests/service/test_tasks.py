"""Background tasks: prompt exit, bounded stop, ticks that do not pile up."""

from __future__ import annotations

import asyncio
import time

import pytest

from service import tasks as tasks_module
from service.tasks import Background, background, every, wait_for_exit


def test_exit_wakes_a_waiting_task_at_once() -> None:
    async def run() -> float:
        async with background() as tasks:
            tasks.start("waiter", lambda: _wait_long(tasks))
            await asyncio.sleep(0)
            started = time.monotonic()
            await tasks.stop()
            return time.monotonic() - started

    assert asyncio.run(run()) < tasks_module.STOP_DEADLINE_S


async def _wait_long(tasks: Background) -> None:
    await wait_for_exit(tasks.exit, 3600.0)


def test_a_task_that_ignores_exit_is_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks_module, "STOP_DEADLINE_S", 0.05)
    cancelled: list[bool] = []

    async def stubborn() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(True)
            raise

    async def run() -> None:
        async with background() as tasks:
            tasks.start("stubborn", stubborn)
            await asyncio.sleep(0)

    asyncio.run(run())
    assert cancelled == [True]


def test_ticks_that_overrun_are_skipped_not_queued(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> int:
        exit_event = asyncio.Event()
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            ticks += 1
            if ticks == 1:
                await asyncio.sleep(0.2)  # twenty periods
            if ticks == 3:
                exit_event.set()

        await every(0.01, exit_event, tick)
        return ticks

    assert asyncio.run(run()) == 3
    assert "overran" in caplog.text


def test_ticks_that_always_overrun_let_others_run() -> None:
    async def run() -> int:
        exit_event = asyncio.Event()
        ticks = 0

        async def tick() -> None:  # has work, and waits for nothing
            nonlocal ticks
            ticks += 1
            time.sleep(0.002)  # noqa: ASYNC251
            if ticks == 50:
                exit_event.set()

        async def end() -> None:
            exit_event.set()

        await asyncio.gather(every(0.001, exit_event, tick), end())
        return ticks

    assert asyncio.run(run()) == 1
