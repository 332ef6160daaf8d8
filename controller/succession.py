"""The state of the fleet changes hands: restored from the database when the lead is won, dropped when another led."""

from __future__ import annotations

import asyncio
from functools import partial

from controller.clock import Clock
from controller.config import ControllerSettings
from controller.core import Controller, Tenure
from controller.journal import Journal
from controller.journal_postgres import Database, PostgresStore
from controller.journal_store import StoreError
from controller.state import FleetState
from service.errors import UnavailableError
from service.threads import detached


class FleetSeat:
    """A `controller.contender.Seat`: the state that a controller works on while it leads."""

    def __init__(self, controller: Controller, settings: ControllerSettings, database: Database, clock: Clock) -> None:
        self._controller = controller
        self._settings = settings
        self._database = database
        self._clock = clock

    async def take_over(self, term: int) -> None:
        restoring = asyncio.ensure_future(detached(partial(self._restore, term), name="restore"))
        try:
            self._controller.enter(await asyncio.shield(restoring))
        except asyncio.CancelledError:
            restoring.add_done_callback(_discard)
            raise
        except UnavailableError as exc:
            raise StoreError(str(exc)) from exc

    def _restore(self, term: int) -> Tenure:
        journal = Journal(PostgresStore(self._database, term=term))
        try:
            return self._controller.prepare(FleetState(self._settings, journal, now_s=self._clock()))
        except BaseException:
            journal.close_soon()
            raise

    def resume(self) -> None:
        """Nobody could renew a lease meanwhile."""
        self._controller.state.registry.grace(self._clock())

    def suspend(self) -> None:
        if self._controller.has_state:
            self._controller.state.mailboxes.interrupt()

    def step_down(self) -> None:
        if self._controller.has_state:
            state = self._controller.state
            self._controller.enter(None)
            state.mailboxes.close()
            state.journal.close_soon()


def _discard(restoring: asyncio.Future[Tenure]) -> None:
    if not restoring.cancelled() and restoring.exception() is None:
        restoring.result().state.journal.close_soon()
