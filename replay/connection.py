"""Connections to one completion server: kept open between requests, one request at a time on each.

On asyncio's protocols, so that the time of a token is taken in the callback that reads its bytes.
"""

from __future__ import annotations

import asyncio
import ssl
import time

from replay.completion_stream import MAX_ERROR_BYTES, CompletionStream
from replay.endpoint import Endpoint
from replay.http1 import HttpFormatError, ResponseDecoder

IDLE_LIMIT_S = 3.0
"""vLLM closes a connection after 5 idle seconds; a request that meets that close would have to be sent twice."""


class ConnectFailedError(Exception):
    """No connection could be made."""


class ConnectionBrokenError(Exception):
    """The connection ended before the answer did, or carried something else than HTTP."""


class Exchange:
    """One request and its answer so far; survives whatever ends it."""

    __slots__ = ("decoder", "error_body", "stream")

    def __init__(self) -> None:
        self.decoder = ResponseDecoder()
        self.stream = CompletionStream()
        self.error_body = b""

    def feed(self, data: bytes, at_s: float) -> None:
        body = self.decoder.feed(data)
        if self.decoder.status == 200:
            self.stream.feed(body, at_s)
        elif len(self.error_body) < MAX_ERROR_BYTES:
            self.error_body += body


class Connection(asyncio.Protocol):
    """One connection."""

    def __init__(self) -> None:
        self.idle_since_s = 0.0
        self._transport: asyncio.Transport | None = None
        self._exchange: Exchange | None = None
        self._ended: asyncio.Future[None] | None = None

    async def run(self, payload: bytes, exchange: Exchange) -> None:
        """Send the request and wait for the end of the answer.

        Raises:
            ConnectionBrokenError: it ended early.
        """
        if self._transport is None or self._transport.is_closing():
            raise ConnectionBrokenError("closed by the server")
        self._exchange = exchange
        self._ended = asyncio.get_running_loop().create_future()
        self._transport.write(payload)
        try:
            await self._ended
        finally:
            self._exchange = None
            self.idle_since_s = time.monotonic()

    @property
    def reusable(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        at_s = time.monotonic()
        exchange = self._exchange
        if exchange is None:
            # Nothing was asked: what comes now would be taken for the next answer.
            self.abort()
            return
        try:
            exchange.feed(data, at_s)
        except HttpFormatError as exc:
            self.abort()
            self._end(ConnectionBrokenError(str(exc)))
            return
        if exchange.decoder.complete:
            if not exchange.decoder.keep_alive:
                self.abort()
            self._end(None)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if self._exchange is None:
            return
        self._exchange.decoder.end_of_input()
        if self._exchange.decoder.complete:
            self._end(None)
        else:
            self._end(ConnectionBrokenError(f"connection ended before the answer did: {exc or 'closed by the server'}"))

    def _end(self, error: ConnectionBrokenError | None) -> None:
        if self._ended is None or self._ended.done():
            return
        if error is None:
            self._ended.set_result(None)
        else:
            self._ended.set_exception(error)


class ConnectionPool:
    """As many connections as there are requests in flight: an open loop must not queue on its own side."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._tls = ssl.create_default_context() if endpoint.tls else None
        self._idle: list[Connection] = []

    async def run(self, payload: bytes, exchange: Exchange) -> None:
        """One request on an idle or new connection.

        Raises:
            ConnectFailedError, ConnectionBrokenError
        """
        connection = self._take_idle()
        if connection is not None:
            try:
                await self._run_on(connection, payload, exchange)
            except ConnectionBrokenError:
                # The server closed it just then, before it saw the request: that is not an answer.
                if not exchange.decoder.untouched:
                    raise
            else:
                return
        await self._run_on(await self._connect(), payload, exchange)

    def close(self) -> None:
        for connection in self._idle:
            connection.abort()
        self._idle.clear()

    def _take_idle(self) -> Connection | None:
        oldest_s = time.monotonic() - IDLE_LIMIT_S
        while self._idle:
            connection = self._idle.pop()
            if connection.reusable and connection.idle_since_s >= oldest_s:
                return connection
            connection.abort()
        return None

    async def _run_on(self, connection: Connection, payload: bytes, exchange: Exchange) -> None:
        try:
            await connection.run(payload, exchange)
        except BaseException:
            # Time-out or cancellation: the server learns from the close that nobody waits for the rest.
            connection.abort()
            raise
        if connection.reusable:
            self._idle.append(connection)

    async def _connect(self) -> Connection:
        loop = asyncio.get_running_loop()
        try:
            _, connection = await loop.create_connection(
                Connection, self._endpoint.host, self._endpoint.port, ssl=self._tls
            )
        except OSError as exc:
            raise ConnectFailedError(f"cannot connect to {self._endpoint.url}: {exc.strerror or exc}") from exc
        return connection
