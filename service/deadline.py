"""Deadlines for HTTP requests, and giving one up, without losing the connection that it ran on.

httpx's connection pool tidies up in AnyIO's shielded scopes. `asyncio.timeout` and `asyncio.Task.cancel` do not know
those: one that strikes while a connection is put back leaves it taken for good, and a small pool has none left after a
few (seen within some hundred requests to a server that answers about when the deadline ends). AnyIO's scopes wait.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import anyio

T = TypeVar("T")


def deadline(seconds: float) -> AbstractContextManager[anyio.CancelScope]:
    """Raises `TimeoutError` when the block takes longer."""
    return anyio.fail_after(max(0.0, seconds))


async def unless(event: asyncio.Event, work: Coroutine[Any, Any, T]) -> T | None:
    """The result of ``work``; None when ``event`` is set first, and ``work`` is given up."""
    scope = anyio.CancelScope()

    async def run() -> T | None:
        with scope:
            return await work
        return None

    task, waiting = asyncio.create_task(run()), asyncio.create_task(event.wait())
    try:
        await asyncio.wait({task, waiting}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        waiting.cancel()
        scope.cancel()
