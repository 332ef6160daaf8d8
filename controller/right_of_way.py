"""Right of way for ticks: who has work that can wait lets a tick, its commit and its directives go first.

Everything shares one interpreter. Batches of samples fill half of it in a large fleet, and a tick that waits for its
commit would otherwise wait behind them, several times: the journal's thread too runs only when they let it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

LONGEST_S = 0.1
"""After which the others go on: a disk that hangs must not hold up the samples."""


class RightOfWay:
    """Taken by one at a time; used within one event loop."""

    def __init__(self) -> None:
        self._free = asyncio.Event()
        self._free.set()

    @contextmanager
    def taken(self) -> Iterator[None]:
        """What becomes ready to run within the block runs before those who give way."""
        timer = asyncio.get_running_loop().call_later(LONGEST_S, self._free.set)
        self._free.clear()
        try:
            yield
        finally:
            timer.cancel()
            self._free.set()

    async def give(self) -> None:
        """Let all others run that are ready, and whoever has the right of way to the end."""
        await asyncio.sleep(0)
        await self._free.wait()
