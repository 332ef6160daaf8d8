"""A controller among others on one database: waits for the lead, keeps it, and stops at once when it may be lost.

    standby ──lock won──► restoring ──state restored──► leading ──doubt──► suspended
       ▲                                                   ▲                  │
       │                                                   └──lock won again──┤ nobody led meanwhile: same term
       └───────────────────── somebody else leads: the state is dropped ──────┘

It leads while the last answered ping, counted from when it was *sent*, is younger than `VALID` times ``failover_s``;
the server ends the session no sooner than ``failover_s`` after it. So whoever is stopped and goes on again finds its
lead over before it does anything, and what it had begun fails at the fence (`controller.journal_postgres`).
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Protocol, TypeVar

from controller.journal_store import StoreError
from controller.leader_lock import LeaderLock, Standing
from controller.leadership import StandbyError
from service.tasks import wait_for_exit
from service.threads import detached

logger = logging.getLogger(__name__)

T = TypeVar("T")

VALID = 0.8
PINGS_PER_FAILOVER = 5
TRIES_PER_FAILOVER = 10


class Seat(Protocol):
    """What changes with the lead."""

    async def take_over(self, term: int) -> None:
        """Restore the state, as after a restart."""

    def resume(self) -> None:
        """Go on with the state that there is."""

    def suspend(self) -> None:
        """Let nobody wait for a decision."""

    def step_down(self) -> None:
        """Drop the state: somebody else's is newer."""


class Contender:
    """The lead of one process, as far as it has it."""

    def __init__(self, make_lock: Callable[[], LeaderLock], *, failover_s: float) -> None:
        self._make_lock = make_lock
        self._failover_s = failover_s
        self._lock = make_lock()
        self._held_until_s = 0.0
        self._restored = False
        self._asking: asyncio.Task[None] | None = None
        self._trouble: str | None = "standby, looking for the leader"
        self._leader: Standing | None = None
        self.term: int | None = None

    @property
    def leads(self) -> bool:
        return self._restored and time.monotonic() < self._held_until_s

    @property
    def refusal(self) -> StandbyError:
        other = self._leader if self._leader is not None and not self._leader.won else None
        if self._trouble is None and other is not None:
            return StandbyError(f"standby, leader is {other.url or other.holder}", leader_url=other.url)
        if self._trouble is None and self.term is not None and not self._restored:
            return StandbyError("restoring the state from the journal", leader_url=None)
        return StandbyError(self._trouble or "the lead is in doubt", leader_url=None)

    async def confirm(self) -> None:
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._ping())
        try:
            await asyncio.shield(self._asking)
        except StoreError as exc:
            if self._held_until_s:
                self._doubt(exc)
        if not self.leads:
            raise self.refusal

    async def run(self, exit_event: asyncio.Event, seat: Seat) -> None:
        """Contend until ``exit_event``; a lead that there is then is kept until `close`.

        Raises:
            WadilocoError: the journal cannot be restored; somebody else may lead.
        """
        while not exit_event.is_set():
            try:
                standing = await self._wait_for_lead(exit_event, seat)
                if standing is not None:
                    await self._lead(standing, exit_event, seat)
            except StoreError as exc:
                self._doubt(exc)
                seat.suspend()
            if not exit_event.is_set():
                self._drop_lock()
                await wait_for_exit(exit_event, self._failover_s / TRIES_PER_FAILOVER)

    def close(self) -> None:
        """Let the next one lead at once."""
        self._held_until_s = 0.0
        self._drop_lock()

    async def _wait_for_lead(self, exit_event: asyncio.Event, seat: Seat) -> Standing | None:
        await self._ask(self._lock.connect)
        while not exit_event.is_set():
            sent_s = time.monotonic()
            # What is not restored is begun anew, under a term of its own: its batches are numbered from the first.
            standing = await self._ask(partial(self._lock.try_win, self.term if self._restored else None))
            self._trouble = None
            if self._leader is None or (standing.won, standing.term) != (self._leader.won, self._leader.term):
                logger.info("lead won=%s term=%d holder=%s", standing.won, standing.term, standing.holder)
            self._leader = standing
            if self.term not in {None, standing.term}:
                self._restored, self.term = False, None
                seat.step_down()
            if standing.won:
                self._held_until_s = sent_s + VALID * self._failover_s
                return standing
            await wait_for_exit(exit_event, self._failover_s / TRIES_PER_FAILOVER)
        return None

    async def _lead(self, standing: Standing, exit_event: asyncio.Event, seat: Seat) -> None:
        if self._restored:
            seat.resume()
            await self._keep(exit_event)
            return
        self.term = standing.term
        restoring = asyncio.create_task(self._restore(standing.term, seat))
        try:
            await self._keep(exit_event, until=restoring)
            if restoring.done():
                restoring.result()
                await self._keep(exit_event)
        finally:
            restoring.cancel()

    async def _restore(self, term: int, seat: Seat) -> None:
        await seat.take_over(term)
        self._restored = True

    async def _keep(self, exit_event: asyncio.Event, *, until: asyncio.Task[None] | None = None) -> None:
        """Ping until the exit, or until that task is done."""
        while not exit_event.is_set() and (until is None or not until.done()):
            await self._ping()
            pause_s = self._failover_s / PINGS_PER_FAILOVER
            if until is None:
                await wait_for_exit(exit_event, pause_s)
            else:
                await asyncio.wait({until}, timeout=pause_s)

    async def _ping(self) -> None:
        lock, sent_s = self._lock, time.monotonic()
        await self._ask(lock.ping)
        if lock is not self._lock:  # dropped meanwhile
            return
        self._held_until_s = max(self._held_until_s, sent_s + VALID * self._failover_s)

    async def _ask(self, work: Callable[[], T]) -> T:
        try:
            async with asyncio.timeout(self._failover_s):
                return await detached(work, name="lead")
        except TimeoutError:
            raise StoreError(f"no answer from the database within {self._failover_s:g} s") from None

    def _doubt(self, exc: StoreError) -> None:
        if self._held_until_s:
            logger.warning("lead in doubt, not deciding term=%s error=%s", self.term, exc)
        self._held_until_s = 0.0
        what = "the lead is in doubt" if self.term is not None else "standby"
        self._trouble = f"{what}: journal {self._lock.name}: {exc}"

    def _drop_lock(self) -> None:
        """Another session for the next try; the old one may hang, and ends when it can."""
        lock, self._lock = self._lock, self._make_lock()
        threading.Thread(target=lock.close, name="lead", daemon=True).start()
