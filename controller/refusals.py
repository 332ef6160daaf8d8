"""ASGI middleware that counts answers of 400 and more, whoever gave them: a bound, the token, a schema, the fleet."""

from __future__ import annotations

from prometheus_client import Counter
from starlette.types import ASGIApp, Message, Receive, Scope, Send

FAMILIES = frozenset(
    {
        "agents",
        "budget",
        "control",
        "decisions",
        "events",
        "experiments",
        "export",
        "fleet",
        "headroom",
        "history",
        "islands",
        "policy",
        "recoveries",
        "rounds",
        "samples",
        "shadow",
        "store",
    }
)
"""What may follow ``/v1/``; anything else is ``other``, so that nobody makes up labels."""


class CountRefusals:
    def __init__(self, app: ASGIApp, *, refusals: Counter) -> None:
        self._app = app
        self._refusals = refusals

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def counting_send(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] >= 400:
                self._refusals.labels(_family_of(scope["path"]), message["status"]).inc()
            await send(message)

        await self._app(scope, receive, counting_send)


def _family_of(path: str) -> str:
    first = path.removeprefix("/v1/").partition("/")[0]
    return first if path.startswith("/v1/") and first in FAMILIES else "other"
