"""Agents whose process is gone are known at once, not when their lease ends.

A process that ends takes its connections with it: its long poll for directives breaks. That alone says little (a
network may lose a connection), so its address is tried: where it refuses, nothing listens there any more and the agent
is given up. Where it answers, or says nothing for a while, the lease decides, as ever: a slow agent is not a dead one.

An address that refuses proves something only where this very process was reached before. An agent behind a proxy, or
on another host with a loopback address, is never given up by this.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Coroutine
from typing import Any, TypeVar
from urllib.parse import urlsplit

import anyio
import httpx
from starlette.requests import ClientDisconnect
from starlette.types import Receive

from controller.core import Controller
from controller.loop import Loop
from controller.records import AgentRecord
from diloco.schema import AgentStatus
from service.client import client_options
from service.deadline import deadline
from service.errors import UnavailableError, WadilocoError
from service.settings import PeerSettings
from service.tasks import wait_for_exit

logger = logging.getLogger(__name__)

T = TypeVar("T")

PROBE_S = 1.0
"""A host that is there refuses within a round trip."""
PROBES_S = (0.0, 0.02, 0.05, 0.1, 0.2, 0.4, 0.8)
"""Pauses before the attempts: a process that ends closes its sockets one after another, the listening one not first."""
GREETINGS_S = (0.2, 0.5, 1.0, 2.0, 5.0)
"""Pauses before the attempts to reach a new agent: it may register before it listens."""
MAX_GREETED_AT_ONCE = 8


class DeathWatch:
    """Watches the long polls of the agents of one controller."""

    def __init__(self, controller: Controller, loop: Loop, settings: PeerSettings) -> None:
        self._controller = controller
        self._loop = loop
        self._settings = settings
        self._reached: dict[str, str] = {}
        """Agents whose URL led to this process (its instance)."""
        self._greeted: dict[str, str] = {}
        self._polls: dict[str, int] = {}
        """Long polls of each agent so far."""
        self._to_greet: asyncio.Queue[tuple[str, str]] = asyncio.Queue()

    async def while_connected(
        self, receive: Receive, agent_id: str, instance: str, answer: Coroutine[Any, Any, T]
    ) -> T:
        """The answer to a long poll, unless the agent goes away while it waits: then its end is looked into.

        ``receive`` brings the messages of the request, and its end.

        Raises:
            ClientDisconnect: it went away.
        """
        if self._active(agent_id, instance) is None:
            return await answer  # which says why
        self._forget_gone()
        self._polls[agent_id] = self._polls.get(agent_id, 0) + 1
        if self._greeted.get(agent_id) != instance:
            self._greeted[agent_id] = instance
            self._to_greet.put_nowait((agent_id, instance))
        with anyio.CancelScope() as waiting:
            listening = asyncio.create_task(_cancel_at_disconnect(receive, waiting))
            try:
                return await answer
            finally:
                listening.cancel()
        await self._look_into(agent_id, instance)
        raise ClientDisconnect

    def _forget_gone(self) -> None:
        """Keep no more than the registry does: agents come and go under ever new names."""
        known = self._controller.state.registry.records
        if len(self._polls) <= 2 * len(known):
            return
        for told in (self._polls, self._greeted, self._reached):
            for agent_id in [each for each in told if each not in known]:
                del told[agent_id]

    async def greet_new(self, exit_event: asyncio.Event) -> None:
        """Try the URLs of new agents until ``exit_event``, so that a refusal means something later."""
        url = f"http://{self._settings.service}"  # each request has its own
        options = client_options(self._settings, url, timeout_s=PROBE_S)
        async with httpx.AsyncClient(**options) as http, asyncio.TaskGroup() as greeters:
            for _ in range(MAX_GREETED_AT_ONCE):
                greeters.create_task(self._greet_some(http, exit_event))

    async def _greet_some(self, http: httpx.AsyncClient, exit_event: asyncio.Event) -> None:
        ending = asyncio.create_task(exit_event.wait())
        while not exit_event.is_set():
            following = asyncio.create_task(self._to_greet.get())
            await asyncio.wait({following, ending}, return_when=asyncio.FIRST_COMPLETED)
            if not following.done():
                following.cancel()
                return
            await self._greet(*following.result(), http, exit_event)

    async def _greet(self, agent_id: str, instance: str, http: httpx.AsyncClient, exit_event: asyncio.Event) -> None:
        for pause_s in GREETINGS_S:
            agent = self._active(agent_id, instance)
            if await wait_for_exit(exit_event, pause_s) or agent is None or agent.url is None:
                return
            if await _is_there(agent, http):
                self._reached[agent_id] = instance
                return
        logger.info("cannot be reached, its lease alone tells whether it lives agent=%s", agent_id)

    async def _look_into(self, agent_id: str, instance: str) -> None:
        agent = self._active(agent_id, instance)
        if agent is None or agent.url is None or self._reached.get(agent_id) != instance:
            return
        if not await self._is_gone(agent.url, agent_id, instance):
            logger.info("connection lost, and its address does not refuse: it has its lease agent=%s", agent_id)
            return
        agent = self._active(agent_id, instance)  # it may have left in order meanwhile
        if agent is None or not self._controller.leadership.leads:
            return
        logger.warning("process gone agent=%s slot=%s", agent_id, agent.slot)
        self._controller.give_up(agent)
        with contextlib.suppress(UnavailableError):  # the journal tells
            await self._loop.publish()

    async def _is_gone(self, url: str, agent_id: str, instance: str) -> bool:
        polls = self._polls.get(agent_id)
        for pause_s in PROBES_S:
            await asyncio.sleep(pause_s)
            if self._polls.get(agent_id) != polls or self._active(agent_id, instance) is None:
                return False  # it has asked again
            if await refuses(url):
                return True
        return False

    def _active(self, agent_id: str, instance: str) -> AgentRecord | None:
        if not self._controller.has_state:
            return None
        agent = self._controller.state.registry.records.get(agent_id)
        return agent if agent is not None and agent.active and agent.instance == instance else None


async def _cancel_at_disconnect(receive: Receive, waiting: anyio.CancelScope) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    waiting.cancel()


async def _is_there(agent: AgentRecord, http: httpx.AsyncClient) -> bool:
    """Whether this very process answers at the agent's URL."""
    try:
        with deadline(PROBE_S):
            answer = await http.get(f"{agent.url}/v1/status")
        return AgentStatus.model_validate_json(answer.raise_for_status().content).instance == agent.instance
    except (httpx.HTTPError, httpx.InvalidURL, TimeoutError, ValueError, WadilocoError):
        return False


async def refuses(url: str) -> bool:
    """Whether nothing listens there. An address that does not answer in time does not refuse."""
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    try:
        with deadline(PROBE_S):
            _, writer = await asyncio.open_connection(parts.hostname, port)
    except ConnectionRefusedError:
        return True
    except (OSError, TimeoutError):
        return False
    writer.close()
    return False
