"""A slot that is to be handed over: the worker ends its step and takes a snapshot, which is sent to the taker; the
controller is told, and moves the slot. Nothing is lost, unless the time that the controller gave is over before.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from typing import Protocol

from controller.schema import Directive
from diloco.agent.recovery import Recovery
from diloco.agent.state import AgentState
from diloco.recovery_schema import HandoverReport, Peer

logger = logging.getLogger(__name__)

POLL_S = 0.01
GRACE_S = 5.0
"""After the controller's deadline: it moves the slot then, and where nothing comes of that the worker goes on."""


class Holdable(Protocol):
    """The workers, as a handover needs them."""

    def hold(self) -> None:
        """End the step, take a snapshot, and wait."""

    def let_go(self) -> None:
        """Go on."""

    def held_generation(self) -> tuple[int, int] | None:
        """Number and step of the snapshot that was taken since `hold`; None until it is there."""


class Handovers:
    """Of one agent; one at a time."""

    def __init__(self, state: AgentState, workers: Holdable, recovery: Recovery) -> None:
        self._state = state
        self._workers = workers
        self._recovery = recovery
        self._task: asyncio.Task[None] | None = None

    def begin(self, directive: Directive) -> None:
        """Hand over as told, in a task of its own."""
        self.call_off()
        self._task = asyncio.create_task(self._run(directive), name="hand over")

    def call_off(self) -> None:
        """The worker goes on, if it was held."""
        task, self._task = self._task, None
        if task is not None and not task.done():
            task.cancel()
        if task is not None:
            self._workers.let_go()

    async def _run(self, directive: Directive) -> None:
        left_s = max(0.0, (directive.deadline_s or time.time()) - time.time())
        ends_s = time.monotonic() + left_s
        slot = None if self._state.assignment is None else self._state.assignment.slot
        if slot is None:
            return
        try:
            await self._hand_over(slot, directive.taker, ends_s=ends_s)
            await asyncio.sleep(max(0.0, ends_s - time.monotonic()) + GRACE_S)
            logger.warning("handed over, and the slot did not move: training on slot=%d", slot)
        finally:
            self._workers.let_go()

    async def _hand_over(self, slot: int, taker: Peer | None, *, ends_s: float) -> None:
        self._workers.hold()
        while (held := self._workers.held_generation()) is None:
            if time.monotonic() >= ends_s:
                logger.warning("no snapshot to hand over in time slot=%d", slot)
                return
            await asyncio.sleep(POLL_S)
        number, step = held
        kept_by = await self._send(_goals(taker, self._state.buddies), number, ends_s=ends_s)
        logger.info("state handed over slot=%d generation=%d step=%d to=%s", slot, number, step, kept_by or "nobody")
        self._state.handed_over = HandoverReport(slot=slot, generation=number, step=step, kept_by=kept_by)
        self._state.changed.set()

    async def _send(self, goals: Sequence[Peer], number: int, *, ends_s: float) -> tuple[str, ...]:
        """Who has it: the taker, else the first buddy that can be reached."""
        sender = self._recovery.sender
        for place, peer in enumerate(goals):
            left_s = ends_s - time.monotonic()
            until_s = ends_s if place == len(goals) - 1 else time.monotonic() + left_s / 2
            if sender is not None and await sender.send_newest(peer, at_least=number, deadline_s=until_s):
                return (peer.agent_id,)
        return ()


def _goals(taker: Peer | None, buddies: Sequence[Peer]) -> list[Peer]:
    """The taker first, then the buddies."""
    found = [] if taker is None else [taker]
    return found + [peer for peer in buddies if taker is None or peer.agent_id != taker.agent_id]
