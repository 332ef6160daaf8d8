"""The controller as an HTTP application."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI

from controller.api import build_router
from controller.clock import Clock, steady_clock
from controller.config import ControllerSettings
from controller.core import Controller
from controller.journal import Journal
from controller.loop import Loop
from controller.metrics import FleetCollector, Metrics
from controller.state import FleetState
from service.app import build_app
from service.tasks import Background, every

DESCRIPTION = "Decides when the islands of one fleet sync: registry, policy, budget, journal."
# 20,000 samples of a relay.
MAX_BODY_BYTES = 64 << 20


def build_controller_app(settings: ControllerSettings, *, clock: Clock | None = None) -> FastAPI:
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
    controller = Controller(state, metrics, clock)
    loop = Loop(controller)
    metrics.registry.register(FleetCollector(controller.gauges))

    @asynccontextmanager
    async def lifespan(_: FastAPI, tasks: Background) -> AsyncIterator[None]:
        async def release_polls() -> None:
            await tasks.exit.wait()
            state.mailboxes.close()

        tasks.start("release polls", release_polls)
        tasks.start("decide", lambda: every(settings.tick_s, tasks.exit, loop.tick))
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
    app.include_router(build_router(controller, loop))
    app.state.controller = controller
    app.state.loop = loop
    return app
