"""Answers of uvicorn in one write: head and body together.

uvicorn writes the head of an answer and its body one after the other, and uvloop gives each to the kernel at once: two
calls, two packets, and a client that wakes up twice. Where a thousand long polls are answered together that is half of
the time until the last one has its answer.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEAD_START = b"HTTP/1."
HEAD_END = b"\r\n\r\n"


class JoiningTransport:
    """A transport that keeps the head of an answer until its body comes, or the event loop goes on without one."""

    def __init__(self, transport: Any, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._head = b""

    def write(self, data: bytes) -> None:
        if self._head:
            data, self._head = self._head + data, b""
        elif data.startswith(HEAD_START) and data.endswith(HEAD_END):
            self._head = data
            self._loop.call_soon(self._flush)  # a stream: its first event may come much later
            return
        self._transport.write(data)

    def _flush(self) -> None:
        if self._head:
            head, self._head = self._head, b""
            self._transport.write(head)

    def close(self) -> None:
        self._flush()
        self._transport.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class JoiningProtocol(HttpToolsProtocol):
    """uvicorn's protocol on such a transport."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(JoiningTransport(transport, self.loop))  # type: ignore[arg-type]
