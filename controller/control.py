"""An operator's orders: planned, then carried out unless they are a dry run; answered once they are on disk."""

from __future__ import annotations

import logging

from controller.control_plan import describe, plan_steps
from controller.core import Controller
from controller.handover import ControlOutcome
from controller.loop import Loop
from controller.schema import ControlAction, ControlReply, ControlRequest
from service.errors import WadilocoError

logger = logging.getLogger(__name__)


class Operator:
    """Does what ``POST /v1/control`` asks for."""

    def __init__(self, controller: Controller, loop: Loop) -> None:
        self._controller = controller
        self._loop = loop

    async def obey(self, request: ControlRequest) -> ControlReply:
        try:
            reply = self._obey(request)
        except WadilocoError:
            self._count(request.action, ControlOutcome.REFUSED)
            raise
        self._count(request.action, ControlOutcome.DRY_RUN if request.dry_run else ControlOutcome.DONE)
        if not request.dry_run:
            logger.info("control action=%s effect=%s", reply.action, reply.effect)
            await self._loop.publish()
        return reply

    def _obey(self, request: ControlRequest) -> ControlReply:
        state = self._controller.state
        steps = plan_steps(request, state.registry, num_slots=state.settings.num_slots)
        if steps:
            effect = describe(steps)
            if not request.dry_run:
                for step in steps:
                    self._controller.desk.handover.carry_out(step, now_s=self._controller.clock())
        elif request.action is ControlAction.SYNC_NOW:
            effect = self._loop.sync_now(dry_run=request.dry_run)
        else:
            effect = self._loop.set_paused(request.action is ControlAction.PAUSE, dry_run=request.dry_run)
        return ControlReply(action=request.action, effect=effect, dry_run=request.dry_run, steps=steps)

    def _count(self, action: ControlAction, outcome: ControlOutcome) -> None:
        self._controller.metrics.control_actions.labels(action, outcome).inc()
