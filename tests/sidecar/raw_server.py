"""A server that says byte for byte what a test wants, over TCP, TLS or a Unix socket."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from tests.sidecar.helpers import TEXT

Answer = Callable[[str, asyncio.StreamWriter], Awaitable[None]]
"""Gets the head of a request; the connection is closed when it returns."""


def response(body: bytes, *, status: str = "200 OK", content_type: str = TEXT, **headers: str) -> bytes:
    fields = {"Content-Type": content_type, "Content-Length": str(len(body)), "Connection": "close"}
    fields |= {name.replace("_", "-"): value for name, value in headers.items()}
    head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    return f"HTTP/1.1 {status}\r\n{head}\r\n".encode() + body


def saying(answer: bytes) -> Answer:
    """Always the same."""

    async def say(_: str, writer: asyncio.StreamWriter) -> None:
        writer.write(answer)
        await writer.drain()

    return say


def redirecting(location: str) -> Answer:
    return saying(response(b"", status="307 Temporary Redirect", Location=location))


class Heads:
    """Always answers the same, and keeps what it was asked."""

    def __init__(self, answer: bytes) -> None:
        self.heads: list[str] = []
        self._answer = answer

    async def __call__(self, head: str, writer: asyncio.StreamWriter) -> None:
        self.heads.append(head)
        await saying(self._answer)(head, writer)

    @property
    def pages(self) -> list[str]:
        return [head for head in self.heads if "/metrics " in head]


@asynccontextmanager
async def raw_server(
    answer: Answer, *, context: ssl.SSLContext | None = None, path: Path | None = None
) -> AsyncIterator[int]:
    """Serve on loopback, or on the Unix socket ``path``; yields the port (0 for a socket)."""
    open_writers: set[asyncio.StreamWriter] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        open_writers.add(writer)
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, ssl.SSLError):
            head = await reader.readuntil(b"\r\n\r\n")
            await answer(head.decode(), writer)
            writer.close()
            await writer.wait_closed()
        open_writers.discard(writer)
        writer.transport.abort()

    if path is None:
        server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
        port: int = server.sockets[0].getsockname()[1]
    else:
        server, port = await asyncio.start_unix_server(serve, path, ssl=context), 0
    try:
        yield port
    finally:
        server.close()
        for writer in open_writers:
            writer.transport.abort()
        await server.wait_closed()
