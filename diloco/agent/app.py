"""The agent's application: its tasks, and what it says over HTTP."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Protocol

import httpx
from fastapi import FastAPI
from prometheus_client import CollectorRegistry

from controller.schema import Directive, DirectiveKind
from diloco.agent.config import IslandSettings
from diloco.agent.first_word import goes_on_alone, has_run
from diloco.agent.handover import Handovers
from diloco.agent.link import ControllerLink
from diloco.agent.metrics import IslandMetrics
from diloco.agent.recovery import Recovery
from diloco.agent.rendezvous import RankStore
from diloco.agent.replica_api import build_replica_router
from diloco.agent.replica_metrics import ReplicaCollector
from diloco.agent.rules import (
    Solitude,
    autonomous_command,
    autonomous_sync_due,
    limits_of,
    refused_fragments,
    sync_command,
    times_of,
)
from diloco.agent.state import AgentState
from diloco.agent.supervisor import Supervisor
from diloco.protocol import SyncCommand
from diloco.schema import AgentStatus, Progress
from service.app import build_app
from service.client import client_options
from service.peers import Peers
from service.tasks import Background, every

logger = logging.getLogger(__name__)

AUTONOMY_PERIOD_S = 0.5
FRESH_FAILURE_S = 1.0
"""An attempt to reach the controller that failed so lately proves that it is still away."""
IN_FLIGHT_MARGIN_S = 30.0
"""A sync whose report is so late will not report any more."""


class Trainer(Protocol):
    """What trains, as the agent directs it."""

    def start_sync(self, command: SyncCommand) -> None: ...

    def refuse_sync(self, command: SyncCommand, detail: str) -> None: ...

    def apply_pause(self, paused: bool) -> None: ...

    async def run(self, exit_event: asyncio.Event) -> None: ...


class Agent:
    """Wires state, trainer and controller link together."""

    def __init__(
        self,
        settings: IslandSettings,
        *,
        supervise: Callable[[IslandSettings, AgentState, IslandMetrics], Trainer] | None = None,
    ) -> None:
        """``supervise`` makes the trainer; by default one that keeps worker processes."""
        self.settings = settings
        self.state = AgentState(settings)
        self.registry = CollectorRegistry()
        self._metrics = IslandMetrics(self.registry, self.state)
        self._store = RankStore() if settings.ranks > 1 else None
        self._supervisor: Trainer = (
            Supervisor(settings, self.state, self._metrics, store=self._store)
            if supervise is None
            else supervise(settings, self.state, self._metrics)
        )
        self.recovery = self._protect()
        self.handovers = (
            Handovers(self.state, self._supervisor, self.recovery)
            if self.recovery is not None and isinstance(self._supervisor, Supervisor)
            else None
        )
        self.state.hands_over = self.handovers is not None
        self._waits_for_word = supervise is None and settings.controller is not None
        """Workers that begin a run have to know its number of fragments, which a controller decides."""
        if not self._waits_for_word:
            self.state.assign(settings.slot, settings.synchronizer)

    def _protect(self) -> Recovery | None:
        """Replicas, where there are snapshots, and others to replicate to."""
        supervisor = self._supervisor
        if not isinstance(supervisor, Supervisor) or not self.settings.controllers:
            return None
        vaults = supervisor.protector.vaults
        if vaults is None:
            return None
        recovery = supervisor.protector.recovery = Recovery(self.settings, self.state, vaults)
        return recovery

    @asynccontextmanager
    async def lifespan(self, app: FastAPI, tasks: Background) -> AsyncIterator[None]:
        self.state.url = self.settings.advertise_url or getattr(app.state, "url", None)
        async with AsyncExitStack() as stack:
            if self.recovery is not None:
                await stack.enter_async_context(self.recovery.running(tasks))
            if (store := self._store) is not None:
                tasks.start("rank store", lambda: store.run(tasks.exit))
            tasks.start("supervisor", lambda: self._supervisor.run(tasks.exit))
            tasks.start("autonomy", lambda: every(AUTONOMY_PERIOD_S, tasks.exit, self._sync_if_alone))
            urls = self.settings.controllers
            if urls:
                options = client_options(self.settings, urls[0], timeout_s=self.settings.request_timeout_s)
                http = await stack.enter_async_context(httpx.AsyncClient(**options))
                link = ControllerLink(
                    self.state,
                    http,
                    self._metrics,
                    peers=Peers(urls),
                    on_directive=self._obey,
                    on_pause=self._supervisor.apply_pause,
                )
                tasks.start("lease", lambda: link.keep_lease(tasks.exit))
                tasks.start("directives", lambda: link.follow_directives(tasks.exit))
                stack.push_async_callback(link.leave)
                slot, synchronizer = self.settings.slot, self.settings.synchronizer
                if self._waits_for_word and slot is not None and synchronizer is not None:
                    tasks.start("start alone", lambda: self._start_alone(slot, synchronizer, tasks.exit))
            yield

    async def _start_alone(self, slot: int, synchronizer: str, exit_event: asyncio.Event) -> None:
        """Work with slot and synchronizer of the settings, unless a controller says something first."""
        if await goes_on_alone(self.state, lambda: has_run(self.settings, synchronizer), exit_event):
            logger.warning("no controller yet, starting without it slot=%d", slot)
            self.state.assign(slot, synchronizer)

    def _obey(self, directive: Directive) -> None:
        match directive.kind:
            case DirectiveKind.PAUSE | DirectiveKind.RESUME:
                if self.handovers is not None:
                    self.handovers.call_off()
                self._supervisor.apply_pause(directive.kind is DirectiveKind.PAUSE)
            case DirectiveKind.RENEW:
                self.state.changed.set()
            case DirectiveKind.HAND_OVER:
                if self.handovers is not None:
                    self.handovers.begin(directive)
            case DirectiveKind.STOP:
                logger.info("told to stop reason=%s", directive.reason)
                self.state.assign(None, None)
            case DirectiveKind.SYNC:
                state = self.state
                lease = state.limits_lease
                command = sync_command(directive, times_of(lease), epoch=state.epoch, now_s=time.time())
                refusal = refused_fragments(directive, lease, num_fragments=state.num_fragments)
                if refusal is None:
                    self._supervisor.start_sync(command)
                else:
                    self._supervisor.refuse_sync(command, refusal)

    async def _sync_if_alone(self) -> None:
        state = self.state
        pending = state.sync_in_flight
        if pending is not None and time.time() > pending.deadline_s + IN_FLIGHT_MARGIN_S:
            state.sync_in_flight = pending = None
        now_s, last_sync_s = time.time(), state.progress.last_sync_at_s
        alone = Solitude(
            silent_s=time.monotonic() - state.controller_seen_s,
            syncs=state.syncs_alone,
            since_last_sync_s=None if last_sync_s is None else now_s - last_sync_s,
        )
        limits = limits_of(state.limits_lease)
        if not autonomous_sync_due(limits, alone, progress=state.progress, in_flight=pending is not None, now_s=now_s):
            return
        if self.settings.controller is not None and not self._just_failed():
            # It may have come back during the pause between two attempts: then it is the one to decide.
            state.changed.set()
            return
        logger.info("no controller and H at its maximum: syncing h=%d", state.progress.inner_steps_since_sync)
        state.syncs_alone += 1
        timeout_s = self.settings.autonomous_deadline_s
        self._supervisor.start_sync(autonomous_command(epoch=state.epoch, now_s=now_s, timeout_s=timeout_s))

    def _just_failed(self) -> bool:
        failed_s = self.state.controller_failed_s
        return failed_s is not None and time.monotonic() - failed_s < FRESH_FAILURE_S


def build(settings: IslandSettings) -> tuple[FastAPI, Agent]:
    """The application and the agent that it serves."""
    agent = Agent(settings)
    app = build_app(
        settings,
        lifespan=agent.lifespan,
        registry=agent.registry,
        readiness=agent.state.readiness,
        description="One island: trains beside a server, syncs when told.",
    )

    @app.get("/v1/status", tags=["island"], summary="Who this agent is and how its worker is")
    async def status() -> AgentStatus:
        return agent.state.status()

    @app.get("/v1/progress", tags=["island"], summary="How far the island is")
    async def progress() -> Progress:
        return agent.state.progress

    if (recovery := agent.recovery) is not None:
        app.include_router(build_replica_router(recovery.store, recovery.told))
        agent.registry.register(ReplicaCollector(recovery.told))
    return app, agent
