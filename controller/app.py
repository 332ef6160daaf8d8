"""The controller as an HTTP application."""

from __future__ import annotations

import secrets
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, closing
from functools import partial
from typing import TYPE_CHECKING

from fastapi import Depends, FastAPI, Request, Response

from controller.api import build_router
from controller.clock import Clock, steady_clock
from controller.config import ControllerSettings
from controller.core import Controller
from controller.dashboard.service import Dashboard
from controller.database_url import DatabaseUrl
from controller.death_watch import DeathWatch
from controller.headroom import CostSource
from controller.headroom_monitor import EVERY_S as HEADROOM_EVERY_S
from controller.journal import Journal
from controller.lab_api import build_lab_router
from controller.leadership import RETRY_AFTER_S, StandbyError
from controller.loop import Loop
from controller.metrics import FleetCollector, Metrics
from controller.plain_routes import plain_routes
from controller.recall import Recall
from controller.refusals import CountRefusals
from controller.state import FleetState, restore_run_id
from service.answers import error_response
from service.app import build_app
from service.extras import require_extra
from service.store_api import STORE_PATH, SharedStore, build_store_router
from service.tasks import Background, every

if TYPE_CHECKING:
    from controller.contender import Contender, Seat

DESCRIPTION = "Decides when the islands of one fleet sync: registry, policy, budget, journal."
# 20,000 samples of a relay.
MAX_BODY_BYTES = 64 << 20
RECALL_EVERY_S = 1.0
"""Between two looks for a state whose past is still to be read."""
MAX_ORDER_BYTES = 2 << 20
"""Anything else: a heartbeat with a thousand sync reports has half of it. More would hold up the event loop."""


def build_controller_app(
    settings: ControllerSettings, *, clock: Clock | None = None, costs: CostSource | None = None
) -> FastAPI:
    """Open the journal and build the application; its lifespan closes the journal.

    With a file the state is restored here, with a database when the lead is won.

    Raises:
        ConfigError: the journal cannot be used, or belongs to another run.
        ConflictError: another controller uses the file.
        UnavailableError: the packages for PostgreSQL are missing.
    """
    clock = clock or steady_clock()
    if isinstance(settings.journal, DatabaseUrl):
        return _build_contending(settings, clock, settings.journal, costs)
    journal = Journal(settings.journal)
    try:
        state = FleetState(settings, journal, now_s=clock())
    except BaseException:
        journal.close()
        raise
    return _build(settings, Controller(state, Metrics(), clock, costs=costs))


def _build_contending(
    settings: ControllerSettings, clock: Clock, url: DatabaseUrl, costs: CostSource | None
) -> FastAPI:
    require_extra("postgres")
    # Only here: a controller with a file needs none of it.
    from controller.contender import Contender
    from controller.journal_postgres import Database
    from controller.leader_lock import LeaderLock
    from controller.succession import FleetSeat

    database = Database(url)
    with closing(database.reader()) as reader:
        restore_run_id(settings, reader.meta())
    holder = f"{socket.gethostname()}-{secrets.token_hex(4)}"
    make_lock = partial(LeaderLock, database, holder=holder, url=settings.advertise_url, failover_s=settings.failover_s)
    contender = Contender(make_lock, failover_s=settings.failover_s)
    controller = Controller(None, Metrics(), clock, leadership=contender, costs=costs)
    return _build(settings, controller, contender, FleetSeat(controller, settings, database, clock))


def _build(
    settings: ControllerSettings, controller: Controller, contender: Contender | None = None, seat: Seat | None = None
) -> FastAPI:
    loop = Loop(controller)
    watch = DeathWatch(controller, loop, settings)
    dashboard = Dashboard(controller)
    recall = Recall(controller)
    # In memory alone: after a restart it is empty, and groups are made anew under a new epoch.
    store = SharedStore()
    controller.metrics.registry.register(FleetCollector(controller.gauges, controller.leadership))

    @asynccontextmanager
    async def lifespan(_: FastAPI, tasks: Background) -> AsyncIterator[None]:
        async def release_polls() -> None:
            await tasks.exit.wait()
            store.close()
            if controller.has_state:
                controller.state.mailboxes.close()

        tasks.start("release polls", release_polls)
        dashboard.start(tasks)
        if contender is not None and seat is not None:
            tasks.start("lead", partial(contender.run, tasks.exit, seat))
        tasks.start("recall", lambda: every(RECALL_EVERY_S, tasks.exit, recall.tick))
        tasks.start("watch", lambda: every(settings.watch_every_s, tasks.exit, loop.note_running))
        tasks.start("greet", lambda: watch.greet_new(tasks.exit))
        tasks.start("decide", lambda: every(settings.tick_s, tasks.exit, loop.tick))
        tasks.start("follow costs", lambda: every(settings.tick_s, tasks.exit, loop.follow_costs))
        tasks.start("headroom", lambda: every(HEADROOM_EVERY_S, tasks.exit, loop.refresh_headroom))
        try:
            yield
        finally:
            # The lead last: what is queued can only be written while it is this one's.
            if controller.has_state:
                controller.state.keep_newest_samples()
                controller.state.journal.close()
            if contender is not None:
                contender.close()

    app = build_app(
        settings,
        lifespan=lifespan,
        registry=controller.metrics.registry,
        readiness=lambda: controller.obstacle,
        description=DESCRIPTION,
        max_body_bytes=MAX_ORDER_BYTES,
        larger_bodies={"/v1/samples": MAX_BODY_BYTES},
    )
    app.add_middleware(CountRefusals, refusals=controller.metrics.refusals)
    app.add_exception_handler(StandbyError, answer_standby)
    for router in (build_router(controller, loop, watch), build_lab_router(controller), build_store_router(store)):
        app.include_router(router, dependencies=[Depends(leader_only(controller))])
    app.include_router(dashboard.router)
    app.router.routes[:0] = plain_routes(controller, watch)
    app.state.loop = loop
    app.state.controller = controller
    app.state.dashboard = dashboard
    return app


def leader_only(controller: Controller) -> Callable[[Request], Awaitable[None]]:
    """A dependency of routes: what changes something, directives and the store are the leader's alone."""

    async def check(request: Request) -> None:
        path = request.url.path
        if request.method not in {"GET", "HEAD"} or path.endswith("/directives") or path.startswith(STORE_PATH):
            controller.check_leads()

    return check


async def answer_standby(_: Request, exc: Exception) -> Response:
    assert isinstance(exc, StandbyError)
    response = error_response(exc.http_status, "StandbyError", exc.message, None, exc.remedy)
    response.headers["Retry-After"] = str(RETRY_AFTER_S)
    if exc.leader_url is not None:
        response.headers["Leader-URL"] = exc.leader_url
    return response
