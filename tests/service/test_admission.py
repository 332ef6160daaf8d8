"""Connections beyond the limit: told so, health still answered, those who are in undisturbed. Over raw sockets."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager

import pytest
import uvicorn
from fastapi import FastAPI
from prometheus_client import CollectorRegistry

from service import admission as admission_module
from service.admission import Admission
from service.app import build_app
from service.bounds import bounded_protocol
from service.server import Server, bind
from service.settings import ServiceSettings
from service.tasks import Background

DEADLINE_S = 20.0
LIMIT = 8


@asynccontextmanager
async def _nothing(_: FastAPI, __: Background) -> AsyncIterator[None]:
    yield


class Probe:
    """A service with a long poll that ends when it is told to."""

    def __init__(self) -> None:
        self.app = build_app(
            ServiceSettings(max_connections=LIMIT),
            lifespan=_nothing,
            registry=CollectorRegistry(),
            readiness=lambda: None,
            description="A probe.",
        )
        self.num_waiting = 0
        self.news = threading.Event()

        @self.app.get("/v1/wait")
        async def wait() -> str:
            self.num_waiting += 1
            while not self.news.is_set():  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            return "news"

        @self.app.get("/v1/echo")
        async def echo() -> str:
            return "echo"

    @property
    def admission(self) -> Admission:
        found = self.app.state.admission
        assert isinstance(found, Admission)
        return found


Connect = Callable[[], socket.socket]


@pytest.fixture
def probe() -> Probe:
    return Probe()


@pytest.fixture(params=[False, True], ids=["h11", "httptools"])
def connect(request: pytest.FixtureRequest, probe: Probe) -> Iterator[Connect]:
    if request.param:
        pytest.importorskip("httptools")
    with bind("127.0.0.1", 0) as listener, contextlib.ExitStack() as opened:
        protocol = bounded_protocol(many_clients=request.param, admission=probe.admission)
        server = Server(uvicorn.Config(probe.app, http=protocol, log_config=None, timeout_graceful_shutdown=1))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        eventually(lambda: server.started, "a start")

        def make() -> socket.socket:
            one = socket.create_connection(listener.getsockname(), timeout=DEADLINE_S)
            return opened.enter_context(one)

        try:
            yield make
        finally:
            probe.news.set()
            server.handle_exit(signal.SIGTERM, None)
            thread.join(DEADLINE_S)


def eventually(condition: Callable[[], bool], what: str) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline_s, f"{what} did not come true"
        time.sleep(0.01)


def ask(one: socket.socket, path: str) -> bytes:
    one.sendall(f"GET {path} HTTP/1.1\r\nHost: a\r\n\r\n".encode())
    return read_answer(one)


def read_answer(one: socket.socket) -> bytes:
    """One whole answer that tells its length."""
    found = b""
    while b"\r\n\r\n" not in found:
        found += (piece := one.recv(1 << 16))
        if not piece:
            return found
    head, _, body = found.partition(b"\r\n\r\n")
    length = next(int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-len"))
    while len(body) < length:
        body += (piece := one.recv(1 << 16))
        assert piece, "the answer broke off"
    return head + b"\r\n\r\n" + body


def is_closed(one: socket.socket) -> bool:
    with contextlib.suppress(ConnectionResetError):
        return one.recv(1) == b""
    return True


def fill(connect: Connect, probe: Probe) -> list[socket.socket]:
    """All connections that there may be: half of them in a long poll, half idle."""
    found = [connect() for _ in range(LIMIT)]
    for one in found[: LIMIT // 2]:
        one.sendall(b"GET /v1/wait HTTP/1.1\r\nHost: a\r\n\r\n")
    eventually(lambda: probe.num_waiting == LIMIT // 2, "long polls")
    for one in found[LIMIT // 2 :]:
        assert ask(one, "/v1/echo").startswith(b"HTTP/1.1 200")
    assert probe.admission.num_served == LIMIT
    return found


def test_one_more_is_told_to_come_back_and_those_who_are_in_are_served(connect: Connect, probe: Probe) -> None:
    held = fill(connect, probe)
    late = connect()
    answer = ask(late, "/v1/echo")
    assert answer.startswith(b"HTTP/1.1 503")
    assert b"retry-after: 5" in answer.lower()
    assert b'"message":"8 connections are open, and no more are served"' in answer
    assert b"max_connections" in answer
    assert is_closed(late)
    assert ask(held[-1], "/v1/echo").startswith(b"HTTP/1.1 200")
    probe.news.set()
    assert read_answer(held[0]).endswith(b'"news"')


def test_health_and_metrics_answer_when_there_is_no_room(connect: Connect, probe: Probe) -> None:
    fill(connect, probe)
    for path in ("/healthz", "/readyz"):
        assert ask(connect(), path).startswith(b"HTTP/1.1 200")
    one = connect()
    assert ask(connect(), "/v1/echo").startswith(b"HTTP/1.1 503")
    told = ask(one, "/metrics").decode()
    assert "wadiloco_service_connections_limit 8.0" in told
    assert "wadiloco_service_connections_refused_total 1.0" in told
    opened = next(line for line in told.splitlines() if line.startswith("wadiloco_service_connections "))
    assert float(opened.split()[1]) > LIMIT


def test_whoever_waits_outside_is_served_once_there_is_room(connect: Connect, probe: Probe) -> None:
    held = fill(connect, probe)
    late = connect()
    assert ask(late, "/healthz").startswith(b"HTTP/1.1 200")
    held.pop().close()
    eventually(lambda: probe.admission.num_served == LIMIT - 1, "room")
    assert ask(late, "/v1/echo").startswith(b"HTTP/1.1 200")
    assert (probe.admission.num_served, probe.admission.num_reserved) == (LIMIT, 0)
    assert ask(late, "/v1/echo").startswith(b"HTTP/1.1 200")
    late.close()
    for one in held:
        one.close()
    probe.news.set()
    eventually(lambda: probe.admission.num_served == 0, "that all are counted out")
    assert probe.admission.num_reserved == 0


def test_beyond_the_reserve_connections_are_closed_at_once(
    connect: Connect, probe: Probe, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission_module, "RESERVE", 1)
    fill(connect, probe)
    reserved = connect()
    eventually(lambda: probe.admission.num_reserved == 1, "the reserve is taken")
    for number in range(3):
        assert is_closed(connect())
        assert probe.admission.num_refused == number + 1
    assert ask(reserved, "/healthz").startswith(b"HTTP/1.1 200")
    reserved.close()
    eventually(lambda: probe.admission.num_reserved == 0, "the reserve is free again")
    assert ask(connect(), "/healthz").startswith(b"HTTP/1.1 200")


def test_who_says_nothing_does_not_keep_health_checks_out(
    connect: Connect, probe: Probe, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("service.bounds.RESERVED_HEAD_S", 0.2)
    monkeypatch.setattr(admission_module, "RESERVE", 2)
    held = fill(connect, probe)
    for silent in [connect(), connect()]:
        assert is_closed(silent)
    eventually(lambda: probe.admission.num_reserved == 0, "the reserve is free again")
    assert ask(connect(), "/healthz").startswith(b"HTTP/1.1 200")
    assert ask(held[-1], "/v1/echo").startswith(b"HTTP/1.1 200")


FIT = """
import resource
from service.admission import fit_open_files
resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard}))
print(fit_open_files({limit}), resource.getrlimit(resource.RLIMIT_NOFILE)[0])
"""


@pytest.mark.parametrize(
    ("soft", "hard", "limit", "expected"),
    [(100, 900, 400, "400 592"), (100, 500, 4096, "308 500"), (700, 900, 400, "400 700"), (64, 64, 100, "1 64")],
    ids=["raised", "not enough", "plenty", "hardly any"],
)
def test_open_files_are_raised_as_far_as_the_system_lets_it(soft: int, hard: int, limit: int, expected: str) -> None:
    command = [sys.executable, "-c", FIT.format(soft=soft, hard=hard, limit=limit)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == expected
