"""The controller as an HTTP application."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI

from controller.api import build_router
from controller.clock import Clock, steady_clock
from controller.config import ControllerSettings
from controller.core import Controller
from controller.dashboard.service import Dashboard
from controller.headroom import CostSource
from controller.headroom_monitor import EVERY_S as HEADROOM_EVERY_S
from controller.journal import Journal
from controller.lab_api import build_lab_router
from controller.loop import Loop
from controller.metrics import FleetCollector, Metrics
from controller.refusals import CountRefusals
from controller.state import FleetState
from service.app import build_app
from service.tasks import Background, every

DESCRIPTION = "Decides when the islands of one fleet sync: registry, policy, budget, journal."
# 20,000 samples of a relay.
MAX_BODY_BYTES = 64 << 20


def build_controller_app(
    settings: ControllerSettings, *, clock: Clock | None = None, costs: CostSource | None = None
) -> FastAPI:
    """Open the journal, restore the state and build the application; its lifespan closes the journal.

    Raises:
        ConfigError: the journal cannot be used, or belongs to another run.
        ConflictError: another controller uses the journal.
    """
    clock = clock or steady_clock()
    journal = Journal(settings.journal)
    try:
        state = FleetState(settings, journal, now_s=clock())
    except BaseException:
        journal.close()
        raise
    metrics = Metrics()
    controller = Controller(state, metrics, clock, costs=costs)
    loop = Loop(controller)
    dashboard = Dashboard(controller)
    metrics.registry.register(FleetCollector(controller.gauges))

    @asynccontextmanager
    async def lifespan(_: FastAPI, tasks: Background) -> AsyncIterator[None]:
        async def release_polls() -> None:
            await tasks.exit.wait()
            state.mailboxes.close()

        tasks.start("release polls", release_polls)
        dashboard.start(tasks)
        tasks.start("decide", lambda: every(settings.tick_s, tasks.exit, loop.tick))
        tasks.start("headroom", lambda: every(HEADROOM_EVERY_S, tasks.exit, controller.lab.refresh))
        try:
            yield
        finally:
            journal.close()

    app = build_app(
        settings,
        lifespan=lifespan,
        registry=metrics.registry,
        readiness=lambda: journal.failure,
        description=DESCRIPTION,
        max_body_bytes=MAX_BODY_BYTES,
    )
    app.add_middleware(CountRefusals, refusals=metrics.refusals)
    app.include_router(build_router(controller, loop))
    app.include_router(build_lab_router(controller.lab))
    app.state.loop = loop
    app.include_router(dashboard.router)
    app.state.controller = controller
    app.state.dashboard = dashboard
    return app
