"""One client of the event stream, as an ASGI response that ends with its client, with the process, or at a deadline."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from controller.dashboard.feed import Feed
from controller.dashboard.metrics import EventMetrics

HEARTBEAT_S = 5.0
"""A comment after so long without an event: proxies and clients see that the connection lives."""
SEND_DEADLINE_S = 20.0
"""Who takes nothing for so long has gone, whatever its connection says."""
FAREWELL_S = 0.5
"""What a client gets to take the end of the stream when the process stops."""
RETRY_MS = 1000
"""After which a browser's own ``EventSource`` connects again."""

HEADERS = {
    "Cache-Control": "no-store",
    "X-Accel-Buffering": "no",  # nginx would collect events otherwise
    "X-Content-Type-Options": "nosniff",
}


class EventStream(Response):
    """Events from a position on, or from a snapshot."""

    media_type = "text/event-stream"

    def __init__(self, feed: Feed, metrics: EventMetrics, *, last_event_id: str | None) -> None:
        super().__init__(headers=HEADERS)
        del self.headers["content-length"]
        self._feed = feed
        self._metrics = metrics
        self._position = feed.parse_id(last_event_id)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._feed.num_clients += 1
        self._metrics.clients.set(self._feed.num_clients)
        try:
            await self._race(self._run(send), _until_gone(receive))
        finally:
            self._feed.num_clients -= 1
            self._metrics.clients.set(self._feed.num_clients)

    async def _race(self, run: Coroutine[Any, Any, None], gone: Coroutine[Any, Any, None]) -> None:
        """Until the stream has ended, its client has gone, or the process stops and the client takes no farewell."""
        tasks = [asyncio.ensure_future(run), asyncio.ensure_future(gone), asyncio.ensure_future(self._farewell())]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _farewell(self) -> None:
        await self._feed.closed.wait()
        await asyncio.sleep(FAREWELL_S)

    async def _run(self, send: Send) -> None:
        try:
            await self._begin(send)
            while not self._feed.closed.is_set():
                await self._send_news(send)
            await self._send(send, b"", more=False)
        except TimeoutError:
            self._metrics.dropped.inc()

    async def _begin(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        await self._send(send, f"retry: {RETRY_MS}\n\n".encode())
        if self._position is None or self._feed.after(self._position) is None:
            await self._send_snapshot(send)

    async def _send_news(self, send: Send) -> None:
        assert self._position is not None
        if not await self._feed.wait(self._position, HEARTBEAT_S):
            if not self._feed.closed.is_set():
                await self._send(send, b": heartbeat\n\n")
            return
        events = self._feed.after(self._position)
        if events is None:
            self._metrics.skipped.inc()
            await self._send_snapshot(send)
            return
        for event in events:
            await self._send(send, event.body)
            self._position = event.number

    async def _send_snapshot(self, send: Send) -> None:
        event = self._feed.snapshot()
        await self._send(send, event.body)
        self._position = event.number

    async def _send(self, send: Send, body: bytes, *, more: bool = True) -> None:
        async with asyncio.timeout(SEND_DEADLINE_S):
            await send({"type": "http.response.body", "body": body, "more_body": more})


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
