"""Whether an island with slot and synchronizer of its own goes on without its controller.

How many fragments a new run has is the controller's to say, and cannot be changed later. So an island that comes up
before both waits a while; one that finds a run goes on in it at once.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import httpx
from pydantic import ValidationError

from diloco.agent.config import IslandSettings
from diloco.agent.state import AgentState
from diloco.schema import OuterState
from service.client import client_options
from service.tasks import wait_for_exit

FIRST_WORD_S = 30.0
"""A controller that is started together with its islands has said something by then, on a busy host too."""
POLL_S = 0.5


async def goes_on_alone(
    state: AgentState,
    has_begun: Callable[[], Awaitable[bool]],
    exit_event: asyncio.Event,
    *,
    wait_s: float = FIRST_WORD_S,
) -> bool:
    """True once a run has begun, or nobody has said anything for so long; False when a controller has, or at exit."""
    until_s = time.monotonic() + wait_s
    while not exit_event.is_set() and state.limits_lease is None:
        if await has_begun() or time.monotonic() >= until_s:
            return state.limits_lease is None
        await wait_for_exit(exit_event, POLL_S)
    return False


async def has_run(settings: IslandSettings, url: str) -> bool:
    """Whether the synchronizer there holds a run; one that does not answer holds none."""
    async with httpx.AsyncClient(**client_options(settings, url, timeout_s=settings.request_timeout_s)) as http:
        try:
            answer = await http.get("/v1/state")
            return answer.is_success and OuterState.model_validate_json(answer.content).initialized
        except (httpx.HTTPError, ValidationError):
            return False
