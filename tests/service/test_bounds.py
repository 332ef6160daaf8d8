"""Clients that send half a request, or do not read, hold nothing for long. Over raw sockets."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager

import pytest
import uvicorn
from fastapi import FastAPI
from fastapi.responses import StreamingResponse
from prometheus_client import CollectorRegistry

from service import app as app_module
from service import bounds
from service.app import build_app
from service.bounds import Bounds, bounded_protocol
from service.server import Server, bind
from service.settings import ServiceSettings
from service.tasks import Background

DEADLINE_S = 20.0
ENDLESS = b"x" * (1 << 20)


class Probe:
    """An application that counts the answers that go on."""

    def __init__(self) -> None:
        self.num_streams = 0
        self.app = build_app(
            ServiceSettings(),
            lifespan=_nothing,
            registry=CollectorRegistry(),
            readiness=lambda: None,
            description="A probe.",
        )

        @self.app.get("/endless")
        async def endless() -> StreamingResponse:
            return StreamingResponse(self._pieces())

        @self.app.post("/v1/echo")
        async def echo(body: dict[str, int]) -> dict[str, int]:
            return body

    async def _pieces(self) -> AsyncIterator[bytes]:
        self.num_streams += 1
        try:
            while True:
                yield ENDLESS
                await asyncio.sleep(0)
        finally:
            self.num_streams -= 1


@asynccontextmanager
async def _nothing(_: FastAPI, __: Background) -> AsyncIterator[None]:
    yield


Connect = Callable[[], socket.socket]


@pytest.fixture
def probe() -> Probe:
    return Probe()


@pytest.fixture(params=[False, True], ids=["h11", "httptools"])
def connect(request: pytest.FixtureRequest, probe: Probe, monkeypatch: pytest.MonkeyPatch) -> Iterator[Connect]:
    if request.param:
        pytest.importorskip("httptools")
    for module, name in ((bounds, "HEAD_DEADLINE_S"), (bounds, "STALLED_S"), (app_module, "BODY_IDLE_S")):
        monkeypatch.setattr(module, name, 0.3)
    with bind("127.0.0.1", 0) as listener, contextlib.ExitStack() as opened:
        config = uvicorn.Config(
            probe.app, http=bounded_protocol(many_clients=request.param), log_config=None, timeout_graceful_shutdown=1
        )
        server = Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        eventually(lambda: server.started, "a start")

        def make() -> socket.socket:
            one = socket.create_connection(listener.getsockname(), timeout=DEADLINE_S)
            return opened.enter_context(one)

        try:
            yield make
        finally:
            server.handle_exit(signal.SIGTERM, None)
            thread.join(DEADLINE_S)


def eventually(condition: Callable[[], bool], what: str) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline_s, f"{what} did not come true"
        time.sleep(0.01)


def read_all(one: socket.socket) -> bytes:
    """Until the other side ends; in order or not."""
    found = b""
    with contextlib.suppress(ConnectionResetError):
        while piece := one.recv(1 << 16):
            found += piece
    return found


HEALTH = b"GET /readyz HTTP/1.1\r\nHost: a\r\n\r\n"


@pytest.mark.parametrize("sent", [b"", b"GET /re", b"GET /readyz HTTP/1.1\r\nHost: a\r\n"])
def test_half_a_head_is_not_waited_for(connect: Connect, sent: bytes) -> None:
    one = connect()
    one.sendall(sent)
    assert read_all(one) == b""


def test_half_a_head_after_a_whole_request_is_not_waited_for_either(connect: Connect) -> None:
    one = connect()
    one.sendall(HEALTH)
    assert one.recv(1 << 16).startswith(b"HTTP/1.1 200")
    one.sendall(HEALTH[:10])
    assert b"HTTP/1.1" not in read_all(one)


def test_a_body_that_stops_in_the_middle_is_answered(connect: Connect) -> None:
    one = connect()
    head = b"POST /v1/echo HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n"
    one.sendall(head + b'{"a"')
    answer = read_all(one)
    assert answer.startswith(b"HTTP/1.1 408")
    assert b'"field":"body"' in answer


def test_clients_that_do_not_read_hold_no_answer(connect: Connect, probe: Probe) -> None:
    deaf = [connect() for _ in range(4)]
    for one in deaf:
        one.sendall(b"GET /endless HTTP/1.1\r\nHost: a\r\n\r\n")
    eventually(lambda: probe.num_streams > 0, "answers that go on")
    for one in deaf:
        assert one.recv(12) == b"HTTP/1.1 200"
    eventually(lambda: probe.num_streams == 0, "the end of what nobody reads")
    one = connect()
    one.sendall(HEALTH)
    assert one.recv(1 << 16).startswith(b"HTTP/1.1 200")


class Plain(asyncio.Protocol):
    """What uvicorn's protocols have that matters here."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self.cycle = None


class Watched(Bounds, Plain):
    """A connection without a server."""


class Pipe(asyncio.Transport):
    """A transport whose buffer a test fills."""

    def __init__(self, connection: socket.socket | None = None) -> None:
        super().__init__({"socket": connection})
        self.left = 100
        self.aborted = False

    def get_write_buffer_size(self) -> int:
        return self.left

    def is_closing(self) -> bool:
        return self.aborted

    def abort(self) -> None:
        self.aborted = True


def test_a_client_that_reads_slowly_is_served_on(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body() -> None:
        pipe, connection = Pipe(), Watched()
        connection.connection_made(pipe)
        monkeypatch.setattr(bounds, "STALLED_S", 1000.0)  # only the test says when it is over
        connection.pause_writing()
        for left in (90, 50, 49):
            before, pipe.left = pipe.left, left
            assert connection._stall_timer is not None
            connection._stall_timer.cancel()
            connection._writes_overdue(before, None)
            assert not pipe.aborted
        connection.resume_writing()
        assert connection._stall_timer is None
        connection._writes_overdue(49, None)
        assert pipe.aborted
        connection.connection_lost(None)

    asyncio.run(body())


@pytest.mark.skipif(not hasattr(socket, "TCP_INFO"), reason="only Linux tells what was acknowledged")
def test_a_buffer_that_stays_is_no_stall_while_the_other_side_takes_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounds, "STALLED_S", 1000.0)

    async def body(one: socket.socket, other: socket.socket) -> None:
        pipe, connection = Pipe(one), Watched()
        connection.connection_made(pipe)
        before = bounds._taken_bytes(pipe)
        if before is None:
            pytest.skip("this kernel does not tell what was acknowledged")
        one.sendall(b"x" * 1000)
        assert len(other.recv(1000, socket.MSG_WAITALL)) == 1000
        while bounds._taken_bytes(pipe) == before:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        connection._writes_overdue(pipe.left, before)
        assert not pipe.aborted
        connection._writes_overdue(pipe.left, bounds._taken_bytes(pipe))
        assert pipe.aborted
        connection.connection_lost(None)

    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()) as one,
        listener.accept()[0] as other,
    ):
        asyncio.run(body(one, other))
