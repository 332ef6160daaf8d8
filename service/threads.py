"""Blocking calls beside an event loop, in threads that the end of the process does not wait for."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

T = TypeVar("T")


async def detached(work: Callable[[], T], *, name: str) -> T:
    """The result of ``work()``. Cancelled, the thread goes on alone and its result is lost.

    As `asyncio.to_thread`, whose threads hold the process back while they hang in a network.
    """
    done: asyncio.Future[T] = asyncio.get_running_loop().create_future()

    def run() -> None:
        act: Callable[[], None]
        try:
            act = partial(done.set_result, work())
        except BaseException as exc:  # noqa: BLE001 - handed to the one who waits
            act = partial(done.set_exception, exc)
        settle(done, act)

    threading.Thread(target=run, name=name, daemon=True).start()
    return await done


def settle(done: asyncio.Future[Any], act: Callable[[], None]) -> None:
    """From another thread: ``act``, which settles ``done``, unless that is settled or its loop has ended."""

    def unless_done() -> None:
        if not done.done():
            act()

    with contextlib.suppress(RuntimeError):  # The loop has ended, and nobody waits.
        done.get_loop().call_soon_threadsafe(unless_done)
