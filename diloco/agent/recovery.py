"""What an agent does so that slots outlive their hosts: it keeps replicas for others, has its own state replicated, and
finds the state of a slot that it gets.

The ladder of a slot that comes to this agent: the newest replica that it keeps itself or that another agent has, by the
epoch of whoever sent it and by its step; then the global parameters. A replica becomes the own vault as the file that
it is: nothing is copied.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx

from diloco.agent.config import IslandSettings
from diloco.agent.gate import open_gate
from diloco.agent.replica_fetch import Found, ReplicaFetcher
from diloco.agent.replica_sender import ReplicaSender, Source
from diloco.agent.replica_store import ReplicaStore
from diloco.agent.rules import request_timeout_s
from diloco.agent.state import AgentState
from diloco.agent.vaults import Vaults
from diloco.recovery_schema import ReplicaList
from diloco.vault.layout import Generation
from service.client import client_options
from service.tasks import Background, every

logger = logging.getLogger(__name__)

UNWANTED_S = 10.0
"""For which nobody wants a replica that is given up: a controller that has just started does not know all yet."""
LOOK_S = 0.5
"""Between two looks at what the controller says is to be kept."""


class Recovery:
    """One agent's replicas. Use within `running`."""

    def __init__(self, settings: IslandSettings, state: AgentState, vaults: Vaults) -> None:
        """``vaults`` are those of the own slot."""
        self._settings = settings
        self._state = state
        self._vaults = vaults
        limit_bytes = int(settings.replica_limit_mb * 1e6)
        self.store = ReplicaStore(vaults.directory, owner=settings.identity, limit_bytes=limit_bytes)
        self._unwanted_s: dict[int, float] = {}
        """Slots of which replicas are here that nobody wants, since when."""
        self._sender: ReplicaSender | None = None
        self._http: httpx.AsyncClient | None = None
        state.replicas = self.store.notices

    @asynccontextmanager
    async def running(self, tasks: Background) -> AsyncIterator[None]:
        """Find what was left here, and replicate while the block lasts; then its memory is given back."""
        timeout_s = self._timeout_s
        await asyncio.to_thread(self.store.adopt)
        options = client_options(self._settings, "http://buddy", timeout_s=timeout_s)
        async with httpx.AsyncClient(**options) as http:
            self._http = http
            gate = open_gate(self._settings.gate)
            sender = self._sender = ReplicaSender(http, self._own_vaults, timeout_s=timeout_s, gate=gate)
            tasks.start("replicate", lambda: sender.run(lambda: self._state.buddies, tasks.exit))
            tasks.start("keep replicas", lambda: every(LOOK_S, tasks.exit, self._tidy))
            try:
                yield
            finally:
                self._http = self._sender = None
                self.store.close(remove=True)

    async def obtain(self, slot: int, refused: list[str], *, own: Generation | None) -> Found | None:
        """The newest state of a slot that has just come to this agent, from wherever it is; None where there is none,
        or none that is newer than what the own vault has of it.

        Why something newer cannot be used is added to ``refused``.
        """
        lease, http = self._state.limits_lease, self._http
        if lease is None or lease.slot != slot or http is None:
            return None
        fetcher = ReplicaFetcher(http, self.store, own_id=self._settings.identity, timeout_s=self._timeout_s)
        began_s = time.monotonic()
        found = await fetcher.obtain(
            slot,
            self._settings.ranks,
            lease.replicas,
            epoch=lease.epoch,
            refused=refused,
            better_than=None if own is None else (own.epoch, own.step),
        )
        if found is not None:
            logger.info(
                "state of the slot found slot=%d generation=%d step=%d took_s=%.3f",
                *(slot, found.generation, found.step, time.monotonic() - began_s),
            )
        return found

    @property
    def sender(self) -> ReplicaSender | None:
        """None before and after the block of `running`."""
        return self._sender

    def told(self) -> ReplicaList:
        return ReplicaList(
            replicas=self.store.notices(),
            allocated_bytes=self.store.allocated_bytes,
            limit_bytes=self.store.limit_bytes,
            sent=() if self._sender is None else self._sender.told(),
        )

    @property
    def _timeout_s(self) -> float:
        return request_timeout_s(self._settings.request_timeout_s, self._state.limits_lease)

    def _own_vaults(self) -> Source | None:
        state = self._state
        lease = state.limits_lease  # also while the controller is away: the replicas must not grow old then
        paths = self._vaults.paths
        if lease is None or lease.slot is None or not paths or state.assignment is None:
            return None
        return Source(epoch=lease.epoch, paths=paths)

    async def _tidy(self) -> None:
        state = self._state
        lease = state.lease
        if lease is None:
            return  # whoever lost its lease may be asked for what it keeps as soon as it is back
        self.store.run_id = lease.run_id
        if state.keeps_slots is None:
            return
        now_s = time.monotonic()
        wanted = {*state.keeps_slots, *(() if lease.slot is None else (lease.slot,))}
        unwanted = self.store.slots - wanted
        self._unwanted_s = {slot: self._unwanted_s.get(slot, now_s) for slot in unwanted}
        young = {slot for slot, since_s in self._unwanted_s.items() if now_s - since_s < UNWANTED_S}
        self.store.release(wanted | young)
