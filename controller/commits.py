"""When answers wait for the journal: at once, or with others.

Reports of a large round, and batches of samples, come a hundred a second. Each commit of its own would write the whole
round again; so what may wait a moment waits for the others that come in it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from controller.journal import Journal
from controller.leadership import Leadership
from service.errors import UnavailableError

TOGETHER_S = 0.1
"""Between two commits of what comes by the hundred."""


class Commits:
    """Whether what was queued is on disk, told to those who can go on without it."""

    def __init__(self, journal: Callable[[], Journal], leadership: Leadership) -> None:
        self._journal = journal
        self._leadership = leadership
        self._next_s = 0.0
        self._num_waiting = 0

    async def soon(self) -> bool:
        """As `now`, but while others wait for a commit, together with all that come within `TOGETHER_S` of the last.

        Whoever comes alone is served at once: one who sends again and again what was answered is not held up.
        """
        self._num_waiting += 1
        try:
            wait_s = self._next_s - time.monotonic()
            if self._num_waiting > 1 and wait_s > 0:
                await asyncio.sleep(wait_s)
            self._next_s = max(self._next_s, time.monotonic() + TOGETHER_S)
            return await self.now()
        finally:
            self._num_waiting -= 1

    async def now(self) -> bool:
        """Whether it is on disk; a disk that fails must not slow the fleet down.

        Raises:
            StandbyError: it is not, and another controller may lead.
        """
        journal = self._journal()
        if journal.failure is None:
            try:
                await journal.commit()
            except UnavailableError:
                pass  # The journal counts and logs it, and readiness names it.
            else:
                return True
        # It is being retried; waiting for that would only slow the fleet down. But what only memory has is a promise
        # of the leader alone.
        await self._leadership.confirm()
        return False
