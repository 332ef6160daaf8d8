"""A completion server on loopback whose behaviour is scripted by the ``max_tokens`` of each request."""

import asyncio
import contextlib
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any

import pytest

MODELS = {"object": "list", "data": [{"id": "tiny", "object": "model", "max_model_len": 1024}]}


@dataclass(frozen=True)
class Script:
    """How the server answers."""

    first_delay_s: float = 0.0
    gap_s: float = 0.0
    together: bool = False
    """All events in one write."""
    hang_after: int | None = None
    """Tokens after which nothing more is sent, nor the connection closed."""
    cut_after: int | None = None
    """Tokens after which the connection is aborted."""
    error_after: int | None = None
    """Tokens after which an error event comes."""
    status: int = 200
    raw: bytes | None = None
    """Sent instead of an answer, then the connection is closed."""
    close_after: bool = False
    """Close after an answer that promised to keep the connection."""
    drop_second: bool = False
    """Close without an answer when it is not the first request of its connection."""
    without_done: bool = False
    without_usage: bool = False


@dataclass
class FakeServer:
    scripts: dict[int, Script] = field(default_factory=dict)
    """max_tokens → script; an ordinary answer by default."""
    models: tuple[int, bytes] = (200, json.dumps(MODELS).encode())
    hold: asyncio.Event | None = None
    """Answers wait for it."""
    url: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    heads: list[bytes] = field(default_factory=list)
    arrived: Counter[int] = field(default_factory=Counter)
    """max_tokens → requests."""
    num_connections: int = 0
    num_closed: int = 0
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def until(self, condition: Callable[[], bool], *, deadline_s: float = 5.0) -> None:
        async with asyncio.timeout(deadline_s), self.changed:
            await self.changed.wait_for(condition)

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            number = 0
            while await self._answer_one(reader, writer, number):
                number += 1
        writer.close()
        self.num_closed += 1
        await self._notify()

    async def _notify(self) -> None:
        async with self.changed:
            self.changed.notify_all()

    async def _answer_one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int) -> bool:
        head = await reader.readuntil(b"\r\n\r\n")
        self.heads.append(head)
        if head.startswith(b"GET"):
            status, body = self.models
            writer.write(b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n%b" % (status, len(body), body))
            return True
        length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0])
        body = json.loads(await reader.readexactly(length))
        self.bodies.append(body)
        num_tokens: int = body["max_tokens"]
        self.arrived[num_tokens] += 1
        await self._notify()
        if self.hold is not None:
            await self.hold.wait()
        return await self._play(self.scripts.get(num_tokens, Script()), reader, writer, num_tokens, number)

    async def _play(
        self, script: Script, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, num_tokens: int, number: int
    ) -> bool:
        if script.raw is not None or (script.drop_second and number):
            writer.write(script.raw or b"")
            return False
        if script.status != 200:
            body = json.dumps({"error": {"message": f"scripted {script.status}"}}).encode()
            writer.write(b"HTTP/1.1 %d No\r\nContent-Length: %d\r\n\r\n%b" % (script.status, len(body), body))
            return True
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        await asyncio.sleep(script.first_delay_s)
        if script.together:
            writer.write(chunk(b"".join(token_event() for _ in range(num_tokens))))
        else:
            for sent in range(num_tokens):
                if script.hang_after == sent:
                    await reader.read()
                    return False
                if script.cut_after == sent:
                    writer.transport.abort()
                    return False
                if script.error_after == sent:
                    writer.write(chunk(b'data: {"error": {"message": "engine died"}}\n\n'))
                    break
                await asyncio.sleep(script.gap_s if sent else 0)
                writer.write(chunk(token_event()))
        writer.write(chunk(ending(num_tokens, script)) + b"0\r\n\r\n")
        await writer.drain()
        return not script.close_after


def token_event() -> bytes:
    return b'data: {"id":"c","choices":[{"index":0,"text":"","finish_reason":null}]}\n\n'


def ending(num_tokens: int, script: Script) -> bytes:
    usage = json.dumps({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": num_tokens}})
    events = b"" if script.without_usage else b"data: " + usage.encode() + b"\n\n"
    return events + (b": bye\n\n" if script.without_done else b"data: [DONE]\n\n")


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


@contextlib.asynccontextmanager
async def _serve(**options: Any) -> AsyncIterator[FakeServer]:
    fake = FakeServer(**options)
    server = await asyncio.start_server(fake.handle, "127.0.0.1", 0)
    fake.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield fake
    finally:
        if fake.hold is not None:
            fake.hold.set()
        server.close()
        # Connections are closed by their clients; one that is not shows as a leaked one here.
        await fake.until(lambda: fake.num_closed == fake.num_connections)


@pytest.fixture
def completion_server() -> Callable[..., AbstractAsyncContextManager[FakeServer]]:
    """``async with completion_server(scripts={max_tokens: Script(…)}) as fake``."""
    return _serve


@pytest.fixture
def script() -> type[Script]:
    return Script
