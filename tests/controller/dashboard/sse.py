"""A client of the event stream at the ASGI level: it decides when it takes the next piece, and when it goes away."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI

DEADLINE_S = 10.0


@dataclass
class Event:
    name: str
    id: str
    data: dict[str, Any]


@dataclass
class EventClient:
    """What one client has got. While `takes` is cleared its connection is full: the server's next send waits."""

    status: int | None = None
    headers: dict[str, str] = field(default_factory=dict)
    takes: asyncio.Event = field(default_factory=asyncio.Event)
    ended: bool = False
    num_pieces: int = 0
    comments: list[str] = field(default_factory=list)
    _gone: asyncio.Event = field(default_factory=asyncio.Event)
    _asked: bool = False
    _events: asyncio.Queue[Event] = field(default_factory=asyncio.Queue)
    body: bytes = b""

    async def receive(self) -> dict[str, Any]:
        if not self._asked:
            self._asked = True
            return {"type": "http.request", "body": b"", "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        await self.takes.wait()
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = {name.decode(): value.decode() for name, value in message["headers"]}
            return
        self.num_pieces += 1
        self.ended = not message.get("more_body", False)
        self.body += message["body"]
        *whole, self.body = self.body.split(b"\n\n") if self.status == 200 else [self.body]
        for block in whole:
            self._take(block.decode())

    def _take(self, block: str) -> None:
        lines = dict(line.partition(": ")[::2] for line in block.splitlines())
        if "data" in lines:
            self._events.put_nowait(Event(lines["event"], lines["id"], json.loads(lines["data"])))
        elif block.startswith(":"):
            self.comments.append(block)

    def leave(self) -> None:
        self._gone.set()

    async def next(self) -> Event:
        return await asyncio.wait_for(self._events.get(), DEADLINE_S)


@asynccontextmanager
async def following(app: FastAPI, *, headers: dict[str, str] | None = None) -> AsyncIterator[EventClient]:
    """A client of ``GET /v1/events``; it goes away when the block ends."""
    client = EventClient()
    client.takes.set()
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "GET",
        "scheme": "http",
        "path": "/v1/events",
        "raw_path": b"/v1/events",
        "query_string": b"",
        "root_path": "",
        "headers": [(name.lower().encode(), value.encode()) for name, value in (headers or {}).items()],
        "client": ("127.0.0.1", 1),
        "server": ("controller", 80),
    }
    request = asyncio.create_task(app(scope, client.receive, client.send))
    try:
        yield client
    finally:
        client.takes.set()
        client.leave()
        await asyncio.wait_for(request, DEADLINE_S)
