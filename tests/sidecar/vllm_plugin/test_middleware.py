"""The middleware as ASGI sees it: every way in which a request can end takes its count back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sidecar.vllm_plugin.gate_reader import GateReader
from sidecar.vllm_plugin.identity import DIRECTORY_VARIABLE
from sidecar.vllm_plugin.middleware import InFlightMiddleware, Message, Receive, Send

COMPLETIONS = {"type": "http", "method": "POST", "path": "/v1/completions"}


class Counted:
    """The middleware around an application, and what the gate says while it runs."""

    def __init__(self, directory: Path, app: Callable[..., Any]) -> None:
        self._reader = GateReader(directory)
        self.during: int | None = None
        self.sent: list[Message] = []

        async def observed(scope: Message, receive: Receive, send: Send) -> None:
            self.during = self.in_flight
            await app(scope, receive, send)

        self.middleware = InFlightMiddleware(observed)

    @property
    def in_flight(self) -> int | None:
        return self._reader.read(asyncio.get_running_loop().time()).in_flight

    async def call(self, scope: Message) -> None:
        async def receive() -> Message:
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            self.sent.append(message)

        await self.middleware(scope, receive, send)


@pytest.fixture
def counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[..., Any]], Counted]:
    monkeypatch.setenv(DIRECTORY_VARIABLE, str(tmp_path))
    return lambda app: Counted(tmp_path, app)


async def streams(_scope: Message, _receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    for _ in range(3):
        await send({"type": "http.response.body", "body": b"token", "more_body": True})
    await send({"type": "http.response.body", "body": b""})


async def fails(_scope: Message, _receive: Receive, _send: Send) -> None:
    raise RuntimeError("engine died")


async def breaks_off(_scope: Message, _receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"token", "more_body": True})


Make = Callable[[Callable[..., Any]], Counted]


def test_a_stream_counts_until_its_last_byte(counted: Make) -> None:
    async def run() -> None:
        app = counted(streams)
        await app.call(dict(COMPLETIONS))
        assert (app.during, app.in_flight, len(app.sent)) == (1, 0, 5)

    asyncio.run(run())


def test_background_work_after_the_last_byte_does_not_count(counted: Make) -> None:
    async def run() -> None:
        after: list[int | None] = []

        async def lingers(scope: Message, receive: Receive, send: Send) -> None:
            await streams(scope, receive, send)
            after.append(app.in_flight)

        app = counted(lingers)
        await app.call(dict(COMPLETIONS))
        assert (after, app.in_flight) == ([0], 0)

    asyncio.run(run())


def test_an_error_passes_through_and_takes_its_count_back(counted: Make) -> None:
    async def run() -> None:
        app = counted(fails)
        with pytest.raises(RuntimeError, match="engine died"):
            await app.call(dict(COMPLETIONS))
        assert (app.during, app.in_flight) == (1, 0)

    asyncio.run(run())


def test_an_answer_that_breaks_off_takes_its_count_back(counted: Make) -> None:
    async def run() -> None:
        app = counted(breaks_off)
        await app.call(dict(COMPLETIONS))
        assert (app.during, app.in_flight) == (1, 0)

    asyncio.run(run())


def test_a_cancelled_request_takes_its_count_back(counted: Make) -> None:
    async def run() -> None:
        arrived = asyncio.Semaphore(0)

        async def hangs(_scope: Message, _receive: Receive, _send: Send) -> None:
            arrived.release()
            await asyncio.Event().wait()

        app = counted(hangs)
        tasks = [asyncio.create_task(app.call(dict(COMPLETIONS))) for _ in range(3)]
        for _ in tasks:
            await arrived.acquire()
        assert app.in_flight == 3
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert app.in_flight == 0

    asyncio.run(run())


@pytest.mark.parametrize(
    ("scope", "counts"),
    [
        (COMPLETIONS, True),
        (COMPLETIONS | {"path": "/v1/chat/completions"}, True),
        (COMPLETIONS | {"path": "/prefix/v1/chat/completions/"}, True),
        (COMPLETIONS | {"path": "/v1/an/endpoint/of/tomorrow"}, True),
        (COMPLETIONS | {"path": "/tokenize"}, False),
        (COMPLETIONS | {"path": "/v1/chat/completions/render"}, False),
        (COMPLETIONS | {"path": "/sleep"}, False),
        (COMPLETIONS | {"method": "GET", "path": "/metrics"}, False),
        ({"type": "lifespan"}, False),
        ({"type": "websocket", "path": "/v1/realtime"}, False),
        ({"type": "http"}, False),
    ],
)
def test_what_generates_counts(counted: Make, scope: Message, counts: bool) -> None:
    async def run() -> None:
        app = counted(streams)
        await app.call(dict(scope))
        assert app.during == (1 if counts else 0)
        assert app.in_flight == 0

    asyncio.run(run())


def test_without_a_folder_requests_are_served_as_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    for folder in (str(tmp_path / "file" / "gate"), "off"):
        monkeypatch.setenv(DIRECTORY_VARIABLE, folder)
        sent: list[Message] = []

        async def run(sent: list[Message] = sent) -> None:
            async def send(message: Message) -> None:
                sent.append(message)

            async def receive() -> Message:
                return {"type": "http.disconnect"}

            await InFlightMiddleware(streams)(dict(COMPLETIONS), receive, send)

        asyncio.run(run())
        assert len(sent) == 5
