"""Serving: clear errors on an address that cannot be had."""

from __future__ import annotations

import asyncio
import socket

import pytest

from service.errors import ConfigError, ConflictError
from service.server import bind


def test_a_taken_port_is_named_with_the_remedy() -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        with pytest.raises(ConflictError, match=rf"{port} on 127\.0\.0\.1 is in use .*--port"):
            bind("127.0.0.1", port)


def test_answers_are_sent_without_delay() -> None:
    """What asyncio asks of a connection before it turns Nagle's algorithm off."""

    async def serve_one(listener: socket.socket) -> int:
        delayed: asyncio.Queue[int] = asyncio.Queue()

        def note(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            delayed.put_nowait(writer.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            writer.close()

        async with await asyncio.start_server(note, sock=listener):
            _, writer = await asyncio.open_connection(*listener.getsockname()[:2])
            found = await delayed.get()
            writer.close()
        return found

    with bind("127.0.0.1", 0) as listener:
        assert asyncio.run(serve_one(listener)) != 0


def test_a_foreign_address_is_named() -> None:
    with pytest.raises(ConfigError, match=r"host: cannot listen on 192\.0\.2\.1"):
        bind("192.0.2.1", 0)
