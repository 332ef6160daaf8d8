"""Blocking calls beside an event loop, in threads that the end of the process does not wait for."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from functools import partial
from typing import TypeVar

T = TypeVar("T")


async def detached(work: Callable[[], T], *, name: str) -> T:
    """The result of ``work()``. Cancelled, the thread goes on alone and its result is lost.

    As `asyncio.to_thread`, whose threads hold the process back while they hang in a network.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def settle(act: Callable[[], None]) -> None:
        if not done.done():
            act()

    def run() -> None:
        act: Callable[[], None]
        try:
            act = partial(done.set_result, work())
        except BaseException as exc:  # noqa: BLE001 - handed to the one who waits
            act = partial(done.set_exception, exc)
        with contextlib.suppress(RuntimeError):  # The loop has ended, and nobody waits.
            loop.call_soon_threadsafe(settle, act)

    threading.Thread(target=run, name=name, daemon=True).start()
    return await done
