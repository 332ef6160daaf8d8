"""The two requests of which a fleet makes most, without the framework: the long poll and the heartbeat.

Taken here is only what every agent sends, in the plainest spelling; all else, and whatever is wrong with a request,
is left to the routes of `controller.api`, which answer and document the same. To find the route and to take a request
apart costs a quarter of a millisecond there, and a thousand islands ask for a directive at the same moment.
"""

from __future__ import annotations

import json
import re
from abc import abstractmethod
from collections.abc import Awaitable, Callable
from typing import Any, ClassVar

from pydantic import BaseModel, ValidationError
from starlette.requests import Request
from starlette.routing import BaseRoute, Match
from starlette.types import Message, Receive, Scope, Send

from controller.core import Controller
from controller.death_watch import DeathWatch
from controller.schema import Heartbeat

AGENTS = "/v1/agents/"
MAX_ID = 128
QUERY = {
    b"instance": re.compile(rb"[A-Za-z0-9._:-]{1,64}"),
    b"after": re.compile(rb"[0-9]{1,18}"),
    b"wait_s": re.compile(rb"(?:[0-9]|[12][0-9])(?:\.[0-9]{1,9})?|30(?:\.0)?"),
}
LEFT_ALONE = "wadiloco.left_alone"
"""In the scope of a request that was looked at here and is the framework's."""


def plain_routes(controller: Controller, watch: DeathWatch) -> list[BaseRoute]:
    """To be asked before all others."""
    return [PlainPoll(controller, watch), PlainHeartbeat(controller)]


class PlainRoute(BaseRoute):
    """A request about one agent that is known by its method and the last part of its path."""

    method: ClassVar[str]
    last_part: ClassVar[str]

    def __init__(self, controller: Controller) -> None:
        self._controller = controller
        self.path_format = f"{AGENTS}{{agent_id}}{self.last_part}"

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        if scope["type"] != "http" or scope["method"] != self.method or LEFT_ALONE in scope or scope.get("root_path"):
            return Match.NONE, {}
        path: str = scope["path"]
        if not (path.startswith(AGENTS) and path.endswith(self.last_part)):
            return Match.NONE, {}
        agent_id = path[len(AGENTS) : -len(self.last_part)]
        if not 1 <= len(agent_id) <= MAX_ID:
            return Match.NONE, {}
        read = self.read(scope)
        return (Match.NONE, {}) if read is None else (Match.FULL, {"path_params": {"agent_id": agent_id, **read}})

    @abstractmethod
    def read(self, scope: Scope) -> dict[str, Any] | None:
        """What the request says besides the agent; None for one that is not plain."""


class PlainPoll(PlainRoute):
    """``GET /v1/agents/{agent_id}/directives``."""

    method = "GET"
    last_part = "/directives"

    def __init__(self, controller: Controller, watch: DeathWatch) -> None:
        super().__init__(controller)
        self._watch = watch

    def read(self, scope: Scope) -> dict[str, Any] | None:
        return read_poll(scope["query_string"])

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._controller.check_leads()
        asked = scope["path_params"]
        asking = self._controller.directives(**asked)
        await _answer(send, await self._watch.while_connected(receive, asked["agent_id"], asked["instance"], asking))


class PlainHeartbeat(PlainRoute):
    """``POST /v1/agents/{agent_id}/heartbeat``."""

    method = "POST"
    last_part = "/heartbeat"

    def read(self, scope: Scope) -> dict[str, Any] | None:
        is_json = (b"content-type", b"application/json") in scope["headers"]
        return {} if is_json and not scope["query_string"] else None

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = await Request(scope, receive).body()
        try:
            beat = Heartbeat.model_validate(json.loads(body))
        except (ValueError, ValidationError, RecursionError):
            await _leave(scope, body, receive, send)
            return
        self._controller.check_leads()
        await _answer(send, await self._controller.heartbeat(scope["path_params"]["agent_id"], beat))


def read_poll(query: bytes) -> dict[str, Any] | None:
    """What a poll asks; None where it leaves something out, says it twice, or in another spelling."""
    parts = [part.partition(b"=") for part in query.split(b"&")]
    told = {name: value for name, _, value in parts}
    if len(parts) != len(QUERY) or told.keys() != QUERY.keys():
        return None
    if not all(form.fullmatch(told[name]) for name, form in QUERY.items()):
        return None
    return {
        "instance": told[b"instance"].decode("ascii"),
        "after": int(told[b"after"]),
        "wait_s": float(told[b"wait_s"]),
    }


async def _answer(send: Send, model: BaseModel) -> None:
    body = model.model_dump_json().encode()
    headers = [(b"content-length", str(len(body)).encode("ascii")), (b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def _leave(scope: Scope, body: bytes, receive: Receive, send: Send) -> None:
    """To the framework, which says what is wrong with a body."""
    router: Callable[[Scope, Receive, Send], Awaitable[None]] = scope["app"].router
    await router({**scope, LEFT_ALONE: True}, _after(body, receive), send)


def _after(body: bytes, receive: Receive) -> Receive:
    """As ``receive``, once more from the beginning of the body."""
    first: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive_again() -> Message:
        return first.pop() if first else await receive()

    return receive_again
